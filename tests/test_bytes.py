"""What travels and what clients keep, to the byte, for ResNet-18 with 100 classes."""

from functools import cache
from typing import Any, NamedTuple

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

# What a client is sent and sends in a round where buffers stay at home.
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


class Sizes(NamedTuple):
    """Bytes of the first client of the first round."""

    down: int
    up: int
    disk: int  # after the visit
    begun: tuple[int, int]  # to and from all clients, before the first round


def first_visit(kind: str, buffers: str = "local", **options: Any) -> Sizes:
    """What the only round of a task costs the first of two clients."""
    work = workspace(buffers)
    method = methods.get(kind)(tiny(kind, **options).params, work)
    plan = split.make(work.setting.split, work.images, seed=0)
    server, states, *begun = method.begin(plan)
    sent = method.broadcast(server, 0)
    reply = method.local(Turn(Visit(0, 0, 0, 0, last=True), plan, states[0], sent))
    down, up, disk = map(tree_bytes, (sent, reply.message, reply.state))
    return Sizes(down, up, disk, (begun[0], begun[1]))


def test_every_method_has_its_bytes_here() -> None:
    assert set(EXPECTED) == set(methods.names())


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_round_of_resnet18_costs_what_is_published(kind: str) -> None:
    found = first_visit(kind)
    assert (found.down, found.up) == EXPECTED[kind] and found.begun == (0, 0)


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("fedavg", 0),
        ("fedprox", 0),
        ("gradma", 0),
        ("fedomg", 0),
        ("fedala", 2 * 4 * (P - BASE)),  # the head and a mixing weight for each of its numbers
        ("feddbe", 4 * 512),  # the offset
        ("fedas", 4 * P + 4 * B),  # the own model, and the statistics that its encoder needs
        ("fedssi", 4 * P),  # importance; from the second task on the anchor as well
        ("gem", 4 * 32 * 32 * 3 + 4 * 2 * 8 + 100 * 8),  # four pictures, labels, tasks, counts
    ],
)
def test_a_client_keeps_what_is_published(kind: str, kept: int) -> None:
    """Beside its own running statistics, which no method is charged for."""
    assert first_visit(kind).disk - 4 * B == kept


def test_the_mean_of_feddbe_travels_once_each_way() -> None:
    found = first_visit("feddbe", kappa=1.0)
    assert found == (*MODEL, 4 * B + 2 * 4 * 512, (2 * 4 * 512, 2 * 4 * 512))


def test_of_a_frozen_network_only_the_meta_networks_travel() -> None:
    """Before that, FedAvg for a round and what came of it once more."""
    found = first_visit("fedl2p", backbone="frozen", warm_rounds=1)
    assert (found.down, found.up) == (4 * META, 4 * META) == (155_776, 155_776)
    assert found.begun == (2 * 2 * 4 * P, 2 * 4 * P)


def test_shared_buffers_add_their_own_bytes() -> None:
    found = first_visit("fedavg", "shared")
    assert (found.down, found.up, found.disk) == (4 * (P + B), 4 * (P + B), 0)
