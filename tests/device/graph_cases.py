"""Runs with graphs on the pretend device and on the CPU: the child of test_captured.

It prints, for every case, what was wrong ("" where both are bit-identical) and how many steps were
replayed.
"""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import small
import torch
from child import kinds
from device_cases import AUGMENTED, OPTIONS, Few, compared, few, outcome
from torch import Tensor

from benchmarks.pretend import DEVICE, PretendGraphs, pretending, register
from stamp_core.client.batches import Batch, StepContext
from stamp_core.engine import train as engine
from stamp_core.engine.experiment import Experiment
from stamp_core.methods.base.method import ClientRound, Method
from stamp_core.methods.base.registry import get_method
from stamp_core.methods.fedavg import FedAvg

# Batches of 8 and 4 images, three clients, two tasks: each shape occurs more often than it is
# warmed up.
SPLIT = {"clients": 3, "tasks": 2, "images_per_class": 6}
TRAINING = {"rounds": 3, "momentum": 0.9}
WEIGHTED = {"weight": 1.0, "ratio": 0.5}
SOFT = small.kept(3, selection="sre2l", options=OPTIONS["sre2l"])


def longer(kind: str, training: small.Some = small.NOTHING, **options: Any) -> Experiment:
    return few(kind, {**TRAINING, **training}, **{"split": SPLIT, **options})


def cases() -> Iterator[tuple[str, Experiment]]:
    """Every method that captures its steps on two networks, and other paths of some methods."""
    for kind in kinds():
        if get_method(kind).graph_safe:
            yield f"{kind}, mlp", longer(kind, {**AUGMENTED, "weight_decay": 1e-3})
            yield f"{kind}, batch norm", longer(kind, network=small.BATCH_NORM)
    for name, options in {
        "exemplars apart": {"memory": small.kept(3), **WEIGHTED},
        "soft labels": {"memory": SOFT, **WEIGHTED},
    }.items():
        yield f"replay, {name}", longer("replay", **options)
        yield f"stamp, {name}", longer("stamp", prototype=0.0, **options)
    yield "stamp, no prototypes", longer("stamp", prototype=0.0)
    yield "stamp, alternating", longer("stamp", alternate=True)
    for buffers in ("local", "frozen"):
        yield f"{buffers} buffers", longer("fedavg", {"buffers": buffers}, network=small.BATCH_NORM)
    yield "falling rate", longer("fedavg", {"schedule": "cosine", "lr_end": 0.01})
    yield "displacements", longer("fedavg", diagnostics={"angles": True, "displacements": True})


def compare(experiment: Experiment) -> tuple[str, int, str]:
    """What differs from the CPU; the number of replayed steps; what the record says of them."""
    plans = small.plans(experiment, 0)
    expected = engine.train(experiment, plans, device="cpu")[0]
    before = PretendGraphs.replayed
    with pretending(graphs=True):
        found = engine.train(experiment, plans, device=DEVICE)[0]
    replayed = PretendGraphs.replayed - before
    return compared(expected, found), replayed, found.environment["steps"]


# --- mistakes: methods that say without reason that their steps can be captured


@dataclass
class Context(StepContext):
    parts: list[Tensor]


class Unsafe(FedAvg):
    """FedAvg whose steps claim to depend on the batch, the live model and the context alone."""

    graph_safe = True

    def start(self, client_round: ClientRound) -> Context:
        self.receive(client_round)
        self.received = self.model.parameters.clone()  # other memory for every client
        return Context([self.received])

    def pull(self, received: Tensor) -> None:
        self.model.gradients.add_(self.model.parameters - received)


class Baked(Unsafe):
    graph_safe = True

    def correct_gradient(self, batch: Batch, context: Context) -> None:
        self.pull(self.received)


class Untyped(Unsafe):
    graph_safe = True

    def correct_gradient(self, batch: Batch, context: Context) -> None:
        self.pull(context.parts[0])


class Reading(Unsafe):
    graph_safe = True

    def loss(self, batch: Batch, context: Context) -> Tensor:
        loss = super().loss(batch, context)
        return loss if loss > 0 else 2 * loss


class Uploading(Unsafe):
    graph_safe = True
    weights = torch.ones(10)

    def loss(self, batch: Batch, context: Context) -> Tensor:
        loss = super().loss(batch, context)
        return loss * self.weights.to(loss.device)[batch.targets].mean()


class OnHost(Unsafe):
    graph_safe = True

    def loss(self, batch: Batch, context: Context) -> Tensor:
        return super().loss(batch, context) * float(torch.ones(1) * 2)


MISTAKES: list[type[Method]] = [Baked, Untyped, Reading, Uploading, OnHost]


class Unfiled(Few):
    def code(self) -> str:
        return ""


def mistaken(kind: type[Method]) -> tuple[str, list[str]]:
    whole = longer("fedavg")
    experiment = Unfiled(whole.setting, whole.method, kind, whole.params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        problem = outcome(lambda: compare(experiment)[0])
    return problem, [str(each.message) for each in caught]


def main() -> None:
    register()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no step that should be captured is refused
        runs = {name: compare(each) for name, each in cases()}
    mistakes = {kind.__name__: mistaken(kind) for kind in MISTAKES}
    print(json.dumps({"runs": runs, "mistakes": mistakes}))


if __name__ == "__main__":
    main()
