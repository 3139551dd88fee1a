"""FedWeIT (Yoon et al., 2021): federated base weights, sparse weights of each task, attention."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime
from stamp_core.client.scoring import score
from stamp_core.config.decode import require_at_least, require_fraction
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Log, Message, Reply, State
from stamp_core.methods.base.task_server import TaskServer, pack_bits, unpack_bits
from stamp_core.models.decomposed import Channels, Decomposed, PastWeights
from stamp_core.models.flat import FlatSGD
from stamp_core.results.records import SCORINGS


@dataclass(frozen=True)
class FedWeITParams(FedAvgParams):
    """How weights are decomposed, what is sent of them, and what holds those of past tasks."""

    adaptive: float | None = 1 / 3  # A starts at this share of B; null: nothing is decomposed
    sparsity: float = 0.3  # share of each tensor's channels that is not uploaded
    lambda1: float = 1e-3  # weight of |A|; elements of A up to this size are neither sent nor used
    lambda2: float = 100.0  # weight of half the squared change of the weights of past tasks
    weight_decay: float = 1e-4  # of m and A; of B in a client's first task
    # "decay": the loss gives the mask no gradient, as in the released code
    mask: Literal["trained", "decay"] = "trained"
    retroactive: bool = True  # A of past tasks is trained too; false: as in the released code
    # Biases, normalisation and head: averaged as by FedAvg, or each task's own, which no client
    # sends, as published. Then there is no global model.
    head: Literal["shared", "task"] = "shared"

    def __post_init__(self) -> None:
        """Refuse negative weights, and a sparsity that leaves no channel to compare with."""
        super().__post_init__()
        require_fraction(self, "sparsity")
        require_at_least(self, 0, "lambda1", "lambda2", "weight_decay")
        if self.adaptive is not None:
            require_at_least(self, 0, "adaptive")


class FedWeIT(TaskServer):
    """Weights B * sigmoid(m) + A + sum_k alpha_k KB_k, of which the server averages B.

    Decomposed are the encoder's weights of at least two axes. Of B a client sends the channels with
    the largest |m|; after a task it sends A, and with the next task it receives the last A of every
    client as the knowledge base KB. All parts are trained by the setting's SGD.

    The global model is B (mask 1, no A) with the averaged rest. The personal model of a task has
    the task's own m, A, alpha KB and rest: which one is used is known from the task, in every
    scoring. A task that comes again goes on with its m and A. Only the current A has an L1 penalty:
    with one, past weights would move by at most lambda1 / lambda2 more.
    """

    Params: ClassVar = FedWeITParams
    models: tuple[str, ...] = ("global", "personal", "local")
    fedavg_equivalent: ClassVar[dict[str, Any]] = {"adaptive": None}
    group = "continual"

    def __init__(self, params: FedWeITParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        named = list(runtime.classifier.named_parameters())
        self.channels = Channels(
            [value.shape for _, value in named],
            [params.adaptive is not None and _is_weight(*each) for each in named],
        )
        if params.head == "task":
            self.models = ("personal", "local")

    # --- the server

    def init_server(self, seed: int) -> State:
        """The initial model, also as B and the rest, and an empty knowledge base."""
        server = super().init_server(seed)
        return {**server, **self.split(server["parameters"]), "knowledge": {}}

    def split(self, parameters: Tensor) -> State:
        """The two parts of a vector of parameters: what is decomposed ("base"), and the rest."""
        rest = self.channels.gather(parameters, decomposed=False)
        return {"base": self.channels.gather(parameters), "rest": rest}

    def broadcast(self, server: State, client: int) -> Message:
        """B, with zeros where no client has sent it; the shared rest; once per task KB."""
        message = super().broadcast(server, client)
        del message["parameters"]
        message["base"] = server["base"]
        if self.params.head == "shared":
            message["rest"] = server["rest"]
        return message

    def announcement(self, server: State) -> Message:
        """The knowledge base: the last A of every client, "values" and "places" by client."""
        return {
            f"{client} {name}": value
            for client, sparse in server["knowledge"].items()
            for name, value in sparse.items()
        }

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The mean of each channel of B over the clients that sent it, the rest as by FedAvg.

        A channel that nobody sent stays in the global model, but is sent as zeros.
        """
        trained = [reply for reply in replies if reply.samples]
        if not trained:
            return super().aggregate(server, replies, log)
        mean, sent = self.mean_base(server, trained)
        dense = [self.with_parameters(server, reply, mean) for reply in replies]
        state = super().aggregate(server, dense, log)
        state |= self.split(state["parameters"])
        state["base"].mul_(self.channels.expand(sent))
        log.numbers["channels nobody kept"] = float((~sent).sum())
        new = {
            str(reply.client): {name: reply.message[name] for name in ("values", "places")}
            for reply in trained
            if "values" in reply.message
        }
        return {**state, "knowledge": {**server["knowledge"], **new}}

    def mean_base(self, server: State, replies: list[Reply]) -> tuple[Tensor, Tensor]:
        """The unweighted mean of what was sent of B, and which channels were.  # [N], bool [C]"""
        total = torch.zeros(self.channels.weights, dtype=torch.float64)
        count = torch.zeros(self.channels.count)
        for reply in replies:
            kept = unpack_bits(reply.message["kept"], self.channels.count)
            places = _true_places(self.channels.expand(kept))
            total.index_add_(0, places, reply.message["base"].double())
            count += kept
        before, counts = self.channels.gather(server["parameters"]), self.channels.expand(count)
        return torch.where(counts > 0, total / counts, before).to(before.dtype), count > 0

    def with_parameters(self, server: State, reply: Reply, base: Tensor) -> Reply:
        """The reply with a dense vector of parameters, of which B is the mean already."""
        rest = {**server, **reply.message}["rest"]
        return replace(
            reply, message={**reply.message, "parameters": self.channels.join(base, rest)}
        )

    # --- a client

    def init_client(self, client: int, server: State) -> State:
        """The initial B and, unless it is sent, the rest that a task starts with."""
        state = {"experience": -1, "base": server["base"], "tasks": {}}
        return {**state, "rest": server["rest"]} if self.params.head == "task" else state

    def receive(self, client_round: ClientRound) -> None:
        """Load the weights of the current task; their parts are in `scratch`."""
        state, message = client_round.state, client_round.message
        base = self.merged_base(client_round)
        own = state["tasks"].get(str(client_round.task), state)  # of the task, or to start with
        rest = {**own, **message}["rest"]  # as received, where it is shared
        dense = {**message, "parameters": self.channels.join(base, rest)}
        super().receive(replace(client_round, message=dense))
        client_round.scratch["weights"] = self.weights(client_round, base)
        client_round.scratch["past"] = self.past_weights(client_round)
        self.load_theta(client_round)

    def merged_base(self, client_round: ClientRound) -> Tensor:
        """The received B; the client's own where that is exactly 0.  # [N]"""
        received = client_round.message["base"]
        return torch.where(received == 0, client_round.state["base"], received)

    def weights(self, client_round: ClientRound, base: Tensor) -> Decomposed:
        """The trained parts of the current task's weights: its own, or those it starts with."""
        state, address = client_round.state, client_round.round_id
        own = state["tasks"].get(str(client_round.task))
        if own is None:
            mask = self.channels.draw_masks(address.generator("mask"))
            own = {"mask": mask, "adaptive": base * (self.params.adaptive or 0)}
        knowledge = self.knowledge(client_round)
        if _starts(client_round):
            draw, count = address.generator("attention"), len(knowledge)
            attention = torch.randn(count, generator=draw) / max(1, count) ** 0.5
        else:
            attention = state["attention"]
        parts = (base, own["mask"], own["adaptive"], attention, knowledge)
        *trained, knowledge = (part.to(self.runtime.device) for part in parts)
        return Decomposed(self.channels, trained, knowledge)

    def knowledge(self, client_round: ClientRound) -> Tensor:
        """The knowledge base that was received with the task, in the order of clients.  # [K, N]"""
        announced = client_round.scratch["announced"]
        clients = sorted(int(name.split()[0]) for name in announced if name.endswith(" values"))
        knowledge = torch.empty(len(clients), self.channels.weights)
        for row, client in zip(knowledge, clients, strict=True):
            sparse = announced[f"{client} values"], announced[f"{client} places"]
            row.copy_(_dense(*sparse, len(row)))
        return knowledge

    def past_weights(self, client_round: ClientRound) -> PastWeights | None:
        """What holds the weights of past tasks near those of before this task; None without any."""
        past, size = _past_tasks(client_round), self.runtime.training.lr * self.params.lambda2
        if not past or not size:
            return None
        squares = torch.stack([task["mask"].sigmoid().square() for task in past.values()]).sum(0)
        target = client_round.state["base" if _starts(client_round) else "target"]
        vectors = (target, self.channels.expand(squares))
        target, squares = (vector.to(self.runtime.device) for vector in vectors)
        return PastWeights(target, squares, size, self.params.retroactive)

    def load_theta(self, client_round: ClientRound) -> None:
        """Compose the weights of the current task in the live model."""
        client_round.scratch["weights"].compose(self.model.parameters)

    def train(self, client_round: ClientRound) -> list[Tensor]:
        """Local SGD on the live model, whose decomposed weights are composed for every step."""
        weights: Decomposed = client_round.scratch["weights"]
        client_round.scratch["sgd"] = FlatSGD(weights.flat, self.runtime.training)
        losses = super().train(client_round)
        self.load_theta(client_round)
        return losses

    def loss(self, client_round: ClientRound, images: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy at the composed weights."""
        self.load_theta(client_round)
        return super().loss(client_round, images, labels)

    def correct_gradient(self, client_round: ClientRound) -> None:
        """One SGD step of B, m, A and alpha; theta itself is composed again before it is used."""
        scratch = client_round.scratch
        weights: Decomposed = scratch["weights"]
        weights.backward(self.model.gradients)
        self.add_penalties(weights, first=not _past_tasks(client_round))
        scratch["sgd"].step()
        past: PastWeights | None = scratch["past"]
        if past is not None:
            past.retain(weights.base)

    def add_penalties(self, weights: Decomposed, first: bool) -> None:
        """Add lambda1 |A|_1 + weight_decay / 2 (|A|^2 + |m|^2), in the first task also of |B|^2."""
        base, mask, adaptive, _ = weights.gradients
        decay = self.params.weight_decay
        if self.params.mask == "decay":
            mask.zero_()
        mask.add_(weights.mask, alpha=decay)
        adaptive.add_(weights.adaptive, alpha=decay)
        adaptive.add_(weights.adaptive.sign(), alpha=self.params.lambda1)
        if first:
            base.add_(weights.base, alpha=decay)

    def update_state(self, client_round: ClientRound) -> State:
        """B, alpha, the target of past tasks, and the records of all learnt tasks."""
        state, scratch = super().update_state(client_round), client_round.scratch
        weights: Decomposed = scratch["weights"]
        parts = {"base": weights.base, "attention": weights.attention}
        tasks = self.past_records(client_round)
        if len(client_round.indices):
            tasks[str(client_round.task)] = self.task_record(weights)
        if scratch["past"] is not None:
            parts["target"] = scratch["past"].target
        own = {name: part.cpu().clone() for name, part in parts.items()}
        return {**state, **own, "tasks": tasks, "experience": client_round.experience}

    def past_records(self, client_round: ClientRound) -> State:
        """The records of all learnt tasks; A_i of past ones have moved against the target."""
        tasks, past = dict(client_round.state["tasks"]), client_round.scratch["past"]
        if past is None or not self.params.retroactive:
            return tasks
        before = client_round.state["base" if _starts(client_round) else "target"]
        moved = before - past.target.cpu()
        for name, task in _past_tasks(client_round).items():
            gate = self.channels.expand(task["mask"].sigmoid())
            tasks[name] = {**task, "adaptive": task["adaptive"] + gate * moved}
        return tasks

    def task_record(self, weights: Decomposed) -> State:
        """What a task needs besides B: m, A, the sum of alpha_k KB_k, the rest and the buffers."""
        model = self.model
        parts = {
            "mask": weights.mask,
            "adaptive": weights.adaptive,
            "foreign": weights.foreign(),
            "rest": self.channels.gather(model.parameters, decomposed=False),
            "buffers": model.buffers,
        }
        return {name: part.cpu().clone() for name, part in parts.items()}

    def upload(self, client_round: ClientRound) -> Message:
        """The kept channels of B, which these are, the rest; in the last round of a task also A."""
        model, weights = self.model, client_round.scratch["weights"]
        kept = self.channels.largest(weights.mask.cpu().abs(), self.params.sparsity)
        base = weights.base.cpu()[_true_places(self.channels.expand(kept))]
        message = {"base": base, "kept": pack_bits(kept)}
        if self.params.head == "shared":
            message["rest"] = self.channels.gather(model.parameters, decomposed=False).cpu()
        if self.shares_buffers():
            message["buffers"] = model.buffers.cpu().clone()
        if client_round.last and len(client_round.indices) and self.channels.weights:
            sparse = _sparse(weights.adaptive.cpu(), self.params.lambda1)
            client_round.log.numbers["share of A sent"] = (
                len(sparse["values"]) / self.channels.weights
            )
            message |= sparse
        return message

    # --- evaluation

    def personal_scores(self, client_round: ClientRound) -> Tensor:
        """Scores of each task by its own model, of other tasks by the received B and rest.

        Each model is told the task: only the scoring that is told it too is defined.
        # [scorings, 1, T]
        """
        state, message = client_round.state, client_round.message
        base, rest = self.merged_base(client_round), {**state, **message}["rest"]
        buffers = state.get("buffers", message.get("buffers", self.runtime.untrained))
        scores = self.score(client_round, base, rest, buffers)
        for name, own in state["tasks"].items():
            gate = self.channels.expand(own["mask"].sigmoid())
            adaptive = F.hardshrink(own["adaptive"], self.params.lambda1)
            theta = base * gate + adaptive + own["foreign"]
            task = [int(name)]
            scores[:, :, task] = self.score(client_round, theta, own["rest"], own["buffers"])[
                :, :, task
            ]
        scores[: SCORINGS.index("task")] = torch.nan
        return scores

    def score(
        self, client_round: ClientRound, theta: Tensor, rest: Tensor, buffers: Tensor
    ) -> Tensor:
        """The accuracies of a model on all tasks of the client.  # [scorings, 1, T]"""
        address = client_round.round_id
        self.model.load(self.channels.join(theta, rest), buffers)
        return score(self.runtime, client_round.plan, [address.client], address.experience)


def _is_weight(name: str, value: Tensor) -> bool:
    """Whether a parameter of the classifier is decomposed."""
    return name.startswith("encoder.") and name.endswith("weight") and value.ndim > 1


def _starts(client_round: ClientRound) -> bool:
    """Whether the client has completed no round of this experience yet."""
    started: bool = client_round.state["experience"] == client_round.experience
    return not started


def _past_tasks(client_round: ClientRound) -> State:
    """The records of the client's learnt tasks but the current one, by their names."""
    tasks = client_round.state["tasks"].items()
    return {name: task for name, task in tasks if name != str(client_round.task)}


def _true_places(mask: Tensor) -> Tensor:
    """The indices at which a mask is true; numpy finds them in an eighth of torch's time."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def _sparse(vector: Tensor, threshold: float) -> Message:
    """The values above a threshold in size, and their places: bits or, if fewer bytes, indices."""
    mask = vector.abs() > threshold
    indices, bits = _true_places(mask), pack_bits(mask)
    places = indices.int() if len(indices) * torch.int32.itemsize < len(bits) else bits
    return {"values": vector[indices], "places": places}


def _dense(values: Tensor, places: Tensor, size: int) -> Tensor:
    """The vector that `_sparse` was given, with zeros for what was left out.  # [size]"""
    bits = places.dtype == torch.uint8
    indices = _true_places(unpack_bits(places, size)) if bits else places.long()
    return values.new_zeros(size).index_copy_(0, indices, values)
