"""Federated learning in plain NumPy: the second implementation that methods are compared with.

A network with one hidden layer whose gradient is written out, and all rounds of a run. It shares
with the package the images, the plan and the addresses of random draws, nothing else. A method's
reference overrides what the method changes, as briefly and naively as it can be written.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import small
import torch
from numpy.typing import NDArray

from stamp_core.core.seeding import generator
from stamp_core.data.plan import Plan
from stamp_core.engine.experiment import Experiment
from stamp_core.models.networks import build_network
from stamp_core.results.records import Record

Array = NDArray[np.float64]
Numbers = NDArray[np.int64]
State = dict[str, Any]
Gradient = Callable[[Array, Array, Numbers], Array]  # at weights, of images and labels

# Three configurations in which each method is compared over whole runs.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {"split": {"images_per_class": 20}},
    "momentum and absent clients": {
        "split": {"images_per_class": 12},
        "training": {
            "rounds": 3,
            "epochs": 2,
            "momentum": 0.5,
            "weight_decay": 0.01,
            "participation": 0.75,
        },
    },
    "two cycles of uneven clients": {
        "split": {"cycles": 2, "images_per_class": 15},
        "training": {"batch_size": 7, "lr": 0.05},
    },
}
# The same, and clients that join later or have no part in a task, with a falling learning rate.
GROWING: dict[str, dict[str, Any]] = {
    **CONFIGURATIONS,
    "growing clients": {
        "split": {
            "tasks": 4,
            "joining": 1,
            "old_share": 0.4,
            "order": "common",
            "classes_per_client": 1,
            "images_per_class": 20,
        },
        "training": {"rounds": 3, "clients_per_round": 3, "schedule": "cosine", "lr_end": 0.02},
    },
}
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}  # float32 against float64, after a whole run


@dataclass(frozen=True)
class Visit:
    client: int
    experience: int
    round: int
    task: int
    last: bool
    indices: Numbers  # of the training images of the task


@dataclass
class Reply:
    """A client's answer: its model, its number of images and whatever else it sends."""

    client: int
    theta: Array
    samples: int
    sent: State = field(default_factory=dict)


class FedAvgReference:
    """FedAvg of `parameters` θ [P] = (W1 [H, D], b1 [H], W2 [L, H], b2 [L])."""

    def __init__(self, experiment: Experiment, plan: Plan) -> None:
        self.training = experiment.setting.training
        self.network = experiment.setting.network
        self.params = experiment.params
        self.plan = plan
        self.data = experiment.dataset()
        self.x = self.normalised(self.data.x_train)  # [N, D]
        self.y = self.data.y_train.numpy()
        self.classes = len(self.data.classes)
        network = build_network(experiment.setting.network, (1, 8, 8), self.classes, plan.seed)
        self.shapes = [tuple(p.shape) for p in network.parameters()]
        self.theta = small.flat(list(network.parameters())).double().numpy()
        self.lr = self.training.lr
        self.clients: list[State] = [self.first_state(u) for u in range(len(plan.clients))]
        self.start()

    def normalised(self, images: torch.Tensor) -> Array:
        """uint8 images as rows with mean 0 and deviation 1.  # [n, D]"""
        pixels = images.numpy().reshape(len(images), -1) / 255
        return (pixels - float(self.data.mean)) / float(self.data.std)

    # --- what a method may override

    def start(self) -> None:
        """Prepare the server's state."""

    def first_state(self, client: int) -> State:
        return {}

    def chosen(self, clients: list[int]) -> list[int]:
        return clients

    def local(self, visit: Visit, state: State) -> Reply:
        """A client's work in one round; it changes `state` in place."""
        theta = self.sgd(visit, self.theta, state)
        return Reply(visit.client, theta, len(visit.indices))

    def step_gradient(self, theta: Array, x: Array, y: Numbers, state: State) -> Array:
        """The gradient of one SGD step on new images, before weight decay and momentum."""
        return self.gradient(theta, x, y)

    def aggregate(self, replies: list[Reply]) -> None:
        """The server's step: θ + server_lr (mean - θ)."""
        mean = self.mean([reply.theta for reply in replies], replies)
        lr = getattr(self.params, "server_lr", 1.0)
        self.theta = self.theta + lr * (mean - self.theta)

    def after_round(self, visits: list[Visit]) -> None:
        """Called before the replies of a round are aggregated."""

    def after_experience(self) -> None:
        """Called after an experience."""

    # --- building blocks

    def run(self) -> Array:
        for experience in range(self.plan.experiences):
            for round_ in range(self.training.rounds):
                self.lr = self.rate(round_)
                visits = list(self.visits(experience, round_))
                replies = [self.local(visit, self.clients[visit.client]) for visit in visits]
                self.after_round(visits)
                if trained := [reply for reply in replies if reply.samples]:
                    self.aggregate(trained)
            self.after_experience()
        return self.theta

    def rate(self, round_: int) -> float:
        """The learning rate of a round: half a wave of a cosine, if it falls."""
        high, low = self.training.lr, self.training.lr_end
        wave = np.cos(np.pi * round_ / self.training.rounds / 2) ** 2
        return high if low is None else float(low + (high - low) * wave)

    def has_part(self, client: int, task: int) -> bool:
        return bool(self.plan.clients[client][task].classes)

    def present(self, experience: int) -> list[int]:
        tasks = range(min(experience + 1, self.plan.tasks))
        clients = range(len(self.plan.clients))
        return [u for u in clients if any(self.has_part(u, t) for t in tasks)]

    def visits(self, experience: int, round_: int) -> Iterator[Visit]:
        address = (self.plan.seed, experience, round_)
        here = self.present(experience)
        most = int(np.ceil(self.training.participation * len(here) - 1e-9))
        most = self.training.clients_per_round or most
        order = torch.randperm(len(here), generator=generator(*address, "participation"))
        taking_part = sorted(here[place] for place in order[: max(1, most)].tolist())
        task = experience % self.plan.tasks
        last = round_ == self.training.rounds - 1
        for client in self.chosen(taking_part):
            indices = self.indices(client, task)
            yield Visit(client, experience, round_, task, last, indices)

    def indices(self, client: int, task: int) -> Numbers:
        return self.plan.train_indices(self.data, client, task).numpy()

    def draw(self, visit: Visit, purpose: str) -> torch.Generator:
        return generator(self.plan.seed, visit.client, visit.experience, visit.round, purpose)

    def batches(self, visit: Visit, of: str = "", indices: Numbers | None = None) -> list[Numbers]:
        own = visit.indices if indices is None else indices
        draw = self.draw(visit, "order" + of)
        return self.passes(own, draw, self.training.batch_size, self.training.epochs)

    def passes(
        self, indices: Numbers, draw: torch.Generator, size: int, epochs: int = 1
    ) -> list[Numbers]:
        """The batches of so many passes over images, each in another order."""
        found = []
        for _ in range(epochs if len(indices) else 0):
            order = torch.randperm(len(indices), generator=draw).numpy()
            found += [indices[order[k : k + size]] for k in range(0, len(order), size)]
        return found

    def sgd(self, visit: Visit, theta: Array, state: State) -> Array:
        """Local SGD along the gradients of `step_gradient`."""
        return self.descend(theta, self.batches(visit), lambda *at: self.step_gradient(*at, state))

    def descend(self, theta: Array, batches: list[Numbers], gradient: Gradient) -> Array:
        momentum, decay = self.training.momentum, self.training.weight_decay
        velocity = np.zeros_like(theta)
        for batch in batches:
            slope = gradient(theta, self.x[batch], self.y[batch])
            velocity = momentum * velocity + slope + decay * theta
            theta = theta - self.lr * velocity
        return theta

    def mean(self, values: list[Array], replies: list[Reply]) -> Array:
        weights = np.array([reply.samples for reply in replies], float)
        mean: Array = np.tensordot(weights / weights.sum(), np.stack(values), 1)
        return mean

    def matrices(self, vector: Array) -> list[Array]:
        """[W b] of both layers."""
        w1, b1, w2, b2 = self.parts(vector)
        return [np.c_[w1, b1], np.c_[w2, b2]]

    # Of arrays or tensors:

    def parts(self, theta: Any) -> list[Any]:
        """W1, b1, W2 and b2 of a vector."""
        return pieces(theta, self.shapes)

    def features(self, theta: Any, x: Any) -> Any:
        """The hidden layer, max(0, W1 x + b1).  # [n, H]"""
        w1, b1 = self.parts(theta)[:2]
        h = x @ w1.T + b1
        return h * (h > 0)

    def outputs(self, theta: Any, h: Any) -> Any:
        """The logits of features, W2 h + b2.  # [n, L]"""
        w2, b2 = self.parts(theta)[2:4]
        return h @ w2.T + b2

    def logits(self, theta: Any, x: Any) -> Any:
        return self.outputs(theta, self.features(theta, x))

    def backward(
        self, theta: Array, x: Array, slopes: Array, hidden_slopes: Array | None = None
    ) -> Array:
        """The gradient of a loss with these slopes in the logits [n, L] and features [n, H]."""
        _, _, w2, _ = self.parts(theta)
        h = self.features(theta, x)
        back = slopes @ w2 if hidden_slopes is None else slopes @ w2 + hidden_slopes
        back = back * (h > 0)
        pieces = [back.T @ x, back.sum(0), slopes.T @ h, slopes.sum(0)]
        return np.concatenate([piece.ravel() for piece in pieces])

    def gradient(self, theta: Array, x: Array, y: Numbers) -> Array:
        slopes = (softmax(self.logits(theta, x)) - np.eye(self.classes)[y]) / len(y)
        return self.backward(theta, x, slopes)


class RehearsalReference(FedAvgReference):
    """FedAvg with a memory of random exemplars: indices of images, by task."""

    def first_state(self, client: int) -> State:
        """No exemplars yet: "memory" is the list of the images of each remembered task."""
        return {"memory": {}}

    def past(self, visit: Visit, state: State) -> Numbers:
        """The exemplars of other tasks, in the order in which they were remembered."""
        others = [own for task, own in state["memory"].items() if task != visit.task]
        return np.concatenate([np.empty(0, np.int64), *others])

    def batches(self, visit: Visit, of: str = "", indices: Numbers | None = None) -> list[Numbers]:
        """Those of the task, or of the exemplars where the client has no part in it."""
        if indices is None and not self.has_part(visit.client, visit.task):
            indices = self.past(visit, self.clients[visit.client])
        return super().batches(visit, of, indices)

    def local(self, visit: Visit, state: State) -> Reply:
        reply = super().local(visit, state)
        if not self.has_part(visit.client, visit.task):
            reply.samples = len(self.past(visit, state))
        self.remember(visit, state)
        return reply

    def remember(self, visit: Visit, state: State) -> None:
        """Random images of each class of the task.

        In the last round, and in the client's first one where it may miss the last. A task that
        comes again is in memory already.
        """
        known = state.setdefault("experiences", set())
        may_miss = self.training.participation < 1 or self.training.clients_per_round
        first = visit.experience not in known
        if not visit.last and not (first and may_miss):
            return
        again = any(each % self.plan.tasks == visit.task for each in known - {visit.experience})
        known.add(visit.experience)
        if again:
            return
        chosen = [np.empty(0, np.int64)]
        for label in np.unique(self.y[visit.indices]):
            own = visit.indices[self.y[visit.indices] == label]
            order = self.order(visit, int(label), own)
            chosen.append(own[order[: self.params.memory.exemplars_per_class]])
        state["memory"][visit.task] = np.concatenate(chosen)

    def order(self, visit: Visit, label: int, own: Numbers) -> list[int]:
        """In which the images of a class are chosen."""
        address = (self.plan.seed, visit.client, visit.experience, f"memory of class {label}")
        return torch.randperm(len(own), generator=generator(*address)).tolist()

    def replayed(self, visit: Visit, state: State) -> list[Numbers]:
        past = self.past(visit, state)
        past = past if self.has_part(visit.client, visit.task) else past[:0]
        draw = self.draw(visit, "replay")
        found = []
        for batch in self.batches(visit):
            order = torch.randperm(len(past), generator=draw).numpy()
            found.append(past[order[: round(self.params.ratio * len(batch))]])
        return found


def herded(h: Array, count: int) -> list[int]:
    """The greedy choice: each next row brings the mean of those chosen nearest to that of all."""
    chosen = list[int]()
    while len(chosen) < min(count, len(h)):
        means = (h[chosen].sum(0) + h) / (len(chosen) + 1)
        away = np.square(means - h.mean(0)).sum(1)
        away[chosen] = np.inf
        chosen.append(int(away.argmin()))
    return chosen


def pieces(vector: Any, shapes: Iterable[Sequence[int]]) -> list[Any]:
    """The parts of a vector, an array or a tensor, each in its shape."""
    found = []
    for shape in shapes:
        size = int(np.prod(shape))
        found.append(vector[:size].reshape(shape))
        vector = vector[size:]
    assert not len(vector)
    return found


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x)."""
    return np.asarray(1 / (1 + np.exp(-x)))


def softmax(logits: Array) -> Array:
    """Probabilities.  # [n, L]"""
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def uneven(plan: Plan) -> Plan:
    """The plan in which client 0 has seven images of each task, and client 1 none of the second."""
    few = {(0, t): plan.clients[0][t].train[:7] for t in range(plan.tasks)}  # type: ignore[index]
    return small.with_train(plan, {**few, (1, 1): ()})


def compare(
    kind: str,
    configuration: str,
    reference: type[FedAvgReference],
    /,
    folder: Path | None = None,
    change: Callable[[Plan], Plan] = lambda plan: plan,
    close: dict[str, Any] = CLOSE,
    **params: Any,
) -> tuple[Record, Any, list[dict[str, Any]]]:
    """Refuse a run that is not that of a method's reference; both for further checks.

    Compared are the final models, if there is one, and where a `folder` is given the clients'
    states, which are returned too: those arrays of the reference whose names do not begin with "_".
    `change` is made to the plan.
    """
    experiment = small.tiny(kind, **GROWING[configuration], **params)
    plan = change(small.plan(experiment))
    plan = uneven(plan) if "uneven" in configuration else plan
    record = small.run(experiment, plan, resume=folder)
    naive = reference(experiment, plan)
    theta = naive.run()
    assert np.isfinite(np.asarray(theta)).all()
    if record.weights or folder is None:
        found = np.concatenate([value.ravel() for value in record.weights.values()])
        np.testing.assert_allclose(found, theta, **close)
    if folder is None:
        return record, naive, []
    states = small.saved(experiment, folder)["clients"]
    for state, own in zip(states, naive.clients, strict=True):
        for name, value in own.items():
            if isinstance(value, np.ndarray) and not name.startswith("_"):
                np.testing.assert_allclose(state[name], value, **close, err_msg=name)
    return record, naive, states


def assert_personal_scores(
    record: Record, naive: FedAvgReference, logits: Callable[[int, Array], Array]
) -> None:
    """Refuse other accuracies of personal models after the last experience, among all classes.

    `logits` are those of a client's personal model for normalised images.
    """
    plan = naive.plan
    for client, task in small.everywhere(plan):
        tests = plan.test_indices(naive.data, client, task)
        if not len(tests):
            continue
        predicted = logits(client, naive.normalised(naive.data.x_test[tests])).argmax(1)
        expected = (predicted == naive.data.y_test[tests].numpy()).mean()
        np.testing.assert_allclose(record.scores["personal"][0, -1, client, task], expected)


def last_visit(naive: FedAvgReference, client: int) -> Visit:
    """A client's last round: what evaluation takes as the address of personal models."""
    last = naive.plan.experiences - 1
    task = last % naive.plan.tasks
    return Visit(client, last, naive.training.rounds - 1, task, True, naive.indices(client, task))
