"""The measurements: which uploads are inverted, and how near the images come to the true ones.

All methods are attacked in the same rounds of one run of STAMP. They receive the same model and
have the same memory and batches, so their uploads differ by what a method does with them alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from stamp_core.client.runtime import RoundId
from stamp_core.config.params import Params
from stamp_core.core.seeding import generator
from stamp_core.engine.experiment import load_experiment
from stamp_core.engine.train import Run
from stamp_core.engine.worker import Worker
from workbench.studies.attacks.capture import Upload, capture, start_run, train_until
from workbench.studies.attacks.inversion import Attack, Target
from workbench.studies.attacks.outcomes import (
    COMPARED,
    Pixels,
    attack_uploads,
    recovered,
    scores,
    side_by_side,
)

TRAINED = "stamp"  # the preset whose run is attacked
METHODS = ("fedavg", "replay", "stamp")
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
        """The part of a task's images that the client trains on."""
        return slice(self.steps and self.steps * self.batch_size)

    @property
    def name(self) -> str:
        """How tables and figures name it."""
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
    noisy = [
        replace(case, noise=noise)
        for case in (*first, *later)
        for noise in NOISE
        if case.batch_size == 1
    ]
    return [*first, *later, *unknown, *noisy]


@dataclass(frozen=True, eq=False)
class AttackedRun:
    """A run that is trained as far as needed, and the parameters of other methods."""

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
        return capture(worker, round_id, state, message, images, noise)


def start(
    setting: str, params: Params | None, seed: int, changes: Mapping[str, Any]
) -> AttackedRun:
    """A run of the setting that has not trained yet."""
    plain = {"setting.diagnostics": {}, **changes}
    return AttackedRun(start_run(load_experiment(setting, TRAINED, params, plain), seed), params)


def plan_attack(upload: Upload, case: Case) -> tuple[Target, Tensor]:
    """What the server wants to reproduce, and the labels of the images that it looks for."""
    steps, weights = upload.steps, upload.weights
    labels = upload.images.labels
    if case.weights == "equal":
        weights = [torch.full_like(each, 1 / len(each)) for each in weights]
    if case.steps is None:  # as many images as in the first batch stand for all
        labels, steps, weights = labels[steps[0]], [torch.arange(len(steps[0]))], weights[:1]
    return Target(upload.received, upload.update, upload.lr, steps, weights), labels


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
    """The cases in the order of their experiences, each for some clients."""
    attacked, rows, shown = start(setting, params, seed, {}), [], {}
    for case in sorted(cases, key=lambda case: case.experience):
        train_until(attacked.run, case.experience, 0)
        worker = attacked.worker(case.method, case.batch_size)
        for client in clients:
            draw = generator(seed, client, case.experience, 0, "inversion")
            upload = attacked.upload(worker, client, case.images, case.noise)
            target, labels = plan_attack(upload, case)
            outcome = attack_uploads(worker.runtime, [target], labels, attack, draw)
            about = {"case": case, "name": case.name, **asdict(case), "client": client}
            about |= {"labels": recovered(worker.runtime, upload)}
            about |= {"loss": outcome.loss, "seconds": outcome.seconds}
            rows += [about | row for row in scores(worker.runtime, outcome, upload.images, draw)]
            if client == clients[0]:
                shown[case] = side_by_side(worker.runtime, outcome, upload.images)
    return Study(pd.DataFrame(rows), shown)
