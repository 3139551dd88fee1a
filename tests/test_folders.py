"""Folders of pictures: what they must hold, and how they become sets larger than memory."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from PIL import Image

from stamp_core import cache, data, decoding, paths, vision
from stamp_core.config import Network, ParameterError, Setting, Split, Training
from stamp_core.data import Bytes, ImageSet
from stamp_core.workspace import Visit, Workspace

pytestmark = pytest.mark.filterwarnings("error::UserWarning")  # of a set that is made again
REAL = os.environ.get("STAMP_CHECK_DATA")  # a folder with larger sets, for a look by hand
SIDE = 6
WHOLE = {"source": "folder", "root": "set", "size": SIDE}
CUT = {**WHOLE, "test_share": 0.25}
DOMAINS = {**CUT, "domains": ["photo", "art"]}
KINDS = "(.jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, .tiff, .webp)"


@pytest.fixture(autouse=True)
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folders of this test's own for pictures and for the cache; three pictures a chunk."""
    monkeypatch.setattr(paths, "RAW", tmp_path / "raw")
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(decoding, "CHUNK", 3 * 3 * SIDE**2 + 1)
    return tmp_path / "raw"


def pixels(seed: int, side: int = SIDE) -> Bytes:
    """A picture of noise.  # [H, W, 3]"""
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)


def put(path: Path, content: Bytes) -> None:
    """Write a picture, without loss where the name says so, and the folders it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(content).save(path)


def fill(folder: Path, counts: dict[str, int], seed: int = 0) -> list[Bytes]:
    """Write so many pictures into each folder below `folder`; what they show, in order."""
    shown = []
    for name, count in counts.items():
        for number in range(count):
            shown.append(pixels(seed := seed + 1))
            put(folder / name / f"{number:02d}.png", shown[-1])
    return shown


@pytest.fixture
def parted(raw: Path) -> list[Bytes]:
    """What the pictures of a set with folders train and test show, those for training first."""
    train = fill(raw / "set" / "train", {"cat": 4, "dog": 3})
    return train + fill(raw / "set" / "test", {"cat": 2, "dog": 2}, seed=100)


def shown(found: ImageSet) -> Bytes:
    """All pictures, those for training first.  # [N, H, W, C]"""
    both: Bytes = torch.cat([found.x_train, found.x_test]).numpy().transpose(0, 2, 3, 1)
    return both


def message(spec: dict[str, Any], kind: type[Exception] = FileNotFoundError) -> str:
    """What the error of a set that cannot be loaded says."""
    with pytest.raises(kind) as error:
        data.load(spec)
    return str(error.value)


def held() -> list[str]:
    """The names in the cache."""
    return sorted(path.name for path in paths.CACHE.iterdir()) if paths.CACHE.exists() else []


# ------------------------------------------------------------------ layouts


@pytest.mark.parametrize("name", ["test", "val"])
def test_folders_train_and_test_are_read_as_they_are(
    raw: Path, parted: list[Bytes], name: str
) -> None:
    (raw / "set" / "test").rename(raw / "set" / name)
    found = data.load(WHOLE)
    assert np.array_equal(shown(found), np.stack(parted))
    assert found.y_train.tolist() == [0, 0, 0, 0, 1, 1, 1] and found.y_test.tolist() == [0, 0, 1, 1]
    assert found.classes == ("cat", "dog") and found.domains == ("all",)
    assert not found.domain_train.any() and not found.domain_test.any()


def test_of_test_and_val_the_first_is_read(raw: Path, parted: list[Bytes]) -> None:
    fill(raw / "set" / "val", {"cat": 1, "dog": 1})
    assert len(data.load(WHOLE).x_test) == 4


def test_a_share_is_cut_evenly_from_each_class(raw: Path) -> None:
    """Of 8 pictures 2 are for testing, those in the middle of each half; of 3 one, of 2 one."""
    cat, dog, eel = (
        fill(raw / "set", {name: n}, 9 * n) for name, n in (("c", 8), ("e", 3), ("f", 2))
    )
    found = data.load(CUT)
    assert np.array_equal(shown(found)[-4:], [cat[2], cat[6], dog[1], eel[1]])
    train = [*(cat[k] for k in (0, 1, 3, 4, 5, 7)), dog[0], dog[2], eel[0]]
    assert np.array_equal(shown(found)[:-4], train)
    assert found.classes == ("c", "e", "f")


def test_domains_keep_the_order_they_are_asked_in(raw: Path) -> None:
    counts = {"photo/cat": 4, "photo/dog": 4, "art/cat": 8, "art/dog": 2, "sketch/cat": 1}
    fill(raw / "set", counts)
    found = data.load(DOMAINS)
    assert found.domains == ("photo", "art") and found.classes == ("cat", "dog")
    assert torch.bincount(found.domain_train * 2 + found.y_train).tolist() == [3, 3, 6, 1]
    assert torch.bincount(found.domain_test * 2 + found.y_test).tolist() == [1, 1, 2, 1]
    other = data.load({**DOMAINS, "domains": ["art", "photo"]})
    assert other.domains == ("art", "photo")
    for domain in (0, 1):
        here, there = found.domain_train == domain, other.domain_train == 1 - domain
        assert torch.equal(found.x_train[here], other.x_train[there])


def test_only_pictures_count_and_those_of_inner_folders_do(raw: Path, parted: list[Bytes]) -> None:
    more = pixels(7)
    put(raw / "elsewhere" / "LAST.PNG", more)
    (raw / "set" / "train" / "dog" / "inner").symlink_to(raw / "elsewhere")
    for name in ("dog/notes.txt", "dog/._00.png", "dog/.DS_Store", "list.csv", ".hidden/a.png"):
        path = raw / "set" / "train" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("no picture")
    found = data.load(WHOLE)
    assert len(found.x_train) == 8 and np.array_equal(shown(found)[7], more)
    assert found.classes == ("cat", "dog")


def test_pictures_can_be_made_grey(raw: Path, parted: list[Bytes]) -> None:
    found = data.load({**WHOLE, "grey": True})
    grey = [np.asarray(Image.fromarray(each).convert("L")) for each in parted]
    assert found.x_train.shape[1:] == (1, SIDE, SIDE)
    assert np.array_equal(shown(found)[..., 0], grey)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_pictures_of_any_mode_become_coloured(raw: Path, mode: str) -> None:
    image = Image.fromarray(pixels(1)).convert(mode)
    image.save(raw.parent / "picture.tif")
    found = decoding.picture(raw.parent / "picture.tif", SIDE, grey=False)
    assert np.array_equal(found, np.asarray(image.convert("RGB")))


@pytest.mark.parametrize(
    "shape", [(6, 6), (7, 6), (6, 9), (13, 31), (101, 7), (3, 4), (5, 2), (6, 601)]
)
def test_pictures_are_cut_as_torchvision_does(raw: Path, shape: tuple[int, int]) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8))
    image.save(raw.parent / "picture.png")
    transforms = vision.load().transforms
    right = transforms.CenterCrop(SIDE)(transforms.Resize(SIDE)(image))
    found = decoding.picture(raw.parent / "picture.png", SIDE, grey=False)
    assert np.array_equal(found, np.asarray(right))


def test_the_middle_of_a_long_picture_is_kept(raw: Path) -> None:
    """Twice as large: halved, 4 x 20 becomes 2 x 10; its middle are columns 4 and 5."""
    grey = np.repeat(np.arange(20, dtype=np.uint8) // 2 * 20, 4).reshape(20, 4).T
    put(raw / "wide.png", grey)
    found = decoding.picture(raw / "wide.png", 2, grey=True)[..., 0]
    assert np.array_equal(found, decoding.picture(raw / "wide.png", 2, grey=False)[..., 1])
    assert np.abs(found.astype(int) - [[80, 100]]).max() <= 5  # the filter looks beyond a pixel


def test_a_folder_of_given_pictures_is_these_bytes(parted: list[Bytes]) -> None:
    pinned = "c880c5c83f9dcc658ecbcad7e86b87aca33fe77a2754c62bce119ce91b425cae"
    assert data.load(WHOLE).digest == pinned


# ------------------------------------------------------------------ what a folder must hold


def lose(path: Path) -> None:
    """Delete a folder."""
    shutil.rmtree(path)


def empty(path: Path) -> None:
    """Leave a text where pictures were."""
    shutil.rmtree(path)
    path.mkdir()
    (path / "readme.txt").write_text("to come")


PARTED = "train/<class>/* and test/<class>/* (or val/), unless test_share is set"


@pytest.mark.parametrize(
    ("harm", "where", "right"),
    [
        (lose, ".", "{root} does not exist; {root} must hold " + PARTED),
        (lose, "train", "{root}/train does not exist; {root} must hold " + PARTED),
        (lose, "test", "{root}/test does not exist; {root} must hold " + PARTED),
        (lose, "train/dog", "{root}/train/dog does not exist, but {root}/test/dog does"),
        (lose, "test/cat", "{root}/test/cat does not exist, but {root}/train/cat does"),
        (empty, "test/cat", "{root}/test/cat holds no pictures " + KINDS),
        (empty, "train", "{root}/train/cat does not exist, but {root}/test/cat does"),
    ],
)
def test_a_set_that_lacks_a_folder_is_refused_by_name(
    raw: Path, parted: list[Bytes], harm: Callable[[Path], None], where: str, right: str
) -> None:
    harm(raw / "set" / where)
    assert message(WHOLE) == right.format(root=raw / "set")
    assert held() == []


@pytest.mark.parametrize(
    ("spec", "layout"), [(CUT, "<class>/*"), (DOMAINS, "<domain>/<class>/*"), (WHOLE, PARTED)]
)
def test_folders_without_classes_are_refused(raw: Path, spec: dict[str, Any], layout: str) -> None:
    for name in ("photo", "art", "train", "test"):
        (raw / "set" / name).mkdir(parents=True)
    if "domains" not in spec and "test_share" in spec:
        shutil.rmtree(raw / "set")
        (raw / "set").mkdir()
    right = f"{raw}/set holds no folders of classes; it must hold {layout}"
    assert message(spec) == right


def test_a_domain_that_lacks_a_class_or_is_not_there_is_refused(raw: Path) -> None:
    fill(raw / "set", {"photo/cat": 2, "photo/dog": 2, "art/cat": 2})
    root = raw / "set"
    assert message(DOMAINS) == f"{root}/art/dog does not exist, but {root}/photo/dog does"
    other = {**DOMAINS, "domains": ["photo", "prints"]}
    right = f"{root}/prints does not exist; {root} must hold <domain>/<class>/*"
    assert message(other) == right


def test_a_class_of_one_picture_cannot_be_cut(raw: Path) -> None:
    fill(raw / "set", {"cat": 2, "dog": 1})
    right = f"{raw}/set/dog holds 1 picture; to be cut in two it must hold 2"
    assert message(CUT, ValueError) == right


def test_a_folder_that_cannot_be_read_is_refused(
    raw: Path, parted: list[Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk(top: Path, onerror: Callable[[OSError], None], **_: Any) -> Iterator[Any]:
        onerror(PermissionError(errno.EACCES, "Permission denied", str(top)))
        yield top, [], []

    monkeypatch.setattr(os, "walk", walk)
    right = f"[Errno 13] Permission denied: '{raw}/set/train/cat'"
    assert message(WHOLE, PermissionError) == right


@pytest.mark.parametrize(
    ("source", "change", "right"),
    [
        ("folder", {"size": 0}, "size is 0; it must be at least 1"),
        ("folder", {"test_share": 1.0}, "test_share is 1.0; it must be above 0 and below 1"),
        ("folder", {"test_share": 0}, "test_share is 0.0; it must be above 0 and below 1"),
        ("folder", {"domains": ["a"]}, "test_share is None; it must be above 0 and below 1"),
        (
            "folder",
            {"domains": ["a", "a"], "test_share": 0.5},
            "domains is ['a', 'a']; it must be at least one folder, each named once",
        ),
        ("folder", {"gray": True}, ": 'gray' is unknown; did you mean 'grey'?"),
        ("office31", {"size": 0}, "size is 0; it must be at least 1"),
        ("office31", {"test_share": -0.5}, "test_share is -0.5; it must be above 0 and below 1"),
        (
            "office31",
            {"domains": []},
            "domains is []; it must be at least one folder, each named once",
        ),
        ("imagenet1k", {"size": 0}, "size is 0; it must be at least 1"),
        ("imagenet1k", {"per_class_train": 0}, "per_class_train is 0; it must be at least 1"),
        ("imagenet1k", {"per_class_test": 0}, "per_class_test is 0; it must be at least 1"),
        (
            "imagenet1k",
            {"test": "train"},
            "per_class_train is None; it must be a number, as test is 'train'",
        ),
        ("imagenet1k", {"test": "both"}, "test 'both' is unknown; known: train, val"),
    ],
)
def test_options_that_cannot_be_are_refused(
    source: str, change: dict[str, Any], right: str
) -> None:
    given = {"root": "set", "size": 6} if source == "folder" else {}
    with pytest.raises(ParameterError) as error:
        data.options({"source": source, **given, **change}, "here")
    assert str(error.value).removeprefix("here.").removeprefix("here").startswith(right)


# ------------------------------------------------------------------ ImageNet-1K and Office-31


@pytest.fixture
def imagenet(raw: Path) -> list[Bytes]:
    """Two classes of five pictures for training and three for validation, sorted."""
    train = fill(raw / "imagenet1k" / "train", {"n01440764": 5, "n01443537": 5})
    return train + fill(raw / "imagenet1k" / "val", {"n01440764": 3, "n01443537": 3}, seed=50)


def test_imagenet_is_read_as_torchvision_lays_it_out(imagenet: list[Bytes]) -> None:
    found = data.load({"source": "imagenet1k", "size": SIDE})
    assert np.array_equal(shown(found), np.stack(imagenet))
    assert found.classes == ("n01440764", "n01443537")
    assert data.options({"source": "imagenet1k"}).size == 224  # type: ignore[attr-defined]


def test_of_imagenet_the_first_of_each_class_can_be_taken(imagenet: list[Bytes]) -> None:
    spec = {"source": "imagenet1k", "size": SIDE, "per_class_train": 2, "per_class_test": 1}
    found = data.load(spec)
    assert np.array_equal(shown(found), [imagenet[k] for k in (0, 1, 5, 6, 10, 13)])
    assert found.y_train.tolist() == [0, 0, 1, 1] and found.y_test.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("count", "places"), [(2, (3, 4, 8, 9)), (1, (3, 8)), (None, (3, 4, 8, 9))]
)
def test_of_imagenet_those_behind_can_be_tested_on(
    raw: Path, imagenet: list[Bytes], count: int | None, places: tuple[int, ...]
) -> None:
    shutil.rmtree(raw / "imagenet1k" / "val")  # not needed
    spec = {"source": "imagenet1k", "size": SIDE, "per_class_train": 3, "test": "train"}
    found = data.load({**spec, "per_class_test": count})
    assert np.array_equal(shown(found)[6:], [imagenet[k] for k in places])
    assert np.array_equal(shown(found)[:6], [imagenet[k] for k in (0, 1, 2, 5, 6, 7)])


@pytest.mark.parametrize(
    ("options", "right"),
    [
        ({"per_class_train": 6}, "train/n01440764 holds 5 pictures; it must hold 6"),
        ({"per_class_test": 4}, "val/n01440764 holds 3 pictures; it must hold 4"),
        (
            {"per_class_train": 5, "test": "train"},
            "train/n01440764 holds 5 pictures; it must hold 6",
        ),
        (
            {"per_class_train": 2, "per_class_test": 4, "test": "train"},
            "train/n01440764 holds 5 pictures; it must hold 6",
        ),
    ],
)
def test_imagenet_classes_with_too_few_pictures_are_refused(
    raw: Path, imagenet: list[Bytes], options: dict[str, Any], right: str
) -> None:
    spec = {"source": "imagenet1k", "size": SIDE, **options}
    asked = ", as per_class_train and per_class_test ask for"
    assert message(spec, ValueError) == f"{raw}/imagenet1k/{right}{asked}"


def test_imagenet_whose_validation_is_not_sorted_is_refused(
    raw: Path, imagenet: list[Bytes]
) -> None:
    root = raw / "imagenet1k"
    for path in sorted((root / "val").glob("*/*")):
        path.rename(root / "val" / f"{path.parent.name}_{path.name}")
    for path in (root / "val").glob("*"):
        if path.is_dir():
            path.rmdir()
    spec = {"source": "imagenet1k", "size": SIDE}
    right = f"{root}/val/n01440764 does not exist, but {root}/train/n01440764 does"
    assert message(spec) == right


@pytest.mark.parametrize("inner", ["", "/images"])
def test_office_is_read_in_both_layouts(raw: Path, inner: str) -> None:
    names = [f"{domain}{inner}/class{k:02d}" for domain in ("webcam", "dslr") for k in range(31)]
    content = fill(raw / "office31", dict.fromkeys(names, 2))
    spec = {"source": "office31", "size": SIDE, "domains": ["webcam", "dslr"], "test_share": 0.5}
    found = data.load(spec)
    assert len(found.classes) == 31 and found.domains == ("webcam", "dslr")
    assert np.array_equal(shown(found), content[::2] + content[1::2])
    assert torch.equal(found.domain_test, torch.arange(2).repeat_interleave(31))
    assert data.options({"source": "office31"}).size == 300  # type: ignore[attr-defined]


def test_office_with_other_than_31_classes_is_refused(raw: Path) -> None:
    fill(raw / "office31", {"dslr/images/back_pack": 2, "dslr/images/bike": 2})
    right = f"{raw}/office31/dslr/images holds 2 classes; it must hold 31"
    assert message({"source": "office31", "domains": ["dslr"]}, ValueError) == right


def test_office_that_is_not_there_is_refused(raw: Path) -> None:
    root = raw / "office31"
    layout = "<domain>/<class>/* or <domain>/images/<class>/*"
    right = f"{root} does not exist; {root} must hold {layout}"
    assert message({"source": "office31"}) == right
    root.mkdir(parents=True)
    right = f"{root}/amazon does not exist; {root} must hold {layout}"
    assert message({"source": "office31"}) == right


# ------------------------------------------------------------------ decoding


def test_chunks_and_threads_change_no_number(
    parted: list[Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here 3 pictures are decoded at a time: 3 + 3 + 1 and 3 + 1."""
    first = data.load(WHOLE)
    assert [n["pictures"] for n in notes()] == [3, 3, 1, 3, 1]
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(decoding, "CHUNK", 1 << 20)
    monkeypatch.setattr(paths, "CACHE", paths.CACHE.with_name("other"))
    second = data.load(WHOLE)
    assert [n["pictures"] for n in notes()] == [7, 4]
    for key in data.ARRAYS:
        assert torch.equal(getattr(first, key), getattr(second, key)), key
    pixels = first.x_train.double() / 255
    assert torch.allclose(first.mean.double(), pixels.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(first.std.double(), pixels.std((0, 2, 3), correction=0), atol=1e-6)


def notes() -> list[cache.Note]:
    """The notes on the chunks of the only set in the cache."""
    (folder,) = paths.CACHE.glob("folder-*")
    return [note for part in cache.PARTS for note in cache.notes(folder / f"x_{part}.jsonl")]


def test_the_second_time_nothing_is_decoded(
    parted: list[Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = data.load(WHOLE)
    monkeypatch.setattr(decoding, "picture", None)
    second = data.load(WHOLE)
    assert np.array_equal(shown(first), shown(second)) and first.digest == second.digest
    assert len(held()) == 2 and held()[0] == "decoding.lock"


def touch(root: Path) -> None:
    """Change the time of a picture."""
    os.utime(root / "train" / "cat" / "00.png", ns=(1, 1))


def rename(root: Path) -> None:
    """Change the name of a picture."""
    (root / "train" / "cat" / "00.png").rename(root / "train" / "cat" / "0.png")


def move(root: Path) -> None:
    """Change the class of a picture."""
    (root / "train" / "cat" / "00.png").rename(root / "train" / "dog" / "a.png")


def label(root: Path) -> None:
    """Change the name of a class."""
    for part in ("train", "test"):
        (root / part / "cat").rename(root / part / "bat")


def grow(root: Path) -> None:
    """Change the size of a picture's file and not its time."""
    path = root / "test" / "cat" / "00.png"
    before = path.stat()
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [touch, rename, move, label, grow])
def test_changed_files_are_decoded_again(
    raw: Path, parted: list[Bytes], change: Callable[[Path], None]
) -> None:
    data.load(WHOLE)
    change(raw / "set")
    data.load(WHOLE)
    assert len(held()) == 3


def test_every_part_of_a_listing_is_in_its_key(parted: list[Bytes]) -> None:
    module, options = data._chosen(WHOLE)
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
    keys = {decoding.key(replace(listing, **change)) for change in ({}, *changes)}
    assert len(keys) == len(changes) + 1


def test_the_key_is_of_code_and_package_too(
    parted: list[Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    data.load(WHOLE)
    (paths.RAW / "set" / "notes.txt").write_text("no picture")
    data.load(WHOLE)
    assert len(held()) == 2
    monkeypatch.setattr(decoding, "version", lambda name: "0")
    data.load(WHOLE)
    assert len(held()) == 3
    monkeypatch.setattr("stamp_core.fingerprint.digest", lambda path: "other code")
    data.load(WHOLE)
    assert len(held()) == 4


BROKEN = {
    "cut.png": "image file is truncated",
    "cut.jpg": "image file is truncated",
    "text.png": "cannot identify image file",
    "empty.jpg": "cannot identify image file",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_picture_is_refused_by_name(raw: Path, parted: list[Bytes], name: str) -> None:
    path = raw / "set" / "test" / "cat" / name
    put(path, pixels(0, 50))
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) * 3 // 4], "text": b"hello"}.get(path.stem, b""))
    said = message(WHOLE, ValueError)
    assert said.startswith(f"{path} is not a picture that can be read: {BROKEN[name]}")
    assert held()[1].endswith(".part") and len(held()) == 2
    path.unlink()
    assert np.array_equal(shown(data.load(WHOLE)), np.stack(parted))


def test_a_picture_too_large_to_be_one_is_refused(
    raw: Path, parted: list[Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    said = message(WHOLE, ValueError)
    assert said.startswith(f"{raw}/set/train/cat/00.png is not a picture that can be read: ")


def test_a_file_that_cannot_be_opened_is_refused(raw: Path, parted: list[Bytes]) -> None:
    path = raw / "set" / "train" / "cat" / "00.png"
    path.unlink()
    path.symlink_to(path.parent / "gone.png")
    assert message(WHOLE) == f"[Errno 2] No such file or directory: '{path}'"


def test_a_disk_that_is_too_small_is_refused_before_anything_is_decoded(
    parted: list[Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """11 pictures of 6 x 6 in colour are 1188 bytes."""
    usage = shutil._ntuple_diskusage  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1187))
    monkeypatch.setattr(decoding, "picture", None)
    said = message(WHOLE, OSError)
    (draft,) = paths.CACHE.glob("*.part")
    right = f"[Errno 28] 1.188e-06 GB are needed, 1.187e-06 GB are free: '{draft}'"
    assert said == right


def test_a_disk_that_is_just_large_enough_is_taken(
    parted: list[Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1188))
    assert len(data.load(WHOLE).x_train) == 7


def test_a_disk_that_fills_up_is_named_and_decoding_goes_on_later(
    parted: list[Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        said = message(WHOLE, OSError)
    (draft,) = paths.CACHE.glob("*.part")
    assert said == f"[Errno 28] No space left on device: '{draft}'"
    assert np.array_equal(shown(data.load(WHOLE)), np.stack(parted))


# ------------------------------------------------------------------ kills


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the pictures that are decoded from now on."""
    names: list[str] = []
    decoded = decoding.picture

    def picture(path: Path, size: int, grey: bool) -> Bytes:
        names.append(path.name)
        return decoded(path, size, grey)

    monkeypatch.setattr(decoding, "picture", picture)
    return names


def killed(after: int) -> None:
    """Load the set in a process that is killed when it begins that many pictures."""

    def run() -> None:
        started = iter(range(after))
        decoded = decoding.picture

        def picture(path: Path, size: int, grey: bool) -> Bytes:
            if next(started, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return decoded(path, size, grey)

        decoding.picture = picture
        os.cpu_count = lambda: 1
        data.load(WHOLE)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(("after", "left"), [(0, 11), (2, 11), (3, 8), (6, 5), (7, 4), (10, 1)])
def test_what_was_killed_goes_on_where_it_was(
    parted: list[Bytes], monkeypatch: pytest.MonkeyPatch, after: int, left: int
) -> None:
    """The chunks end at 3, 6 and 7 (training), 10 and 11 pictures (testing)."""
    killed(after)
    (draft,) = paths.CACHE.glob("folder-*")
    assert draft.suffix == ".part"
    names = counted(monkeypatch)
    found = data.load(WHOLE)
    assert len(names) == left
    assert np.array_equal(shown(found), np.stack(parted))
    assert held() == ["decoding.lock", draft.stem]
    digest = found.digest
    monkeypatch.setattr(paths, "CACHE", paths.CACHE.with_name("at once"))
    assert data.load(WHOLE).digest == digest


@pytest.mark.parametrize(("rest", "left"), [('{"pictures": 3, "sha', 5), ("", 5)])
def test_a_note_cut_short_counts_for_nothing(
    parted: list[Bytes], monkeypatch: pytest.MonkeyPatch, rest: str, left: int
) -> None:
    killed(6)
    (draft,) = paths.CACHE.glob("*.part")
    with (draft / "x_train.jsonl").open("a") as log:
        log.write(rest)
    names = counted(monkeypatch)
    assert np.array_equal(shown(data.load(WHOLE)), np.stack(parted))
    assert len(names) == left
    assert np.array_equal(shown(data.load(WHOLE)), np.stack(parted))


def test_notes_without_their_array_count_for_nothing(parted: list[Bytes]) -> None:
    killed(7)
    (draft,) = paths.CACHE.glob("*.part")
    (draft / "x_train.npy").unlink()
    assert np.array_equal(shown(data.load(WHOLE)), np.stack(parted))


class Stop(BaseException):
    """An end that nothing catches."""


@pytest.mark.parametrize(
    "where",
    [
        "numpy.lib.format.open_memmap",
        "stamp_core.cache.note",
        "stamp_core.cache.save",
        "numpy.save",
        "pathlib.Path.rename",
        "json.dumps",
    ],
)
def test_a_stop_anywhere_leaves_nothing_that_is_taken_for_a_set(
    parted: list[Bytes], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise Stop

    spec = data._chosen(WHOLE)
    listing = spec[0].listing(spec[1])
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(where, stop)
        decoding.decode(listing, paths.CACHE / "folder-a")
    assert not (paths.CACHE / "folder-a").exists()
    decoding.decode(listing, paths.CACHE / "folder-a")
    assert np.array_equal(shown(data._open(paths.CACHE / "folder-a", "a")), np.stack(parted))
    assert held() == ["decoding.lock", "folder-a"]


def test_two_at_once_decode_each_picture_once(
    parted: list[Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    names, found = counted(monkeypatch), list[ImageSet]()
    meet = threading.Barrier(2, timeout=10)
    decode = decoding.decode

    def together(*arguments: Any) -> None:
        meet.wait()
        decode(*arguments)

    monkeypatch.setattr(decoding, "decode", together)
    workers = [threading.Thread(target=lambda: found.append(data.load(WHOLE))) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 2 and len(names) == 11
    assert found[0].digest == found[1].digest


# ------------------------------------------------------------------ what an opening checks


def flip(folder: Path) -> None:
    """Change one pixel."""
    content = bytearray((folder / "x_test.npy").read_bytes())
    content[-1] ^= 1
    (folder / "x_test.npy").write_bytes(content)


def shorten(folder: Path) -> None:
    """Cut the pictures short."""
    os.truncate(folder / "x_train.npy", (folder / "x_train.npy").stat().st_size - 1)


def fewer(folder: Path) -> None:
    """Leave fewer pictures, in a file that is whole."""
    np.save(folder / "x_train.npy", np.load(folder / "x_train.npy")[:-1])


def relabel(folder: Path) -> None:
    """Change one label."""
    labels = np.load(folder / "y_train.npy")
    np.save(folder / "y_train.npy", 1 - labels)


def baptise(folder: Path) -> None:
    """Change the name of a class."""
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "classes": ["cow", "dog"]}))


def doubt(folder: Path) -> None:
    """Change the checksum of a chunk."""
    text = (folder / "x_train.jsonl").read_text()
    (folder / "x_train.jsonl").write_text(text.replace('"sha256": "', '"sha256": "0', 1))


def forget(folder: Path) -> None:
    """Lose the checksums."""
    (folder / "x_test.jsonl").unlink()


@pytest.mark.parametrize("harm", [flip, shorten, fewer, relabel, baptise, doubt, forget])
@pytest.mark.parametrize("large", [False, True])
def test_a_damaged_set_is_decoded_again_unless_only_pixels_of_a_large_one_changed(
    parted: list[Bytes], monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None], large: bool
) -> None:
    if large:
        monkeypatch.setattr(cache, "WHOLE", 100)
    data.load(WHOLE)
    (folder,) = paths.CACHE.glob("folder-*")
    harm(folder)
    if large and harm is flip:
        assert not np.array_equal(shown(data.load(WHOLE)), np.stack(parted))
        return
    with pytest.warns(UserWarning, match=f"{folder.name} is damaged and is made again"):
        found = data.load(WHOLE)
    assert np.array_equal(shown(found), np.stack(parted))
    assert np.array_equal(shown(data.load(WHOLE)), np.stack(parted))


# ------------------------------------------------------------------ larger than memory


def test_decoding_takes_no_more_memory_for_more_pictures(
    raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """240 pictures of 128 x 128 are 11.8 MB, 60 of them 2.9 MB, a chunk of 8 is 0.4 MB.

    Files of one colour are small, so what Pillow leaves to the garbage collection is small, too.
    """

    def peak(count: int) -> int:
        for number in range(count):
            put(raw / "set" / "cat" / f"{number:03d}.png", np.full((128, 128, 3), number, np.uint8))
        tracemalloc.start()
        found = data.load({**CUT, "size": 128})
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(found.x_train) + len(found.x_test) == count
        return highest

    monkeypatch.setattr(decoding, "CHUNK", 8 * 128 * 128 * 3)
    peak(8)  # imports, pools
    few, many = peak(60), peak(240)
    assert many - few < 2_000_000
    assert many < 4_000_000


@pytest.fixture
def huge(tmp_path: Path) -> ImageSet:
    """A set four times as large as memory, all black: a file with holes takes no place."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    side = 1000
    count = 4 * memory // (3 * side**2)
    chunk = {"pictures": count, "sha256": "0", "sums": [[0] * 3] * 2}
    folder = tmp_path / "cache" / "huge"
    folder.mkdir(parents=True)
    some = {"test": 4, "train": count}
    for part, many in some.items():
        shape = (many, side, side, 3)
        np.lib.format.open_memmap(folder / f"x_{part}.npy", "w+", np.uint8, shape)
    (folder / "x_train.jsonl").write_text(json.dumps(chunk) + "\n")
    seen = {f"x_{part}": cache.mapped(folder / f"x_{part}.npy") for part in some}
    seen = {key: array.transpose(0, 3, 1, 2) for key, array in seen.items()}
    arrays = {f"{key}_{p}": np.arange(n) % 2 for key in ("y", "domain") for p, n in some.items()}
    arrays |= {"mean": np.zeros(3, np.float32), "std": np.ones(3, np.float32)}
    names = [["a", "b"], ["c", "d"]]
    found = cache.digest(arrays | seen, names, {"x_train": [chunk]})
    cache.save(arrays, names, found, folder)
    return data._open(folder, "huge")


def test_a_set_larger_than_memory_is_opened_and_trained_on(huge: ImageSet) -> None:
    """A copy of it would be refused, and so would private pages, as none would ever fit."""
    network = Network("cnn", features=4, channels=(2,) * 6)
    split = Split("classes", clients=1, tasks=1, classes_per_task=2)
    training = Training(rounds=1, epochs=1, batch=2, rate=0.1, shift=1, flip=True)
    work = Workspace(Setting("huge", {}, split, network, training), huge)
    some = torch.tensor([0, 1, len(huge.y_train) // 2, len(huge.y_train) - 1])
    seen = [(x, y) for x, y in work.batches(Visit(0, 0, 0, 0), some)]
    assert [x.shape for x, _ in seen] == [(2, 3, 1000, 1000)] * 2
    assert not torch.cat([x for x, _ in seen]).any()
    assert work.x_train.data_ptr() == huge.x_train.data_ptr()
    assert work.outputs(huge.x_train[some]).shape == (4, 2)


# ------------------------------------------------------------------ progress and training


def test_logs_have_a_line_a_tenth_and_a_person_a_bar(
    raw: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(raw / "set", {"cat": 100})
    monkeypatch.setenv("STAMP_PROGRESS", "lines")
    data.load(CUT)
    (folder,) = paths.CACHE.glob("folder-*")
    lines = capsys.readouterr().out.splitlines()
    done = [line.split()[2] for line in lines]
    assert done[:10] == [f"{k}/75" for k in (9, 15, 24, 30, 39, 45, 54, 60, 69, 75)]
    assert lines[0].startswith(f"{folder.name} train  9/75 pictures  ")
    assert [line.split()[1] for line in lines] == ["train"] * 10 + ["test"] * 9
    monkeypatch.setenv("STAMP_PROGRESS", "bar")
    data.load({**CUT, "size": 5})
    shown = capsys.readouterr()
    assert not shown.out and "75/75" in shown.err


def learn(spec: dict[str, Any], tasks: int, rounds: int, **network: Any) -> torch.Tensor:
    """The final accuracies [client, task] of FedAvg, client for client its own order of domains."""
    cell = small.tiny(
        source=spec,
        split={"kind": "domains", "clients": 2, "tasks": tasks, "classes_per_task": None},
        training={"rounds": rounds, "rate": 0.05},
        network=network or {"kind": "mlp", "features": 16},
    )
    return small.run(cell).accuracy("global")[-1]


def test_a_folder_of_domains_is_learned_domain_by_domain(raw: Path) -> None:
    """Dark and light pictures, each domain in a colour of its own."""
    for place, domain in enumerate(("red", "green", "blue")):
        for number in range(24):
            for name, light in (("dark", 20), ("light", 200)):
                content = np.random.default_rng(number).integers(0, 50, (SIDE, SIDE, 3), np.uint8)
                content[..., place] += light
                put(raw / "set" / domain / name / f"{number:02d}.png", content)
    spec = {**CUT, "domains": ["red", "green", "blue"]}
    assert learn(spec, tasks=3, rounds=3).min() > 0.9


@pytest.mark.skipif(not REAL, reason="STAMP_CHECK_DATA names no folder with .npz files")
def test_a_folder_of_real_domains_is_learned_domain_by_domain(raw: Path) -> None:
    with np.load(Path(REAL or "", "pacs_mini.npz")) as found:
        for part in cache.PARTS:
            x, y, where = (found[f"{key}_{part}"] for key in ("x", "y", "domain"))
            for k in range(len(x)):
                path = raw / "set" / found["domains"][where[k]] / found["classes"][y[k]]
                put(path / f"{part}{k:05d}.png", x[k])
        domains = found["domains"].tolist()
    spec = {**CUT, "domains": domains, "size": 32}
    accuracy = learn(spec, 4, 3, kind="cnn", channels=[8, 16], features=32)
    assert accuracy.mean() > 1.3 / 7
