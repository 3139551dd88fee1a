"""Sets from torchvision: read from its files, downloaded whole or not at all, errors by name."""

import bz2
import gzip
import hashlib
import io
import pickle
import re
import socket
import tarfile
import urllib.request
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
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

ALL = ("cifar10", "cifar100", "mnist", "emnist_digits", "usps", "svhn")
DIGITS = ("mnist", "emnist_digits", "usps", "svhn")
LABELS = (*range(10), 3, 3)  # of the training images of every set here; tests are 0..9
MNIST = "MNIST/raw/t10k-images-idx3-ubyte"
EMNIST = "EMNIST/raw/emnist-digits-train-images-idx3-ubyte"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def refuse(*_: object, **__: object) -> None:
    raise URLError("no network")


def drawn(labels: tuple[int, ...], *shape: int) -> np.ndarray:
    """Random images, another for each place and label."""
    return np.random.default_rng([*labels, *shape]).integers(
        0, 256, (len(labels), *shape), np.uint8
    )


def parts(*shape: int) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Training and test images with their labels."""
    both = ("train", LABELS), ("test", tuple(range(10)))
    return [(part, drawn(labels, *shape), np.array(labels)) for part, labels in both]


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


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


def cifar(patch: pytest.MonkeyPatch, name: str, key: str, names: list[str]) -> tuple[Files, Files]:
    """A small CIFAR: the files that are read, and the archive that they come in."""
    kind = getattr(vision.load_torchvision().datasets, name.upper())
    (_, x_train, y_train), (_, x_test, y_test) = parts(3, 32, 32)
    batches, files = len(kind.train_list), {}
    cuts = zip(np.array_split(x_train, batches), np.array_split(y_train, batches), strict=True)
    for (file, _), (x, y) in zip(
        [*kind.train_list, *kind.test_list], [*cuts, (x_test, y_test)], strict=True
    ):
        files[file] = pickle.dumps({"data": x.reshape(-1, 3072), key: y.tolist()})
    files[kind.meta["filename"]] = pickle.dumps({kind.meta["key"]: names})
    for listed in ("train_list", "test_list"):
        sums = [[file, md5(files[file])] for file, _ in getattr(kind, listed)]
        patch.setattr(kind, listed, sums)
    patch.setattr(kind, "meta", {**kind.meta, "md5": md5(files[kind.meta["filename"]])})
    read = {f"{kind.base_folder}/{file}": content for file, content in files.items()}
    archive = tar(read)
    patch.setattr(kind, "tgz_md5", md5(archive))
    return read, {kind.filename: archive}


def written(patch: pytest.MonkeyPatch, name: str) -> tuple[Files, Files]:
    """A small set: the files that are read, and those that are downloaded; the checksums fit."""
    return WRITERS[name](patch)


def write_mnist(patch: pytest.MonkeyPatch) -> tuple[Files, Files]:
    kind, read = vision.load_torchvision().datasets.MNIST, {}
    for (_, x, y), start in zip(parts(28, 28), ("train", "t10k"), strict=True):
        read |= {f"{start}-images-idx3-ubyte": idx(x), f"{start}-labels-idx1-ubyte": idx(y)}
    packed = {f"{file}.gz": gzip.compress(content) for file, content in read.items()}
    patch.setattr(kind, "resources", [(file, md5(packed[file])) for file, _ in kind.resources])
    patch.setattr(
        torchvision_sets, "MNIST_MD5", {file: md5(content) for file, content in read.items()}
    )
    return tuple({f"MNIST/raw/{f}": c for f, c in files.items()} for files in (read, packed))


def write_emnist(patch: pytest.MonkeyPatch) -> tuple[Files, Files]:
    """Its files hold rows for columns."""
    read, archive = {}, io.BytesIO()
    for part, x, y in parts(28, 28):
        start = f"emnist-digits-{part}"
        read[f"{start}-images-idx3-ubyte"] = idx(x.transpose(0, 2, 1))
        read[f"{start}-labels-idx1-ubyte"] = idx(y)
    with zipfile.ZipFile(archive, "w") as opened:
        for file, content in read.items():
            opened.writestr(f"gzip/{file}.gz", gzip.compress(content))
    patch.setattr(vision.load_torchvision().datasets.EMNIST, "md5", md5(archive.getvalue()))
    files = {f"EMNIST/raw/{file}": content for file, content in read.items()}
    return files, {"EMNIST/raw/gzip.zip": archive.getvalue()}


def write_usps(patch: pytest.MonkeyPatch) -> tuple[Files, Files]:
    """Lines `label 1:pixel 2:pixel ...` with labels from 1 and pixels in -1..1."""
    kind, read, sums = vision.load_torchvision().datasets.USPS, {}, {}
    for part, x, y in parts(16, 16):
        url, file, _ = kind.split_list[part]
        lines = [
            f"{label + 1} " + " ".join(f"{k}:{2 * v / 255 - 1:.6f}" for k, v in enumerate(row, 1))
            for row, label in zip(x.reshape(len(x), -1).astype(int), y, strict=True)
        ]
        read[file] = bz2.compress(("\n".join(lines) + "\n").encode())
        sums[part] = [url, file, md5(read[file])]
    patch.setattr(kind, "split_list", sums)
    return read, read


def write_svhn(patch: pytest.MonkeyPatch) -> tuple[Files, Files]:
    """Images [H, W, C, N]; the label of a zero is 10."""
    kind, read = vision.load_torchvision().datasets.SVHN, {}
    sums = {"extra": ["", "extra_32x32.mat", "0"]}
    for part, x, y in parts(3, 32, 32):
        url, file, _ = kind.split_list[part]
        out = io.BytesIO()
        savemat(out, {"X": x.transpose(2, 3, 1, 0), "y": np.where(y == 0, 10, y)[:, None]})
        read[file], sums[part] = out.getvalue(), [url, file, md5(out.getvalue())]
    patch.setattr(kind, "split_list", sums)
    return read, read


WRITERS: dict[str, Callable[[pytest.MonkeyPatch], tuple[Files, Files]]] = {
    "cifar10": lambda patch: cifar(patch, "cifar10", "labels", [f"kind {k}" for k in range(10)]),
    "cifar100": lambda patch: cifar(
        patch, "cifar100", "fine_labels", [f"fine {k}" for k in range(100)]
    ),
    "mnist": write_mnist,
    "emnist_digits": write_emnist,
    "usps": write_usps,
    "svhn": write_svhn,
}
SHAPES = {"cifar10": (3, 32, 32), "cifar100": (3, 32, 32), "usps": (16, 16), "svhn": (3, 32, 32)}
PLAIN = tuple("0123456789")
SPOKEN = ("0 - zero", "1 - one", "2 - two", "3 - three", "4 - four", "5 - five", "6 - six")
CLASSES = {
    "cifar10": tuple(f"kind {k}" for k in range(10)),
    "cifar100": tuple(f"fine {k}" for k in range(100)),
    "mnist": (*SPOKEN, "7 - seven", "8 - eight", "9 - nine"),
}


def put(raw: Path, files: Files) -> None:
    """Write files below data/raw."""
    for file, content in files.items():
        (raw / file).parent.mkdir(parents=True, exist_ok=True)
        (raw / file).write_bytes(content)


def there(raw: Path) -> set[str]:
    """All files below data/raw, also hidden ones, and temporary folders."""
    found = {path for path in raw.rglob("*") if path.is_file() or path.name.startswith(".")}
    return {path.relative_to(raw).as_posix() for path in found}


class Answer(io.BytesIO):
    """What a server sends; once something was read, it breaks if it has an error for that."""

    def __init__(self, url: str, content: bytes, got: list[str], broken: BaseException | None):
        super().__init__(content)
        self.url, self.length, self.got, self.broken = url, len(content), got, broken

    def read(self, size: int | None = -1) -> bytes:
        if not self.tell():
            self.got.append(Path(self.url).name)
        elif self.broken:
            raise self.broken
        return super().read(size)


def serve(
    patch: pytest.MonkeyPatch, files: Files, broken: BaseException | None = None
) -> list[str]:
    """Let the network have these files; the list fills with the names of those that are got."""
    named, got = {Path(file).name: content for file, content in files.items()}, []

    def urlopen(request: urllib.request.Request, *_: object, **__: object) -> Answer:
        return Answer(request.full_url, named[Path(request.full_url).name], got, broken)

    patch.setattr(urllib.request, "urlopen", urlopen)
    return got


def source(name: str) -> Any:
    """A source."""
    return find_source({"source": name, **({"file": "a.npz"} if name == "npz" else {})})[0]


def make(name: str, options: Options | None = None) -> ImageArrays:
    """The images of a source."""
    images: ImageArrays = source(name).make(options or Options())
    return images


ARCHIVES = {
    "cifar10": ["cifar-10-python.tar.gz"],
    "cifar100": ["cifar-100-python.tar.gz"],
    "mnist": [
        f"MNIST/raw/{part}-{what}-ubyte.gz"
        for part in ("train", "t10k")
        for what in ("images-idx3", "labels-idx1")
    ],
    "emnist_digits": ["EMNIST/raw/gzip.zip"],
    "usps": ["usps.bz2", "usps.t.bz2"],
    "svhn": ["train_32x32.mat", "test_32x32.mat"],
}
PUBLISHED = {  # training and test images, as the pages of these sets state
    "cifar10": (50_000, 10_000),
    "cifar100": (50_000, 10_000),
    "mnist": (60_000, 10_000),
    "emnist_digits": (240_000, 40_000),
    "usps": (7291, 2007),
    "svhn": (73_257, 26_032),
}


@pytest.mark.parametrize("name", ALL)
def test_images_labels_and_names_are_those_of_the_files(
    name: str, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """USPS holds six decimals of 2 v / 255 - 1, which torchvision cuts to v or v - 1."""
    put(raw, written(monkeypatch, name)[0])
    found = make(name)
    shape = SHAPES.get(name, (28, 28))
    for part, x, y in parts(*shape):
        pixels = getattr(found, f"x_{part}")
        want = x.reshape(len(x), -1, *shape[-2:])
        if "cifar" in name:  # ordered by class and digest
            digests = [hashlib.sha256(np.moveaxis(each, 0, -1).tobytes()).digest() for each in want]
            order = sorted(range(len(y)), key=lambda place: (y[place], digests[place]))
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
    images = {
        f"{key}_{part}": value
        for part, *xy in parts(3, 32, 32)
        for key, value in zip("xy", xy, strict=True)
    }
    images["x_train"], images["x_test"] = (
        images[f"x_{part}"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        for part in ("train", "test")
    )
    counts = {
        part: tuple(np.bincount(images[f"y_{part}"], minlength=10)) for part in ("train", "test")
    }
    changed = replace(torchvision_sets.SETS["cifar10"], **counts, digest=None)
    patch.setitem(torchvision_sets.SETS, "cifar10", changed)
    return changed, {**images, "classes": np.array([f"kind {k}" for k in range(10)])}


def test_an_npz_file_and_torchvisions_files_give_the_same_arrays_in_the_same_order(
    raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By class and in it by SHA-256, however the images are stored."""
    put(raw, written(monkeypatch, "cifar10")[0])
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": 1}, "y_test has"),
        ({"x_train": 1}, "the SHA-256 of its images is"),
        ({"x_train": None}, "x_train is missing"),
    ],
)
def test_an_npz_file_of_other_images_is_refused_by_name(
    changes: dict[str, Any], message: str, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_set, arrays = small_cifar10(monkeypatch)
    raw.mkdir(exist_ok=True)
    np.savez(raw / "cifar10.npz", **arrays)
    small_set = replace(small_set, digest=torchvision_sets.digest_of(small_set.make(Options())))
    for key, shift in changes.items():
        if shift is None:
            del arrays[key]
        else:
            arrays[key] = arrays[key].copy()
            arrays[key].flat[0] += shift
    np.savez(raw / "cifar10.npz", **arrays)
    with pytest.raises(ValueError, match=f"{raw / 'cifar10.npz'}.*{message}"):
        small_set.make(Options())


@pytest.mark.parametrize("name", ALL)
def test_the_published_numbers_of_images_and_their_shape_are_known_before(
    name: str, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in (Options(), Options(size=10, grey=True)):
        counts = source(name).expected(options)
        assert (counts.train.sum(), counts.test.sum()) == PUBLISHED[name]
        assert counts.train.min() > 0 and counts.test.min() > 0
        put(raw, written(monkeypatch, name)[0])
        found = make(name, options)
        assert found.x_train.shape[1:] == found.x_test.shape[1:] == counts.shape
        assert counts.train.shape == counts.test.shape == (1, len(found.classes))


def test_a_set_that_is_cached_needs_neither_its_files_nor_torchvision(
    raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(raw, written(monkeypatch, "mnist")[0])
    first = load_dataset({"source": "mnist"})
    monkeypatch.setattr(vision, "load_torchvision", refuse)
    (raw / MNIST).unlink()
    assert load_dataset({"source": "mnist"}).digest == first.digest
    assert first.x_train.shape == (12, 1, 28, 28) and first.classes == CLASSES["mnist"]


@pytest.mark.parametrize("name", (*ALL, "digit10", "npz"))
def test_sources_name_the_packages_that_they_come_from(name: str) -> None:
    """Versions of theirs enter the key of the cache: other ones may read other bytes."""
    assert ("torchvision" in source(name).PACKAGES) == (name != "npz")
    assert ("scipy" in source(name).PACKAGES) == (name in ("svhn", "digit10"))


# ------------------------------------------------------------------ downloads


@pytest.mark.parametrize("name", ALL)
def test_a_missing_set_is_named_then_downloaded_once_then_read(
    name: str, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the files that are read stay; archives and hidden folders do not."""
    with pytest.raises(FileNotFoundError) as error:
        make(name)
    text, _, files = str(error.value).partition("; put there: ")
    reason = "<urlopen error no network>"
    assert text == f"{name} is not in {raw} and could not be downloaded ({reason})"
    assert re.sub(r" \(MD5 [0-9a-f]{32}\)", "", files) == ", ".join(ARCHIVES[name])
    assert files.count("MD5") == len(ARCHIVES[name]) and not there(raw)
    read, fetched = written(monkeypatch, name)
    got = serve(monkeypatch, fetched)
    first = make(name)
    assert there(raw) == set(read) and got == [Path(file).name for file in fetched]
    assert np.array_equal(make(name).x_train, first.x_train) and len(got) == len(fetched)


@pytest.mark.parametrize("name", ALL)
def test_archives_in_data_raw_are_unpacked_without_a_network(
    name: str, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, fetched = written(monkeypatch, name)
    put(raw, fetched)
    assert len(make(name).x_test) == 10 and there(raw) == {*read, *fetched}


@pytest.mark.parametrize("name", ["cifar10", "mnist", "usps"])
def test_a_missing_file_is_downloaded_and_others_are_not_touched(
    name: str, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, fetched = written(monkeypatch, name)
    gone, *rest = read
    put(raw, {file: read[file] for file in rest})
    before = {file: (raw / file).stat().st_mtime_ns for file in rest}
    if name == "usps":  # the error names what is missing alone
        with pytest.raises(FileNotFoundError, match=rf"put there: {gone} \(MD5 \w+\)$"):
            make(name)
    got = serve(monkeypatch, fetched)
    make(name)
    assert (raw / gone).read_bytes() == read[gone]
    assert {file: (raw / file).stat().st_mtime_ns for file in rest} == before
    assert name != "usps" or got == [gone]


BROKEN = {
    "File not found": None,  # torchvision's words for another checksum
    "timed out": TimeoutError("timed out"),
    "^$": KeyboardInterrupt(),
}


@pytest.mark.parametrize("reason", BROKEN)
@pytest.mark.parametrize("name", ["cifar10", "emnist_digits", "svhn"])
def test_a_download_that_fails_leaves_nothing(
    name: str, reason: str, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, fetched = written(monkeypatch, name)
    serve(monkeypatch, {file: bytes(100_000) for file in fetched}, BROKEN[reason])
    with pytest.raises((FileNotFoundError, KeyboardInterrupt), match=reason):
        make(name)
    assert not there(raw)


def test_a_download_without_data_is_given_up(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit of its own, urlopen waits as long as sockets do by default: for ever."""
    limits = []

    def urlopen(*_: object, **__: object) -> None:
        limits.append(socket.getdefaulttimeout())
        raise TimeoutError("timed out")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(FileNotFoundError, match="timed out"):
        make("usps")
    assert set(limits) == {torchvision_sets.STALL_SECONDS} and socket.getdefaulttimeout() is None


def test_a_set_that_cannot_be_unpacked_says_why(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, fetched = written(monkeypatch, "cifar10")
    put(raw, fetched)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "extractall", full)
    with pytest.raises(OSError) as error:
        make("cifar10")
    reason = "[Errno 28] No space left on device"
    assert str(error.value) == f"cifar10 could not be unpacked in {raw}: {reason}"
    assert type(error.value) is OSError  # not of files that are missing
    assert there(raw) == set(fetched)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    """A link in a tar archive."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def hostile_tar(files: Files, members: list[tarfile.TarInfo | str]) -> bytes:
    """A tar archive of links and of files named so, before `files`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as opened:
        for member in members:
            if isinstance(member, str):
                member, content = tarfile.TarInfo(member), b"bad"
                member.size = len(content)
                opened.addfile(member, io.BytesIO(content))
            else:
                opened.addfile(member)
        with tarfile.open(fileobj=io.BytesIO(tar(files))) as rest:
            for each in rest:
                opened.addfile(each, rest.extractfile(each))
    return out.getvalue()


def snapshot(folder: Path) -> dict[str, bytes]:
    """All files in a folder with their content."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "members",
    [
        ["../../victim"],
        ["cifar-10-batches-py/../../../new"],
        ["{root}/victim"],
        [link("out", "../.."), "out/victim"],
        [link("out", "{root}/victim", tarfile.LNKTYPE), "out"],
        [link("a", "."), link("a/b", ".."), link("a/b/c", ".."), "a/b/c/victim"],
        [link("cifar-10-batches-py/data_batch_1", "{root}/victim")],
        [link("pipe", "", tarfile.FIFOTYPE)],
    ],
)
def test_no_tar_archive_writes_outside_its_folder(
    members: list[tarfile.TarInfo | str], tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacked by torchvision; the checksum, which comes first, is that of the archive."""
    (tmp_path / "victim").write_bytes(b"good")
    kind = vision.load_torchvision().datasets.CIFAR10
    read, _ = written(monkeypatch, "cifar10")
    named: list[tarfile.TarInfo | str] = []
    for member in members:
        if isinstance(member, str):
            named.append(member.format(root=tmp_path))
        else:
            named.append(member.replace(linkname=member.linkname.format(root=tmp_path)))
    archive = hostile_tar(read, named)
    monkeypatch.setattr(kind, "tgz_md5", md5(archive))
    put(raw, {kind.filename: archive})
    before = snapshot(tmp_path)
    try:
        assert len(make("cifar10").x_test) == 10  # an absolute name may be taken as a relative one
        assert snapshot(tmp_path) == before | snapshot(raw)
        assert there(raw) == {*read, kind.filename}
    except OSError as error:
        assert str(error).startswith(f"cifar10 could not be unpacked in {raw}: ")
        assert snapshot(tmp_path) == before
    assert tarfile.TarFile.extraction_filter is None


@pytest.mark.parametrize("name", ["../../victim", "{root}/victim"])
@pytest.mark.parametrize("is_link", [False, True])
def test_no_zip_archive_writes_outside_its_folder(
    name: str, is_link: bool, tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link is unpacked as a file that holds its target."""
    (tmp_path / "victim").write_bytes(b"good")
    kind = vision.load_torchvision().datasets.EMNIST
    read, fetched = written(monkeypatch, "emnist_digits")
    (file,) = fetched
    content = io.BytesIO(fetched[file])
    with zipfile.ZipFile(content, "a") as opened:
        member = zipfile.ZipInfo("out" if is_link else name.format(root=tmp_path))
        member.external_attr = (0o120777 if is_link else 0o100644) << 16
        opened.writestr(member, name.format(root=tmp_path))
        opened.writestr("out/new" if is_link else "gzip/deep/../../x", "bad")
    monkeypatch.setattr(kind, "md5", md5(content.getvalue()))
    put(raw, {file: content.getvalue()})
    before = snapshot(tmp_path)
    with suppress(OSError):
        assert len(make("emnist_digits").x_test) == 10
    unpacked = {str(raw / each): data for each, data in read.items()}
    assert snapshot(tmp_path) in (before, before | unpacked)


# ------------------------------------------------------------------ damage


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_a_file_with_another_checksum_is_named_and_not_changed(
    name: str, packed: bool, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of EMNIST nobody publishes the checksums of the unpacked files; see the next test."""
    files = written(monkeypatch, name)[packed]
    file = next(iter(files))
    put(raw, files | {file: files[file][:-1]})
    right = f"is damaged or another file: its MD5 is {md5(files[file][:-1])}; it must be "
    if name == "emnist_digits" and not packed:
        right = f"has {len(files[file]) - 1} bytes; its header states {len(files[file])}"
    with pytest.raises(ValueError) as error:
        make(name)
    assert str(error.value).startswith(f"{raw / file} {right}")
    assert there(raw) == set(files) and (raw / file).read_bytes() == files[file][:-1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an idx file of bytes with 3 axes"),
        (idx(np.zeros(3)), "is not an idx file of bytes with 3 axes"),
        (idx(np.zeros((3, 2, 2)))[:10], "has 10 bytes; its header states 16"),
        (idx(np.zeros((3, 2, 2))) + b" ", "has 29 bytes; its header states 28"),
        (b"\0\0\x08\x03" + b"\xff" * 12, f"has 16 bytes; its header states {16 + 4294967295**3}"),
    ],
)
def test_an_invalid_idx_file_is_named(
    content: bytes, message: str, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(raw, written(monkeypatch, "emnist_digits")[0] | {EMNIST: content})
    with pytest.raises(ValueError) as error:
        make("emnist_digits")
    assert str(error.value) == f"{raw / EMNIST} {message}"


def test_too_few_labels_and_other_labels_are_refused(
    raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = written(monkeypatch, "emnist_digits")[0]
    labels = EMNIST.replace("images-idx3", "labels-idx1")
    for y, message in (
        (np.zeros(11), "y_train is int64 [11]; it must be int64 [12]"),
        (np.full(12, 10), "y_train must be in 0..9, as for its names"),
    ):
        put(raw, read | {labels: idx(y)})
        with pytest.raises(ValueError) as error:
            load_dataset({"source": "emnist_digits"})
        assert str(error.value) == f"emnist_digits: {message}"


# ------------------------------------------------------------------ size and colours


def test_grey_is_the_usual_weighted_sum() -> None:
    """ITU-R 601-2 as whole numbers: 65536 * (0.299, 0.587, 0.114) = (19595, 38470, 7471)."""
    x = drawn((1, 2, 3), 3, 9, 7)
    weights = np.array([19595, 38470, 7471])[:, None, None]
    expected = ((x * weights).sum(1, keepdims=True) + 32768) >> 16
    found = images_module._convert(x, Options(grey=True))
    assert found.dtype == np.uint8 and np.array_equal(found, expected)


def test_half_the_size_is_a_weighted_mean_of_neighbours() -> None:
    """A triangle of half-width 2 at distances 0.5 and 1.5 has weights 3, 3 and 1, 1, of 8."""
    x = drawn((5,), 1, 12, 12)
    weights = np.zeros((6, 12))
    for row, column in np.ndindex(6, 12):
        weights[row, column] = max(0, 2 - abs(2 * row + 0.5 - column))
    weights /= weights.sum(1, keepdims=True)
    found = images_module._convert(x, Options(size=6))
    assert np.abs(found[0, 0] - weights @ x[0, 0] @ weights.T).max() <= 1


# ------------------------------------------------------------------ Digit-10


@pytest.fixture
def four(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All four sets of digits; their published numbers are those of the files."""
    for name in DIGITS:
        put(raw, written(monkeypatch, name)[0])
        small = replace(source(name), train=tuple(np.bincount(LABELS)), test=(1,) * 10)
        monkeypatch.setitem(digit10.SETS, name.removesuffix("_digits"), small)


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize("per_class", [None, 2, 1])
@pytest.mark.parametrize("sets", [("mnist", "emnist", "usps", "svhn"), ("usps", "mnist")])
def test_digit10_is_domains_of_the_first_grey_digits_of_each_class(
    sets: tuple[str, ...], per_class: int | None
) -> None:
    """Label 3 is at places 3, 10 and 11 of the training images, all others once."""
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
