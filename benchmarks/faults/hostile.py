"""Hostile input: images and arrays that fill memory or are none, pickles that run."""

import io
import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.faults import Kind, Outcome
from benchmarks.faults.damage import SMALL, prepared
from benchmarks.faults.project import Answer, Place

MEMORY = 1 << 30  # bytes that a process may take for decoding
SIZE = 224  # pixels a side of the decoded images


def judged(place: Place, what: str, answer: Answer, right: object, *names: str) -> Outcome:
    """The outcome, where nothing may have been made among the traps."""
    if sprung := place.sprung():
        return Outcome(what, "executed", ", ".join(sprung))
    return answer.judged(what, right, *names)


# --- images


def write_png(path: Path, width: int, height: int) -> None:
    """A PNG of any size without its pixels in memory: all of them are black."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    packer, rows = zlib.compressobj(9), []
    for _ in range(height):
        rows.append(packer.compress(bytes(1 + (width + 7) // 8)))
    content = b"".join(rows) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    path.write_bytes(start + chunk(b"IDAT", content) + chunk(b"IEND", b""))


def image_folder(root: Path) -> None:
    """Two classes of sound images."""
    for subset in ("train", "test"):
        for label, name in enumerate(("a", "b")):
            folder = root / subset / name
            folder.mkdir(parents=True)
            for place in range(3):
                Image.new("RGB", (20, 20), (40 * place, 90 * label, 7)).save(
                    folder / f"{place}.png"
                )


def cut_png(path: Path) -> None:
    """A PNG without its second half."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def link(target: str) -> Callable[[Path], None]:
    """What makes a link to a folder in a class's folder."""
    return lambda path: path.with_name("link").symlink_to(target)


IMAGES: dict[str, Callable[[Path], object]] = {  # at a path in a class's folder
    "60,000 x 1": lambda path: write_png(path, 60_000, 1),
    "1 x 60,000": lambda path: write_png(path, 1, 60_000),
    "cut": cut_png,
    "empty": lambda path: path.write_bytes(b""),
    "a pickle": lambda path: path.write_bytes(pickle.dumps(range(9))),
    "bomb of 30,000 x 30,000": lambda path: write_png(path, 30_000, 30_000),
    "bomb of 13,000 x 13,000": lambda path: write_png(path, 13_000, 13_000),
    "text": lambda path: path.write_text("no image"),
    "a folder that ends with .png": lambda path: path.mkdir(),
    "a broken link": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to the class": link("."),
    "a link to all classes": link(".."),
}


def hostile_image(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """An image that fills memory or is none: refused by name, or decoded in bounded memory."""
    agent, raw = place.agent, place.agent.root / "data/raw"
    agent.forget()
    name, make = list(IMAGES.items())[number % len(IMAGES)]
    root = raw / "hostile"
    image_folder(root)
    spec: dict[str, Any] = {"source": "folder", "root": "hostile", "size": SIZE}
    right = agent.call("dataset_digest", **spec).value
    path = root / draw.choice(["train", "test"]) / draw.choice("ab") / "hostile.png"
    make(path)
    answer = agent.call("dataset_digest", memory_limit=MEMORY, **spec)
    where = [str(path), str(path.with_name("link"))]
    expected = right if "link to" in name or "folder" in name else answer.value
    return [judged(place, f"image: {name}", answer, expected, *where)]


def declare_huge(path: Path) -> None:
    """An .npz whose header declares 713 TiB."""
    write_npz(path)
    header = np.lib.format
    stream = io.BytesIO()
    header.write_array_header_1_0(
        stream, {"descr": "|u1", "fortran_order": False, "shape": (28_000_000, 5000, 5600)}
    )
    with zipfile.ZipFile(path, "w") as archive:
        for key in ("x_train", "x_test", "y_train", "y_test"):
            archive.writestr(f"{key}.npy", stream.getvalue())


def write_npz(path: Path, **changes: Any) -> None:
    """Sound images in an .npz, with some arrays changed."""
    x, y = np.zeros((4, 8, 8), np.uint8), np.arange(4) % 2
    np.savez(path, **{"x_train": x, "x_test": x, "y_train": y, "y_test": y, **changes})


def cut_npz(path: Path) -> None:
    """An .npz without its end."""
    write_npz(path)
    path.write_bytes(path.read_bytes()[:-40])


NPZ: dict[str, Callable[[Path], object]] = {
    "declares 713 TiB": declare_huge,
    "cut": cut_npz,
    "empty": lambda path: path.write_bytes(b""),
    "labels of text": lambda path: write_npz(path, y_train=np.array(list("abab"))),
    "labels below 0": lambda path: write_npz(path, y_train=np.array([-1, 0, 1, 1])),
    "fewer labels": lambda path: write_npz(path, y_train=np.arange(3) % 2),
    "no images": lambda path: write_npz(path, x_train=np.zeros((0, 8, 8), np.uint8)),
    "floats": lambda path: write_npz(path, x_train=np.full((4, 8, 8), np.nan)),
}


def hostile_npz(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """A file of arrays that is none, or declares what it does not hold: refused by name."""
    place.agent.forget()
    name, make = list(NPZ.items())[number % len(NPZ)]
    path = place.agent.root / "data/raw/hostile.npz"
    path.parent.mkdir()
    make(path)
    answer = place.agent.call(
        "dataset_digest", memory_limit=MEMORY, source="npz", file="hostile.npz"
    )
    return [judged(place, f"npz: {name}", answer, None, str(path))]


# --- pickles


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        """What the unpickling does."""
        return os.mkdir, (str(self.path),)


def write_pickle(path: Path, trap: Path, draw: random.Random) -> str:
    """A pickle of some form in place of a file; its form."""
    form = draw.choice(["pickle", "torch", "torch, old", "numpy"])
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        if form == "pickle":
            pickle.dump(Trap(trap), file)
        elif form == "numpy":
            np.save(file, np.array([Trap(trap)], object))
        else:
            new = form == "torch"
            torch.save({"x": Trap(trap)}, file, _use_new_zipfile_serialization=new)
    return form


def hostile_pickle(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """A pickle in place of a file that is read: it is never unpickled."""
    agent, trap = place.agent, place.traps / "pickle"
    kinds = [*SMALL, "weights", "npz"]
    kind = kinds[number % len(kinds)]
    if kind == "npz":
        agent.forget()
        path = agent.root / "data/raw/hostile.npz"
        path.parent.mkdir()
        write_npz(path, **{draw.choice(["x_train", "y_test"]): np.array([Trap(trap)] * 4, object)})
        answer = agent.call("dataset_digest", source="npz", file=path.name)
        return [judged(place, "pickle in npz: array of objects", answer, None, str(path))]
    if kind == "weights":
        agent.forget()
        path = agent.root / "data/raw" / draw.choice(["hostile.pth", "hostile.safetensors"])
        path.parent.mkdir()
        form = write_pickle(path, trap, draw)
        answer = agent.call("load_pretrained", file=path.name)
        return [judged(place, f"pickle as weights: {form} ({path.name})", answer, 1, str(path))]
    folder, wanted, ended = SMALL[kind]
    prepared(place, "replay", ended)
    root = agent.root / "data" / folder
    path = draw.choice(sorted(p for p in root.rglob("*") if p.is_file() and wanted(p)))
    form = write_pickle(path, trap, draw)
    answer = agent.call("train_small", method="replay")
    right = place.shared.small["replay"]
    names = (str(path), str(path.parent))
    return [judged(place, f"pickle as {kind}: {form} ({path.name})", answer, right, *names)]


KINDS = {
    "images": Kind(
        "60,000 x 1 pixels, bombs, cut or no images, links that loop, in a folder of images; each "
        "within a limit of memory",
        hostile_image,
        2 * len(IMAGES),
    ),
    "npz": Kind("arrays that are cut, huge, or of a wrong form in an .npz", hostile_npz, len(NPZ)),
    "pickles": Kind(
        "in place of records, checkpoints, plans, cached images, weights, and in an .npz",
        hostile_pickle,
        32,
    ),
}
