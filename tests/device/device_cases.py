"""Runs on the pretend device and on the CPU, in a process of its own: the child of test_device.

It prints, for every case, what was wrong: "" where both are bit-identical. With names of methods it
tries those alone, without names what is no method's own.
"""

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import small
import torch
import torch.nn.functional as F
from child import DRAWING
from pytest import MonkeyPatch
from torch import Tensor

from benchmarks.pretend import DEVICE, pretending, register
from benchmarks.transfers import Counted, cost, per_epoch, per_step
from stamp_core.client import runtime as runtimes
from stamp_core.client import scoring
from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.by_class import first_per_class
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.schema import Privacy
from stamp_core.core import devices
from stamp_core.coresets.selection.base import selection_rules
from stamp_core.data.dataset import ImageDataset
from stamp_core.engine import train as engine
from stamp_core.engine.experiment import Experiment
from stamp_core.methods.base.method import ClientRound, Message, Method
from stamp_core.results.records import Record

BY_POSITION: dict[str, small.Some] = {  # the parameters with which methods do so
    "agem": {},
    "fedala": {"tensors": 10, "lr_product": 5.0},
    "fedl2p": {},
    "fedweit": {},
    "gradma": {"scope": "tensor"},
    "replay": {"memory": small.kept(3, selection="ocs"), "weight": 1.0},
    "stamp": {"spatial": {"blocks": "layers"}, "temporal": {"blocks": "layers"}},
}
SAMPLES = {"features": 2, "memory": 2}
SPLIT = {"clients": 2, "tasks": 2, "images_per_class": 6}
TRAINING = {"rounds": 1, "batch_size": 8}
AUGMENTED = {"shift": 1, "flip": True}
EXTRAS = {  # other paths of the same methods
    "epochs": {"training": {"epochs": 2, **AUGMENTED}},
    "diagnostics": {"diagnostics": {"angles": True, "displacements": True, **SAMPLES}},
    "momentum": {"training": {"rounds": 2, "momentum": 0.9, "weight_decay": 1e-3}},
    "local buffers": {"network": small.BATCH_NORM, "training": {"buffers": "local"}},
}
OPTIONS = {
    "bcsr": {"outer_steps": 1},
    "csrel": {"reference_epochs": 1, "selection_steps": 1},
    "sre2l": {"iterations": 2, "squeeze_epochs": 1},
}


class Few(small.Quick):
    def dataset(self) -> ImageDataset:
        whole = super().dataset()
        parts = {"train": whole.y_train, "test": whole.y_test}
        first = {part: first_per_class(labels, 8) for part, labels in parts.items()}
        names = [f"{name}_{part}" for name in ("x", "y", "domain") for part in parts]
        kept = {name: getattr(whole, name)[first[name.split("_")[1]]] for name in names}
        return replace(whole, **kept)


class Coloured(Few):
    def dataset(self) -> ImageDataset:
        return small.coloured(super().dataset())


def coloured(kind: str, **options: Any) -> Experiment:
    made = few(kind, **{"network": small.CONVOLUTIONS, **options})
    return Coloured(made.setting, made.method, made.kind, made.params)


def few(kind: str, training: small.Some = small.NOTHING, **options: Any) -> Experiment:
    settings = {"split": SPLIT, "training": {**TRAINING, **training}, "diagnostics": SAMPLES}
    made = small.whole(kind, **{**settings, **options})
    return Few(made.setting, made.method, made.kind, made.params)


def cases() -> Iterator[tuple[str, Experiment]]:
    """Every selection rule, and other paths of some methods."""
    for rule in selection_rules():
        memory = small.kept(3, selection=rule, options=OPTIONS.get(rule, {}))
        yield f"{rule}", few("replay", memory=memory, weight=1.0)
    for name, options in EXTRAS.items():
        for kind in ("fedavg", "stamp"):
            yield f"{kind}, {name}", few(kind, **options)


def difference(experiment: Experiment, counted: list[Counted] | None = None) -> str:
    """How a run on the device differs from one on the CPU; "" if not by one bit.

    What the run on the device has cost is added to `counted`.
    """
    plans = small.plans(experiment, 0)
    expected = engine.train(experiment, plans, device="cpu")[0]
    with pretending() as counts:
        found = engine.train(experiment, plans, device=DEVICE)[0]
    if counted is not None:
        counted.append(cost(counts, found))
    return compared(expected, found)


def compared(expected: Record, found: Record) -> str:
    try:
        small.assert_same(expected, found)
    except AssertionError as error:
        return str(error) or "other numbers"
    return ""


def different_without_room(experiment: Experiment) -> str:
    """How a run differs on a device that has no memory for images, exemplars and all models."""
    with MonkeyPatch.context() as patch:
        patch.setattr(devices, "free_memory", lambda device: 0)
        return difference(experiment)


# --- channels last


def layouts() -> Iterator[tuple[str, Experiment]]:
    """Methods that read the weights of convolutions by position, and noise."""
    for kind, options in BY_POSITION.items():
        training = {"rounds": 2, "epochs": 2, "batch_size": 4}  # all parts of the method are used
        longer = {"training": training, "split": {**SPLIT, "tasks": 3}}
        yield f"{kind}, by position", coloured(kind, **longer, **options)
    places: tuple[Literal["local", "central"], ...] = ("local", "central")
    for place in places:
        made = coloured("fedavg", network={**small.CONVOLUTIONS, "norm": "none"})
        setting = replace(made.setting, privacy=Privacy(0.5, 0.1, place))
        yield f"fedavg, {place} noise", replace(made, setting=setting)


def numbers(record: Record) -> Iterator[Any]:
    yield from record.weights.values()
    for row in record.history:
        loss = [] if row["loss"] is None else [row["loss"]]  # of a round without steps
        yield np.array([*loss, *row["notes"].values()])


def moved(experiment: Experiment) -> float:
    """By how much channels last changes a run's numbers, relative to the largest of each kind."""
    plans = small.plans(experiment, 0)
    first = engine.train(experiment, plans, device="cpu")[0]
    with small.channels_last():
        last = engine.train(experiment, plans, device="cpu")[0]
    pairs = [pair for pair in zip(numbers(first), numbers(last), strict=True) if pair[0].any()]
    return max(float(np.nanmax(abs(one - other)) / np.nanmax(abs(one))) for one, other in pairs)


def different_with_channels_last(experiment: Experiment) -> str:
    """How a run on the device differs from one on the CPU where both have channels last."""
    with small.channels_last():
        return difference(experiment)


def outcome(work: Callable[[], str]) -> str:
    """What `work` returns, or the error that ended it."""
    try:
        return work()
    except (RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


# --- mistakes


def labels_on_cpu(self: Method, batch: Batch, context: StepContext) -> Tensor:
    return F.cross_entropy(self.model.module(batch.images), batch.targets.cpu())


def upload_on_device(self: Method, client_round: ClientRound, context: StepContext) -> Message:
    return {name: getattr(self.model, name).clone() for name in self.shared_vectors()}


def draw_on_device(self: Method, batch: Batch, context: StepContext) -> None:
    noise = torch.Generator().manual_seed(0)
    self.model.gradients.add_(torch.randn(1, generator=noise, device=self.runtime.device))


def array_of_the_device(self: Method, batch: Batch, context: StepContext) -> None:
    self.model.gradients.numpy()


def pickle_of_the_device(self: Method, batch: Batch, context: StepContext) -> None:
    pickle.dumps(self.model.gradients)


def labels_of_tests_on_cpu(
    runtime: ClientRuntime, *args: Any, **options: Any
) -> scoring.Predictions:
    runtime.y_test = runtime.dataset.y_test
    return PREDICT(runtime, *args, **options)


PREDICT = scoring.predict
MISTAKES: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "labels on the CPU": (Method, "loss", labels_on_cpu),
    "an upload on the device": (Method, "upload", upload_on_device),
    "a generator of the CPU": (Method, "correct_gradient", draw_on_device),
    "an array of the device": (Method, "correct_gradient", array_of_the_device),
    "a pickle of the device": (Method, "correct_gradient", pickle_of_the_device),
    "labels of test images on the CPU": (scoring, "predict", labels_of_tests_on_cpu),
}


def mistaken(owner: Any, name: str, mistake: Callable[..., Any]) -> str:
    with MonkeyPatch.context() as patch:
        patch.setattr(owner, name, mistake)
        return outcome(partial(difference, few("fedavg")))


# --- counts


def miscounted() -> dict[str, tuple[int, int, int]]:
    """Operations of which other copies to the device, copies back or values read are counted."""
    host = torch.arange(4)
    with pretending():
        device = host.to(DEVICE)
    operations = {
        "to the device": (lambda: host.to(DEVICE), (1, 0, 0)),
        "back": (lambda: device.cpu(), (0, 1, 0)),
        "by index of the CPU": (lambda: device[host], (1, 0, 0)),
        "a value": (lambda: float(device.sum()), (0, 0, 1)),
        "a mask's places": (lambda: device[device > 1], (0, 0, 1)),
        "on the device alone": (lambda: device[device].add_(device).clone(), (0, 0, 0)),
        "with a scalar of the CPU": (lambda: device * torch.tensor(2), (0, 0, 0)),
    }
    found = {}
    for name, (operation, expected) in operations.items():
        with pretending() as counts:
            operation()
        if astuple(counts) != expected:
            found[name] = astuple(counts)
    return found


def crossed(chunk: int) -> tuple[int, int, int]:
    """What crosses in a run of FedAvg that evaluates so many images at a time."""
    experiment = few("fedavg")
    with MonkeyPatch.context() as patch, pretending() as counts:
        patch.setattr(runtimes, "evaluation_batch_size", lambda *_: chunk)
        engine.train(experiment, small.plans(experiment, 0), device=DEVICE)
    return counts.up, counts.down, counts.reads


def of_method(kind: str) -> dict[str, Any]:
    """What is wrong with a method on the device, and what its steps cost there."""
    costs = list[Counted]()
    drawing, channels_last = few(kind, AUGMENTED), coloured(kind)
    normalised = few(kind, network=small.BATCH_NORM)
    problems = {
        "mlp": outcome(partial(difference, drawing, costs)),
        "batch norm": outcome(partial(difference, normalised)),
        "no room": outcome(partial(different_without_room, normalised)),
        "channels last": outcome(partial(different_with_channels_last, channels_last)),
    }
    return {
        "problems": problems,
        "moved": moved(channels_last),
        "step": astuple(per_step(drawing, costs[0])) if costs else None,
        "epoch": astuple(per_epoch(drawing, costs[0])) if costs and kind in DRAWING else None,
    }


def of_all() -> dict[str, Any]:
    """What belongs to no method or to several."""
    return {
        "runs": {name: outcome(partial(difference, each)) for name, each in cases()},
        "layouts": {
            name: outcome(partial(different_with_channels_last, each)) for name, each in layouts()
        },
        "moved": {name: moved(each) for name, each in layouts()},
        "miscounted": miscounted(),
        "chunks": [crossed(512), crossed(4)],
        "mistakes": {name: mistaken(*each) for name, each in MISTAKES.items()},
    }


def main(kinds: list[str]) -> None:
    register()
    print(json.dumps({kind: of_method(kind) for kind in kinds} if kinds else of_all()))


if __name__ == "__main__":
    main(sys.argv[1:])
