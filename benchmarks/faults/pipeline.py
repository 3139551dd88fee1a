"""The complete pipeline: killed, interrupted, started twice, in awkward surroundings."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil

from benchmarks.faults import FAILURES, Kind, Outcome
from benchmarks.faults.project import Pipeline, Place, judge_output, remove

PROCESSES = ("driver", "DVC", "papermill", "kernel", "kernel server", "worker")


def find(driver: int, kind: str) -> list[psutil.Process]:
    """The processes of a kind that a driver has started."""
    try:
        top = psutil.Process(driver)
        lines = {each: each.cmdline() for each in top.children(recursive=True)}
        parents = {each: each.ppid() for each in lines}
    except psutil.NoSuchProcess:
        return []
    if kind == "driver":
        return [top]
    if kind in ("DVC", "papermill"):
        return [
            p for p, line in lines.items() if [Path(a).name for a in line[1:2]] == [kind.lower()]
        ]
    forking = {p.pid for p, line in lines.items() if any("forkserver" in part for part in line)}
    servers = {p.pid for p in lines if p.pid in forking and parents[p] == driver}
    kernels = {p.pid for p in lines if parents[p] in servers}
    inner = {p.pid for p in lines if parents[p] in kernels and p.pid in forking}
    pids = {"kernel server": servers, "kernel": kernels}.get(kind)
    return [p for p in lines if (p.pid in pids if pids is not None else parents[p] in inner)]


def strike(driver: "subprocess.Popen[bytes]", kind: str, moment: float) -> str:
    """Kill a process of a kind after so many seconds, as soon as there is one; what was killed."""
    end = time.monotonic() + moment
    while driver.poll() is None:
        late = time.monotonic() - end
        found = find(driver.pid, kind if late < 10 else "DVC" if late < 15 else "driver")
        if late >= 0 and found:
            kind = kind if late < 10 else "DVC" if late < 15 else "driver"
            try:
                found[-1].send_signal(signal.SIGKILL)
                return kind
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.02)
    return ""


def end_remaining(root: Path) -> None:
    """Kill what still runs in copies of the project below a folder: it was started here."""
    for process in psutil.process_iter(["cwd"]):
        if (process.info["cwd"] or "").startswith(str(root)):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


class Chain:
    """Faults one after the other on the way to one result, which is compared when it is there."""

    def __init__(self, place: Place, draw: random.Random, jobs: str | None = None) -> None:
        self.place, self.draw, self.jobs = place, draw, jobs
        self.outcomes: list[Outcome] = []
        self.renew()

    def renew(self) -> None:
        """Start from nothing."""
        self.pipeline = self.place.pipeline(self.draw, JOBS=self.jobs)
        self.driver: subprocess.Popen[bytes] | None = None
        self.struck = False  # since the driver was started

    def running(self) -> "subprocess.Popen[bytes]":
        """The driver; one that has ended well is judged, and a new result begun."""
        if self.driver and self.driver.poll() is None:
            return self.driver
        if self.driver:
            self.judge_ended(self.driver.returncode)
        self.start = self.pipeline.log.stat().st_size if self.pipeline.log.exists() else 0
        self.driver, self.struck = self.pipeline.start(), False
        return self.driver

    def judge_ended(self, status: int) -> None:
        """Judge a driver that has ended by itself: it may fail only if it was struck."""
        if status and self.struck:
            return
        output = self.pipeline.log.read_bytes()[self.start :].decode(errors="replace")
        what = self.outcomes[-1].what if self.outcomes else "no fault: before the first"
        outcome = self.pipeline.judged(what, status, output, self.place, str(self.pipeline.root))
        self.outcomes[-1:] = [outcome]
        if outcome.verdict in FAILURES or not status:
            self.clear()
            self.renew()

    def finish(self) -> list[Outcome]:
        """Let the pipeline end, and judge it; twice, where the last driver was struck."""
        for _ in range(2):
            driver = self.driver or self.running()
            status = self.pipeline.wait(driver)
            if status is None:
                what = "hangs, " + (
                    "in the call that was struck" if self.struck else "called again"
                )
                faults = " / ".join(outcome.what for outcome in self.outcomes)
                self.outcomes[-1] = Outcome(self.outcomes[-1].what, "lost", f"{what}: {faults}")
                break
            if not (status and self.struck):
                self.judge_ended(status)
                break
            self.driver = None
        self.clear()
        return self.outcomes

    def clear(self) -> None:
        """End what still runs, and remove the copy."""
        end_remaining(self.pipeline.root)
        time.sleep(0.2)  # a process that was killed may just be writing there
        remove(self.pipeline.root)


def kill_pipeline(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """SIGKILL to a process of each kind, one after the other, on the way to one result."""
    chain = Chain(place, draw, jobs="1" if number % 2 else None)  # one job has worker processes
    kinds = [kind for kind in PROCESSES if number % 2 or kind != "worker"]
    for kind in draw.sample([*kinds, *kinds], 2 * len(kinds)):
        driver, moment = chain.running(), draw.uniform(0.5, 9)
        killed = strike(driver, kind, moment)
        if killed:
            chain.struck = True
            chain.outcomes.append(Outcome(f"{killed}: after {moment:.1f} s", "survived"))
        if killed == "driver":
            driver.wait()
    return chain.finish()


def interrupt_pipeline(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """SIGINT to the driver's process group, as a terminal sends it, several times in a run."""
    chain = Chain(place, draw)
    for _ in range(11):
        driver, moment = chain.running(), draw.uniform(0.5, 10)
        try:
            driver.wait(moment)
            continue  # ended before; the next round begins anew
        except subprocess.TimeoutExpired:
            os.killpg(driver.pid, signal.SIGINT)
        chain.struck = True
        what = f"Ctrl-C: after {moment:.1f} s"
        try:
            status = driver.wait(60)
            ended = Outcome(what, "survived", f"status {status}")
        except subprocess.TimeoutExpired:
            driver.kill()
            ended = Outcome(what, "lost", "does not end within a minute")
        chain.outcomes.append(ended)
    return chain.finish()


def two_drivers(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """Two drivers at once; in every other case the first is killed and its processes go on."""
    pipeline = place.pipeline(draw, finished=True)
    for name in ("data/runs", "data/splits", "figures", ".dvc/cache"):
        remove(pipeline.root / name)
        (pipeline.root / name).mkdir()
    first, moment = pipeline.start(), draw.uniform(0.1, 20)
    time.sleep(moment)
    what = f"second driver: after {moment:.1f} s"
    if number % 2:
        first.kill()
        what = f"second driver: the first was killed after {moment:.1f} s"
    status, output = pipeline.run()
    pipeline.wait(first)
    outcome = pipeline.judged(what, status, output, place, str(pipeline.root))
    if not number % 2 and first.returncode:
        said = judge_output(what, first.returncode, pipeline.log.read_text(errors="replace"))
        ended = f"the first driver ended with status {first.returncode}"
        outcome = Outcome(what, "lost", f"{ended}: {said.detail}")
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
        "SIGKILL to the driver, DVC, papermill, a kernel, the kernels' server or a worker process "
        "of the complete pipeline, one after the other on the way to one result",
        kill_pipeline,
        3,
        whole=True,
    ),
    "interrupts": Kind(
        "SIGINT to the driver's process group at a random moment of the complete pipeline, as "
        "Ctrl-C in a terminal; several on the way to one result",
        interrupt_pipeline,
        2,
        whole=True,
    ),
    "two drivers": Kind(
        "a second `make repro` during the first, or after the first was killed while its children "
        "go on",
        two_drivers,
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
