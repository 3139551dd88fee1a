"""What travels and what clients keep, to the byte, for ResNet-18 with 100 classes."""

from functools import cache
from typing import Any

import pytest
import torch
from small import tiny

from stamp_core import methods, split
from stamp_core.data import ImageSet
from stamp_core.methods import Turn
from stamp_core.records import tree_bytes
from stamp_core.workspace import Visit, Workspace

P = 11_227_812  # parameters
B = 9_600  # float buffers
BASE = P - 512 * 100 - 100
META = 38_944  # FedL2P's two networks and its rates
MODEL = (4 * P, 4 * P)
CLASSES = 100

# What a client is sent and sends in a round where buffers stay at home; in `begin`, all clients.
EXPECTED: dict[str, tuple[int, int]] = {
    "fedavg": MODEL,
    "fedprox": MODEL,
    "fedala": MODEL,
    "feddbe": MODEL,
    "fedas": (4 * BASE, 4 * BASE + 4),
    "fedomg": MODEL,
    "fedl2p": (4 * (P + META), 4 * (P + META)),
    "fedssi": MODEL,
    "gradma": MODEL,
    "gem": MODEL,
    "agem": MODEL,
    "replay": MODEL,
    "stamp": MODEL,
    "joint": (4 * (P + B), 4 * (P + B)),  # one learner: its buffers are at home on the server
    "local": (0, 0),
}
OPTIONS: dict[str, dict[str, Any]] = {"feddbe": {"kappa": 1.0}}
BEGIN = {"feddbe": (2 * 4 * 512, 2 * 4 * 512)}  # the mean of 512 features, two clients


@cache
def pictures() -> ImageSet:
    """Four pictures of each of 100 classes in colour, of noise."""
    labels = torch.arange(CLASSES).repeat(4)
    draw = torch.Generator().manual_seed(0)
    noise = torch.randint(256, (len(labels), 3, 32, 32), dtype=torch.uint8, generator=draw)
    every = torch.zeros(len(labels), dtype=torch.int64)
    return ImageSet(
        "noise",
        **{"x_train": noise, "y_train": labels, "x_test": noise[:100], "y_test": labels[:100]},
        classes=tuple(map(str, range(CLASSES))),
        domains=("all",),
        **{"domain_train": every, "domain_test": every[:100], "digest": "noise"},
        **{"mean": torch.full((3,), 0.5), "std": torch.full((3,), 0.3)},
    )


@cache
def workspace(buffers: str) -> Workspace:
    """The network of the paper on noise; two clients, two tasks of one class, a batch of two."""
    setting = tiny(
        split={"clients": 2, "tasks": 2, "classes_per_task": 1},
        training={"batch": 2, "buffers": buffers},
        network={"kind": "resnet18", "norm": "batch"},
    ).setting
    return Workspace(setting, pictures())


def first_visit(kind: str, buffers: str = "local") -> tuple[int, int]:
    """Bytes that the first client of the first round is sent and sends."""
    work = workspace(buffers)
    method = methods.get(kind)(tiny(kind, **OPTIONS.get(kind, {})).params, work)
    plan = split.make(work.setting.split, work.images, seed=0)
    server, states, *begun = method.begin(plan)
    assert tuple(begun) == BEGIN.get(kind, (0, 0))
    sent = method.broadcast(server, 0)
    reply = method.local(Turn(Visit(0, 0, 0, 0), plan, states[0], sent))
    return tree_bytes(sent), tree_bytes(reply.message)


def test_every_method_has_its_bytes_here() -> None:
    assert set(EXPECTED) == set(methods.names())


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_round_of_resnet18_costs_what_is_published(kind: str) -> None:
    assert first_visit(kind) == EXPECTED[kind]


def test_shared_buffers_add_their_own_bytes() -> None:
    assert first_visit("fedavg", "shared") == (4 * (P + B), 4 * (P + B))
