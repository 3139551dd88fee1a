"""The complete pipeline: killed, interrupted, started twice, in awkward surroundings."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.faults import VERDICTS, Kind, Outcome
from benchmarks.faults.project import HANGING, Pipeline, Place, judge_output, remove

ALONE = 60  # seconds until what a killed process has started must have ended

# From DVC downwards: what a fork of a fork server is follows from the server's own parent.
PROCESSES = ("DVC", "papermill", "kernel", "fork server", "training", "worker")
COMMANDS = {"ipykernel_launcher": "kernel", "bin/papermill ": "papermill"}
FORKS = {
    **{"kernel": "fork server", "fork server": "training"},
    **{"training": "fork server of workers", "fork server of workers": "worker"},
}


def role(command: str, parent: str) -> str:
    """What a process is by its command, or by its parent."""
    found = [name for part, name in COMMANDS.items() if part in command]
    return FORKS.get(parent, "") if "forkserver" in command else (found or [""])[0]


def find(dvc: int, kind: str) -> list[psutil.Process]:
    """The processes of a kind that a DVC has started."""
    try:
        top = psutil.Process(dvc)
        roles = {dvc: "DVC"}
        for process in (below := top.children(recursive=True)):  # parents come first
            roles[process.pid] = role(" ".join(process.cmdline()), roles.get(process.ppid(), ""))
    except psutil.NoSuchProcess:
        return []
    return [each for each in (top, *below) if roles[each.pid] == kind]


def strike(dvc: "subprocess.Popen[bytes]", root: Path, kind: str, moment: float) -> Outcome | None:
    """Kill a process of a kind after so many seconds, as soon as there is one."""
    begin = time.monotonic() + moment
    while dvc.poll() is None:
        late = time.monotonic() - begin
        kind = kind if late < 10 else "DVC"
        if late >= 0 and (found := find(dvc.pid, kind)):
            with suppress(psutil.NoSuchProcess):
                found[-1].kill()
                what = f"{kind}: after {moment:.1f} s"
                return alone(what, root) if kind == "DVC" else Outcome(what, "survived")
        time.sleep(0.02)
    return None


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


def alone(what: str, root: Path) -> Outcome:
    """The outcome of a fault after which everything in a copy of the project ends by itself."""
    end = time.monotonic() + ALONE
    while running := remaining(root):
        if time.monotonic() > end:
            names = ", ".join(sorted(each.name() for each in running))
            return Outcome(what, "lost", f"goes on for {ALONE} s: {names}")
        time.sleep(0.1)
    return Outcome(what, "survived")


Fault = Callable[["subprocess.Popen[bytes]", Path], Outcome | None]  # DVC, and its project


def chain(place: Place, draw: random.Random, faults: Iterable[Fault]) -> list[Outcome]:
    """Faults one after the other on the way to one result, which is compared when it is there."""
    pipeline = place.pipeline(draw)
    outcomes = [Outcome("no fault: before the first", "survived")]
    for fault in faults:
        dvc = pipeline.start()
        struck = fault(dvc, pipeline.root)
        outcomes += [struck] if struck else []
        status, output = pipeline.ended(dvc)
        if not struck or status in (0, HANGING):
            outcomes[-1] = settled(outcomes[-1], pipeline, status, output, place)
            pipeline = place.pipeline(draw)
        else:
            pipeline.cure(output)
    outcomes[-1] = settled(outcomes[-1], pipeline, *pipeline.run(), place)
    return outcomes[1:]


def settled(last: Outcome, pipeline: Pipeline, status: int, output: str, place: Place) -> Outcome:
    """The last outcome, or a worse one of the call that followed; its project is removed."""
    judged = pipeline.judged(last.what, status, output, place, str(pipeline.root))
    end_remaining(pipeline.root)
    time.sleep(0.2)  # a process that was killed may just be writing there
    remove(pipeline.root)
    return max(last, judged, key=lambda outcome: VERDICTS.index(outcome.verdict))


def kill_pipeline(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """SIGKILL to a process of each kind, one after the other, on the way to one result."""

    def kill(kind: str) -> Fault:
        return lambda dvc, root: strike(dvc, root, kind, draw.uniform(0.5, 9))

    return chain(place, draw, map(kill, draw.sample([*PROCESSES, *PROCESSES], 2 * len(PROCESSES))))


def interrupt_pipeline(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """SIGINT to DVC's process group, as a terminal sends it, several times in a run."""

    def interrupt(dvc: "subprocess.Popen[bytes]", root: Path) -> Outcome | None:
        moment = draw.uniform(0.5, 10)
        with suppress(subprocess.TimeoutExpired):
            dvc.wait(moment)
            return None
        os.killpg(dvc.pid, signal.SIGINT)
        return alone(f"Ctrl-C: after {moment:.1f} s", root)

    return chain(place, draw, [interrupt] * 11)


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
    root = str(pipeline.root)
    said = judge_output(what, status, output, root) if status else Outcome(what, "survived")
    pipeline.ended(first)
    return [settled(said, pipeline, *pipeline.run(), place)]


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
