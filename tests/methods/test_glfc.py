"""GLFC and LGA against a naive reference in NumPy; images from gradients; old models, signals."""

from typing import Any

import numpy as np
import pytest
import reference
import small
import torch
import torch.nn.functional as F
from reference import (
    GROWING,
    Array,
    FedAvgReference,
    Numbers,
    Reply,
    State,
    Visit,
    herded,
    sigmoid,
    softmax,
)
from small import BATCH_NORM, plan, whole
from torch import Tensor, nn

from stamp_core.methods.base.method import Log
from stamp_core.models.encoders import Shape
from workbench.methods.glfc.gradients import GradientEncoder, reconstruct
from workbench.methods.glfc.proxy import NOT_FINITE

CPU = torch.device("cpu")
SHAPES: list[tuple[Shape, int]] = [((1, 8, 8), 10), ((3, 32, 32), 100), ((1, 3, 1), 3)]
GLFC = {"signal": "oracle", "exemplars": 20}
LGA = {"groups": "tasks", "new_weight": 1.0, "old_weight": 1.0, "proxy_init": 1, "columns": "all"}


class GLFCReference(FedAvgReference):
    """Binary losses in groups of classes, an old model as teacher, herded exemplars.

    Images are never reconstructed (`recon_steps` 0): the monitor has a grey one for each class of
    each client that sends gradients.
    """

    def start(self) -> None:
        self.told = set[int]()  # clients that have the announcement
        self.newest = 0  # the experience of the monitor
        self.old: State | None = None
        self.best: State | None = None
        self.monitor: list[int] = []
        self.seen = np.zeros(10, bool)
        self.past = self.seen.copy()
        grey = torch.full((1, 1, 8, 8), 128, dtype=torch.uint8)
        self.grey = self.normalised(grey)

    def first_state(self, client: int) -> State:
        """Nothing learnt; "_lists" are exemplars by task and class."""
        none = np.zeros(10, bool)
        known: State = {"_learnt": np.full(10, -1), "_current": none, "_waiting": none}
        return {**known, "_old": None, "_offered": None, "_lists": {}, "_seen": set(), "_jump": 0.0}

    def local(self, visit: Visit, state: State) -> Reply:
        own = np.zeros(10, bool)
        own[self.y[visit.indices]] = True
        signal = first = visit.experience not in state["_seen"]
        if first:
            state["_offered"], state["_past"] = self.old, self.past
            state["_waiting"], state["_current"] = state["_current"], own
        alone = not self.has_part(visit.client, visit.task)
        if self.params.signal == "entropy" and len(visit.indices):
            p = softmax(self.logits(self.theta, self.x[visit.indices]))
            entropy = -(p * np.log(p + 1e-5)).sum(1).mean()
            signal = entropy - state["_jump"] > self.params.threshold
            state["_jump"] = entropy
        elif self.params.signal == "entropy" and not alone:
            signal = False
        if signal:
            state["_learnt"] = np.where(
                state["_waiting"], state["_learnt"].max() + 1, state["_learnt"]
            )
            state["_waiting"] = np.zeros(10, bool)
            state["_old"] = state["_offered"] or state["_old"]
        state["_used"] = self.exemplars(visit, state)
        theta = self.sgd(visit, self.theta, state)
        may_miss = self.training.participation < 1 or self.training.clients_per_round
        if visit.last or (may_miss and first):
            self.remember(visit, state, theta)
        state["_seen"].add(visit.experience)
        sends = signal and self.params.proxy == "dlg"
        sent = {"labels": np.flatnonzero(own) if sends else [], "own": own}
        samples = len(state["_used"]) if alone else len(visit.indices)
        return Reply(visit.client, theta, samples, sent)

    def exemplars(self, visit: Visit, state: State) -> Numbers:
        lists = state["_lists"].items()
        used = [own for (t, c), own in lists if t != visit.task and state["_learnt"][c] >= 0]
        return np.concatenate([np.empty(0, np.int64), *used])

    def batches(self, visit: Visit, of: str = "", indices: Numbers | None = None) -> list[Numbers]:
        used = self.clients[visit.client]["_used"]
        some = len(visit.indices) or not self.has_part(visit.client, visit.task)
        both = np.concatenate([visit.indices, used]) if some else visit.indices
        return super().batches(visit, of, both)

    def step_gradient(self, theta: Array, x: Array, y: Numbers, state: State) -> Array:
        params, current, learnt = self.params, state["_current"], state["_learnt"]
        columns = current | state["_past"] | (params.columns == "all")
        z = self.logits(theta, x)
        p = sigmoid(z)
        weights = np.ones(len(y))
        group = np.where(learnt >= 0, learnt + 1 if params.groups == "tasks" else 1, 0)
        group = np.where(current, 0, group)[y]
        if params.groups != "none" and (learnt >= 0).any():
            gaps = np.maximum(1 - p[np.arange(len(y)), y], np.finfo(np.float32).eps)
            if params.groups == "tasks":
                gaps = gaps ** (1 - 1 / (learnt.max() + 2))
            weights = gaps / np.array([gaps[group == g].mean() for g in group])
        targets = np.eye(10)[y]
        slopes = weights[:, None] * (p - targets)
        old = state["_old"]
        if old is not None and (old["classes"] & ~current).any():
            taught = sigmoid(self.logits(old["theta"], x))
            taught = np.where(old["classes"] & ~current, taught, targets)
            own = weights[:, None] if params.groups == "tasks" else 1
            slopes = params.new_weight * slopes + params.old_weight * own * (p - taught)
        slopes = params.scale * slopes * columns / (len(y) * columns.sum())
        return self.backward(theta, x, slopes)

    def remember(self, visit: Visit, state: State, theta: Array) -> None:
        """The lists of learnt classes and of the task, each with an equal share of the budget."""
        lists = {
            key: own
            for key, own in state["_lists"].items()
            if key[0] != visit.task and state["_learnt"][key[1]] >= 0
        }
        classes = np.unique(self.y[visit.indices])
        share = self.params.exemplars // max(1, len(lists) + len(classes))
        state["_lists"] = {key: own[:share] for key, own in lists.items()}
        for label in classes:
            own = visit.indices[self.y[visit.indices] == label]
            h = self.features(theta, self.x[own])
            h = h / np.maximum(np.linalg.norm(h, axis=1, keepdims=True), 1e-12)
            state["_lists"][visit.task, label] = own[herded(h, share)]

    def run(self) -> Array:
        """All rounds; the server works after each, also without images."""
        for experience in range(self.plan.experiences):
            for round_ in range(self.training.rounds):
                self.lr = self.rate(round_)
                visits = list(self.visits(experience, round_))
                replies = [self.local(visit, self.clients[visit.client]) for visit in visits]
                labels = [label for reply in replies for label in reply.sent["labels"]]
                if labels:
                    self.monitor = labels + (self.monitor if self.newest == experience else [])
                    self.newest = experience
                if trained := [reply for reply in replies if reply.samples]:
                    self.aggregate(trained)
                for reply in replies:
                    if reply.client not in self.told:
                        self.seen = self.seen | reply.sent["own"]
                self.told |= {reply.client for reply in replies}
                guess = int(self.logits(self.theta, self.grey).argmax())
                accuracy = np.mean([label == guess for label in self.monitor] or [0])
                fresh = labels or round_ < max(1, self.params.proxy_init)
                if fresh or accuracy >= self.best["accuracy"]:  # type: ignore[index]
                    best = {"theta": self.theta, "classes": self.seen, "accuracy": accuracy}
                    self.best = best
            self.old, self.past, self.told = self.best, self.seen, set()
        return self.theta


@pytest.mark.parametrize("configuration", GROWING)
@pytest.mark.parametrize(
    "params",
    [
        {**GLFC, "scale": 20.0},
        {**GLFC, **LGA, "scale": 10.0, "server_lr": 1.5},
        {**GLFC, "scale": 20.0, "proxy": "none"},
        {"signal": "entropy", "threshold": 0.1, "exemplars": 9, "scale": 20.0, "groups": "none"},
    ],
    ids=["glfc", "lga", "no proxy", "entropy"],
)
def test_whole_runs_are_those_of_the_reference(params, configuration, tmp_path):
    params = {**params, "recon_steps": 0}
    _, naive, kept = reference.compare("glfc", configuration, GLFCReference, tmp_path, **params)
    for state, own in zip(kept, naive.clients, strict=True):
        memory, lists = state["memory"], own["_lists"]
        assert memory["labels"].tolist() == [c for (_, c), i in lists.items() for _ in i]
        assert memory["tasks"].tolist() == [t for (t, _), i in lists.items() for _ in i]
        chosen = np.concatenate([np.empty(0, np.int64), *lists.values()])
        assert torch.equal(memory["images"], naive.data.x_train[chosen])


def glfc_worker(**options: Any) -> tuple[Any, Any]:
    experiment = whole("glfc", **{"signal": "oracle", **options})
    plan_ = plan(experiment)
    return small.worker(experiment, plan_), plan_


@pytest.mark.parametrize("groups", ["old_new", "tasks"])
def test_weights_stay_finite_where_an_image_has_no_gap(groups):
    """In float32 1 - p is 0 for large logits; the mean weight is 1 nevertheless."""
    worker, plan_ = glfc_worker(groups=groups)
    context = small.started(worker.method, small.arrived(worker, plan_, 2))
    labels = context.known["current"].nonzero().flatten().repeat(3)
    for logits in (torch.full((len(labels), 10), 200.0), torch.randn(len(labels), 10)):
        weights = worker.method.compensation(logits, labels, context)
        torch.testing.assert_close(weights.mean(), torch.tensor(1.0))


def test_after_one_task_gaps_have_ieee_roots():
    """torch's x ** 0.5 is MKL's root, whose last digits follow the kind of CPU."""
    worker, plan_ = glfc_worker(groups="tasks")
    context = small.started(worker.method, small.arrived(worker, plan_, 1))
    labels = context.known["current"].nonzero().flatten()[:1].repeat(2)
    for logits in torch.randn(1000, 2, 10).unbind():
        found = worker.method.compensation(logits, labels, context)
        gaps = (-logits[:, labels[0]]).sigmoid().numpy()
        roots = np.float32(1) / (np.float32(1) / np.sqrt(gaps))
        assert np.array_equal(found.flatten().numpy(), roots / (roots.sum() / np.float32(2)))


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_the_old_model_has_the_statistics_of_the_policy(policy):
    training = {"rounds": 1, "buffers": policy}
    worker, plan_ = glfc_worker(network=BATCH_NORM, training=training)
    method = worker.method
    client_round = small.arrived(worker, plan_, 1)
    message = client_round.message
    message["announced old parameters"] = message["parameters"]
    message["announced old classes"] = torch.tensor([255, 3], dtype=torch.uint8)
    own = {"local": client_round.state.get("buffers"), "frozen": worker.runtime.untrained}
    if policy == "shared":
        own[policy] = message["announced old buffers"] = message["buffers"] + 1
    small.started(method, client_round)
    assert torch.equal(method.teacher.buffers, own[policy])


def test_later_gradients_extend_the_monitor_and_those_not_finite_are_left_out():
    """What is reconstructed is what the memory shows; a new experience starts anew."""
    worker, _ = glfc_worker(training={"rounds": 2})
    method = worker.method
    server = worker.initial_states(0)[0]
    encoder = method.encoder(0)
    given = method.init_client(0, server), method.broadcast(server, 0)
    x = torch.rand(3, 1, 8, 8)
    gradients = encoder.gradients(x, torch.tensor([4, 5, 6]))
    gradients[1] = torch.nan
    reply = worker.train_client(small.RoundId(0, 0, 0, 0), *given).reply
    reply.message["gradients"] = gradients
    for round_, expected in enumerate([[4, 6], [4, 6, 4, 6], [4, 6]]):
        log = Log()
        server = method.aggregate(server, [reply], log)
        assert log.events == [NOT_FINITE]
        assert method.memory_samples(server, {}, 9)["labels"].tolist() == expected, round_


def noise(shape: Shape, classes: int, count: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (count,), generator=draw)
    return torch.rand(count, *shape, generator=draw), labels


@pytest.mark.parametrize(("shape", "classes"), SHAPES)
def test_gradients_are_those_of_the_network_of_the_paper(shape, classes):
    """Written with torch's layers, one image at a time; labels are recovered from them."""
    encoder = GradientEncoder(shape, classes, 1, CPU)
    network = nn.Sequential(
        nn.Conv2d(shape[0], 12, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, padding=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(encoder.parts[-2].shape[1], classes),
    )
    values = torch.cat([part.flatten() for part in encoder.parts])
    nn.utils.vector_to_parameters(values, network.parameters())
    images, labels = noise(shape, classes, 4)
    gradients = encoder.gradients(images, labels)
    for image, label, gradient in zip(images, labels, gradients, strict=True):
        loss = F.cross_entropy(network(image[None]), label[None])
        torch.testing.assert_close(gradient, small.slope(network, loss))
    assert torch.equal(encoder.recover_labels(gradients), labels)


def test_images_are_reconstructed_from_gradients():
    """The distance falls with every further step, and in the end the images are the right ones."""
    encoder = GradientEncoder((1, 8, 8), 10, 3, CPU)
    images, labels = noise((1, 8, 8), 10, 4)
    gradients = encoder.gradients(images, labels)
    start = torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    left = [reconstruct(encoder, gradients, labels, start, steps)[1] for steps in (0, 5, 20)]
    found, last = reconstruct(encoder, gradients, labels, start, 300)
    assert torch.equal(left[0], torch.ones(4)) and last.max() < 1e-3
    assert (left[0] >= left[1]).all() and (left[1] >= left[2]).all() and (left[2] >= last).all()
    assert float((found - images).square().mean()) < 0.05
    right, left_ = reconstruct(encoder, gradients, labels, images, 5)
    assert torch.equal(right, images) and not left_.any()
