"""pFedDIL against a naive reference in NumPy; auxiliary classifiers, votes, what is kept."""

from typing import Any

import numpy as np
import pytest
import reference
import small
import torch
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
from small import run, tiny

FEW = {"images_per_class": 20}
F = 32  # features of the small network


class PFedDILReference(FedAvgReference):
    """A client's models are (θ_i, the moments of their tasks' features)."""

    def first_state(self, client: int) -> State:
        return {"models": [], "current": 0, "_experience": -1, "_target": None}

    def start(self) -> None:
        self.initial = self.theta

    def share(self, model: tuple[Array, State], x: Array) -> Array:
        """exp(-max(0, d - 1)), d the smallest mean of (h - mean)^2 / variance.  # [n]"""
        theta, tasks = model
        h = self.features(theta, x)
        distances = []
        for means, variances in tasks.values():
            scale = np.maximum(variances, max(0.01 * variances.mean(), 1e-6))
            distances.append(((h - means) ** 2 / scale).mean(1))
        return np.asarray(np.exp(-np.maximum(0, np.min(distances, 0) - 1)))

    def local(self, visit: Visit, state: State) -> Reply:
        """Choose a model for a new task; train it near the sum of all."""
        models = state["models"]
        theta = self.theta
        x = self.x[visit.indices]
        if len(x) and state["_experience"] != visit.experience:
            state["_experience"] = visit.experience
            near = np.array([self.share(model, x).mean() for model in models])
            if self.params.models == 1:
                near = np.ones(len(models))
            state["_target"] = None
            if len(models):
                rho = (near + 1e-8) / (near + 1e-8).sum()
                state["_target"] = sum(r * own for r, (own, _) in zip(rho, models, strict=True))
            full = len(models) == self.params.models
            known = len(models) and (full or near.max() > self.params.threshold)
            state["current"] = int(near.argmax()) if known else len(models)
            if self.params.start == "own":
                theta = models[state["current"]][0] if known else self.initial
        theta = self.sgd(visit, theta, state)
        if len(x):
            if state["current"] == len(models):
                models.append((theta, {}))
            h = self.features(theta, x)
            tasks = {**models[state["current"]][1], str(visit.task): (h.mean(0), h.var(0))}
            models[state["current"]] = (theta, tasks)
        return Reply(visit.client, theta, len(x))

    def step_gradient(self, theta: Array, x: Array, y: Numbers, state: State) -> Array:
        """Cross-entropy and c sum_i rho_i |θ - θ_i|^2."""
        gradient = self.gradient(theta, x, y)
        if state["_target"] is not None:
            gradient = gradient + 2 * self.params.migration * (theta - state["_target"])
        return gradient

    def vote(self, client: int, x: Array) -> Array:
        """The models' probabilities, weighted by their shares; without models the global logits."""
        models = self.clients[client]["models"]
        if not models:
            return self.logits(self.theta, x)
        shares = np.stack([self.share(model, x) for model in models])  # [models, n]
        votes = np.stack([softmax(self.logits(theta, x)) for theta, _ in models])
        return np.asarray((shares[:, :, None] * votes).sum(0))


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(
    "params",
    [
        {"models": 2, "threshold": 1.1, "migration": 0.5},
        {"models": 3, "threshold": 0.3, "migration": 0.2, "start": "received"},
        {"models": 1, "migration": 0.1},
    ],
    ids=["always new", "near", "one"],
)
def test_whole_runs_are_those_of_the_reference(params, configuration, tmp_path):
    kind = PFedDILReference
    record, naive, kept = reference.compare("pfeddil", configuration, kind, tmp_path, **params)
    for state, own in zip(kept, naive.clients, strict=True):
        assert len(state["models"]) == len(own["models"]) and state["current"] == own["current"]
        for model, (theta, tasks) in zip(state["models"], own["models"], strict=True):
            np.testing.assert_allclose(model["parameters"], theta, **CLOSE)
            assert list(model["tasks"]) == list(tasks)
            for known, expected in zip(model["tasks"].values(), tasks.values(), strict=True):
                np.testing.assert_allclose(known, expected, **CLOSE)
    reference.assert_personal_scores(record, naive, naive.vote)


def test_without_migration_auxiliary_classifiers_do_not_touch_the_models():
    """Several models that start from the received one leave the server's FedAvg bit-identical."""
    several = run(tiny("pfeddil", split=FEW, models=3, migration=0.0, start="received"))
    plain = run(tiny(split=FEW))
    small.assert_same_weights(several, plain)
    np.testing.assert_array_equal(several.scores["local"], plain.scores["local"])


def test_votes_are_finite_where_no_model_knows_an_image():
    """After a task of one image all variances are 0, and everything else is infinitely far."""
    experiment = tiny("pfeddil", split=FEW, models=2, threshold=1.1, migration=0.1)
    worker = small.worker(experiment, small.plan(experiment))
    models = small.arrived(worker, worker.plans[0], 2).state["models"]
    nowhere = torch.stack([torch.full((F,), -1e6), torch.zeros(F)])
    assert len(models) == 2
    far = [{**model, "tasks": {"0": nowhere}} for model in models]
    method: Any = worker.method
    votes = method.vote(far, worker.runtime.dataset.x_test[:20])
    torch.testing.assert_close(votes.sum(1), torch.ones(20))
