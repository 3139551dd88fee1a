"""Experiments that take a fraction of a second, and ways to look at what they leave behind."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stamp_core import checkpoint, data, engine, methods, models, split
from stamp_core.config import Setting, build
from stamp_core.data import ImageSet
from stamp_core.executor import Worker
from stamp_core.experiments import Experiment
from stamp_core.fingerprint import combined
from stamp_core.methods import Turn
from stamp_core.models import Classifier
from stamp_core.records import Record
from stamp_core.split import Plan
from stamp_core.workspace import Visit

Some = Mapping[str, Any]

DATA = {"source": "digits"}
NOTHING: Some = MappingProxyType({})
SPLIT = {"kind": "classes", "clients": 4, "tasks": 3, "classes_per_task": 2}
NETWORK = {"kind": "mlp", "features": 32}
TRAINING = {"rounds": 2, "epochs": 1, "batch": 16, "rate": 0.1}

P = 64 * 32 + 32 + 32 * 10 + 10  # parameters of NETWORK on the digits
ROUNDS = 6  # of SPLIT and TRAINING
ALWAYS = 0.999999  # a probability that nobody has ever escaped

PARTS: dict[str, Some] = {
    "feddbe": {"kappa": 5.0, "refresh": "task"},
    "stamp": {
        "memory": {"per_class": 5},
        "ratio": 0.5,
        "spatial": {},
        "temporal": {"normalise": "current"},
        "prototype": 0.01,
    },
}

# A convolution with batch normalisation: 8 x 8 pictures become 4 channels of 4 x 4, then 2 x 2.
BATCH_NORM = {"kind": "cnn", "channels": [4], "features": 8, "norm": "batch"}
BN_P = (25 * 4 + 4) + (4 + 4) + (16 * 8 + 8) + (8 * 10 + 10)
BN_B = 4 + 4  # running means and variances


class Quick(Experiment):
    """An experiment that reads its pictures, and the code they depend on, once in a process."""

    def images(self) -> ImageSet:
        """The pictures of the setting."""
        return images(json.dumps(self.setting.data))

    def code(self) -> str:
        """The fingerprint of the code."""
        return code(*self.files())


@cache
def images(spec: str) -> ImageSet:
    """The pictures that the JSON `spec` asks for."""
    return data.load(json.loads(spec))


@cache
def code(*files: Path) -> str:
    """The fingerprint of the code in some files and all they import."""
    return combined(*files)


def tiny(
    kind: str = "fedavg",
    split: Some = NOTHING,
    training: Some = NOTHING,
    network: Some = NETWORK,
    source: Some = DATA,
    observe: Some = NOTHING,
    **params: Any,
) -> Experiment:
    """The setting `tiny` of params.yaml with some changes, and a method with some parameters."""
    blocks = {
        "name": "tiny",
        "data": dict(source),
        "split": {**SPLIT, **split},
        "network": network,
        "training": {**TRAINING, **training},
        "observe": observe,
    }
    method = methods.get(kind)
    setting = build(Setting, blocks, "small")
    return Quick(setting, kind, method, build(method.Params, params, f"small: {kind}"))


def whole(kind: str, **options: Any) -> Experiment:
    """The same where a method whose parts are all off at its defaults has them all on."""
    return tiny(kind, **{**PARTS.get(kind, NOTHING), **options})


def plan(cell: Experiment, seed: int = 0) -> Plan:
    """The plan of one seed."""
    return split.make(cell.setting.split, cell.images(), seed)


def first(whole: Plan, clients: int) -> Plan:
    """The plan of the first clients alone."""
    split_ = replace(whole.split, clients=clients)
    return replace(whole, split=split_, clients=whole.clients[:clients])


def plans(cell: Experiment, *seeds: int) -> dict[int, Plan]:
    """The plans of some seeds."""
    return {seed: plan(cell, seed) for seed in seeds}


def with_train(plan: Plan, cells: Mapping[tuple[int, int], tuple[int, ...]]) -> Plan:
    """The plan with other training pictures for some clients and tasks."""
    clients = [
        tuple(replace(task, train=cells.get((u, t), task.train)) for t, task in enumerate(sequence))
        for u, sequence in enumerate(plan.clients)
    ]
    return replace(plan, clients=tuple(clients))


def everywhere(plan: Plan) -> list[tuple[int, int]]:
    """Every client with every task."""
    return [(u, t) for u in range(len(plan.clients)) for t in range(plan.tasks)]


def awkward(cell: Experiment, seed: int = 0) -> Plan:
    """A plan in which client 0 has one picture of each task, 1 has one class, 2 has nothing."""
    whole, images = plan(cell, seed), cell.images()
    few = {}
    for u, t in everywhere(whole)[: 3 * whole.tasks]:
        own = whole.train_indices(images, u, t)
        first = own[images.y_train[own] == whole.clients[u][t].classes[0]]
        few[u, t] = tuple((own[:1], first, own[:0])[u].tolist())
    return with_train(whole, few)


def run(cell: Experiment, plan_: Plan | None = None, **options: Any) -> Record:
    """One seed trained in this process."""
    plan_ = plan_ or plan(cell)
    return engine.train(cell, {plan_.seed: plan_}, device="cpu", **options)[plan_.seed]


def worker(cell: Experiment, *plans: Plan) -> Worker:
    """A worker in this process."""
    torch.set_num_threads(1)  # as in a training
    return Worker(cell, {plan.seed: plan for plan in plans}, "cpu")


def arrived(here: Worker, plan: Plan, step: int, client: int = 0) -> Turn:
    """A client's turn in the only round of a step, after such a turn in every step before.

    In all of them it was sent the untrained model.
    """
    server, states, *_ = here.begin(plan.seed)
    state, sent = states[client], here.method.broadcast(server, client)
    for earlier in range(step):
        visit = Visit(plan.seed, client, earlier, 0, last=True)
        state = here.attend(visit, state, sent).reply.state
    return Turn(Visit(plan.seed, client, step, 0, last=True), plan, state, sent)


def network(cell: Experiment, parameters: Tensor) -> Classifier:
    """The network of an experiment on digits, with a vector of parameters."""
    net = models.build(cell.setting.network, (1, 8, 8), 10, seed=0)
    nn.utils.vector_to_parameters(parameters.clone(), net.parameters())
    return net


def normalised(cell: Experiment, pictures: Tensor) -> Tensor:
    """uint8 pictures with mean 0 and deviation 1."""
    images = cell.images()
    return (pictures.float() / 255 - images.mean) / images.std


def slope(net: nn.Module, loss: Tensor) -> Tensor:
    """The gradient of a loss as one vector."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


def saved(cell: Experiment, folder: Path, seed: int = 0) -> dict[str, Any]:
    """The state in the checkpoint of a run."""
    return checkpoint.read(folder / f"{cell.setting.name}-{cell.method}-{seed}.safetensors")[0]


def counted(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The history without what differs between two runs of the same numbers: time and memory."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "memory")} for row in history]


def assert_same_weights(one: Record, other: Record) -> None:
    """Refuse two records whose final models differ in one bit."""
    assert one.weights.keys() == other.weights.keys()
    for name, value in one.weights.items():
        assert value.tobytes() == other.weights[name].tobytes(), name


def assert_same(one: Record, other: Record) -> None:
    """Refuse two records that differ in one bit of weights, accuracies or history."""
    assert_same_weights(one, other)
    assert one.scores.keys() == other.scores.keys()
    for model, values in one.scores.items():
        np.testing.assert_array_equal(values, other.scores[model], model)
    assert counted(one.history) == counted(other.history)


def tensors(tree: object, where: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a tree with its path."""
    if isinstance(tree, Tensor):
        yield where, tree
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from tensors(item, f"{where}.{key}")
    elif isinstance(tree, list):
        for place, item in enumerate(tree):
            yield from tensors(item, f"{where}.{place}")


def copied(tree: Any) -> Any:
    """A copy of a tree that shares nothing with it."""
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, Mapping):
        return {key: copied(item) for key, item in tree.items()}
    return [copied(item) for item in tree] if isinstance(tree, list) else tree


def assert_equal_trees(one: Any, other: Any, where: str = "tree") -> None:
    """Refuse two trees that differ in shape, type or one bit."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape, where
        assert one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes(), where
    elif isinstance(one, Mapping):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal_trees(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal_trees(a, b, f"{where}.{place}")
    else:
        assert one == other or (one != one and other != other), where  # nan is itself here


def kept(per_class: int, **changes: Any) -> dict[str, Any]:
    """The memory of the control `replay`: so many pictures of a class, chosen at random."""
    return {"rule": "uniform", "space": "off", "per_class": per_class, **changes}


def long() -> Experiment:
    """90 short rounds, enough to be stopped somewhere in the middle."""
    split = {"images_per_class": 8}
    return tiny("replay", split=split, training={"rounds": 30, "dropout": 0.3}, memory=kept(3))
