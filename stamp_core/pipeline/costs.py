"""The cost of each method: a few of its client rounds, timed beside FedAvg's on random images."""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.config.schema import Diagnostics, Setting, Training
from stamp_core.core.devices import synchronise
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.split import Plan
from stamp_core.engine.experiment import Experiment
from stamp_core.methods.base.method import (
    ClientRound,
    DivergedError,
    FedAvgParams,
    Log,
    Method,
    State,
)
from stamp_core.models.networks import Classifier
from stamp_core.pipeline.stand_in import cut_dataset, cut_plan
from stamp_core.pipeline.workload import count_evaluated, count_images, count_steps

BOUND = 90.0  # seconds for all methods together
GENEROUS = 2.0  # times its share of the time that is left, for one method
STEP = 0.2  # seconds of FedAvg's step at most: batches are halved until then
LEAST_BATCH = 4  # images
PER_CLASS = 5  # images of a task at least: as many as memories keep
STEPS = 3  # of local training in a client round with a past; in those before it is one
REPLIES = 2  # that are aggregated; of more, a server's work is in proportion
ROUNDS = 2  # of an experience: its first and its last
FORWARD_SHARE = 1 / 3  # of a training step's work

Step = tuple[float, int]  # seconds, and images with gradients


class OutOfTimeError(Exception):
    """A method takes longer than it may be timed for."""


class TimedRuntime(ClientRuntime):
    """A workspace that times steps of local training, takes few, and stops at a deadline."""

    def __init__(self, setting: Setting, dataset: ImageDataset, device: str) -> None:
        super().__init__(setting, dataset, device)
        self.deadline, self.limit = math.inf, STEPS  # of batches
        self.steps, self.skipped = list[Step](), 0.0

    def clock(self) -> float:
        """The time when all work so far is done; an error if that is too late."""
        if (now := clock(self.device)) > self.deadline:
            raise OutOfTimeError
        return now

    def normalise(self, images: Tensor) -> Tensor:
        """As in every workspace; the loops of all methods come by here."""
        self.clock()
        return super().normalise(images)

    def batch_sizes(self, images: int) -> list[int]:
        """Those of the first batches."""
        return super().batch_sizes(images)[: self.limit]

    def epochs(
        self, round_id: RoundId, images: Tensor, labels: Tensor, indices: Tensor, of: str = ""
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The first batches of local training; the first epoch where `of` a memory."""
        batches = super().epochs(round_id, images, labels, indices, of)
        limit = -(-len(indices) // self.training.batch_size) if of else self.limit
        start, before = self.clock(), Classifier.differentiated
        for batch in islice(batches, limit):
            yield batch
            seconds, count = self.clock() - start, Classifier.differentiated - before
            if of:
                self.skipped += (self.training.epochs - 1) * seconds
            else:
                self.steps.append((seconds, count))
            start, before = self.clock(), Classifier.differentiated


def clock(device: torch.device) -> float:
    """The seconds of the GPU, or of this process alone, as others may share the cores."""
    if device.type == "cpu":
        return time.process_time()
    synchronise(device)
    return time.perf_counter()


@dataclass(frozen=True)
class Round:
    """What one round took."""

    steps: list[Step]  # of local training
    rest: float  # seconds of the client round besides them
    images: int  # with gradients in that rest
    counted: int  # SGD steps, as the client reports them
    server: float  # seconds of the aggregation


@dataclass(frozen=True)
class Timing:
    """What a method took: the first and the last round of each experience."""

    rounds: list[list[Round]]  # [E][2]
    plain: Step  # FedAvg's, just before: a machine's speed drifts
    personal: tuple[float, int] = (0.0, 0)  # seconds and images of making a personal model

    @property
    def fixed(self) -> bool:
        """Whether the method takes steps of its own, as many in every round."""
        return not self.rounds[-1][-1].steps

    @property
    def counted(self) -> int:
        """The SGD steps of such a round."""
        return max(1, self.rounds[-1][-1].counted)

    @property
    def step(self) -> Step:
        """The median step, once there is something to remember."""
        if self.fixed:
            return min(each.rest for each in self.rounds[-1]) / self.counted, 0
        return median_step([step for each in self.rounds[-1] for step in each.steps])


def median_step(steps: Sequence[Step]) -> Step:
    """The median seconds and images of some steps."""
    return statistics.median(s for s, _ in steps), statistics.median_low([n for _, n in steps])


@dataclass(frozen=True)
class Scale:
    """What relates the timed rounds to a run of the setting."""

    step: float  # seconds of FedAvg's step on a whole batch
    image: float  # likewise of an image
    share: float  # images of a client's task, as a multiple of those that are there to be timed
    steps: int  # of all clients and experiences
    evaluated: int  # images, in all experiences
    clients: int
    experiences: int
    rounds: int  # of an experience
    workers: int

    def hours(self, timing: Timing, ratio: float = 0.0) -> float:
        """The hours of a method's run."""
        each, relative = self.clients * self.experiences, self.relative_step(timing, ratio)
        steps, rest = self.steps, self._rest_seconds(timing)
        if timing.fixed:
            steps, rest = each * self.rounds * timing.counted, 0.0
        training = steps * relative * self.step + each * (rest + self._whole(*timing.personal))
        evaluation = self.evaluated * self.image * FORWARD_SHARE
        server = self.experiences * self._server_seconds(timing)
        return ((training + evaluation) / self.workers + server) / 3600

    def relative_step(self, timing: Timing, ratio: float = 0.0) -> float:
        """The seconds of a method's step on a whole batch, as a multiple of FedAvg's.

        A step on few images takes longer than their share, so further images are counted apart.
        Exemplars in a batch become more with each task, up to `ratio` times the new images.
        """
        (seconds, images), (plain, batch) = timing.step, timing.plain
        if timing.fixed:
            return seconds / plain
        more, most = images - batch, max(images - batch, ratio * batch)
        mean = sum(min(past * more, most) for past in range(self.experiences)) / self.experiences
        return (seconds - more * self.image) / plain + (mean if ratio else more) / batch

    def _rest_seconds(self, timing: Timing) -> float:
        """The seconds of a client's experience besides its steps, on average.

        What an experience adds to the one before is due to one more past task.
        """
        first, last = (self._experience(*(r.rest for r in timing.rounds[e])) for e in (0, -1))
        whole = self._experience(*(self._whole(r.rest, r.images) for r in timing.rounds[0]))
        return whole + (self.experiences - 1) / 2 * max(0.0, last - first)

    def _server_seconds(self, timing: Timing) -> float:
        """The server's seconds in an experience: of its rounds, and what its last one adds.

        That is seen in the first experience: after the last one servers have nothing left to do.
        """
        first, last = (each.server for each in timing.rounds[0])
        each = min(first, *(round_.server for round_ in timing.rounds[-1]))
        return self.rounds * each * self.clients / REPLIES + max(0.0, last - first)

    def _experience(self, first: float, last: float) -> float:
        """The seconds of an experience by those of its first and its last round."""
        return last if self.rounds == 1 else first + last + (self.rounds - 2) * min(first, last)

    def _whole(self, seconds: float, images: int) -> float:
        """Seconds in which so many of a task's images had gradients, for as many as it has."""
        return seconds + images * (self.share - 1) * self.image


def find_scale(
    training: Training,
    plan: Plan,
    dataset: ImageDataset,
    work: ClientRuntime,
    seconds: float,
    workers: int,
) -> Scale:
    """The scale of a plan, of whose first two tasks the images in `work` were timed."""
    timed = len(work.y_train) / len(plan.clients[0][:2])
    return Scale(
        step=seconds,
        image=seconds / training.batch_size,
        share=float(count_images(plan, dataset).mean()) / timed,
        steps=count_steps(plan, dataset, training),
        evaluated=count_evaluated(plan, dataset),
        clients=len(plan.clients),
        experiences=plan.experiences,
        rounds=training.rounds,
        workers=workers,
    )


def timed_workspace(
    setting: Setting, plan: Plan, dataset: ImageDataset, device: str, seconds: float
) -> tuple[TimedRuntime, Plan]:
    """A workspace for short rounds, and their plan; FedAvg's step takes so many seconds.

    Batches are halved until a step is short: what methods cost beside FedAvg changes little by it.
    """
    cut, batch = cut_plan(plan), setting.training.batch_size
    while batch > LEAST_BATCH and seconds * batch > STEP * setting.training.batch_size:
        batch //= 2
    classes = min(len(task.classes) for task in cut.clients[0])
    images = cut_dataset(dataset, plan, max(PER_CLASS, -(-(STEPS + 1) * batch // classes)))
    training = replace(setting.training, batch_size=batch, rounds=ROUNDS)
    short = replace(setting, split=cut.split, training=training, diagnostics=Diagnostics())
    return TimedRuntime(short, images, device), cut


def time_methods(
    experiments: Sequence[Experiment], work: TimedRuntime, plan: Plan
) -> tuple[Timing, dict[str, Timing]]:
    """What plain FedAvg took, and each method that could be timed within the bound."""
    start = clock(work.device)
    fedavg = time_method(Method(FedAvgParams(), work), work, plan)
    fedavg = replace(fedavg, plain=fedavg.step)
    now = clock(work.device)
    least, end, found = GENEROUS * (now - start), now + BOUND, dict[str, Timing]()
    for place, experiment in enumerate(experiments):
        now = clock(work.device)
        share = GENEROUS * (end - now) / (len(experiments) - place + 1)
        work.deadline = min(end, now + max(least, share))
        try:
            method = experiment.kind(experiment.params, work)
            found[experiment.method] = time_method(method, work, plan)
        except (OutOfTimeError, DivergedError):
            continue
    return fedavg, found


def time_method(method: Method, work: TimedRuntime, plan: Plan) -> Timing:
    """What one client's rounds took, and aggregating its reply as if it were from several."""
    plain = _time_plain(work, plan)
    server, states, *_ = method.initial_states(plan)
    state, rounds, last = next(iter(states)), list[list[Round]](), plan.experiences - 1
    for experience in range(plan.experiences):
        rounds.append([])
        work.limit = STEPS if experience == last else 1
        for round_ in range(ROUNDS):
            address = RoundId(plan.seed, 0, experience, round_, round_ == ROUNDS - 1)
            client_round = ClientRound(address, plan, state, method.broadcast(server, 0))
            server, state, took = _time_round(method, work, client_round, server)
            rounds[-1].append(took)
    if "personal" not in method.models:
        return Timing(rounds, plain)
    client_round = ClientRound(address, plan, state, method.broadcast(server, 0))
    start, before = work.clock(), Classifier.differentiated
    method.load_personal_model(client_round)
    return Timing(rounds, plain, (work.clock() - start, Classifier.differentiated - before))


def _time_plain(work: TimedRuntime, plan: Plan) -> Step:
    """FedAvg's median step."""
    fedavg, address = Method(FedAvgParams(), work), RoundId(plan.seed, 0, plan.experiences - 1, 0)
    message = fedavg.broadcast(fedavg.init_server(plan.seed), 0)
    work.steps, work.limit = [], STEPS + 1
    fedavg.train_client(ClientRound(address, plan, {}, message))
    return median_step(work.steps[1:])  # the first one may be slow


def _time_round(
    method: Method, work: TimedRuntime, client_round: ClientRound, server: State
) -> tuple[State, State, Round]:
    """The states of server and client after a round, and what it took."""
    work.steps, work.skipped = [], 0.0
    start, before = work.clock(), Classifier.differentiated
    reply = method.train_client(client_round)
    rest = work.clock() - start - sum(seconds for seconds, _ in work.steps) + work.skipped
    images = Classifier.differentiated - before - sum(count for _, count in work.steps)
    who = method.participants(list(range(REPLIES)), server)
    replies, start = [replace(reply, client=client) for client in who], work.clock()
    server = method.aggregate(server, replies, Log())
    took = Round(work.steps, rest, images, reply.sgd_steps, work.clock() - start)
    return server, reply.state, took
