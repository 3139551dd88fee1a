"""$STAMP_EXECUTOR: a module of workbench.workflow, found by name."""

import sys

import pytest
from small import plans, whole

from stamp_core.config.decode import ParameterError
from stamp_core.engine.train import train


@pytest.mark.parametrize(
    ("name", "missing", "error", "message"),
    [
        ("ray", "ray", RuntimeError, r"run `pip install -e workbench\[cluster\]`"),
        ("rya", "", ParameterError, "'rya' is unknown; did you mean 'ray'\\? known: ray"),
    ],
)
def test_the_error_names_what_is_missing(name, missing, error, message, monkeypatch):
    monkeypatch.setenv("STAMP_EXECUTOR", name)
    monkeypatch.delitem(sys.modules, "workbench.workflow.ray_executor", raising=False)
    if missing == "ray":
        monkeypatch.setitem(sys.modules, "ray", None)
    experiment = whole("fedavg")
    with pytest.raises(error, match=message):
        train(experiment, plans(experiment, 0), 1, "cpu")
