"""What is sent and what clients keep, to the byte, for ResNet-18 with 100 classes."""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import small
import torch
from small import tiny

from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.split import make_plan
from stamp_core.methods.base import registry
from stamp_core.results.records import tree_bytes
from workbench.methods.base.statistics_server import StatisticsServer

P = 11_227_812  # parameters
B = 9_600  # float buffers
BASE = P - 512 * 100 - 100
MAP = 512 * 512 + 512  # LANDER's, to anchors of 512 numbers
KNOWN = 13  # bytes of the classes learnt so far, in a client's first round of an experience
CONVOLUTIONS = 11_166_912  # weights, of 4,800 channels
KEPT = 7_804_228  # weights of the channels that FedWeIT sends: 44, 89, 179, 358 of 64 to 512
META = 38_944  # FedL2P's two networks and its learning rates
FLOW = 6_397_952  # AF-FCL's normalising flow, as published
ACGAN = 513 + 1_628_448  # FedCIL's adversarial head and generator
FEATURES = 41_792 + 39_297  # SR-FDIL's generator and discriminator of features
GRADIENT = 340_144  # of GLFC's encoder on one image
MODEL = (4 * P, 4 * P)
CLASSES = 100

# Bytes to and from a client in a round with local buffers, where they are not those of the model.
EXPECTED: dict[str, tuple[int, int]] = {
    "fedas": (4 * BASE, 4 * BASE + 4),
    "fedcil": (4 * (P + ACGAN) + 13, 4 * (P + ACGAN) + 13),  # and a bit for each class
    "fedl2p": (4 * (P + META), 4 * (P + META)),
    "affcl": (4 * (P + FLOW) + 13, 4 * (P + FLOW) + 13),  # the classes learnt, as bits
    "glfc": (4 * P + 13, 4 * P + 13 + GRADIENT),  # classes as bits each way
    "srfdil": (4 * (P + FEATURES), 4 * (P + FEATURES)),
    "tagfed": (4 * P, 4 * P + 8),  # the first task trains all weights; the number of its group
    "target": (4 * P + KNOWN, 4 * P + KNOWN),
    "lander": (4 * (P + MAP) + KNOWN + 2 * 100 * 512, 4 * (P + MAP) + KNOWN),
    "joint": (4 * (P + B), 4 * (P + B)),  # one learner: its buffers are the server's
    "local": (0, 0),
    "fedweit": (4 * P + KNOWN, 4 * (KEPT + P - CONVOLUTIONS) + 4800 // 8),
    # on 1,280 features, in float64: a class with its count, its mean and its variances
    "class_gaussians": (0, 8 * (1 + 1 + 1280 + 1280)),
    "nearest_class_mean": (0, 8 * (100 * 1280 + 100)),
    "stsa": (0, 8 * (64 * 64 + 64 * 100 + 100)),  # with an expansion of 64
}
# A last round: FedWeIT also sends A where it is above lambda1, here nowhere.
OPTIONS: dict[str, dict[str, Any]] = {
    "class_gaussians": {"covariance": "diagonal"},
    "fedweit": {"lambda1": 1000.0},
    "stsa": {"expansion": 64},
    "tagfed": {"exchange": "weights"},
    "vrmcl": {"inner_steps": 1, "r": 0.0},
}


@cache
def images() -> ImageDataset:
    """Four colour images of noise for each of 100 classes."""
    labels = torch.arange(CLASSES).repeat(4)
    numbers = torch.Generator().manual_seed(0)
    noise = torch.randint(256, (len(labels), 3, 32, 32), dtype=torch.uint8, generator=numbers)
    every = torch.zeros(len(labels), dtype=torch.int64)
    return ImageDataset(
        "noise",
        **{"x_train": noise, "y_train": labels, "x_test": noise[:100], "y_test": labels[:100]},
        classes=tuple(map(str, range(CLASSES))),
        domains=("all",),
        **{"domain_train": every, "domain_test": every[:100], "digest": "noise"},
        **{"mean": torch.full((3,), 0.5), "std": torch.full((3,), 0.3)},
    )


@cache
def runtime_of_images() -> ClientRuntime:
    return runtime_of({"kind": "resnet18", "norm": "batch"}, images())


def runtime_of_features() -> ClientRuntime:
    """Without an encoder: 1,280 features are noise."""
    x = images().x_train.flatten(1)[:, :1280, None, None]
    moments = {"mean": torch.full((1280,), 0.5), "std": torch.full((1280,), 0.3)}
    return runtime_of(small.IDENTITY, replace(images(), x_train=x, x_test=x[:100], **moments))


def runtime_of(network: dict[str, str], data: ImageDataset) -> ClientRuntime:
    """Two clients, two tasks of one class, a batch of two."""
    split = {"clients": 2, "tasks": 2, "classes_per_task": 1}
    training = {"batch_size": 2, "buffers": "local"}
    return ClientRuntime(tiny(split=split, training=training, network=network).setting, data)


class Sizes(NamedTuple):
    down: int
    up: int
    disk: int  # after the client round
    setup: tuple[int, int]  # to and from all clients, before the first round


@cache
def first_round(kind: str, **options: Any) -> Sizes:
    found = registry.get_method(kind)
    statistics = issubclass(found, StatisticsServer)
    runtime = runtime_of_features() if statistics else runtime_of_images()
    method = found(tiny(kind, **options).params, runtime)
    plan = make_plan(runtime.setting.split, runtime.dataset, seed=0)
    server, (state, *_), *setup = method.initial_states(plan)
    sent = method.broadcast(server, 0)
    client_round = method.client_round(RoundId(0, 0, 0, 0, last=True), plan, state, sent)
    reply = method.train_client(client_round)
    down, up, disk = map(tree_bytes, (sent, reply.message, reply.state))
    return Sizes(down, up, disk, (setup[0], setup[1]))


@pytest.mark.parametrize("kind", registry.method_names())
def test_a_round_of_resnet18_costs_what_is_published(kind):
    sizes = first_round(kind, **OPTIONS.get(kind, {}))
    assert (sizes.down, sizes.up) == EXPECTED.get(kind, MODEL) and sizes.setup == (0, 0)


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("fedprox", 0),
        ("gradma", 0),
        ("fedomg", 0),
        ("fedala", 2 * 4 * (P - BASE)),  # the head and a mixing weight for each of its numbers
        ("feddbe", 4 * 512),  # the offset
        ("fedas", 4 * P + 4 * B),  # the own model, and the statistics of its encoder
        ("fedssi", 4 * P),  # importance; from the second task on the anchor as well
        ("gem", 4 * 32 * 32 * 3 + 4 * 2 * 8 + 100 * 8),  # four images, labels, tasks, counts
    ],
)
def test_a_client_keeps_what_is_published(kind, kept):
    assert first_round(kind).disk - 4 * B == kept


@pytest.mark.parametrize(
    ("kind", "options", "numbers"),
    [
        ("stsa", {"expansion": 0}, 1280**2 + 100 * 1280 + 100),
        ("stsa", {"expansion": 64, "estimate": 20}, 1 + 20 * 64 + 20),  # sums, sizes, the class
        ("class_gaussians", {"covariance": "full"}, 1 + 1 + 1280 + 1280**2),
        ("class_gaussians", {"covariance": "shared"}, 1 + 1 + 1280 + 1280**2),  # of all classes
        ("nearest_class_mean", {"metric": "cosine"}, 100 * 1280 + 100),
    ],
)
def test_statistics_are_sent_in_float64(kind, options, numbers):
    assert first_round(kind, **options)[:3] == (0, 8 * numbers, 0)


def test_the_mean_of_feddbe_is_sent_once_each_way():
    sizes = first_round("feddbe", feddbe_kappa=1.0)
    assert sizes == (*MODEL, 4 * B + 2 * 4 * 512, (2 * 4 * 512, 2 * 4 * 512))


def test_of_a_frozen_network_only_the_meta_networks_are_sent():
    sizes = first_round("fedl2p", backbone="frozen", warm_rounds=1)
    assert sizes == (4 * META, 4 * META, 4 * P + 4 * B, (2 * 2 * 4 * P, 2 * 4 * P))
