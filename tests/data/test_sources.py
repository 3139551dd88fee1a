"""Sets from torchvision: read from its files, from an .npz file, or named where they are not."""

import bz2
import gzip
import hashlib
import io
import pickle
import shutil
import tarfile
import urllib.request
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
from scipy.io import savemat

from stamp_core.core import vision
from stamp_core.data import images as images_module
from stamp_core.data.images import ImageArrays
from stamp_core.data.images import ImageOptions as Options
from stamp_core.data.loading import find_source, load_dataset
from stamp_core.data.sources import torchvision_sets
from workbench.sources import digit10

Files = dict[str, bytes]  # by their paths below data/raw

DIGITS = ("mnist", "emnist_digits", "usps", "svhn")
LABELS = (*range(10), 3, 3)  # of the training images of every set here; tests are 0..9


@pytest.fixture(autouse=True)
def published(monkeypatch):
    """The contents of files that torchvision takes for the published ones, without a network."""
    contents = set[bytes]()
    utils = vision.load_torchvision().datasets.utils
    monkeypatch.setattr(utils, "check_md5", lambda path, md5: Path(path).read_bytes() in contents)
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    return contents


def refuse(*_: object, **__: object) -> None:
    raise URLError("no network")


def drawn(labels: tuple[int, ...], *shape: int) -> np.ndarray:
    return np.random.default_rng([*labels, *shape]).integers(
        0, 256, (len(labels), *shape), np.uint8
    )


def parts(*shape: int) -> list[tuple[str, np.ndarray, np.ndarray]]:
    both = ("train", LABELS), ("test", tuple(range(10)))
    return [(part, drawn(labels, *shape), np.array(labels)) for part, labels in both]


def idx(array: np.ndarray) -> bytes:
    head = np.array([0x0800 + array.ndim, *array.shape], ">u4")
    return head.tobytes() + array.astype(np.uint8).tobytes()


def tar(files: Files) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as opened:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            opened.addfile(member, io.BytesIO(content))
    return out.getvalue()


def write_cifar(name: str, key: str, names: list[str]) -> tuple[Files, Files]:
    kind = getattr(vision.load_torchvision().datasets, name)
    (_, x_train, y_train), (_, *test) = parts(3, 32, 32)
    batches = len(kind.train_list)
    cuts = zip(np.array_split(x_train, batches), np.array_split(y_train, batches), strict=True)
    listed = zip([*kind.train_list, *kind.test_list], [*cuts, test], strict=True)
    files = {
        file: pickle.dumps({"data": x.reshape(-1, 3072), key: y.tolist()})
        for (file, _), (x, y) in listed
    }
    files[kind.meta["filename"]] = pickle.dumps({kind.meta["key"]: names})
    read = {f"{kind.base_folder}/{file}": content for file, content in files.items()}
    return read, {kind.filename: tar(read)}


def write_mnist() -> tuple[Files, Files]:
    read = {}
    for (_, x, y), start in zip(parts(28, 28), ("train", "t10k"), strict=True):
        read |= {f"{start}-images-idx3-ubyte": idx(x), f"{start}-labels-idx1-ubyte": idx(y)}
    packed = {f"{file}.gz": gzip.compress(content) for file, content in read.items()}
    return tuple({f"MNIST/raw/{f}": c for f, c in files.items()} for files in (read, packed))


def write_emnist() -> tuple[Files, Files]:
    read, archive = {}, io.BytesIO()
    for part, x, y in parts(28, 28):
        start = f"emnist-digits-{part}"
        read[f"{start}-images-idx3-ubyte"] = idx(x.transpose(0, 2, 1))
        read[f"{start}-labels-idx1-ubyte"] = idx(y)
    with zipfile.ZipFile(archive, "w") as opened:
        for file, content in read.items():
            opened.writestr(f"gzip/{file}.gz", gzip.compress(content))
    files = {f"EMNIST/raw/{file}": content for file, content in read.items()}
    return files, {"EMNIST/raw/gzip.zip": archive.getvalue()}


def write_usps() -> tuple[Files, Files]:
    """Lines `label 1:pixel 2:pixel ...` with labels from 1 and pixels in -1..1."""
    read = {}
    for (_, x, y), file in zip(parts(16, 16), ("usps.bz2", "usps.t.bz2"), strict=True):
        lines = [
            f"{label + 1} " + " ".join(f"{k}:{2 * v / 255 - 1:.6f}" for k, v in enumerate(row, 1))
            for row, label in zip(x.reshape(len(x), -1).astype(int), y, strict=True)
        ]
        read[file] = bz2.compress(("\n".join(lines) + "\n").encode())
    return read, read


def write_svhn() -> tuple[Files, Files]:
    """Images [H, W, C, N]; the label of a zero is 10."""
    read = {}
    for part, x, y in parts(3, 32, 32):
        out = io.BytesIO()
        savemat(out, {"X": x.transpose(2, 3, 1, 0), "y": np.where(y == 0, 10, y)[:, None]})
        read[f"{part}_32x32.mat"] = out.getvalue()
    return read, read


KINDS, FINE = ([f"{name} {k}" for k in range(n)] for name, n in (("kind", 10), ("fine", 100)))
WRITERS = {
    "cifar10": partial(write_cifar, "CIFAR10", "labels", KINDS),
    "cifar100": partial(write_cifar, "CIFAR100", "fine_labels", FINE),
    "mnist": write_mnist,
    "emnist_digits": write_emnist,
    "usps": write_usps,
    "svhn": write_svhn,
}


def written(published: set[bytes], name: str) -> tuple[Files, Files]:
    """A small set: the files that are read, and those that are downloaded."""
    read, fetched = WRITERS[name]()
    published.update(read.values(), fetched.values())
    return read, fetched


SHAPES = {"cifar10": (3, 32, 32), "cifar100": (3, 32, 32), "usps": (16, 16), "svhn": (3, 32, 32)}
PLAIN = tuple("0123456789")
SPOKEN = ("0 - zero", "1 - one", "2 - two", "3 - three", "4 - four", "5 - five", "6 - six")
CLASSES = {
    "cifar10": tuple(KINDS),
    "cifar100": tuple(FINE),
    "mnist": (*SPOKEN, "7 - seven", "8 - eight", "9 - nine"),
}


def put(raw: Path, files: Files) -> None:
    for file, content in files.items():
        (raw / file).parent.mkdir(parents=True, exist_ok=True)
        (raw / file).write_bytes(content)


def source(name: str) -> Any:
    return find_source({"source": name})[0]


def make(name: str, options: Options | None = None) -> ImageArrays:
    images: ImageArrays = source(name).make(options or Options())
    return images


PUBLISHED = {  # training and test images, as the pages of these sets state
    "cifar10": (50_000, 10_000),
    "cifar100": (50_000, 10_000),
    "mnist": (60_000, 10_000),
    "emnist_digits": (240_000, 40_000),
    "usps": (7291, 2007),
    "svhn": (73_257, 26_032),
}


@pytest.mark.parametrize("name", WRITERS)
def test_images_labels_and_names_are_those_of_the_files(name, raw, published):
    """USPS holds six decimals of 2 v / 255 - 1, which torchvision cuts to v or v - 1."""
    put(raw, written(published, name)[0])
    found = make(name)
    shape = SHAPES.get(name, (28, 28))
    for part, x, y in parts(*shape):
        pixels = getattr(found, f"x_{part}")
        want = x.reshape(len(x), -1, *shape[-2:])
        if "cifar" in name:  # ordered by class and digest
            digests = [hashlib.sha256(np.moveaxis(each, 0, -1).tobytes()).digest() for each in want]
            order = sorted(range(len(y)), key=lambda index: (y[index], digests[index]))
            want, y = want[order], y[order]
        assert pixels.dtype == np.uint8 and pixels.shape == want.shape
        assert 0 <= (want.astype(int) - pixels).max() <= (name == "usps")
        assert (want.astype(int) - pixels).min() == 0
        labels = getattr(found, f"y_{part}")
        assert labels.dtype == np.int64 and labels.tolist() == y.tolist()
    assert found.classes == CLASSES.get(name, PLAIN)
    assert found.domains == ("all",) and found.domain_train is None


def small_cifar10(patch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """The source with the numbers of images of the small set, and the arrays of its .npz file."""
    arrays: dict[str, Any] = {"classes": np.array(KINDS)}
    counts = {}
    for part, x, y in parts(3, 32, 32):
        arrays |= {f"x_{part}": x.transpose(0, 2, 3, 1), f"y_{part}": y}
        counts[part] = tuple(np.bincount(y, minlength=10))
    changed = replace(torchvision_sets.SETS["cifar10"], **counts, digest=None)
    patch.setitem(torchvision_sets.SETS, "cifar10", changed)
    return changed, arrays


def test_an_npz_file_and_torchvisions_files_give_the_same_arrays_in_the_same_order(
    raw, published, monkeypatch
):
    """By class and in it by SHA-256, however the images are stored."""
    put(raw, written(published, "cifar10")[0])
    small_set, arrays = small_cifar10(monkeypatch)
    official = small_set.make(Options())
    order = np.random.default_rng(0).permutation(len(arrays["y_train"]))
    shuffled = arrays | {key: arrays[key][order] for key in ("x_train", "y_train")}
    np.savez(raw / "cifar10.npz", **shuffled)
    monkeypatch.setattr(vision, "load_torchvision", refuse)
    copied = small_set.make(Options())
    for key in ("x_train", "y_train", "x_test", "y_test"):
        assert np.array_equal(getattr(official, key), getattr(copied, key))
    assert official.classes == copied.classes
    assert (np.diff(official.y_train) >= 0).all()


@pytest.mark.parametrize("name", WRITERS)
def test_the_published_numbers_of_images_and_their_shape_are_known_before(name, raw, published):
    for options in (Options(), Options(size=10, grey=True)):
        counts = source(name).expected(options)
        assert (counts.train.sum(), counts.test.sum()) == PUBLISHED[name]
        assert counts.train.min() > 0 and counts.test.min() > 0
        put(raw, written(published, name)[0])
        found = make(name, options)
        assert found.x_train.shape[1:] == found.x_test.shape[1:] == counts.shape
        assert counts.train.shape == counts.test.shape == (1, len(found.classes))


@pytest.mark.parametrize("name", WRITERS)
def test_a_missing_set_is_named_and_read_from_what_torchvision_downloads(name, raw, published):
    """The files that the error asks for are those that torchvision reads or unpacks."""
    with pytest.raises(FileNotFoundError) as error:
        make(name)
    text, _, files = str(error.value).partition("; put there, in place of what is damaged: ")
    reason = "<urlopen error no network>"
    assert text == f"{name} is not whole in {raw} and could not be downloaded ({reason})"
    _, fetched = written(published, name)
    assert files.split(", ") == list(fetched)
    put(raw, fetched)
    assert len(make(name).x_test) == 10


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_was_cut_is_refused(name, raw, published):
    files, _ = written(published, name)
    for file in files:
        put(raw, files | {file: files[file][:-1]})
        with pytest.raises(FileNotFoundError, match=f"{name} is not whole in {raw}"):
            make(name)


def test_a_set_that_is_cached_needs_neither_its_files_nor_torchvision(raw, published, monkeypatch):
    put(raw, written(published, "mnist")[0])
    first = load_dataset({"source": "mnist"})
    monkeypatch.setattr(vision, "load_torchvision", refuse)
    shutil.rmtree(raw)
    assert load_dataset({"source": "mnist"}).digest == first.digest


@pytest.mark.parametrize("change", ["y_train", "x_train", None])
def test_an_npz_file_of_other_images_is_refused_by_name(change, raw, monkeypatch):
    """Another label, which changes the counts, and another pixel, which changes the digest."""
    small_set, arrays = small_cifar10(monkeypatch)
    raw.mkdir()
    np.savez(raw / "cifar10.npz", **arrays)
    small_set = replace(small_set, digest=torchvision_sets.digest_of(small_set.make(Options())))
    if change is None:
        assert len(small_set.make(Options()).x_test) == 10
        return
    arrays[change] = arrays[change].copy()
    arrays[change].flat[10] += 1
    np.savez(raw / "cifar10.npz", **arrays)
    with pytest.raises(ValueError, match=f"{raw / 'cifar10.npz'} does not hold the published"):
        small_set.make(Options())


def test_grey_is_the_usual_weighted_sum():
    """ITU-R 601-2 as whole numbers: 65536 * (0.299, 0.587, 0.114) = (19595, 38470, 7471)."""
    x = drawn((1, 2, 3), 3, 9, 7)
    weights = np.array([19595, 38470, 7471])[:, None, None]
    expected = ((x * weights).sum(1, keepdims=True) + 32768) >> 16
    found = images_module.convert(x, Options(grey=True))
    assert found.dtype == np.uint8 and np.array_equal(found, expected)


def test_half_the_size_is_a_weighted_mean_of_neighbours():
    """A triangle of half-width 2 at distances 0.5 and 1.5 has weights 3, 3 and 1, 1, of 8."""
    x = drawn((5,), 1, 12, 12)
    weights = np.zeros((6, 12))
    for row, column in np.ndindex(6, 12):
        weights[row, column] = max(0, 2 - abs(2 * row + 0.5 - column))
    weights /= weights.sum(1, keepdims=True)
    found = images_module.convert(x, Options(size=6))
    assert np.abs(found[0, 0] - weights @ x[0, 0] @ weights.T).max() <= 1


@pytest.fixture
def four(raw, published, monkeypatch):
    """All four sets of digits; their published numbers are those of the files."""
    for name in DIGITS:
        put(raw, written(published, name)[0])
        small = replace(source(name), train=tuple(np.bincount(LABELS)), test=(1,) * 10)
        monkeypatch.setitem(digit10.SETS, name.removesuffix("_digits"), small)


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize("per_class", [None, 2, 1])
@pytest.mark.parametrize("sets", [("mnist", "emnist", "usps", "svhn"), ("usps", "mnist")])
def test_digit10_is_domains_of_the_first_grey_digits_of_each_class(sets, per_class):
    """Label 3 is at 3, 10 and 11 of the training images, all others once."""
    found = load_dataset({"source": "digit10", "sets": list(sets), "per_class": per_class})
    assert found.domains == sets and found.classes == PLAIN
    assert found.x_train.shape[1:] == (1, 28, 28)
    counts = digit10.expected(digit10.Options(sets, per_class))
    assert counts.shape == (1, 28, 28) and counts.domains == sets
    kept = {None: 12, 2: 11, 1: 10}[per_class]
    for domain, name in enumerate(sets):
        own = make("emnist_digits" if name == "emnist" else name, Options(28, True))
        for part, count in (("train", kept), ("test", 10)):
            where = getattr(found, f"domain_{part}") == domain
            for key in (f"x_{part}", f"y_{part}"):
                assert np.array_equal(getattr(found, key)[where], getattr(own, key)[:count])
            table = np.bincount(getattr(found, f"y_{part}")[where])
            assert getattr(counts, part)[domain].tolist() == table.tolist()
