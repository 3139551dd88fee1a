"""FedWeIT (Yoon et al., 2021): federated base weights, sparse weights of each task, attention."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NotRequired, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.batches import Batch
from stamp_core.client.runtime import ClientRuntime
from stamp_core.client.scoring import accuracies, predict, tests_of_tasks
from stamp_core.config.limits import Fraction, NonNegative
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Log, Message, Reply, State
from stamp_core.models.flat import FlatSGD
from stamp_core.results.records import SCORINGS
from workbench.methods.base.task_server import TaskContext, TaskServer, pack_bits, unpack_bits
from workbench.methods.fedweit.decomposed import (
    Channels,
    Decomposed,
    PastWeights,
    to_dense,
    to_sparse,
    true_indices,
)


@dataclass(frozen=True)
class FedWeITParams(FedAvgParams):
    """How weights are decomposed, what is sent of them, and what holds those of past tasks."""

    adaptive: NonNegative | None = 1 / 3  # A starts at this share of B; null: nothing is decomposed
    sparsity: Fraction = 0.3  # share of channels not uploaded, and one more of each tensor
    # weight of |A|; elements of A up to this size are neither sent nor used
    lambda1: NonNegative = 1e-3
    # weight of half the squared change of the weights of past tasks
    lambda2: NonNegative = 100.0
    # of m and A; of B in a client's first task; added to training.weight_decay, which all have
    weight_decay: NonNegative = 1e-4
    # Biases, normalisation and head: averaged as by FedAvg, or each task's own, which no client
    # sends, as published. Then there is no global model.
    head: Literal["shared", "task"] = "shared"


class LearntTask(TypedDict):
    """What a task needs besides B."""

    mask: Tensor  # [C], m
    adaptive: Tensor  # [N], A
    foreign: Tensor  # [N], the sum of alpha_k KB_k
    rest: Tensor  # [R]
    buffers: Tensor


class FedWeITState(TypedDict):
    experiences: list[int]
    tasks: dict[str, LearntTask]
    base: Tensor  # [N], B
    rest: NotRequired[Tensor]  # [R], that a task starts with, unless it is sent
    attention: NotRequired[Tensor]  # [T, K], alpha of each decomposed tensor
    target: NotRequired[Tensor]  # [N], of `PastWeights`


@dataclass
class FedWeITContext(TaskContext):
    weights: Decomposed  # of the current task
    sgd: FlatSGD  # of its parts
    past: PastWeights | None  # what holds the weights of past tasks
    first_task: bool


class FedWeIT(TaskServer):
    """Weights B * sigmoid(m) + A + sum_k alpha_k KB_k, of which the server averages B.

    Decomposed are the encoder's weights of at least two axes. Of B a client sends the channels with
    the largest |m|; after a task it sends A, and with the next task it receives the last A of every
    client as the knowledge base KB. All parts are trained by the setting's SGD, at
    its learning rate or one of their own: B and A move together, so weights move further in a step.

    The global model is B (mask 1, no A) with the averaged rest. The personal model of a task has
    the task's own m, A, alpha KB and rest: which one is used is known from the task, in every
    scoring. A task that comes again goes on with its m and A. Only the current A has an L1 penalty:
    with one, past weights would move by at most lambda1 / lambda2 more.
    """

    Params: ClassVar = FedWeITParams
    models: tuple[str, ...] = ("global", "personal", "local")
    fedavg_equivalent: ClassVar = {"adaptive": None}
    group = "continual"

    def __init__(self, params: FedWeITParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        named = list(runtime.classifier.named_parameters())
        self.channels = Channels(
            [value.shape for _, value in named],
            [
                params.adaptive is not None
                and name.startswith("encoder.")
                and name.endswith("weight")
                and value.ndim > 1
                for name, value in named
            ],
        )
        if params.head == "task":
            self.models = ("personal", "local")

    def init_server(self, seed: int) -> State:
        server: State = super().init_server(seed)
        server["base"] = self.channels.pick(server["parameters"])  # [N], B as it is sent
        server["rest"] = self.channels.pick(server["parameters"], decomposed=False)  # [R]
        server["knowledge"] = {}  # the last A of each client, sparse: its "values" and "places"
        return server

    def broadcast(self, server: State, client: int) -> Message:
        """B, with zeros where no client has sent it; the shared rest; once per task KB."""
        message = super().broadcast(server, client)
        del message["parameters"]
        message["base"] = server["base"]
        if self.params.head == "shared":
            message["rest"] = server["rest"]
        return message

    def announcement(self, server: State) -> Any:
        return server["knowledge"]

    def averaged_vectors(self) -> tuple[str, ...]:
        return (*self.shared_buffers(), *(("rest",) if self.params.head == "shared" else ()))

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """Means of B over the clients that sent a channel; an unsent one is broadcast as zeros."""
        state = super().aggregate(server, replies, log)
        trained = [reply for reply in replies if reply.samples]
        if not trained:
            return state
        base, sent = self.mean_base(server, trained)
        mean = self.channels.join(base, state["rest"])
        if self.params.server_lr != 1:
            mean = torch.lerp(server["parameters"], mean, self.params.server_lr)
        log.numbers["channels nobody kept"] = float((~sent).sum())
        new = {
            f"{reply.client} {name}": reply.message[name]
            for reply in trained
            for name in ("values", "places")
            if name in reply.message
        }
        return {
            **state,
            "parameters": mean,
            "base": self.channels.pick(mean) * self.channels.expand(sent),
            "rest": self.channels.pick(mean, decomposed=False),
            "knowledge": {**server["knowledge"], **new},
        }

    def mean_base(self, server: State, replies: list[Reply]) -> tuple[Tensor, Tensor]:
        """The unweighted mean of what was sent of B, and which channels were.  # [N], bool [C]"""
        total = torch.zeros(self.channels.weights, dtype=torch.float64)
        count = torch.zeros(self.channels.count)
        for reply in replies:
            kept = unpack_bits(reply.message["kept"], self.channels.count)
            indices = true_indices(self.channels.expand(kept))
            total.index_add_(0, indices, reply.message["base"].double())
            count += kept
        before = self.channels.pick(server["parameters"])
        counts = self.channels.expand(count)
        return torch.where(counts > 0, total / counts, before).to(before.dtype), count > 0

    def init_client(self, client: int, server: State) -> State:
        state: FedWeITState = {"experiences": [], "tasks": {}, "base": server["base"]}
        if self.params.head == "task":
            state["rest"] = server["rest"]
        return state

    def start(self, client_round: ClientRound) -> FedWeITContext:
        announced = self.announced(client_round)
        weights = self.weights(client_round, self.knowledge(announced))
        weights.compose(self.model.parameters)
        sgd = self.runtime.new_sgd(weights.flat)
        first_task = not _past_tasks(client_round)
        return FedWeITContext(announced, weights, sgd, self.past_weights(client_round), first_task)

    def receive(self, client_round: ClientRound) -> None:
        state: FedWeITState = client_round.state
        self.load_base(client_round, state["tasks"].get(str(client_round.task), state))

    def load_base(self, client_round: ClientRound, own: LearntTask | FedWeITState) -> None:
        """Load B, without mask or A, and the received rest or the own one."""
        received = client_round.message.get("rest")
        rest = own["rest"] if received is None else received
        parameters = self.channels.join(self.merged_base(client_round), rest)
        message = {**client_round.message, "parameters": parameters}
        self.runtime.load_received(message, client_round.state)

    def merged_base(self, client_round: ClientRound) -> Tensor:
        """The received B; the client's own where that is exactly 0.  # [N]"""
        received = client_round.message["base"]
        return torch.where(received == 0, client_round.state["base"], received)

    def knowledge(self, announced: Message) -> Tensor:
        """The knowledge base that was received with the task, in the order of clients.  # [K, N]"""
        clients = sorted(int(name.split()[0]) for name in announced if name.endswith(" values"))
        knowledge = torch.empty(len(clients), self.channels.weights)
        for row, client in zip(knowledge, clients, strict=True):
            sparse = announced[f"{client} values"], announced[f"{client} places"]
            row.copy_(to_dense(*sparse, len(row)))
        return knowledge

    def weights(self, client_round: ClientRound, knowledge: Tensor) -> Decomposed:
        draw = client_round.generator
        base = self.merged_base(client_round)
        if own := client_round.state["tasks"].get(str(client_round.task)):
            mask = own["mask"]
            adaptive = own["adaptive"]
        else:
            mask = self.channels.draw_masks(draw("mask"))
            adaptive = base * (self.params.adaptive or 0)
        if client_round.first:
            size = len(self.channels.blocks), len(knowledge)
            attention = torch.randn(size, generator=draw("attention"))
            attention = attention / max(1, len(knowledge)) ** 0.5
        else:
            attention = client_round.state["attention"]
        parts = (base, mask, adaptive, attention, knowledge)
        *trained, knowledge = (part.to(self.runtime.device) for part in parts)
        return Decomposed(self.channels, trained, knowledge)

    def past_weights(self, client_round: ClientRound) -> PastWeights | None:
        """What holds the weights of past tasks near those of before this task; None without any."""
        past = _past_tasks(client_round)
        size = self.runtime.lr * self.params.lambda2
        if not past or not size:
            return None
        squares = torch.stack([task["mask"].sigmoid().square() for task in past.values()]).sum(0)
        squares = self.channels.expand(squares).to(self.runtime.device)
        return PastWeights(_target(client_round).to(self.runtime.device), squares, size)

    def loss(self, batch: Batch, context: FedWeITContext) -> Tensor:
        context.weights.compose(self.model.parameters)
        return super().loss(batch, context)

    def correct_gradient(self, batch: Batch, context: FedWeITContext) -> None:
        """One SGD step of B, m, A and alpha, with decay of m and A, of B in the first task."""
        weights = context.weights
        weights.backward(self.model.gradients)
        base, mask, adaptive, _ = weights.gradients
        decay = self.params.weight_decay
        mask.add_(weights.mask, alpha=decay)
        adaptive.add_(weights.adaptive, alpha=decay)
        adaptive.add_(weights.adaptive.sign(), alpha=self.params.lambda1)
        if context.first_task:
            base.add_(weights.base, alpha=decay)
        context.sgd.step()
        if context.past is not None:
            context.past.retain(weights.base)

    def finish(self, client_round: ClientRound, context: FedWeITContext) -> None:
        context.weights.compose(self.model.parameters)

    def update_state(self, client_round: ClientRound, context: FedWeITContext) -> State:
        weights = context.weights
        parts = {"base": weights.base, "attention": weights.attention}
        if context.past is not None:
            parts["target"] = context.past.target
        tasks = self.moved_tasks(client_round, context.past)
        if len(client_round.indices):
            tasks[str(client_round.task)] = self.learnt_task(weights)
        return {
            **super().update_state(client_round, context),
            **{name: part.cpu().clone() for name, part in parts.items()},
            "tasks": tasks,
            "experiences": client_round.recorded,
        }

    def moved_tasks(
        self, client_round: ClientRound, past: PastWeights | None
    ) -> dict[str, LearntTask]:
        tasks = {**client_round.state["tasks"]}
        if past is None:
            return tasks
        moved = _target(client_round) - past.target.cpu()
        for name, task in _past_tasks(client_round).items():
            gate = self.channels.expand(task["mask"].sigmoid())
            tasks[name] = {**task, "adaptive": task["adaptive"] + gate * moved}
        return tasks

    def learnt_task(self, weights: Decomposed) -> LearntTask:
        return {
            "mask": weights.mask.cpu().clone(),
            "adaptive": weights.adaptive.cpu().clone(),
            "foreign": weights.foreign().cpu(),
            "rest": self.channels.pick(self.model.parameters, decomposed=False).cpu(),
            "buffers": self.model.buffers.cpu().clone(),
        }

    def upload(self, client_round: ClientRound, context: FedWeITContext) -> Message:
        """The kept channels of B, which these are, the rest; in the last round of a task also A."""
        weights = context.weights
        kept = self.channels.largest(weights.mask.cpu().abs(), self.params.sparsity)
        base = weights.base.cpu()[true_indices(self.channels.expand(kept))]
        message = {"base": base, "kept": pack_bits(kept)}
        if self.params.head == "shared":
            message["rest"] = self.channels.pick(self.model.parameters, decomposed=False).cpu()
        if self.shares_buffers():
            message["buffers"] = self.model.buffers.cpu().clone()
        if client_round.last and len(client_round.indices) and self.channels.weights:
            sparse = to_sparse(weights.adaptive.cpu(), self.params.lambda1)
            share = len(sparse["values"]) / self.channels.weights
            client_round.log.numbers["share of A sent"] = share
            message |= sparse
        return message

    def personal_scores(self, client_round: ClientRound) -> Tensor:
        """Scores of each task by its own model, of other tasks by the received B and rest.

        Each model is told the task: only the scoring that is told it too is defined.
        # [scorings, 1, T]
        """
        state: FedWeITState = client_round.state
        base = self.merged_base(client_round)
        self.load_base(client_round, state)
        tasks = range(client_round.plan.tasks)
        scores = self.scores_on(client_round, [t for t in tasks if str(t) not in state["tasks"]])
        for name, own in state["tasks"].items():
            gate = self.channels.expand(own["mask"].sigmoid())
            adaptive = F.hardshrink(own["adaptive"], self.params.lambda1)
            theta = base * gate + adaptive + own["foreign"]
            self.model.load(self.channels.join(theta, own["rest"]), own["buffers"])
            task = [int(name)]
            scores[:, :, task] = self.scores_on(client_round, task)[:, :, task]
        scores[: SCORINGS.index("task")] = torch.nan
        return scores

    def scores_on(self, client_round: ClientRound, tasks: list[int]) -> Tensor:
        """The live model's scores of some tasks; others mean nothing.  # [scorings, 1, T]"""
        about = client_round.plan, [client_round.client], client_round.experience
        sets = tests_of_tasks(self.runtime, *about, tasks)
        logits = predict(self.runtime, sets, nearest_mean=False).logits
        return accuracies(self.runtime, *about, logits)


def _past_tasks(client_round: ClientRound) -> dict[str, LearntTask]:
    """The client's learnt tasks but the current one, by their names."""
    state: FedWeITState = client_round.state
    return {n: task for n, task in state["tasks"].items() if n != str(client_round.task)}


def _target(client_round: ClientRound) -> Tensor:
    """The B at which no past task has moved: the one of before this task, or its target.  # [N]"""
    target: Tensor = client_round.state["base" if client_round.first else "target"]
    return target
