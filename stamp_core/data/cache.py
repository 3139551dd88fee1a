"""A data set on disk: one .npy file per array, written by one process, checked, memory-mapped.

Images that are decoded or encoded are written in chunks. The file x_train.jsonl or x_test.jsonl
then holds a note on each chunk: the number of its images, their sha256 and their sums by channel.
"""

import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stamp_core.core.atomic import add_path_to_errors, open_lock
from stamp_core.core.processes import progress_bar, progress_form

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
NamedArrays = dict[str, npt.NDArray[Any]]
Names = list[list[str]]  # as NAMES; the last only where a channel is a mask
ChunkNote = dict[str, Any]

SUBSETS = ("train", "test")
NAMES = ("classes", "domains", "channels")
ARRAYS = ("x_train", "y_train", "x_test", "y_test", "domain_train", "domain_test", "mean", "std")
READ_ERRORS = (OSError, EOFError, ValueError, LookupError, TypeError)  # of altered files
LARGE = 10**9  # bytes; a larger file is not read whole to detect a change


def create(folder: Path, fill: Callable[[Path], None]) -> None:
    """Have one process write a data set, from where a killed one was; others wait for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f"{folder.name}.part")
    # A full disk does not say where.
    with add_path_to_errors(draft), open_lock(folder.with_name(f".{folder.name}.lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it even if the process is killed
        if folder.exists():  # written by another process in the meantime
            return
        draft.mkdir(exist_ok=True)
        fill(draft)
        draft.rename(folder)


def complete(draft: Path, arrays: NamedArrays, names: Names) -> None:
    """Write the arrays that `draft` lacks, then meta.json with the names and the digest."""
    for key, array in arrays.items():
        if array.ndim == 4:  # with channels last, convolutions on the CPU are a fifth faster
            array = np.ascontiguousarray(array.transpose(0, 2, 3, 1))
        np.save(draft / f"{key}.npy", array)
    named = dict(zip(NAMES, names, strict=False))
    meta = {**named, "digest": _digest(*_map_files(draft), names)}
    (draft / "meta.json").write_text(json.dumps(meta))


def read_arrays(folder: Path) -> tuple[NamedArrays, dict[str, Any]]:
    """The arrays, memory-mapped, and meta.json, verified; of large images only their notes."""
    meta = json.loads((folder / "meta.json").read_text())
    arrays, notes = _map_files(folder)
    if _digest(arrays, notes, [meta[key] for key in NAMES if key in meta]) != meta["digest"]:
        raise ValueError("the digest of its arrays and names is not the stored one")
    for key, chunks in notes.items():
        if not is_large(folder / f"{key}.npy"):
            ends = np.cumsum([note["images"] for note in chunks])
            pieces = np.split(arrays[key].transpose(0, 2, 3, 1), ends[:-1])
            if list(map(note_chunk, pieces)) != chunks:
                raise ValueError(f"the checksums of {key} are not the stored ones")
    return arrays, meta


def is_large(path: Path) -> bool:
    """Whether a file is too large to be read whole only to detect a change."""
    return path.stat().st_size > LARGE


def write_chunks(
    path: Path, shape: tuple[int, ...], step: int, make: Callable[[slice], npt.ArrayLike]
) -> None:
    """Write the images [N, H, W, C] that the array at `path` lacks, `step` made at a time."""
    (total, *image), name, began = shape, f"{path.parent.stem} {path.stem}", time.perf_counter()
    done, form = _lay_out(path, shape), progress_form()
    with (
        progress_bar(form, desc=name, total=total, initial=done, unit="image") as bar,
        path.open("r+b") as images,
        path.with_suffix(".jsonl").open("a") as notes,
    ):
        images.seek((done - total) * math.prod(image), os.SEEK_END)
        for start in range(done, total, step):
            end = min(start + step, total)
            chunk = np.ascontiguousarray(make(slice(start, end)))
            images.write(chunk.data)  # a full disk is an error here, a crash in a memory map
            images.flush()
            os.fsync(images.fileno())
            # The newline comes first: it also ends a line that was cut short.
            notes.write(f"\n{json.dumps(note_chunk(chunk))}")
            notes.flush()
            if bar is not None:
                bar.update(end - start)
            if form == "lines" and 10 * end // total > 10 * start // total:
                seconds = time.perf_counter() - began
                print(f"{name}  {end}/{total} images  {seconds:.1f} s", flush=True)


def train_moments(draft: Path) -> NamedArrays:
    """Mean and standard deviation by channel of the images for training, from their notes."""
    count, height, width, _ = np.load(draft / "x_train.npy", mmap_mode="r").shape
    sums = np.sum([note["sums"] for note in read_notes(draft / "x_train.jsonl")], axis=0)
    return channel_moments(sums, count * height * width)


def note_chunk(x: Bytes) -> ChunkNote:
    """The note on a chunk of images [N, H, W, C]."""
    checksum = hashlib.sha256(np.ascontiguousarray(x).data).hexdigest()
    sums = channel_sums(x.transpose(0, 3, 1, 2)).tolist()
    return {"images": len(x), "sha256": checksum, "sums": sums}


def read_notes(path: Path) -> list[ChunkNote]:
    """The complete notes in a file; [] without the file."""
    notes: list[ChunkNote] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):  # a line that a killed process left incomplete
            notes.append(json.loads(line))
    return notes


def channel_sums(x: Bytes) -> Numbers:
    """The exact sums of the pixels of [N, C, H, W] and of their squares, by channel.  # [2, C]"""
    total = x.sum((0, 2, 3), dtype=np.int64)
    squares = np.einsum("nchw,nchw->c", x, x, dtype=np.int64)  # without a copy of all
    return np.stack([total, squares])


def channel_moments(sums: Numbers, count: int) -> NamedArrays:
    """Mean and standard deviation by channel, in 0..1, from the sums over `count` pixels."""
    mean = sums[0] / count
    std = np.sqrt(sums[1] / count - mean**2)
    std = np.where(std > 0, std / 255, 1)
    return {"mean": (mean / 255).astype(np.float32), "std": std.astype(np.float32)}


def _lay_out(path: Path, shape: tuple[int, ...]) -> int:
    """The number of images that the array at `path` holds already; if none, it is created anew."""
    log = path.with_suffix(".jsonl")
    done = int(sum(note["images"] for note in read_notes(log)))
    with suppress(*READ_ERRORS):  # the array is missing, or was cut short
        if done and np.load(path, mmap_mode="r").shape == shape:
            return done
    log.unlink(missing_ok=True)
    np.lib.format.open_memmap(path, "w+", np.uint8, shape)
    return 0


def _map_files(folder: Path) -> tuple[NamedArrays, dict[str, list[ChunkNote]]]:
    """All arrays in `folder`, images as [N, C, H, W], and the notes on those in chunks."""
    arrays = {}
    for key in ARRAYS:
        path = folder / f"{key}.npy"
        # Linux refuses private, writable pages ("c") of a file larger than memory.
        array = np.load(path, mmap_mode="r" if is_large(path) else "c")
        if not isinstance(array, np.ndarray):  # an archive of arrays
            raise ValueError(f"{path} holds no array")
        arrays[key] = array.transpose(0, 3, 1, 2) if array.ndim == 4 else array
    return arrays, {path.stem: read_notes(path) for path in folder.glob("*.jsonl")}


def _digest(arrays: NamedArrays, notes: Mapping[str, list[ChunkNote]], names: Names) -> str:
    """The sha256 over all arrays and names; images in chunks enter by their checksums."""
    digest = hashlib.sha256(json.dumps(names).encode())
    for key in ARRAYS:
        digest.update(f"{key} {arrays[key].dtype.str} {arrays[key].shape}".encode())
        if key in notes:
            digest.update("".join(note["sha256"] for note in notes[key]).encode())
        else:
            digest.update(np.ascontiguousarray(arrays[key]).ravel().data)
    return digest.hexdigest()
