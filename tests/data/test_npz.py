"""The source npz: every clear layout, domains in one file or in several, errors by name."""

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import REAL, UNSET

from stamp_core.config.schema import Split
from stamp_core.data import split
from stamp_core.data.dataset import ImageArrays, load_dataset
from stamp_core.data.sources import npz

Arrays = dict[str, Any]

LABELS = np.array([0, 1, 2, 2, 1, 0])
OWN = {"source": "npz", "file": "own.npz"}


def drawn(*shape: int) -> np.ndarray:
    """Random images, others for another shape."""
    return np.random.default_rng(shape).integers(0, 256, shape, np.uint8)


def bundle(**changes: Any) -> Arrays:
    """Six training and three test images of three classes, 8 x 6 in colour; None removes one."""
    arrays = {
        "x_train": drawn(6, 8, 6, 3),
        "y_train": LABELS,
        "x_test": drawn(3, 8, 6, 3),
        "y_test": np.arange(3),
        **changes,
    }
    return {key: array for key, array in arrays.items() if array is not None}


def domains(**changes: Any) -> Arrays:
    """The same in two domains."""
    numbers = {"domain_train": LABELS % 2, "domain_test": np.array([1, 0, 0])}
    return bundle(**{"domains": np.array(["ink", "chalk"]), **numbers, **changes})


def put(raw: Path, arrays: Arrays, name: str = "own.npz") -> Path:
    """A file in data/raw with these arrays."""
    raw.mkdir(exist_ok=True)
    np.savez_compressed(raw / name, **arrays)
    return raw / name


def read(raw: Path, arrays: Arrays) -> ImageArrays:
    """What is read from a file with these arrays."""
    return npz.read_npz(put(raw, arrays))


@pytest.mark.parametrize("channels", [1, 3])
def test_every_clear_layout_gives_the_same_images(channels: int, raw: Path) -> None:
    x, tests = drawn(6, channels, 8, 6), drawn(3, channels, 8, 6)
    layouts = [(x, tests), (x.transpose(0, 2, 3, 1), tests.transpose(0, 2, 3, 1))]
    if channels == 1:
        layouts += [(x[:, 0], tests[:, 0])]
    for train, test in [*layouts, (layouts[0][0], layouts[1][1])]:
        found = read(raw, bundle(x_train=train, x_test=test))
        assert np.array_equal(found.x_train, x) and np.array_equal(found.x_test, tests)


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.uint64])
def test_labels_may_be_of_any_integer_type(kind: type[np.integer[Any]], raw: Path) -> None:
    found = read(raw, bundle(y_train=LABELS.astype(kind), y_test=np.arange(3).astype(kind)))
    assert found.y_train.dtype == found.y_test.dtype == np.int64
    assert np.array_equal(found.y_train, LABELS) and found.y_test.tolist() == [0, 1, 2]
    assert found.classes == ("0", "1", "2")
    assert found.domains == ("all",) and found.domain_train is None


def test_names_of_classes_and_domains_are_read(raw: Path) -> None:
    found = read(raw, domains(classes=np.array(["cat", "Äpfel", "dog"])))
    assert found.classes == ("cat", "Äpfel", "dog") and found.domains == ("ink", "chalk")
    assert found.domain_train is not None and found.domain_test is not None
    assert found.domain_train.tolist() == (LABELS % 2).tolist()
    assert found.domain_test.tolist() == [1, 0, 0]
    assert read(raw, domains(domains=None)).domains == ("0", "1")


def test_a_file_may_be_in_data_raw_or_elsewhere(raw: Path, tmp_path: Path) -> None:
    put(raw, bundle(idx_train=np.arange(6)))
    put(tmp_path, bundle(), "other.npz")
    one = load_dataset({"source": "npz", "file": "own.npz", "size": 5, "grey": True})
    other = load_dataset({"source": "npz", "file": str(tmp_path / "other.npz")})
    assert one.x_train.shape == (6, 1, 5, 5) and one.x_test.shape == (3, 1, 5, 5)
    assert other.x_train.shape == (6, 3, 8, 6) and other.name == "npz"


# ------------------------------------------------------------------ several files


KINDS = {
    "ink": (6, 28, 28),
    "stamp": (6, 16, 16),
    "paint.v2": (6, 28, 28, 3),
    "sign": (6, 3, 32, 32),
}


def several(raw: Path, **changes: Arrays) -> dict[str, Arrays]:
    """Four files in several sizes and colours; those in `changes` differ."""
    found = {}
    for name, shape in KINDS.items():
        x = {"x_train": drawn(*shape), "x_test": drawn(3, *shape[1:])}
        found[name] = bundle(**{**x, **changes.get(name, {})})
        put(raw, found[name], f"{name}.npz")
    return found


SEVERAL = {"source": "npz", "domain_files": [f"{name}.npz" for name in KINDS]}


def test_files_are_joined_as_domains(raw: Path) -> None:
    several(raw)
    found = load_dataset({**SEVERAL, "size": 28, "grey": True})
    assert found.domains == tuple(KINDS) and found.classes == ("0", "1", "2")
    assert found.x_train.shape == (24, 1, 28, 28) and found.x_test.shape == (12, 1, 28, 28)
    for domain, name in enumerate(KINDS):
        own = npz.make(npz.Options(28, True, f"{name}.npz"))
        train, test = found.domain_train == domain, found.domain_test == domain
        assert np.array_equal(found.x_train[train], own.x_train)
        assert np.array_equal(found.y_train[train], own.y_train)
        assert np.array_equal(found.x_test[test], own.x_test)
        assert np.array_equal(found.y_test[test], own.y_test)


def test_files_are_learnt_domain_by_domain(raw: Path) -> None:
    several(raw)
    found = load_dataset({**SEVERAL, "size": 8, "grey": True})
    plan = split.make_plan(Split("domains", clients=2, tasks=4), found, seed=0)
    for tasks in plan.clients:
        assert sorted(task.domain or 0 for task in tasks) == [0, 1, 2, 3]
    for task, each in enumerate(plan.clients[0]):
        own = plan.train_indices(found, 0, task)
        assert len(own) == 6 and (found.domain_train[own] == each.domain).all()


def refused(make: Callable[[], object], kind: type[Exception] = ValueError) -> str:
    """The message of the error that must be raised."""
    with pytest.raises(kind) as error:
        make()
    assert type(error.value) is kind and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {},
            {"grey": True},
            "{raw}/stamp.npz: x_train has 1 x 16 x 16 images, {raw}/ink.npz 1 x 28 x 28; set "
            "size, grey or both",
        ),
        (
            {},
            {"size": 28},
            "{raw}/paint.v2.npz: x_train has 3 x 28 x 28 images, {raw}/ink.npz 1 x 28 x 28; set "
            "size, grey or both",
        ),
        (
            {"sign": {"classes": np.array(["a", "b", "c"])}},
            {"size": 8, "grey": True},
            "{raw}/sign.npz: classes must be those of {raw}/ink.npz: 0, 1, 2",
        ),
        (
            {"sign": {"domain_train": LABELS % 2, "domain_test": np.array([1, 0, 0])}},
            {"size": 8, "grey": True},
            "{raw}/sign.npz: domain_train must be absent, as the file is one domain",
        ),
        (
            {"sign": {"y_test": np.array([0, 1, 1])}},
            {"size": 8, "grey": True},
            "{raw}/sign.npz: y_test has no image of 2 ('2')",
        ),
    ],
)
def test_files_that_do_not_fit_together_are_refused(
    change: dict[str, Arrays], options: dict[str, Any], message: str, raw: Path, cache: Path
) -> None:
    several(raw, **change)
    assert refused(lambda: load_dataset({**SEVERAL, **options})) == message.format(raw=raw)
    assert not cache.exists()


# ------------------------------------------------------------------ errors


OBJECTS = np.array([1, "two", None], object)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (bundle(x_train=None), "x_train is missing"),
        (bundle(y_train=None), "y_train is missing"),
        (bundle(x_test=None), "x_test is missing"),
        (bundle(y_test=None), "y_test is missing"),
        (domains(domain_train=None), "domain_train is missing"),
        (domains(domain_test=None), "domain_test is missing"),
        (domains(domain_train=None, domain_test=None), "domain_train is missing"),
        (domains(domain_train=None, domains=None), "domain_train is missing"),
        (domains(domain_test=None, domains=None), "domain_test is missing"),
        (
            bundle(x_train=np.zeros((6, 8, 6, 3))),
            "x_train is float64 [6, 8, 6, 3]; it must be uint8, 0 to 255",
        ),
        (
            bundle(x_test=np.zeros((3, 8, 6, 3), np.int64)),
            "x_test is int64 [3, 8, 6, 3]; it must be uint8, 0 to 255",
        ),
        (
            bundle(x_train=np.zeros((0, 8, 6, 3), np.uint8)),
            "x_train is uint8 [0, 8, 6, 3]; it must be at least one image",
        ),
        *(
            (
                bundle(x_train=np.zeros(shape, np.uint8)),
                f"x_train is uint8 {[*shape]}; it must be [N, H, W], [N, H, W, C] or "
                "[N, C, H, W], where C alone is 1 or 3",
            )
            for shape in ((6, 48), (6, 3, 8, 3), (6, 1, 8, 3), (6, 4, 8, 6), (6, 1, 3, 8, 6), (6,))
        ),
        (
            bundle(x_test=drawn(3, 8, 6)),
            "x_test is uint8 [3, 8, 6]; it must be like x_train, uint8 [6, 8, 6, 3]",
        ),
        (
            bundle(y_train=LABELS[:5]),
            "y_train is int64 [5]; it must be whole numbers [6], one per image",
        ),
        (
            bundle(y_test=np.arange(3.0)),
            "y_test is float64 [3]; it must be whole numbers [3], one per image",
        ),
        (
            bundle(y_test=np.arange(3)[:, None]),
            "y_test is int64 [3, 1]; it must be whole numbers [3], one per image",
        ),
        (
            bundle(y_train=LABELS == 0),
            "y_train is bool [6]; it must be whole numbers [6], one per image",
        ),
        (
            domains(domain_test=np.zeros(2, int)),
            "domain_test is int64 [2]; it must be whole numbers [3], one per image",
        ),
        (
            bundle(y_train=LABELS + 1, y_test=np.arange(3) + 1),
            "y_train[2] is 3; it must be in 0..2, as there are 3",
        ),
        (
            bundle(y_test=np.array([0, -1, 2]), classes=np.array(["a", "b", "c"])),
            "y_test[1] is -1; it must be in 0..2, as there are 3",
        ),
        (
            bundle(y_test=np.array([0, 2**40, 2])),
            "y_test[1] is 1099511627776; it must be in 0..3, as there are 4",
        ),
        (domains(domain_train=LABELS), "domain_train[2] is 2; it must be in 0..1, as there are 2"),
        (bundle(classes=np.array(["a", "b", "c", "d"])), "y_train has no image of 3 ('d')"),
        (bundle(y_test=np.array([0, 2, 2])), "y_test has no image of 1 ('1')"),
        (domains(domain_train=np.zeros(6, int)), "domain_train has no image of 1 ('chalk')"),
        (bundle(classes=np.arange(3)), "classes is int64 [3]; it must be different texts [C]"),
        (
            bundle(classes=np.array(["a", "b", "a"])),
            "classes is <U1 [3]; it must be different texts [C]",
        ),
        (
            bundle(classes=np.array([["a", "b", "c"]])),
            "classes is <U1 [1, 3]; it must be different texts [C]",
        ),
        (
            domains(domains=np.array([b"a", b"b"])),
            "domains is |S1 [2]; it must be different texts [C]",
        ),
        (bundle(classes=OBJECTS), "classes holds pickled objects; it must be a plain array"),
        (bundle(y_train=OBJECTS), "y_train holds pickled objects; it must be a plain array"),
    ],
)
def test_invalid_arrays_are_named_with_their_file(
    arrays: Arrays, message: str, raw: Path, cache: Path
) -> None:
    path = put(raw, arrays)
    assert refused(lambda: load_dataset(OWN)) == f"{path}: {message}"
    assert not cache.exists()


def test_unknown_arrays_are_not_read(raw: Path) -> None:
    assert len(read(raw, bundle(notes=OBJECTS)).y_train) == 6


def cut(share: float) -> Callable[[Path], None]:
    """What truncates a file to a share of its length."""
    return lambda path: os.truncate(path, int(share * path.stat().st_size))


@pytest.mark.parametrize(
    "harm",
    [
        *map(cut, (0.0, 0.3, 0.7, 0.99)),
        lambda path: path.write_text("x_train"),
        lambda path: np.save(path.open("wb"), LABELS),
    ],
)
def test_a_truncated_file_and_one_of_another_kind_are_named(
    harm: Callable[[Path], None], raw: Path
) -> None:
    path = put(raw, bundle())
    harm(path)
    assert refused(lambda: load_dataset(OWN)).startswith(f"{path} is not an .npz file")


def test_a_damaged_array_is_named(raw: Path) -> None:
    """A byte in the middle of the images is another; zip keeps a checksum of each array."""
    path = put(raw, {})
    np.savez(path, **bundle())  # not compressed
    content = bytearray(path.read_bytes())
    content[content.index(drawn(3, 8, 6, 3).tobytes()) + 50] ^= 1
    path.write_bytes(content)
    message = refused(lambda: npz.make(npz.Options(file="own.npz")))
    assert message.startswith(f"{path}: x_test is damaged: Bad CRC-32 for file 'x_test.npy'")


def header(shape: tuple[int, ...], version: tuple[int, int] | None = None) -> bytes:
    """The header of an array of bytes, and 5000 bytes."""
    content = io.BytesIO()
    fields = {"descr": "|u1", "fortran_order": False, "shape": shape}
    if version == (2, 0):
        np.lib.format.write_array_header_2_0(content, fields)
    else:
        np.lib.format.write_array_header_1_0(content, fields)
    return content.getvalue() + bytes(5000)


def forge(raw: Path, content: bytes, kind: int = zipfile.ZIP_STORED, length: int = 0) -> Path:
    """A file whose x_train is `content`; its directory states `length` bytes if that is not 0."""
    path = put(raw, bundle(x_train=None))
    with zipfile.ZipFile(path, "a", kind) as file:
        file.writestr("x_train.npy", content)
        info = file.getinfo("x_train.npy")
        info.file_size = length or info.file_size
    return path


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("length", [0, 2**50 + 128])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_an_array_that_states_more_than_its_file_holds_is_refused_before_it_is_allocated(
    kind: int, length: int, version: tuple[int, int], raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 PiB in a few kB: in the array's header, or in the archive's directory as well."""
    path = forge(raw, header((2**40, 32, 32), version), kind, length)
    monkeypatch.setattr(np.lib.format, "read_array", None)  # which allocates
    held = f"at most {1032 * path.stat().st_size}" if length else 5128
    right = f"its header states {2**50 + 128} bytes; the file holds {held}"
    assert refused(lambda: load_dataset(OWN)).startswith(f"{path}: x_train is damaged: {right}")


def test_a_header_that_states_less_than_its_file_holds_is_refused(raw: Path) -> None:
    """One byte differs: the first half of the bytes would be other labels, without an error."""
    path = put(raw, {})
    np.savez(path, **bundle(x_train=drawn(6000, 8, 6, 3), y_train=np.tile(LABELS, 1000)))
    content = path.read_bytes()
    place = content.index(b"'<i8'", content.index(b"y_train.npy"))
    path.write_bytes(content[:place] + b"'<i4'" + content[place + 5 :])
    right = f"{path}: y_train is damaged: its header states 24128 bytes; the file holds 48128"
    assert refused(lambda: load_dataset(OWN)).startswith(right)


def test_an_array_file_that_is_no_archive_is_not_read(raw: Path) -> None:
    """It states 713 TiB."""
    raw.mkdir()
    (raw / "own.npz").write_bytes(header((784_000_000_000_000,)))
    right = f"{raw}/own.npz is not an .npz file, or a truncated one"
    assert refused(lambda: load_dataset(OWN)).startswith(right)


def test_an_array_that_does_not_fit_into_memory_is_named(
    raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise MemoryError("Unable to allocate 9 TiB")

    path = put(raw, bundle())
    monkeypatch.setattr(np.lib.format, "read_array", full)
    right = f"{path}: x_train does not fit into memory: Unable to allocate 9 TiB"
    assert refused(lambda: load_dataset(OWN)).startswith(right)


@pytest.mark.parametrize(
    "text",
    [
        "{'descr': '|u1', 'fortran_order': False, 'shape': (6, 8, 6, 3, }",  # TokenError
        "{'descr': '|u1', 'fortran_order': False, b'shape': (6, 8, 6, 3), }",  # TypeError
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-6, 8, 6, 3), }",
        "{'descr': ('|u1', 2**9), 'fortran_order': False, 'shape': (6, 8, 6, 3), }",
        "__import__('os').abort()",
    ],
)
def test_a_forged_header_is_named(text: str, raw: Path) -> None:
    line = (text + "\n").encode()
    head = b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line
    path = forge(raw, head + bytes(864))
    assert refused(lambda: load_dataset(OWN)).startswith(f"{path}: x_train is damaged: ")


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_another_compression_is_refused(kind: int, raw: Path) -> None:
    path = forge(raw, header((5, 10, 100)), kind)
    right = f"{path}: x_train is damaged: it is compressed in a way that numpy does not use"
    assert refused(lambda: load_dataset(OWN)).startswith(right)


def test_a_missing_file_is_named(raw: Path) -> None:
    put(raw, bundle())
    for spec in ({"file": "two.npz"}, {"domain_files": ["own.npz", "two.npz"]}):
        message = refused(
            lambda spec=spec: load_dataset({"source": "npz", **spec}), FileNotFoundError
        )
        right = "put the file there or name another"
        assert message == f"{raw / 'two.npz'} does not exist; {right}"


# ------------------------------------------------------------------ larger sets, where there are


@pytest.mark.skipif(not REAL, reason=UNSET)
def test_every_file_of_a_folder_is_read_byte_for_byte() -> None:
    """The tests above, on larger sets."""
    for path in sorted(Path(str(REAL)).glob("*.npz")):
        found = npz.make(npz.Options(file=str(path)))
        with np.load(path) as arrays:
            x = arrays["x_train"]
            pixels = found.x_train.transpose(0, 2, 3, 1).reshape(x.shape)
            assert np.array_equal(pixels, x) and np.array_equal(found.y_test, arrays["y_test"])
            assert list(found.classes) == arrays["classes"].tolist()


@pytest.mark.skipif(not REAL, reason=UNSET)
def test_all_files_of_digits_of_a_folder_are_domains() -> None:
    files = []
    for path in sorted(Path(str(REAL)).glob("*.npz")):
        with np.load(path) as arrays:
            files += [str(path)] * (arrays["classes"].tolist() == list("0123456789"))
    found = npz.make(npz.Options(28, True, domain_files=tuple(files)))
    assert found.x_train.shape[1:] == (1, 28, 28) and found.classes == tuple("0123456789")
    assert found.domains == tuple(Path(path).stem for path in files) and len(files) > 1
    assert found.domain_test is not None and np.bincount(found.domain_test).all()
