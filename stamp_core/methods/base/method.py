"""Method is FedAvg: every step of federated learning with its default; methods override steps."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.graphs import Inputs
from stamp_core.client.scoring import score
from stamp_core.client.workspace import RoundId, Workspace
from stamp_core.config.decode import invalid, require_above
from stamp_core.config.schema import Setting
from stamp_core.core.devices import has_room
from stamp_core.data.split import Plan
from stamp_core.models.flat import FlatModel
from stamp_core.results.records import tree_bytes

State = dict[str, Any]  # what a client or the server remembers: a tree of tensors and plain values
Group = Literal["federated", "personalised", "continual", "control"]  # of methods in a table
Message = dict[str, Tensor]  # what is sent; its bytes are counted from these tensors


class DivergedError(ArithmeticError):
    """Training has produced weights that are not finite."""

    def __init__(self, round_id: RoundId, setting: Setting) -> None:
        super().__init__(round_id, setting)  # no text: a worker process pickles the arguments alone

    def __str__(self) -> str:
        """Where it happened and which parameter to lower."""
        round_id, setting = self.args
        return (
            f"client {round_id.client}, experience {round_id.experience}, round {round_id.round}: "
            "the weights are no longer finite; "
            f"lower params/settings.yaml: {setting.name}.training.lr (now {setting.training.lr:g})"
        )


@dataclass(frozen=True)
class NoParams:
    """The parameters of a method that has none."""


@dataclass(frozen=True)
class FedAvgParams:
    """FedAvg's only parameter, which all methods with a server inherit."""

    server_lr: float = 1.0  # theta + server_lr * (average - theta)

    def __post_init__(self) -> None:
        """Refuse a server learning rate that is not above 0."""
        require_above(self, 0, "server_lr")


@dataclass
class Log:
    """What a method writes to the run record about a client round or the server's aggregation."""

    numbers: dict[str, float] = field(default_factory=dict)  # averaged over the round's clients
    seconds: dict[str, float] = field(default_factory=dict)  # by phase, summed over clients
    events: list[str] = field(default_factory=list)  # unusual events, counted by their text

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Add the time that the block takes to the seconds of a phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


@dataclass
class ClientRound:
    """One client's work in one round: its state, the received message, values for this round."""

    round_id: RoundId
    plan: Plan
    state: State  # never changed in place: `update_state` returns the new one
    message: Message
    indices: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    scratch: State = field(default_factory=dict)  # discarded after the round
    log: Log = field(default_factory=Log)
    seed: int = field(init=False)  # of the run
    client: int = field(init=False)
    experience: int = field(init=False)  # the place in the client's sequence, through all cycles
    task: int = field(init=False)  # of the experience; a later cycle repeats it
    last: bool = field(init=False)  # whether this is the last round of the experience

    def __post_init__(self) -> None:
        """Copy the parts of the address, and derive the task."""
        address = self.round_id
        self.seed, self.client, self.last = address.seed, address.client, address.last
        self.experience, self.task = address.experience, address.experience % self.plan.tasks


@dataclass(frozen=True)
class Reply:
    """What a client round returns: the new state, the message to the server, the statistics."""

    client: int
    state: State
    message: Message
    samples: int
    sgd_steps: int
    loss: float
    log: Log = field(default_factory=Log)


class InitialStates(NamedTuple):
    """The states before the first round, and the bytes sent to compute them."""

    server: State
    clients: Iterable[State]
    down: int = 0
    up: int = 0


class Method:
    """Federated averaging (McMahan et al., 2017).

    The server sends its model to the clients, they train it on their current task, the server
    averages their models, weighted by samples. Nothing is stored on `self` between calls: what a
    client remembers is its `state`, what the server remembers is `server`.
    """

    Params: ClassVar[type[Any]] = FedAvgParams  # a frozen dataclass that checks its values
    models: tuple[str, ...] = ("global", "local")  # the models whose accuracies are defined
    neutral: ClassVar[dict[str, Any] | None] = {}  # parameters that make it bit-identical to FedAvg
    group: ClassVar[Group] = "federated"
    masks: ClassVar[bool] = False  # whether it can learn masks of images instead of labels
    # Whether a step depends only on its batch, the live model and `step_inputs`, so that a GPU may
    # capture it. A class that overrides one of `step_parts` has to say so again.
    captures: bool = True
    step_inputs: ClassVar[tuple[str, ...]] = ()  # tensors in `scratch` that a step reads
    step_parts: ClassVar[tuple[str, ...]] = ("train", "step", "loss", "correct_gradient")

    def __init_subclass__(cls) -> None:
        """Let no step be captured that may have become another."""
        super().__init_subclass__()
        if "captures" not in vars(cls) and not vars(cls).keys().isdisjoint(cls.step_parts):
            cls.captures = False

    def __init__(self, params: Any, work: Workspace) -> None:
        if work.dataset.masks and not self.masks:
            name = type(self).__name__
            raise invalid("method", name, "one that learns masks, as those of the data")
        self.params, self.work = params, work

    def initial_states(self, plan: Plan) -> InitialStates:
        """The states before the first round; a method with a warm-up runs it here."""
        server = self.init_server(plan.seed)
        count = len(plan.clients)  # one state at a time: there may be thousands
        return InitialStates(server, (self.init_client(client, server) for client in range(count)))

    # --- the server

    def init_server(self, seed: int) -> State:
        """The server's first state: the initial weights of `seed`."""
        model = FlatModel(self.work.network(seed))
        return {"parameters": model.parameters, "buffers": model.buffers}

    def participants(self, chosen: list[int], server: State) -> list[int]:
        """The clients that train, of those chosen for a round; sorted."""
        return chosen

    def broadcast(self, server: State, client: int) -> Message:
        """The message from the server to a client."""
        return {name: server[name] for name in self.shared_vectors()}

    def gather(self, replies: list[Reply]) -> list[Reply]:
        """The replies with the models' vectors on the device, where there is room for all."""
        names, device = self.shared_vectors(), self.work.device
        sent = [{n: r.message[n] for n in names if n in r.message} for r in replies]
        if not has_room(tree_bytes(sent), device):
            return replies
        moved = [{name: vector.to(device) for name, vector in each.items()} for each in sent]
        pairs = zip(replies, moved, strict=True)
        return [replace(r, message={**r.message, **vectors}) for r, vectors in pairs]

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The server's next state from the replies, in the order of clients; on the CPU."""
        replies = [reply for reply in replies if reply.samples]
        if not replies:
            return server
        weights = [float(reply.samples) for reply in replies]
        mean = {
            name: self.work.average([reply.message[name] for reply in replies], weights)
            for name in self.averaged_vectors()
        }
        if self.params.server_lr != 1 and "parameters" in mean:
            mean["parameters"] = torch.lerp(
                server["parameters"], mean["parameters"], self.params.server_lr
            )
        return {**server, **mean}

    # --- a client

    def init_client(self, client: int, server: State) -> State:
        """A client's state before its first round."""
        return {}

    def train_client(self, client_round: ClientRound) -> Reply:
        """One client round: receive, train, reply; the trained model stays in the live model."""
        self.receive(client_round)
        client_round.indices = self.train_indices(client_round)
        losses = self.train(client_round)
        if losses and not torch.isfinite(self.work.model.parameters).all():
            raise DivergedError(client_round.round_id, self.work.setting)
        loss = float(torch.stack(losses).mean()) if losses else float("nan")
        state, message = self.update_state(client_round), self.upload(client_round)
        samples, log = len(client_round.indices), client_round.log
        return Reply(client_round.client, state, message, samples, len(losses), loss, log)

    def receive(self, client_round: ClientRound) -> None:
        """Load the model that the client starts from into the live model."""
        message, state = client_round.message, client_round.state
        shared = message.get("buffers", self.work.untrained)  # sent only if buffers are shared
        self.work.model.load(message["parameters"], state.get("buffers", shared))

    def train_indices(self, client_round: ClientRound) -> Tensor:
        """Indices of the training images of the client's current task.  # [n]"""
        plan, client, task = client_round.plan, client_round.client, client_round.task
        return plan.train_indices(self.work.dataset, client, task)

    def train(self, client_round: ClientRound) -> list[Tensor]:
        """Local SGD on the live model; returns the loss of every step."""
        self.work.sgd.restart()
        losses, graphs = [], self.work.graphs
        for images, labels in self.batches(client_round):
            if self.captures and graphs.usable(len(labels)):
                inputs = {"images": images, "labels": labels, **self.other_inputs(client_round)}
                losses.append(graphs.take("train", self.step_on, inputs))
            else:
                losses.append(self.step(client_round, images, labels))
        return losses

    def step(self, client_round: ClientRound, images: Tensor, labels: Tensor) -> Tensor:
        """One SGD step on a batch; returns its loss."""
        self.work.train_mode(len(labels))
        self.work.model.gradients.zero_()
        loss = self.loss(client_round, images, labels)
        loss.backward()
        self.correct_gradient(client_round)
        self.work.sgd.step()
        return loss.detach()

    def step_on(self, inputs: Inputs) -> Tensor:
        """The same step; of the client round it sees only `scratch`, and there only its inputs.

        Anything else would be that of the one client whose step is captured.
        """
        visible = SimpleNamespace(scratch=MappingProxyType(inputs))
        return self.step(cast(ClientRound, visible), inputs["images"], inputs["labels"])

    def other_inputs(self, client_round: ClientRound) -> dict[str, Tensor]:
        """What a step reads besides its batch, where the client round has it."""
        scratch = client_round.scratch
        return {name: scratch[name] for name in self.step_inputs if name in scratch}

    def batches(self, client_round: ClientRound) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of local training; a method with a memory adds its exemplars here."""
        return self.work.batches(client_round.round_id, client_round.indices)

    def loss(self, client_round: ClientRound, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of one batch; a method adds its terms here."""
        return F.cross_entropy(self.work.model.module(images), labels)

    def correct_gradient(self, client_round: ClientRound) -> None:
        """Change the flat gradient in place before the SGD step."""

    def update_state(self, client_round: ClientRound) -> State:
        """The client's state after training."""
        if self.work.training.buffers == "local" and len(self.work.model.buffers):
            return {**client_round.state, "buffers": self.work.model.buffers.cpu().clone()}
        return client_round.state

    def upload(self, client_round: ClientRound) -> Message:
        """The message from a client to the server."""
        return {
            name: getattr(self.work.model, name).cpu().clone() for name in self.shared_vectors()
        }

    # --- evaluation

    def load_personal_model(self, client_round: ClientRound) -> None:
        """Load the client's personal model into the live model (if `models` has "personal")."""
        self.receive(client_round)

    def personal_scores(self, client_round: ClientRound) -> Tensor:
        """Scores of the client's personal model.  # [scorings, 1, T]"""
        self.load_personal_model(client_round)
        address = client_round.round_id
        return score(self.work, client_round.plan, [address.client], address.experience)

    def memory_samples(self, server: State, client: State, count: int) -> dict[str, Tensor]:
        """Up to `count` images per class of what is remembered ("images", "labels")."""
        return {}

    def shares_buffers(self) -> bool:
        """Whether the buffers of batch normalisation are sent and averaged."""
        return self.work.training.buffers == "shared" and len(self.work.model.buffers) > 0

    def averaged_vectors(self) -> tuple[str, ...]:
        """The names of those that `aggregate` averages; the others are the server's own."""
        return self.shared_vectors()

    def shared_vectors(self) -> tuple[str, ...]:
        """The names of the model's vectors that are sent and averaged."""
        return ("parameters", "buffers") if self.shares_buffers() else ("parameters",)
