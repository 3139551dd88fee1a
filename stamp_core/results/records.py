"""Run records: the results of one run (setting, method, seed), as files.

What the machine was and how long it took are in a file of their own, MEASURED: without it a record
is the same bytes wherever it is made, and its digest says so.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as from_bytes
from safetensors.numpy import save as to_bytes

from stamp_core.core.atomic import atomic_folder
from stamp_core.results import metrics

# arg-max over all classes, the seen ones, those of the task; nearest mean of training features
SCORINGS = ("all", "seen", "task", "nearest mean")
# with masks: the same with intersection over union of the task's class, then pixel accuracy
PIXEL_SCORINGS = (*SCORINGS, "pixels")
ARRAYS = ("scores", "weights", "features", "memory")  # files of a record
FORM = 3  # of records that this version writes and reads
MEASURED = "measured.json"
UNMEASURED = {"seconds": {"clients": math.nan}, "memory": {"process": math.nan, "gpu": math.nan}}


class RecordFormError(RuntimeError):
    """A record is sound, but another version of this package wrote it in another form."""


@dataclass(frozen=True, eq=False)
class Record:
    """One run: resolved parameters and identity, history by round, accuracies, final weights."""

    about: dict[str, Any]
    history: list[dict[str, Any]]  # one entry per round
    # "global", "personal" (the client's own) and "local" (after training): [scorings, E, U, T];
    # "initial": [scorings, U, T]
    scores: dict[str, np.ndarray]
    tests: np.ndarray  # [U, T], numbers of test images
    weights: dict[str, np.ndarray]  # name of a parameter or buffer -> its final value
    features: dict[str, np.ndarray] = field(default_factory=dict)  # [E, n, D], labels [n]
    memory: dict[str, np.ndarray] = field(default_factory=dict)  # images, labels, experiences
    environment: dict[str, Any] = field(default_factory=dict)  # the machine; {} if not known

    @property
    def run(self) -> tuple[str, str, int]:
        return self.about["setting"]["name"], self.about["method"]["name"], self.about["seed"]

    @property
    def sweep(self) -> tuple[str, str]:
        """Name of the sweep and value of the swept parameter; both "" outside sweeps."""
        name, value = self.about.get("sweep") or ("", "")
        return str(name), str(value)

    @property
    def name(self) -> str:
        setting, method, _ = self.run
        return run_name(setting, method, self.sweep)

    @property
    def group(self) -> str:
        return str(self.about["group"])

    @property
    def main_model(self) -> str:
        """The model that a method is compared by: 'global' if it has one, else 'personal'."""
        return "personal" if np.isnan(self.accuracy()).all() else "global"

    def __repr__(self) -> str:
        setting, method, seed = self.run
        model = self.main_model
        final = metrics.final_accuracy(self.task_accuracies(model))
        what = " ".join(filter(None, (setting, method, *self.sweep)))
        return f"Record({what}, seed {seed}: final accuracy {final:.1%}, {model} model)"

    def accuracy(self, model: str = "global", scoring: str = "all") -> np.ndarray:
        """Accuracies after each experience, NaN where undefined.  # [E, U, T]"""
        accuracies: np.ndarray = self.scores[model][PIXEL_SCORINGS.index(scoring)].astype(float)
        return accuracies

    def task_accuracies(self, model: str = "global", scoring: str = "all") -> np.ndarray:
        """Accuracy of each task after each experience, over the images of all clients.  # [E, T]"""
        return metrics.micro_average(self.accuracy(model, scoring), self.tests)

    def forgetting(self, model: str = "global", scoring: str = "all") -> np.ndarray:
        """How far each task but the last has fallen since its best (`task_forgetting`).  # [T-1]"""
        m = self.task_accuracies(model, scoring)
        return metrics.task_forgetting(metrics.last_cycle(m, m.shape[1]))

    def save(self, folder: Path) -> None:
        """Write run.json and the arrays into `folder`, which is there whole or not at all."""
        history = [{k: v for k, v in row.items() if k not in UNMEASURED} for row in self.history]
        text = json.dumps({"form": FORM, "about": self.about, "history": history}, indent=1) + "\n"
        rounds = [{k: row.get(k, none) for k, none in UNMEASURED.items()} for row in self.history]
        measured = json.dumps({"environment": self.environment, "history": rounds})
        arrays = ({**self.scores, "tests": self.tests}, self.weights, self.features, self.memory)
        # safetensors writes the memory of a transposed array without regard to its strides
        files = [
            to_bytes({key: np.asarray(array, order="C") for key, array in each.items()})
            for each in arrays
        ]
        with atomic_folder(folder) as scratch:
            for name, content in zip(ARRAYS, files, strict=True):
                (scratch / f"{name}.safetensors").write_bytes(content)
            (scratch / "run.json").write_text(text)
            (scratch / MEASURED).write_text(measured)
            (scratch / "digest").write_text(_digest(text, files))


def run_name(setting: str, method: str, sweep: tuple[str, str] | None = None) -> str:
    """Setting, method and, in a sweep, its name and value: part of file names."""
    return "-".join((setting, method, *filter(None, sweep or ())))


def load_record(folder: Path) -> Record:
    """The record in `folder`; ValueError if it is damaged, RecordFormError if of another form."""
    try:
        text = (folder / "run.json").read_text()
        files = [(folder / f"{name}.safetensors").read_bytes() for name in ARRAYS]
        if _digest(text, files) != (folder / "digest").read_text():
            raise ValueError("its digest does not fit its content")
        run = json.loads(text)
        scores, weights, features, memory = map(from_bytes, files)
        if (form := run.get("form", 1)) != FORM:
            raise RecordFormError(
                f"the record in {folder} is of form {form}, not {FORM}: another version wrote it; "
                "train it again (make repro), or check out the version that wrote it"
            )
        environment, rounds = _read_measured(folder / MEASURED, len(run["history"]))
        history = [row | more for row, more in zip(run["history"], rounds, strict=True)]
        arrays = (scores, scores.pop("tests"), weights, features, memory)
        return Record(run["about"], history, *arrays, environment)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(f"the record in {folder} is damaged ({error})") from error


def _read_measured(path: Path, rounds: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The machine, and seconds and memory of each round: NaN in a copy without the file."""
    measured = json.loads(path.read_text()) if path.exists() else {}
    return measured.get("environment", {}), measured.get("history", [UNMEASURED] * rounds)


def _digest(text: str, files: list[bytes]) -> str:
    """The sha256 over the contents of all files of a record but MEASURED."""
    total = hashlib.sha256(text.encode())
    for content in files:
        total.update(content)
    return total.hexdigest()


def history_total(history: list[dict[str, Any]], *path: str) -> float:
    """The sum of an entry over all rounds, e.g. history_total(history, "bytes", "up")."""
    values: list[Any] = [reduce(lambda value, key: value[key], path, row) for row in history]
    return float(sum(values))


def tree_bytes(tree: object) -> int:
    """Bytes of all tensors in a tree: the size of a message, or of a client's state on disk."""
    if isinstance(tree, Mapping):
        return sum(map(tree_bytes, tree.values()))
    if isinstance(tree, list):
        return sum(map(tree_bytes, tree))
    return int(tree.nbytes) if hasattr(tree, "nbytes") else 0
