"""What released code computed on small inputs, stored as numbers.

Each test says which function was called, and draws its inputs here: whoever has the repository
can call it again. None of that code is part of this project.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import small
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from stamp_core.client import runtime
from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.config.params import read_params
from stamp_core.config.schema import Split
from stamp_core.core.paths import ROOT
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.plan import Plan, Task
from stamp_core.engine.experiment import Experiment
from stamp_core.methods.base.method import Log, Reply, State
from stamp_core.methods.base.registry import resolve_preset


@dataclass(frozen=True)
class Execution:
    """A preset, or a selection rule, whose code was executed beside that of a repository."""

    name: str
    repository: str
    commit: str
    difference: float  # a bound of the largest one, on every processor

    @property
    def mark(self) -> str:
        """As docs/deviations.md has it."""
        bound = f"{self.difference:.0e}".replace("e-0", "e-")
        return f"`execution`: {self.repository} {self.commit}, {bound}"

    @property
    def params(self) -> Any:
        """The preset's parameters."""
        return resolve_preset(self.name, read_params())[1]

    def check(self, ours: Mapping[str, ArrayLike]) -> None:
        """Require that our numbers are the released code's."""
        with np.load(ROOT / f"tests/released/{self.name}.npz") as released:
            assert set(ours) == set(released.files)
            for name, theirs in released.items():
                own = np.asarray(ours[name])
                assert own.shape == theirs.shape, name
                assert np.abs(theirs).max() > 100 * self.difference, f"{name}: nothing to compare"
                np.testing.assert_allclose(own, theirs, rtol=0, atol=self.difference, err_msg=name)


def draws(seed: int, *shape: int) -> Tensor:
    """Numbers of a standard normal distribution, the same on every machine.  # float64"""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def images(count: int) -> tuple[Tensor, Tensor]:
    """Images of 0..255 and labels of ten classes."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(256, size=(count, 1, 8, 8), dtype=np.uint8)
    return torch.from_numpy(pixels), torch.from_numpy(draw.integers(10, size=count))


def order(count: int, generator: object = None) -> Tensor:
    """What `torch.randperm` returns on both sides."""
    return draws(count, count).argsort()


def train_on_images(patch: pytest.MonkeyPatch, experiment: Experiment, count: int) -> ImageDataset:
    """Have experiments train on `images`, whose pixels become -1..1, in `order`."""
    (x, y), half = images(count), torch.full((1,), 0.5)
    drawn = replace(experiment.dataset(), x_train=x, y_train=y, mean=half, std=half)
    patch.setattr(small, "dataset", lambda spec: drawn)
    patch.setattr(torch, "randperm", order)
    return drawn


def federation(
    patch: pytest.MonkeyPatch,
    execution: Execution,
    training: Mapping[str, Any],
    features: int,
    samples: Sequence[Sequence[int]],
) -> tuple[Experiment, Plan]:
    """Clients with so many of `images` in each task, and an MLP whose weights are drawn."""
    split = {"clients": len(samples), "tasks": len(samples[0])}
    network = {"kind": "mlp", "features": features}
    experiment = small.tiny(execution.name, split, training, network, **vars(execution.params))
    drawn = train_on_images(patch, experiment, sum(map(sum, samples)))
    weights = draws(1, 64 * features + features + features * 10 + 10).float() / 5
    patch.setattr(runtime, "build_network", lambda *_: small.network(experiment, weights))
    left, every = iter(range(len(drawn.y_train))), tuple(range(10))
    clients = tuple(
        tuple(Task(every, train=tuple(islice(left, count))) for count in tasks) for tasks in samples
    )
    return experiment, Plan(experiment.setting.split, 0, drawn.digest, clients, 10)


def rehearse(
    experiment: Experiment, data: ImageDataset, tasks: Tensor, task: int, parameters: Tensor
) -> Reply:
    """A reply in the first round of a task; `tasks` are of the images, earlier ones' exemplars."""
    past, count = tasks < task, int(tasks.max()) + 1
    parts = [tuple((tasks == t).nonzero().flatten().tolist()) for t in range(count)]
    own = tuple(Task(tuple(range(10)), train=part) for part in parts)
    plan = Plan(Split("file", 1, count), 0, data.digest, (own,), 10)
    method: Any = experiment.kind(experiment.params, ClientRuntime(experiment.setting, data))
    state = method.init_client(0, {})
    state["memory"] |= {"images": data.x_train[past], "labels": data.y_train[past]}
    state["memory"] |= {"tasks": tasks[past], "soft": torch.zeros(int(past.sum()), 0)}
    sent = {"parameters": parameters.float(), "buffers": torch.zeros(0)}
    reply: Reply = method.train_client(
        method.client_round(RoundId(0, 0, task, 0), plan, state, sent)
    )
    return reply


def exchange(
    method: Any,
    plan: Plan,
    server: State,
    states: Sequence[State],
    task: int,
    number: int = 0,
    last: bool = False,
) -> tuple[State, list[State]]:
    """The server's state and the clients' after a round of all of them."""
    replies = []
    method.runtime.start_round(number)
    for client, state in enumerate(states):
        round_id = RoundId(0, client, task, number, last)
        message = method.broadcast(server, client)
        replies.append(method.train_client(method.client_round(round_id, plan, state, message)))
    return method.aggregate(server, replies, Log()), [reply.state for reply in replies]


def changes(end: Tensor, network: nn.Module) -> Tensor:
    """How a network's parameters differ in the end: at most 50 numbers of each tensor."""
    start = list(network.parameters())
    parts = zip(end.split([each.numel() for each in start]), start, strict=True)
    return torch.cat([(own - p.flatten())[:: len(own) // 50 + 1] for own, p in parts]).detach()


def photographs(patch: pytest.MonkeyPatch, experiment: Experiment, samples: Sequence[int]) -> Plan:
    """The plan of clients with so many images of two classes in each task, taken in `order`."""
    draw, tasks = np.random.default_rng(0), experiment.setting.split.tasks
    shape = tasks, sum(samples)
    pixels = torch.from_numpy(draw.integers(256, size=(*shape, 3, 32, 32), dtype=np.uint8))
    labels = torch.from_numpy(draw.integers(2, size=shape) + 2 * np.arange(tasks)[:, None])
    drawn = replace(experiment.dataset(), x_train=pixels.flatten(0, 1), y_train=labels.flatten())
    patch.setattr(small, "dataset", lambda spec: drawn)
    patch.setattr(torch, "randperm", order)
    parts = torch.arange(labels.numel()).view(shape).split(list(samples), 1)  # [T, n] of each
    clients = [tuple(Task((0,), train=tuple(own)) for own in part.tolist()) for part in parts]
    return Plan(experiment.setting.split, 0, drawn.digest, tuple(clients), 10)
