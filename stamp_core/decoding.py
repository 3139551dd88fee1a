"""Pictures in files, decoded once, chunk by chunk, into arrays that may be larger than memory."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from stamp_core import cache, fingerprint
from stamp_core.cache import PARTS, Arrays, Bytes, Note, Numbers
from stamp_core.progress import watched

CHUNK = 1 << 25  # bytes of pictures that are decoded, written and noted at a time


@dataclass(frozen=True, eq=False)
class Part:
    """The pictures for training, or those for testing."""

    files: list[str]  # below the listing's root, [N]
    labels: Numbers  # [N]
    domains: Numbers  # [N]


@dataclass(frozen=True, eq=False)
class Listing:
    """What `listing(options)` of a source with many pictures returns: where they lie."""

    root: Path
    train: Part
    test: Part
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    size: int  # pixels a side
    grey: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of a decoded picture."""
        return self.size, self.size, 1 if self.grey else 3

    @property
    def bytes(self) -> int:
        """The bytes of a decoded picture."""
        return self.size * self.size * (1 if self.grey else 3)

    @property
    def chunk(self) -> int:
        """How many pictures are decoded at a time."""
        return max(1, CHUNK // self.bytes)


def key(listing: Listing) -> str:
    """A hash of all that decides the arrays: names, sizes, times and labels; code; Pillow.

    Of the code only what decodes and writes: a listing says all that the rest decided.
    """
    code = [fingerprint.digest(str(file)) for file in (__file__, cache.__file__)]
    same = [version("pillow"), code, listing.classes, listing.domains, listing.shape]
    found = hashlib.sha256(json.dumps(same).encode())
    for part in PARTS:
        pictures: Part = getattr(listing, part)
        found.update(pictures.labels.tobytes() + pictures.domains.tobytes())
        for name in pictures.files:
            stat = (listing.root / name).stat()
            found.update(os.fsencode(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0"))
    return found.hexdigest()


def decode(listing: Listing, folder: Path) -> None:
    """Decode a listing into `folder`, which appears only when it is complete.

    What was killed on the way goes on where it was, in a folder of the same name and `.part`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.parent / "decoding.lock"):
        if folder.exists():  # another process decoded it while this one waited
            return
        draft = folder.with_name(f"{folder.name}.part")
        draft.mkdir(exist_ok=True)
        try:
            _room(listing, draft)
            for part in PARTS:
                _write(listing, part, draft)
            _complete(listing, draft)
        except OSError as error:
            error.filename = error.filename or str(draft)  # a full disk does not say where
            raise
        draft.rename(folder)


def picture(path: Path, size: int, grey: bool) -> Bytes:
    """One picture, cut as torchvision's Resize(size) and CenterCrop(size) do.  # [size, size, C]"""
    from PIL import Image  # only here: from the cache nothing is decoded

    try:
        with Image.open(path) as opened:
            image = opened.convert("L" if grey else "RGB")
    except Exception as error:  # broken files make Pillow raise almost anything
        raise ValueError(f"{path} is not a picture that can be read: {error}") from error
    short = min(image.size)
    width, height = (int(size * side / short) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    cut = image.crop((left, top, left + size, top + size))
    return np.asarray(cut, np.uint8).reshape(size, size, -1)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process decodes; a killed one has let go."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _room(listing: Listing, draft: Path) -> None:
    """Refuse a disk that cannot hold what is still to be written."""
    files = sum(len(getattr(listing, part).files) for part in PARTS)
    logs = [cache.notes(draft / f"x_{part}.jsonl") for part in PARTS]
    done = sum(note["pictures"] for log in logs for note in log)
    need, free = (files - done) * listing.bytes, shutil.disk_usage(draft).free
    if need > free:
        text = f"{need / 1e9:.4g} GB are needed, {free / 1e9:.4g} GB are free"
        raise OSError(errno.ENOSPC, text, str(draft))


def _write(listing: Listing, part: str, draft: Path) -> None:
    """Decode what is not yet decoded of a part, noting each chunk once it is on the disk."""
    files = getattr(listing, part).files
    path, log = draft / f"x_{part}.npy", draft / f"x_{part}.jsonl"
    noted = _begun(path, log, (len(files), *listing.shape))
    done = sum(note["pictures"] for note in noted)
    start = np.load(path, mmap_mode="r").offset
    with path.open("r+b") as out, log.open("a") as lines:
        out.seek(start + done * listing.bytes)
        chunks = _chunks(listing, files, done)
        for chunk in _shown(chunks, f"{draft.stem} {part}", len(files), done):
            out.write(chunk.data)
            out.flush()
            os.fsync(out.fileno())
            lines.write(json.dumps(cache.note(chunk)) + "\n")
            lines.flush()


def _begun(path: Path, log: Path, shape: tuple[int, ...]) -> list[Note]:
    """The notes on what the array at `path` holds already; it is laid out if it is not there."""
    noted = cache.notes(log) if path.exists() else []
    if not path.exists():
        np.lib.format.open_memmap(path.with_suffix(".fresh"), "w+", np.uint8, shape)
        path.with_suffix(".fresh").rename(path)
    fresh = log.with_suffix(".fresh")  # without the line that was being written
    fresh.write_text("".join(json.dumps(note) + "\n" for note in noted))
    fresh.rename(log)
    return noted


def _chunks(listing: Listing, files: list[str], done: int) -> Iterator[Bytes]:
    """The pictures from number `done` on, a chunk at a time, in their order."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(done, len(files), listing.chunk):
            names = files[start : start + listing.chunk]
            chunk = np.empty((len(names), *listing.shape), np.uint8)

            def put(place: int, name: str, into: Bytes = chunk) -> None:
                into[place] = picture(listing.root / name, listing.size, listing.grey)

            deque(pool.map(put, range(len(names)), names), maxlen=0)  # which raises their errors
            yield chunk


def _shown(chunks: Iterator[Bytes], name: str, total: int, done: int) -> Iterator[Bytes]:
    """`chunks` with a bar where a person watches, else with a line for each tenth."""
    bar = tqdm(desc=name, total=total, initial=done, unit="picture", disable=not watched())
    with bar:
        began = time.perf_counter()
        for chunk in chunks:
            yield chunk
            tenth, done = 10 * done // total, done + len(chunk)
            bar.update(len(chunk))
            if bar.disable and 10 * done // total > tenth:
                seconds = time.perf_counter() - began
                print(f"{name}  {done}/{total} pictures  {seconds:.1f} s", flush=True)


def _complete(listing: Listing, draft: Path) -> None:
    """Write the labels, names, moments and digest of a draft whose pictures are all there."""
    noted = {f"x_{part}": cache.notes(draft / f"x_{part}.jsonl") for part in PARTS}
    total = np.sum([note["sums"] for note in noted["x_train"]], axis=0)
    count = len(listing.train.files) * listing.size**2
    arrays: Arrays = cache.moments(total, count)
    for part in PARTS:
        pictures: Part = getattr(listing, part)
        arrays |= {f"y_{part}": pictures.labels, f"domain_{part}": pictures.domains}
    seen = {key: cache.mapped(draft / f"{key}.npy").transpose(0, 3, 1, 2) for key in noted}
    names = [list(listing.classes), list(listing.domains)]
    cache.save(arrays, names, cache.digest(arrays | seen, names, noted), draft)
