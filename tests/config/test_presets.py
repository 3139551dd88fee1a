"""Presets of methods: what `extends` takes over, and what `null` turns off."""

from copy import deepcopy
from typing import Any

import pytest

from stamp_core.config.decode import ParameterError
from stamp_core.methods.base.registry import get_method, merge_blocks, read_preset, resolve_preset

METHODS: dict[str, Any] = {
    "near": {
        "kind": "stamp",
        "memory": {"exemplars_per_class": 3},
        "spatial": {"kappa": 0.25, "softmax": {"rounds": 7, "lr": 2.0}},
        "temporal": {"kappa": 0.25},
    },
    "sam": {"extends": "near", "temporal": None},
    "nearer": {"extends": "sam", "spatial": {"softmax": {"rounds": 9}}},
}


def test_a_preset_overrides_the_one_it_extends() -> None:
    """At any depth and over several presets; what none of them sets has its default."""
    methods = deepcopy(METHODS)
    assert read_preset("nearer", {"methods": methods}) == {
        "kind": "stamp",
        "memory": {"exemplars_per_class": 3},
        "spatial": {"kappa": 0.25, "softmax": {"rounds": 9, "lr": 2.0}},
        "temporal": None,
    }
    _, params = resolve_preset("nearer", {"methods": methods})
    assert (params.spatial.softmax.rounds, params.spatial.softmax.lr) == (9, 2.0)
    assert (params.memory.exemplars_per_class, params.temporal) == (3, None)
    assert methods == METHODS


def test_a_preset_without_a_kind_is_the_method_of_its_name_also_when_extended() -> None:
    methods = {"replay": {"ratio": 0.5}, "more": {"extends": "replay", "server_lr": 2.0}}
    kind, params = resolve_preset("more", {"methods": methods})
    assert kind is get_method("replay") and (params.ratio, params.server_lr) == (0.5, 2.0)


def test_null_turns_a_block_off_and_a_block_turns_it_on_again() -> None:
    again = {"extends": "sam", "temporal": {"kappa": 0.125}}
    _, params = resolve_preset("again", {"methods": {**METHODS, "again": again}})
    assert params.temporal.kappa == 0.125 and params.temporal.lr == 1.0


@pytest.mark.parametrize(
    ("methods", "name", "message"),
    [
        ({"a": {"extends": "a"}}, "a", "a.extends is 'a'; it must be a preset that does not ext"),
        (
            {"a": {"extends": "b"}, "b": {"extends": "c"}, "c": {"extends": "a"}},
            "b",
            "b.extends is 'b'; it must be a preset that does not extend itself",
        ),
        (
            {"a": {"extends": "b"}, "b": {"extends": "c"}, "c": {"extends": "b"}},
            "a",
            "a.extends is 'b'; it must be a preset that does not extend itself",
        ),
        ({"abc": {}, "d": {"extends": "abd"}}, "d", "'abd' is unknown; did you mean 'abc'? "),
    ],
    ids=str,
)
def test_a_preset_that_extends_itself_or_an_unknown_one_is_refused(
    methods: dict[str, Any], name: str, message: str
) -> None:
    with pytest.raises(ParameterError) as error:
        read_preset(name, {"methods": methods})
    assert str(error.value).startswith(f"params/methods.yaml: {message}")


def test_merging_by_hand() -> None:
    """Leaves of the second tree win; a block over a leaf, and a leaf over a block, replace it."""
    base = {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": {"g": 4}, "h": 5}
    kept = deepcopy(base)
    merged = merge_blocks(base, {"b": {"d": {"e": 6, "x": 7}}, "f": None, "h": {"i": 8}, "k": [9]})
    assert merged == {
        "a": 1,
        "b": {"c": 2, "d": {"e": 6, "x": 7}},
        "f": None,
        "h": {"i": 8},
        "k": [9],
    }
    assert base == kept
