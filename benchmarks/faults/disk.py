"""Disks that are full: a small file system where one can be mounted, else files of limited size."""

import compileall
import os
import random
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from benchmarks.faults import Kind, Outcome, refusal
from benchmarks.faults.project import Answer, Place, remove

ROOM = 1 << 30  # bytes of a small file system that has been given more room


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own in `folder`, large at first."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def resize(folder: Path, size: int) -> None:
    """Give a small file system another size; it keeps its files."""
    subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True)


@cache
def mountable() -> bool:
    """Whether this user may mount a file system."""
    return (
        os.geteuid() == 0
        and not subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True
        ).returncode
    )


def used(folder: Path) -> int:
    """Bytes of the blocks of all files."""
    return sum(path.lstat().st_blocks * 512 + 4096 for path in folder.rglob("*"))


def judge_training(what: str, full: Answer, again: Answer, right: object, root: Path) -> Outcome:
    """The outcome of a full disk: the next call's, and the file named in an error before."""
    if full.error:
        kind, message = full.error
        known = "No space" in message or "too large" in message  # what the system says
        if lacking := refusal(kind, f"{message}; free space" if known else message, str(root)):
            text = f"on the full disk, {lacking}: {kind}: {message}"
            return Outcome(what, "lost", text[:300])
    return again.judged(what, right, str(root))


def fill_training(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """A disk that is full somewhere in a small training, then has room again."""
    method, agent, data = draw.choice(["stamp", "replay"]), place.agent, place.agent.root / "data"
    agent.forget()
    if number % 2 and mountable():
        with small_disk(data):
            size = draw.randrange(4096, 1_500_000)
            resize(data, size)
            full = agent.call("train_small", method=method)
            resize(data, ROOM)
            again = agent.call("train_small", method=method)
        what = f"tmpfs: {method}, {size:,} bytes"
    else:
        size = int(10 ** draw.uniform(1, 5.5))
        full = agent.call("train_small", method=method, file_limit=size)
        again = agent.call("train_small", method=method)
        what = f"RLIMIT_FSIZE: {method}, {size:,} bytes"
    return [judge_training(what, full, again, place.shared.small[method], data)]


def fill_pipeline(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """A disk that is full somewhere in the pipeline, then has room again."""
    pipeline = place.pipeline(draw)
    for package in ("stamp_core", "workbench"):
        # Python 3.11 keeps bytecode that a full disk has cut, and fails at it: it is there before.
        compileall.compile_dir(pipeline.root / package, quiet=1)
    if mountable():
        kept, disk = pipeline.root.with_name(f"{pipeline.root.name}-kept"), pipeline.root
        disk.rename(kept)
        with small_disk(disk):
            subprocess.run(["cp", "-a", f"{kept}/.", disk], check=True)
            assert place.shared.finished
            size = used(disk) + draw.randrange(8192, 2 * used(place.shared.finished / "data"))
            resize(disk, size)
            what = f"tmpfs: {size:,} bytes, status {pipeline.run()[0]}"
            resize(disk, ROOM)
            outcome = pipeline.judged(what, *pipeline.run(), place, str(disk))
        remove(kept)
    else:
        size = int(10 ** draw.uniform(2, 6))
        limit = resource.RLIMIT_FSIZE, (size, size)
        process = pipeline.start(preexec_fn=lambda: resource.setrlimit(*limit))
        what = f"RLIMIT_FSIZE: {size:,} bytes, status {pipeline.ended(process)[0]}"
        outcome = pipeline.judged(what, *pipeline.run(), place, str(pipeline.root))
    remove(pipeline.root)
    return [outcome]


KINDS = {
    "disk full, training": Kind(
        "writes of records, checkpoints, plans and image caches fail: on a small tmpfs where one "
        "can be mounted (half of them), by RLIMIT_FSIZE otherwise; then there is room again",
        fill_training,
        60,
    ),
    "disk full, pipeline": Kind(
        "the same with dvc.lock, DVC's cache and notebooks: the complete pipeline on a small "
        "tmpfs, or with RLIMIT_FSIZE where none can be mounted",
        fill_pipeline,
        2,
        whole=True,
    ),
}
