"""The source npz: every clear layout, domains in one file or in several, errors by name."""

import io
import os
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stamp_core.config.decode import ParameterError
from stamp_core.config.schema import Split
from stamp_core.data import split
from stamp_core.data.images import ImageArrays
from stamp_core.data.loading import load_dataset
from stamp_core.data.sources import npz
from stamp_core.data.store.cache import SUBSETS

Arrays = dict[str, Any]

LABELS = np.array([0, 1, 2, 2, 1, 0])
OWN = {"source": "npz", "file": "own.npz"}
OBJECTS = np.array([1, "two", None], object)


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


def test_a_data_set_is_written_as_it_is_read(raw: Path) -> None:
    put(raw, domains())
    first = load_dataset(OWN)
    npz.save_npz(first, raw / "new" / "copy.npz")
    again = load_dataset({"source": "npz", "file": "new/copy.npz"})
    assert again.digest == first.digest and again.domains == ("ink", "chalk")


def test_masks_are_not_written(tmp_path: Path) -> None:
    scenes = load_dataset({"source": "scenes", "train_per_class": 2, "test_per_class": 1})
    with pytest.raises(ParameterError, match="masks is True; it must be false"):
        npz.save_npz(scenes, tmp_path / "scenes.npz")


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


def test_a_file_may_be_in_data_raw_or_elsewhere_and_hold_other_arrays(
    raw: Path, tmp_path: Path
) -> None:
    put(raw, bundle(idx_train=np.arange(6), notes=OBJECTS))
    put(tmp_path, bundle(), "other.npz")
    one = load_dataset({"source": "npz", "file": "own.npz", "size": 5, "grey": True})
    other = load_dataset({"source": "npz", "file": str(tmp_path / "other.npz")})
    assert one.x_train.shape == (6, 1, 5, 5) and one.x_test.shape == (3, 1, 5, 5)
    assert other.x_train.shape == (6, 3, 8, 6) and other.name == "npz"


# ------------------------------------------------------------------ several files


KINDS = {"ink": (6, 28, 28), "paint.v2": (6, 28, 28, 3), "sign": (6, 3, 32, 32)}
SEVERAL = {"source": "npz", "domain_files": [f"{name}.npz" for name in KINDS]}


def several(raw: Path, **changes: Arrays) -> None:
    """Files in several sizes and colours; those in `changes` differ."""
    for name, shape in KINDS.items():
        x = {"x_train": drawn(*shape), "x_test": drawn(3, *shape[1:])}
        put(raw, bundle(**{**x, **changes.get(name, {})}), f"{name}.npz")


def test_files_are_joined_as_domains_and_learnt_one_by_one(raw: Path) -> None:
    several(raw)
    found = load_dataset({**SEVERAL, "size": 28, "grey": True})
    assert found.domains == tuple(KINDS) and found.classes == ("0", "1", "2")
    assert found.x_train.shape == (18, 1, 28, 28) and found.x_test.shape == (9, 1, 28, 28)
    for domain, name in enumerate(KINDS):
        own = npz.make(npz.Options(28, True, f"{name}.npz"))
        for subset in SUBSETS:
            where = getattr(found, f"domain_{subset}") == domain
            for key in (f"x_{subset}", f"y_{subset}"):
                assert np.array_equal(getattr(found, key)[where], getattr(own, key))
    plan = split.make_plan(Split("domains", clients=2, tasks=3), found, seed=0)
    assert all(sorted(task.domain or 0 for task in own) == [0, 1, 2] for own in plan.clients)
    for task, each in enumerate(plan.clients[0]):
        own = plan.train_indices(found, 0, task)
        assert len(own) == 6 and (found.domain_train[own] == each.domain).all()


def refused(spec: Any, kind: type[Exception] = ValueError) -> str:
    """The message of the error that loading must raise."""
    with pytest.raises(kind) as error:
        load_dataset(spec)
    assert type(error.value) is kind and "\n" not in str(error.value)
    return str(error.value)


GREY = {"size": 8, "grey": True}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"grey": True}, "sign.npz: x_train has 1 x 32 x 32 images, {raw}/ink.npz 1 x 28 x 28"),
        ({}, {"size": 28}, "paint.v2.npz: x_train has 3 x 28 x 28 images, {raw}/ink.npz 1 x 28 x"),
        (
            {"sign": {"classes": np.array(["a", "b", "c"])}},
            GREY,
            "sign.npz: classes must be those of {raw}/ink.npz: 0, 1, 2",
        ),
        (
            {"sign": {"domain_train": LABELS % 2, "domain_test": np.array([1, 0, 0])}},
            GREY,
            "sign.npz: domain_train must be absent, as the file is one domain",
        ),
        ({"sign": {"y_test": np.array([0, 1, 1])}}, GREY, "sign.npz: y_test has no image of 2 ("),
    ],
)
def test_files_that_do_not_fit_together_are_refused(
    change: dict[str, Arrays], options: dict[str, Any], message: str, raw: Path, cache: Path
) -> None:
    several(raw, **change)
    assert refused({**SEVERAL, **options}).startswith(f"{raw}/{message.format(raw=raw)}")
    assert not cache.exists()


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (bundle(x_train=None), "x_train is missing"),
        (bundle(y_train=None), "y_train is missing"),
        (bundle(x_test=None), "x_test is missing"),
        (bundle(y_test=None), "y_test is missing"),
        (domains(domain_train=None, domains=None), "domain_train is missing"),
        (domains(domain_test=None), "domain_test is missing"),
        (
            bundle(x_train=np.zeros((6, 8, 6, 3))),
            "x_train is float64 [6, 8, 6, 3]; it must be uint",
        ),
        (
            bundle(x_train=np.zeros((0, 8, 6, 3), np.uint8)),
            "x_train is uint8 [0, 8, 6, 3]; it must",
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
            "x_test is uint8 [3, 8, 6]; it must be like x_train, uint8",
        ),
        (bundle(y_train=LABELS[:5]), "y_train is int64 [5]; it must be whole numbers [6], one per"),
        (bundle(y_test=np.arange(3.0)), "y_test is float64 [3]; it must be whole numbers [3]"),
        (bundle(y_test=np.arange(3)[:, None]), "y_test is int64 [3, 1]; it must be whole numbers"),
        (bundle(y_train=LABELS == 0), "y_train is bool [6]; it must be whole numbers [6]"),
        (domains(domain_test=np.zeros(2, int)), "domain_test is int64 [2]; it must be whole numb"),
        (
            bundle(y_train=LABELS + 1, y_test=np.arange(3) + 1),
            "y_train[2] is 3; it must be in 0..2, as there are 3",
        ),
        (
            bundle(y_test=np.array([0, -1, 2]), classes=np.array(["a", "b", "c"])),
            "y_test[1] is -1; it must be in 0..2, as there are 3",
        ),
        (bundle(y_test=np.array([0, 2**40, 2])), "y_test[1] is 1099511627776; it must be in 0..3"),
        (domains(domain_train=LABELS), "domain_train[2] is 2; it must be in 0..1, as there are 2"),
        (bundle(classes=np.array(["a", "b", "c", "d"])), "y_train has no image of 3 ('d')"),
        (domains(domain_train=np.zeros(6, int)), "domain_train has no image of 1 ('chalk')"),
        (bundle(classes=np.arange(3)), "classes is int64 [3]; it must be different texts [C]"),
        (
            bundle(classes=np.array(["a", "b", "a"])),
            "classes is <U1 [3]; it must be different text",
        ),
        (
            bundle(classes=np.array([["a", "b", "c"]])),
            "classes is <U1 [1, 3]; it must be different",
        ),
        (bundle(classes=OBJECTS), "classes holds pickled objects; it must be a plain array"),
        (bundle(y_train=OBJECTS), "y_train holds pickled objects; it must be a plain array"),
    ],
)
def test_invalid_arrays_are_named_with_their_file(
    arrays: Arrays, message: str, raw: Path, cache: Path
) -> None:
    path = put(raw, arrays)
    assert refused(OWN).startswith(f"{path}: {message}")
    assert not cache.exists()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_a_truncated_file_and_one_of_another_kind_are_named(share: float, raw: Path) -> None:
    path = put(raw, bundle())
    os.truncate(path, int(share * path.stat().st_size))
    assert refused(OWN).startswith(f"{path} is not an .npz file, or a truncated one")
    path.write_bytes(header((784_000_000_000_000,)))  # an .npy file that states 713 TiB
    assert refused(OWN).startswith(f"{path} is not an .npz file, or a truncated one")


def test_a_damaged_array_is_named(raw: Path) -> None:
    """A byte in the middle of the images is another; zip keeps a checksum of each array."""
    path = put(raw, {})
    np.savez(path, **bundle())  # not compressed
    content = bytearray(path.read_bytes())
    content[content.index(drawn(3, 8, 6, 3).tobytes()) + 50] ^= 1
    path.write_bytes(content)
    assert refused(OWN).startswith(f"{path}: x_test is damaged: Bad CRC-32 for file 'x_test.npy'")


def header(shape: tuple[int, ...], version: tuple[int, int] = (1, 0)) -> bytes:
    """The header of an array of bytes, and 5000 bytes."""
    content = io.BytesIO()
    fields = {"descr": "|u1", "fortran_order": False, "shape": shape}
    first = version == (1, 0)
    write = np.lib.format.write_array_header_1_0 if first else np.lib.format.write_array_header_2_0
    write(content, fields)
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
def test_an_array_that_states_more_than_its_file_holds_is_refused_without_allocating_it(
    kind: int, length: int, version: tuple[int, int], raw: Path
) -> None:
    """1 PiB in a few kB: in the array's header, or in the archive's directory as well."""
    path = forge(raw, header((2**40, 32, 32), version), kind, length)
    tracemalloc.start()
    assert refused(OWN).startswith(f"{path}: x_train is damaged: ")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


def test_a_header_that_states_less_than_its_file_holds_is_refused(raw: Path) -> None:
    """One byte differs: the first half of the bytes would be other labels, without an error."""
    path = put(raw, {})
    np.savez(path, **bundle(x_train=drawn(6000, 8, 6, 3), y_train=np.tile(LABELS, 1000)))
    content = path.read_bytes()
    place = content.index(b"'<i8'", content.index(b"y_train.npy"))
    path.write_bytes(content[:place] + b"'<i4'" + content[place + 5 :])
    assert refused(OWN).startswith(f"{path}: y_train is damaged: ")


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_another_compression_is_refused(kind: int, raw: Path) -> None:
    """A few of its bytes can hold more than memory."""
    path = forge(raw, header((5, 10, 100)), kind)
    right = f"{path}: x_train is damaged: it is compressed in a way that numpy does not use"
    assert refused(OWN).startswith(right)


def test_an_array_that_does_not_fit_into_memory_is_named(
    raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise MemoryError("Unable to allocate 9 TiB")

    path = put(raw, bundle())
    monkeypatch.setattr(np, "frombuffer", full)
    right = f"{path}: x_train does not fit into memory: Unable to allocate 9 TiB"
    assert refused(OWN).startswith(right)


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
    assert refused(OWN).startswith(f"{path}: x_train is damaged: ")


def test_a_missing_file_is_named(raw: Path) -> None:
    put(raw, bundle())
    for spec in ({"file": "two.npz"}, {"domain_files": ["own.npz", "two.npz"]}):
        message = refused({"source": "npz", **spec}, FileNotFoundError)
        assert message == f"{raw}/two.npz does not exist; put the file there or name another"
