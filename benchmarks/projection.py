"""Matching on projections of updates: what k numbers lose, what they cost and what they reveal.

`python -m benchmarks.projection` writes benchmarks/projection.md, in a minute.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import seconds
from stamp_core.client.runtime import RoundId
from stamp_core.core.paths import ROOT
from stamp_core.core.seeding import generator
from stamp_core.data.plan import Plan
from stamp_core.data.split import make_plan
from stamp_core.engine.experiment import load_experiment
from stamp_core.engine.worker import Worker
from stamp_core.matching.gram import sketch
from stamp_core.matching.match import match
from stamp_core.methods.base.method import Log
from stamp_core.methods.base.server_matching import SpatialParams

SETTING = "glyphs"
SEEDS = range(2)
SIZES = (16, 32, 64, 128, 256, 512, 1024)
LENGTH = 11_200_000  # the parameters of a ResNet-18
MATCHING = SpatialParams()


class Round(NamedTuple):
    """The uploads of a round, and what a server with test images can compare them with."""

    address: tuple[int, int, int]  # seed, experience, round
    updates: Tensor  # [K, P]
    samples: Tensor  # [K]
    weights: Tensor  # float64 [K], those of exact matching
    references: Tensor  # [C, P], the gradient of each class at the model that was sent
    classes: list[tuple[int, ...]]  # of each client's task


class Cell(NamedTuple):
    """A direction compared with the exact one, and what the server can tell of single updates."""

    error: float  # |d - exact| / |exact|
    cosine: float
    energy: float  # |x|^2 of the least-norm reconstruction x, relative to the update's
    classes: float  # share of a task's classes among the likeliest


def rounds(seed: int) -> Iterator[Round]:
    """Every round of FedOMG with the exact solver."""
    experiment = load_experiment(SETTING, "fedomg")
    experiment = replace(experiment, params=replace(experiment.params, spatial=MATCHING))
    plan = make_plan(experiment.setting.split, experiment.dataset(), seed)
    worker = Worker(experiment, {seed: plan}, "cpu")
    server, states, *_ = worker.initial_states(seed)
    count = experiment.setting.training.rounds
    for experience, round_ in ((e, r) for e in range(plan.experiences) for r in range(count)):
        message = worker.method.broadcast(server, 0)
        ids = [RoundId(seed, client, experience, round_) for client in range(len(states))]
        replies = [worker.train_client(each, states[each.client], message).reply for each in ids]
        states = [reply.state for reply in replies]
        start = server["parameters"]
        yield Round(
            (seed, experience, round_),
            updates := torch.stack([start - reply.message["parameters"] for reply in replies]),
            samples := torch.tensor([float(reply.samples) for reply in replies]),
            matched(updates, samples),
            class_gradients(worker, start),
            task_classes(plan, experience),
        )
        server = worker.method.aggregate(server, replies, Log())


def task_classes(plan: Plan, experience: int) -> list[tuple[int, ...]]:
    """The classes of every client's task."""
    return [client[experience % plan.tasks].classes for client in plan.clients]


def class_gradients(worker: Worker, parameters: Tensor) -> Tensor:
    """The gradient of the mean loss on the test images of each class.  # [C, P]"""
    model, dataset = worker.runtime.model, worker.runtime.dataset
    gradients = []
    for label in range(len(dataset.classes)):
        model.load(parameters)
        model.gradients.zero_()
        images = worker.runtime.normalise(dataset.x_test[dataset.y_test == label])
        F.cross_entropy(model.module(images), torch.full((len(images),), label)).backward()
        gradients.append(model.gradients.clone())
    return torch.stack(gradients)


def compare(found: Round, weights: Tensor) -> tuple[float, float]:
    """Error and cosine of the sum of the updates with these weights."""
    updates = found.updates.double()
    direction, exact = weights @ updates, found.weights @ updates
    error = float((direction - exact).norm() / exact.norm())
    return error, float(F.cosine_similarity(direction, exact, dim=0))


def matched(vectors: Tensor, samples: Tensor) -> Tensor:
    """The weights of updates, from these or from their projections.  # float64 [K]"""
    return match(vectors, MATCHING, samples)[1].coefficients[0]


def recognised(found: Round, vectors: Tensor, references: Tensor) -> float:
    """The share of each task's classes that are among the likeliest, by the cosine.

    `vectors` are updates and `references` gradients, or the projections of both.
    """
    cosines = F.normalize(vectors, dim=1) @ F.normalize(references, dim=1).T  # [K, C]
    hits = [
        len({*row.topk(len(own)).indices.tolist()} & {*own}) / len(own)
        for row, own in zip(cosines, found.classes, strict=True)
    ]
    return statistics.fmean(hits)


def energy(sums: Tensor, places: Tensor) -> Tensor:
    """|x|^2 of the shortest x with these sums; a matrix has orthogonal rows.  # [K]"""
    numbers = sums.shape[1]
    counts = (places % numbers).bincount(minlength=numbers).clamp(min=1)
    return (sums.square() / counts).sum(1)


def measure(found: Round, numbers: int) -> Cell:
    """One round, with one matrix of this many rows."""
    address = (*found.address, "projection")

    def projected(vectors: Tensor) -> Tensor:
        return torch.stack([sketch(each, numbers, generator(*address)) for each in vectors])

    sums, references = projected(found.updates), projected(found.references)
    length = found.updates.shape[1]
    places = torch.randint(2 * numbers, (length,), generator=generator(*address))  # as in `sketch`
    recovered = energy(sums, places) / found.updates.square().sum(1)
    classes = recognised(found, sums, references)
    return Cell(*compare(found, matched(sums, found.samples)), float(recovered.mean()), classes)


def exactly(found: Round) -> Cell:
    """Exact matching, for which the server sees the updates."""
    classes = recognised(found, found.updates, found.references)
    return Cell(*compare(found, found.weights), 1.0, classes)


def row(label: str, numbers: int, cells: list[Cell]) -> str:
    """A line of the table: medians over rounds of all seeds."""
    middle = Cell(*map(statistics.median, zip(*cells, strict=True)))
    direction = f"{middle.error:.3f} | {middle.cosine:.4f}"
    return (
        f"| {label} | {4 * numbers:,} | {direction} | {middle.energy:.4f} | {middle.classes:.2f} |"
    )


def timed(work: Callable[[], object]) -> str:
    """The median time of three calls."""
    return f"{statistics.median(seconds(work) for _ in range(3)):.2f} s"


def page() -> Iterator[str]:
    """The lines of benchmarks/projection.md."""
    torch.set_num_threads(1)
    known = [found for seed in SEEDS for found in rounds(seed)]
    clients, length = known[0].updates.shape
    chance = len(known[0].classes[0]) / len(known[0].references)
    yield "# Matching on projections of updates\n"
    yield f"FedOMG on {SETTING}, {clients} clients, P = {length:,} parameters. Medians over"
    yield f"{len(known)} rounds of {len(SEEDS)} seeds, each with a matrix of its own.\n"
    yield "- *error*, *cosine*: of the direction, relative to that of exact matching"
    yield "- *energy*: of the shortest update with these k numbers, relative to the update"
    yield "- *classes*: share of a task's classes among the likeliest, by the cosine with the"
    yield f"  gradient of each class on the test images; by chance {chance:.2f}\n"
    yield "| k | bytes in the clear | error | cosine | energy | classes |"
    yield "|---|---|---|---|---|---|"
    for numbers in SIZES:
        yield row(f"{numbers:,}", numbers, [measure(found, numbers) for found in known])
    yield row("exact", length, [exactly(found) for found in known])
    means = [compare(found, (found.samples / found.samples.sum()).double()) for found in known]
    error, cosine = map(statistics.median, zip(*means, strict=True))
    yield f"| FedAvg's mean | 0 | {error:.3f} | {cosine:.4f} | | |"
    vector = torch.randn(LENGTH)
    times = [timed(lambda k=k: sketch(vector, k, generator(0, "time"))) for k in (16, 1024)]
    yield f"\nOf an update of {LENGTH:,} parameters a client computes 16 numbers in {times[0]},"
    yield f"1,024 in {times[1]}."


if __name__ == "__main__":
    text = "\n".join(page()) + "\n"
    (ROOT / "benchmarks" / "projection.md").write_text(text)
    print(text)
