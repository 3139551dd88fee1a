"""The complete pipeline: killed, interrupted, started twice, in awkward surroundings."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil

from benchmarks.faults import FAILURES, Kind, Outcome
from benchmarks.faults.project import Pipeline, Place, remove

# From DVC downwards: what a fork of a fork server is follows from the server's own parent.
PROCESSES = ("DVC", "papermill", "kernel", "fork server", "training", "worker")
FORKS = {
    **{"kernel": "fork server", "fork server": "training"},
    **{"training": "fork server of workers", "fork server of workers": "worker"},
}


def find(dvc: int, kind: str) -> list[psutil.Process]:
    """The processes of a kind that a DVC has started."""
    try:
        top = psutil.Process(dvc)
        roles = {dvc: "DVC"}
        for process in (below := top.children(recursive=True)):  # parents come first
            line, parent = " ".join(process.cmdline()), roles.get(process.ppid(), "")
            roles[process.pid] = (
                FORKS.get(parent, "")
                if "forkserver" in line
                else "kernel"
                if "ipykernel_launcher" in line
                else "papermill"
                if "bin/papermill " in line
                else parent
            )
    except psutil.NoSuchProcess:
        return []
    return [each for each in (top, *below) if roles[each.pid] == kind]


def strike(dvc: "subprocess.Popen[bytes]", kind: str, moment: float) -> str:
    """Kill a process of a kind after so many seconds, as soon as there is one; what was killed."""
    end = time.monotonic() + moment
    while dvc.poll() is None:
        late = time.monotonic() - end
        kind = kind if late < 10 else "DVC"
        if late >= 0 and (found := find(dvc.pid, kind)):
            try:
                found[-1].kill()
                return kind
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.02)
    return ""


def remaining(root: Path) -> list[psutil.Process]:
    """What still runs in copies of the project below a folder."""
    found = [each for each in psutil.process_iter(["cwd", "status"]) if each.pid != os.getpid()]
    running = [each for each in found if each.info["status"] != psutil.STATUS_ZOMBIE]
    return [each for each in running if f"{each.info['cwd']}/".startswith(f"{root}/")]


def end_remaining(root: Path) -> None:
    """Kill what still runs in copies of the project below a folder: it was started here."""
    for process in remaining(root):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def all_end(root: Path, seconds: float = 20) -> bool:
    """Whether everything in a copy of the project ends by itself."""
    end = time.monotonic() + seconds
    while remaining(root) and time.monotonic() < end:
        time.sleep(0.1)
    return not remaining(root)


class Chain:
    """Faults one after the other on the way to one result, which is compared when it is there."""

    def __init__(self, place: Place, draw: random.Random) -> None:
        self.place, self.draw = place, draw
        self.outcomes: list[Outcome] = []
        self.renew()

    def renew(self) -> None:
        """Start from nothing."""
        self.pipeline = self.place.pipeline(self.draw)
        self.dvc: subprocess.Popen[bytes] | None = None
        self.struck = False  # since DVC was started

    def running(self) -> "subprocess.Popen[bytes]":
        """DVC; one that has ended well is judged, and a new result begun."""
        if self.dvc and self.dvc.poll() is None:
            return self.dvc
        if self.dvc:
            self.judge_ended(self.dvc.returncode)
        self.start = self.pipeline.log.stat().st_size if self.pipeline.log.exists() else 0
        self.dvc, self.struck = self.pipeline.start(), False
        return self.dvc

    def judge_ended(self, status: int) -> None:
        """Judge a DVC that has ended by itself: it may fail only if something was struck."""
        if status and self.struck:
            return
        output = self.pipeline.log.read_bytes()[self.start :].decode(errors="replace")
        what = self.outcomes[-1].what if self.outcomes else "no fault: before the first"
        outcome = self.pipeline.judged(what, status, output, self.place, str(self.pipeline.root))
        self.outcomes[-1:] = [outcome]
        self.clear()
        self.renew()

    def finish(self) -> list[Outcome]:
        """Let the pipeline end, and judge it; twice, where the last call was struck."""
        for _ in range(2):
            dvc = self.dvc or self.running()
            status = self.pipeline.wait(dvc)
            if status is None:
                what = "hangs, struck" if self.struck else "hangs, called again"
                faults = " / ".join(outcome.what for outcome in self.outcomes)
                self.outcomes[-1] = Outcome(self.outcomes[-1].what, "lost", f"{what}: {faults}")
                break
            if not (status and self.struck):
                self.judge_ended(status)
                break
            self.dvc = None
        self.clear()
        return self.outcomes

    def clear(self) -> None:
        """End what still runs, and remove the copy."""
        end_remaining(self.pipeline.root)
        time.sleep(0.2)  # a process that was killed may just be writing there
        remove(self.pipeline.root)


def kill_pipeline(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """SIGKILL to a process of each kind, one after the other, on the way to one result."""
    chain = Chain(place, draw)
    for kind in draw.sample([*PROCESSES, *PROCESSES], 2 * len(PROCESSES)):
        dvc, moment = chain.running(), draw.uniform(0.5, 9)
        killed = strike(dvc, kind, moment)
        if killed:
            chain.struck = True
            what, root = f"{killed}: after {moment:.1f} s", chain.pipeline.root
            chain.outcomes.append(Outcome(what, "survived"))
        if killed == "DVC":
            dvc.wait()
            if draw.random() < 0.5 and not all_end(root):
                chain.outcomes[-1] = Outcome(what, "lost", "what DVC has started goes on")
    return chain.finish()


def interrupt_pipeline(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """SIGINT to DVC's process group, as a terminal sends it, several times in a run."""
    chain = Chain(place, draw)
    for _ in range(11):
        dvc, moment = chain.running(), draw.uniform(0.5, 10)
        try:
            dvc.wait(moment)
            continue  # ended before; the next round begins anew
        except subprocess.TimeoutExpired:
            os.killpg(dvc.pid, signal.SIGINT)
        chain.struck = True
        what = f"Ctrl-C: after {moment:.1f} s"
        try:
            status = dvc.wait(60)
            ended = Outcome(what, "survived", f"status {status}")
        except subprocess.TimeoutExpired:
            dvc.kill()
            ended = Outcome(what, "lost", "does not end within a minute")
        if not all_end(chain.pipeline.root):
            ended = Outcome(what, "lost", "what DVC has started goes on")
        chain.outcomes.append(ended)
    return chain.finish()


def two_at_once(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """Two calls at once; in every other case the first is killed and its processes go on."""
    pipeline = place.pipeline(draw, finished=True)
    for name in ("data/runs", "data/splits", "figures", ".dvc/cache"):
        remove(pipeline.root / name)
        (pipeline.root / name).mkdir()
    first, moment = pipeline.start(), draw.uniform(0.1, 20)
    time.sleep(moment)
    what = f"second call: after {moment:.1f} s"
    if number % 2:
        first.kill()
        what = f"second call: the first was killed after {moment:.1f} s"
    status, output = pipeline.run()
    if status and not number % 2:  # one of both waits in vain for the other, and says so
        said = pipeline.judged(what, status, output, place, str(pipeline.root))
        if said.verdict in FAILURES:
            return [said]
    pipeline.wait(first)
    outcome = pipeline.judged(what, *pipeline.run(), place, str(pipeline.root))
    end_remaining(pipeline.root)
    remove(pipeline.root)
    return [outcome]


def surroundings(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """A folder with spaces and letters beyond ASCII, no HOME, the locale C."""
    root = place.folder / f"my projekt é 図 {number}"
    root.mkdir()
    pipeline = Pipeline(root / "a copy", HOME=None, LC_ALL="C", LANG=None)
    outcome = pipeline.judged("surroundings: all at once", *pipeline.run(), place, str(root))
    remove(root)
    return [outcome]


KINDS = {
    "kill the pipeline": Kind(
        "SIGKILL to DVC, papermill, a kernel, its fork server, a training or its worker in the "
        "complete pipeline, one after the other on the way to one result",
        kill_pipeline,
        3,
        whole=True,
    ),
    "interrupts": Kind(
        "SIGINT to DVC's process group at a random moment of the complete pipeline, as Ctrl-C in a "
        "terminal, after which nothing may go on; several on the way to one result",
        interrupt_pipeline,
        2,
        whole=True,
    ),
    "two at once": Kind(
        "a second `dvc repro` during the first, or after the first was killed while its children "
        "go on; then a third",
        two_at_once,
        2,
        whole=True,
    ),
    "surroundings": Kind(
        "the complete pipeline in a folder with spaces and non-ASCII letters, HOME unset, LC_ALL=C",
        surroundings,
        1,
        whole=True,
    ),
}
