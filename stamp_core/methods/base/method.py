"""Method is FedAvg: every step of federated learning with its default; methods override steps."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.by_class import first_per_class
from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.client.scoring import score
from stamp_core.config.decode import invalid
from stamp_core.config.limits import Positive
from stamp_core.config.schema import Training
from stamp_core.core.devices import has_room
from stamp_core.data.plan import Plan
from stamp_core.models.flat import FlatModel
from stamp_core.models.sealed import Sealed
from stamp_core.results.records import tree_bytes

# What a client or the server remembers: a dict of tensors and plain values, nested as needed. A
# method that reads a key names the type, a TypedDict.
State = Any
Group = Literal["federated", "personalised", "continual", "control"]  # of methods in a table
Message = dict[str, Tensor]  # what is sent; its bytes are counted from these tensors


class DivergedError(ArithmeticError):
    """Training has produced values that are not finite."""


@dataclass(frozen=True)
class NoParams:
    """The parameters of a method that has none."""


@dataclass(frozen=True)
class FedAvgParams:
    """FedAvg's parameters, which all methods that train inherit."""

    server_lr: Positive = 1.0  # theta + server_lr * (average - theta)
    lr: Positive | None = None  # of local SGD with this method; null: the setting's


@dataclass
class Log:
    """What a method writes to the run record about a client round or the server's aggregation."""

    numbers: dict[str, float] = field(default_factory=dict)  # averaged over the round's clients
    seconds: dict[str, float] = field(default_factory=dict)  # by phase, summed over clients
    events: list[str] = field(default_factory=list)  # unusual events, counted by their text
    images: int = 0  # encoded for a gradient, summed over clients

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class ClientRound(RoundId):
    """The address and the input of one client's work in one round; only its log is written to."""

    plan: Plan
    task: int  # of the experience; a later cycle repeats it
    classes: tuple[int, ...]  # of the task; none where the client has no part in it
    state: State  # never changed in place: `update_state` returns the new one
    message: Message
    indices: Tensor  # int64 [n], of the training images of the task
    log: Log = field(default_factory=Log)

    # A method that needs the rest keeps "experiences" in the state, sorted: those in which the
    # client has completed a round or, with a memory, those whose tasks are in it.

    @property
    def first(self) -> bool:
        """Whether the client has completed no round of this experience yet."""
        return self.experience not in self.state["experiences"]

    @property
    def recorded(self) -> list[int]:
        return sorted({*self.state["experiences"], self.experience})


class LocalModel(NamedTuple):
    """A model after local training, on the device."""

    parameters: Tensor  # [P]
    buffers: Tensor  # [B]


@dataclass(frozen=True)
class Reply:
    """The result of a client round: the new state, the message to the server, the statistics."""

    client: int
    state: State
    message: Message
    samples: int
    sgd_steps: int
    loss: float
    log: Log = field(default_factory=Log)
    local: LocalModel | None = None  # after the last round of an experience, to be scored


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
    client remembers is its state, what the server remembers is its own. What a client round passes
    from `start` to its steps and to its end is a context, of a type that the method defines.
    """

    Params: ClassVar[type[Any]] = FedAvgParams  # a frozen dataclass that checks its values
    models: tuple[str, ...] = ("global", "local")  # the models whose accuracies are defined
    # Parameters that make it bit-identical to FedAvg.
    fedavg_equivalent: ClassVar[Mapping[str, Any] | None] = {}
    group: ClassVar[Group] = "federated"
    masks: ClassVar[bool] = False  # whether it can learn masks of images instead of labels
    images: ClassVar[bool] = False  # whether it makes images, as it cannot of features
    averages: bool = True  # whether the server uses only the mean of the clients' models
    in_clear: ClassVar[tuple[str, ...]] = ()  # vectors of a message that secure sums do not hide
    # Whether a step depends only on its batch, the live model and the tensors of its context, so
    # that a GPU may capture it. A class that overrides one of `step_parts` has to say so again.
    graph_safe: bool = True
    step_parts: ClassVar[tuple[str, ...]] = ("train", "step", "loss", "correct_gradient")

    @classmethod
    def adapt(cls, training: Training, params: Any) -> Training:
        """How the method trains in a setting: as all others, but for a step of its own."""
        lr: float | None = getattr(params, "lr", None)
        return training if lr is None else replace(training, lr=lr)

    def __init_subclass__(cls) -> None:
        """Let no step be captured that may have become another."""
        super().__init_subclass__()
        if "graph_safe" not in vars(cls) and not vars(cls).keys().isdisjoint(cls.step_parts):
            cls.graph_safe = False

    def __init__(self, params: Any, runtime: ClientRuntime) -> None:
        name = type(self).__name__
        if runtime.dataset.masks and not self.masks:
            raise invalid("method", name, "one that learns masks, as those of the data")
        if self.images and runtime.has_features:
            raise invalid("method", name, "one that makes no images, as the data are features")
        self.params = params
        self.runtime = runtime
        self.model = runtime.model
        self.classifier = runtime.classifier
        # Live networks besides the model, which are sent, trained and averaged with it.
        self.extra_networks: dict[str, FlatModel] = {}

    def initial_states(self, plan: Plan) -> InitialStates:
        """The states before the first round; a method with a warm-up runs it here."""
        server = self.init_server(plan.seed)
        count = len(plan.clients)  # one state at a time: there may be thousands
        return InitialStates(server, (self.init_client(client, server) for client in range(count)))

    # --- the server

    def init_server(self, seed: int) -> State:
        """The server's first state: the initial weights of `seed`."""
        model = FlatModel(self.runtime.network(seed))
        extra = {name: self.initial_weights(name, seed) for name in self.extra_networks}
        return {"parameters": model.parameters, "buffers": model.buffers, **extra}

    def initial_weights(self, name: str, seed: int) -> Tensor:
        """The initial weights of an extra network."""
        raise KeyError(name)  # a method with extra networks overrides this

    def participants(self, chosen: list[int], server: State) -> list[int]:
        """The clients that train, of those chosen for a round; sorted."""
        return chosen

    def broadcast(self, server: State, client: int) -> Message:
        """The message from the server to a client."""
        return {name: server[name] for name in (*self.shared_vectors(), *self.extra_networks)}

    def seal(self, replies: list[Reply], log: Log) -> list[Reply]:
        """What the server is handed: with secure sums sealed vectors, of one client nothing."""
        if not self.runtime.training.secure_sums:
            return replies
        if sum(reply.samples > 0 for reply in replies) < 2:
            log.events.append("secure sums: fewer than two clients have trained")
            return []
        return [replace(reply, message=self.sealed(reply)) for reply in replies]

    def sealed(self, reply: Reply) -> Any:
        """The message with sealed vectors; to a server that only averages they are tensors."""
        vectors = reply.message.items()
        return {n: v if n in self.in_clear else Sealed(v, reply.client) for n, v in vectors}

    def to_device(self, replies: list[Reply]) -> list[Reply]:
        """The replies with the models' vectors on the device, where there is room for all."""
        names = self.shared_vectors()
        device = self.runtime.device
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
        mean = {name: self.average(name, replies) for name in self.averaged_vectors()}
        if self.params.server_lr != 1:
            for name in mean.keys() & {"parameters", *self.extra_networks}:
                mean[name] = torch.lerp(server[name], mean[name], self.params.server_lr)
        return {**server, **mean}

    def average(self, name: str, replies: list[Reply]) -> Tensor:
        """The mean of one part of the messages, weighted by samples."""
        weights = [float(reply.samples) for reply in replies]
        return self.runtime.average([reply.message[name] for reply in replies], weights)

    # --- a client

    def init_client(self, client: int, server: State) -> State:
        """A client's state before its first round."""
        return {}

    def client_round(
        self, round_id: RoundId, plan: Plan, state: State, message: Message
    ) -> ClientRound:
        task = round_id.experience % plan.tasks
        address = round_id.seed, round_id.client, round_id.experience, round_id.round, round_id.last
        return ClientRound(
            *address,
            plan=plan,
            task=task,
            classes=plan.clients[round_id.client][task].classes,
            state=state,
            message=message,
            indices=self.train_indices(plan, round_id.client, task),
        )

    def train_indices(self, plan: Plan, client: int, task: int) -> Tensor:
        """Indices of the training images of a client's task.  # [n]"""
        return plan.train_indices(self.runtime.dataset, client, task)

    def train_client(self, client_round: ClientRound) -> Reply:
        log = client_round.log
        before = self.classifier.images_backpropagated
        self.receive(client_round)
        context = self.start(client_round)
        losses = self.train(client_round, context)
        self.finish(client_round, context)
        if losses:
            self.require_finite(self.model.parameters, client_round)
        loss = float(torch.stack(losses).mean()) if losses else float("nan")
        state = self.update_state(client_round, context)
        message = self.upload(client_round, context)
        local = self.local_model(context) if client_round.last else None
        log.images += self.classifier.images_backpropagated - before
        samples = self.sample_count(client_round, context)
        return Reply(client_round.client, state, message, samples, len(losses), loss, log, local)

    def receive(self, client_round: ClientRound) -> None:
        """Load the received model into the live model, and the extra networks into theirs."""
        self.runtime.load_received(client_round.message, client_round.state)
        for name, network in self.extra_networks.items():
            network.load(client_round.message[name])

    def require_finite(self, values: Tensor, client_round: ClientRound, cause: str = "") -> None:
        """Refuse to go on with other values: lower the cause, or the learning rate."""
        if values.isfinite().all():
            return
        setting, now = self.runtime.setting, f"(now {self.runtime.training.lr:g})"
        own = getattr(self.params, "lr", None) is not None
        lr = (
            f"lr of the method {now}"
            if own
            else f"params/settings.yaml: {setting.name}.training.lr {now}"
        )
        raise DivergedError(
            f"client {client_round.client}, experience {client_round.experience}, "
            f"round {client_round.round}: the weights are no longer finite; lower {cause or lr}"
        )

    def start(self, client_round: ClientRound) -> Any:
        """The context of the client round; what is loaded now is what training starts from."""
        return StepContext()

    def train(self, client_round: ClientRound, context: Any) -> list[Tensor]:
        """Local SGD on the live model; the loss of every step."""
        batches = self.batches(client_round, context)
        return self.runtime.run_steps(self.step, batches, context, self.graph_safe)

    def batches(self, client_round: ClientRound, context: Any) -> Iterator[Batch]:
        """The batches of local training; a method with a memory adds its exemplars here."""
        return self.runtime.batches(client_round, client_round.indices)

    def finish(self, client_round: ClientRound, context: Any) -> None:
        """Log what training did, or end what it left open."""

    def sample_count(self, client_round: ClientRound, context: Any) -> int:
        """How many images local training is on: the weight of the client's model in the mean."""
        return len(client_round.indices)

    def step(self, batch: Batch, context: Any) -> Tensor:
        """One SGD step on a batch; its loss."""
        self.runtime.start_step(len(batch))
        loss = self.loss(batch, context)
        loss.backward()
        self.correct_gradient(batch, context)
        self.runtime.sgd.step()
        return loss.detach()

    def loss(self, batch: Batch, context: Any) -> Tensor:
        """The loss of one batch; a method adds its terms here."""
        return F.cross_entropy(self.model.module(batch.images), batch.targets)

    def correct_gradient(self, batch: Batch, context: Any) -> None:
        """Change the flat gradient in place before the SGD step."""

    def may_miss_rounds(self) -> bool:
        """Whether clients may miss a round, the last one of an experience among them."""
        training = self.runtime.training
        return training.participation < 1 or training.clients_per_round is not None

    def is_due(self, client_round: ClientRound) -> bool:
        """Whether the task is remembered now: in the last round, or the first if that may fail."""
        return client_round.last or (self.may_miss_rounds() and client_round.first)

    def update_state(self, client_round: ClientRound, context: Any) -> State:
        """The client's state after training."""
        if self.runtime.training.buffers == "local" and len(self.model.buffers):
            return {**client_round.state, "buffers": self.model.buffers.cpu().clone()}
        return client_round.state

    def upload(self, client_round: ClientRound, context: Any) -> Message:
        """The message from a client to the server."""
        message: Message = {}
        for name in self.shared_vectors():
            message[name] = getattr(self.model, name).cpu().clone()
        for name, network in self.extra_networks.items():
            message[name] = network.parameters.cpu().clone()
        return message

    def local_model(self, context: Any) -> LocalModel:
        """The model after local training, which is scored as the client's local one."""
        return LocalModel(self.model.parameters.clone(), self.model.buffers.clone())

    # --- evaluation

    def load_personal_model(self, client_round: ClientRound) -> None:
        """Load the client's personal model into the live model (if `models` has "personal")."""
        self.receive(client_round)

    def personal_scores(self, client_round: ClientRound) -> Tensor:
        """Scores of the client's personal model.  # [scorings, 1, T]"""
        self.load_personal_model(client_round)
        client, experience = client_round.client, client_round.experience
        return score(self.runtime, client_round.plan, [client], experience)

    def remembered(self, server: State, client: State) -> Any:
        """The "images" that are remembered and their "labels", if there are any."""
        return {}

    def memory_samples(self, server: State, client: State, count: int) -> dict[str, Tensor]:
        """The first `count` images of each class of what is remembered, with their labels."""
        memory = self.remembered(server, client)
        if "labels" not in memory:
            return {}
        labels = memory["labels"].long()
        indices = first_per_class(labels, count)
        return {"images": memory["images"][indices], "labels": labels[indices]}

    # --- the vectors of a message

    def shares_buffers(self) -> bool:
        """Whether the statistics of batch normalisation are sent and averaged."""
        return self.runtime.training.buffers == "shared" and len(self.model.buffers) > 0

    def shared_vectors(self) -> tuple[str, ...]:
        """The names of the model's vectors that are sent."""
        return ("parameters", *self.shared_buffers())

    def shared_buffers(self) -> tuple[str, ...]:
        """The name of the vector of buffers where it is sent."""
        return ("buffers",) if self.shares_buffers() else ()

    def averaged_vectors(self) -> tuple[str, ...]:
        """The names of those that `aggregate` averages; the others are the server's own."""
        return (*self.shared_vectors(), *self.extra_networks)
