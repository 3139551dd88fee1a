"""Method is FedAvg: every step of federated learning with its default; others override steps."""

import importlib
import pkgutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.config import Setting, above, build, section, unknown, wrong
from stamp_core.split import Plan
from stamp_core.vectors import Descent, FlatModel, average
from stamp_core.workspace import Visit, Workspace

State = dict[str, Any]  # what someone remembers: a tree of tensors and plain values
Group = Literal["federated", "personalised", "continual", "control"]  # of a table's rows
Message = dict[str, Tensor]  # what travels; its bytes are counted from these tensors


class DivergedError(ArithmeticError):
    """Training left the finite numbers."""

    def __init__(self, visit: Visit, setting: Setting) -> None:
        super().__init__(visit, setting)  # as they are: a worker process pickles no more than these

    def __str__(self) -> str:
        """Where it happened and which parameter to lower."""
        visit, setting = self.args
        return (
            f"client {visit.client}, step {visit.step}, round {visit.round}: the weights are no "
            f"longer finite; lower settings.{setting.name}.training.rate "
            f"(now {setting.training.rate:g})"
        )


@dataclass(frozen=True)
class Nothing:
    """For methods without parameters."""


@dataclass(frozen=True)
class ServerStep:
    """FedAvg's only knob, which methods with a server inherit."""

    step: float = 1.0  # theta + step * (average - theta)

    def __post_init__(self) -> None:
        """Refuse a server that goes backwards."""
        above(self, 0, "step")


@dataclass
class Log:
    """What a method tells the run record of one visit, or of one round on the server."""

    numbers: dict[str, float] = field(default_factory=dict)  # averaged over the round's clients
    seconds: dict[str, float] = field(default_factory=dict)  # by phase, added up over clients
    events: list[str] = field(default_factory=list)  # out of the ordinary, counted by name

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Take the time of a phase."""
        began = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began


@dataclass
class Turn:
    """A visit under way: what the client remembers, what it was sent, notes for this visit only."""

    visit: Visit
    plan: Plan
    state: State  # taken as it is, given back anew: never changed in place
    message: Message
    indices: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    notes: State = field(default_factory=dict)  # gone after the visit, not on the client's disk
    log: Log = field(default_factory=Log)

    @property
    def task(self) -> int:
        """Which task of the sequence is worked on; a later cycle meets it again."""
        return self.visit.step % self.plan.tasks


@dataclass(frozen=True)
class Reply:
    """What a visited client hands back: its message to the server and what the engine notes."""

    client: int
    state: State
    message: Message
    samples: int
    steps: int
    loss: float
    log: Log = field(default_factory=Log)


class Beginning(NamedTuple):
    """What a training starts from, and the bytes that all clients were sent and sent for it."""

    server: State
    clients: list[State]
    down: int = 0
    up: int = 0


class Method:
    """Federated averaging (McMahan et al., 2017).

    The server's model goes to the clients, they train it on their task, the server averages what
    comes back, weighted by samples. Nothing here is kept on `self` between calls: a client's
    memory is its `state`, the server's is `server`.
    """

    Params: ClassVar[type[Any]] = ServerStep  # a frozen dataclass that checks itself
    models: tuple[str, ...] = ("global", "local")  # which accuracies are defined
    neutral: ClassVar[dict[str, Any] | None] = {}  # parameters that make it FedAvg bit for bit
    group: ClassVar[Group] = "federated"

    def __init__(self, params: Any, work: Workspace) -> None:
        self.params, self.work = params, work

    def begin(self, plan: Plan) -> Beginning:
        """The first states of everybody; a method whose clients warm up does so here."""
        server = self.new_server(plan.seed)
        clients = [self.new_client(client, server) for client in range(len(plan.clients))]
        return Beginning(server, clients)

    # --- the server

    def new_server(self, seed: int) -> State:
        """The server's first state: the initial weights of `seed`."""
        fresh = FlatModel(self.work.network(seed))
        return {"parameters": fresh.parameters, "buffers": fresh.buffers}

    def participants(self, chosen: list[int]) -> list[int]:
        """Who really trains of those chosen for a round."""
        return chosen

    def broadcast(self, server: State, client: int) -> Message:
        """What the server sends to a client."""
        names = ("parameters", "buffers") if self.shares_buffers() else ("parameters",)
        return {name: server[name] for name in names}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The server's next state from the replies, in the order of clients."""
        replies = [reply for reply in replies if reply.samples]
        if not replies:  # nobody answered with anything: the model stays
            return server
        weights = [float(reply.samples) for reply in replies]
        names = ("parameters", "buffers") if self.shares_buffers() else ("parameters",)
        mean = {name: average([r.message[name] for r in replies], weights) for name in names}
        if self.params.step != 1:
            mean["parameters"] = torch.lerp(
                server["parameters"], mean["parameters"], self.params.step
            )
        return {**server, **mean}

    # --- a client

    def new_client(self, client: int, server: State) -> State:
        """What a client remembers before its first visit."""
        return {}

    def local(self, turn: Turn) -> Reply:
        """A client's turn: receive, train, answer; what it leaves in the live model is its own."""
        self.receive(turn)
        turn.indices = self.examples(turn)
        losses = self.train(turn)
        if losses and not torch.isfinite(self.work.model.parameters).all():
            raise DivergedError(turn.visit, self.work.setting)
        loss = float(torch.stack(losses).mean()) if losses else float("nan")
        state = self.remember(turn)
        message, samples = self.upload(turn), len(turn.indices)
        return Reply(turn.visit.client, state, message, samples, len(losses), loss, turn.log)

    def receive(self, turn: Turn) -> None:
        """Put what the client starts from into the live model."""
        start = turn.message.get("buffers", self.work.untrained)  # none travel unless shared
        self.work.model.load(turn.message["parameters"], turn.state.get("buffers", start))

    def examples(self, turn: Turn) -> Tensor:
        """Which training pictures the client learns from.  # [n]"""
        return turn.plan.train_indices(self.work.images, turn.visit.client, turn.task)

    def train(self, turn: Turn) -> list[Tensor]:
        """Local SGD in the live model; gives back the loss of every step."""
        descent = Descent(self.work.model, self.work.setting.training)
        losses = []
        for pictures, labels in self.batches(turn):
            self.work.train_mode(len(labels))
            self.work.model.gradients.zero_()
            loss = self.loss(turn, pictures, labels)
            loss.backward()
            self.correct(turn)
            descent.step()
            losses.append(loss.detach())
        return losses

    def batches(self, turn: Turn) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of a turn; a method with a memory mixes it in here."""
        return self.work.batches(turn.visit, turn.indices)

    def loss(self, turn: Turn, pictures: Tensor, labels: Tensor) -> Tensor:
        """The loss of one batch; a method adds its terms here."""
        return F.cross_entropy(self.work.model.module(pictures), labels)

    def correct(self, turn: Turn) -> None:
        """Change the flat gradient in place before the step."""

    def remember(self, turn: Turn) -> State:
        """The client's state after training."""
        if self.work.setting.training.buffers == "local" and len(self.work.model.buffers):
            return {**turn.state, "buffers": self.work.model.buffers.cpu().clone()}
        return turn.state

    def upload(self, turn: Turn) -> Message:
        """What a client sends to the server."""
        model = self.work.model
        message = {"parameters": model.parameters.cpu().clone()}
        if self.shares_buffers():
            message["buffers"] = model.buffers.cpu().clone()
        return message

    # --- evaluation

    def receive_personal(self, turn: Turn) -> None:
        """Put the client's personal model into the live one (only with "personal" in `models`)."""
        self.receive(turn)

    def exhibit(self, state: State, count: int) -> dict[str, Tensor]:
        """What people may look at of a client's memory: so many "pictures" a class, "labels"."""
        return {}

    def shares_buffers(self) -> bool:
        """Whether batch normalisation's buffers travel."""
        return self.work.setting.training.buffers == "shared" and len(self.work.model.buffers) > 0


def names() -> list[str]:
    """The methods there are: one per file of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def get(kind: str) -> type[Method]:
    """The method of the file `kind`: the one subclass of Method defined there."""
    if kind not in names():
        raise unknown("params.yaml: methods: kind", kind, names())
    module = importlib.import_module(f"{__name__}.{kind}")
    own = [item for item in vars(module).values() if isinstance(item, type)]
    (found,) = (c for c in own if issubclass(c, Method) and c.__module__ == module.__name__)
    return found


def preset(name: str, params: Mapping[str, Any]) -> tuple[type[Method], Any]:
    """The method and its checked parameters for the row `name` of params.yaml: methods."""
    block = row(name, params)
    method = get(str(block.pop("kind", name)))
    return method, build(method.Params, block, f"params.yaml: methods.{name}")


def row(name: str, params: Mapping[str, Any], below: tuple[str, ...] = ()) -> dict[str, Any]:
    """A row of params.yaml: methods; with `like`, another row where it says nothing itself.

    The file of a method needs no row where its defaults will do.
    """
    if name in below:
        raise wrong(f"params.yaml: methods.{below[0]}.like", name, "a row that is not like itself")
    by_defaults = name in names() and name not in (params.get("methods") or {})
    block = {} if by_defaults else section(params, "methods", name)
    model = block.pop("like", None)
    if model is None:
        return block
    base = row(str(model), params, (*below, name))
    return overlaid({"kind": str(model), **base}, block)


def overlaid(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tree `base` with the leaves of `changes` put in their places."""
    both = {key: value for key, value in base.items() if isinstance(value, Mapping)}
    inner = {
        key: overlaid(both[key], value)
        for key, value in changes.items()
        if key in both and isinstance(value, Mapping)
    }
    return {**base, **changes, **inner}
