"""Experiments: a setting with a method, resolved and checked, and what identifies its runs."""

import hashlib
import inspect
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from stamp_core.config.decode import invalid, to_plain
from stamp_core.config.params import (
    FILES,
    Params,
    at_setting,
    parse_seeds,
    read_params,
    read_setting,
)
from stamp_core.config.schema import Setting
from stamp_core.core.arithmetic import arithmetic
from stamp_core.core.devices import weights_format
from stamp_core.core.fingerprint import combined_fingerprint
from stamp_core.core.paths import PACKAGE
from stamp_core.coresets.selection.base import load_rule
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.loading import find_source, load_dataset
from stamp_core.data.plan import Plan, Plans
from stamp_core.data.split import make_plan
from stamp_core.methods.base.method import Method
from stamp_core.methods.base.registry import override, resolve_preset
from stamp_core.models.pretrained import weights_digest
from stamp_core.results.records import run_name


@dataclass(frozen=True)
class Experiment:
    """A setting and a method with all their parameters."""

    setting: Setting
    method: str  # the name of a preset in params/methods.yaml, or of a method
    kind: type[Method]
    params: Any
    sweep: tuple[str, str] | None = None  # name of the sweep and value of the swept parameter

    @property
    def name(self) -> str:
        """Setting, method and, in a sweep, its name and value: part of file names."""
        return run_name(self.setting.name, self.method, self.sweep)

    def with_plans(self, plans: Plans) -> Self:
        """The experiment with the split of its plans, which may come from elsewhere."""
        first, *others = dict.fromkeys(plan.split for plan in plans.values())
        if others:
            raise invalid("the split of a plan", others[0], f"that of the others, {first}")
        return replace(self, setting=replace(self.setting, split=first))

    def dataset(self) -> ImageDataset:
        return load_dataset(self.setting.data)

    def plans(self, seeds: str) -> dict[int, Plan]:
        """The plan of each seed of a range such as "0to2": who learns what when."""
        dataset = self.dataset()
        return {seed: make_plan(self.setting.split, dataset, seed) for seed in parse_seeds(seeds)}

    def resolved(self) -> dict[str, Any]:
        spec = self.setting.data
        source = {"source": spec["source"], **to_plain(find_source(spec)[1])}
        params = {"kind": self.kind.__module__.rpartition(".")[2], **to_plain(self.params)}
        setting = {**to_plain(self.setting), "data": source}
        if self.setting.privacy is None:  # then identities are those of before there was privacy
            del setting["privacy"]
        return {"setting": setting, "method": {"name": self.method, **params}}

    def identity(self, plan: Plan, device: str) -> dict[str, str]:
        """What determines a run's results: parameters, data, plan, code, arithmetic, files."""
        text = json.dumps(self.resolved(), sort_keys=True)
        weights = weights_digest(self.setting.network)
        return {
            "parameters": hashlib.sha256(text.encode()).hexdigest(),
            "data": plan.data_digest,
            "plan": plan.hash,
            "code": self.code(),
            "torch": torch.__version__,
            "arithmetic": arithmetic(),
            "device": f"{torch.device(device).type} {platform.machine()}",
            "layout": str(weights_format(torch.device(device))),  # of flat vectors
            **({} if weights is None else {"pretrained": weights}),
            **getattr(self.params, "file_digests", dict)(),  # of files that the method reads
        }

    def code(self) -> str:
        return combined_fingerprint(*self.files())

    def files(self) -> list[Path]:
        """The files that, with all their imports, determine the results of this experiment."""
        found = [PACKAGE / "engine" / "train.py", Path(inspect.getfile(self.kind))]
        if hasattr(self.params, "memory"):  # its rule is loaded by name, not by an import
            found.append(Path(inspect.getfile(load_rule(self.params.memory.selection))))
        return found

    def __repr__(self) -> str:
        resolved = self.resolved()
        sections = {**resolved.pop("setting"), **resolved}
        return "\n".join(f"{name:12} {_section_text(each)}" for name, each in sections.items())


def load_experiment(
    setting: str,
    method: str,
    params: Params | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Experiment:
    """The experiment of a setting and a preset, refused in one line if anything is wrong.

    `params` are those of a profile or of `read_params`, for which None stands. `overrides` are
    other values by key: `spatial.kappa` of the preset, `training.lr` of the setting. They
    are part of the name: records of changed experiments never take the place of a preset's.
    """
    params = read_params() if params is None else params
    if not {"settings", "methods"} <= params.keys():
        right = "what read_params() returns; other values go into overrides={...}"
        raise invalid("params", dict(params), right)
    params = at_setting(params, setting)
    if overrides:
        params = override(params, method, overrides, setting)
    checked = read_setting(setting, params)
    find_source(checked.data, f"{FILES['settings']}: {setting}.data")
    kind, values = resolve_preset(method, params)
    training = kind.adapt(checked.training, values)
    sweep = None
    if overrides:
        text = ",".join(f"{key}={value}" for key, value in overrides.items())
        sweep = "overrides", re.sub("[^A-Za-z0-9_.,=+-]", "_", text)  # a part of file names
    return Experiment(replace(checked, training=training), method, kind, values, sweep)


def _section_text(section: object) -> str:
    """One section on one line."""
    if isinstance(section, dict):
        return "  ".join(f"{key} {value}" for key, value in section.items() if value is not None)
    return str(section)
