"""FedL2P (Lee et al., 2023), frozen as published or adapted to continual learning by FedAvg."""

from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.autograd import grad

from stamp_core.config import above, at_least, fraction, wrong
from stamp_core.methods import (
    Beginning,
    Group,
    Log,
    Message,
    Method,
    Reply,
    ServerStep,
    State,
    Turn,
)
from stamp_core.paths import ROOT
from stamp_core.personal import (
    Batches,
    MetaNets,
    Seen,
    endless,
    forget,
    gathered,
    look,
    loss_at,
    mixed,
    neumann,
    settle,
    slope,
)
from stamp_core.records import tree_bytes
from stamp_core.seeding import generator
from stamp_core.split import Plan
from stamp_core.vectors import average, flatten
from stamp_core.workspace import Visit, Workspace


@dataclass(frozen=True)
class Personalisation(ServerStep):
    """What is made personal, and how that is learnt."""

    backbone: Literal["federated", "frozen"] = "federated"
    pretrained: str | None = None  # the frozen network: weights.safetensors of an earlier run
    warm_rounds: int = 5  # without one, so many rounds of FedAvg on everybody's first task
    # Numbers of batches: 3 epochs of outer steps with 15 epochs of inner ones each, as published,
    # are 708,750 steps a visit for 10,000 pictures. One outer step costs 1.7 times a visit of
    # FedAvg on the settings digits and glyphs.
    outer_steps: int = 1
    inner_steps: int = 10
    ft_steps: int = 10  # at evaluation; published are 15 epochs
    held_out: float = 0.2  # of a client's pictures, which the outer steps judge by
    rate: float = 0.001  # what the learnt rates are first
    meta_rate: float = 0.001  # of the outer steps, for the meta-networks
    rates_rate: float = 0.0001  # and for the learnt rates
    clamp: float = 1.0  # of each number of a hypergradient
    neumann_steps: int = 3
    neumann_rate: float = 0.1
    neumann_scaled: bool = False  # by that rate, which the inverse of H needs; published without
    # "last step" is the published switch FOMAML, the derivative of the last inner step as it is.
    # The rates enter "implicit" by that step alone, and with H positive it has the opposite sign.
    hypergradient: Literal["implicit", "last step"] = "implicit"

    def __post_init__(self) -> None:
        """Refuse what cannot be learnt."""
        super().__post_init__()
        at_least(self, 0, "outer_steps", "ft_steps", "rate", "meta_rate", "rates_rate")
        at_least(self, 0, "neumann_steps", "neumann_rate")
        at_least(self, 1, "inner_steps", "warm_rounds")
        above(self, 0, "clamp", "held_out")
        fraction(self, "held_out")
        if self.pretrained is not None and self.backbone != "frozen":
            raise wrong("backbone", self.backbone, "'frozen' where pretrained is set")


class FedL2P(Method):
    """Clients learn together how each of them is to fine-tune: rates and shares of statistics.

    As published, a trained network is "frozen" and only the meta-networks travel. The default,
    "federated", is an adaptation: FedAvg goes on training the network, and every visit begins with
    outer steps for the meta-networks.
    """

    Params: ClassVar = Personalisation
    models: tuple[str, ...] = ("global", "personal", "local")
    neutral: ClassVar[dict[str, Any]] = {"outer_steps": 0}
    group: ClassVar[Group] = "personalised"

    def __init__(self, params: Personalisation, work: Workspace) -> None:
        super().__init__(params, work)
        frozen = work.setting.training.buffers == "frozen"
        self.norms = () if frozen else work.classifier.norms
        self.nets = MetaNets(work.model.module, len(self.norms))
        self.frozen = params.backbone == "frozen"
        if self.frozen:
            self.models = ("global", "personal")  # no training of its own

    # --- what everybody starts from

    def new_server(self, seed: int) -> State:
        """The initial weights and meta-networks of `seed`."""
        return {**super().new_server(seed), "meta": self.nets.start(seed, self.params.rate)}

    def begin(self, plan: Plan) -> Beginning:
        """The first states; a frozen network is with every client from the start."""
        if not self.frozen:
            return super().begin(plan)
        return self.warmed(plan) if self.params.pretrained is None else self.read(plan)

    def read(self, plan: Plan) -> Beginning:
        """With the network of an earlier run."""
        module, path = self.work.model.module, ROOT / str(self.params.pretrained)
        named = dict(module.named_parameters()), dict(module.named_buffers())
        found = load_file(path) if path.is_file() else {}
        shapes = {name: value.shape for each in named for name, value in each.items()}
        if {name: value.shape for name, value in found.items()} != shapes:
            raise wrong("pretrained", str(path), "weights.safetensors of a run with this network")
        parameters, buffers = (flatten([found[name] for name in each]) for each in named)
        net = {"parameters": parameters, "buffers": buffers}
        clients: list[State] = [net for _ in plan.clients]
        return Beginning({**self.new_server(plan.seed), **net}, clients, down=tree_bytes(clients))

    def warmed(self, plan: Plan) -> Beginning:
        """With a network that FedAvg has trained on everybody's first task."""
        fedavg, server, up = Method(self.params, self.work), self.new_server(plan.seed), 0
        clients: list[State] = [{} for _ in plan.clients]
        for round_ in range(self.params.warm_rounds):
            sent = fedavg.broadcast(server, 0)
            replies = [
                fedavg.local(Turn(Visit(plan.seed, client, 0, round_), plan, state, sent))
                for client, state in enumerate(clients)
            ]
            up += tree_bytes([reply.message for reply in replies])
            clients = [reply.state for reply in replies]
            server = fedavg.aggregate(server, replies, Log())
        net = {name: server[name] for name in ("parameters", "buffers")}
        clients = [{**net, **state} for state in clients]  # some have buffers of their own
        times = len(clients) * (self.params.warm_rounds + 1)  # once more for what came of it
        return Beginning(server, clients, times * tree_bytes(fedavg.broadcast(server, 0)), up)

    # --- the server

    def broadcast(self, server: State, client: int) -> Message:
        """The meta-networks and, unless it is frozen, the network."""
        net = {} if self.frozen else super().broadcast(server, client)
        return {**net, "meta": server["meta"]}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """Meta-networks averaged by held-out pictures; unless it is frozen, the network as ever."""
        after = server if self.frozen else super().aggregate(server, replies, log)
        learnt = [reply for reply in replies if self.held_out(reply.samples)]
        if not learnt:
            return after
        weights = [float(self.held_out(reply.samples)) for reply in learnt]
        return {**after, "meta": average([reply.message["meta"] for reply in learnt], weights)}

    def held_out(self, samples: int) -> int:
        """How many of so many pictures are held out."""
        return int(self.params.held_out * samples)

    # --- a client

    def receive(self, turn: Turn) -> None:
        """Put the network into the live model: what the client has, or what it was sent."""
        if self.frozen:
            self.work.model.load(turn.state["parameters"], turn.state["buffers"])
        else:
            super().receive(turn)

    def train(self, turn: Turn) -> list[Tensor]:
        """Outer steps from the network as it was received, then its own training, if there is."""
        with turn.log.clock("meta"):
            turn.notes["meta"], losses = self.learn(turn)
        return losses if self.frozen else super().train(turn)

    def upload(self, turn: Turn) -> Message:
        """The client's meta-networks and, unless it is frozen, the network."""
        net = {} if self.frozen else super().upload(turn)
        return {**net, "meta": turn.notes["meta"]}

    def learn(self, turn: Turn) -> tuple[Tensor, list[Tensor]]:
        """The meta-networks after the outer steps and the losses of these; no trace in the net."""
        work, losses, (held, others) = self.work, list[Tensor](), self.parted(turn)
        if not len(held) or not self.params.outer_steps:
            return turn.message["meta"], losses
        before = work.model.parameters.clone(), work.model.buffers.clone()
        meta, seen = turn.message["meta"].to(work.device), look(work, self.norms, others)
        batches = endless(work, turn.visit, others, "inner")
        judges = endless(work, turn.visit, held, "outer")
        for _ in range(self.params.outer_steps):
            step, loss = self.outer_step(meta, seen, batches, judges)
            work.model.load(*before)
            if loss.isfinite() and step.isfinite().all():
                meta = meta - step
                losses.append(loss)
            else:
                turn.log.events.append("meta-networks: a step was no number and is skipped")
        self.note(turn.log, meta, seen)
        return meta.cpu(), losses

    def parted(self, turn: Turn) -> tuple[Tensor, Tensor]:
        """The pictures that are held out, the same as long as the task lasts, and the others."""
        visit, count = turn.visit, self.held_out(len(turn.indices))
        draw = generator(visit.seed, visit.client, turn.task, "held out")
        order = turn.indices[torch.randperm(len(turn.indices), generator=draw)]
        return order[:count], order[count:]

    def note(self, log: Log, meta: Tensor, seen: Seen) -> None:
        """Put what the meta-networks say of a client into the record of the run."""
        shares, rates = self.nets(meta, seen)
        log.numbers |= {"rate": float(rates.mean()), "least rate": float(rates.min())}
        if self.norms:
            log.numbers["share"] = float(shares.mean())
        if rates.min() < 0:  # nothing stops them, as published
            log.events.append("meta-networks: a rate is below 0")

    def outer_step(
        self, meta: Tensor, seen: Seen, batches: Batches, judges: Batches
    ) -> tuple[Tensor, Tensor]:
        """What to take from the meta-networks' numbers, and the loss that says so."""
        work, net, meta = self.work, gathered(self.norms), meta.clone().requires_grad_()
        shares, rates = self.nets(meta, seen)
        forget(self.norms)
        with mixed(self.norms, net, shares.detach()):
            self.tune(batches, rates.detach(), self.params.inner_steps - 1)
            last = slope(work, *next(batches)).clone()
        theta = work.model.parameters.clone() - self.nets.spread(rates) * last  # [P], of `meta`
        with mixed(self.norms, net, shares):
            loss, inner = loss_at(work, theta, *next(judges)), loss_at(work, theta, *next(batches))
        found = self.hypergradient(loss, inner, theta, meta)
        sizes = torch.full_like(found, self.params.meta_rate)
        sizes[-len(rates) :] = self.params.rates_rate
        return sizes * found.clamp(-self.params.clamp, self.params.clamp), loss.detach()

    def hypergradient(self, loss: Tensor, inner: Tensor, theta: Tensor, meta: Tensor) -> Tensor:
        """How the held-out loss changes with the meta-networks' numbers.  # [M]"""
        params, bn = self.params, self.nets.mixing
        direct, start = grad(loss, (meta, theta), retain_graph=True)
        if params.hypergradient == "last step":
            return direct
        (downhill,) = grad(inner, theta, create_graph=True)
        series = neumann(downhill, theta, start, params.neumann_steps, params.neumann_rate)
        if params.neumann_scaled:
            series = params.neumann_rate * series
        (through,) = grad(downhill, meta, series)
        return torch.cat([direct[:bn] - through[:bn], -through[bn:]])

    # --- fine-tuning

    def receive_personal(self, turn: Turn) -> None:
        """Fine-tune what is received on the current task as the meta-networks say."""
        self.receive(turn)
        indices = self.examples(turn)
        if not len(indices):  # nothing to go by: it stays everybody's
            return
        net, seen = gathered(self.norms), look(self.work, self.norms, indices)
        with torch.no_grad():
            shares, rates = self.nets(turn.message["meta"].to(self.work.device), seen)
        if not self.params.ft_steps or len(indices) == 1:  # then normalisation gathers nothing
            shares = torch.zeros_like(shares)
        forget(self.norms)
        with mixed(self.norms, net, shares):
            batches = endless(self.work, turn.visit, indices, "personal")
            self.tune(batches, rates, self.params.ft_steps)
        settle(self.norms, net, shares)

    def tune(self, batches: Batches, rates: Tensor, steps: int) -> None:
        """Steps of SGD in the live model, each tensor at its own rate."""
        each = self.nets.spread(rates)
        for pictures, labels in islice(batches, steps):
            self.work.model.parameters.sub_(each * slope(self.work, pictures, labels))
