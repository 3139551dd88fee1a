"""The real pipeline, DVC and papermill and all, on the tiny grid in a copy of the project.

The tests run in the order in which they stand and go on from what the one before has left.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from ruamel.yaml import YAML

from stamp_core import records
from stamp_core.paths import ROOT

OURS = {".git", ".venv", "cache", "tmp", "__pycache__", ".hypothesis", ".ipynb_checkpoints"}
COMPUTED = {"source", "splits", "runs", "sweeps", "budgets", "alphas", "tiny", "resume", "raw"}
GRID = {"setting": ["tiny"], "method": ["fedavg", "replay", "stamp"], "seeds": ["0to1"]}
ABLATION = {
    "setting": ["tiny"],
    "beside": ["fedavg", "stamp"],
    "method": ["sam"],
    "seeds": ["0to1"],
}
SHOWN = (
    "sweep-kappa",
    "compare",
    "ablation",
    "analyses",
    "coresets",
    "heterogeneity",
)  # notebooks that draw something
BUDGETS = {
    "label": "pictures kept of a class",
    "key": "methods.{method}.memory.per_class",
    "setting": ["tiny"],
    "method": ["keep_uniform", "keep_herding"],
    "beside": ["fedavg"],
    "seeds": "0to1",
    "values": {"tiny": [1, 5]},
}
OF_BUDGETS = {"budget@tiny-keep_uniform", "budget@tiny-keep_herding"}
OF_STAMP = {"train@tiny-stamp-0to1", "ablate@tiny-sam-0to1", "sweep@kappa"}  # with that method
ALPHA_OF_STAMP = "alpha@tiny_alpha-stamp"  # likewise, on a setting of its own


def ignored(folder: str, names: list[str]) -> set[str]:
    """What is not copied: the environment, the history and everything computed."""
    if Path(folder) == ROOT / "data":
        return set(names) & (COMPUTED | {"cache"})
    if Path(folder) == ROOT / "data" / "executed":
        return {name for name in names if name.endswith(".ipynb")}
    return {
        n
        for n in names
        if (n in OURS and Path(folder) in (ROOT, ROOT / ".dvc")) or n == "__pycache__"
    }


class Project:
    """A copy of the project with the tiny grid, a git repository of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(ROOT, root, ignore=ignored)
        (root / "dvc.lock").unlink(missing_ok=True)
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("STAMP_", "DVC_", "PYTEST"))
        }
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        author = {
            f"GIT_{who}_{what}": "test@example.org"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        self.environment = {**kept, **author, "PATH": path, "PYTHONPATH": str(root)}
        values = self.read()
        values |= {"grid": GRID, "ablation": ABLATION, "sweeps": {**values["tiny_sweeps"]}}
        values |= {"budgets": BUDGETS, "alphas": {**values["tiny_alphas"]}}
        self.write(values)
        self.run("git", "init", "--quiet")
        self.commit()

    def run(self, *command: str, ok: bool = True) -> str:
        """What a command prints; it must end well (or badly, if not `ok`)."""
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment,
            text=True,
            capture_output=True,
            timeout=300,
        )
        assert (done.returncode == 0) == ok, done.stdout + done.stderr
        return done.stdout + done.stderr

    def commit(self) -> None:
        """Put everything into git."""
        self.run("git", "add", "--all")
        self.run("git", "commit", "--quiet", "--message", "as it stands")

    def params(self, **sections: object) -> None:
        """Put sections into params.yaml, keeping the rest."""
        values = self.read()
        for name, section in sections.items():
            values[name].update(section)
        self.write(values)

    def read(self) -> Any:
        """params.yaml with its comments."""
        return YAML().load(self.root / "params.yaml")

    def write(self, values: Any) -> None:
        """Write params.yaml."""
        YAML().dump(values, self.root / "params.yaml")

    def replay(self, per_class: int) -> None:
        """Give the row `replay` so many pictures of a class, keeping the rest."""
        row = self.read()["methods"]["replay"]
        row["memory"]["per_class"] = per_class
        self.params(methods={"replay": row})

    def would_run(self) -> set[str]:
        """The stages that `dvc repro` would run, after `source` has run if it has to."""
        self.run("dvc", "repro", "--quiet", "source")
        status = json.loads(self.run("dvc", "status", "--json"))
        return set(status)

    def replace(self, file: str, old: str, new: str) -> None:
        """Edit a file."""
        path = self.root / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("clone") / "project")


def test_repro_makes_everything_from_nothing(project: Project) -> None:
    project.run("python", "-m", "stamp_core.repro")  # what `make repro` runs
    cells = [f"runs/tiny-{method}-0to1" for method in ("fedavg", "replay", "stamp", "sam")]
    cells += [
        f"budgets/tiny-{rule}/runs/tiny-{rule}-tiny-{rule}-{number}-0to1"
        for rule in BUDGETS["method"]
        for number in (1, 5)
    ]
    cells += [
        f"alphas/tiny_alpha-{method}/runs/tiny_alpha-{method}-tiny_alpha-{method}-{value}-0to1"
        for method in ("fedavg", "stamp")
        for value in ("0.1", "100.0")
    ]
    cells += [f"sweeps/kappa/runs/tiny-stamp-kappa-{value}-0to1" for value in ("0.0", "0.5")]
    for cell in cells:
        for seed in ("0", "1"):
            assert (project.root / "data" / cell / seed / "run.json").exists(), cell
    for name in ("split-tiny-0to1", "train-tiny-fedavg-0to1", "ablate-tiny-sam-0to1", *SHOWN):
        cells = nbformat.read(project.root / f"data/executed/{name}.ipynb", 4).cells
        assert any("image/png" in o.get("data", {}) for c in cells for o in c.get("outputs", []))
    summary = json.loads((project.root / "figures/summary.json").read_text())
    assert summary["tiny"]["fedavg"]["accuracy"]["n"] == 2
    project.commit()


def test_repro_again_runs_nothing(project: Project) -> None:
    assert "Running stage" not in project.run("dvc", "repro")


def test_a_run_in_jupyterlab_is_the_run_of_the_pipeline_bit_for_bit(project: Project) -> None:
    """JupyterLab runs a notebook in its own folder, without papermill; then the user saves it."""
    project.run("python", "-m", "stamp_core.notebooks", "notebooks/2_train.ipynb")
    for seed in ("0", "1"):
        cell = f"runs/tiny-fedavg-0to1/{seed}"
        mine, theirs = (records.load(project.root / "data" / part / cell) for part in ("tiny", ""))
        assert mine.about["identity"] == theirs.about["identity"]
        for name, values in mine.weights.items():
            np.testing.assert_array_equal(values, theirs.weights[name])
        for name, values in mine.scores.items():
            np.testing.assert_array_equal(values, theirs.scores[name])


def test_saving_a_notebook_retrains_nothing(project: Project) -> None:
    """The notebook above was saved with the outputs of that run."""
    project.replace("notebooks/2_train.ipynb", '"execution_count": 2', '"execution_count": 7')
    assert project.would_run() == set()


def test_a_comment_retrains_nothing(project: Project) -> None:
    project.replace("stamp_core/methods/replay.py", "import torch\n", "import torch  # a comment\n")
    assert project.would_run() == set()


def test_a_methods_parameter_concerns_that_method_only(project: Project) -> None:
    project.replay(per_class=3)
    assert project.would_run() == {"train@tiny-replay-0to1"}
    project.replay(per_class=20)


def test_a_rows_parameter_concerns_the_rows_that_are_like_it(project: Project) -> None:
    """Here the ablation's `sam`, which says `like: stamp`, and the sweeps over kappa and alpha."""
    project.replace("params.yaml", "      merge: mixstyle", "      merge: replace")
    assert project.would_run() == OF_STAMP | {ALPHA_OF_STAMP}
    project.replace("params.yaml", "      merge: replace", "      merge: mixstyle")
    assert project.would_run() == set()


def test_a_methods_file_concerns_that_method_and_those_built_on_it(project: Project) -> None:
    """STAMP is replay with more to it, budgets are of replay; FedAvg is not."""
    project.replace(
        "stamp_core/methods/replay.py", "round(self.params.ratio", "int(self.params.ratio"
    )
    built = {"train@tiny-replay-0to1", ALPHA_OF_STAMP}
    assert project.would_run() == built | OF_STAMP | OF_BUDGETS
    project.replace(
        "stamp_core/methods/replay.py", "int(self.params.ratio", "round(self.params.ratio"
    )


def test_a_training_parameter_does_not_draw_new_plans(project: Project) -> None:
    training = {"rounds": 2, "epochs": 1, "batch": 16, "rate": 0.2}
    split = project.read()["settings"]["tiny"]
    project.params(settings={"tiny": {**split, "training": training}})
    both = {"train@tiny-fedavg-0to1", "train@tiny-replay-0to1"}
    assert project.would_run() == both | OF_STAMP | OF_BUDGETS
    project.params(settings={"tiny": {**split, "training": {**training, "rate": 0.1}}})
    assert project.would_run() == set()


def test_a_setting_of_alphas_concerns_their_sweeps_only(project: Project) -> None:
    training = {"rounds": 2, "epochs": 1, "batch": 16, "rate": 0.2}
    setting = project.read()["settings"]["tiny_alpha"]
    project.params(settings={"tiny_alpha": {**setting, "training": training}})
    assert project.would_run() == {"alpha@tiny_alpha-fedavg", ALPHA_OF_STAMP}
    project.params(settings={"tiny_alpha": {**setting, "training": {**training, "rate": 0.1}}})
    assert project.would_run() == set()


def test_a_slip_in_the_parameters_is_refused_before_anything_runs(project: Project) -> None:
    project.params(methods={"replay": {"memory": {"per_clas": 20}}})
    said = project.run("dvc", "repro", ok=False)
    assert "'per_clas' is unknown; did you mean 'per_class'?" in said
    assert "Running stage 'train" not in said
    project.run("git", "checkout", "--quiet", "params.yaml")
    project.replace("params.yaml", "- methods.stamp.spatial.kappa", "- methods.stamp.spatial.kapa")
    said = project.run("dvc", "repro", ok=False)
    assert "'kapa' is unknown; did you mean 'kappa'?" in said
    assert "Running stage 'sweep" not in said
    project.run("git", "checkout", "--quiet", "params.yaml")


BROKEN = """
from stamp_core.methods import Method


class Broken(Method):
    def examples(self, turn):
        raise RuntimeError("broken on purpose")
"""


def test_one_failing_method_leaves_the_others_standing(project: Project) -> None:
    """A file is a method, so that a broken one is a file that nobody imports."""
    file = project.root / "stamp_core/methods/broken.py"
    file.write_text(BROKEN)
    methods = [*GRID["method"], "broken"]
    project.params(methods={"fedavg": {"step": 1.1}, "broken": {}}, grid={"method": methods})
    said = project.run("python", "-m", "stamp_core.repro", ok=False)
    assert "failed: train@tiny-broken-0to1; the tracebacks are in data/executed/train-tiny" in said
    executed = project.root / "data/executed/train-tiny-broken-0to1.ipynb"
    cells = nbformat.read(executed, 4).cells
    errors = [o for c in cells for o in c.get("outputs", []) if o.output_type == "error"]
    assert any("broken on purpose" in "".join(error.traceback) for error in errors)
    fedavg = records.load(project.root / "data/runs/tiny-fedavg-0to1/0")
    assert fedavg.about["method"]["step"] == 1.1
    file.unlink()
    project.run("git", "checkout", "--quiet", "params.yaml")


def test_a_killed_pipeline_goes_on_where_it_was(project: Project) -> None:
    """kill -9 of DVC and all it started once a checkpoint is there; then the same command."""
    setting = project.read()["settings"]["tiny"]
    longer = {**setting, "training": {"rounds": 60, "epochs": 1, "batch": 16, "rate": 0.1}}
    project.params(settings={"tiny": longer})
    stage, resume = "train@tiny-fedavg-0to1", project.root / "data/resume"
    process = subprocess.Popen(
        ["dvc", "repro", "--quiet", stage],
        cwd=project.root,
        env=project.environment,
        start_new_session=True,
    )
    until = time.monotonic() + 120
    while not list(resume.glob("*.safetensors")):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    project.run("dvc", "repro", stage)
    history = records.load(project.root / "data/runs/tiny-fedavg-0to1/0").history
    assert [(row["step"], row["round"]) for row in history] == [
        (s, r) for s in range(3) for r in range(60)
    ]
    assert not list(resume.glob("*.safetensors"))
    project.params(settings={"tiny": setting})


def test_a_queued_experiment_runs_in_its_own_copy_and_can_be_compared(project: Project) -> None:
    project.run("git", "checkout", "--quiet", ".")
    project.run("dvc", "exp", "run", "--queue", "-n", "half", "-S", "methods.fedavg.step=0.5")
    project.run("dvc", "queue", "start")
    until = time.monotonic() + 240
    while re.search("Running|Queued", project.run("dvc", "queue", "status")):
        assert time.monotonic() < until
        time.sleep(1)
    assert project.run("git", "status", "--porcelain") == ""  # the copy, not the original
    said = json.loads(project.run("dvc", "metrics", "diff", "HEAD", "half", "--json"))
    changed = said["figures/summary.json"]
    assert "tiny.fedavg.accuracy.mean" in changed and "tiny.replay.accuracy.mean" not in changed
