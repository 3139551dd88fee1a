"""Checkpoints and records: bit for bit, refused when damaged or foreign, never pickled."""

import errno
import io
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from stamp_core.engine import checkpoint
from stamp_core.results import records
from stamp_core.results.records import Record, history_total, tree_bytes

MINE = {"parameters": "p", "plan": "q", "code": "c"}
OLD: dict[str, Any] = {"weights": torch.arange(5.0), "next": 3}
NEW: dict[str, Any] = {"weights": torch.arange(5.0) + 1, "next": 4}

# --- what can be saved

DTYPES = ("float32", "float64", "float16", "int64", "int32", "uint8", "bool")
shapes = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
tensors = st.sampled_from(DTYPES).flatmap(lambda d: arrays.arrays(d, shapes)).map(torch.from_numpy)
values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
keys = st.one_of(st.text(max_size=5), st.text("a.0", max_size=4)).filter(lambda k: k != "tensor")
trees = st.recursive(
    tensors | values,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Whether two trees agree in types, order of keys and every bit."""
    if isinstance(one, Tensor):
        return (one.dtype, one.shape, one.numpy().tobytes()) == (
            other.dtype,
            other.shape,
            other.numpy().tobytes(),
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (repr(one) == repr(other))  # nan is nan, -0.0 is not 0.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A checkpoint of mine."""
    path = tmp_path / "deep" / "run-1.5.safetensors"
    checkpoint.save_checkpoint(path, OLD, MINE)
    return path


def loaded(path: Path, identity: dict[str, str] = MINE) -> dict[str, Any] | None:
    """What a load gives that must not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return checkpoint.load_checkpoint(path, identity)


def refused(path: Path, identity: dict[str, str] = MINE) -> str:
    """The warning of a load that must give nothing; the file is kept aside as it was."""
    before = path.read_bytes()
    with pytest.warns(UserWarning) as caught:
        assert checkpoint.load_checkpoint(path, identity) is None
    assert len(caught) == 1 and caught[0].filename == __file__
    aside = path.with_name(f"{path.name}.aside")
    assert aside.read_bytes() == before and [*path.parent.iterdir()] == [aside]
    message = str(caught[0].message)
    assert message.startswith(f"checkpoint {path} ")
    assert message.endswith(f"; kept as {aside.name}, starting afresh")
    return message.removeprefix(f"checkpoint {path} ").partition("; kept")[0]


@settings(deadline=None)
@given(tree=st.dictionaries(keys, trees, max_size=4))
def test_any_tree_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    checkpoint.save_checkpoint(path, tree, MINE)
    found = loaded(path)
    assert found is not None and same(found, tree)
    checkpoint.save_checkpoint(path, found, MINE)
    again = loaded(path)
    assert again is not None and same(again, tree)


def test_the_comparison_of_trees_tells_them_apart() -> None:
    nan = {"a": math.nan, "b": [torch.tensor(math.nan)]}
    assert same(nan, {"a": math.nan, "b": [torch.tensor(math.nan)]})
    for one, other in [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.zeros(0, 3), torch.zeros(3, 0)),
        (torch.zeros(1), -torch.zeros(1)),
        ([1], [1, 2]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ]:
        assert not same(one, other)


def test_keys_with_points_stay_apart(tmp_path: Path) -> None:
    tree = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "a.b.0": [torch.ones(2)]}
    checkpoint.save_checkpoint(tmp_path / "x", tree, {})
    found = loaded(tmp_path / "x", {})
    assert found is not None and same(found, tree)


def test_views_are_saved_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    tree = {"turned": base.t(), "part": base[:, ::2], "wide": torch.ones(1).expand(2, 3)}
    checkpoint.save_checkpoint(tmp_path / "x", tree, {})
    found = loaded(tmp_path / "x", {})
    assert found is not None
    assert same(found, {name: tensor.contiguous() for name, tensor in tree.items()})


def test_loaded_tensors_can_be_written_to(file: Path) -> None:
    found = loaded(file)
    assert found is not None
    found["weights"].add_(1)
    assert same(loaded(file), OLD)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {1: "x"}}, r"^state\.a: keys must be text other than 'tensor', not \[1\]$"),
        ({"a": [{"tensor": "x"}]}, r"^state\.a\.0: keys must be text other than 'tensor', not"),
        ({"a": [1, {"b": object()}]}, r"^state\.a\.1\.b is a object; a state holds tensors, text"),
        ({"a": (1, 2)}, r"^state\.a is a tuple; "),
        ({"a": {"b": np.zeros(2)}}, r"^state\.a\.b is a ndarray; "),
        ({"a": b"x"}, r"^state\.a is a bytes; "),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(
    file: Path, tree: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        checkpoint.save_checkpoint(file, tree, MINE)
    assert same(loaded(file), OLD)


# --- what is refused


def test_no_file_is_no_checkpoint(tmp_path: Path) -> None:
    assert loaded(tmp_path / "nothing.safetensors") is None


@pytest.mark.parametrize(
    ("identity", "why"),
    [
        ({**MINE, "code": "d"}, "belongs to other code"),
        ({**MINE, "plan": "d", "code": "d"}, "belongs to other plan, code"),
        ({**MINE, "torch": "2"}, "belongs to other torch"),
        ({"plan": "q", "code": "c"}, "belongs to other parameters"),
        ({}, "belongs to other parameters, plan, code"),
    ],
)
def test_a_foreign_checkpoint_is_set_aside_and_its_parts_named(
    file: Path, identity: dict[str, str], why: str
) -> None:
    assert refused(file, identity) == why
    assert loaded(file) is None  # and is not looked at again


def test_the_order_of_an_identity_does_not_matter(file: Path) -> None:
    assert same(loaded(file, dict(reversed(MINE.items()))), OLD)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, bytes]]:
    """A folder and the bytes of a checkpoint with something of everything."""
    path = tmp_path_factory.mktemp("damage") / "run.safetensors"
    tree = {"t": torch.arange(4.0), "k": [torch.tensor([True]), torch.zeros(0, 2)], "n": "text"}
    checkpoint.save_checkpoint(path, tree, MINE)
    yield path, path.read_bytes()


def cut(content: bytes, place: int) -> bytes:
    return content[:place]


def spoilt(mask: int) -> Callable[[bytes, int], bytes]:
    def spoil(content: bytes, place: int) -> bytes:
        return content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :]

    return spoil


@pytest.mark.parametrize(
    "damage",
    [cut, spoilt(0xFF), spoilt(0x01), spoilt(0x10), spoilt(0x80)],
    ids=["cut", "inverted", "lowest", "fifth", "highest"],
)
def test_damage_at_any_byte_is_noticed(
    whole: tuple[Path, bytes], damage: Callable[[bytes, int], bytes]
) -> None:
    """Of a file that is 600 bytes long: its header's length, header and tensors."""
    path, content = whole
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for place in range(len(content)):
            path.write_bytes(damage(content, place))
            assert checkpoint.load_checkpoint(path, MINE) is None, place
            assert not path.exists()
    assert len(caught) == len(content) > 500


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 64, b"{}" * 50, bytes(1000)])
def test_a_damaged_file_is_set_aside_and_named(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert refused(file).startswith("is damaged (")


def test_a_changed_tensor_is_damage_even_in_a_sound_file(file: Path) -> None:
    """The last bytes are the tensor's: 4.0 becomes another number, the format stays right."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert refused(file) == "is damaged (its digest does not fit its content)"


def test_the_safetensors_of_somebody_else_are_no_checkpoint(file: Path) -> None:
    records.save_file({"weights": np.ones(3)}, file)
    assert refused(file) == "is damaged ('tree')"


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("write", [pickle.dump, torch.save], ids=["pickle", "torch"])
def test_a_pickle_is_not_opened(file: Path, tmp_path: Path, write: Callable[..., None]) -> None:
    with file.open("wb") as stream:
        write(Trap(tmp_path / "sprung"), stream)
    assert refused(file).startswith("is damaged (")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("module", [checkpoint, records])
def test_no_code_that_could_unpickle(module: Any) -> None:
    text = Path(module.__file__).read_text().replace("never pickled", "")
    for word in ("pickle", "torch.load", "torch.save", "np.load", "numpy.load", "shelve", "eval("):
        assert word not in text


# --- writes that fail


class Full(io.FileIO):
    """A file on a disk with room for 100 bytes."""

    def write(self, content: Any) -> int:
        super().write(content[:100])
        raise OSError(errno.ENOSPC, "no space left on device")


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("target", "name", "failing", "error"),
    [
        (Path, "open", lambda path, mode: Full(path, mode), OSError),
        (os, "fsync", full, OSError),
        (os, "fsync", interrupted, KeyboardInterrupt),
        (os, "replace", full, OSError),
    ],
    ids=["write", "fsync", "ctrl-c", "replace"],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_failed_write_leaves_the_last_good_one_and_no_rest(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: Any,
    name: str,
    failing: Callable[..., None],
    error: type[BaseException],
    first: bool,
) -> None:
    if first:
        file.unlink()
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(target, name, failing)
        checkpoint.save_checkpoint(file, NEW, MINE)
    assert [*file.parent.iterdir()] == ([] if first else [file])
    found = loaded(file)
    assert found is None if first else same(found, OLD)
    checkpoint.save_checkpoint(file, NEW, MINE)
    assert same(loaded(file), NEW) and [*file.parent.iterdir()] == [file]


def test_what_a_killed_process_half_wrote_is_removed(file: Path) -> None:
    part = file.with_name(f"{file.stem}.123.part")
    part.write_bytes(b"half")
    assert same(loaded(file), OLD)
    assert not part.exists()


def test_a_half_written_file_never_has_the_checkpoints_name(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill at any time leaves the old one or the new one: the new bytes are on the disk, under
    another name, before the name changes hands."""
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(number: int) -> None:
        fsync(number)
        assert same(checkpoint.read_checkpoint(file)[0], OLD)
        (part,) = set(file.parent.iterdir()) - {file}
        assert same(checkpoint.read_checkpoint(part)[0], NEW)
        steps.append("fsync")

    def noted_replace(source: Path, target: Path) -> None:
        assert Path(target) == file
        replace(source, target)
        steps.append("replace")

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    checkpoint.save_checkpoint(file, NEW, MINE)
    assert steps == ["fsync", "replace"]


# --- run records


def test_a_record_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Arrays that lie in memory in another order included: safetensors would shuffle them."""
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    scores = {"global": np.full((3, 2, 2, 2), np.nan, np.float32), "initial": turned}
    about = {"setting": {"name": "s"}, "method": {"name": "m"}, "seed": 3}
    weights = {"head.weight": turned, "part": turned[::2], "one": np.array(1.5, np.float32)}
    history = [{"loss": 0.25, "bytes": {"up": 4}}, {"loss": 1e-9, "bytes": {"up": 5}}]
    features = {"features": np.ones((2, 3, 4), np.float16).T, "labels": np.arange(3)}
    record = Record(about, history, scores, np.arange(4).reshape(2, 2).T, weights, features)
    record.save(tmp_path / "deep" / "run")
    found = records.load_record(tmp_path / "deep" / "run")
    assert (found.about, found.history, found.run) == (about, history, ("s", "m", 3))
    pairs = [
        (found.scores, scores),
        (found.weights, weights),
        (found.features, features),
        ({"": found.tests}, {"": record.tests}),
    ]
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        for name, array in theirs.items():
            assert (mine[name].dtype, mine[name].shape) == (array.dtype, array.shape)
            assert mine[name].tobytes() == array.tobytes()


def test_accuracy_of_a_model_and_scoring() -> None:
    scores = {"global": np.arange(12, dtype=np.float32).reshape(3, 1, 2, 2)}
    record = Record({}, [], scores, np.zeros((2, 2)), {})
    assert record.accuracy().tolist() == [[[0, 1], [2, 3]]]
    assert record.accuracy("global", "seen").tolist() == [[[4, 5], [6, 7]]]
    assert record.accuracy("global", "task").dtype == np.float64


def test_totals_and_bytes_by_hand() -> None:
    """5 floats and 3 + 2 int64 are 20 + 40 bytes; text and numbers weigh nothing."""
    assert history_total([{"bytes": {"up": 4}}, {"bytes": {"up": 5}}], "bytes", "up") == 9.0
    assert history_total([], "bytes", "up") == 0.0
    tree = {"a": torch.zeros(5), "b": [torch.zeros(3).long(), {"c": torch.zeros(2).long()}], "n": 7}
    assert tree_bytes(tree) == 60 and tree_bytes({"n": "text", "e": []}) == 0
