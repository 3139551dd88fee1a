"""A project in an empty folder, whose parameters a test may change."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import small

from stamp_core.engine.experiment import Experiment
from stamp_core.pipeline import grid, source, sweeps

SWEEP: dict[str, Any] = {
    "label": "radius",
    "setting": ["tiny"],
    "method": ["near"],
    "seeds": "0to1",
    "keys": ["methods.near.spatial.kappa", "methods.near.temporal.kappa"],
    "values": [0.0, 0.5],
}
TINY: dict[str, Any] = {
    "data": small.DATA,
    "split": {**small.SPLIT, "tasks": 2, "images_per_class": 5},
    "network": small.NETWORK,
    "training": {**small.TRAINING, "rounds": 1},
}
SHARED = {**deepcopy(TINY), "split": {**small.SPLIT, "tasks": 2, "order": "common", "alpha": 1.0}}
PARAMS: dict[str, Any] = {
    "file": "params.yaml",
    "grid": {"setting": ["tiny"], "method": ["fedavg", "near", "sam", "keep_all"], "seeds": ["0"]},
    "ablation": {"baselines": ["near"], "method": ["sam"]},
    "sweeps": {
        "kappa": SWEEP,
        "exemplars": {
            "figure": "coresets",
            "label": "exemplars",
            "setting": ["tiny", "other"],
            "method": ["kept", "herded"],
            "seeds": "0",
            "keys": ["methods.{method}.memory.exemplars_per_class"],
            "values": [1, 2],
        },
        "alpha": {
            "figure": "heterogeneity",
            "label": "Dirichlet",
            "setting": ["shared"],
            "method": ["fedavg"],
            "seeds": "0",
            "keys": ["settings.{setting}.split.alpha"],
            "values": [0.5, 1.0],
        },
    },
    "settings": {"tiny": TINY, "other": deepcopy(TINY), "shared": SHARED},
    "methods": {
        "fedavg": {"server_lr": 1.0},
        "kept": {"kind": "replay", "memory": {"selection": "uniform", "exemplars_per_class": 9}},
        "herded": {"extends": "kept", "memory": {"selection": "herding"}},
        "keep_all": {"extends": "kept", "memory": {"exemplars_per_class": 1000000}},
        "near": {
            "kind": "stamp",
            "memory": {"exemplars_per_class": 3},
            "spatial": {"kappa": 0.25, "softmax": {"rounds": 7, "lr": 2.0}},
            "temporal": {"kappa": 0.25},
        },
        "sam": {"extends": "near", "temporal": None},
    },
}


@pytest.fixture
def params(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The parameters that every profile has, for a project in an empty folder."""
    changeable = deepcopy(PARAMS)
    for module in (sweeps, grid, source):
        monkeypatch.setattr(module, "read_params", lambda *profile: deepcopy(changeable))
    for module in (sweeps, grid):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(grid, "RESUME", tmp_path / "resume")
    monkeypatch.setattr(source, "SOURCE", tmp_path / "source")
    return changeable


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the experiments that are trained."""
    names: list[str] = []
    train = grid.train

    def recorded(experiment: Experiment, *rest: Any) -> Any:
        names.append(experiment.name)
        return train(experiment, *rest)

    monkeypatch.setattr(grid, "train", recorded)
    yield names
