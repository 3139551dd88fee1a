"""The first stage: what other stages depend on, and what is refused before anything runs."""

import json
from typing import Any

import pytest

from stamp_core.config.decode import ParameterError
from stamp_core.config.params import OWN
from workbench.workflow import source, sweeps


def written() -> dict[str, str]:
    """What the first stage writes about every stage, by its file's name."""
    source.write_source()
    files = [*source.SOURCE.glob("*/*.json")]
    return {f"{file.parent.name}/{file.stem}": file.read_text() for file in files}


def of_profiles(names: set[str], params: dict[str, Any]) -> set[str]:
    """With the files of other profiles, of grids and sweeps; here all have the same blocks."""
    trained = {f"code/train-{name}" for name in params["grid"]["method"]}
    swept = {f"code/sweep-{name}" for name in params["sweeps"]}
    own = names & (trained | swept)
    return names | {name.replace("/", f"/{other}-") for name in own for other in OWN}


def test_a_file_changes_with_what_its_stages_use_and_no_other(params: dict[str, Any]) -> None:
    before = written()
    stages = {f"code/train-{name}" for name in params["methods"]}
    stages |= {f"code/sweep-{name}" for name in params["sweeps"]} | {"code/split"}
    stages |= {"code/report", "code/attack", "code/attack_summaries"}
    plain = {f"{kind}/{name}" for kind in ("settings", "splits") for name in params["settings"]}
    blocks = {f"parameters/{name}" for name in ("grid", "ablation", "sweeps")}
    assert before.keys() == of_profiles(stages, params) | plain | blocks
    train_near, swept = "code/train-near", {"code/sweep-kappa", "parameters/sweeps"}
    changes: list[tuple[str, Any, set[str]]] = [
        ("methods.near.temporal.normalise", "mean", {train_near, "code/sweep-kappa"}),
        ("methods.sam.server_lr", 0.5, {"code/train-sam"}),
        ("methods.fedavg.server_lr", 0.5, {"code/train-fedavg", "code/sweep-alpha"}),
        ("settings.shared.training.lr", 0.05, {"settings/shared", "code/sweep-alpha"}),
        (
            "settings.shared.split.alpha",
            0.5,
            {"settings/shared", "splits/shared"},  # the sweep sets its own values of it
        ),
        ("sweeps.kappa.values", [0.25], swept),
        ("sweeps.kappa.seeds", "5to6", swept),
        ("grid.seeds", ["0", "1"], {"parameters/grid"}),
        (
            "methods.near.memory.exemplars_per_class",
            4,
            {train_near, "code/train-sam", "code/sweep-kappa"},
        ),
    ]
    for key, value, expected in changes:
        sweeps.set_value(params, key.split("."), value)
        after = written()
        changed = {name for name, text in after.items() if text != before[name]}
        assert changed == of_profiles(expected, params), key
        before = after


def test_values_of_one_setting_count_in_any_order(params: dict[str, Any]) -> None:
    chosen = {name: {"near": {"server_lr": lr}} for name, lr in (("tiny", 0.5), ("other", 0.25))}
    params["chosen"] = chosen
    before = written()
    params["chosen"] = dict(reversed(chosen.items()))
    assert written() == before
    params["chosen"] = {"tiny": chosen["tiny"]}
    assert written()["code/train-near"] != before["code/train-near"]


def test_a_fingerprint_has_the_selection_rule_which_no_import_names(params: dict[str, Any]) -> None:
    file = "k_centre"
    assert file not in json.loads(written()["code/train-near"])["code"]
    sweeps.set_value(params, ["methods", "near", "memory", "selection"], "k_centre")
    assert file in json.loads(written()["code/train-near"])["code"]


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
