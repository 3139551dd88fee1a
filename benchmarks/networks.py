"""The paper's networks: SGD steps by memory format."""

import statistics
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks import Row, seconds, section, spread
from stamp_core.config.schema import Network
from stamp_core.core.devices import device_name, resolve_device
from stamp_core.models.encoders import Shape
from stamp_core.models.networks import Classifier, build_network

REPEATS = 3
RESNET = Network("resnet18", norm="batch", stem="small")
NETWORKS: list[tuple[str, Network, Shape, int]] = [  # name, network, images, batch size
    ("ResNet-18, 32 x 32", RESNET, (3, 32, 32), 64),
    ("Swin-T, 224 x 224", Network("swin_t"), (3, 224, 224), 4),
]


def measurements() -> Iterator[Row]:
    """The speed of a step, and what the memory format changes."""
    device = torch.device(resolve_device("auto"))
    for name, network, shape, size in NETWORKS:
        first = torch.randn(size, *shape, device=device)
        last = first.to(memory_format=torch.channels_last)
        plain = build_network(network, shape, 100, seed=0).to(device).train()
        time = statistics.median(seconds(step, plain, last) for _ in range(REPEATS))
        yield f"{name}: images/s, batch {size}", f"{size / time:,.1f}"
        yield f"{name}: channels last, not first, speed", ratio(plain, first, last)


def ratio(network: Classifier, *images: torch.Tensor) -> str:
    """The time of a step on the first images by that on the second, in alternation."""
    times = [[seconds(step, network, each) for each in images] for _ in range(REPEATS + 1)]
    ratios = [first / second for first, second in times]
    return spread(ratios[1:])


def step(network: Classifier, images: torch.Tensor) -> None:
    """A forward and a backward pass."""
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    F.cross_entropy(network(images), labels).backward()


def table() -> list[str]:
    """The section of benchmarks/results.md."""
    device = torch.device(resolve_device("auto"))
    where = "one thread of the CPU" if device.type == "cpu" else device_name(device)
    note = f"SGD steps on {where}."
    return section("## The paper's networks", note, measurements())


if __name__ == "__main__":
    print("\n".join(table()))
