"""The paper's networks: training steps in half precision, in parts, and by layout of pictures."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks import spread
from stamp_core.config import Network
from stamp_core.executor import resolve_device
from stamp_core.models import Classifier, Shape, build

Row = tuple[str, str]
REPEATS = 3
RESNET = Network("resnet18", norm="batch", stem="small")
SIZES: list[tuple[str, Network, Shape, int]] = [
    ("ResNet-18, 32 x 32", RESNET, (3, 32, 32), 64),
    ("Swin-T, 224 x 224", Network("swin_t"), (3, 224, 224), 4),
]


def rows() -> Iterator[Row]:
    """How much faster or slower a step is than one in float32 on the whole batch."""
    device = torch.device(resolve_device("auto"))
    for name, network, shape, batch in SIZES:
        plain = built(network, shape, device)
        pictures = torch.randn(batch, *shape, device=device)
        given = pictures.to(memory_format=torch.channels_last)
        took = statistics.median(step(plain, given) for _ in range(REPEATS))
        yield f"{name}: pictures/s, float32, batch {batch}", f"{batch / took:,.1f}"
        half = built(replace(network, precision="bfloat16"), shape, device)
        parts = built(replace(network, at_once=batch // 4), shape, device)
        yield f"{name}: bfloat16, speed", ratio(plain, half, given, given)
        yield (
            f"{name}: channels last instead of first, speed",
            ratio(plain, plain, pictures.contiguous(), given),
        )
        yield f"{name}: a quarter at once, speed", ratio(plain, parts, given, given)


def built(network: Network, shape: Shape, device: torch.device) -> Classifier:
    """A network in training with fresh weights."""
    return build(network, shape, 100, seed=0).to(device).train()


def ratio(one: Classifier, other: Classifier, first: torch.Tensor, second: torch.Tensor) -> str:
    """Time of a step of one network by that of another, in turn."""
    found = [step(one, first) / step(other, second) for _ in range(REPEATS + 1)]
    return spread(found[1:])


def step(network: Classifier, pictures: torch.Tensor) -> float:
    """Seconds of a forward and a backward pass."""
    labels = torch.zeros(len(pictures), dtype=torch.int64, device=pictures.device)
    began = time.perf_counter()
    F.cross_entropy(network(pictures), labels).backward()
    if pictures.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def table() -> list[str]:
    """The section of benchmarks/results.md."""
    torch.set_num_threads(1)
    on = torch.cuda.get_device_name() if torch.cuda.is_available() else "one thread of the CPU"
    return [
        "",
        "## The paper's networks",
        "",
        f"Training steps on {on}; a speed is relative to float32, channels last, the whole batch.",
        "",
        "| what | result |",
        "|---|---|",
        *(f"| {what} | {result} |" for what, result in rows()),
    ]


if __name__ == "__main__":
    print("\n".join(table()))
