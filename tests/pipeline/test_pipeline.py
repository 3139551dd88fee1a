"""The real pipeline, DVC and papermill and all, on the quick profile in a copy of the project.

The tests run in this order, each on what the one before has left.
"""

import json
import re
import shutil
import time

import nbformat
import numpy as np
import pytest
from project import Project

from stamp_core.results.records import load_record

PAGES = ("tour", "compare", "ablation", "analyses", "coresets", "heterogeneity")
OF_STAMP = {"train@tiny-stamp-0to1", "train@tiny-sam-0to1", "sweep@kappa", "sweep@alpha_tiny"}
TRAIN = {f"train@tiny-{method}-0to1" for method in ("fedavg", "replay", "stamp", "sam")}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Without worker processes and the paper's pipeline; `test_recovery` has both."""
    project = Project(tmp_path_factory.mktemp("clone") / "project", STAMP_WORKERS="1")
    shutil.rmtree(project.root / "pipelines")
    project.commit()
    return project


def test_the_tour_needs_three_methods_on_one_setting(project: Project) -> None:
    status = json.loads(project.run("dvc", "status", "--json", "--with-deps", "tour"))
    train = {f"train@tiny-{method}-0to1" for method in ("fedavg", "replay", "stamp")}
    assert set(status) == {"source", "split@tiny-0to1", *train, "tour"}


def test_repro_makes_everything_that_is_missing(project: Project) -> None:
    project.run("python", "-m", "stamp_core.pipeline.repro")  # what `make repro` runs
    experiments = [f"runs/tiny-{method}-0to1" for method in ("fedavg", "replay", "stamp", "sam")]
    experiments += [f"sweeps/kappa/tiny-stamp-kappa-{value}-0to1" for value in ("0.0", "0.5")]
    experiments += [
        f"sweeps/exemplars_tiny/tiny-{rule}-exemplars_tiny-{number}-0to1"
        for rule in ("keep_uniform", "keep_herding")
        for number in (1, 5)
    ]
    experiments += [
        f"sweeps/alpha_tiny/tiny_alpha-stamp-alpha_tiny-{value}-0to1" for value in ("0.1", "100.0")
    ]
    for name in experiments:
        for seed in ("0", "1"):
            assert (project.root / "data" / name / seed / "run.json").exists(), name
    for name in ("split-tiny-0to1", "train-tiny-fedavg-0to1", "sweep-kappa", *PAGES):
        cells = nbformat.read(project.root / f"data/executed/{name}.ipynb", 4).cells
        assert any("image/png" in o.get("data", {}) for c in cells for o in c.get("outputs", []))
    summary = json.loads((project.root / "figures/summary.json").read_text())
    assert summary["tiny"]["fedavg"]["accuracy"]["n"] == 2
    assert "sam" not in summary["tiny"]  # the ablation shows it
    shown = {path.name for path in (project.root / "figures/tour").iterdir()}
    assert {"results.md", "accuracy.png", "forgetting.png", "matrices.png"} <= shown
    project.commit()


def test_repro_again_runs_nothing(project: Project) -> None:
    assert "Running stage" not in project.run("dvc", "repro")


def test_a_run_in_jupyterlab_is_the_run_of_the_pipeline_bit_for_bit(project: Project) -> None:
    """JupyterLab runs a notebook in its own folder, without papermill; then the user saves it."""
    project.run("python", "-m", "stamp_core.pipeline.notebooks", "notebooks/2_train.ipynb")
    for seed in (0, 1):
        mine = load_record(project.root / f"data/quick/runs/tiny-fedavg-0to1/{seed}")
        theirs = project.record("tiny-fedavg-0to1", seed)
        assert mine.about["identity"] == theirs.about["identity"]
        for name, values in mine.weights.items():
            np.testing.assert_array_equal(values, theirs.weights[name])
        for name, values in mine.scores.items():
            np.testing.assert_array_equal(values, theirs.scores[name])


def test_saving_a_notebook_and_a_comment_retrain_nothing(project: Project) -> None:
    """The notebook above was saved with the outputs of that run."""
    project.replace("notebooks/2_train.ipynb", '"execution_count": 2', '"execution_count": 7')
    rehearsal = "stamp_core/methods/base/rehearsal.py"
    project.replace(rehearsal, "import torch\n", "import torch  # a comment\n")
    assert project.outdated() == set()


SETTINGS, METHODS = "params/settings.yaml", "params/methods.yaml"


@pytest.mark.parametrize(
    ("file", "key", "value", "stages"),
    [
        (METHODS, "replay.memory.exemplars_per_class", 3, {"train@tiny-replay-0to1"}),
        (METHODS, "stamp.memory.merge", "replace", OF_STAMP),  # `sam` extends `stamp`
        (SETTINGS, "tiny.training.lr", 0.2, TRAIN | {"sweep@kappa", "sweep@exemplars_tiny"}),
        (SETTINGS, "tiny_alpha.training.lr", 0.2, {"sweep@alpha_tiny"}),
    ],
    ids=["a method's parameter", "a preset that another extends", "a setting", "a sweep's setting"],
)
def test_a_parameter_concerns_what_depends_on_it(
    file: str, key: str, value: object, stages: set[str], project: Project
) -> None:
    """Plans are not drawn again."""
    text = (project.root / file).read_text()
    project.change(file, key, value)
    assert project.outdated() == stages
    (project.root / file).write_text(text)


def test_a_methods_file_concerns_that_method_and_a_shared_base_all_that_use_it(
    project: Project,
) -> None:
    stamp, rehearsal = "stamp_core/methods/stamp.py", "stamp_core/methods/base/rehearsal.py"
    for file, stages in (
        (stamp, OF_STAMP),
        (rehearsal, OF_STAMP | {"train@tiny-replay-0to1", "sweep@exemplars_tiny"}),
    ):
        text = (project.root / file).read_text()
        (project.root / file).write_text(text + "\nEDITED = True\n")
        assert project.outdated() == stages
        (project.root / file).write_text(text)
    assert project.outdated() == set()  # with the old values nothing has to run


def test_a_slip_in_the_parameters_is_refused_before_anything_runs(project: Project) -> None:
    project.change(METHODS, "replay.memory.exemplar_per_class", 20)
    output = project.run("dvc", "repro", ok=False)
    assert "'exemplar_per_class' is unknown; did you mean 'exemplars_per_class'?" in output
    assert "Running stage 'train" not in output
    project.run("git", "checkout", "--quiet", "params")
    project.replace("params.yaml", "- methods.stamp.spatial.kappa", "- methods.stamp.spatial.kapa")
    output = project.run("dvc", "repro", ok=False)
    assert "'kapa' is unknown; did you mean 'kappa'?" in output
    assert "Running stage 'sweep" not in output
    project.run("git", "checkout", "--quiet", "params.yaml")


def test_a_queued_experiment_runs_in_its_own_copy_and_can_be_compared(project: Project) -> None:
    project.run("git", "checkout", "--quiet", ".")
    project.run(
        *("dvc", "exp", "run", "--queue", "-n", "half"),
        *("-S", "params/methods.yaml:fedavg.server_lr=0.5", "compare"),
    )
    project.run("dvc", "queue", "start")
    end = time.monotonic() + 240
    while re.search("Running|Queued", project.run("dvc", "queue", "status")):
        assert time.monotonic() < end
        time.sleep(4)
    assert project.run("git", "status", "--porcelain") == ""  # the copy, not the original
    output = json.loads(project.run("dvc", "metrics", "diff", "HEAD", "half", "--json"))
    changed = output["figures/summary.json"]
    assert "tiny.fedavg.accuracy.mean" in changed and "tiny.replay.accuracy.mean" not in changed
