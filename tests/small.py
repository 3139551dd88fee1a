"""Experiments that take a fraction of a second, and comparisons of their records."""

import errno
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stamp_core.client import runtime
from stamp_core.client.runtime import RoundId
from stamp_core.config.decode import build
from stamp_core.config.schema import Setting
from stamp_core.core.fingerprint import combined_fingerprint
from stamp_core.data import loading as data
from stamp_core.data import split
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.plan import Plan
from stamp_core.engine import experiment as experiments
from stamp_core.engine import train as engine
from stamp_core.engine.checkpoint import Checkpoint, checkpoint_folder
from stamp_core.engine.executor import SerialExecutor
from stamp_core.engine.experiment import Experiment
from stamp_core.engine.trees import flatten, read_tree
from stamp_core.engine.worker import Worker
from stamp_core.methods.base import registry
from stamp_core.methods.base.method import ClientRound, Method
from stamp_core.models import networks as models
from stamp_core.models.networks import Classifier
from stamp_core.results.records import Record
from workbench.methods.base.statistics_server import StatisticsServer

Some = Mapping[str, Any]

DATA = {"source": "digits"}
NOTHING: Some = MappingProxyType({})
SPLIT = {"kind": "classes", "clients": 4, "tasks": 3, "classes_per_task": 2}
NETWORK = {"kind": "mlp", "features": 32}
IDENTITY = {"kind": "identity"}  # in its place for methods that train no encoder
TRAINING = {"rounds": 2, "epochs": 1, "batch_size": 16, "lr": 0.1}

P = 64 * 32 + 32 + 32 * 10 + 10  # parameters of NETWORK on the digits
ROUNDS = 6  # of SPLIT and TRAINING

# A generator and its synthesis that take milliseconds.
SYNTHESIS: Some = MappingProxyType(
    {
        "images": 40,
        "synthesis_batch_size": 16,
        "latent": 8,
        "generator_width": 4,
        "generator_steps": 2,
        "warmup": 1,
        "student_steps": 2,
        "student_lr": 0.01,
    }
)

PARTS: dict[str, Some] = {
    "affcl": {"flow_hidden": 8},
    "class_gaussians": {"samples": 20, "epochs": 1},
    "fbl": {"memory": {"exemplars_per_class": 3}},
    "fedcil": {"width": 8, "noise": 4, "consolidation": 2, "every": 2},
    "feddbe": {"feddbe_kappa": 5.0, "refresh": "task"},
    "fedl2p": {"ft_epochs": 2},
    "glfc": {"exemplars": 12, "perturb_steps": 2, "recon_steps": 3},
    "lander": {**SYNTHESIS, "anchor_features": 6},
    "refed": {"cache": 10, "steps": 2},
    "srfdil": {"cache": 10, "steps": 2, "gan_steps": 2},
    "fedweit": {"lambda1": 0.0},  # the size of a message must not depend on rounding
    "pfeddil": {"models": 2, "migration": 0.1, "threshold": 1.1},
    "stsa": {"expansion": 40, "ridge": 1.0},
    "stamp": {
        "memory": {"exemplars_per_class": 5},
        "ratio": 0.5,
        "spatial": {},
        "temporal": {"normalise": "current"},
        "prototype": 0.01,
    },
    "tagfed": {"exchange": "weights", "keep": 0.3, "mask_lr": 0.01},
    "target": {**SYNTHESIS, "kd": 1.0},
    "vrmcl": {"inner_steps": 2},
}

# A few scenes with masks, and a network for pixels.
SCENES: Some = MappingProxyType(
    {
        "source": {
            "source": "scenes",
            "classes": 3,
            "train_per_class": 12,
            "test_per_class": 4,
            "size": 16,
        },
        "network": {"kind": "fcn", "channels": [4, 4], "features": 8},
        "split": {"clients": 2, "tasks": 3, "classes_per_task": 1, "images_per_class": 8},
    }
)

# A convolution with batch normalisation: 8 x 8 images become 4 channels of 4 x 4, then 2 x 2.
BATCH_NORM = {"kind": "cnn", "channels": [4], "features": 8, "norm": "batch"}
BN_P = (25 * 4 + 4) + (4 + 4) + (16 * 8 + 8) + (8 * 10 + 10)
BN_B = 4 + 4  # running means and variances


# Two convolutions of more than one channel, for `coloured` images.
CONVOLUTIONS = {"kind": "cnn", "channels": [4, 6], "features": 8, "norm": "batch"}


class Quick(Experiment):
    """An experiment that reads its images, and the fingerprint of its code, once per process."""

    def dataset(self) -> ImageDataset:
        return dataset(json.dumps(self.setting.data))

    def code(self) -> str:
        return code(*self.files())


def coloured(images: ImageDataset) -> ImageDataset:

    def larger(x: Tensor) -> Tensor:
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)  # [N, 1, 16, 16]
        return torch.cat([x, x.flip(2), x // 2], 1)

    moments = {name: getattr(images, name).repeat(3) for name in ("mean", "std")}
    x_train, x_test = larger(images.x_train), larger(images.x_test)
    return replace(images, x_train=x_train, x_test=x_test, **moments)


@cache
def dataset(spec: str) -> ImageDataset:
    """The data set of a JSON `spec`."""
    return data.load_dataset(json.loads(spec))


@cache
def code(*files: Path) -> str:
    return combined_fingerprint(*files)


def tiny(
    kind: str = "fedavg",
    split: Some = NOTHING,
    training: Some = NOTHING,
    network: Some = NETWORK,
    source: Some = DATA,
    diagnostics: Some = NOTHING,
    **params: Any,
) -> Experiment:
    """The setting `tiny` with some changes, and a method with some parameters."""
    method = registry.get_method(kind)
    if issubclass(method, StatisticsServer) and network["kind"] in ("mlp", "cnn"):
        network = IDENTITY
    blocks = {
        "name": "tiny",
        "data": dict(source),
        "split": {**SPLIT, **split},
        "network": network,
        "training": {**TRAINING, **training},
        "diagnostics": diagnostics,
    }
    setting = build(Setting, blocks, "small")
    return Quick(setting, kind, method, build(method.Params, params, f"small: {kind}"))


def whole(kind: str, **options: Any) -> Experiment:
    """The same with all parts of a method on, where its defaults have them off, or shorter."""
    return tiny(kind, **{**PARTS.get(kind, NOTHING), **options})


def plan(experiment: Experiment, seed: int = 0) -> Plan:
    return split.make_plan(experiment.setting.split, experiment.dataset(), seed)


def first(whole: Plan, clients: int) -> Plan:
    split_ = replace(whole.split, clients=clients)
    return replace(whole, split=split_, clients=whole.clients[:clients])


def plans(experiment: Experiment, *seeds: int) -> dict[int, Plan]:
    return {seed: plan(experiment, seed) for seed in seeds}


def with_train(plan: Plan, indices: Mapping[tuple[int, int], tuple[int, ...]]) -> Plan:
    clients = [
        tuple(
            replace(task, train=indices.get((u, t), task.train)) for t, task in enumerate(sequence)
        )
        for u, sequence in enumerate(plan.clients)
    ]
    return replace(plan, clients=tuple(clients))


def everywhere(plan: Plan) -> list[tuple[int, int]]:
    return [(u, t) for u in range(len(plan.clients)) for t in range(plan.tasks)]


def awkward(experiment: Experiment, seed: int = 0) -> Plan:
    """A plan in which client 0 has one image of each task, 1 has one class, 2 has nothing."""
    whole, dataset = plan(experiment, seed), experiment.dataset()
    few = {}
    for u, t in everywhere(whole)[: 3 * whole.tasks]:
        own = whole.train_indices(dataset, u, t)
        first = own[dataset.y_train[own] == whole.clients[u][t].classes[0]]
        few[u, t] = tuple((own[:1], first, own[:0])[u].tolist())
    return with_train(whole, few)


def run(experiment: Experiment, plan_: Plan | None = None, **options: Any) -> Record:
    plan_ = plan_ or plan(experiment)
    return engine.train(experiment, {plan_.seed: plan_}, device="cpu", **options)[plan_.seed]


@contextmanager
def stopped_after(rounds: int) -> Iterator[None]:
    """A context in which a training must be interrupted, as it is after so many rounds."""
    finished, left = engine.Progress.round, [rounds]

    def stop(progress: engine.Progress) -> None:
        finished(progress)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.Progress, "round", stop)
        yield


@contextmanager
def channels_last() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (runtime, experiments):
            patch.setattr(module, "weights_format", lambda device: torch.channels_last)
        yield


def worker(experiment: Experiment, *plans: Plan) -> Worker:
    torch.set_num_threads(1)  # as in a training
    return Worker(experiment, {plan.seed: plan for plan in plans}, "cpu")


def arrived(worker: Worker, plan: Plan, experience: int, client: int = 0) -> ClientRound:
    """A client round in the only round of an experience, after one in every experience before.

    In all of them the client received the untrained model.
    """
    server, states, *_ = worker.initial_states(plan.seed)
    state, sent = states[client], worker.method.broadcast(server, client)
    for earlier in range(experience):
        round_id = RoundId(plan.seed, client, earlier, 0, last=True)
        state = worker.train_client(round_id, state, sent).reply.state
    round_id = RoundId(plan.seed, client, experience, 0, last=True)
    return worker.method.client_round(round_id, plan, state, sent)


def started(method: Method, client_round: ClientRound) -> Any:
    """The context of a client round that has begun: the received model is loaded."""
    method.receive(client_round)
    return method.start(client_round)


def network(experiment: Experiment, parameters: Tensor) -> Classifier:
    net = models.build_network(experiment.setting.network, (1, 8, 8), 10, seed=0)
    nn.utils.vector_to_parameters(parameters.clone(), net.parameters())
    return net


def normalised(experiment: Experiment, images: Tensor) -> Tensor:
    """uint8 images with mean 0 and deviation 1."""
    dataset = experiment.dataset()
    return (images.float() / 255 - dataset.mean) / dataset.std


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0), *(each.detach().flatten() for each in tensors)])


def slope(net: nn.Module, loss: Tensor) -> Tensor:
    return flat(torch.autograd.grad(loss, list(net.parameters())))


def saved(experiment: Experiment, folder: Path, seed: int = 0) -> dict[str, Any]:
    path = checkpoint_folder(folder, experiment.name, seed) / "run.safetensors"
    identity = json.loads(read_tree(path)[1]["identity"])
    checkpoint = Checkpoint(folder, experiment.name, seed, identity)
    state = checkpoint.load()
    assert state is not None
    return {**state, "clients": [checkpoint.store.get(kept.digest) for kept in state["clients"]]}


def counted(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The history without what differs between two runs of the same numbers: time and memory."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "memory")} for row in history]


def assert_same_weights(one: Record, other: Record) -> None:
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
    if isinstance(tree, Tensor):
        yield where, tree
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from tensors(item, f"{where}.{key}")
    elif isinstance(tree, list):
        for place, item in enumerate(tree):
            yield from tensors(item, f"{where}.{place}")


def assert_equal_trees(one: Any, other: Any) -> None:
    (text, arrays), (expected, others) = flatten(one), flatten(other)
    assert text == expected  # where nan is itself
    for name, array in arrays.items():
        assert (array.dtype, array.shape) == (others[name].dtype, others[name].shape), name
        assert array.tobytes() == others[name].tobytes(), name


def kept(exemplars_per_class: int, **changes: Any) -> dict[str, Any]:
    """The memory of the control `replay`: so many images of a class, chosen at random."""
    return {
        "selection": "uniform",
        "merge": "reservoir",
        "exemplars_per_class": exemplars_per_class,
        **changes,
    }


def long() -> Experiment:
    """60 short rounds, enough to be stopped somewhere in the middle."""
    split = {"images_per_class": 8}
    return tiny(
        "replay", split=split, training={"rounds": 20, "participation": 0.75}, memory=kept(3)
    )


def full(*_: object, **__: object) -> None:
    """What a write calls on a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


def lose(patch: pytest.MonkeyPatch, client: int, lost: Collection[tuple[int, int]]) -> None:
    """Have a client not complete some rounds (experience, round) of trainings in this process."""
    mapped, away = SerialExecutor.map, [(client, *each) for each in lost]

    def map_others(executor: SerialExecutor, work: Any, calls: Any) -> Any:
        if work is Worker.train_client:
            ids = [(call, call[0]) for call in calls]
            calls = [call for call, i in ids if (i.client, i.experience, i.round) not in away]
        return mapped(executor, work, calls)

    patch.setattr(SerialExecutor, "map", map_others)


def normal(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)
