"""FedL2P (Lee et al., 2023): a frozen network as published, or adapted to continual learning."""

from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd import grad

from stamp_core.client import personalisation as personal
from stamp_core.client.personalisation import BatchIterator, LayerStatistics, endless_batches
from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.config.decode import require_above, require_at_least, require_fraction
from stamp_core.core.seeding import generator
from stamp_core.data.split import Plan
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
from stamp_core.results.records import tree_bytes


@dataclass(frozen=True)
class FedL2PParams(FedAvgParams):
    """How clients personalise, and how the meta-networks learn it."""

    backbone: Literal["federated", "frozen"] = "federated"
    warm_rounds: int = 5  # rounds of FedAvg on the first tasks, which train a frozen network
    # Steps are batches. The published 3 epochs of outer steps with 15 epochs of inner steps each
    # are 708,750 batches a round for a client with 10,000 images. One outer step costs as much as
    # one to two client rounds of FedAvg on the settings digits and glyphs.
    outer_steps: int = 1
    inner_steps: int = 10
    ft_epochs: int = 15  # of fine-tuning at evaluation
    held_out: float = 0.2  # share of a client's images for the outer loss
    lr: float = 0.001  # initial value of the learnt learning rates of fine-tuning
    meta_lr: float = 0.001  # learning rate of the outer steps, for the meta-networks
    hyper_lr: float = 0.0001  # learning rate of the outer steps, for the learnt ones
    clamp: float = 1.0  # of each number of a hypergradient
    neumann_steps: int = 3
    neumann_lr: float = 0.1

    def __post_init__(self) -> None:
        """Refuse parameters outside their ranges."""
        super().__post_init__()
        require_at_least(self, 0, "outer_steps", "ft_epochs", "lr", "meta_lr", "hyper_lr")
        require_at_least(self, 0, "neumann_steps", "neumann_lr")
        require_at_least(self, 1, "inner_steps", "warm_rounds")
        require_above(self, 0, "clamp", "held_out")
        require_fraction(self, "held_out")


class FedL2P(Method):
    """Clients learn together how each of them fine-tunes: learning rates, shares of statistics.

    As published, a trained network is "frozen", only the meta-networks are sent, and there is no
    global model. "federated" is an adaptation: FedAvg goes on training the network, and each client
    round begins with outer steps on the meta-networks.
    """

    Params: ClassVar = FedL2PParams
    models: tuple[str, ...] = ("global", "personal", "local")
    fedavg_equivalent: ClassVar[dict[str, Any]] = {"outer_steps": 0}
    group = "personalised"
    captures = True

    def __init__(self, params: FedL2PParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        fixed = runtime.training.buffers == "frozen"
        self.norms = () if fixed else runtime.classifier.norms
        self.nets = personal.MetaNets(runtime.model.module, len(self.norms))
        self.frozen = params.backbone == "frozen"
        if self.frozen:
            self.models = ("personal",)

    def init_server(self, seed: int) -> State:
        """The initial network and meta-networks."""
        return {**super().init_server(seed), "meta": self.nets.initial(seed, self.params.lr)}

    def initial_states(self, plan: Plan) -> InitialStates:
        """The initial states, after a warm-up where the network is frozen."""
        return self.warm_up(plan) if self.frozen else super().initial_states(plan)

    def warm_up(self, plan: Plan) -> InitialStates:
        """Initial states with a network that FedAvg has trained on the first tasks."""
        fedavg, server, up = Method(self.params, self.runtime), self.init_server(plan.seed), 0
        clients: list[State] = [{} for _ in plan.clients]
        for round_ in range(self.params.warm_rounds):
            message, replies = fedavg.broadcast(server, 0), []
            for client, state in enumerate(clients):
                round_id = RoundId(plan.seed, client, 0, round_)
                replies.append(fedavg.train_client(ClientRound(round_id, plan, state, message)))
            up += tree_bytes([reply.message for reply in replies])
            clients = [reply.state for reply in replies]
            server = fedavg.aggregate(server, replies, Log())
        net = {name: server[name] for name in ("parameters", "buffers")}
        clients = [{**net, **state} for state in clients]  # local buffers replace the server's
        messages = len(clients) * (self.params.warm_rounds + 1)  # the last one is the result
        return InitialStates(
            server, clients, messages * tree_bytes(fedavg.broadcast(server, 0)), up
        )

    def broadcast(self, server: State, client: int) -> Message:
        """The meta-networks and, unless it is frozen, the network."""
        net = {} if self.frozen else super().broadcast(server, client)
        return {**net, "meta": server["meta"]}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """Meta-networks weighted by held-out images; FedAvg's network unless it is frozen."""
        averaged = server if self.frozen else super().aggregate(server, replies, log)
        replies = [reply for reply in replies if self.held_out(reply.samples)]
        if not replies:
            return averaged
        weights = [float(self.held_out(reply.samples)) for reply in replies]
        meta = self.runtime.average([reply.message["meta"] for reply in replies], weights)
        return {**averaged, "meta": meta}

    def held_out(self, samples: int) -> int:
        """The number of held-out images."""
        return int(self.params.held_out * samples)

    def receive(self, client_round: ClientRound) -> None:
        """Load the client's frozen network, or the received one."""
        if self.frozen:
            self.model.load(client_round.state["parameters"], client_round.state["buffers"])
        else:
            super().receive(client_round)

    def train(self, client_round: ClientRound) -> list[Tensor]:
        """Outer steps; then, unless it is frozen, local training of the received network."""
        with client_round.log.clock("meta"):
            client_round.scratch["meta"], losses = self.learn_meta(client_round)
        return losses if self.frozen else super().train(client_round)

    def upload(self, client_round: ClientRound) -> Message:
        """The client's meta-networks and, unless it is frozen, the network."""
        net = {} if self.frozen else super().upload(client_round)
        return {**net, "meta": client_round.scratch["meta"]}

    def learn_meta(self, client_round: ClientRound) -> tuple[Tensor, list[Tensor]]:
        """The meta-networks after the outer steps, and their losses; the live model is restored."""
        runtime, losses, (held, others) = (
            self.runtime,
            list[Tensor](),
            self.split_indices(client_round),
        )
        if not len(held) or not self.params.outer_steps:
            return client_round.message["meta"], losses
        received = runtime.model.parameters.clone(), runtime.model.buffers.clone()
        meta = client_round.message["meta"].to(runtime.device)
        statistics = personal.layer_statistics(runtime, self.norms, others)
        inner = endless_batches(runtime, client_round.round_id, others, "inner")
        outer = endless_batches(runtime, client_round.round_id, held, "outer")
        for _ in range(self.params.outer_steps):
            step, loss = self.outer_step(meta, statistics, inner, outer)
            runtime.model.load(*received)
            if loss.isfinite() and step.isfinite().all():
                meta = meta - step
                losses.append(loss)
            else:
                client_round.log.events.append("meta-networks: skipped a step that is not finite")
        self.log_meta(client_round.log, meta, statistics)
        return meta.cpu(), losses

    def split_indices(self, client_round: ClientRound) -> tuple[Tensor, Tensor]:
        """The held-out images, the same in all rounds of a task, and the others."""
        round_id, count = client_round.round_id, self.held_out(len(client_round.indices))
        draw = generator(round_id.seed, round_id.client, client_round.task, "held out")
        order = client_round.indices[torch.randperm(len(client_round.indices), generator=draw)]
        return order[:count], order[count:]

    def log_meta(self, log: Log, meta: Tensor, statistics: LayerStatistics) -> None:
        """Log the client's learning rates and beta."""
        beta, lrs = self.nets(meta, statistics)
        log.numbers |= {"lr": float(lrs.mean()), "smallest lr": float(lrs.min())}
        if self.norms:
            log.numbers["beta"] = float(beta.mean())
        if lrs.min() < 0:  # nothing prevents it, as published
            log.events.append("meta-networks: a learning rate is negative")

    def outer_step(
        self, meta: Tensor, statistics: LayerStatistics, inner: BatchIterator, outer: BatchIterator
    ) -> tuple[Tensor, Tensor]:
        """The step to subtract from `meta`, and the loss on a held-out batch."""
        runtime, meta = self.runtime, meta.clone().requires_grad_()
        beta, lrs = self.nets(meta, statistics)
        net = self.reset_statistics()
        with personal.mixed_normalisation(self.norms, net, beta.detach()):
            self.fine_tune(islice(inner, self.params.inner_steps - 1), lrs.detach())
            last = personal.clipped_gradient(runtime, *next(inner)).clone()
        theta = runtime.model.parameters.clone() - self.nets.expand(lrs) * last  # [P], of `meta`
        with personal.mixed_normalisation(self.norms, net, beta):
            outer_loss = personal.loss_at(runtime, theta, *next(outer))
            inner_loss = personal.loss_at(runtime, theta, *next(inner))
        gradient = self.hypergradient(outer_loss, inner_loss, theta, meta)
        step_sizes = torch.full_like(gradient, self.params.meta_lr)
        step_sizes[-len(lrs) :] = self.params.hyper_lr
        gradient = gradient.clamp(-self.params.clamp, self.params.clamp)
        return step_sizes * gradient, outer_loss.detach()

    def hypergradient(self, outer: Tensor, inner: Tensor, theta: Tensor, meta: Tensor) -> Tensor:
        """The gradient of the outer loss with respect to `meta`.  # [M]

        As published: learning rates enter by the last inner step alone, with the opposite sign of
        that step's derivative where H is positive, and the series lacks the factor neumann_lr that
        would make it approach H^-1.
        """
        params, bn = self.params, self.nets.bn_size
        direct, vector = grad(outer, (meta, theta), retain_graph=True)
        (gradient,) = grad(inner, theta, create_graph=True)
        steps, lr = params.neumann_steps, params.neumann_lr
        series = personal.neumann_series(gradient, theta, vector, steps, lr)
        (implicit,) = grad(gradient, meta, series)
        return torch.cat([direct[:bn] - implicit[:bn], -implicit[bn:]])

    def load_personal_model(self, client_round: ClientRound) -> None:
        """Load the network, fine-tuned on the current task with the meta-networks' settings."""
        self.receive(client_round)
        indices = self.train_indices(client_round)
        if not len(indices):
            return
        statistics = personal.layer_statistics(self.runtime, self.norms, indices)
        with torch.no_grad():
            beta, lrs = self.nets(client_round.message["meta"].to(self.runtime.device), statistics)
        epochs = self.params.ft_epochs
        if not epochs or len(indices) == 1:  # no running statistics of its own
            beta = torch.zeros_like(beta)
        net, address = self.reset_statistics(), client_round.round_id
        batches = personal.epoch_batches(self.runtime, address, indices, "personal", epochs)
        with personal.mixed_normalisation(self.norms, net, beta):
            self.fine_tune(batches, lrs)
        personal.store_mixture(self.norms, net, beta)

    def reset_statistics(self) -> list[personal.Moments]:
        """Reset running statistics to those of an untrained network; returns the former ones."""
        former = personal.running_statistics(self.norms)
        if self.norms:
            self.model.buffers.copy_(self.runtime.untrained)
        return former

    def fine_tune(self, batches: BatchIterator, lrs: Tensor) -> None:
        """A step of SGD on the live model for each batch, with a learning rate for each tensor."""
        lr = self.nets.expand(lrs)  # [P]
        for images, labels in batches:
            gradient = personal.clipped_gradient(self.runtime, images, labels)
            self.model.parameters.sub_(gradient.mul_(lr))
