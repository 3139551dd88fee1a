"""Arrays on disk, mapped into memory: how a set is written in one step, checked and opened."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]
Names = list[list[str]]  # of classes, of domains
Note = dict[str, Any]  # of one chunk: its pictures, its sha256, its sums

PARTS = ("train", "test")
ARRAYS = ("x_train", "y_train", "x_test", "y_test", "domain_train", "domain_test", "mean", "std")
DAMAGE = (OSError, EOFError, ValueError, LookupError, TypeError)  # of files that were altered
WHOLE = 10**9  # bytes of a file that are read whole to know that nothing has changed


def store(arrays: Arrays, names: Names, folder: Path) -> None:
    """Put the arrays into `folder` in one step, so that nobody ever sees a part of them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as scratch:
        fresh = Path(scratch, "fresh")
        fresh.mkdir()
        save(arrays, names, digest(arrays, names), fresh)
        try:
            fresh.rename(folder)
        except OSError:  # another process was first; it made the same bytes
            if not folder.exists():
                raise


def save(arrays: Arrays, names: Names, found: str, folder: Path) -> None:
    """Write arrays, names and digest as files of `folder`."""
    for key, array in arrays.items():
        np.save(folder / f"{key}.npy", _stored(array))
    meta = {"classes": names[0], "domains": names[1], "digest": found}
    (folder / "meta.json").write_text(json.dumps(meta))


def remove(folder: Path) -> None:
    """Take a damaged folder away in one step; another process may have done so already."""
    with TemporaryDirectory(dir=folder.parent) as scratch, suppress(FileNotFoundError):
        folder.rename(Path(scratch, "damaged"))


def read(folder: Path) -> tuple[Arrays, dict[str, Any]]:
    """The arrays in `folder`, checked and mapped, and what meta.json says.

    Of a decoded set with a file above WHOLE, that file is not read: its pixels are taken to be
    those that were written as long as its length, labels, names and checksums fit the digest.
    """
    meta = json.loads((folder / "meta.json").read_text())
    arrays = {key: mapped(folder / f"{key}.npy") for key in ARRAYS}
    noted = {path.stem: notes(path) for path in folder.glob("*.jsonl")}
    arrays = {key: a.transpose(0, 3, 1, 2) if a.ndim == 4 else a for key, a in arrays.items()}
    if digest(arrays, [meta["classes"], meta["domains"]], noted) != meta["digest"]:
        raise ValueError("its arrays are not those that were written")
    for key, found in noted.items():
        _compare(arrays[key], found)
    return arrays, meta


def mapped(path: Path) -> npt.NDArray[Any]:
    """The array at `path`, read as it is used: private to write in, or read-only if large.

    Linux refuses private pages that would not all fit into memory, were they written to.
    """
    array: npt.NDArray[Any] = np.load(path, mmap_mode="r" if large(path) else "c")
    return array


def large(path: Path) -> bool:
    """Whether a file is too large to be read whole just to see whether it has changed."""
    return path.stat().st_size > WHOLE


def digest(arrays: Arrays, names: Names, noted: Mapping[str, list[Note]] | None = None) -> str:
    """The sha256 over all arrays and names; of a decoded array, over its chunks' checksums."""
    noted, found = noted or {}, hashlib.sha256(json.dumps(names).encode())
    for key in ARRAYS:
        found.update(f"{key} {arrays[key].dtype.str} {arrays[key].shape}".encode())
        if key in noted:
            found.update("".join(note["sha256"] for note in noted[key]).encode())
        else:
            found.update(np.ascontiguousarray(arrays[key]).ravel().data)
    return found.hexdigest()


def note(x: Bytes) -> Note:
    """What is remembered of a chunk of pictures [N, H, W, C] once it is on disk."""
    found = hashlib.sha256(np.ascontiguousarray(x).data).hexdigest()
    return {"pictures": len(x), "sha256": found, "sums": sums(x.transpose(0, 3, 1, 2)).tolist()}


def notes(path: Path) -> list[Note]:
    """The notes on an array's chunks in the file at `path`, up to one that was cut short."""
    found: list[Note] = []
    with suppress(FileNotFoundError, ValueError):
        for line in path.read_text().splitlines():
            found.append(json.loads(line))
    return found


def _compare(x: Bytes, noted: list[Note]) -> None:
    """Refuse pictures [N, C, H, W] that are not those of the notes, unless they are large."""
    if x.nbytes <= WHOLE:
        counts = [written["pictures"] for written in noted]
        for chunk, written in zip(_cut(x.transpose(0, 2, 3, 1), counts), noted, strict=True):
            if note(chunk) != written:
                raise ValueError("its pictures are not those that were written")


def _cut(x: Bytes, counts: list[int]) -> Iterator[Bytes]:
    """Successive pieces of an array, of so many rows each."""
    for end, count in zip(np.cumsum(counts), counts, strict=True):
        yield x[end - count : end]


def sums(x: Bytes) -> Numbers:
    """The sums of pixels and of their squares by channel, exact.  # [2, C]"""
    total = x.sum((0, 2, 3), dtype=np.int64)
    channels = [np.square(x[:, c], dtype=np.uint16).sum(dtype=np.int64) for c in range(x.shape[1])]
    return np.stack([total, channels])


def moments(sums: Numbers, count: int) -> Arrays:
    """Mean and standard deviation of each channel in 0..1 from the sums over `count` pixels."""
    mean = sums[0] / count
    std = np.sqrt(sums[1] / count - mean**2)
    std = np.where(std > 0, std / 255, 1)
    return {"mean": (mean / 255).astype(np.float32), "std": std.astype(np.float32)}


def _stored(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Pictures with their channels last, which convolutions on the CPU are a fifth faster with."""
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)) if array.ndim == 4 else array
