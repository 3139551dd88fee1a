"""The source npz: every clear layout, errors by name."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import load_error

from stamp_core.config.decode import ParameterError
from stamp_core.data.images import ImageArrays
from stamp_core.data.loading import load_dataset
from stamp_core.data.sources import npz

Arrays = dict[str, Any]

LABELS = np.array([0, 1, 2, 2, 1, 0])
OWN = {"source": "npz", "file": "own.npz"}


def drawn(*shape: int) -> np.ndarray:
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
    numbers = {"domain_train": LABELS % 2, "domain_test": np.array([1, 0, 0])}
    return bundle(**{"domains": np.array(["ink", "chalk"]), **numbers, **changes})


def put(raw: Path, arrays: Arrays, name: str = "own.npz") -> Path:
    raw.mkdir(exist_ok=True)
    np.savez_compressed(raw / name, **arrays)
    return raw / name


def read(raw: Path, arrays: Arrays) -> ImageArrays:
    return npz.read_npz(put(raw, arrays))


def test_a_data_set_is_written_as_it_is_read(raw):
    put(raw, domains())
    first = load_dataset(OWN)
    npz.save_npz(first, raw / "new" / "copy.npz")
    again = load_dataset({"source": "npz", "file": "new/copy.npz"})
    assert again.digest == first.digest and again.domains == ("ink", "chalk")


def test_masks_are_not_written(tmp_path):
    scenes = load_dataset({"source": "scenes", "train_per_class": 2, "test_per_class": 1})
    with pytest.raises(ParameterError, match="masks is True; it must be false"):
        npz.save_npz(scenes, tmp_path / "scenes.npz")


@pytest.mark.parametrize("channels", [1, 3])
def test_every_clear_layout_gives_the_same_images(channels, raw):
    x, tests = drawn(6, channels, 8, 6), drawn(3, channels, 8, 6)
    layouts = [(x, tests), (x.transpose(0, 2, 3, 1), tests.transpose(0, 2, 3, 1))]
    if channels == 1:
        layouts += [(x[:, 0], tests[:, 0])]
    for train, test in [*layouts, (layouts[0][0], layouts[1][1])]:
        found = read(raw, bundle(x_train=train, x_test=test))
        assert np.array_equal(found.x_train, x) and np.array_equal(found.x_test, tests)


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.uint64])
def test_labels_may_be_of_any_integer_type(kind, raw):
    found = read(raw, bundle(y_train=LABELS.astype(kind), y_test=np.arange(3).astype(kind)))
    assert found.y_train.dtype == found.y_test.dtype == np.int64
    assert np.array_equal(found.y_train, LABELS) and found.y_test.tolist() == [0, 1, 2]
    assert found.classes == ("0", "1", "2")
    assert found.domains == ("all",) and found.domain_train is None


def test_names_of_classes_and_domains_are_read(raw):
    found = read(raw, domains(classes=np.array(["cat", "Äpfel", "dog"])))
    assert found.classes == ("cat", "Äpfel", "dog") and found.domains == ("ink", "chalk")
    assert found.domain_train.tolist() == (LABELS % 2).tolist()
    assert found.domain_test.tolist() == [1, 0, 0]
    assert read(raw, domains(domains=None)).domains == ("0", "1")


def test_a_file_may_be_in_data_raw_or_elsewhere_and_hold_other_arrays(raw, tmp_path):
    put(raw, bundle(idx_train=np.arange(6), notes=np.array([1, None], object)))
    put(tmp_path, bundle(), "other.npz")
    one = load_dataset({"source": "npz", "file": "own.npz", "size": 5, "grey": True})
    other = load_dataset({"source": "npz", "file": str(tmp_path / "other.npz")})
    assert one.x_train.shape == (6, 1, 5, 5) and one.x_test.shape == (3, 1, 5, 5)
    assert other.x_train.shape == (6, 3, 8, 6) and other.name == "npz"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (bundle(x_train=None), "x_train is missing"),
        (bundle(x_train=np.zeros((6, 8, 6, 3))), "x_train is float64 [6, 8, 6, 3]; it must be u"),
        (bundle(x_train=drawn(0, 8, 6, 3)), "x_train is uint8 [0, 8, 6, 3]; it must be at least"),
        *(
            (bundle(x_train=drawn(*shape)), f"x_train is uint8 {[*shape]}; it must be [N, H, W]")
            for shape in ((6, 48), (6, 3, 8, 3), (6, 4, 8, 6), (6, 1, 3, 8, 6))
        ),
        (bundle(x_test=drawn(3, 8, 6)), "x_test is uint8 [3, 8, 6]; it must be like x_train, uin"),
        (bundle(y_train=LABELS[:5]), "y_train is int64 [5]; it must be whole numbers [6], one per"),
        (bundle(y_train=LABELS + 1, y_test=np.arange(3) + 1), "y_train holds 3; each must be in 0"),
        (bundle(y_test=np.array([0, -1, 2])), "y_test holds -1; each must be in 0..3, as there "),
        (bundle(classes=np.array(list("abcd"))), "y_train has no image of 3 ('d')"),
        (bundle(classes=np.array(list("aba"))), "classes is <U1 [3]; it must be different texts"),
    ],
)
def test_invalid_arrays_are_named_with_their_file(arrays, message, raw, cache):
    path = put(raw, arrays)
    assert load_error(OWN, ValueError).startswith(f"{path}: {message}")
    assert not cache.exists()


def test_a_damaged_file_is_named(raw):
    """Cut, another byte of an image, an .npy file that states 713 TiB, pickled objects."""
    path = put(raw, {})
    np.savez(path, **bundle())  # not compressed
    content = path.read_bytes()
    pixel = content.index(drawn(3, 8, 6, 3).tobytes()) + 50
    changed = bytearray(content)
    changed[pixel] ^= 1
    npy = io.BytesIO()
    fields = {"descr": "|u1", "fortran_order": False, "shape": (784_000_000_000_000,)}
    np.lib.format.write_array_header_1_0(npy, fields)
    np.savez(path, **bundle(y_train=np.array([1, "two", None], object)))
    for damaged in (b"", content[: len(content) // 2], bytes(changed), npy.getvalue()):
        assert load_error(OWN, ValueError).startswith(
            f"{path} is not a whole .npz file of plain arrays: "
        )
        path.write_bytes(damaged)
    assert load_error(OWN, ValueError).startswith(
        f"{path} is not a whole .npz file of plain arrays: "
    )
