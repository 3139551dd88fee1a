"""TagFed (Wang et al., 2024): tasks own weights of one network; clients with a task share it."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.runtime import ClientRuntime
from stamp_core.client.scoring import accuracies, indices_of_tests
from stamp_core.config.decode import invalid
from stamp_core.config.limits import NonNegative, Positive, Share, UnitInterval
from stamp_core.core.seeding import address, generator
from stamp_core.data.plan import Plan, Task
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
from stamp_core.models.flat import FlatModel
from stamp_core.results.records import SCORINGS
from workbench.methods.base.distillation import softened_divergence
from workbench.methods.base.generators import build_seeded
from workbench.methods.base.task_server import pack_bits
from workbench.methods.tagfed.packed import (
    COPIED,
    PackedState,
    TaskWeights,
    free_share,
    initial_owners,
    pruned,
    sub_model,
    trained,
    with_task,
    with_values,
)

HIDDEN = 64  # units of the server's tails
BATCH = 128  # features in a step of their training
EPOCHS = 20  # of it, in each round
TEMPERATURE = 5.0  # of distillation


@dataclass(frozen=True)
class TagFedParams(FedAvgParams):
    """What clients with the same task exchange, and how weights are divided among tasks."""

    # "features": features and logits of the training images, for which the server's tail of the
    # task returns other logits, as published. "weights": the task's weights, which are averaged.
    exchange: Literal["features", "weights"] = "features"
    trace: Literal["task", "none"] = "task"  # "none": all tasks count as the same one
    keep: Share = 0.1  # share of the encoder's weights that each task keeps
    mask_lr: NonNegative = 1e-4  # of Adam on masks of earlier weights, whenever a task begins
    kd: UnitInterval = 0.1  # share of distillation in the losses of clients and of tails
    tail_lr: Positive = 0.2  # of SGD on the server's tails

    def __post_init__(self) -> None:
        if self.server_lr != 1 and not self.averages_all:
            right = "1 unless exchange is 'weights' and trace 'none'"
            raise invalid("server_lr", self.server_lr, right)

    @property
    def averages_all(self) -> bool:
        """Whether there is a global model: the average of all clients."""
        return self.exchange == "weights" and self.trace == "none"


class TagFedServer(TypedDict):
    seed: int
    round: int
    groups: dict[str, Message]  # what each group of clients has averaged, or
    tails: dict[str, Tensor]  # the server's tail of each task
    members: dict[str, str]  # the last group of each client
    answers: dict[str, Tensor]  # the logits for each client's images


@dataclass
class TagFedContext(StepContext):
    state: PackedState
    weights: TaskWeights | None = None  # unless the task trains all weights
    answers: Tensor | None = None  # [n, L], the server's logits for the task's images


class TagFed(Method):
    """Each task of a client owns some of its encoder's weights; clients with its task exchange.

    A new task takes all free weights, is trained, and is pruned from round to round to its share;
    weights of earlier tasks are fixed, and a mask picks those that it uses. Biases, normalisation
    and head are copied for each task. A task that returns is trained again, in a copy: later tasks
    keep what they were built on.

    The client is told which task it trains, and the test images' task in the scoring "task", as in
    the released code. Without it the class with the largest probability of all sub-models is
    predicted.
    """

    Params: ClassVar = TagFedParams
    models: tuple[str, ...] = ("personal", "local")
    fedavg_equivalent: ClassVar = {"exchange": "weights", "trace": "none", "keep": 1.0}
    group = "continual"

    def __init__(self, params: TagFedParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.sizes = [tensor.numel() for tensor in self.model.tensors]
        self.owners = initial_owners(self.classifier)
        self.untrained = runtime.untrained.cpu()
        if params.averages_all:
            self.models = ("global", "personal", "local")

    def initial_states(self, plan: Plan) -> InitialStates:
        if plan.tasks >= COPIED:
            raise invalid("split.tasks", plan.tasks, f"below {COPIED} for tagfed")
        return super().initial_states(plan)

    def init_server(self, seed: int) -> State:
        names = ("groups", "tails", "members", "answers")
        return {**super().init_server(seed), "seed": seed, "round": 0, **{n: {} for n in names}}

    def broadcast(self, server: TagFedServer, client: int) -> Message:
        """What the client's last group has averaged, first the model; or the server's answers."""
        if self.params.exchange == "features":
            answers = server["answers"].get(str(client))
            return {} if answers is None else {"answers": answers}
        group = server["members"].get(str(client))
        return super().broadcast(server, client) if group is None else dict(server["groups"][group])

    def aggregate(self, server: TagFedServer, replies: list[Reply], log: Log) -> State:
        if self.params.averages_all:
            return super().aggregate(server, replies, log)
        groups: dict[str, list[Reply]] = {}
        for reply in sorted(replies, key=lambda each: each.client):
            if reply.samples and "group" in reply.message:
                groups.setdefault(str(int(reply.message["group"])), []).append(reply)
        if groups:
            log.numbers["clients in a group"] = sum(map(len, groups.values())) / len(groups)
        if self.params.exchange == "features":
            return self.answer(server, groups, log)
        means = {name: super(TagFed, self).aggregate({}, g, log) for name, g in groups.items()}
        new = {str(reply.client): name for name, group in groups.items() for reply in group}
        members = server["members"] | new
        known = server["groups"] | means
        in_use = {name: known[name] for name in sorted(set(members.values()))}
        return {**server, "members": members, "groups": in_use}

    def answer(self, server: TagFedServer, groups: dict[str, list[Reply]], log: Log) -> State:
        tails = dict(server["tails"])
        answers = dict[str, Tensor]()
        with log.clock("tails"):
            for name, group in groups.items():
                tail = FlatModel(build_seeded(self.build_tail, server["seed"], "tail"))
                tail.load(tails.get(name, tail.parameters))
                draw = generator(server["seed"], server["round"], name, "tail")
                self.fit_tail(tail, [reply.message for reply in group], draw)
                tails[name] = tail.parameters
                with torch.no_grad():
                    for reply in group:
                        answers[str(reply.client)] = tail.module(reply.message["features"])
        return {**server, "tails": tails, "answers": answers, "round": server["round"] + 1}

    def build_tail(self) -> nn.Module:
        first = nn.Linear(self.classifier.features, HIDDEN)
        return nn.Sequential(first, nn.ReLU(), nn.Linear(HIDDEN, self.runtime.classes))

    def fit_tail(self, tail: FlatModel, messages: list[Message], draw: torch.Generator) -> None:
        names = ("features", "logits", "labels")
        features, logits, labels = (torch.cat([m[name] for m in messages]) for name in names)
        for _ in range(EPOCHS):
            order = torch.randperm(len(labels), generator=draw)
            for batch in order.split(BATCH):
                tail.gradients.zero_()
                outputs = tail.module(features[batch])
                self.mixed_loss(outputs, labels[batch].long(), logits[batch]).backward()
                tail.parameters.add_(tail.gradients, alpha=-self.params.tail_lr)

    def mixed_loss(self, outputs: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
        distilled = softened_divergence(outputs, teacher, TEMPERATURE)
        return torch.lerp(F.cross_entropy(outputs, labels), distilled, self.params.kd)

    def init_client(self, client: int, server: State) -> PackedState:
        return {
            "owners": self.owners.clone(),
            "weights": server["parameters"].clone(),
            "augmented": server["parameters"].clone(),
            "tasks": {},
            "keys": [],
            "task": 0,
            "new": -1,
            "experiences": [],
        }

    def key(self, task: Task) -> str:
        return "" if self.params.trace == "none" else f"{task.domain}: {task.classes}"

    def apply_received(self, client_round: ClientRound) -> PackedState:
        """The state with what the client has received for the task that it trained last."""
        state: PackedState = client_round.state
        message = client_round.message
        if "parameters" not in message:
            return state
        own = state["tasks"][str(state["task"])]["buffers"] if state["task"] else self.untrained
        return with_values(state, message["parameters"], message.get("buffers", own))

    def select_task(self, client_round: ClientRound, state: PackedState) -> PackedState:
        state = self.prune(state, 1)
        key = self.key(client_round.plan.clients[client_round.client][client_round.task])
        if key in state["keys"]:
            return {**state, "task": state["keys"].index(key) + 1}
        buffers = client_round.message.get("buffers", self.untrained)
        return with_task(state, key, client_round.experience, buffers)

    def prune(self, state: PackedState, progress: float) -> PackedState:
        """The state in which the newest task owns as little as after a part of its pruning."""
        share = free_share(self.params.keep, len(state["keys"]), progress)
        return pruned(state, share, self.sizes)

    def start(self, client_round: ClientRound) -> TagFedContext:
        state = self.apply_received(client_round)
        rounds = self.runtime.training.rounds
        starts = client_round.first
        if starts and len(client_round.indices):
            state = self.select_task(client_round, state)
        elif state["new"] == client_round.experience and rounds > 1:
            state = self.prune(state, client_round.round / (rounds - 1))
        if not state["task"]:
            return TagFedContext(state)
        self.model.load(*sub_model(state, state["task"]))
        lr = self.params.mask_lr if starts else None
        weights = None if trained(state).all() else TaskWeights(state, lr, self.runtime.device)
        answers = None if starts else client_round.message.get("answers")
        return TagFedContext(state, weights, answers)

    def receive(self, client_round: ClientRound) -> None:
        weights = self.apply_received(client_round)["weights"]
        message = {**client_round.message, "parameters": weights}
        self.runtime.load_received(message, client_round.state)

    def batches(self, client_round: ClientRound, context: TagFedContext) -> Iterator[Batch]:
        if context.answers is None or not self.params.kd:
            yield from super().batches(client_round, context)
            return
        answers = context.answers.to(self.runtime.device)
        images, labels = self.runtime.train_images(client_round.indices)
        every = torch.arange(len(labels))  # batches tell which images they have, not their labels
        for batch in self.runtime.epochs(client_round, images, every, every):
            yield replace(batch, targets=labels[batch.targets], soft=answers[batch.targets])

    def step(self, batch: Batch, context: TagFedContext) -> Tensor:
        loss = super().step(batch, context)
        if context.weights is not None:
            context.weights.compose(self.model.parameters)
        return loss

    def loss(self, batch: Batch, context: TagFedContext) -> Tensor:
        if batch.soft is None:
            return super().loss(batch, context)
        return self.mixed_loss(self.model.module(batch.images), batch.targets, batch.soft)

    def correct_gradient(self, batch: Batch, context: TagFedContext) -> None:
        if context.weights is not None:
            context.weights.train_mask(self.model.gradients)

    def update_state(self, client_round: ClientRound, context: TagFedContext) -> State:
        state = context.state
        base = super().update_state(client_round, context)
        if "buffers" in base:
            state = {**state, "buffers": base["buffers"]}
        if not len(client_round.indices):
            return state
        state = {**state, "experiences": client_round.recorded}
        values = self.model.parameters.cpu()[trained(state)]
        state = with_values(state, values, self.model.buffers.cpu().clone())
        weights = context.weights
        if weights is None or weights.adam is None:
            return state
        name = str(state["task"])
        picked = weights.picked().cpu()
        before = int((weights.earlier != 0).sum())
        client_round.log.numbers["picked share"] = int(picked.sum()) / max(1, before)
        state["tasks"][name] = {**state["tasks"][name], "picked": pack_bits(picked)}
        return state

    def upload(self, client_round: ClientRound, context: TagFedContext) -> Message:
        """The weights that the task trains; or features, logits and labels, if they are used."""
        state = context.state
        number = {"group": torch.tensor([self.group_number(state)])}
        if self.params.exchange == "features":
            silent = client_round.last or not self.params.kd or not len(client_round.indices)
            return {} if silent else {**number, **self.features_of(client_round)}
        message = super().upload(client_round, context)
        message["parameters"] = message["parameters"][trained(state)]
        return message if self.params.averages_all else {**message, **number}

    def group_number(self, state: PackedState) -> int:
        """The group that exchanges: the same task and, for weights, the same owners."""
        keys = state["keys"][: state["task"]]
        if self.params.exchange == "features":
            return address("group", *keys[-1:])
        owned = (state["owners"] == state["task"]).numpy().tobytes()
        return address("group", *keys, hashlib.sha256(owned).hexdigest())

    def features_of(self, client_round: ClientRound) -> Message:
        data = self.runtime.dataset
        indices = client_round.indices
        features = self.runtime.outputs(data.x_train[indices], self.classifier.encode)
        logits = self.classifier.head(features.to(self.runtime.device)).detach().cpu()
        kind = torch.uint8 if self.runtime.classes <= 256 else torch.int32
        return {"features": features, "logits": logits, "labels": data.y_train[indices].to(kind)}

    def personal_scores(self, client_round: ClientRound) -> Tensor:
        """Scores by all sub-models, where the task is known by its own.  # [scorings, 1, T]"""
        state = self.apply_received(client_round)
        if not state["task"]:
            return super().personal_scores(client_round)
        plan = client_round.plan
        client = client_round.client
        keys = state["keys"]
        needed = indices_of_tests(self.runtime, plan, [client])
        outputs = [self.probabilities(state, task + 1, needed) for task in range(len(keys))]
        rate = partial(accuracies, self.runtime, plan, [client], client_round.experience)
        scores = rate(torch.stack(outputs).amax(0))
        known = SCORINGS.index("task")
        for task, key in enumerate(map(self.key, plan.clients[client])):
            if key in keys:
                own = rate(outputs[keys.index(key)])
                scores[known, :, task] = own[known, :, task]
        return scores

    def probabilities(self, state: PackedState, task: int, needed: Tensor) -> Tensor:
        """A sub-model's probabilities for some test images; 0 for others.  # [N, classes]"""
        self.model.load(*sub_model(state, task))
        probabilities = torch.zeros(len(self.runtime.dataset.y_test), self.runtime.classes)
        probabilities[needed] = self.runtime.outputs(self.runtime.dataset.x_test[needed]).softmax(1)
        return probabilities
