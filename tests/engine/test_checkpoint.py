"""Checkpoints and records: bit for bit, refused when damaged or foreign, never pickled."""

import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import save_file
from small import full
from torch import Tensor

from stamp_core.engine import trees
from stamp_core.engine.checkpoint import Checkpoint
from stamp_core.engine.trees import Store, Tree
from stamp_core.results import records
from stamp_core.results.records import Record

MINE = {"parameters": "p", "plan": "q", "code": "c"}


def state_after(rounds: int) -> Tree:
    return {
        "server": {"parameters": torch.arange(5.0) + rounds, "note": "text"},
        "clients": [{"own": torch.full((2,), float(rounds))}, {"last": rounds}, {"last": rounds}],
        "scores": {"global": torch.full((2, 2), float(rounds))},
        "features": [torch.ones(2, dtype=torch.float16)],
        "memory": [],
        "history": [{"round": k, "loss": 1 / (k + 3)} for k in range(rounds)],
        "setup": {"down": 4},
        "next": rounds,
    }


DTYPES = ("float32", "float64", "float16", "int64", "int32", "uint8", "bool")
shapes = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
tensors = st.sampled_from(DTYPES).flatmap(lambda d: arrays.arrays(d, shapes)).map(torch.from_numpy)
values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
keys = st.one_of(st.text(max_size=5), st.text("a.0", max_size=4)).filter(lambda k: k != "tensor")
any_tree = st.recursive(
    tensors | values,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (repr(one) == repr(other))  # nan is nan, -0.0 is not 0.0


def mine(folder: Path, identity: dict[str, str] = MINE) -> Checkpoint:
    return Checkpoint(folder, "run-1.5", 0, identity)


@pytest.fixture
def folder(tmp_path):
    mine(tmp_path / "deep").save(state_after(3))
    return tmp_path / "deep"


def loaded(folder: Path, identity: dict[str, str] = MINE) -> Tree | None:
    """What a load gives that must not warn, with the clients' states in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = mine(folder, identity).load()
    return found and {
        **found,
        "clients": [mine(folder).store.get(c.digest) for c in found["clients"]],
    }


def is_state(found: Tree | None, rounds: int) -> bool:
    """Whether a state is the one after some rounds, in whatever order its parts are."""
    expected = state_after(rounds)
    return found is not None and same(dict(sorted(found.items())), dict(sorted(expected.items())))


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def refused(folder: Path, identity: dict[str, str] = MINE) -> str:
    """The warning of a load that must give nothing; the folder is kept aside as it was."""
    one, before = mine(folder, identity), content(folder / "run-1.5-0")
    with pytest.warns(UserWarning) as caught:
        assert one.load() is None
    assert len(caught) == 1 and caught[0].filename == __file__
    aside = folder / "run-1.5-0.aside"
    assert content(aside) == before and [*folder.iterdir()] == [aside]
    message = str(caught[0].message)
    assert message.startswith(f"checkpoint {one.folder} ")
    assert message.endswith(f"; kept as {aside.name}, starting afresh")
    return message.removeprefix(f"checkpoint {one.folder} ").partition("; kept")[0]


@settings(deadline=None)
@given(tree=st.dictionaries(keys, any_tree, max_size=4))
def test_any_tree_comes_back_bit_for_bit(tmp_path_factory, tree):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    trees.write_tree(path, tree, MINE)
    found = trees.read_tree(path)[0]
    assert same(found, tree)
    trees.write_tree(path, found, MINE)
    assert same(trees.read_tree(path)[0], tree)


def test_views_are_saved_as_they_look(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    tree = {"turned": base.t(), "part": base[:, ::2], "wide": torch.ones(1).expand(2, 3)}
    trees.write_tree(tmp_path / "x", tree, {})
    expected = {name: tensor.contiguous() for name, tensor in tree.items()}
    assert same(trees.read_tree(tmp_path / "x")[0], expected)


def test_a_state_comes_back_bit_for_bit_and_can_be_written_to(folder):
    found = loaded(folder)
    assert found is not None and is_state(found, 3)
    found["server"]["parameters"].add_(1)
    assert same(loaded(folder)["server"], state_after(3)["server"])  # type: ignore[index]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {1: "x"}}, r"^state\.a: keys must be text other than 'tensor', not \[1\]$"),
        ({"a": [{"tensor": "x"}]}, r"^state\.a\.0: keys must be text other than 'tensor', not"),
        ({"a": [1, {"b": object()}]}, r"^state\.a\.1\.b is a object; a state holds tensors, text"),
        ({"a": (1, 2)}, r"^state\.a is a tuple; "),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path, tree, message):
    with pytest.raises(TypeError, match=message):
        trees.write_tree(tmp_path / "x", tree, MINE)
    assert not [*tmp_path.iterdir()]


def sizes(folder: Path) -> dict[str, int]:
    return {name: len(each) for name, each in content(folder / "run-1.5-0").items()}


def test_a_round_writes_what_has_changed(folder):
    one, before = mine(folder), sizes(folder)
    assert len([name for name in before if name.startswith("states/")]) == 3
    state = one.load()
    assert state is not None
    state["clients"][0] = {"own": torch.zeros(2)}
    state["history"] = state_after(4)["history"]
    state["scores"]["global"].zero_()  # nothing was evaluated: not written
    one.save(state, evaluated=False)
    after = sizes(folder)
    (new,) = set(after) - set(before)
    assert len(after) == len(before) == 4 and state["clients"][0].digest in new
    found = loaded(folder)
    assert found is not None and same(found["scores"], state_after(3)["scores"])
    assert same(found["clients"], [{"own": torch.zeros(2)}, {"last": 3}, {"last": 3}])
    assert found["history"] == state["history"]


def test_equal_states_are_one_file_and_a_store_knows_its_own(tmp_path):
    store = Store(tmp_path)
    kept = [store.put({"a": torch.ones(3)}) for _ in range(3)]
    other = store.put({"a": torch.ones(2)})
    assert kept[0] == kept[1] == kept[2] and kept[0].bytes == 12 and other.bytes == 8
    assert len([*tmp_path.iterdir()]) == 2
    store.path(other.digest).replace(store.path(kept[0].digest))
    with pytest.raises(ValueError, match="holds another tree"):
        store.get(kept[0].digest)
    assert same(store.get(store.put({"n": 1}).digest), {"n": 1})
    with pytest.raises(FileNotFoundError):
        store.get("none")


def test_the_rest_of_a_run_killed_before_its_first_checkpoint_goes(tmp_path):
    one = mine(tmp_path)
    one.store.put({"a": 1})
    assert loaded(tmp_path) is None and not one.folder.exists()


@pytest.mark.parametrize(
    ("identity", "why"),
    [
        ({**MINE, "plan": "d", "code": "d"}, "belongs to other plan, code"),
        ({**MINE, "torch": "2"}, "belongs to other torch"),
        ({}, "belongs to other parameters, plan, code"),
    ],
)
def test_a_foreign_checkpoint_is_set_aside_and_its_parts_named(folder, identity, why):
    (folder / "run-1.5-0.aside").write_text("what was set aside before")
    assert refused(folder, identity) == why
    assert loaded(folder) is None  # and is not looked at again


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
def test_damage_at_any_byte_of_any_file_is_noticed(folder, damage):
    whole, places = content(folder), 0
    for name, original in whole.items():
        for place in range(0, len(original), 1 if len(original) < 300 else 7):
            for other, each in whole.items():
                (folder / other).parent.mkdir(parents=True, exist_ok=True)
                (folder / other).write_bytes(each)
            (folder / name).write_bytes(damage(original, place))
            with pytest.warns(UserWarning):
                assert mine(folder).load() is None, (name, place)
            assert not mine(folder).folder.exists()
            places += 1
    assert places > 400


def test_a_sound_file_with_another_content_is_damage(folder):
    """The last bytes are the server's: 7.0 becomes another number, the format stays right."""
    path = folder / "run-1.5-0" / "run.safetensors"
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    assert refused(folder) == "is damaged (the digest of run.safetensors does not fit its content)"
    mine(folder).save(state_after(3))
    save_file({"weights": np.ones(3)}, path)  # of somebody else
    assert refused(folder) == "is damaged ('tree')"


def test_a_folder_among_the_states_is_damage(folder):
    (folder / "run-1.5-0" / "states" / "0123.safetensors").mkdir()
    assert refused(folder).startswith("is damaged ([Errno")


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("write", [pickle.dump, torch.save], ids=["pickle", "torch"])
def test_a_pickle_is_not_opened(folder, tmp_path, write):
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        with path.open("wb") as stream:
            write(Trap(tmp_path / "sprung"), stream)
    assert refused(folder).startswith("is damaged (")
    assert not (tmp_path / "sprung").exists()


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def after(count: int, failing: Callable[..., None], real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, which fails from its `count`-th call on."""
    calls: list[object] = []

    def one(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        return failing() if len(calls) > count else real(*arguments, **named)

    return one


@pytest.mark.parametrize(
    ("target", "name", "failing", "error"),
    [
        (Path, "write_bytes", full, OSError),
        (os, "fsync", full, OSError),
        (os, "fsync", interrupted, KeyboardInterrupt),
        (os, "replace", full, OSError),
        (os, "replace", interrupted, KeyboardInterrupt),
    ],
    ids=["write", "fsync", "ctrl-c in fsync", "replace", "ctrl-c in replace"],
)
@pytest.mark.parametrize("count", range(4))
def test_a_save_that_fails_anywhere_leaves_the_last_state_and_the_next_one_succeeds(
    folder, monkeypatch, target, name, failing, error, count
):
    one = mine(folder)
    assert one.load() is not None
    with monkeypatch.context() as patch:
        patch.setattr(target, name, after(count, failing, getattr(target, name)))
        with pytest.raises(error):
            one.save(state_after(4))
    assert is_state(loaded(folder), 3)
    again = mine(folder)
    again.load()
    again.save(state_after(4))
    assert is_state(loaded(folder), 4)
    assert len(sizes(folder)) == 4


def test_results_that_could_not_be_written_are_written_later(tmp_path, monkeypatch):
    """The round after one that ended with an evaluation has none, but writes its results."""
    one = mine(tmp_path)
    one.save(state_after(1))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(Path, "write_bytes", full)
        one.save(state_after(2), evaluated=True)
    one.save({**state_after(3), "scores": state_after(2)["scores"]}, evaluated=False)
    found = loaded(tmp_path)
    assert found is not None and same(found["scores"], state_after(2)["scores"])


def test_what_a_killed_process_half_wrote_is_removed(folder):
    inside = folder / "run-1.5-0"
    before = content(inside)
    for part in ("run.safetensors.123.part", "states/ab.safetensors.1.part", "states/ab"):
        (inside / part).write_bytes(b"half")
    assert is_state(loaded(folder), 3)
    assert content(inside) == before


def some_record() -> Record:
    scores = {"global": np.zeros((4, 2, 2, 2), np.float32)}
    about = {"setting": {"name": "s"}, "method": {"name": "m"}, "seed": 3}
    row = {"loss": 0.5, "seconds": {"clients": 0.1}, "memory": {"process": 7, "gpu": 0}}
    return Record(about, [row], scores, np.ones((2, 2)), {"w": np.ones(3)})


@pytest.mark.parametrize("name", [*records.ARRAYS, "run", "digest"])
def test_a_changed_record_is_damaged(tmp_path, name):
    """A part of it is gone, cut, of another run, or a number in it has changed."""
    some_record().save(tmp_path / "0")
    (path,) = (each for each in (tmp_path / "0").iterdir() if each.stem == name)
    whole = path.read_bytes()
    for changed in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b"", None):
        path.unlink()
        if changed is not None:
            path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"^the record in .*0 is damaged \("):
            records.load_record(tmp_path / "0")
        path.write_bytes(whole)
    assert records.load_record(tmp_path / "0").run == ("s", "m", 3)


@pytest.mark.parametrize("before", [True, False])
def test_a_record_whose_writing_failed_is_not_there(tmp_path, monkeypatch, before):
    if before:
        some_record().save(tmp_path / "0")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(Path, "write_text", full)  # run.json, after the arrays
        some_record().save(tmp_path / "0")
    assert [path.name for path in tmp_path.iterdir()] == (["0"] if before else [])
    some_record().save(tmp_path / "0")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert records.load_record(tmp_path / "0").run == ("s", "m", 3)


def test_a_record_comes_back_bit_for_bit(tmp_path):
    """Arrays that lie in memory in another order included: safetensors would shuffle them."""
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    scores = {"global": np.full((3, 2, 2, 2), np.nan, np.float32), "initial": turned}
    weights = {"head.weight": turned, "part": turned[::2], "one": np.array(1.5, np.float32)}
    features = {"features": np.ones((2, 3, 4), np.float16).T, "labels": np.arange(3)}
    tests = np.arange(4).reshape(2, 2).T
    record = replace(some_record(), scores=scores, tests=tests, weights=weights, features=features)
    record.save(tmp_path / "deep" / "run")
    found = records.load_record(tmp_path / "deep" / "run")
    assert (found.about, found.history) == (record.about, record.history)
    np.testing.assert_array_equal(found.tests, record.tests, strict=True)
    for name in ("scores", "weights", "features"):
        arrays, expected = getattr(found, name), getattr(record, name)
        assert arrays.keys() == expected.keys()
        for key, array in expected.items():
            np.testing.assert_array_equal(arrays[key], array, strict=True)
