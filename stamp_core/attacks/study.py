"""The measurements: which uploads are inverted, and how near the images come to the true ones.

All methods are attacked in the same rounds of one run of STAMP. They receive the same model and
have the same memory and batches, so their uploads differ by what a method does with them alone.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from stamp_core.attacks.capture import (
    Images,
    Noise,
    Upload,
    capture,
    distinct,
    start_run,
    train_until,
)
from stamp_core.attacks.inversion import Attack, Target, invert
from stamp_core.attacks.labels import label_accuracy, recover_counts
from stamp_core.attacks.scores import identified, mean_images, other_images, pair, psnr, ssim
from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.config.params import Params
from stamp_core.core.seeding import generator
from stamp_core.data.dataset import ImageDataset
from stamp_core.engine.executor import Worker
from stamp_core.engine.experiment import load_experiment
from stamp_core.engine.train import Run
from stamp_core.models.flat import split_like
from stamp_core.results.metrics import summarise

TRAINED = "stamp"  # the preset whose run is attacked
METHODS = ("fedavg", "replay", "stamp")
KINDS = ("exemplar", "new")
COMPARED = ("psnr", "ssim", "identified")  # also with other images of the same classes
SCORES = (*COMPARED, *(f"{name}_gain" for name in COMPARED), "psnr_over_mean", "labels")
Pixels = NDArray[np.uint8]  # [n, C, H, W]


@dataclass(frozen=True)
class Case:
    """A kind of upload, and whether the server knows what matching did."""

    method: str
    experience: int  # of which the first round is attacked
    batch_size: int = 16
    steps: int | None = 1  # SGD steps; None: all of a local epoch, attacked as one mean gradient
    weights: Literal["known", "equal"] = "known"  # of the images' gradients, as the server has them
    noise: float = 0.0  # multiplier of the norm of the update

    @property
    def images(self) -> slice:
        """The part of a task's images that the client trains on."""
        return slice(self.steps and self.steps * self.batch_size)


def grid() -> list[Case]:
    """The cases of the study. Before there is a memory all methods send the same."""
    sizes = [(1, 1), (4, 1), (16, 1), (4, 4), (16, 4), (16, None)]
    first = [Case("fedavg", 0, *size) for size in sizes]
    later = [Case(method, 1, *size) for method in METHODS for size in sizes]
    unknown = [replace(case, weights="equal") for case in later[-len(sizes) :][:3]]
    noisy = [
        replace(case, noise=noise)
        for case in (*first, *later)
        for noise in (1e-3, 1e-2)
        if case.batch_size == 1
    ]
    return sorted([*first, *later, *unknown, *noisy], key=lambda case: case.experience)


@dataclass(frozen=True, eq=False)
class Place:
    """Where uploads are attacked: a run that goes on as needed, and its parameters."""

    run: Run
    params: Params | None

    def worker(self, method: str, batch_size: int) -> Worker:
        """A worker of another method on the run's plan, with batches of this size."""
        changes = {"setting.training.batch_size": batch_size, "setting.training.epochs": 1}
        setting = self.run.experiment.setting.name
        experiment = load_experiment(setting, method, self.params, changes)
        return Worker(experiment, self.run.worker.plans, "cpu")

    def upload(self, worker: Worker, client: int, images: slice, noise: float = 0.0) -> Upload:
        """A client's upload in the round that is next."""
        experience, round_ = divmod(self.run.state["next"], self.run.training.rounds)
        round_id = RoundId(self.run.seed, client, experience, round_)
        state = self.run.state["clients"][client]
        message = worker.method.broadcast(self.run.state["server"], client)
        return capture(worker, round_id, state, message, images, Noise(multiplier=noise))


def start(setting: str, params: Params | None, seed: int, changes: Mapping[str, Any]) -> Place:
    """A run of the setting that has not trained yet."""
    plain = {"setting.diagnostics": {}, **changes}
    return Place(start_run(load_experiment(setting, TRAINED, params, plain), seed), params)


# --- one attack


@dataclass(frozen=True, eq=False)
class Outcome:
    """Reconstructions and what they cost."""

    found: Tensor  # [m, C, H, W], values in 0..1
    labels: Tensor  # [m], their labels
    loss: float
    seconds: float


def attack_uploads(
    runtime: ClientRuntime,
    targets: Sequence[Target],
    labels: Tensor,
    attack: Attack,
    draw: torch.Generator,
) -> Outcome:
    """The images [M] with these labels that explain the targets."""
    before = time.perf_counter()
    noise = torch.randn(len(labels), *runtime.shape, generator=draw)
    limits = -runtime.offset, 255 * runtime.scale - runtime.offset
    images, loss = invert(runtime.classifier, targets, labels, noise, limits, attack)
    return Outcome(pixels(runtime, images), labels, loss, time.perf_counter() - before)


def pixels(runtime: ClientRuntime, images: Tensor) -> Tensor:
    """Normalised images with values in 0..1."""
    return (images + runtime.offset) / (255 * runtime.scale)


def plan_attack(upload: Upload, case: Case) -> tuple[Target, Tensor]:
    """What the server wants to reproduce, and the labels of the images that it looks for."""
    steps, weights = upload.steps, upload.weights
    labels = upload.images.labels
    if case.weights == "equal":
        weights = [torch.full_like(each, 1 / len(each)) for each in weights]
    if case.steps is None:  # as many images as in the first batch stand for all
        labels, steps, weights = labels[steps[0]], [torch.arange(len(steps[0]))], weights[:1]
    return Target(upload.received, upload.update, upload.lr, steps, weights), labels


def scores(
    runtime: ClientRuntime, outcome: Outcome, images: Images, draw: torch.Generator
) -> list[dict[str, Any]]:
    """For new images and for exemplars the means of their scores, and the gains over controls."""
    dataset, labels = runtime.dataset, outcome.labels
    true = pixels(runtime, images.values)
    controls = other_images(dataset, labels, draw), mean_images(dataset, labels)
    found, other, mean = (
        by_kind(each, labels, true, images, dataset) for each in (outcome.found, *controls)
    )
    return [
        {
            **{"kind": kind, **own},
            **{f"{name}_gain": own[name] - other[kind][name] for name in COMPARED},
            "psnr_over_mean": own["psnr"] - mean[kind]["psnr"],
        }
        for kind, own in found.items()
    ]


def by_kind(
    found: Tensor, labels: Tensor, true: Tensor, images: Images, dataset: ImageDataset
) -> dict[str, dict[str, float]]:
    """The mean scores of new images and of exemplars that have a reconstruction."""
    rows, columns = pair(found, labels, true, images.labels)
    pairs = found[rows], true[columns]
    near = identified(*pairs, images.labels[columns], dataset)
    each = pd.DataFrame({"psnr": psnr(*pairs), "ssim": ssim(*pairs), "identified": near.float()})
    each["kind"] = np.where(images.exemplar[columns], *KINDS)
    grouped = each.groupby("kind")
    means = grouped.mean().assign(images=grouped.size())
    return {str(kind): row.to_dict() for kind, row in means.iterrows()}


def recovered(runtime: ClientRuntime, upload: Upload) -> float:
    """The share of the labels of all steps that the gradient of the head gives away."""
    tensors = list(runtime.classifier.parameters())
    *_, weights, bias = split_like(upload.received, tensors)
    *_, by_weights, by_bias = split_like(upload.gradient, tensors)
    labels = upload.images.labels[torch.cat(upload.steps)]
    counts = recover_counts((weights, bias), (by_weights, by_bias), len(labels))
    return label_accuracy(counts, labels)


# --- all attacks


class Study(NamedTuple):
    """Scores, and for each case the first client's images beside their reconstructions."""

    rows: pd.DataFrame  # a row for each case, client and kind of image
    images: dict[Case, tuple[Pixels, Pixels]]  # true and found, in the same order


def study(
    setting: str,
    cases: Iterable[Case],
    clients: Sequence[int],
    attack: Attack,
    params: Params | None = None,
    seed: int = 0,
) -> Study:
    """The cases, which are in the order of their experiences, for some clients."""
    place, rows, shown = start(setting, params, seed, {}), [], {}
    for case in cases:
        train_until(place.run, case.experience, 0)
        worker = place.worker(case.method, case.batch_size)
        for client in clients:
            draw = generator(seed, client, case.experience, 0, "inversion")
            upload = place.upload(worker, client, case.images, case.noise)
            target, labels = plan_attack(upload, case)
            outcome = attack_uploads(worker.runtime, [target], labels, attack, draw)
            about = {**asdict(case), "client": client, "labels": recovered(worker.runtime, upload)}
            about |= {"loss": outcome.loss, "seconds": outcome.seconds}
            rows += [about | row for row in scores(worker.runtime, outcome, upload.images, draw)]
            if client == clients[0]:
                shown[case] = side_by_side(worker.runtime, outcome, upload.images)
    return Study(pd.DataFrame(rows), shown)


def side_by_side(runtime: ClientRuntime, outcome: Outcome, images: Images) -> tuple[Pixels, Pixels]:
    """True images and their reconstructions.  # uint8 [n, C, H, W] each"""
    true = pixels(runtime, images.values)
    rows, columns = pair(outcome.found, outcome.labels, true, images.labels)
    both = true[columns], outcome.found[rows]
    shown, found = ((255 * each).round().clamp(0, 255).byte().numpy() for each in both)
    return shown, found


def returning(
    setting: str,
    method: str,
    rounds: Sequence[int],
    clients: Sequence[int],
    attack: Attack,
    exemplars_per_class: int = 2,
    params: Params | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Exemplars that are in the uploads of several rounds, which the server inverts together.

    Every upload is one SGD step on new images and on all exemplars, as many of each. A row for
    each number of rounds, client, first round and kind of image. The rounds of an experience are
    divided into windows, so that the models of all rounds count equally at every number.
    """
    changes = {
        "memory.exemplars_per_class": exemplars_per_class,
        "setting.training.rounds": max(rounds),
    }
    place = start(setting, params, seed, changes)
    batch_size = exemplars_per_class * len(place.run.plan.clients[0][0].classes)
    worker = place.worker(method, batch_size)
    uploads: dict[int, list[Upload]] = {client: [] for client in clients}
    for round_ in range(max(rounds)):
        train_until(place.run, 1, round_)
        for client in clients:
            images = slice(round_ * batch_size, (round_ + 1) * batch_size)
            uploads[client].append(place.upload(worker, client, images))
    rows = []
    for count, client in product(rounds, clients):
        for first in range(0, max(rounds), count):
            window = uploads[client][first : first + count]
            draw = generator(seed, client, first, count, "returning")
            about = {"method": method, "rounds": count, "client": client, "first": first}
            found = joint_scores(worker.runtime, window, attack, draw)
            rows += [about | row for row in found]
    return pd.DataFrame(rows)


def joint_scores(
    runtime: ClientRuntime, uploads: Sequence[Upload], attack: Attack, draw: torch.Generator
) -> list[dict[str, Any]]:
    """The scores of images that explain several uploads together, an exemplar being one image."""
    images, places = distinct([upload.images for upload in uploads])
    targets = [
        Target(u.received, u.update, u.lr, [own[step] for step in u.steps], u.weights)
        for u, own in zip(uploads, places, strict=True)
    ]
    outcome = attack_uploads(runtime, targets, images.labels, attack, draw)
    cost = {"loss": outcome.loss, "seconds": outcome.seconds}
    return [cost | row for row in scores(runtime, outcome, images, draw)]


def summary(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """For each group the mean of every score over clients with its 95 % interval.

    `n` counts clients: the images of one upload are not independent. Several rows of a client are
    averaged first.
    """
    values = [name for name in SCORES if name in rows]
    grouped = rows.groupby([*by, "kind"], sort=False, dropna=False)
    found = []
    for key, group in grouped:
        clients = group.groupby("client")[[*values, "images", "seconds"]].mean()
        row = dict(zip([*by, "kind"], key, strict=True))
        row |= {"n": len(clients), "images": clients.images.mean()}
        row |= {"seconds": clients.seconds.mean()}
        for name in values:
            of = summarise(clients[name])
            row |= {name: of["mean"], f"{name}_low": of["low"], f"{name}_high": of["high"]}
        found.append(row)
    return pd.DataFrame(found)
