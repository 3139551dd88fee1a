"""FedL2P (Lee et al., 2023): a frozen network as published, or adapted to continual learning."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad
from torch.func import functional_call

from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.config.limits import NonNegative, NonNegativeInt, Positive, PositiveInt
from stamp_core.core.seeding import generator
from stamp_core.data.plan import Plan
from stamp_core.methods.base.method import (
    ClientRound,
    FedAvgParams,
    InitialStates,
    Log,
    Message,
    Method,
    Reply,
    State,
)
from stamp_core.models.flat import split_like
from stamp_core.results.records import tree_bytes
from workbench.methods.fedl2p.meta_networks import LayerStatistics, MetaNets, layer_statistics
from workbench.methods.fedl2p.normalisation import (
    Moments,
    mixed_normalisation,
    running_statistics,
    store_mixture,
)

HIGH = 100.0  # gradients of a loss above it are clipped to ±CLIP, as published
CLIP = 0.5
HELD_OUT = 0.2  # share of a client's images for the outer loss
NEUMANN_STEPS, NEUMANN_LR = 3, 0.1  # of the series for the inverse Hessian


@dataclass(frozen=True)
class FedL2PParams(FedAvgParams):
    """How clients personalise, and how the meta-networks learn it."""

    backbone: Literal["federated", "frozen"] = "federated"  # the network that is fine-tuned
    # rounds of FedAvg on the first tasks, which train a frozen network
    warm_rounds: PositiveInt = 5
    # Steps are batches. The published 3 epochs of outer steps with 15 epochs of inner steps each
    # are 708,750 batches a round for a client with 10,000 images. One outer step costs as much as
    # one to two client rounds of FedAvg on the settings digits and glyphs.
    outer_steps: NonNegativeInt = 1
    inner_steps: PositiveInt = 10  # of fine-tuning before each outer step
    ft_epochs: NonNegativeInt = 15  # of fine-tuning at evaluation
    finetune_lr: NonNegative = 0.001  # initial value of the learnt learning rates of fine-tuning
    meta_lr: NonNegative = 0.001  # learning rate of the outer steps, for the meta-networks
    hyper_lr: NonNegative = 0.0001  # learning rate of the outer steps, for the learnt ones
    clamp: Positive = 1.0  # of each number of a hypergradient


@dataclass
class FedL2PContext(StepContext):
    meta: Tensor  # [M], on the CPU


class FedL2P(Method):
    """Clients learn together how each of them fine-tunes: learning rates, shares of statistics.

    As published, a trained network is "frozen", only the meta-networks are sent, and there is no
    global model. "federated" is an adaptation: FedAvg goes on training the network, and each client
    round begins with outer steps on the meta-networks.
    """

    Params: ClassVar = FedL2PParams
    models: tuple[str, ...] = ("global", "personal", "local")
    fedavg_equivalent: ClassVar = {"outer_steps": 0}
    group = "personalised"
    graph_safe = True

    def __init__(self, params: FedL2PParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        fixed = runtime.training.buffers == "frozen"
        self.norms = () if fixed else runtime.classifier.norms
        self.nets = MetaNets(self.model.module, len(self.norms))
        self.frozen = params.backbone == "frozen"
        if self.frozen:
            self.models = ("personal",)

    def init_server(self, seed: int) -> State:
        return {
            **super().init_server(seed),
            "meta": self.nets.initial(seed, self.params.finetune_lr),
        }

    def initial_states(self, plan: Plan) -> InitialStates:
        return self.warm_up(plan) if self.frozen else super().initial_states(plan)

    def warm_up(self, plan: Plan) -> InitialStates:
        fedavg = Method(self.params, self.runtime)
        server = self.init_server(plan.seed)
        states: list[State] = [{} for _ in plan.clients]
        up = 0
        for round_ in range(self.params.warm_rounds):
            message = fedavg.broadcast(server, 0)
            replies = []
            for client, state in enumerate(states):
                round_id = RoundId(plan.seed, client, 0, round_)
                client_round = fedavg.client_round(round_id, plan, state, message)
                replies.append(fedavg.train_client(client_round))
            up += tree_bytes([reply.message for reply in replies])
            states = [reply.state for reply in replies]
            server = fedavg.aggregate(server, fedavg.seal(replies, Log()), Log())
        net = {name: server[name] for name in ("parameters", "buffers")}
        clients = [{**net, **state} for state in states]  # local buffers replace the server's
        messages = len(clients) * (self.params.warm_rounds + 1)  # the last one is the result
        down = messages * tree_bytes(fedavg.broadcast(server, 0))
        return InitialStates(server, clients, down, up)

    def broadcast(self, server: State, client: int) -> Message:
        net = {} if self.frozen else super().broadcast(server, client)
        return {**net, "meta": server["meta"]}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        averaged = server if self.frozen else super().aggregate(server, replies, log)
        replies = [reply for reply in replies if self.held_out(reply.samples)]
        if not replies:
            return averaged
        weights = [float(self.held_out(reply.samples)) for reply in replies]
        meta = self.runtime.average([reply.message["meta"] for reply in replies], weights)
        return {**averaged, "meta": meta}

    def held_out(self, samples: int) -> int:
        return int(HELD_OUT * samples)

    def start(self, client_round: ClientRound) -> FedL2PContext:
        return FedL2PContext(client_round.message["meta"])

    def receive(self, client_round: ClientRound) -> None:
        if self.frozen:
            self.model.load(client_round.state["parameters"], client_round.state["buffers"])
        else:
            super().receive(client_round)

    def train(self, client_round: ClientRound, context: FedL2PContext) -> list[Tensor]:
        with client_round.log.clock("meta"):
            losses = self.learn_meta(client_round, context)
        return losses if self.frozen else super().train(client_round, StepContext())

    def upload(self, client_round: ClientRound, context: FedL2PContext) -> Message:
        net = {} if self.frozen else super().upload(client_round, context)
        return {**net, "meta": context.meta}

    # --- the meta-networks

    def learn_meta(self, client_round: ClientRound, context: FedL2PContext) -> list[Tensor]:
        """Take the outer steps; their losses. The live model is restored after each."""
        losses = list[Tensor]()
        held, others = self.split_indices(client_round)
        if not len(held) or not self.params.outer_steps:
            return losses
        received = self.local_model(context)
        meta = context.meta.to(self.runtime.device)
        statistics = layer_statistics(self.runtime, self.norms, others)
        inner = self.runtime.endless_batches(client_round, others, "inner")
        outer = self.runtime.endless_batches(client_round, held, "outer")
        for _ in range(self.params.outer_steps):
            step, loss = self.outer_step(meta, statistics, inner, outer)
            self.model.load(*received)
            if loss.isfinite() and step.isfinite().all():
                meta = meta - step
                losses.append(loss)
            else:
                client_round.log.events.append("meta-networks: skipped a step that is not finite")
        self.log_meta(client_round.log, meta, statistics)
        context.meta = meta.cpu()
        return losses

    def split_indices(self, client_round: ClientRound) -> tuple[Tensor, Tensor]:
        """The held-out images, the same in all rounds of a task, and the others."""
        indices = client_round.indices
        draw = generator(client_round.seed, client_round.client, client_round.task, "held out")
        order = indices[torch.randperm(len(indices), generator=draw)]
        count = self.held_out(len(indices))
        return order[:count], order[count:]

    def log_meta(self, log: Log, meta: Tensor, statistics: LayerStatistics) -> None:
        beta, lrs = self.nets(meta, statistics)
        log.numbers |= {"lr": float(lrs.mean()), "smallest lr": float(lrs.min())}
        if self.norms:
            log.numbers["beta"] = float(beta.mean())
        if lrs.min() < 0:  # nothing prevents it, as published
            log.events.append("meta-networks: a learning rate is negative")

    def outer_step(
        self,
        meta: Tensor,
        statistics: LayerStatistics,
        inner: Iterator[Batch],
        outer: Iterator[Batch],
    ) -> tuple[Tensor, Tensor]:
        """The step to subtract from `meta`, and the loss on a held-out batch."""
        meta = meta.clone().requires_grad_()
        beta, lrs = self.nets(meta, statistics)
        net = self.reset_statistics()
        with mixed_normalisation(self.norms, net, beta.detach()):
            self.fine_tune(islice(inner, self.params.inner_steps - 1), lrs.detach())
            last = self.clipped_gradient(next(inner)).clone()
        theta = self.model.parameters.clone() - self.nets.expand(lrs) * last  # [P], of `meta`
        with mixed_normalisation(self.norms, net, beta):
            outer_loss = self.loss_at(theta, next(outer))
            inner_loss = self.loss_at(theta, next(inner))
        gradient = self.hypergradient(outer_loss, inner_loss, theta, meta)
        step_sizes = torch.full_like(gradient, self.params.meta_lr)
        step_sizes[-len(lrs) :] = self.params.hyper_lr
        gradient = gradient.clamp(-self.params.clamp, self.params.clamp)
        return step_sizes * gradient, outer_loss.detach()

    def hypergradient(self, outer: Tensor, inner: Tensor, theta: Tensor, meta: Tensor) -> Tensor:
        """The gradient of the outer loss with respect to `meta`.  # [M]

        As published: learning rates enter by the last inner step alone, with the opposite sign of
        that step's derivative where H is positive, and the Neumann series of (I - NEUMANN_LR H)^j
        lacks the factor NEUMANN_LR that would make it approach H^-1.
        """
        direct, vector = grad(outer, (meta, theta), retain_graph=True)
        (gradient,) = grad(inner, theta, create_graph=True)
        series = vector
        power = vector
        for _ in range(NEUMANN_STEPS):
            curved = grad(gradient, theta, power, retain_graph=True)[0]  # H power
            power = power - NEUMANN_LR * curved
            series = series + power
        (implicit,) = grad(gradient, meta, series)
        bn = self.nets.bn_size
        return torch.cat([direct[:bn] - implicit[:bn], -implicit[bn:]])

    def loss_at(self, theta: Tensor, batch: Batch) -> Tensor:
        module = self.model.module.eval()
        named = dict(module.named_parameters())
        values = dict(zip(named, split_like(theta, list(named.values())), strict=True))
        return F.cross_entropy(functional_call(module, values, (batch.images,)), batch.targets)

    # --- fine-tuning

    def load_personal_model(self, client_round: ClientRound) -> None:
        self.receive(client_round)
        indices = client_round.indices
        if not len(indices):
            return
        statistics = layer_statistics(self.runtime, self.norms, indices)
        with torch.no_grad():
            beta, lrs = self.nets(client_round.message["meta"].to(self.runtime.device), statistics)
        epochs = self.params.ft_epochs
        if not epochs or len(indices) == 1:  # no running statistics of its own
            beta = torch.zeros_like(beta)
        net = self.reset_statistics()
        steps = epochs * math.ceil(len(indices) / self.runtime.training.batch_size)
        batches = self.runtime.endless_batches(client_round, indices, "personal")
        with mixed_normalisation(self.norms, net, beta):
            self.fine_tune(islice(batches, steps), lrs)
        store_mixture(self.norms, net, beta)

    def reset_statistics(self) -> list[Moments]:
        """Reset running statistics to those of an untrained network; returns the former ones."""
        former = running_statistics(self.norms)
        if self.norms:
            self.model.buffers.copy_(self.runtime.untrained)
        return former

    def fine_tune(self, batches: Iterable[Batch], lrs: Tensor) -> None:
        """A step of SGD on the live model for each batch, with a learning rate for each tensor."""
        lr = self.nets.expand(lrs)  # [P]
        for batch in batches:
            self.model.parameters.sub_(self.clipped_gradient(batch).mul_(lr))

    def clipped_gradient(self, batch: Batch) -> Tensor:
        """The live gradient in training mode; zero where the loss is not finite.  # [P]"""
        self.runtime.start_step(len(batch))
        loss = F.cross_entropy(self.model.module(batch.images), batch.targets)
        loss.backward()
        limit = torch.where(loss > HIGH, CLIP, math.inf)  # of the device, which nobody waits for
        gradients = self.model.gradients.clamp_(-limit, limit)
        return gradients.masked_fill_(~(loss < math.inf), 0.0)
