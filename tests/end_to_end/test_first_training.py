"""Each `make` command of the README that trains, as printed, as far as its first training."""

import os
import re
import shutil
import signal
import subprocess

import numpy as np
import psutil
import pytest
from processes import gone, wait_until
from project import ignored
from ruamel.yaml import YAML

from stamp_core.core.paths import ROOT

TEXT = (ROOT / "README.md").read_text("utf-8")
TRAINING = r"make (?:tour|repro|cifar100|protocols|privacy|studies|paper SETTING=\w+)"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The project with its own parameters; random images stand in for CIFAR-100."""
    root = tmp_path_factory.mktemp("commands") / "project"
    shutil.copytree(ROOT, root, ignore=ignored)
    (root / ".venv").symlink_to(ROOT / ".venv")
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    draw = np.random.default_rng(0)
    arrays = {}
    for subset, count in (("train", 2000), ("test", 500)):
        arrays[f"x_{subset}"] = draw.integers(0, 256, (count, 3, 32, 32), np.uint8)
        arrays[f"y_{subset}"] = np.arange(count) % 100
    np.savez(root / "data" / "photographs.npz", **arrays)
    file = root / "params" / "settings.yaml"
    settings = YAML().load(file)
    for setting in settings.values():
        if setting.get("data", {}).get("source") == "cifar100":
            data = {"source": "npz", "file": str(root / "data" / "photographs.npz")}
            setting["data"] = data
    YAML().dump(settings, file)
    return root


@pytest.mark.parametrize("command", sorted({*re.findall(TRAINING, TEXT)}))
def test_a_command_comes_to_its_first_training(clone, command):
    environment = {"HOME": str(clone.parent), "PATH": os.defpath, "OMP_NUM_THREADS": "1"}
    started = clone / "data" / "resume"
    shutil.rmtree(started, ignore_errors=True)
    with (clone / "output").open("w") as output:
        make = subprocess.Popen(
            command.split(), cwd=clone, env=environment, stdout=output, stderr=output
        )
        wait_until(lambda: make.poll() is not None or any(started.glob("*")), command, 240)
        assert make.poll() is None, (clone / "output").read_text()[-3000:]
        processes = psutil.Process(make.pid).children(recursive=True)
        for process in (psutil.Process(make.pid), *processes):
            process.send_signal(signal.SIGKILL)
        make.wait()
    wait_until(lambda: all(map(gone, processes)), "the end of all that it started")
