"""The first stage: what other stages depend on, and what is refused before anything runs."""

from typing import Any

import pytest

from stamp_core.config.decode import ParameterError
from stamp_core.engine import experiment
from workbench.workflow import source, sweeps
from workbench.workflow.profiles import OWN, PAPER


def written() -> dict[str, str]:
    source.write_source()
    files = [*source.SOURCE.glob("*/*.json")]
    return {f"{file.parent.name}/{file.stem}": file.read_text() for file in files}


PROFILES = (PAPER, *OWN)  # here all have the blocks of the default one


def of_profiles(names: set[str]) -> set[str]:
    own = {name for name in names if not name.startswith(("code/", "parameters/"))}
    return names | {f"{other}-{name}" for name in own for other in PROFILES}


def test_a_file_changes_with_what_its_stages_use_and_no_other(params):
    before = written()
    stages = {f"{kind}/tiny" for kind in ("splits", "trainings")}
    stages |= {f"sweeps/{name}" for name in params["sweeps"]}
    stages |= {f"code/{name}" for name in ("split", "report", "bits", "attack", "attack_summaries")}
    stages |= {f"parameters/{name}" for name in ("grid", "ablation", "sweeps")}
    assert before.keys() == of_profiles(stages)
    trained, swept = "trainings/tiny", {"sweeps/kappa", "parameters/sweeps"}
    of_tiny = {"sweeps/kappa", "sweeps/exemplars"}
    changes: list[tuple[str, Any, set[str]]] = [
        ("methods.near.temporal.normalise", "mean", {trained, "sweeps/kappa"}),
        ("methods.sam.server_lr", 0.5, {trained}),
        ("methods.fedavg.server_lr", 0.5, {trained, "sweeps/alpha"}),
        ("methods.herded.server_lr", 0.5, {"sweeps/exemplars"}),
        ("settings.shared.training.lr", 0.05, {"sweeps/alpha"}),
        ("settings.shared.split.alpha", 0.5, set()),  # the sweep sets its own values of it
        ("settings.tiny.split.tasks", 3, {"splits/tiny", trained, *of_tiny}),
        ("sweeps.kappa.values", [0.25], swept),
        ("sweeps.kappa.seeds", "5to6", swept),
        ("grid.seeds", ["0", "1"], {"parameters/grid", "splits/tiny", trained}),
        ("grid.method", ["near", "sam"], {"parameters/grid", trained}),
    ]
    for key, value, expected in changes:
        sweeps.set_value(params, key.split("."), value)
        after = written()
        changed = {name for name, text in after.items() if text != before[name]}
        assert changed == of_profiles(expected), key
        before = after


def test_values_of_one_setting_count_in_any_order(params):
    chosen = {name: {"near": {"server_lr": lr}} for name, lr in (("tiny", 0.5), ("other", 0.25))}
    params["chosen"] = chosen
    before = written()
    params["chosen"] = dict(reversed(chosen.items()))
    assert written() == before
    params["chosen"] = {"other": chosen["other"]}
    assert written()["trainings/tiny"] != before["trainings/tiny"]


def test_code_has_the_selection_rule_which_no_import_names(params, monkeypatch):
    names = list[str]()
    fingerprint = experiment.combined_fingerprint
    monkeypatch.setattr(
        experiment,
        "combined_fingerprint",
        lambda *files: names.extend(f.stem for f in files) or fingerprint(*files),
    )
    written()
    assert "herding" in names and "k_centre" not in names
    sweeps.set_value(params, ["methods", "near", "memory", "selection"], "k_centre")
    written()
    assert "k_centre" in names


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["sweeps", "kappa", "keys"], ["methods.near.spatial.kapa"], "did you mean 'kappa'"),
        (["settings", "shared", "split", "classes_per_task"], 6, r"shared: .* at most 10"),
        (["settings", "other", "data"], {"source": "digits", "wide": 3}, "'wide' is unknown"),
    ],
    ids=["key of a sweep", "plan that cannot be drawn", "data of a sweep's setting"],
)
def test_a_slip_is_refused_before_anything_is_written(path, value, message, params):
    sweeps.set_value(params, path, value)
    with pytest.raises(ParameterError, match=message):
        source.write_source()
    assert not source.SOURCE.exists()
