"""How methods were verified: tables of results and docs/deviations.md say the same."""

import re

from stamp_core.config.params import read_params
from stamp_core.core.paths import ROOT
from stamp_core.methods.base.registry import resolve_preset
from workbench.report.text import BY_HAND, VERIFIED

ROW = re.compile(r"^\| \[(.+?)\]\(#\S+\) \|.*\| `(execution|by hand|reconstruction)`", re.M)
PRESETS = {"lga": "glfc"}  # methods that are presets of another one's file


def test_every_method_has_the_mark_of_its_row():
    text = (ROOT / "docs/deviations.md").read_text("utf-8")
    rows = {
        re.sub(r"[^a-z0-9_]", "", name.lower()): mark
        for names, mark in ROW.findall(text)
        for name in names.split(", ")
    }
    marks = {PRESETS.get(name, name): mark for name, mark in rows.items()}
    params = read_params()
    kinds = {resolve_preset(preset, params)[0].__module__ for preset in params["methods"]}
    names = {kind.rpartition(".")[2] for kind in kinds}
    assert {name: VERIFIED.get(name, BY_HAND) for name in names} == {
        name: marks[name] for name in names
    }
