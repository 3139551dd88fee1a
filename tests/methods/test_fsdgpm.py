"""FS-DGPM: whole runs against NumPy, with λ and its slope; released weights; returning tasks."""

from typing import Any

import numpy as np
import pytest
import reference
import small
import torch
from reference import CONFIGURATIONS, Array, Numbers, RehearsalReference, Reply, State, Visit
from small import BATCH_NORM, kept, run, tiny


class FsDgpmReference(RehearsalReference):
    """Bases of other tasks' exemplars, made in the first round of a task, with learnt weights."""

    def start(self) -> None:
        self.lambdas: list[float] = []

    def local(self, visit: Visit, state: State) -> Reply:
        """A client round; in the first one of an experience the bases are made for it."""
        if state.get("experience") != visit.experience:
            state["experience"] = visit.experience
            state["columns"] = self.columns(visit, state)
            state["lambda"] = [np.ones(u.shape[1]) for u in state["columns"]]
        state["next"] = iter(self.replayed(visit, state))
        reply = super().local(visit, state)
        if len(visit.indices) and sum(map(len, state["lambda"])):
            self.lambdas.append(float(np.concatenate(state["lambda"]).mean()))
        return reply

    def columns(self, visit: Visit, state: State) -> list[Array]:
        """Of both layers: the fewest directions that hold a share of the squares of inputs."""
        past = self.past(visit, state)
        if not len(past):
            return [np.zeros((65, 0)), np.zeros((33, 0))]
        order = torch.randperm(len(past), generator=self.draw(visit, "basis")).numpy()
        x = self.x[past[order[: self.params.images]]]
        tasks = sum(len(own) > 0 for task, own in state["memory"].items() if task != visit.task)
        epsilon = min(1, self.params.epsilon + (tasks - 1) * self.params.increment)
        found = []
        for inputs in (x, self.features(self.theta, x)):
            u, s, _ = np.linalg.svd(np.c_[inputs, np.ones(len(x))].T, full_matrices=False)
            shares = np.r_[0, np.cumsum(s**2) / (s**2).sum()]
            found.append(u[:, : int(np.argmax(shares >= epsilon - 1e-12))])
        return found

    def inside(self, vector: Array, state: State, otherwise: bool) -> Array:
        """sum_i λ_i (G u_i) u_i' of each layer; without columns all of it, or nothing."""
        pieces = []
        for g, u, weights in zip(
            self.matrices(vector), state["columns"], state["lambda"], strict=True
        ):
            part = sum(w * np.outer(g @ m, m) for w, m in zip(weights, u.T, strict=True))
            part = part if len(weights) else g * otherwise
            pieces += [part[:, :-1].ravel(), part[:, -1]]
        return np.concatenate(pieces)

    def step_gradient(self, theta: Array, x: Array, y: Numbers, state: State) -> Array:
        """The mean gradient at weights moved up the loss; λ steps; the protected part goes."""
        params = self.params
        past = next(state["next"])
        both = np.concatenate([x, self.x[past]]), np.concatenate([y, self.y[past]])
        size = -(-len(x) // params.inner_steps)
        limit = np.inf if params.clip is None else params.clip
        offset = np.zeros_like(theta)
        slopes = list[Array]()
        moved = [np.zeros(len(weights)) for weights in state["lambda"]]  # gradient of λ
        steps = list[tuple[Array, Array]]()
        for start in range(0, len(x), size):
            rows = slice(start, start + size)
            g = self.gradient(theta + offset, x[rows], y[rows])
            allowed = self.inside(g, state, otherwise=True)
            steps.append((g, np.abs(allowed) <= limit))
            offset = offset + params.eta1 * allowed.clip(-limit, limit)
            slopes.append(self.gradient(theta + offset, *both))
            for g, free in steps:  # each step up to here has moved the weights of this loss
                for number, u in enumerate(state["columns"]):
                    up = self.matrices(g)[number] @ u  # [o, k]
                    slope = self.matrices(slopes[-1] * free)[number] @ u
                    moved[number] += params.eta1 * (up * slope).sum(0)
        gradient = np.mean(slopes, 0)
        gradient = gradient * min(1, limit / np.linalg.norm(gradient))
        slope = np.concatenate(moved) / len(slopes)
        if params.soft != "off" and len(slope):
            slope = slope * min(1, limit / np.linalg.norm(slope))
            joined = np.concatenate(state["lambda"]) - params.eta2 * slope
            published = params.soft == "published"
            joined = 1 / (1 + np.exp(-10 * joined)) if published else joined.clip(0, 1)
            state["lambda"] = np.split(joined, [len(moved[0])])
        decayed = gradient + self.training.weight_decay * theta
        return gradient - self.inside(decayed, state, otherwise=False)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(
    "params",
    [
        {"eta2": 100.0, "clip": None},
        {"eta2": 50.0, "clip": 0.05, "images": 7, "inner_steps": 3},
        {"soft": "published"},
        {"soft": "off"},
    ],
    ids=["learnt", "clipped", "published", "off"],
)
def test_whole_runs_are_those_of_the_reference(params, configuration):
    params = {"memory": kept(4), "epsilon": 0.8, "increment": 0.05, "eta1": 0.5, **params}
    record, naive, _ = reference.compare("fsdgpm", configuration, FsDgpmReference, **params)
    logged = [row["notes"]["lambda"] for row in record.history if "lambda" in row["notes"]]
    expected = np.mean(naive.lambdas)
    assert (expected < 0.999) == ("eta2" in params)
    if "plain" in configuration:  # as many clients in each round
        assert np.mean(logged) == pytest.approx(expected, abs=1e-3)


def test_only_the_first_pass_at_the_weights_themselves_updates_running_statistics():
    """That is the one on the first half of the batch, which is the whole task here."""
    options: dict[str, Any] = {"network": BATCH_NORM, "training": {"batch_size": 1000}}
    experiment = tiny("fsdgpm", split={"images_per_class": 20}, memory=kept(0), **options)
    worker = small.worker(experiment, small.plan(experiment))
    arrived = small.arrived(worker, small.plan(experiment), 0)
    buffers = worker.method.train_client(arrived).message["buffers"]
    net = small.network(experiment, arrived.message["parameters"]).train()
    half = torch.randperm(40, generator=arrived.generator("order"))[:20]
    images = experiment.dataset().x_train[arrived.indices[half]]
    net(small.normalised(experiment, images))
    found = [buffer for buffer in net.buffers() if buffer.is_floating_point()]
    torch.testing.assert_close(buffers, torch.cat(found), rtol=0, atol=1e-6)


def test_without_its_parts_it_is_replay_bit_for_bit():
    bare = {"inner_steps": 0, "epsilon": 0.0, "increment": 0.0, "clip": None}
    options: dict[str, Any] = {"memory": kept(4), "split": {"images_per_class": 20}}
    small.assert_same_weights(
        run(tiny("fsdgpm", **bare, **options)), run(tiny("replay", **options))
    )
