"""One cell of the grid, a setting with a method, resolved and checked; and what identifies it."""

import hashlib
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stamp_core import config, data, methods, split
from stamp_core.config import Setting, plain, wrong
from stamp_core.data import ImageSet
from stamp_core.fingerprint import combined
from stamp_core.models import digest
from stamp_core.split import Plan
from stamp_core.workspace import Workspace

PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Experiment:
    """A setting and a method with every number it uses."""

    setting: Setting
    method: str  # a row of params.yaml: methods
    kind: type[methods.Method]
    params: Any

    def images(self) -> ImageSet:
        """The pictures of the setting."""
        return data.load(self.setting.data)

    def resolved(self) -> dict[str, Any]:
        """Every number of the experiment as plain values."""
        options = plain(data.options(self.setting.data))
        source = {"source": self.setting.data["source"], **options}
        params = {"kind": self.kind.__module__.rpartition(".")[2], **plain(self.params)}
        setting = {**plain(self.setting), "data": source}
        return {"setting": setting, "method": {"name": self.method, **params}}

    def identity(self, plan: Plan, device: str) -> dict[str, str]:
        """What decides the numbers of a run: parameters, plan, code, torch, device, weights."""
        text = json.dumps(self.resolved(), sort_keys=True)
        weights = digest(self.setting.network)
        return {
            "parameters": hashlib.sha256(text.encode()).hexdigest(),
            "plan": plan.hash,
            "code": self.code(),
            "torch": torch.__version__,
            "device": f"{torch.device(device).type} {platform.machine()}",
            **({} if weights is None else {"pretrained": weights}),
        }

    def code(self) -> str:
        """The fingerprint of all code that can change a number of this experiment."""
        return combined(*self.files())

    def files(self) -> list[Path]:
        """The files that with all they import make the numbers of this experiment."""
        kind = self.kind.__module__.rpartition(".")[2]
        found = [PACKAGE / "engine.py", PACKAGE / "methods" / f"{kind}.py"]
        if hasattr(self.params, "memory"):  # its rule is found by name: no import tells of it
            found.append(PACKAGE / "coresets" / f"{self.params.memory.rule}.py")
        return found

    def __repr__(self) -> str:
        """The experiment with every number, one section a line."""
        resolved = self.resolved()
        rows = {**resolved.pop("setting"), **resolved}
        return "\n".join(f"{name:9} {_row(row)}" for name, row in rows.items())


def experiment(setting: str, method: str, params: dict[str, Any] | None = None) -> Experiment:
    """The experiment of two names in params.yaml, refused in one line if anything is wrong."""
    params = config.read() if params is None else params
    checked = config.setting(setting, params)
    data.options(checked.data, f"params.yaml: settings.{setting}.data")
    return Experiment(checked, method, *methods.preset(method, params))


def check(params: dict[str, Any] | None = None) -> int:
    """Check all of params.yaml, and that the grids' plans and networks fit their pictures.

    Gives back the number of cells.
    """
    params = config.read() if params is None else params
    for setting in params["settings"]:
        experiment(setting, next(iter(params["methods"])), params)
    for method in params["methods"]:
        methods.preset(method, params)
    cells = [(s, m, config.seeds(r)) for g in config.GRIDS for s, m, r in config.cells(g, params)]
    for setting, method, _ in [*cells, *config.cells(config.PAPER, params)]:
        experiment(setting, method, params)
    trained_once(params["grid"], params["ablation"])
    for setting, seeds in {setting: seeds for setting, _, seeds in cells}.items():
        fits(setting, seeds[0], params)
    return len(cells)


def trained_once(grid: dict[str, Any], ablation: dict[str, Any]) -> None:
    """Refuse an ablation that trains what the grid trains, or that has no plans to train on."""
    if twice := set(grid["method"]) & set(ablation["method"]):
        raise wrong("params.yaml: ablation.method", sorted(twice), "beside: grid trains it already")
    for axis in ("setting", "seeds"):
        drawn = set(map(str, grid[axis]))
        if alone := sorted(set(map(str, ablation[axis])) - drawn):
            raise wrong(f"params.yaml: ablation.{axis}", alone, f"in grid.{axis}: it draws plans")


def fits(name: str, seed: int, params: dict[str, Any]) -> None:
    """Refuse a setting whose plan or network cannot be made for its pictures."""
    setting = config.setting(name, params)
    images = data.load(setting.data)
    try:
        split.make(setting.split, images, seed)
        Workspace(setting, images)
    except config.ParameterError as error:
        raise config.ParameterError(f"params.yaml: settings.{name}: {error}") from None


def _row(row: object) -> str:
    """One section on one line."""
    if isinstance(row, dict):
        return "  ".join(f"{key} {value}" for key, value in row.items() if value is not None)
    return str(row)
