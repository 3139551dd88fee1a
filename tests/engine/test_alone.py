"""stamp_core by itself: its wheel, and no package but those that its pyproject.toml names."""

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from stamp_core.core.paths import ROOT

SETTING = """
mine:
  data: {{source: npz, file: {folder}/images.npz}}
  split: {{kind: classes, clients: 2, tasks: 2, classes_per_task: 2}}
  network: {{kind: mlp, features: 8}}
  training: {{rounds: 2, epochs: 1, batch_size: 8, lr: 0.1}}
"""
SCRIPT = """
import sys
from stamp_core import load_experiment, train

experiment = load_experiment("mine", "stamp")
record = train(experiment, experiment.plans("0"), device="cpu")[0]
print(len(record.history), record.history[-1]["notes"]["temporal gradient count"])
print(*{"workbench", "matplotlib", "pandas", "seaborn", "sklearn", "dvc"} & {*sys.modules})
try:
    load_experiment("mine", "gem")
except ValueError as error:
    print(error)
"""


def needed(requirements: list[str], extras: tuple[str, ...], found: set[str]) -> set[str]:
    """`found` with the installed packages of some requirements, and all that these need."""
    for text in requirements:
        requirement = Requirement(text)
        markers = [{"extra": extra} for extra in (*extras, "")]
        if requirement.marker and not any(map(requirement.marker.evaluate, markers)):
            continue
        try:
            package = distribution(requirement.name)
        except PackageNotFoundError:  # as of torch's CUDA libraries with a build for CPUs
            continue
        if package.name not in found:
            found.add(package.name)
            needed(package.requires or [], tuple(requirement.extras), found)
    return found


def link(package: str, site: Path) -> None:
    for file in distribution(package).files or ():
        top = file.parts[0]
        if top != ".." and not (site / top).exists():
            (site / top).symlink_to(Path(str(distribution(package).locate_file(top))))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    build, site = (tmp_path_factory.mktemp(name) for name in ("build", "site"))
    listed = ["git", "ls-files", "stamp_core", "params*", "setup.py", "*.toml", "README*", "LIC*"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in files.stdout.splitlines():
        if (ROOT / name).exists():
            (build / name).parent.mkdir(parents=True, exist_ok=True)
            (build / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(build)], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package in needed(project["dependencies"], (), set()):
        link(package, site)
    return site


def output(script: str, site: Path, folder: Path) -> list[str]:
    """The lines that a script prints in a folder, with the packages of `site` alone."""
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", f"import sys; sys.path[:0] = [{str(site)!r}]\n{script}"],
        cwd=folder,
        env={"STAMP_PROGRESS": "none"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_stamp_is_trained_and_a_method_of_the_workbench_is_refused(site, tmp_path):
    """On random images, in a folder of one's own; the presets are those in the wheel."""
    draw = np.random.default_rng(0)
    x, y = draw.integers(256, size=(80, 8, 8), dtype=np.uint8), np.arange(80) % 4
    np.savez(tmp_path / "images.npz", x_train=x, y_train=y, x_test=x[:40], y_test=y[:40])
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "settings.yaml").write_text(SETTING.format(folder=tmp_path))
    trained, others, refused = output(SCRIPT, site, tmp_path)
    assert trained == "4 2.0" and others == ""
    assert "gem" in refused and "workbench, which is not installed: pip install" in refused


def test_an_empty_folder_has_the_parameters_of_the_wheel(site, tmp_path):
    script = """
from stamp_core.config.params import read_params
from stamp_core.core import paths

print(paths.DATA, "tiny" in read_params()["settings"])
"""
    assert output(script, site, tmp_path) == [f"{tmp_path / 'data'} True"]
