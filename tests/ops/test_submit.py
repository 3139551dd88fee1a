"""Stages that are sent away, without a cluster: which job is found again, what a job sees."""

import fcntl
import sys
from pathlib import Path

import pytest

from workbench.workflow import submit
from workbench.workflow.clusters import ClusterError, chosen_cluster, sbatch_options


class Pretended:
    """A cluster with the running jobs that it is given."""

    def __init__(self, *running: str) -> None:
        self.running = {*running}

    def alive(self, folder: Path, job: str) -> bool:
        return job in self.running

    def cancel(self, folder: Path, job: str) -> None:
        self.running.remove(job)

    def reason(self, folder: Path, job: str) -> str:
        return "its node is gone"


def make_job(home: Path, name: str, identity: str, status: int | None = None) -> Path:
    """The folder of a job whose id is its name."""
    folder = home / name
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(f'{{"identity": "{identity}"}}')
    (folder / "id").write_text(name)
    if status is not None:
        (folder / "status").write_text(str(status))
    return folder


@pytest.mark.parametrize(
    ("identity", "status", "running", "found"),
    [
        ("same", None, {"1"}, True),
        ("same", 0, set(), True),  # has ended well
        ("same", 1, set(), False),
        ("same", None, set(), False),  # has ended without a status
        ("before", None, {"1"}, False),  # is cancelled: two would write to one checkpoint
        ("before", 0, set(), False),
    ],
)
def test_a_job_of_the_same_inputs_is_found_again_and_others_are_ended(
    tmp_path: Path, identity: str, status: int | None, running: set[str], found: bool
) -> None:
    folder = make_job(tmp_path, "1", identity, status)
    cluster = Pretended(*running)
    assert submit.find_job(tmp_path, "same", cluster) == (folder if found else None)
    assert folder.exists() == found and cluster.running == (running if found else set())


def test_all_jobs_can_be_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "SUBMITTED", tmp_path)
    runs, ended = make_job(tmp_path / "a", "1", "same"), make_job(tmp_path / "b", "2", "same", 0)
    cluster = Pretended("1")
    submit.cancel_jobs(cluster)
    assert not cluster.running and not runs.exists() and not ended.exists()


def test_a_job_sees_the_project_without_its_outputs_and_they_are_copied_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What DVC deletes meanwhile is not what the job writes; what it keeps is."""
    root, view = tmp_path / "root", tmp_path / "view"
    for name in ("code/a.py", "data/runs/one/run.json", "data/runs/two/run.json", "figures/b.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("old")
    monkeypatch.setattr(submit, "ROOT", root)
    outs = [root / "data/runs/one", root / "figures/b.png", root / "figures/missing.png"]
    submit.link_entries(root, view, {*outs})
    assert (view / "code").is_symlink() and (view / "data/runs/two").is_symlink()
    assert not (view / "data/runs/one").exists() and not (view / "figures/b.png").exists()
    (view / "data/runs/one").mkdir()
    (view / "data/runs/one/run.json").write_text("new")
    (view / "figures/b.png").write_text("new")
    assert (root / "figures/b.png").read_text() == "old"
    submit.copy_outs(view, outs)
    for out in ("data/runs/one/run.json", "figures/b.png"):
        assert (root / out).read_text() == "new"
    assert not (root / "figures/missing.png").exists()


def test_a_job_that_has_vanished_is_an_error_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "DELAY", 0)
    folder = make_job(tmp_path, "1", "same")
    with pytest.raises(ClusterError, match=r"in a folder that all share.*its node is gone"):
        submit.wait_for_job(folder, Pretended())


def test_a_driver_lives_as_long_as_it_holds_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert submit.driver_lives()  # without one, DVC was called by hand
    file = tmp_path / "papermill"
    monkeypatch.setenv(submit.DRIVER, str(file))
    assert not submit.driver_lives()
    file.touch()
    with file.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert submit.driver_lives()
    assert not submit.driver_lives()


def test_options_are_those_of_sbatch_or_a_partition() -> None:
    assert sbatch_options("gpu") == {"partition": "gpu"}
    options = sbatch_options("--gpus-per-node=1 --time=2-00:00:00 --exclusive")
    assert options == {"gpus_per_node": "1", "time": "2-00:00:00", "exclusive": True}


@pytest.mark.parametrize(("name", "package"), [("RAY", "ray"), ("SLURM", "submitit")])
def test_without_the_package_the_error_names_the_command(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setenv(name, "somewhere")
    with pytest.raises(ClusterError, match=r"pip install -e workbench\[cluster\]"):
        chosen_cluster()
