"""A `papermill` that sends the stage that DVC runs to a cluster and waits for its end.

DVC finds it in PATH before the real one, so that no stage has another command. Whoever is stopped
while it waits finds the job again. Meanwhile DVC deletes the stage's outputs, as before every run;
so a job has its own view of the project, a folder of links, and its outputs are copied from there.
"""

import fcntl
import json
import os
import re
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from stamp_core.core.paths import ROOT
from workbench.workflow.clusters import Cluster, ClusterError, chosen_cluster, stage_workers

SUBMITTED = ROOT / ".dvc/tmp/submitted"  # a folder for each stage, one in it for each job
DRIVER = "STAMP_DRIVER"  # the environment variable with the file that the driver holds locked
PAUSE = 0.5  # seconds between two looks at a job
DELAY = 3  # seconds until a shared file system shows what another node has written
SCRIPT = "#!/bin/sh\nexec {} -c 'from workbench.workflow.submit import main; main()' \"$@\"\n"


@contextmanager
def send_stages() -> Iterator[dict[str, str]]:
    """The environment in which DVC's stages go to the cluster; its end leaves the jobs there."""
    with TemporaryDirectory() as folder:
        script = Path(folder) / "papermill"
        script.write_text(SCRIPT.format(shlex.quote(sys.executable)))
        script.chmod(0o755)
        with script.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield {
                **os.environ,
                "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
                "STAMP_WORKERS": str(stage_workers()),
                DRIVER: str(script),
            }
    for taken in SUBMITTED.glob("*/*/taken"):  # DVC has recorded them
        shutil.rmtree(taken.parents[1])


def main() -> None:
    """Send the stage that DVC runs unless it was sent before; ends with the stage's status."""
    stage, identity, outs = read_stage(os.environ["DVC_STAGE"])
    home = SUBMITTED / re.sub(r"[^\w@.-]", "-", stage)  # a colon would end a path in PYTHONPATH
    try:
        cluster = chosen_cluster()
        folder = find_job(home, identity, cluster) or send_job(home, identity, outs, cluster)
        status = wait_for_job(folder, cluster)
    except ClusterError as error:
        sys.exit(f"{stage}: {error}")
    copy_outs(folder / "view", outs)
    (folder / "taken").touch()
    sys.exit(status)


def read_stage(name: str) -> tuple[str, str, list[Path]]:
    """A stage's name, all that its outputs depend on, and those that DVC deletes before it runs."""
    from dvc.repo import Repo

    with Repo(str(ROOT)) as repo:
        (stage,) = repo.stage.collect(name)
        stage.save_deps()
        deps = {dep.def_path: dep.hash_info.value for dep in stage.deps}
        for out in stage.outs:
            Path(out.fs_path).parent.mkdir(parents=True, exist_ok=True)
        outs = [Path(out.fs_path) for out in stage.outs if not out.persist]
        return stage.addressing, json.dumps([stage.cmd, deps], sort_keys=True, default=str), outs


def find_job(home: Path, identity: str, cluster: Cluster) -> Path | None:
    """The job of this stage that runs or has ended well; jobs of other inputs are ended."""
    found = None
    for folder in home.glob("*"):
        description = folder / "job.json"
        job = folder / "id"
        same = description.exists() and json.loads(description.read_text())["identity"] == identity
        status = read_status(folder)
        number = job.read_text() if job.exists() else ""
        runs = status is None and number != "" and cluster.alive(folder, number)
        if same and (runs or status == 0):
            found = folder
            continue
        if runs:
            cluster.cancel(folder, number)
        shutil.rmtree(folder)
    return found


def send_job(home: Path, identity: str, outs: list[Path], cluster: Cluster) -> Path:
    """The folder of a new job for papermill's arguments."""
    if not driver_lives():
        raise ClusterError("the driver has ended")
    folder = home / uuid.uuid4().hex[:8]
    for name in ("cache", "raw", "resume"):  # what a job leaves there is kept
        (ROOT / "data" / name).mkdir(parents=True, exist_ok=True)
    link_entries(ROOT, folder / "view", set(outs))
    environment = {k: v for k, v in os.environ.items() if k.startswith("STAMP_")}
    job = {"identity": identity, "command": sys.argv[1:], "environment": environment}
    (folder / "job.json").write_text(json.dumps(job))
    number = cluster.submit(folder)
    (folder / "id").write_text(number)
    return folder


def link_entries(source: Path, target: Path, outs: set[Path]) -> None:
    """Make a folder of links to all visible entries of another but `outs`."""
    target.mkdir(parents=True)
    parents = {parent for out in outs for parent in out.parents}
    for entry in source.iterdir():
        if entry in parents:
            link_entries(entry, target / entry.name, outs)
        elif entry not in outs and not entry.name.startswith("."):
            (target / entry.name).symlink_to(entry)


def wait_for_job(folder: Path, cluster: Cluster) -> int:
    """The status of a job once it has ended; its output is shown as it comes."""
    job = (folder / "id").read_text()
    shown = 0
    while True:
        runs = cluster.alive(folder, job)  # before the look at what it writes last
        if not runs and read_status(folder) is None:
            time.sleep(DELAY)
        status = read_status(folder)
        shown = show_output(folder, shown)
        if status is not None:
            return status
        if not runs:
            reason = cluster.reason(folder, job)
            raise ClusterError(
                f"the job has ended without a status. Every node must see {ROOT}, in a folder "
                f"that all share, and run the packages of this one. {reason}"
            )
        if not driver_lives():
            raise ClusterError("continues on the cluster; the next call waits for it")
        time.sleep(PAUSE)


def read_status(folder: Path) -> int | None:
    """The status with which a job has ended; None while there is none."""
    file = folder / "status"
    return int(file.read_text()) if file.exists() else None


def show_output(folder: Path, shown: int) -> int:
    """Print what a job has written since; returns how much there is."""
    file = folder / "output"
    content = file.read_bytes()[shown:] if file.exists() else b""
    sys.stdout.buffer.write(content)
    sys.stdout.flush()
    return shown + len(content)


def copy_outs(view: Path, outs: list[Path]) -> None:
    """Copy what a job has made to where DVC expects it; a failed one may have made less."""
    for out in outs:
        made = view / out.relative_to(ROOT)
        if made.is_dir():
            shutil.copytree(made, out, dirs_exist_ok=True)
        elif made.exists():
            shutil.copy2(made, out)


def driver_lives() -> bool:
    """Return whether the driver that sends stages still runs; without one the caller suffices."""
    if DRIVER not in os.environ:
        return True
    try:
        with Path(os.environ[DRIVER]).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def cancel_jobs(cluster: Cluster) -> None:
    """End all jobs of this project that wait or run, and forget what has ended."""
    for folder in SUBMITTED.glob("*/*"):
        if read_status(folder) is None and (folder / "id").exists():
            cluster.cancel(folder, (folder / "id").read_text())
            print(f"cancelled {folder.parent.name}")
        shutil.rmtree(folder)


if __name__ == "__main__":
    cancel_jobs(chosen_cluster())
