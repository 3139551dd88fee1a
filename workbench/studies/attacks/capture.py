"""Uploads of a run: what the server sees and, for scoring, what only the client knows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stamp_core.client.batches import Batch
from stamp_core.client.runtime import RoundId
from stamp_core.config.decode import invalid
from stamp_core.config.schema import Privacy
from stamp_core.core.seeding import generator
from stamp_core.data.split import make_plan
from stamp_core.engine.executor import SerialExecutor
from stamp_core.engine.experiment import Experiment
from stamp_core.engine.privacy import PURPOSE, add_noise
from stamp_core.engine.train import Run
from stamp_core.engine.worker import Worker
from stamp_core.methods.base.method import Message, Method, State
from stamp_core.methods.stamp import StampContext
from stamp_core.methods.stamp.temporal import batch_groups

ALL = slice(None)


@dataclass(frozen=True, eq=False)
class Images:
    """Images as a client knows them."""

    values: Tensor  # [M, C, H, W], normalised
    labels: Tensor  # [M]
    exemplar: Tensor  # bool [M]

    def __getitem__(self, places: Tensor) -> "Images":
        return Images(self.values[places], self.labels[places], self.exemplar[places])


@dataclass(frozen=True, eq=False)
class Upload:
    """One client round: the server sees the first three fields, the attack has the others."""

    received: Tensor  # [P]
    update: Tensor  # [P], received - sent
    lr: float
    images: Images  # M different ones
    steps: list[Tensor]  # the places of each SGD step's images: int64 [N]
    weights: list[Tensor]  # of these images' gradients in the gradient of the step: [N]

    @property
    def gradient(self) -> Tensor:
        """The mean gradient of an SGD step, as the server computes it from the update.  # [P]"""
        return self.update / (self.lr * len(self.steps))


def start_run(experiment: Experiment, seed: int) -> Run:
    """A run in this process before its first round, without a checkpoint."""
    torch.set_num_threads(1)  # sums are split by threads: their number would change last digits
    plan = make_plan(experiment.setting.split, experiment.dataset(), seed)
    worker = Worker(experiment, {seed: plan}, "cpu")
    if worker.runtime.has_features:
        raise invalid(
            "data", dict(experiment.setting.data), "images: scores of features say nothing"
        )
    return Run(experiment, plan, worker, SerialExecutor(worker), None)


def train_until(run: Run, experience: int, round_: int) -> None:
    """Train a run until a round is next."""
    rounds = run.training.rounds
    while run.state["next"] < experience * rounds + round_:
        run.train_round(*divmod(run.state["next"], rounds))


def capture(
    worker: Worker,
    round_id: RoundId,
    state: State,
    message: Message,
    images: slice = ALL,
    noise: float = 0.0,
) -> Upload:
    """The upload of a client round on some of the task's images, in the order of the experience."""
    method = worker.method
    require_plain_sgd(method)
    client_round = method.client_round(round_id, worker.plans[round_id.seed], state, message)
    draw = generator(round_id.seed, round_id.client, round_id.experience, "attacked")
    chosen = torch.randperm(len(client_round.indices), generator=draw)[images].sort().values
    client_round = replace(client_round, indices=client_round.indices[chosen])
    method.receive(client_round)
    context = method.start(client_round)
    batches = list(method.batches(client_round, context))
    method.train(client_round, context)  # on the same batches: every draw has its address
    method.finish(client_round, context)
    update = message["parameters"] - method.upload(client_round, context)["parameters"]
    private = Privacy(float(update.norm()), noise, "local")
    draw = round_id.generator(PURPOSE)
    update = add_noise(worker.runtime, private, update, 1, draw)
    known, places = distinct([images_of(batch) for batch in batches])
    weights = list(image_weights(batches, step_coefficients(method, context)))
    return Upload(message["parameters"], update, worker.runtime.training.lr, known, places, weights)


def require_plain_sgd(method: Method) -> None:
    """Refuse what the attack does not simulate."""
    training = method.runtime.training
    for name in ("momentum", "weight_decay"):
        if value := getattr(training, name):
            raise invalid(f"training.{name}", value, "0 where uploads are inverted")
    if value := getattr(method.params, "prototype", 0.0):
        raise invalid("prototype", value, "0 where uploads are inverted")
    if len(method.model.buffers):
        raise invalid("network.norm", "batch", "another where uploads are inverted")


def images_of(batch: Batch) -> Images:
    """The images of a batch."""
    return Images(batch.images, batch.targets, torch.arange(len(batch)) >= batch.new)


def distinct(parts: Sequence[Images]) -> tuple[Images, list[Tensor]]:
    """The different images of all parts, and the places of each part's among them: int64 [N]."""
    every = Images(*(torch.cat([getattr(p, n) for p in parts]) for n in vars(parts[0])))
    places = every.values.flatten(1).unique(dim=0, return_inverse=True)[1]
    owners = torch.empty(int(places.max()) + 1, dtype=torch.int64)
    owners[places] = torch.arange(len(places))  # of equal images any one
    return every[owners], list(places.split([len(part.labels) for part in parts]))


def step_coefficients(method: Method, context: object) -> list[Tensor]:
    """What STAMP multiplied the gradients of each step's K groups with; else nothing.  # [K]"""
    matches = context.matches if isinstance(context, StampContext) else []
    return [method.params.temporal.lr * match.coefficients[0] for match in matches]


def image_weights(batches: list[Batch], coefficients: list[Tensor]) -> Iterator[Tensor]:
    """The weight of each image's gradient in the gradient of its batch.  # [N]"""
    if not coefficients:
        yield from (torch.full((len(batch),), 1 / len(batch)) for batch in batches)
        return
    for batch, of_groups in zip(batches, coefficients, strict=True):
        weights = torch.empty(len(batch))
        for group, coefficient in zip(batch_groups(batch), of_groups.tolist(), strict=True):
            weights[group] = coefficient / len(group)
        yield weights
