"""GEM and A-GEM against naive references in NumPy, and what a run does not show."""

import math
from typing import Any

import numpy as np
import pytest
import reference
import small
import torch
import torch.nn.functional as F
from active_sets import best_active_set
from reference import CONFIGURATIONS, Array, Numbers, RehearsalReference, State, Visit
from small import BATCH_NORM, P, kept, plan, run, tiny

from workbench.methods.base.gradient_projection import exemplar_gradient


class GemReference(RehearsalReference):
    def start(self) -> None:
        self.shares: dict[tuple[int, int], list[float]] = {}

    def sgd(self, visit: Visit, theta: Array, state: State) -> Array:
        """Local SGD; the share of corrected steps is noted if there are past tasks."""
        state["corrected"] = []
        state["samples"] = iter(self.samples(visit, state))
        trained = super().sgd(visit, theta, state)
        if state["corrected"]:
            shares = self.shares.setdefault((visit.experience, visit.round), [])
            shares.append(float(np.mean(state["corrected"])))
        return trained

    def samples(self, visit: Visit, state: State) -> list[list[Numbers]]:
        """For each step the exemplars of each constraint: all of each past task."""
        tasks = [own for task, own in state["memory"].items() if task != visit.task and len(own)]
        return [tasks for _ in self.batches(visit)]

    def step_gradient(self, theta: Array, x: Array, y: Numbers, state: State) -> Array:
        """The gradient with the least change that conflicts with no constraint's."""
        gradient = self.gradient(theta, x, y)
        own = next(state["samples"])
        if not own:
            return gradient
        past = np.stack([self.gradient(theta, self.x[each], self.y[each]) for each in own])
        state["corrected"].append(bool((past @ gradient < 0).any()))
        if not state["corrected"][-1]:
            return gradient
        ridge, margin = getattr(self.params, "ridge", 0.0), getattr(self.params, "margin", 0.0)
        matrix = past @ past.T + ridge * np.eye(len(past))
        return gradient + best_active_set(matrix, past @ gradient, margin) @ past


class AGemReference(GemReference):
    def samples(self, visit: Visit, state: State) -> list[list[Numbers]]:
        past = self.past(visit, state)
        if not len(past):
            return [[] for _ in self.batches(visit)]
        draw = self.draw(visit, "reference")
        orders = [torch.randperm(len(past), generator=draw).numpy() for _ in self.batches(visit)]
        return [[past[order[: self.params.reference]]] for order in orders]


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(
    ("kind", "naive", "params"),
    [
        ("gem", GemReference, {}),
        ("gem", GemReference, {"ridge": 0.3, "margin": 0.5}),
        ("agem", AGemReference, {"reference": 5}),
        ("agem", AGemReference, {}),
    ],
)
def test_they_are_the_reference(kind, naive, params, configuration):
    record, found, _ = reference.compare(kind, configuration, naive, memory=kept(4), **params)
    for entry in record.history:
        expected = found.shares.get((entry["experience"], entry["round"]))
        notes = {f"{kind} corrected": pytest.approx(np.mean(expected))} if expected else {}
        assert entry["notes"] == notes and not any("corrected" in each for each in entry["events"])
    assert any(share for each in found.shares.values() for share in each)


@pytest.mark.parametrize("kind", ["agem", "gem"])
@pytest.mark.parametrize("factor", [1.0, 0.0, math.nan, math.inf])
def test_without_a_conflict_or_with_an_unusable_gradient_it_is_fedavg_bit_for_bit(
    kind, factor, monkeypatch
):
    """The memory's gradient is the live one, zero, or not finite, which is logged for every step;
    a margin adds nothing either."""

    def fake(runtime: Any, *_: Any) -> torch.Tensor:
        finite = math.isfinite(factor)
        return runtime.model.gradients * factor if finite else torch.full((P,), factor)

    monkeypatch.setattr(f"workbench.methods.{kind}.exemplar_gradient", fake)
    params = {"margin": 0.5} if kind == "gem" else {}
    record = run(tiny(kind, **params))
    small.assert_same_weights(record, run(tiny()))
    for entry in record.history:
        assert entry["notes"].get(f"{kind} corrected", 0.0) == 0
        events = {f"{kind}: not finite, not corrected": entry["sgd_steps"]}
        said = entry["experience"] and not math.isfinite(factor)
        assert entry["events"] == (events if said else {})


def test_gradients_on_exemplars_use_the_running_statistics():
    """They are those of evaluation mode, and the live gradient is unchanged."""
    experiment = tiny("gem", network=BATCH_NORM)
    runtime = small.worker(experiment, plan(experiment)).runtime
    images = runtime.normalise(runtime.dataset.x_train[:30])
    labels = runtime.dataset.y_train[:30]
    runtime.train_mode(len(labels))
    gradient = exemplar_gradient(runtime, images, labels)
    assert not runtime.model.gradients.any()
    F.cross_entropy(runtime.model.module.eval()(images), labels).backward()
    assert torch.equal(gradient, runtime.model.gradients) and gradient.any()


@pytest.mark.parametrize("kind", ["agem", "gem", "gradma"])
def test_other_gradients_do_not_change_the_statistics_of_batch_normalisation(kind):
    """At learning rate 0 they are those of FedAvg bit for bit, also after batches of one."""
    training = {"lr": 0, "batch_size": 11}
    few = {"network": BATCH_NORM, "split": {"images_per_class": 17}, "training": training}
    small.assert_same_weights(run(tiny(kind, **few)), run(tiny(**few)))
