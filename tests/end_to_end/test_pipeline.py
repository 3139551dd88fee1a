"""The real pipeline, DVC and papermill and all, on a small grid in a copy of the project.

The tests run in this order, each on what the one before has left.
"""

import json
import os
import re
import shutil

import nbformat
import pandas as pd
import pytest
import small
from project import Project

from stamp_core.results.records import load_record

SETTINGS, METHODS = "params/settings.yaml", "params/methods.yaml"
STAMP, REHEARSAL = "stamp_core/methods/stamp/__init__.py", "stamp_core/methods/base/rehearsal.py"
PAGES = {"compare", "ablation", "analyses", "coresets"}  # which need every run
TRAIN, TOUR = "train@tiny", "tour"
SWEEPS = {"sweep@kappa", "sweep@exemplars_tiny", "sweep@alpha_tiny"}
BROKEN = "tiny-broken-0to1"

CODE = """
from stamp_core.core.paths import ROOT
from stamp_core.methods.base.method import Method


class Broken(Method):
    def train_indices(self, plan, client, task):
        if (ROOT / "broken").exists():
            raise RuntimeError("broken on purpose")
        return super().train_indices(plan, client, task)
"""

CLOCK = """
import time
clock = time.perf_counter
time.perf_counter = lambda: 7 * clock()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """With few images, two selection rules, and a method that fails while there is a file."""
    project = Project(tmp_path_factory.mktemp("clone") / "project", STAMP_WORKERS="1")
    (project.root / "workbench/methods/broken.py").write_text(CODE)
    for key, value in {
        "grid.method": ["fedavg", "replay", "stamp", "broken"],
        "ablation.method": ["broken"],
        "sweeps.exemplars_tiny.method": ["keep_uniform", "keep_herding"],
    }.items():
        project.change("params.yaml", key, value)
    project.change(SETTINGS, "tiny.split.images_per_class", 5)
    project.change(SETTINGS, "tiny_alpha.split.images_per_class", None)  # which extends tiny
    project.change(SETTINGS, "tiny.diagnostics.features", 3)
    project.commit()
    return project


def stages(output: str) -> set[str]:
    return set(re.findall(r"^Running stage '(\S+)':", output, re.M))


def trained(output: str) -> set[str]:
    return set(re.findall(r"^\d+/\d+  (\S+)  ", output, re.M))


def test_the_tour_trains_three_methods_on_one_setting(project):
    output = project.run("dvc", "repro", "tour")
    assert stages(output) == {"source", "tour"}
    assert trained(output) == {f"tiny-{method}-0to1" for method in ("fedavg", "replay", "stamp")}
    shown = {path.name for path in (project.root / "figures/tour").iterdir()}
    assert {"results.md", "accuracy.png", "forgetting.png", "matrices.png"} <= shown


def test_one_failing_method_does_not_stop_the_others(project):
    """A method is a file, so that no other imports a broken one; the tour's records are kept."""
    (project.root / "broken").touch()
    output = project.run("dvc", "repro", "-k", ok=False)
    (project.root / "broken").unlink()
    assert "1 of 4 experiments failed, the records of the others are kept: " in output
    assert f"{BROKEN} (RuntimeError: broken on purpose)" in output
    assert "tiny-fedavg-0to1" not in trained(output)
    experiments = [f"runs/tiny/{method}-0to1" for method in ("fedavg", "replay", "stamp")]
    experiments += [f"sweeps/kappa/tiny-stamp-kappa-{value}-0to1" for value in ("0.0", "0.5")]
    experiments += [
        f"sweeps/exemplars_tiny/tiny-{rule}-exemplars_tiny-{number}-0to1"
        for rule in ("keep_uniform", "keep_herding")
        for number in (1, 5)
    ]
    experiments += [
        f"sweeps/alpha_tiny/tiny_alpha-stamp-alpha_tiny-{value}-0to1" for value in ("0.1", "100.0")
    ]
    for name in [f"{each}/{seed}" for each in experiments for seed in (0, 1)]:
        assert (project.root / "data" / name / "run.json").exists(), name
    made = {path.stem for path in (project.root / "data/executed").iterdir()}
    assert "tour" in made and not made & PAGES


def test_repro_makes_what_is_missing_and_nothing_else(project):
    output = project.run("dvc", "repro")
    assert stages(output) == {TRAIN, *PAGES} and trained(output) == {BROKEN}
    for name in ("split-tiny", "train-tiny", "sweep-kappa", "tour", *PAGES):
        cells = nbformat.read(project.root / f"data/executed/{name}.ipynb", 4).cells
        assert any("image/png" in o.get("data", {}) for c in cells for o in c.get("outputs", []))
    rows = pd.read_csv(project.root / "figures/accuracy.csv").query("setting == 'tiny'")
    assert "broken" not in set(rows.method)  # the ablation shows it
    last = rows.query("method == 'fedavg' and experience == experience.max()")
    lines = project.run("dvc", "metrics", "show", "--json").splitlines()
    shown = json.loads(lines[0])[""]["data"]["data/metrics/tiny.json"]["data"]
    accuracy = shown["tiny-fedavg-0to1"]["accuracy"]
    assert len(last) == 2 and accuracy == pytest.approx(last.accuracy.mean(), abs=1e-4)
    project.commit()


def test_repro_again_runs_nothing_and_none_of_the_papers_pipeline(project):
    output = project.run("dvc", "repro")
    assert "Stage 'compare' didn't change" in output
    assert not stages(output) and "pipelines/paper" not in output


def test_all_again_from_nothing_by_another_clock_leaves_git_nothing_to_say(project, tmp_path):
    for name in ("data/source", "data/splits", "data/runs", "data/sweeps", ".dvc/cache"):
        shutil.rmtree(project.root / name)
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    paths = os.pathsep.join([str(project.root), str(tmp_path)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(project.environment, "PYTHONPATH", paths)
        output = project.run("dvc", "repro", "--force")
    assert {"source", "tour", "bits", TRAIN, *PAGES} <= stages(output) and len(trained(output)) > 5
    assert project.run("git", "status", "--porcelain") == ""
    measured = json.loads((project.root / "data/runs/tiny/fedavg-0to1/0/measured.json").read_text())
    assert measured["history"][0]["seconds"]["clients"] > 0


def test_an_experiment_runs_in_a_copy_and_can_be_compared(project):
    halved = "params/methods.yaml:fedavg.server_lr=0.5"
    experiment = ("dvc", "exp", "run", "--temp", "--name", "half", "--set-param", halved)
    output = project.run(*experiment, "compare")
    assert "tiny-fedavg-0to1" in output and "1 experiments to train, 3 have" in output
    assert not project.run("git", "status", "--porcelain")
    changed = project.run("dvc", "metrics", "diff", "HEAD", "half", "--json")
    assert "tiny-fedavg-0to1" in changed
    assert "accuracy" in project.run("dvc", "plots", "show", "--json")


def test_a_run_in_jupyterlab_is_the_run_of_the_pipeline_bit_for_bit(project):
    """JupyterLab runs a notebook in its own folder, without papermill; then the user saves it."""
    project.run("python", "-m", "workbench.workflow.notebooks", "notebooks/2_train.ipynb")
    for seed in (0, 1):
        mine, theirs = (
            load_record(project.root / folder / f"runs/tiny/fedavg-0to1/{seed}")
            for folder in ("data/quick", "data")
        )
        assert mine.about["identity"] == theirs.about["identity"]
        small.assert_same(mine, theirs)


def test_a_methods_code_and_parameters_concern_that_method_alone(project):
    """Comments and outputs saved in a notebook, as those of the run above, concern nothing."""
    project.replace("notebooks/2_train.ipynb", '"execution_count": 2', '"execution_count": 7')
    project.replace(REHEARSAL, "import torch\n", "import torch  # a comment\n")
    assert not project.outdated()
    project.change(METHODS, "replay.memory.exemplars_per_class", 3)
    assert project.outdated() == {TRAIN, TOUR, "bits"}
    assert trained(project.run("dvc", "repro", "-s", TRAIN)) == {"tiny-replay-0to1"}
    project.restore()


def test_code_concerns_what_uses_it(project):
    project.replace(STAMP, "\n\n\n", "\n\nEDITED = True\n\n\n")
    assert project.outdated() - PAGES == {TRAIN, TOUR, "bits", "sweep@kappa", "sweep@alpha_tiny"}
    output = project.run("dvc", "repro", "-s", TRAIN)
    assert trained(output) == {"tiny-replay-0to1", "tiny-stamp-0to1"}
    project.restore()
    project.replace(REHEARSAL, "\n\n\n", "\n\nEDITED = True\n\n\n")
    assert project.outdated() - PAGES == {TRAIN, TOUR, "bits", *SWEEPS}
    project.restore()


def test_a_setting_concerns_what_is_trained_on_it(project):
    """Plans are not drawn again, and with the old code nothing above has to run."""
    project.change(SETTINGS, "tiny.training.lr", 0.2)
    assert project.outdated() - PAGES == {TRAIN, TOUR, *SWEEPS}  # tiny_alpha extends it
    project.restore()


def test_more_seeds_of_a_profile_are_trained_in_its_own_pipeline(project):
    seeds = {"setting": ["tiny"], "method": ["replay"], "seeds": ["2"]}
    project.change("params/studies.yaml", "more_seeds", seeds)
    project.run("dvc", "repro", "source")
    names = ("split_more_seeds@tiny", "train_more_seeds@tiny")
    project.run("dvc", "repro", "-s", *(f"pipelines/studies/dvc.yaml:{name}" for name in names))
    record = load_record(project.root / "data/studies/runs/tiny/replay-2/2")
    assert record.run == ("tiny", "replay", 2)
    project.restore()
