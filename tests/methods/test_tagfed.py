"""TagFed against a naive reference; what a client keeps, messages, refused plans."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import reference
import small
import torch
import torch.nn.functional as F
from reference import (
    CLOSE,
    CONFIGURATIONS,
    Array,
    FedAvgReference,
    Numbers,
    Reply,
    State,
    Visit,
    softmax,
)
from small import BATCH_NORM, P, run, tiny
from torch import nn

from stamp_core.client.runtime import RoundId
from stamp_core.config.decode import ParameterError
from stamp_core.core.seeding import address, generator
from stamp_core.data.plan import Plan
from workbench.methods.base.task_server import unpack_bits
from workbench.methods.tagfed.packed import FREE, PackedState, sub_model

FEW = {"images_per_class": 20}  # 40 images in a task
WEIGHTS = 64 * 32  # of the small network's encoder; R other parameters are copied for each task
R = P - WEIGHTS


class TagFedReference(FedAvgReference):
    """A client has a mask of owners (0: free, -1: copied) and the vectors that tasks have left."""

    def start(self) -> None:
        self.rounds = 0
        self.groups: dict[Any, Array] = {}
        self.members: dict[int, Any] = {}
        self.tails: dict[str, nn.Module] = {}
        self.answers: dict[int, Array] = {}

    def first_state(self, client: int) -> State:
        owner = np.full(P, -1)
        owner[:WEIGHTS] = 0
        own = {"_owner": owner, "weights": self.theta, "augmented": self.theta}
        return {**own, "_keys": [], "_rest": {}, "_picked": {}, "_task": 0, "_new": -1, "_seen": -1}

    def model(self, state: State, task: int) -> Array:
        owner = state["_owner"]
        picked = (owner > 0) & (owner < task) & state["_picked"][task]
        theta = np.where(owner == task, state["augmented"], np.where(picked, state["weights"], 0))
        theta[owner == -1] = state["_rest"][task]
        return theta

    def store(self, state: State, theta: Array) -> None:
        """Keep what the current task has trained; if it is new, as what later tasks build on."""
        task, owner = state["_task"], state["_owner"]
        mine = (owner == task) | (owner == -1)
        state["augmented"] = np.where(mine, theta, state["augmented"])
        state["_rest"][task] = theta[owner == -1]
        if state["_new"] == state["_seen"]:
            state["weights"] = np.where(owner == task, theta, state["weights"])

    def prune(self, state: State, progress: float) -> None:
        task, owner = len(state["_keys"]), state["_owner"]
        left = 1 - self.params.keep * (task - 1)
        final = max(0, 1 - self.params.keep / left) if left > 0 else 0
        places = ((owner == task) | (owner == 0)).nonzero()[0]
        size = np.where(owner == 0, -1, np.abs(state["weights"]))[places]
        count = round(final * (1 - (1 - progress) ** 3) * len(places)) if task else 0
        owner[places[np.argsort(size, kind="stable")[:count]]] = 0

    def choose(self, visit: Visit, state: State) -> None:
        self.prune(state, 1)
        task = self.plan.clients[visit.client][visit.task]
        key = f"{task.domain}: {task.classes}"
        owner, before = state["_owner"], state["_task"]
        if key not in state["_keys"]:
            state["_keys"].append(key)
            new = len(state["_keys"])
            owner[owner == 0] = new
            initial = state["weights"][owner == -1]
            state["_rest"][new] = state["_rest"][before] if before else initial
            state["_picked"][new] = np.ones(P, bool)
            state["_new"] = visit.experience
        state["_task"] = state["_keys"].index(key) + 1

    def local(self, visit: Visit, state: State) -> Reply:
        if visit.client in self.members and self.params.exchange == "weights":
            self.store(state, self.groups[self.members[visit.client]])
        starts = visit.experience != state["_seen"]
        if starts and len(visit.indices):
            self.choose(visit, state)
        elif state["_new"] == visit.experience and self.training.rounds > 1:
            self.prune(state, visit.round / (self.training.rounds - 1))
        if not len(visit.indices):
            return Reply(visit.client, self.theta, 0)
        theta = self.train(visit, state, starts)
        state["_seen"] = visit.experience
        self.store(state, theta)
        x = self.x[visit.indices]
        sent: State = {"features": self.features(theta, x), "logits": self.logits(theta, x)}
        sent |= {"labels": self.y[visit.indices], "key": state["_keys"][state["_task"] - 1]}
        keys = tuple(state["_keys"][: state["_task"]])
        sent["group"] = (keys, (state["_owner"] == state["_task"]).tobytes())
        return Reply(visit.client, theta, len(x), {} if self.silent(visit) else sent)

    def silent(self, visit: Visit) -> bool:
        return self.params.exchange == "features" and visit.last

    def train(self, visit: Visit, state: State, starts: bool) -> Array:
        """SGD on what the task owns; Adam on the mask m of earlier weights, dL/dm = w dL/dθ."""
        task, owner = state["_task"], state["_owner"]
        before, mine = (owner > 0) & (owner < task), (owner == task) | (owner == -1)
        earlier = np.where(before, state["weights"], 0)
        mask = 0.01 * (before & state["_picked"][task])
        theta = self.model(state, task)
        velocity, first, second = np.zeros(P), np.zeros(P), np.zeros(P)
        answers = None if starts else self.answers.get(visit.client)
        batches = self.batches(visit, indices=np.arange(len(visit.indices)))
        for k, places in enumerate(batches, 1):
            own = visit.indices[places]
            slopes = self.slopes(theta, own, None if answers is None else answers[places])
            gradient = self.backward(theta, self.x[own], slopes)
            if starts:
                slope = earlier * gradient
                first = 0.9 * first + 0.1 * slope
                second = 0.999 * second + 0.001 * slope**2
                root = np.sqrt(second / (1 - 0.999**k)) + 1e-8
                mask = mask - self.params.mask_lr * first / (1 - 0.9**k) / root
            gradient = gradient * mine + self.training.weight_decay * theta
            velocity = self.training.momentum * velocity + gradient
            theta = theta - self.training.lr * velocity
            theta = np.where(mine, theta, np.where(mask > 0.005, earlier, 0))
        if starts and before.any():
            state["_picked"][task] = mask > 0.005
        return theta

    def slopes(self, theta: Array, own: Numbers, teacher: Array | None) -> Array:
        """dL/dz of (1 - kd) cross-entropy + kd T^2 KL(teacher || student)."""
        z, t, kd = self.logits(theta, self.x[own]), 5.0, self.params.kd
        hard = softmax(z) - np.eye(self.classes)[self.y[own]]
        if teacher is None:
            return np.asarray(hard / len(own))
        soft = t * (softmax(z / t) - softmax(teacher / t))
        return np.asarray(((1 - kd) * hard + kd * soft) / len(own))

    def aggregate(self, replies: list[Reply]) -> None:
        self.answers = {}
        sent = [reply for reply in replies if reply.sent]
        for name in {reply.sent["group"] for reply in sent}:
            group = [reply for reply in sent if reply.sent["group"] == name]
            self.groups[name] = self.mean([reply.theta for reply in group], group)
            self.members |= {reply.client: name for reply in group}
        if self.params.exchange == "features":
            for key in {reply.sent["key"] for reply in sent}:
                self.answer(key, [reply for reply in sent if reply.sent["key"] == key])
        self.rounds += 1

    def answer(self, key: str, group: list[Reply]) -> None:
        """Train the task's tail on all features, with distillation; its logits for each client."""
        if key not in self.tails:
            with torch.random.fork_rng():
                torch.manual_seed(address(self.plan.seed, "tail"))
                tail = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, self.classes))
            self.tails[key] = tail.double()
        tail, kd, t = self.tails[key], self.params.kd, 5.0
        pooled = [np.concatenate([r.sent[n] for r in group]) for n in ("features", "logits")]
        features, logits = map(torch.from_numpy, pooled)
        labels = torch.from_numpy(np.concatenate([reply.sent["labels"] for reply in group]))
        optimizer = torch.optim.SGD(tail.parameters(), self.params.tail_lr)
        draw = generator(self.plan.seed, self.rounds, str(address("group", key)), "tail")
        for _ in range(20):
            for batch in torch.randperm(len(labels), generator=draw).split(128):
                z = tail(features[batch])
                teacher = (logits[batch] / t).softmax(1)
                soft = t**2 * F.kl_div((z / t).log_softmax(1), teacher, reduction="batchmean")
                optimizer.zero_grad()
                ((1 - kd) * F.cross_entropy(z, labels[batch]) + kd * soft).backward()
                optimizer.step()
        for reply in group:
            found = tail(torch.from_numpy(reply.sent["features"]))
            self.answers[reply.client] = found.detach().numpy()


def shared_tasks(plan: Plan) -> Plan:
    """Clients 0 and 1 have one order of tasks, 2 another one of the same, 3 other tasks."""
    a, b, c = plan.clients[0]
    return replace(plan, clients=((a, b, c), (a, b, c), (b, a, c), plan.clients[3]))


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(
    "params",
    [
        {"exchange": "weights", "keep": 0.3, "mask_lr": 0.003},
        {"exchange": "weights", "keep": 1.0},  # equal owners with another past: another group
        {"exchange": "features", "keep": 0.2, "mask_lr": 0.001, "kd": 0.5},
    ],
    ids=["weights", "all weights", "features"],
)
def test_whole_runs_are_those_of_the_reference(params, configuration, tmp_path):
    kind = TagFedReference
    compared = reference.compare("tagfed", configuration, kind, tmp_path, shared_tasks, **params)
    _, naive, kept = compared
    for state, own in zip(kept, naive.clients, strict=True):
        assert state["keys"] == own["_keys"] and state["task"] == own["_task"]
        np.testing.assert_array_equal(state["owners"].to(torch.int8), own["_owner"])
        for name, task in state["tasks"].items():
            np.testing.assert_allclose(task["rest"], own["_rest"][int(name)], **CLOSE)
            picked = unpack_bits(task["picked"], P).numpy()
            np.testing.assert_array_equal(picked, own["_picked"][int(name)])


@pytest.mark.parametrize("network", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
@pytest.mark.parametrize("exchange", ["weights", "features"])
def test_other_tasks_never_change(exchange, network, tmp_path):
    """Bit for bit, though weights decay: neither by a new task nor by one that returns.

    A task that returns changes its own sub-model, but not the weights that later tasks build on.
    """
    training = {"weight_decay": 0.01, "momentum": 0.9}
    split = {**FEW, "tasks": 2, "cycles": 2}
    options: dict[str, Any] = {"network": network, "exchange": exchange, "keep": 0.3}
    experiment = tiny("tagfed", split=split, training=training, **options)
    plan = small.plan(experiment)
    after: list[PackedState] = []  # every experience
    for experience in range(4):
        with nullcontext() if experience == 3 else small.stopped_after(2):
            run(experiment, plan, resume=tmp_path)
        saved = small.saved(experiment, tmp_path)
        method: Any = small.worker(experiment, plan).method
        message = method.broadcast(saved["server"], 0)
        address = RoundId(0, 0, experience, 1, True)
        last = method.client_round(address, plan, saved["clients"][0], message)
        after.append(method.apply_received(last))
    for experience, (old, new) in enumerate(pairwise(after), 1):
        current = experience % 2 + 1
        other = 3 - current
        assert new["task"] == current
        small.assert_equal_trees([*sub_model(new, other)], [*sub_model(old, other)])
        if experience == 1:
            continue
        fixed = old["owners"] != FREE
        assert torch.equal(new["owners"][fixed], old["owners"][fixed])
        assert torch.equal(new["weights"][fixed], old["weights"][fixed])
        assert not torch.equal(sub_model(new, current)[0], sub_model(old, current)[0])


def test_without_tracing_pruning_and_distillation_it_is_local_training():
    """Features are of no use then; nothing is sent."""
    training = {"momentum": 0.9, "shift": 1, "epochs": 2}
    alone: dict[str, Any] = {"exchange": "features", "trace": "none", "keep": 1.0, "kd": 0.0}
    record = run(tiny("tagfed", split=FEW, training=training, **alone))
    local = run(tiny("local", split=FEW, training=training))
    np.testing.assert_array_equal(record.scores["personal"][:3], local.scores["personal"][:3])
    losses = [[row["loss"] for row in each.history] for each in (record, local)]
    assert losses[0] == losses[1]
    assert all(row["bytes"] == {"down": 0, "up": 0} for row in record.history)


def test_each_task_is_scored_by_its_own_sub_model_where_it_is_known(tmp_path):
    """Otherwise by the class with the largest probability of all sub-models."""
    experiment = tiny("tagfed", split=FEW, keep=0.3)
    plan = small.plan(experiment)
    record = run(experiment, plan, resume=tmp_path)
    state = small.saved(experiment, tmp_path)["clients"][0]
    runtime = small.worker(experiment, plan).runtime
    dataset = experiment.dataset()
    for task in range(3):
        test = plan.test_indices(dataset, 0, task)
        labels = dataset.y_test[test]
        each = []
        for number in (1, 2, 3):
            runtime.model.load(*sub_model(state, number))
            each.append(runtime.outputs(dataset.x_test[test]).softmax(1))
        own = torch.tensor(plan.clients[0][task].classes)
        told = own[each[task][:, own].argmax(1)] == labels
        routed = torch.stack(each).amax(0).argmax(1) == labels
        scores = record.scores["personal"][:, -1, 0, task]
        assert scores[2] == pytest.approx(float(told.double().mean()))
        assert scores[0] == pytest.approx(float(routed.double().mean()))


def test_more_tasks_than_a_byte_can_number_are_refused(monkeypatch):
    experiment = tiny("tagfed")
    plan = small.plan(experiment)
    method = small.worker(experiment, plan).method
    monkeypatch.setattr(Plan, "tasks", 255)
    with pytest.raises(ParameterError, match="tasks is 255; it must be below 255"):
        method.initial_states(plan)
