"""Loggers for `train`, each of which starts anew: files, TensorBoard, DVCLive, Weights & Biases."""

import csv
import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from stamp_core.config.decode import ParameterError

Values = Mapping[str, float]


class CsvLogger:
    """A line a round in one file, a line an experience in `<name>_accuracy.csv` beside it."""

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        self.rounds = _Lines(path)
        self.accuracies = _Lines(path.with_stem(f"{path.stem}_accuracy"))

    def on_round(self, seed: int, round: int, values: Values) -> None:
        self.rounds.append({"seed": seed, "round": round}, values)

    def on_experience(self, seed: int, experience: int, values: Values) -> None:
        self.accuracies.append({"seed": seed, "experience": experience}, values)


class _Lines:
    """A CSV file that is begun with its first line, and closed after every line to be followed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self.keys = set[tuple[int, ...]]()

    def append(self, key: Mapping[str, int], values: Values) -> None:
        """Append a line; refused if it is there, as the line of another training would be."""
        if (numbers := tuple(key.values())) in self.keys:
            where = " ".join(f"{name} {number}" for name, number in key.items())
            raise ValueError(f"{self.path} has {where}: a CsvLogger is for one training")
        if not self.columns:
            self.columns = [*key, *(name for name in values if name not in key)]
            self._write(dict(zip(self.columns, self.columns, strict=True)), "w")
        self._write({**values, **key}, "a")
        self.keys.add(numbers)

    def _write(self, line: Mapping[str, Any], mode: str) -> None:
        with self.path.open(mode, newline="") as file:
            writer = csv.DictWriter(file, self.columns, extrasaction="ignore", lineterminator="\n")
            writer.writerow(line)


class TensorBoardLogger:
    """Curves for TensorBoard; each seed is a run of its own, so that one chart shows them all."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.open_writer = _load("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self.writers: dict[int, Any] = {}

    def on_round(self, seed: int, step: int, values: Values) -> None:
        if seed not in self.writers:  # purge_step hides the points of an earlier training
            self.writers[seed] = self.open_writer(str(self.folder / f"seed{seed}"), purge_step=0)
        writer = self.writers[seed]
        for name, value in _defined(values).items():
            writer.add_scalar(name, value, step)
        writer.flush()

    on_experience = on_round


class DvcliveLogger:
    """Curves for `dvc plots` and for editors that show DVCLive's folder."""

    def __init__(self, folder: Path | str) -> None:
        live = _load("dvclive", "dvclive").Live
        self.live = live(str(folder), save_dvc_exp=False, dvcyaml=None)

    def on_round(self, seed: int, step: int, values: Values) -> None:
        self.live.step = step
        for name, value in _defined(values).items():
            self.live.log_metric(f"seed{seed}/{name}", value)
        self.live.make_summary()

    on_experience = on_round


class WandbLogger:
    """Curves for Weights & Biases; `WANDB_MODE=offline` keeps them in `./wandb` until `wandb sync`.

    Rounds and experiences have an axis each: those of several seeds arrive in turn.
    """

    def __init__(self, name: str) -> None:
        self.run = _load("wandb", "wandb").init(project="stamp", name=name)
        self.seeds = set[int]()

    def on_round(self, seed: int, round: int, values: Values) -> None:
        self._add(seed, "round", round, values)

    def on_experience(self, seed: int, experience: int, values: Values) -> None:
        self._add(seed, "experience", experience, values)

    def _add(self, seed: int, axis: str, step: int, values: Values) -> None:
        if seed not in self.seeds:
            self.seeds.add(seed)
            for each in ("round", "experience"):
                self.run.define_metric(f"seed{seed}/{each}/*", step_metric=f"seed{seed}/{each}")
        named = {f"seed{seed}/{axis}/{name}": value for name, value in _defined(values).items()}
        self.run.log({f"seed{seed}/{axis}": step, **named})


def _defined(values: Values) -> dict[str, float]:
    """The values that are defined: a curve has no point where a loss or an accuracy is NaN."""
    return {name: value for name, value in values.items() if not math.isnan(value)}


def _load(module: str, package: str) -> Any:
    """A module of an optional package; its absence names the extra that has it."""
    try:
        return import_module(module)
    except ImportError as error:
        extra = "pip install --editable 'workbench[live]'"
        raise ParameterError(f"{package} is missing; the extra `live` has it: {extra}") from error
