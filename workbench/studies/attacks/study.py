"""The measurements: which uploads are inverted, and how near the images come to the true ones.

All methods are attacked in the same rounds of one run of STAMP without its coreset, whose uploads
differ from replay's by matching alone: all receive the same model, and have the same memory and
batches.
What is found on a client has a folder of its own: a killed campaign goes on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.config.params import Params
from stamp_core.core.atomic import atomic_folder
from stamp_core.core.seeding import generator
from stamp_core.engine.experiment import load_experiment
from stamp_core.engine.train import Run
from stamp_core.engine.worker import Worker
from workbench.studies.attacks.capture import Upload, capture, distinct, start_run, train_until
from workbench.studies.attacks.gradient_inversion import Attack, invert
from workbench.studies.attacks.scores import (
    COMPARED,
    Pixels,
    pixels,
    recovered,
    scores,
    side_by_side,
)

MATCHED = "stamp_without_coreset"  # the preset whose run is attacked
METHODS = ("fedavg", "replay", MATCHED)
EXEMPLARS = 2  # of a class, where they return
NOISE = (1e-3, 1e-2)  # multipliers of the norm of the update
SCORES = (*COMPARED, *(f"{name}_gain" for name in COMPARED), "psnr_over_mean", "labels")


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
        return slice(self.steps and self.steps * self.batch_size)

    @property
    def name(self) -> str:
        steps = f"{self.steps} step{'s' * (self.steps > 1)} of" if self.steps else "all steps of"
        images = f"{self.batch_size} image{'s' * (self.batch_size > 1)}"
        text = f"{self.method}, task {self.experience + 1}: {steps} {images}"
        text += ", weights not known" * (self.weights == "equal")
        return text + f", noise {self.noise:g}" * (self.noise > 0)


SIZES = [(1, 1), (4, 1), (16, 1), (4, 4), (16, 4), (16, None)]  # of batches, with their steps


def grid() -> list[Case]:
    """The cases of the study. Before there is a memory all methods send the same."""
    first = [Case("fedavg", 0, *size) for size in SIZES]
    later = [Case(method, 1, *size) for method in METHODS for size in SIZES]
    unknown = [replace(case, weights="equal") for case in later[-len(SIZES) :][:3]]
    single = [case for case in (*first, *later) if case.batch_size == 1]
    noisy = [replace(case, noise=noise) for case in single for noise in NOISE]
    return [*first, *later, *unknown, *noisy]


@dataclass(frozen=True, eq=False)
class AttackedRun:
    """A run that is trained as far as needed, and the parameters of other methods."""

    run: Run
    params: Params | None

    def worker(self, method: str, batch_size: int) -> Worker:
        changes = {"setting.training.batch_size": batch_size, "setting.training.epochs": 1}
        setting = self.run.experiment.setting.name
        experiment = load_experiment(setting, method, self.params, changes)
        return Worker(experiment, self.run.worker.plans, "cpu")

    def upload(self, worker: Worker, client: int, images: slice, noise: float = 0.0) -> Upload:
        experience, round_ = divmod(self.run.state["next"], self.run.training.rounds)
        round_id = RoundId(self.run.seed, client, experience, round_)
        state = self.run.state["clients"][client]
        message = worker.method.broadcast(self.run.state["server"], client)
        return capture(worker, round_id, state, message, images, noise)


def start(
    setting: str, params: Params | None, seed: int, changes: Mapping[str, Any]
) -> AttackedRun:
    """A run of the setting that has not trained yet."""
    plain = {"setting.diagnostics": {}, **changes}
    return AttackedRun(start_run(load_experiment(setting, MATCHED, params, plain), seed), params)


def plan_attack(upload: Upload, case: Case) -> tuple[Upload, Tensor]:
    """The upload as the server takes it, and the labels of the images that it looks for."""
    labels, steps, weights = upload.images.labels, upload.steps, upload.weights
    if case.weights == "equal":
        weights = [torch.full_like(each, 1 / len(each)) for each in weights]
    if case.steps is None:  # as many images as in the first batch stand for all
        labels, steps, weights = labels[steps[0]], [torch.arange(len(steps[0]))], weights[:1]
    return replace(upload, steps=steps, weights=weights), labels


def reconstruct(
    runtime: ClientRuntime,
    uploads: Sequence[Upload],
    labels: Tensor,
    attack: Attack,
    draw: torch.Generator,
) -> Tensor:
    """The images [M] with these labels that explain the uploads, with values in 0..1."""
    noise = torch.randn(len(labels), *runtime.shape, generator=draw)
    limits = -runtime.offset, 255 * runtime.scale - runtime.offset
    return pixels(runtime, invert(runtime.classifier, uploads, labels, noise, limits, attack))


class Study(NamedTuple):
    """Scores, and for each case the first client's images beside their reconstructions."""

    rows: pd.DataFrame  # a row for each case, client and kind of image
    images: dict[str, tuple[Pixels, Pixels]]  # true and found, by the names of cases


def study(
    setting: str,
    cases: Iterable[Case],
    clients: Sequence[int],
    attack: Attack,
    params: Params | None = None,
    seed: int = 0,
) -> Study:
    """The cases in the order of their experiences, each for some clients."""
    attacked, rows, shown = start(setting, params, seed, {}), [], {}
    for case in sorted(cases, key=lambda case: case.experience):
        train_until(attacked.run, case.experience, 0)
        worker = attacked.worker(case.method, case.batch_size)
        for client in clients:
            draw = generator(seed, client, case.experience, 0, "inversion")
            upload = attacked.upload(worker, client, case.images, case.noise)
            taken, labels = plan_attack(upload, case)
            found = reconstruct(worker.runtime, [taken], labels, attack, draw)
            about = {"name": case.name, **asdict(case), "client": client}
            about |= {"labels": recovered(worker.runtime, upload)}
            outcome = worker.runtime, found, labels, upload.images
            rows += [about | row for row in scores(*outcome, draw)]
            if client == clients[0]:
                shown[case.name] = side_by_side(*outcome)
    return Study(pd.DataFrame(rows), shown)


# --- exemplars that return


def returning(
    setting: str,
    methods: Sequence[str],
    rounds: Sequence[int],
    clients: Sequence[int],
    attack: Attack,
    params: Params | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Whether an exemplar that is in the uploads of several rounds leaks more than a new image.

    Every upload is one SGD step on new images and on all exemplars, as many of each; the server
    inverts those of several rounds together. A row for each method, number of rounds, client, first
    round and kind of image. The rounds of an experience are divided into windows, so that the
    models of all rounds count equally at every number.
    """
    most = max(rounds)
    changes = {"memory.exemplars_per_class": EXEMPLARS, "setting.training.rounds": most}
    attacked = start(setting, params, seed, changes)
    batch_size = EXEMPLARS * len(attacked.run.plan.clients[0][0].classes)
    workers = {method: attacked.worker(method, batch_size) for method in methods}
    uploads: dict[tuple[str, int], list[Upload]] = {pair: [] for pair in product(methods, clients)}
    for round_ in range(most):
        train_until(attacked.run, 1, round_)
        images = slice(round_ * batch_size, (round_ + 1) * batch_size)
        for (method, client), kept in uploads.items():
            kept.append(attacked.upload(workers[method], client, images))
    rows = []
    for count, ((method, client), kept) in product(rounds, uploads.items()):
        for first in range(0, most, count):
            draw = generator(seed, client, first, count, "returning")
            about = {"method": method, "rounds": count, "client": client, "first": first}
            window = kept[first : first + count]
            found = joint_scores(workers[method].runtime, window, attack, draw)
            rows += [about | row for row in found]
    return pd.DataFrame(rows)


def joint_scores(
    runtime: ClientRuntime, uploads: Sequence[Upload], attack: Attack, draw: torch.Generator
) -> list[dict[str, Any]]:
    """The scores of images that explain several uploads together, an exemplar being one image."""
    images, places = distinct([upload.images for upload in uploads])
    joint = [
        replace(upload, steps=[own[step] for step in upload.steps])
        for upload, own in zip(uploads, places, strict=True)
    ]
    found = reconstruct(runtime, joint, images.labels, attack, draw)
    return scores(runtime, found, images.labels, images, draw)


# --- files


def save_attacks(folder: Path, found: Study, returning: pd.DataFrame) -> None:
    """Write what was found on one client."""
    arrays: dict[str, Any] = {
        f"{name} {k}": pixels
        for k, pair in enumerate(found.images.values())
        for name, pixels in zip(("true", "found"), pair, strict=True)
    }
    with atomic_folder(folder) as scratch:
        found.rows.drop(columns="name").to_csv(scratch / "cases.csv", index=False)
        returning.to_csv(scratch / "returning.csv", index=False)
        np.savez_compressed(scratch / "images.npz", **arrays)


def load_attacks(folder: Path) -> tuple[Study, pd.DataFrame]:
    """What was found on all clients that have a folder, by their numbers, and `returning` found."""
    clients = sorted(int(each.name) for each in folder.iterdir() if each.name.isdigit())
    if not clients:
        raise FileNotFoundError(f"{folder} has no client's attacks; `make privacy` makes them")
    cases, returning = (
        pd.concat([pd.read_csv(folder / f"{k}/{name}.csv") for k in clients], ignore_index=True)
        for name in ("cases", "returning")
    )
    cases["name"] = [_name(row) for _, row in cases.iterrows()]
    with np.load(folder / f"{clients[0]}/images.npz") as arrays:
        names = dict.fromkeys(cases.name[cases.client == clients[0]])
        images = {name: (arrays[f"true {k}"], arrays[f"found {k}"]) for k, name in enumerate(names)}
    return Study(cases, images), returning


def _name(row: pd.Series) -> str:
    steps = None if pd.isna(row.steps) else int(row.steps)
    return Case(row.method, row.experience, row.batch_size, steps, row.weights, row.noise).name
