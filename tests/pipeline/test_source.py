"""The first stage: what other stages depend on, and what is refused before anything runs."""

import json
from typing import Any

import pytest

from stamp_core.config.decode import ParameterError
from stamp_core.pipeline import source, sweeps


def fingerprints() -> dict[str, str]:
    """What the first stage writes about every stage, by its file's name."""
    source.write_source()
    return {file.stem: file.read_text() for file in (source.SOURCE / "code").glob("*.json")}


def test_a_fingerprint_changes_with_what_its_stage_uses_and_no_other(
    params: dict[str, Any],
) -> None:
    before = fingerprints()
    stages = {f"train-{name}" for name in params["methods"]}
    assert before.keys() == {"split", "report", *stages, *(f"sweep-{n}" for n in params["sweeps"])}
    changes: list[tuple[list[str], Any, set[str]]] = [
        (
            ["methods", "near", "memory", "exemplars_per_class"],
            4,
            {"train-near", "train-sam", "sweep-kappa"},
        ),
        (["methods", "near", "temporal", "normalise"], "mean", {"train-near", "sweep-kappa"}),
        (["methods", "sam", "server_lr"], 0.5, {"train-sam"}),
        (["methods", "fedavg", "server_lr"], 0.5, {"train-fedavg", "sweep-alpha"}),
        (["settings", "shared", "training", "lr"], 0.05, {"sweep-alpha"}),  # DVC sees train's
        (["sweeps", "kappa", "values"], [0.25], {"sweep-kappa"}),
        (["sweeps", "kappa", "seeds"], "5to6", {"sweep-kappa"}),
    ]
    for path, value, expected in changes:
        sweeps.set_value(params, path, value)
        after = fingerprints()
        assert {name for name, text in after.items() if text != before[name]} == expected, path
        before = after


def test_a_fingerprint_has_the_selection_rule_which_no_import_names(params: dict[str, Any]) -> None:
    file = "stamp_core/coresets/selection/k_centre.py"
    assert file not in json.loads(fingerprints()["train-near"])["code"]
    sweeps.set_value(params, ["methods", "near", "memory", "selection"], "k_centre")
    assert file in json.loads(fingerprints()["train-near"])["code"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["sweeps", "kappa", "keys"], ["methods.near.spatial.kapa"], "did you mean 'kappa'"),
        (["settings", "shared", "split", "classes_per_task"], 6, r"shared: .* at most 10"),
        (["settings", "other", "data"], {"source": "digits", "wide": 3}, "'wide' is unknown"),
    ],
    ids=["key of a sweep", "plan that cannot be drawn", "data of a sweep's setting"],
)
def test_a_slip_is_refused_before_anything_is_written(
    path: list[str], value: object, message: str, params: dict[str, Any]
) -> None:
    sweeps.set_value(params, path, value)
    with pytest.raises(ParameterError, match=message):
        source.write_source()
    assert not source.SOURCE.exists()


def test_settings_of_the_grid_and_the_sweeps_are_checked_with_their_images(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(source, "check_setting", lambda name, params: checked.append(name))
    params["settings"]["unused"] = params["settings"]["tiny"]
    source.write_source()
    assert checked == ["tiny", "other", "shared"]
