"""A project in an empty folder, whose parameters a test may change."""

from copy import deepcopy
from typing import Any

import pytest
from parameters import PARAMS

from stamp_core.engine.experiment import Experiment
from workbench.workflow import grid, source, sweeps, training


@pytest.fixture
def params(monkeypatch, tmp_path):
    """The parameters that every profile has, for a project in an empty folder."""
    changeable = deepcopy(PARAMS)
    for module in (sweeps, grid, source, training):
        monkeypatch.setattr(module, "read_profile", lambda *profile: deepcopy(changeable))
    for module in (sweeps, grid, training):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    for module in (grid, training):
        monkeypatch.setattr(module, "RESUME", tmp_path / "resume")
    monkeypatch.setattr(source, "SOURCE", tmp_path / "source")
    return changeable


@pytest.fixture
def trained(monkeypatch):
    names: list[str] = []
    train = grid.train

    def recorded(experiment: Experiment, *rest: Any) -> Any:
        names.append(experiment.name)
        return train(experiment, *rest)

    monkeypatch.setattr(grid, "train", recorded)
    yield names
