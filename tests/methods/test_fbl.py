"""FBL: whole runs on images and on scenes against a loss that is written out sample by sample."""

import math
from collections import defaultdict

import numpy as np
import pytest
import reference
import small
import torch
import torch.nn.functional as F
from reference import CONFIGURATIONS, Array, Numbers, RehearsalReference, Reply, State, Visit
from small import plan, run, tiny
from torch import Tensor
from torch.func import functional_call

from stamp_core.data.plan import Plan
from stamp_core.engine.experiment import Experiment
from stamp_core.models.networks import build_network
from stamp_core.results.records import Record

ROUNDING = 1e-6  # a quantile may be a sample's own entropy, computed here in another batch
MEMORY = small.kept(4)


class FBLReference(RehearsalReference):
    """Local SGD with the model received when a task began as the teacher of old classes."""

    background: tuple[int, ...] = ()  # the label of pixels of no class

    def start(self) -> None:
        self.logged: dict[tuple[str, int, int], list[float]] = defaultdict(list)

    def rows(self, theta: Tensor, x: Array) -> Tensor:
        """Logits as a function of the vector of weights, a row for each sample.  # [M, L]"""
        return torch.as_tensor(self.logits(theta, torch.tensor(x)))

    def local(self, visit: Visit, state: State) -> Reply:
        """A client round; the first one of a task keeps the received model."""
        new = state.get("experience") != visit.experience
        self.monitor(visit, state, new)
        theta = self.theta
        if new:
            old = theta if visit.experience else None
            state |= {"experience": visit.experience, "epochs": 0, "old": old}
            if visit.experience and self.background and self.params.from_background:
                theta = self.from_background(visit, theta)
        state |= {"visit": visit, "next": iter(self.replayed(visit, state)), "step": 0}
        if state["old"] is not None:
            state["limits"] = self.limits(visit, state)
        theta = self.sgd(visit, theta, state)
        state["epochs"] += self.training.epochs
        self.remember(visit, state)
        return Reply(visit.client, theta, len(visit.indices))

    def monitor(self, visit: Visit, state: State, new: bool) -> None:
        """The received model's mean entropy, and if it has grown by more than 0.6."""
        if not len(visit.indices):
            return
        p = self.rows(torch.tensor(self.theta), self.x[visit.indices]).softmax(1)
        entropy = float(-(p * p.log()).sum(1).mean())
        told = "monitor: hits" if new else "monitor: false alarms"
        jumped = entropy - state.get("entropy", -1) > 0.6
        state["entropy"] = entropy
        self.log(visit, "entropy", entropy)
        self.log(visit, told, jumped)

    def from_background(self, visit: Visit, theta: Array) -> Array:
        """Each new class starts with the background's weights, and both with a part of it."""
        classes = list(self.plan.clients[visit.client][visit.task].classes)
        width = self.shapes[-2][1]
        rest, weight, bias = np.split(theta, [-self.classes * (width + 1), -self.classes])
        weight, bias = weight.reshape(-1, width).copy(), bias.copy()
        weight[classes] = weight[-1]
        bias[[*classes, -1]] = bias[-1] - math.log(len(classes) + 1)
        return np.concatenate([rest, weight.ravel(), bias])

    def old_classes(self, visit: Visit) -> tuple[list[int], float, dict[int, int]]:
        """The teacher's classes, z, and the task in which each class was learnt; -1: this one."""
        tasks = [list(task.classes) for task in self.plan.clients[visit.client]]
        current = tasks[visit.task]
        before = {label for task in tasks[: visit.experience] for label in task}
        old = before - set(current)
        group = dict.fromkeys(current, -1)
        for number, task in enumerate(tasks[: visit.experience]):
            for label in task:
                group.setdefault(label, number)
        group |= dict.fromkeys(self.background, 0)
        columns = sorted((old or before) | set(self.background))
        return columns, len(old) / (len(old) + len(current)), group

    def taught(self, visit: Visit, x: Array, state: State) -> tuple[Array, Numbers, Array]:
        """The teacher's prediction among old classes, its class and its relative entropy."""
        columns = self.old_classes(visit)[0]
        q = self.rows(torch.tensor(state["old"]), x)[:, columns].softmax(1).numpy()
        entropy = -(q * np.log(np.maximum(q, 1e-300))).sum(1) / math.log(max(2, len(columns)))
        return q, np.array(columns)[q.argmax(1)], entropy

    def limits(self, visit: Visit, state: State) -> list[dict[int, float]]:
        """For each epoch the quantile of entropies by class, where labels are hidden."""
        x, hidden = self.hidden(visit, state)
        _, predicted, entropy = self.taught(visit, x, state)
        predicted, entropy = predicted[hidden], entropy[hidden]
        found = []
        for epoch in range(self.training.epochs):
            share = min(0.2 + 0.1 * (state["epochs"] + epoch), 0.8)
            quantiles = {n: np.quantile(entropy[predicted == n], share) for n in set(predicted)}
            found.append({n: max(0.001, value) for n, value in quantiles.items()})
        if len(entropy) and self.params.pseudo:
            used = [e <= found[-1][n] + 1e-6 for n, e in zip(predicted, entropy, strict=True)]
            self.log(visit, "pseudo labels used", np.mean(used))
        return found

    def log(self, visit: Visit, name: str, value: float) -> None:
        self.logged[name, visit.experience, visit.round].append(float(value))

    def hidden(self, visit: Visit, state: State) -> tuple[Array, Array]:
        """The exemplars: all of them may show an old class."""
        past = self.past(visit, state)
        return self.x[past], np.ones(len(past), bool)

    def step_gradient(self, theta: Array, x: Array, y: Numbers, state: State) -> Array:
        visit, past = state["visit"], next(state["next"])
        x, y = np.concatenate([x, self.x[past]]), np.concatenate([y, self.y[past]]).flatten()
        weights = torch.tensor(theta, requires_grad=True)
        logits = self.rows(weights, x)
        epoch = state["step"] // -(-len(visit.indices) // self.training.batch_size)
        state["step"] += 1
        if state["old"] is None:
            loss = F.cross_entropy(logits, torch.tensor(y))
        else:
            q, predicted, entropy = self.taught(visit, x, state)
            hidden = np.isin(y, self.background)
            hidden[len(y) - len(past) :] = True
            for n in np.flatnonzero(hidden) if self.params.pseudo else ():
                sure = entropy[n] <= state["limits"][epoch].get(predicted[n], 0.001) + ROUNDING
                y[n] = predicted[n] if sure else -1
            loss = self.loss(visit, logits, q, y)
        loss.backward()
        assert weights.grad is not None
        return weights.grad.numpy()

    def loss(self, visit: Visit, logits: Tensor, q: Array, y: Numbers) -> Tensor:
        """Weighted cross-entropy and the divergence of class means; -1: no label."""
        columns, z, group = self.old_classes(visit)
        p = logits.softmax(1)
        sure = logits.sigmoid() if isinstance(self, ScenesReference) else p
        known = np.flatnonzero(y >= 0)
        gap = {n: max(1e-7, 1 - sure[n, y[n]].item()) ** z for n in known}
        weight = dict.fromkeys(gap, 1.0)
        for task in set(group.values()):
            own = [n for n in gap if group.get(y[n]) == task]
            if self.params.weights == "all" or (self.params.weights == "old" and task >= 0):
                weight |= {n: gap[n] / np.mean([gap[other] for other in own]) for n in own}
        loss = sum(-w * logits[n].log_softmax(0)[y[n]] for n, w in weight.items()) / len(y)
        total, sum_of_weights = torch.zeros((), dtype=torch.float64), 0.0
        for label in set(y) - {-1}:
            own = [n for n in gap if y[n] == label]
            target = np.zeros(self.classes)
            target[columns] = q[own].mean(0)
            if label not in columns:
                leak = self.params.leak
                target = leak * target + (1 - leak) * np.eye(self.classes)[label]
            mean = p[own].mean(0)
            terms = [y_ * (math.log(y_) - mean[k].log()) for k, y_ in enumerate(target) if y_ > 0]
            importance = np.mean([weight[n] for n in own])
            total = total + importance * sum(terms)
            sum_of_weights += importance
        return loss + self.params.relation * total / max(sum_of_weights, 1e-30)


class ScenesReference(FBLReference):
    """The same for scenes, whose pixels are the samples: the network is a plain module."""

    def __init__(self, experiment: Experiment, plan: Plan) -> None:
        self.training, self.params = experiment.setting.training, experiment.params
        self.plan, self.data = plan, experiment.dataset()
        images = self.data.x_train[:, :-1].double() / 255
        mean, std = (each.double().view(-1, 1, 1) for each in (self.data.mean, self.data.std))
        self.x = ((images - mean) / std).numpy()
        self.y = self.data.x_train[:, -1].long().numpy()
        self.classes = len(self.data.classes) + 1
        self.background = (self.classes - 1,)
        self.net = build_network(experiment.setting.network, (1, 16, 16), self.classes, plan.seed)
        self.net.double()
        self.shapes = [tuple(p.shape) for p in self.net.parameters()]
        self.theta = small.flat(list(self.net.parameters())).detach().numpy()
        self.clients = [self.first_state(u) for u in range(len(plan.clients))]
        self.start()

    def rows(self, theta: Tensor, x: Array) -> Tensor:
        names = [name for name, _ in self.net.named_parameters()]
        weights = dict(zip(names, self.parts(theta), strict=True))
        maps = functional_call(self.net, weights, torch.tensor(x))
        return torch.as_tensor(maps).movedim(1, -1).flatten(0, 2)

    def hidden(self, visit: Visit, state: State) -> tuple[Array, Array]:
        return self.x[visit.indices], (self.y[visit.indices] == self.background).flatten()

    def remember(self, visit: Visit, state: State) -> None:
        """No exemplars."""


def assert_logged(record: Record, naive: FBLReference) -> None:
    assert {name for name, *_ in naive.logged} >= {"monitor: hits", "monitor: false alarms"}
    for (name, experience, round_), values in naive.logged.items():
        row = record.history[experience * naive.training.rounds + round_]
        assert row["notes"][name] == pytest.approx(np.mean(values), abs=0.02), name


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(
    "params",
    [
        {"memory": MEMORY, "relation": 2.0, "leak": 0.3},
        {"weights": "old", "relation": 3.0, "leak": 0.5},
        {"memory": MEMORY, "weights": "none", "pseudo": False},
    ],
    ids=["pseudo labels", "without exemplars", "own labels"],
)
def test_whole_runs_are_those_of_the_reference(params, configuration):
    record, naive, _ = reference.compare("fbl", configuration, FBLReference, **params)
    assert_logged(record, naive)


@pytest.mark.parametrize(
    "options",
    [
        {"training": {"rounds": 2, "epochs": 2, "batch_size": 4}},
        {"training": {"rounds": 3, "momentum": 0.5}, "leak": 0.4, "weights": "old"},
        {"training": {"rounds": 2}, "weights": "none", "from_background": False},
    ],
    ids=["epochs", "momentum", "no weights"],
)
def test_runs_on_scenes_are_those_of_the_reference(options):
    experiment = tiny("fbl", **small.SCENES, **options)
    record, naive = run(experiment), ScenesReference(experiment, plan(experiment))
    expected = naive.run()
    found = np.concatenate([value.ravel() for value in record.weights.values()])
    # a pixel at its threshold may be on either side of it
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-4)
    assert_logged(record, naive)
