"""GPM and the projection of gradients: whole runs against NumPy, the rank rule, convolutions."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import reference
import small
import torch
from reference import CONFIGURATIONS, Array, FedAvgReference, Numbers, Reply, State, Visit
from small import BATCH_NORM, BN_P, normal, plan, tiny
from torch import nn

from workbench.methods.base import subspaces
from workbench.methods.base.subspaces import Layer, grow


def new_columns(r: Array, held: Array, epsilon: float) -> Array:
    """The fewest singular vectors of R - M M' R that reach a share epsilon of |R|^2.  # [d, k]"""
    rest = r - held @ r
    u, s, _ = np.linalg.svd(rest, full_matrices=False)
    reached = (r**2).sum() - (rest**2).sum() + np.r_[0, np.cumsum(s**2)]
    return np.asarray(u[:, : int(np.argmax(reached >= epsilon * (r**2).sum()))])


class GpmReference(FedAvgReference):
    """Columns of both layers by task; steps or updates lose their part in those of other tasks."""

    def start(self) -> None:
        self.logged: dict[tuple[str, int, int], list[float]] = defaultdict(list)

    def first_state(self, client: int) -> State:
        return {"columns": {}, "known": set(), "received": {}}

    def local(self, visit: Visit, state: State) -> Reply:
        """Training inside the complement of other tasks' inputs, then the task's own columns."""
        others = [each for task, each in state["columns"].items() if task != visit.task]
        state["spaces"] = [sum(u @ u.T for u in each) for each in zip(*others, strict=True)]
        state["removed"] = []
        received = state["received"].get(visit.experience)
        if received is not None and state["spaces"]:
            move = self.theta - received
            inside = np.linalg.norm(self.project(move, state["spaces"]))
            self.log(visit, "drift", inside / np.linalg.norm(move))
        state["received"] = {visit.experience: self.theta}
        reply = super().local(visit, state)
        if state["removed"]:
            self.log(visit, "removed", np.mean(state["removed"]))
        self.remember(visit, state, reply.theta)
        return reply

    def project(self, vector: Array, spaces: list[Array]) -> Array:
        """The part of a vector whose rows [W b] are in the spaces M M' of the two layers."""
        pairs = zip(self.matrices(vector), spaces, strict=True)
        inside = [matrix @ space for matrix, space in pairs]
        return np.concatenate([np.r_[each[:, :-1].ravel(), each[:, -1]] for each in inside])

    def sgd(self, visit: Visit, theta: Array, state: State) -> Array:
        """With `project: update` the whole move is projected."""
        end = super().sgd(visit, theta, state)
        if self.params.project == "update" and state["spaces"]:
            end = end - self.removed(end - theta, state)
        return end

    def step_gradient(self, theta: Array, x: Array, y: Numbers, state: State) -> Array:
        gradient = self.gradient(theta, x, y)
        if self.params.project == "update" or not state["spaces"]:
            return gradient
        return gradient - self.removed(gradient + self.training.weight_decay * theta, state)

    def removed(self, step: Array, state: State) -> Array:
        inside = self.project(step, state["spaces"])
        with np.errstate(invalid="ignore"):  # without an image nothing moves
            state["removed"].append(np.linalg.norm(inside) / np.linalg.norm(step))
        return inside

    def remember(self, visit: Visit, state: State, theta: Array) -> None:
        """New columns for the inputs (x, 1) and (h, 1) of both layers, if they are due."""
        may_miss = self.training.participation < 1
        due = visit.last or (may_miss and visit.experience not in state["known"])
        if due and len(visit.indices):
            past = {each % self.plan.tasks for each in state["known"]} - {visit.task}
            epsilon = min(1, self.params.epsilon + len(past) * self.params.increment)
            order = torch.randperm(len(visit.indices), generator=self.draw(visit, "basis")).numpy()
            x = self.x[visit.indices[order[: self.params.images]]]
            inputs = [np.c_[each, np.ones(len(x))].T for each in (x, self.features(theta, x))]
            spaces = state["spaces"] or [np.zeros((len(r), len(r))) for r in inputs]
            state["columns"][visit.task] = [
                new_columns(*each, epsilon) for each in zip(inputs, spaces, strict=True)
            ]
            state["known"].add(visit.experience)
        counts = [[u.shape[1] for u in each] for each in state["columns"].values()] or [[0, 0]]
        self.log(visit, "filled", np.sum(counts) / (65 + 33))

    def log(self, visit: Visit, name: str, value: float) -> None:
        self.logged[name, visit.experience, visit.round].append(value)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("project", ["step", "update"])
def test_whole_runs_are_those_of_the_reference(project, configuration):
    """With the share of removed steps, of filled dimensions, and the drift of the average."""
    params = {"epsilon": 0.85, "increment": 0.05, "images": 18, "drift": True, "project": project}
    record, naive, _ = reference.compare("gpm", configuration, GpmReference, **params)
    assert {name for name, *_ in naive.logged} == {"drift", "removed", "filled"}
    for (name, experience, round_), values in naive.logged.items():
        row = record.history[experience * naive.training.rounds + round_]
        assert row["notes"][name] == pytest.approx(np.nanmean(values), abs=1e-3), name


def test_outputs_of_convolutions_for_past_images_stay():
    """Training on the second task leaves the logits of the first one's four images as they were,
    if the bases are those of the received model."""
    network, training = {**BATCH_NORM, "norm": "group"}, {"momentum": 0.9, "weight_decay": 0.05}
    exact = {"epsilon": 1.0, "increment": 0.0, "split": {"images_per_class": 2}}
    experiment = tiny("gpm", network=network, training=training, **exact)
    whole = plan(experiment)
    worker = small.worker(experiment, whole)
    arrived = small.arrived(worker, whole, 1)
    runtime = worker.runtime
    images = runtime.dataset.x_train[whole.train_indices(runtime.dataset, 0, 0)]
    start = arrived.message["parameters"]
    runtime.model.load(start)
    before = runtime.outputs(images)
    method: Any = worker.method
    bases = subspaces.empty_bases(method.layers)
    bases = subspaces.grown_bases(runtime, method.layers, bases, images, 1.0)
    arrived.state["bases"].update(bases)
    counts = {name: basis.shape[1] for name, basis in bases.items()}
    arrived.state["tasks"].update({n: torch.zeros(k).int() for n, k in counts.items()})
    end = method.train_client(arrived).message["parameters"]
    assert (end - start).abs().max() > 1e-3
    runtime.model.load(end)
    torch.testing.assert_close(runtime.outputs(images), before, rtol=0, atol=2e-4)


def test_normalisation_is_fixed_after_the_first_task():
    """Its scale and shift, at 104 to 111 in the flat vector; running statistics go on."""
    experiment = tiny("gpm", network=BATCH_NORM, epsilon=0.5)
    worker = small.worker(experiment, plan(experiment))
    moves = []
    for experience in (0, 1):
        arrived = small.arrived(worker, plan(experiment), experience)
        reply = worker.method.train_client(arrived)
        moves.append(reply.message["parameters"] - arrived.message["parameters"])
        assert not torch.equal(reply.message["buffers"], arrived.message["buffers"])
    assert len(moves[0]) == BN_P and moves[0][104:112].all() and not moves[1][104:112].any()
    assert moves[1][:104].any()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2}, {"padding": 1}, {"stride": 2, "padding": 2, "dilation": 2}],
    ids=str,
)
def test_the_matrix_of_a_convolution_times_its_columns_is_its_output(options, bias):
    conv = nn.Conv2d(3, 4, 3, bias=bias, **options).double()
    vector = normal(108 + 4 * bias, seed=1)
    nn.utils.vector_to_parameters(vector, conv.parameters())
    x = normal(2, 3, 7, 8)
    layer = Layer(conv, slice(0, 108), slice(108, 112) if bias else None, (4, 27 + bias))
    expected = conv(x).transpose(0, 1).flatten(1)  # [4, n L]
    torch.testing.assert_close(layer.matrix(vector) @ layer.columns(x), expected)
    written = torch.zeros_like(vector)
    layer.write(written, layer.matrix(vector))
    assert torch.equal(written, vector)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_inputs_without_a_direction_add_nothing(value):
    basis = torch.linalg.qr(normal(5, 2)).Q
    for shape in ((5, 1), (5, 5)):
        inputs = torch.full(shape, value, dtype=torch.float64)
        assert torch.equal(grow(basis, inputs, 1.0), basis)


@pytest.mark.parametrize("size", [30, 40])
def test_columns_stay_orthonormal_over_ten_tasks_in_float32(size):
    """Inputs that repeat add no direction of rounding noise, and a full basis stays full."""
    basis = torch.zeros(size, 0)
    for task in range(10):
        basis = grow(basis.double(), normal(size, 4, seed=task % 8), 1.0).float()
        assert basis.shape[1] == min(size, 4 * min(task + 1, 8))
        identity = torch.eye(basis.shape[1])
        torch.testing.assert_close(basis.T @ basis, identity, rtol=0, atol=1e-6)
