"""Each `make` command of the README that trains, as printed, as far as its first training.

`make tour` is not among them: test_readme.py runs all of it.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess

import psutil
import pytest
from processes import gone, wait_until
from project import ignored

from stamp_core.core.paths import ROOT

TEXT = (ROOT / "README.md").read_text("utf-8")
TRAINING = r"make (?:repro|cifar100|protocols|privacy|studies|paper SETTING=\w+)"
CHOSEN = r"^make paper SETTING=\w+ METHOD=.*"
PAGE = (ROOT / "docs/pipeline.md").read_text("utf-8")
COMMANDS = sorted({*re.findall(TRAINING, TEXT), *re.findall(CHOSEN, PAGE, re.M)})
WEIGHTS = ROOT / ".venv-pretrained"  # most machines do not have it: `make test-pretrained` makes it


SOURCE = '''
"""Random images in the place of CIFAR-100."""

from dataclasses import dataclass

import numpy as np

from stamp_core.data.images import Counts, ImageArrays

PACKAGES = ("numpy",)
IMAGES = 60000


@dataclass(frozen=True)
class Options:
    """There are none."""


def expected(options):
    return Counts((3, 32, 32), np.full((1, 100), 500), np.full((1, 100), 100), ("all",))


def make(options):
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (IMAGES, 3, 32, 32), np.uint8)
    y, test = np.arange(IMAGES) % 100, IMAGES // 6 // 100 * 100
    return ImageArrays(x[test:], y[test:], x[:test], y[:test], tuple(map(str, range(100))))
'''


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    root = tmp_path_factory.mktemp("commands") / "project"
    shutil.copytree(ROOT, root, ignore=ignored)
    (root / ".venv").symlink_to(ROOT / ".venv")
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    sets = root / "stamp_core" / "data" / "sources" / "__init__.py"
    sets.write_text(sets.read_text().replace('"cifar100", ', ""))
    (root / "workbench" / "sources" / "cifar100.py").write_text(SOURCE)
    return root


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_comes_to_its_first_training(clone, command):
    come_to_a_training(clone, command)


@pytest.mark.skipif(not WEIGHTS.exists(), reason="`make test-pretrained` installs the weights")
def test_features_are_encoded_and_come_to_their_first_training(clone):
    """Of six images a class, one of them for testing: to encode all takes ten minutes."""
    assert "`make pretrained`" in TEXT
    settings = clone / "params" / "settings.yaml"  # DVC may begin with either setting
    settings.write_text(settings.read_text().replace("images_per_class: 50", "images_per_class: 5"))
    source = clone / "workbench" / "sources" / "cifar100.py"
    source.write_text(SOURCE.replace("IMAGES = 60000", "IMAGES = 600"))
    (clone / WEIGHTS.name).symlink_to(WEIGHTS)
    come_to_a_training(clone, "make pretrained")


def come_to_a_training(clone, command):
    environment = {"HOME": str(clone.parent), "PATH": os.defpath, "PYTHONPATH": str(clone)}
    started = clone / "data" / "resume"
    shutil.rmtree(started, ignore_errors=True)
    (clone / ".dvc/tmp/rwlock").unlink(missing_ok=True)  # of the command before, which was killed
    with (clone / "output").open("w") as output:
        make = subprocess.Popen(
            shlex.split(command), cwd=clone, env=environment, stdout=output, stderr=output
        )
        try:
            wait_until(lambda: make.poll() is not None or any(started.glob("*")), command, 600)
            assert make.poll() is None, (clone / "output").read_text()[-3000:]
        finally:  # a training that went on would slow all other tests
            end(make)


def end(make):
    """Kill a command, if it still runs, with all that it started."""
    if make.poll() is None:
        processes = psutil.Process(make.pid).children(recursive=True)
        for process in (make, *processes):
            process.send_signal(signal.SIGKILL)
        make.wait()
        wait_until(lambda: all(map(gone, processes)), "the end of all that it started")
