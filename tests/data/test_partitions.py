"""Partitions of PFLlib and Flower Datasets against a search through all images."""

import io
import json
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from pfllib import client, normalised, write_folder

from stamp_core.config.decode import ParameterError
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.plan import Plan
from workbench.exchange.partitions import find_images, import_flwr, import_pfllib
from workbench.exchange.pickled import read_arrays


def drawn(channels: int) -> ImageDataset:
    """30 training and 10 test images of five classes, 4 x 3."""
    draw = torch.Generator().manual_seed(channels)
    x = torch.randint(256, (40, channels, 4, 3), generator=draw, dtype=torch.uint8)
    x[0].flatten()[:2] = torch.tensor([0, 255])
    return replace(toy.images(5, each=6), name="drawn", x_train=x[:30], x_test=x[30:])


GREY, COLOUR = drawn(1), drawn(3)
PARTS = [[*range(0, 11)], [*range(29, 18, -1)], [11, 13, 12, 18, 17, 14, 15, 16]]


def images_of(plan: Plan) -> list[list[int]]:
    return [sorted(i for task in own for i in task.train or ()) for own in plan.clients]


@pytest.mark.parametrize("dataset", [GREY, COLOUR], ids=["grey", "colour"])
def test_the_images_of_pfllib_are_found(dataset, tmp_path):
    folder = write_folder(tmp_path / "Set", [client(dataset, part) for part in PARTS])
    plan = import_pfllib(folder, dataset, tasks=2, seed=4)
    assert images_of(plan) == [sorted(part) for part in PARTS]
    assert (plan.seed, plan.tasks, plan.data_digest) == (4, 2, dataset.digest)
    for own in plan.clients:  # all five classes by number, the larger task first
        assert [task.classes for task in own] == [(0, 1, 2), (3, 4)]
        for task in own:
            assert {dataset.y_train[i].item() for i in task.train or ()} == {*task.classes}


def test_every_grey_comes_back_from_floats(tmp_path):
    greys = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    dataset = replace(GREY, x_train=greys, y_train=torch.tensor([3]))
    for kind in (np.float32, np.float64):
        data = {"x": normalised(greys).astype(kind), "y": np.array([3])}
        folder = write_folder(tmp_path / kind.__name__, [data])
        assert images_of(import_pfllib(folder, dataset, 1)) == [[0]]


def test_test_images_are_refused_or_left_out(tmp_path):
    mixed = [client(GREY, PARTS[0], [0, 1, 2]), client(GREY, PARTS[1], [3])]
    folder = write_folder(tmp_path / "Set", mixed)
    with pytest.raises(ParameterError, match=r"0.npz: image 11 of class 0 is a test .* drop_tests"):
        import_pfllib(folder, GREY, 2)
    plan = import_pfllib(folder, GREY, 2, drop_tests=True)
    assert images_of(plan) == [sorted(part) for part in PARTS[:2]]


def test_equal_images_are_different_ones():
    """Three equal images, one of them of another class: each is found once, by its class."""
    x, y = GREY.x_train.clone(), GREY.y_train.clone()
    x[4] = x[9] = x[7] = x[2]
    y[4] = y[9] = y[2] = 1
    y[7] = 2
    dataset = replace(GREY, x_train=x, y_train=y)
    order = [9, 7, 0, 4, 2]
    found = find_images(dataset, x[order].numpy(), y[order].numpy()).tolist()
    assert sorted(found) == [0, 2, 4, 7, 9] and found[1:3] == [7, 0]


def pickled(x: Any, protocol: int = 4) -> bytes:
    return pickle.dumps(np.array({"x": x, "y": np.zeros(4, np.int64)}, object), protocol)


GOOD = client(GREY, PARTS[0])
EIGHT = np.arange(4)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "objects over bytes": (pickled(EIGHT + 0.5).replace(b"f8", b"O8"), "x is no array of numbers"),
    "a pointer": (
        pickle.dumps(np.array(1.5)).replace(b"f8", b"O8"),
        "more or less than two arrays",
    ),
    "objects": (pickled(np.array([EIGHT, None], object)), "APPENDS is no part of an array"),
    "records": (pickled(np.zeros(3, "u1,O")), ""),
    "fewer bytes": (pickled(EIGHT + 0.5).replace(b"f8", b"f4"), "cannot reshape"),
    "no array": (pickled({}), "x is no array of numbers"),
    "a large place in the memo": (b"\x80\x04}r\xff\xff\xff\x7f.", "more or less than two arrays"),
    "a long array of bytes": (b"\x80\x05\x96" + b"\xff" * 7 + b"\x00.", "only 1 remain"),
    "a key of 2^300 parts": (b"\x80\x04}(N" + b"2\x86" * 300 + b"Nu.", "DUP"),
    "many values": (b"\x80\x04" + b"N" * 60_000 + b".", "more or less than two arrays"),
    "a zip bomb": (pickled(np.zeros(5_000_000, np.uint8)), "it unpacks to 5,000,"),
    "cut": (pickled(EIGHT)[:-60], "exhausted"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused(name, tmp_path):
    content, message = HOSTILE[name]
    folder, stream = write_folder(tmp_path / "Set", [GOOD]), io.BytesIO()
    header = {"descr": "|O", "fortran_order": False, "shape": ()}
    np.lib.format.write_array_header_1_0(stream, header)
    with zipfile.ZipFile(folder / "train/0.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("data.npy", stream.getvalue() + content)
    with pytest.raises(ParameterError, match=rf"0\.npz is not .* of PFLlib: .*{message}") as error:
        import_pfllib(folder, GREY, 1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("protocol", [3, 4])
def test_pickles_of_all_versions_of_numpy_are_read(protocol, tmp_path):
    for kind in ("u1", "<f4", ">i8", "f2"):
        x = np.asfortranarray(np.arange(12).reshape(3, 4).astype(kind))
        found = read_arrays(pickled(x, protocol))[0]
        assert found.dtype == x.dtype and np.array_equal(found, x)


class Program:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (Path.touch, (self.file,))


def test_a_file_cannot_run_code(tmp_path):
    data = {**client(GREY, [0]), "more": Program(tmp_path / "ran")}
    folder = write_folder(tmp_path / "Set", [data])
    with pytest.raises(ParameterError, match=r"0.npz is not .* of PFLlib: it holds more or"):
        import_pfllib(folder, GREY, 1)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("count", [10**12, 0, -1, 1.5, None])
def test_a_number_of_clients_is_refused_before_they_are_listed(count, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_clients": count}))
    with pytest.raises(ParameterError, match=r"config\.json: num_clients is "):
        import_pfllib(tmp_path, GREY, 1)


@pytest.mark.parametrize(
    "values",
    [{"seed": -5}, {"seed": 1.5}, {"tasks": 1.5}, {"tasks": np.nan}]
    + [{"rows": rows} for rows in ([0, 0, 2], [0, 1, 30], [0, 0.5, 1], [[0, 1, 2]], [-1, 0, 1])],
)
def test_values_of_an_import_are_checked(values, tmp_path):
    path = rows_file(tmp_path / "parts.json", [[0, 1], [2]])
    with pytest.raises(ValueError, match=f"{next(iter(values))} is "):
        import_flwr(path, GREY, **{"tasks": 1, **values})


BAD_CLIENTS: list[tuple[Any, str]] = [
    ({**GOOD, "x": GOOD["x"] * np.nan}, "1.npz: x[0, 0, 0, 0] is nan; it must be k / 127.5 - 1"),
    ({**GOOD, "y": GOOD["y"] + 1}, "1.npz: image 0 of class 1 must be a training image of drawn"),
    ({**GOOD, "y": GOOD["y"][1:]}, "1.npz: y is int64 [10]; it must be whole numbers [n]"),
    (client(GREY, [11, 12, 5]), "1.npz: image 2 of class 0 was there before; an image must be of"),
    ({**GOOD, "x": GOOD["x"][..., :2]}, "x is uint8 [11, 1, 4, 2]; it must be uint8 [n, 1, 4, 3]"),
    (GOOD["x"], "1.npz is not a client's file of PFLlib: "),
]


@pytest.mark.parametrize(("data", "message"), BAD_CLIENTS)
def test_a_wrong_client_is_named(data, message, tmp_path):
    folder = write_folder(tmp_path / "Set", [GOOD, data])
    with pytest.raises(ValueError) as error:
        import_pfllib(folder, GREY, 1)
    assert message in str(error.value) and "\n" not in str(error.value)


def rows_file(path: Path, parts: Sequence[Sequence[int]]) -> Path:
    numbered = reversed([*enumerate(parts)])
    path.write_text(json.dumps({str(number): [*part] for number, part in numbered}))
    return path


def test_rows_of_another_order_are_translated(tmp_path):
    """Each row of theirs against every image of ours; colours are last there."""
    shuffled = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    x = COLOUR.x_train[shuffled].permute(0, 2, 3, 1).numpy()
    rows = find_images(COLOUR, x, COLOUR.y_train[shuffled].numpy())
    path = rows_file(tmp_path / "parts.json", PARTS)
    plan = import_flwr(path, COLOUR, tasks=3, rows=rows)
    assert images_of(plan) == [sorted(shuffled[part].tolist()) for part in PARTS]
    assert images_of(import_flwr(path, COLOUR, tasks=3)) == [sorted(part) for part in PARTS]


def test_the_order_of_classes_is_drawn_from_the_seed(tmp_path):
    path = rows_file(tmp_path / "parts.json", PARTS)

    def orders(seed: int) -> list[list[tuple[int, ...]]]:
        plan = import_flwr(path, GREY, 3, "independent", seed)
        assert images_of(plan) == [sorted(part) for part in PARTS]
        return [[task.classes for task in own] for own in plan.clients]

    assert orders(0) == orders(0) and len({str(orders(seed)) for seed in range(5)}) == 5
    assert len({str(own) for seed in range(5) for own in orders(seed)}) > 5  # a client its own
    for own in orders(0):
        assert [len(task) for task in own] == [2, 2, 1]
        assert sorted(c for task in own for c in task) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("content", "tasks", "message"),
    [
        ({"0": [0, 30]}, 1, ": 0[1] is 30; it must be from 0 and below 30, the number of rows"),
        ({"0": [0], "2": [1]}, 1, ": 1 is None; it must be a list"),
        ({"0": [0, 1], "1": [2, 0]}, 1, ": 0 is listed for client 0 and then for client 1"),
        ({"0": PARTS[0], "1": [11, 12]}, 3, "tasks is 3; it must be from 1 to 2, the number of c"),
    ],
)
def test_a_wrong_partition_is_named(content, tasks, message, tmp_path):
    path = tmp_path / "parts.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ParameterError) as error:
        import_flwr(path, GREY, tasks)
    shown = str(error.value)
    assert message in shown and str(path) in shown and "\n" not in shown
