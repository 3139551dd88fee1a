"""docs/deviations.md: every mark `execution` has numbers of the released code here."""

import re
from importlib import import_module
from pathlib import Path

from executed import Execution

from stamp_core.core.paths import ROOT


def test_marks() -> None:
    rows = re.findall(r"^\|.*`execution`.*\|$", (ROOT / "docs/deviations.md").read_text(), re.M)
    marks = [mark for row in rows for mark in re.findall(r"`execution`: [^;|]*[^;| ]", row)]
    modules = [import_module(path.stem) for path in Path(__file__).parent.glob("test_*.py")]
    values = [value for module in modules for value in vars(module).values()]
    assert sorted(marks) == sorted(each.mark for each in values if isinstance(each, Execution))
