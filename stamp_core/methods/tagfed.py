"""TagFed (Wang et al., 2024): tasks own weights of one network; clients with a task share it."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.client.runtime import ClientRuntime
from stamp_core.client.scoring import accuracies, indices_of_tests, score
from stamp_core.config.decode import invalid, require_above, require_at_least
from stamp_core.core.seeding import address, generator
from stamp_core.data.split import Plan, Task
from stamp_core.methods.base.distillation import softened_divergence
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
from stamp_core.methods.base.task_server import pack_bits, unpack_bits
from stamp_core.models.flat import FlatModel
from stamp_core.models.generators import build_seeded
from stamp_core.models.packed import (
    COPIED,
    FREE,
    TaskWeights,
    final_free_share,
    free_share,
    initial_owners,
    prune,
)
from stamp_core.results.records import SCORINGS

HIDDEN, BATCH = 64, 128  # units of the server's tails, features in a step of their training


@dataclass(frozen=True)
class TagFedParams(FedAvgParams):
    """What clients with the same task exchange, and how weights are divided among tasks."""

    # "features": features and logits of the training images, for which the server's tail of the
    # task returns other logits, as published. "weights": the task's weights, which are averaged.
    exchange: Literal["features", "weights"] = "features"
    trace: Literal["task", "none"] = "task"  # "none": all tasks count as the same one
    keep: float = 0.1  # share of the encoder's weights that each task keeps
    mask_lr: float = 1e-4  # of Adam; masks of earlier weights learn in the first round of a task
    kd: float = 0.1  # share of distillation in the losses of clients and of the server's tails
    temperature: float = 5.0
    tail_epochs: int = 20
    tail_lr: float = 0.2

    def __post_init__(self) -> None:
        """Refuse shares out of range, and a server learning rate where no model is averaged."""
        super().__post_init__()
        require_above(self, 0, "keep", "temperature", "tail_lr")
        require_at_least(self, 0, "mask_lr", "kd", "tail_epochs")
        for name in ("keep", "kd"):
            if getattr(self, name) > 1:
                raise invalid(name, getattr(self, name), "at most 1")
        if self.server_lr != 1 and not self.averages_all:
            right = "1 unless exchange is 'weights' and trace 'none'"
            raise invalid("server_lr", self.server_lr, right)

    @property
    def averages_all(self) -> bool:
        """Whether there is a global model: the average of all clients."""
        return self.exchange == "weights" and self.trace == "none"


class TagFed(Method):
    """Each task of a client owns some of its encoder's weights; clients with its task exchange.

    A new task takes all free weights, is trained, and is pruned from round to round to its share;
    weights of earlier tasks are fixed, and a mask picks those that it uses. Biases, normalisation
    and head are copied for each task. A task that returns is trained again, in a copy: later tasks
    keep what they were built on.

    The client is told which task it trains, and the test images' task in the scoring "task", as in
    the released code. Without it the class with the largest probability of all sub-models is
    predicted.

    State of a client: `owners`, the weights as tasks first left them (`weights`) and after their
    returns (`augmented`), `tasks` by number from 1, their `keys` in this order, the current `task`,
    the experience in which the client trained last, and the one in which it met a `new` task last.
    """

    Params: ClassVar = TagFedParams
    models: tuple[str, ...] = ("personal", "local")
    fedavg_equivalent: ClassVar[dict[str, Any]] = {
        "exchange": "weights",
        "trace": "none",
        "keep": 1.0,
    }
    group = "continual"

    def __init__(self, params: TagFedParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.sizes = [tensor.numel() for tensor in runtime.model.tensors]
        self.owners = initial_owners(runtime.classifier)
        self.features = next(runtime.classifier.head.parameters()).shape[1]
        if params.averages_all:
            self.models = ("global", "personal", "local")

    def initial_states(self, plan: Plan) -> InitialStates:
        """The first states; more tasks than owners can number are refused."""
        if plan.tasks >= COPIED:
            raise invalid("split.tasks", plan.tasks, f"below {COPIED} for tagfed")
        return super().initial_states(plan)

    # --- the server

    def init_server(self, seed: int) -> State:
        """The initial weights; what groups of clients have, by the number of the group."""
        counters = {"seed": seed, "round": 0}
        return {**super().init_server(seed), **counters, "groups": {}, "members": {}, "answers": {}}

    def broadcast(self, server: State, client: int) -> Message:
        """What the client's last group has averaged, at first the model; or the server's answers.

        Without an answer nothing.
        """
        if self.params.exchange == "features":
            answers = server["answers"].get(str(client))
            return {} if answers is None else {"answers": answers}
        group = server["groups"].get(server["members"].get(str(client)))
        return super().broadcast(server, client) if group is None else dict(group)

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The server's next state: every group of clients by itself."""
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
        members, known = server["members"] | new, server["groups"] | means
        in_use = {name: known[name] for name in sorted(set(members.values()))}
        return {**server, "members": members, "groups": in_use}

    def answer(self, server: State, groups: dict[str, list[Reply]], log: Log) -> State:
        """The state with the tails of the groups' tasks, trained, and their logits for clients."""
        tails, answers = dict(server["groups"]), dict[str, Tensor]()
        with log.clock("tails"):
            for name, group in groups.items():
                tail = FlatModel(build_seeded(self.build_tail, server["seed"], "tail"))
                tail.load(tails.get(name, tail.parameters))
                draw = generator(server["seed"], server["round"], name, "tail")
                self.fit_tail(tail, [reply.message for reply in group], draw)
                tails[name] = tail.parameters
                with torch.no_grad():
                    answers |= {
                        str(r.client): tail.module(r.message["features"]).clone() for r in group
                    }
        return {**server, "groups": tails, "answers": answers, "round": server["round"] + 1}

    def build_tail(self) -> nn.Module:
        """The server's network for one task, from features to logits."""
        first, last = nn.Linear(self.features, HIDDEN), nn.Linear(HIDDEN, self.runtime.classes)
        return nn.Sequential(first, nn.ReLU(), last)

    def fit_tail(self, tail: FlatModel, messages: list[Message], draw: torch.Generator) -> None:
        """SGD of a tail on what the clients of a group have sent, distilled from their logits."""
        names = ("features", "logits", "labels")
        features, logits, labels = (torch.cat([m[name] for m in messages]) for name in names)
        for _ in range(self.params.tail_epochs):
            order = torch.randperm(len(labels), generator=draw)
            for batch in order.split(BATCH):
                tail.gradients.zero_()
                outputs, known = tail.module(features[batch]), labels[batch].long()
                self.mixed_loss(outputs, known, logits[batch]).backward()
                tail.parameters.add_(tail.gradients, alpha=-self.params.tail_lr)

    def mixed_loss(self, outputs: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
        """Cross-entropy and distillation, as shares of 1."""
        distilled = softened_divergence(outputs, teacher, self.params.temperature)
        return torch.lerp(F.cross_entropy(outputs, labels), distilled, self.params.kd)

    # --- a client's weights

    def init_client(self, client: int, server: State) -> State:
        """The initial weights, which no task owns."""
        vectors = {name: server["parameters"].clone() for name in ("weights", "augmented")}
        own = {"owners": self.owners.clone(), "keys": [], "tasks": {}, "task": 0}
        return {**vectors, **own, "experience": -1, "new": -1}

    def key(self, task: Task) -> str:
        """What makes two tasks the same one."""
        return "" if self.params.trace == "none" else f"{task.domain}: {task.classes}"

    def trained(self, state: State) -> Tensor:
        """Which weights the current task trains: all before the first one.  # bool [P]"""
        owners, task = state["owners"], state["task"]
        owned: Tensor = (owners == task) | (owners == COPIED)
        return owned

    def with_values(self, state: State, values: Tensor, buffers: Tensor) -> State:
        """The state with other values of what the current task trains.

        A task that has returned leaves the weights that later tasks are built on.
        """
        owners, task = state["owners"], state["task"]
        augmented = state["augmented"].clone()
        augmented[self.trained(state)] = values
        changed = {**state, "augmented": augmented}
        if not task:
            return {**changed, "weights": augmented}
        record = {**state["tasks"][str(task)], "rest": augmented[owners == COPIED]}
        changed["tasks"] = {**state["tasks"], str(task): {**record, "buffers": buffers}}
        if state["new"] == state["experience"]:
            changed["weights"] = torch.where(owners == task, augmented, state["weights"])
        return changed

    def settled(self, client_round: ClientRound) -> State:
        """The state with what the client has received for the task that it trained last."""
        state, message = client_round.state, client_round.message
        if "parameters" not in message:
            return state
        record = state["tasks"].get(str(state["task"]), {"buffers": self.runtime.untrained.cpu()})
        buffers = message.get("buffers", record["buffers"])
        return self.with_values(state, message["parameters"], buffers)

    def located(self, client_round: ClientRound, state: State) -> State:
        """The state in which the new experience's task is the current one: found, or grown."""
        state, plan = self.pruned(state, 1, 1), client_round.plan
        key, keys = self.key(plan.clients[client_round.client][client_round.task]), state["keys"]
        if key in keys:
            return {**state, "task": keys.index(key) + 1}
        task, owners = len(keys) + 1, state["owners"]
        last = state["tasks"].get(str(state["task"]))
        if last is None:
            buffers = client_round.message.get("buffers", self.runtime.untrained.cpu())
            last = {"rest": state["weights"][owners == COPIED], "buffers": buffers.clone()}
        every = pack_bits(torch.ones(len(owners), dtype=torch.bool))
        grown = {"owners": owners.masked_fill(owners == FREE, task), "task": task}
        tasks = {**state["tasks"], str(task): {**last, "picked": every}}
        new = {"keys": [*keys, key], "new": client_round.experience}
        return {**state, **grown, **new, "tasks": tasks}

    def pruned(self, state: State, step: int, steps: int) -> State:
        """The state in which the newest task owns as little as after a step of its pruning."""
        task = len(state["keys"])
        share = free_share(step, steps, final_free_share(self.params.keep, task))
        if not task or not share:
            return state
        owners = prune(state["weights"], state["owners"], task, share, self.sizes)
        return {**state, "owners": owners}

    def sub_model(self, state: State, task: int) -> tuple[Tensor, Tensor]:
        """Parameters and buffers of a task's part of the network.  # [P], [B]"""
        owners, record = state["owners"], state["tasks"][str(task)]
        used = (owners < task) & (owners != FREE) & unpack_bits(record["picked"], len(owners))
        earlier = torch.where(used, state["weights"], 0.0)
        parameters = torch.where(owners == task, state["augmented"], earlier)
        parameters[owners == COPIED] = record["rest"]
        return parameters, record["buffers"]

    # --- a client's training

    def receive(self, client_round: ClientRound) -> None:
        """Load the sub-model of the current task: grown, pruned or found before."""
        state, training = self.settled(client_round), self.runtime.training
        starts = state["experience"] != client_round.experience
        if starts and len(self.train_indices(client_round)):
            state = self.located(client_round, state)
        elif state["new"] == client_round.experience and training.rounds > 1:
            state = self.pruned(state, client_round.round_id.round, training.rounds - 1)
        client_round.scratch["own"] = state
        if not state["task"]:
            buffers = client_round.message.get("buffers", self.runtime.untrained)
            self.model.load(state["weights"], state.get("buffers", buffers))
            return
        self.model.load(*self.sub_model(state, state["task"]))
        client_round.scratch["weights"] = self.task_weights(state, starts)
        if not starts and "answers" in client_round.message:
            answers = client_round.message["answers"].to(self.runtime.device)
            client_round.scratch["answers"] = answers

    def task_weights(self, state: State, starts: bool) -> TaskWeights | None:
        """What fixes the weights that the current task does not train; None if it trains all."""
        owners, task, trained = state["owners"], state["task"], self.trained(state)
        if trained.all():
            return None
        before = (owners < task) & (owners != FREE)
        picked = before & unpack_bits(state["tasks"][str(task)]["picked"], len(owners))
        vectors = (trained, torch.where(before, state["weights"], 0.0), picked)
        owned, earlier, used = (vector.to(self.runtime.device) for vector in vectors)
        lr = self.params.mask_lr if starts and before.any() else None
        return TaskWeights(owned, earlier, used, lr)

    def compose(self, client_round: ClientRound) -> None:
        """Restore the fixed weights in the live model: weight decay has changed them."""
        weights: TaskWeights | None = client_round.scratch.get("weights")
        if weights is not None:
            weights.compose(self.model.parameters)

    def train(self, client_round: ClientRound) -> list[Tensor]:
        """Local SGD on the weights of the current task."""
        losses = super().train(client_round)
        self.compose(client_round)
        return losses

    def batches(self, client_round: ClientRound) -> Iterator[tuple[Tensor, Tensor]]:
        """The local epochs; the server's answers for a batch are in `scratch["teacher"]`."""
        if "answers" not in client_round.scratch or not self.params.kd:
            yield from super().batches(client_round)
            return
        images, labels = self.runtime.train_images(client_round.indices)
        every = torch.arange(len(labels))
        for batch, places in self.runtime.epochs(client_round.round_id, images, every, every):
            client_round.scratch["teacher"] = client_round.scratch["answers"][places]
            yield batch, labels[places]

    def loss(self, client_round: ClientRound, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy, mixed with distillation from the server's answers if there are any."""
        self.compose(client_round)
        if "teacher" not in client_round.scratch:
            return super().loss(client_round, images, labels)
        logits = self.model.module(images)
        return self.mixed_loss(logits, labels, client_round.scratch["teacher"])

    def correct_gradient(self, client_round: ClientRound) -> None:
        """No gradient for weights of other tasks; one step of the mask that picks them."""
        weights: TaskWeights | None = client_round.scratch["weights"]
        if weights is not None:
            weights.correct(self.model.gradients)

    def update_state(self, client_round: ClientRound) -> State:
        """The state with the trained weights and, after a first round, with what is picked."""
        base, state = super().update_state(client_round), client_round.scratch["own"]
        buffers = {name: base[name] for name in ("buffers",) if name in base}
        if not len(client_round.indices):
            return {**state, **buffers}
        live, trained = self.model, self.trained(state)
        state = {**state, **buffers, "experience": client_round.experience}
        state = self.with_values(state, live.parameters.cpu()[trained], live.buffers.cpu().clone())
        weights: TaskWeights | None = client_round.scratch["weights"]
        if weights is None or weights.adam is None:
            return state
        name, picked = str(state["task"]), weights.picked().cpu()
        before = int((weights.earlier != 0).sum())
        client_round.log.numbers["picked share"] = int(picked.sum()) / max(1, before)
        record = {**state["tasks"][name], "picked": pack_bits(picked)}
        return {**state, "tasks": {**state["tasks"], name: record}}

    # --- a client's message

    def upload(self, client_round: ClientRound) -> Message:
        """The weights that the current task trains; or features, logits and labels of its images.

        None of these after the last round of a task, as there is nobody to use an answer.
        """
        state = client_round.scratch["own"]
        number = {"group": torch.tensor([self.group_number(state)])}
        if self.params.exchange == "features":
            silent = client_round.last or not self.params.kd or not len(client_round.indices)
            return {} if silent else {**number, **self.features_of(client_round)}
        message = super().upload(client_round)
        message["parameters"] = message["parameters"][self.trained(state)]
        return message if self.params.averages_all else {**message, **number}

    def group_number(self, state: State) -> int:
        """The number of the group that exchanges: the same task and, for weights, the same owners.

        Then all that the task is built on is equal as well, as it comes from the same averages.
        """
        keys = state["keys"][: state["task"]]
        if self.params.exchange == "features":
            return address("group", *keys[-1:])
        owned = (state["owners"] == state["task"]).numpy().tobytes()
        return address("group", *keys, hashlib.sha256(owned).hexdigest())

    def features_of(self, client_round: ClientRound) -> Message:
        """Features, logits and labels of the task's training images, by the trained sub-model."""
        data, indices = self.runtime.dataset, client_round.indices
        features = self.runtime.outputs(data.x_train[indices], self.classifier.encode)
        logits = self.classifier.head(features.to(self.runtime.device)).detach().cpu()
        kind = torch.uint8 if self.runtime.classes <= 256 else torch.int32
        return {"features": features, "logits": logits, "labels": data.y_train[indices].to(kind)}

    # --- evaluation

    def personal_scores(self, client_round: ClientRound) -> Tensor:
        """Scores by all sub-models, where the task is known by its own.  # [scorings, 1, T]"""
        state, plan, runtime = self.settled(client_round), client_round.plan, self.runtime
        place = client_round.client
        if not state["task"]:
            self.receive(client_round)
            return score(runtime, plan, [place], client_round.experience)
        needed = indices_of_tests(runtime, plan, [place])
        outputs = [
            self.probabilities(state, task + 1, needed) for task in range(len(state["keys"]))
        ]
        rate = partial(accuracies, runtime, plan, [place], client_round.experience)
        scores = rate(torch.stack(outputs).amax(0))
        keys = [self.key(task) for task in plan.clients[place]]
        known = SCORINGS.index("task")
        for task, key in enumerate(keys):
            if key in state["keys"]:
                own = rate(outputs[state["keys"].index(key)])
                scores[known, :, task] = own[known, :, task]
        return scores

    def probabilities(self, state: State, task: int, needed: Tensor) -> Tensor:
        """A sub-model's probabilities for some test images; 0 for others.  # [N, classes]"""
        self.model.load(*self.sub_model(state, task))
        probabilities = torch.zeros(len(self.runtime.dataset.y_test), self.runtime.classes)
        probabilities[needed] = self.runtime.outputs(self.runtime.dataset.x_test[needed]).softmax(1)
        return probabilities
