"""Run records: what one seed of one cell of the grid has left behind, as files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

SCORINGS = ("all", "seen", "task")  # arg-max over all classes, those met so far, the task's own
MODELS = ("global", "personal", "local")  # whose accuracy: server's, client's own, after training


@dataclass(frozen=True, eq=False)
class Record:
    """One run: resolved parameters and identity, history by round, accuracies, final weights."""

    about: dict[str, Any]
    history: list[dict[str, Any]]  # one row a round
    scores: dict[str, np.ndarray]  # model -> [scorings, S, U, T]; "initial" -> [scorings, U, T]
    tests: np.ndarray  # [U, T] test pictures
    weights: dict[str, np.ndarray]  # name of a parameter or buffer -> its final value
    features: dict[str, np.ndarray] = field(default_factory=dict)  # [S, n, D], labels [n]
    kept: dict[str, np.ndarray] = field(default_factory=dict)  # a client's pictures and labels

    @property
    def cell(self) -> tuple[str, str, int]:
        """Setting, method and seed."""
        return self.about["setting"]["name"], self.about["method"]["name"], self.about["seed"]

    @property
    def group(self) -> str:
        """What kind of method it is: federated, personalised, continual or a control."""
        return str(self.about["group"])

    def accuracy(self, model: str = "global", scoring: str = "all") -> np.ndarray:
        """Accuracies after each step.  # [S, U, T], nan where undefined"""
        found: np.ndarray = self.scores[model][SCORINGS.index(scoring)].astype(float)
        return found

    def save(self, folder: Path) -> None:
        """Write run.json (for people) and its arrays."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"about": self.about, "history": self.history}, indent=1)
        (folder / "run.json").write_text(text + "\n")
        _write({**self.scores, "tests": self.tests}, folder / "scores.safetensors")
        _write(self.weights, folder / "weights.safetensors")
        _write(self.features, folder / "features.safetensors")
        _write(self.kept, folder / "kept.safetensors")


def _write(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Write arrays row by row: safetensors would take a transposed one's memory as it lies."""
    save_file({name: np.asarray(array, order="C") for name, array in arrays.items()}, path)


def load(folder: Path) -> Record:
    """The record in `folder`."""
    read = json.loads((folder / "run.json").read_text())
    scores = load_file(folder / "scores.safetensors")
    tests = scores.pop("tests")
    weights = load_file(folder / "weights.safetensors")
    features = load_file(folder / "features.safetensors")
    kept = folder / "kept.safetensors"  # records of an earlier version have none
    looked_at = (features, load_file(kept) if kept.exists() else {})
    return Record(read["about"], read["history"], scores, tests, weights, *looked_at)


def total(history: list[dict[str, Any]], *path: str) -> float:
    """The sum of one entry of the history over all rounds, e.g. total(history, "bytes", "up")."""
    values = []
    for row in history:
        value: Any = row
        for part in path:
            value = value[part]
        values.append(value)
    return float(sum(values))


def tree_bytes(tree: object) -> int:
    """Bytes of all tensors in a tree: what a message weighs, what a client keeps on its disk."""
    if isinstance(tree, Mapping):
        return sum(map(tree_bytes, tree.values()))
    if isinstance(tree, list):
        return sum(map(tree_bytes, tree))
    return int(tree.nbytes) if hasattr(tree, "nbytes") else 0
