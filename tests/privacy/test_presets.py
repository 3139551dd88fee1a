"""Which presets can be private: tried, and as docs/privacy.md says."""

from dataclasses import replace
from functools import cache
from typing import Any

import small
from small import plan, tiny, with_train

from stamp_core.config.decode import ParameterError
from stamp_core.config.params import read_params
from stamp_core.config.schema import Privacy
from stamp_core.core.paths import ROOT
from stamp_core.engine.experiment import Experiment
from stamp_core.methods.base.registry import resolve_preset

PAGE = ROOT / "docs" / "privacy.md"
SPLIT = {"clients": 2, "tasks": 2, "images_per_class": 10}


def experiment(preset: str, noise: Any) -> Experiment:
    kind, params = resolve_preset(preset, read_params())
    setting = tiny(kind.__module__.rpartition(".")[2], split=SPLIT).setting
    setting = replace(setting, privacy=Privacy(1.0, 0.1, noise))
    return small.Quick(setting, preset, kind, params)


@cache
def reason(preset: str, noise: str) -> str:
    """Why a preset is refused; "" if it is not."""
    try:
        small.run(experiment(preset, noise))
    except ParameterError as error:
        return str(error).partition("it must be one that ")[2]
    return ""


def rows() -> list[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for preset in read_params()["methods"]:
        why, where = reason(preset, "local"), "any"
        if not why:
            why, where = reason(preset, "central"), "central"
        if why:
            needed, _, rest = why.partition(", as privacy")
            sent = rest.partition(", not also ")[2]
            key = where, f"{needed}, not also {sent}" if sent else needed
            found.setdefault(key, []).append(f"`{preset}`")
    return [f"| {' | '.join(key)} | {', '.join(found[key])} |" for key in sorted(found)]


def test_the_page_lists_the_presets_that_are_refused():
    lines = PAGE.read_text("utf-8").splitlines()
    listed = [line for line in lines if line.startswith(("| any |", "| central |"))]
    assert listed == rows(), "the table should be:\n" + "\n".join(rows())


def test_what_the_server_starts_with_does_not_come_from_images():
    """Of no preset that is not refused: the mechanism sees nothing that is sent before."""
    accepted = [preset for preset in read_params()["methods"] if not reason(preset, "local")]
    for one in (experiment(preset, "local") for preset in accepted):
        plan_ = plan(one)
        empty = with_train(plan_, dict.fromkeys(small.everywhere(plan_), ()))
        starts = [small.worker(one, each).initial_states(0)[0] for each in (plan_, empty)]
        small.assert_equal_trees(*starts)
