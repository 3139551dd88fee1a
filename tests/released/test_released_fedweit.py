"""FedWeIT (wyjeong/FedWeIT): `Server.run` of models/fedweit/server.py with two `Client`.

With this project's network, and SGD on the mean over a batch. There too the mask is trained, A of
a task starts from the current B / 3, the term of λ₂ takes implicit steps of B and past A, and
personal models have the received B.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import small
import torch
from executed import Execution, draws, exchange
from torch import Tensor

from stamp_core.client import runtime
from stamp_core.client.batches import Batch
from stamp_core.client.runtime import RoundId
from stamp_core.methods.base.method import ClientRound
from stamp_core.results.records import SCORINGS

FEDWEIT = Execution("fedweit", "FedWeIT", "83c0bcd", 1e-12)
PARAMS = replace(FEDWEIT.params, head="task", sparsity=0.3)
NETWORK = {"kind": "cnn", "channels": [3], "features": 4}
CLIENTS, TASKS, ROUNDS = 2, 3, 2
KEPT = "mask", "adaptive", "rest"
WEIGHTS = 0.3 * draws(0, 180)  # each task starts with these biases and this head
IMAGES = draws(200, 4, 1, 8, 8)  # what personal models are evaluated on


def batches(each: ClientRound, _: object) -> Iterator[Batch]:
    """Three batches of a task, the same in each of its rounds."""
    seed = 10 * each.client + each.task
    labels = np.random.default_rng(seed).integers(10, size=(3, 6))
    return map(Batch, draws(100 + seed, 3, 6, 1, 8, 8), torch.from_numpy(labels))


def address(each: RoundId, purpose: str) -> int:
    """The seed of a first mask or attention."""
    return 100 * len(purpose) + 10 * each.client + each.experience


def randn(*size: Any, generator: int) -> Tensor:
    """What `torch.randn` returns to a client."""
    return draws(generator, *np.ravel(size))


def prepared(patch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The method, with these weights, batches and draws, and a plan."""
    split, training = {"clients": CLIENTS, "tasks": TASKS}, {"rounds": ROUNDS, "lr": 0.1}
    experiment = small.tiny("fedweit", split, training, NETWORK, **vars(PARAMS))
    patch.setattr(runtime, "build_network", lambda *_: small.network(experiment, WEIGHTS))
    plan = small.plan(experiment)
    method = small.worker(experiment, plan).method
    patch.setattr(method, "batches", batches)
    patch.setattr(RoundId, "generator", address)
    patch.setattr(torch, "randn", randn)
    return method, plan


def federation(method: Any, plan: Any) -> tuple[list[Tensor], Any, list[Any]]:
    """B as it is sent after every round, the server's state and the clients'."""
    server, states, *_ = method.initial_states(plan)
    sent = []
    for task, number in product(range(TASKS), range(ROUNDS)):
        last = number == ROUNDS - 1
        server, states = exchange(method, plan, server, states, task, number, last)
        sent.append(server["base"])
    return sent, server, states


def outputs(method: Any, plan: Any, server: Any, states: list[Any]) -> list[Tensor]:
    """What the personal models say, client by client and task by task."""
    found: list[Tensor] = []

    def scores(_: object, tasks: list[int]) -> Tensor:
        found.extend(method.classifier(IMAGES).softmax(1).detach() for _ in tasks)
        return torch.zeros(len(SCORINGS), 1, TASKS)

    method.scores_on = scores
    for client, state in enumerate(states):
        round_id = RoundId(0, client, TASKS - 1, ROUNDS - 1)
        message = method.broadcast(server, client)
        method.personal_scores(method.client_round(round_id, plan, state, message))
    return found


@pytest.mark.usefixtures("double")
def test_a_federation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tasks of two rounds: what is sent, what clients keep, their personal models."""
    method, plan = prepared(monkeypatch)
    sent, server, states = federation(method, plan)
    tasks = [task for state in states for task in state["tasks"].values()]
    FEDWEIT.check(
        {
            **{name: torch.stack([task[name] for task in tasks]) for name in KEPT},
            "sent": torch.stack(sent),
            "attention": torch.stack([state["attention"] for state in states]),
            "outputs": torch.stack(outputs(method, plan, server, states)),
        }
    )
