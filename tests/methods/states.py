"""Whole runs compared with a reference in NumPy: models, what clients remember, personal scores."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import small
from reference import CLOSE, GROWING, Array, FedAvgReference, Visit, uneven

from stamp_core.data.plan import Plan
from stamp_core.results.records import Record


def compare(
    kind: str,
    configuration: str,
    reference: type[FedAvgReference],
    folder: Path,
    change: Callable[[Plan], Plan] = lambda plan: plan,
    **params: Any,
) -> tuple[Record, list[dict[str, Any]], FedAvgReference]:
    """Refuse a run whose final model, if it has one, or a number of a client's state differs.

    Compared are the arrays of the reference's states, but for those whose names begin with "_".
    `change` is made to the plan.
    """
    experiment = small.tiny(kind, **GROWING[configuration], **params)
    plan = change(small.plan(experiment))
    plan = uneven(plan) if "uneven" in configuration else plan
    record = small.run(experiment, plan, resume=folder)
    naive = reference(experiment, plan)
    theta = naive.run()
    if record.weights:
        found = np.concatenate([value.ravel() for value in record.weights.values()])
        np.testing.assert_allclose(found, theta, **CLOSE)
    states = small.saved(experiment, folder)["clients"]
    for state, own in zip(states, naive.clients, strict=True):
        for name, value in own.items():
            if isinstance(value, np.ndarray) and not name.startswith("_"):
                np.testing.assert_allclose(state[name], value, **CLOSE, err_msg=name)
    return record, states, naive


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
