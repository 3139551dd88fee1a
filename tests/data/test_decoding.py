"""Decoding of image files: pixels, chunks, stops, damage, sets larger than memory."""

import json
import multiprocessing
import os
import signal
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from folders import SIDE, WHOLE, all_images, cached, edit, flip, load_error, noise, write_image
from PIL import Image

from stamp_core.core import paths, vision
from stamp_core.data import cache, decoding
from stamp_core.data import loading as data
from stamp_core.data.cache import ARRAYS, SUBSETS, Bytes
from stamp_core.data.decoding import decode_image
from stamp_core.data.loading import load_dataset

pytestmark = pytest.mark.filterwarnings("error::UserWarning")  # of a set that is made again


@pytest.fixture(autouse=True)
def three_per_chunk(monkeypatch):
    monkeypatch.setattr(decoding, "CHUNK_BYTES", 3 * 3 * SIDE**2 + 1)


def the_folder(suffix: str = "") -> Path:
    (folder,) = paths.CACHE.glob(f"folder-*{suffix}")
    return folder


# ------------------------------------------------------------------ pixels


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_images_of_any_mode_are_converted(tmp_path, mode):
    image = Image.fromarray(noise(1)).convert(mode)
    image.save(tmp_path / "image.tif")
    found = decode_image(tmp_path / "image.tif", SIDE, grey=False)
    assert np.array_equal(found, np.asarray(image.convert("RGB")))


@pytest.mark.parametrize(
    "shape", [(6, 6), (7, 6), (6, 9), (13, 31), (101, 7), (3, 4), (5, 2), (6, 601), (2, 256)]
)
def test_images_are_cropped_as_by_torchvision(tmp_path, shape):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8))
    image.save(tmp_path / "image.png")
    transforms = vision.load_torchvision().transforms
    expected = transforms.CenterCrop(SIDE)(transforms.Resize(SIDE)(image))
    assert np.array_equal(decode_image(tmp_path / "image.png", SIDE, False), np.asarray(expected))


def test_the_digest_of_a_folder_is_pinned(images):
    pinned = "c880c5c83f9dcc658ecbcad7e86b87aca33fe77a2754c62bce119ce91b425cae"
    assert load_dataset(WHOLE).digest == pinned


def test_chunks_and_threads_change_no_number(images, monkeypatch):
    def counts() -> list[int]:
        logs = [the_folder() / f"x_{subset}.jsonl" for subset in SUBSETS]
        return [note["images"] for log in logs for note in cache.read_notes(log)]

    first = load_dataset(WHOLE)
    assert counts() == [3, 3, 1, 3, 1]
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(decoding, "CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(paths, "CACHE", paths.CACHE.with_name("other"))
    second = load_dataset(WHOLE)
    assert counts() == [7, 4]
    for key in ARRAYS:
        assert torch.equal(getattr(first, key), getattr(second, key)), key
    pixels = first.x_train.double() / 255
    assert torch.allclose(first.mean.double(), pixels.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(first.std.double(), pixels.std((0, 2, 3), correction=0), atol=1e-6)


# ------------------------------------------------------------------ what is decoded again


def append(path: Path) -> None:
    before = path.stat()
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda image: os.utime(image, ns=(1, 1)),
        lambda image: image.rename(image.with_name("0.png")),
        lambda image: image.rename(image.parents[1] / "dog" / "a.png"),
        append,
    ],
)
def test_changed_files_alone_are_decoded_again(raw, images, change, monkeypatch):
    first = load_dataset(WHOLE)
    (raw / "set" / "notes.txt").write_text("no image")
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "decode_image", None)
        second = load_dataset(WHOLE)
    assert np.array_equal(all_images(first), all_images(second)) and first.digest == second.digest
    change(raw / "set" / "train" / "cat" / "00.png")
    load_dataset(WHOLE)
    assert len(cached()) == 2


def test_every_part_of_a_listing_is_in_its_key(images):
    module, options = data.find_source(WHOLE)
    listing = module.listing(options)
    train, test = listing.train, listing.test
    changes: list[dict[str, Any]] = [
        {"classes": ("cow", "dog")},
        {"domains": ("one",)},
        {"size": SIDE + 1},
        {"grey": True},
        {"train": replace(train, labels=1 - train.labels)},
        {"train": replace(train, domains=1 - train.domains)},
        {"train": replace(train, files=train.files[::-1])},
        {"test": replace(test, labels=1 - test.labels)},
    ]
    keys = {decoding.key(replace(listing, **change), make=True) for change in ({}, *changes)}
    assert len(keys) == len(changes) + 1


def test_code_and_package_are_in_the_key(images, monkeypatch):
    load_dataset(WHOLE)
    monkeypatch.setattr(decoding, "version", lambda name: "0")
    load_dataset(WHOLE)
    assert len(cached()) == 2
    monkeypatch.setattr("stamp_core.core.fingerprint.code_digest", lambda path: "other code")
    load_dataset(WHOLE)
    assert len(cached()) == 3


# ------------------------------------------------------------------ files and disks that fail


@pytest.mark.parametrize(
    ("name", "reason"),
    [("cut.png", "image file is truncated"), ("empty.jpg", "cannot identify image file")],
)
def test_a_damaged_image_is_named_and_decoding_can_be_continued(raw, images, name, reason):
    path = raw / "set" / "test" / "cat" / name
    write_image(path, noise(0, 50))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4] if path.stem == "cut" else b"")
    error = load_error(WHOLE, ValueError)
    assert error.startswith(f"{path} is not a readable image: {reason}")
    assert cached() == [the_folder(".part")]
    path.unlink()
    assert np.array_equal(all_images(load_dataset(WHOLE)), np.stack(images))


def declare(path: Path, width: int, height: int) -> None:
    """Write a PNG whose header states that many pixels, with the content of one."""
    write_image(path, noise(0, 1))
    content = bytearray(path.read_bytes())
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    path.write_bytes(content)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("width", "height", "size"), [(60_000, 1, 224), (10_000, 10_000, 8), (200, 2, 1000)]
)
def test_an_image_that_would_take_much_memory_is_named_before_it_is_decoded(
    tmp_path, width, height, size
):
    declare(tmp_path / "image.png", width, height)
    with pytest.raises(ValueError) as error:
        decode_image(tmp_path / "image.png", size, grey=False)
    right = f"{tmp_path}/image.png is not a readable image: it has {width} x {height} pixels, "
    assert str(error.value).startswith(right)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("gone.png")])
def test_a_pipe_and_a_broken_link_are_named(make, raw, images):
    path = raw / "set" / "train" / "cat" / "other.png"
    make(path)
    assert load_error(WHOLE, ValueError) == f"{path} is not a regular file; remove it"


def test_a_disk_that_fills_up_is_named_and_decoding_can_be_continued(images, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", small.full)
        error = load_error(WHOLE, OSError)
    assert error == f"[Errno 28] No space left on device: '{the_folder('.part')}'"
    assert np.array_equal(all_images(load_dataset(WHOLE)), np.stack(images))


# ------------------------------------------------------------------ processes that are stopped


def count_decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def counted(path: Path, size: int, grey: bool) -> Bytes:
        names.append(path.name)
        return decode_image(path, size, grey)

    monkeypatch.setattr(decoding, "decode_image", counted)
    return names


def load_and_kill(after: int) -> None:
    """Load the set in a process that is killed when it starts that many images and one."""

    def run() -> None:
        started = iter(range(after))

        def deadly(path: Path, size: int, grey: bool) -> Bytes:
            if next(started, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return decode_image(path, size, grey)

        decoding.decode_image = deadly
        os.cpu_count = lambda: 1
        load_dataset(WHOLE)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(("after", "left"), [(0, 11), (2, 11), (3, 8), (6, 5), (7, 4), (10, 1)])
def test_decoding_continues_after_the_last_chunk_of_a_killed_process(
    images, monkeypatch, after, left
):
    """The chunks end at 3, 6 and 7 (training), 10 and 11 images (testing)."""
    load_and_kill(after)
    draft = the_folder(".part")
    names = count_decoded(monkeypatch)
    found = load_dataset(WHOLE)
    assert len(names) == left
    assert np.array_equal(all_images(found), np.stack(images))
    assert cached() == [draft.with_suffix("")]
    monkeypatch.setattr(paths, "CACHE", paths.CACHE.with_name("uninterrupted"))
    assert load_dataset(WHOLE).digest == found.digest


def cut_note(draft: Path) -> None:
    with (draft / "x_train.jsonl").open("a") as log:
        log.write('\n{"images": 3, "sha')


@pytest.mark.parametrize(
    ("harm", "left"),
    [
        (cut_note, 5),
        (lambda draft: (draft / "x_train.npy").unlink(), 11),
        *((lambda draft, n=n: os.truncate(draft / "x_train.npy", n), 11) for n in (0, 10, 300)),
    ],
)
def test_a_damaged_draft_is_decoded_again(images, monkeypatch, harm, left):
    """Its notes say that 6 images are there."""
    load_and_kill(6)
    harm(the_folder(".part"))
    names = count_decoded(monkeypatch)
    for _ in range(2):
        assert np.array_equal(all_images(load_dataset(WHOLE)), np.stack(images))
    assert len(names) == left


def test_two_threads_decode_each_image_once(images, monkeypatch):
    """Although both find nothing in the cache."""
    names, create = count_decoded(monkeypatch), cache.create
    meet = threading.Barrier(2, timeout=10)

    def create_together(*arguments: Any) -> None:
        meet.wait()
        create(*arguments)

    monkeypatch.setattr(cache, "create", create_together)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(load_dataset, [WHOLE, WHOLE])
    assert len(names) == 11 and one.digest == other.digest


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("x_test.npy", flip),
        ("x_train.npy", lambda path: np.save(path, np.load(path)[:-1])),
        ("x_train.jsonl", edit('"sha256": "', '"sha256": "0')),
        ("x_test.jsonl", Path.unlink),
    ],
)
@pytest.mark.parametrize("large", [False, True])
def test_a_damaged_set_is_decoded_again_but_pixels_of_a_large_one_are_not_checked(
    images, monkeypatch, file, harm, large
):
    if large:
        monkeypatch.setattr(cache, "LARGE", 100)
    load_dataset(WHOLE)
    folder = the_folder()
    harm(folder / file)
    if large and harm is flip:
        assert not np.array_equal(all_images(load_dataset(WHOLE)), np.stack(images))
        return
    with pytest.warns(UserWarning, match=f"{folder.name} is damaged and is made again"):
        found = load_dataset(WHOLE)
    assert np.array_equal(all_images(found), np.stack(images))
    assert np.array_equal(all_images(load_dataset(WHOLE)), np.stack(images))


def test_an_array_larger_than_memory_is_mapped(tmp_path, monkeypatch):
    """Its sparse file takes no disk space; the system would refuse a copy, and private pages."""
    count = 4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (3 * 1000**2)
    arrays = {"mean": np.zeros(3, np.float32), "std": np.ones(3, np.float32)}
    for subset, many in {"test": 4, "train": count}.items():
        shape = (many, 1000, 1000, 3)
        np.lib.format.open_memmap(tmp_path / f"x_{subset}.npy", "w+", np.uint8, shape)
        arrays |= {f"{key}_{subset}": np.arange(many) % 2 for key in ("y", "domain")}
    note = {"images": count, "sha256": "0", "sums": [[0] * 3] * 2}
    (tmp_path / "x_train.jsonl").write_text(json.dumps(note))
    cache.complete(tmp_path, arrays, [["a", "b"], ["c", "d"]])
    found = data._open(tmp_path, "huge")
    assert found.x_train.shape == (count, 3, 1000, 1000) and not found.x_train[-1].any()
