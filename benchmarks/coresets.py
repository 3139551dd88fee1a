"""Gradients of single pictures: all parameters, the head alone, and a loop of backward passes."""

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import spread
from stamp_core.experiments import experiment
from stamp_core.learner import gradients, head_gradients, head_parts
from stamp_core.models import Classifier, build

Row = tuple[str, str]
REPEATS = 7
PICTURES = 128
SHAPES = {"digits": (1, 8, 8), "glyphs": (1, 20, 20)}


def looped(network: Classifier, pictures: Tensor, labels: Tensor) -> list[Tensor]:
    """A backward pass a picture: the yardstick."""
    network.eval()
    found = []
    for picture, label in zip(pictures, labels, strict=True):
        loss = F.cross_entropy(network(picture[None]), label[None])
        each = torch.autograd.grad(loss, list(network.parameters()))
        found.append(torch.cat([part.flatten() for part in each]))
    return found


def products(network: Classifier, pictures: Tensor, labels: Tensor) -> Tensor:
    """Inner products of head gradients without the gradients.  # [N, N]"""
    errors, features = head_parts(network, pictures, labels)
    return (errors @ errors.T) * (1 + features @ features.T)


def rows() -> Iterator[Row]:
    """What each way costs, relative to gradients of all parameters by vmap, and how they agree."""
    ways = {"a loop": looped, "the head alone": head_gradients, "the head's products": products}
    for name, shape in SHAPES.items():
        network, kind = built(name, shape)
        pictures, labels = torch.randn(PICTURES, *shape), torch.randint(10, (PICTURES,))
        given = (network, pictures, labels)
        for way, work in ways.items():
            ratios = [
                seconds(work, *given) / seconds(gradients, *given) for _ in range(REPEATS + 1)
            ]
            yield f"{way} / all parameters by vmap, {kind}", spread(ratios[1:])
        took = 1000 * statistics.median(seconds(gradients, *given) for _ in range(REPEATS))
        every, head = gradients(*given), head_gradients(*given)
        apart = float((every[:, -head.shape[1] :] - head).abs().max())
        agree = f"{took:.1f} ms, {every.shape[1]:,} parameters; head alone differs by {apart:.0e}"
        yield f"gradients of {PICTURES} pictures by vmap, {kind}", agree


def built(name: str, shape: tuple[int, ...]) -> tuple[Classifier, str]:
    """The network of a setting with fresh weights, and its kind."""
    network = experiment(name, "fedavg").setting.network
    return build(network, shape, 20, seed=0), network.kind


def seconds(work: Callable[..., object], *given: object) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    work(*given)
    return time.perf_counter() - began


def table() -> list[str]:
    """The section of benchmarks/results.md."""
    torch.set_num_threads(1)
    return [
        "",
        "## Gradients of single pictures",
        "",
        "On the networks of the settings, one thread: for coreset rules that compare gradients.",
        "",
        "| what | result |",
        "|---|---|",
        *(f"| {what} | {result} |" for what, result in rows()),
    ]


if __name__ == "__main__":
    print("\n".join(table()))
