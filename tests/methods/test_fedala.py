"""FedALA against a naive reference in NumPy; convergence, the window."""

import numpy as np
import pytest
import reference
import small
import torch
from reference import CONFIGURATIONS, Array, FedAvgReference, Numbers, Reply, State, Visit, softmax
from small import run, tiny

from workbench.methods.fedala import NOT_CONVERGED, FedALA

HEAD = 10 * 32 + 10  # parameters of the last two tensors of the network of `tiny`


class FedALAReference(FedAvgReference):
    """Training starts from own + W * (received - own), W learnt by SGD on a window."""

    def first_state(self, client: int) -> State:
        own = self.theta[-self.size :]
        return {"own": own, "weights": np.ones(self.size), "settled": False, "_experience": -1}

    @property
    def size(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes[-self.params.tensors :])

    def local(self, visit: Visit, state: State) -> Reply:
        theta = self.sgd(visit, self.mixture(visit, state), state)
        state["own"] = theta[-self.size :]
        state["_experience"] = visit.experience
        return Reply(visit.client, theta, len(visit.indices))

    def mixture(self, visit: Visit, state: State) -> Array:
        """The model that training starts from; W is learnt on the way."""
        if self.params.refresh == "task" and visit.experience != state["_experience"]:
            state["weights"] = np.ones(self.size)
            state["settled"] = False
        base, received = np.split(self.theta, [-self.size])
        difference = received - state["own"]
        window = self.window(visit)
        if np.abs(difference).max() > 0 and len(window):
            losses: list[float] = []
            while not self.finished(losses, state["settled"]):
                losses.append(self.epoch(window, base, difference, state))
            state["settled"] = True
        return np.concatenate([base, state["own"] + state["weights"] * difference])

    def finished(self, losses: list[float], settled: bool) -> bool:
        converged = len(losses) > 10 and np.std(losses[-10:]) < self.params.threshold
        return bool(converged) or len(losses) == (1 if settled else self.params.max_epochs)

    def epoch(self, window: Numbers, base: Array, difference: Array, state: State) -> float:
        """A step of W for each batch: dL/dW = dL/dθ * (received - own); the last loss."""
        size = self.training.batch_size
        for place in range(0, len(window), size):
            batch = window[place : place + size]
            x = self.x[batch]
            y = self.y[batch]
            theta = np.concatenate([base, state["own"] + state["weights"] * difference])
            slope = self.gradient(theta, x, y)[-self.size :] * difference
            lr = self.params.lr_product / self.training.lr
            state["weights"] = np.clip(state["weights"] - lr * slope, 0, 1)
            loss = -np.log(softmax(self.logits(theta, x))[np.arange(len(y)), y]).mean()
        return float(loss)

    def window(self, visit: Visit) -> Numbers:
        draw = self.draw(visit, "window")
        indices = visit.indices
        if self.params.window == "random":
            indices = indices[torch.randperm(len(indices), generator=draw).numpy()]
        count = min(len(indices), max(1, int(self.params.share * len(indices))))
        start = int(torch.randint(len(indices) - count + 1, (1,), generator=draw))
        return indices[start : start + count]


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(
    "params",
    [
        {"lr_product": 1.0, "window": "random", "share": 0.5},
        {"lr_product": 1.0, "tensors": 4, "refresh": "task", "max_epochs": 5},
    ],
    ids=["random", "all tensors"],
)
def test_whole_runs_are_those_of_the_reference(params, configuration, tmp_path):
    kind = FedALAReference
    record, naive, kept = reference.compare("fedala", configuration, kind, tmp_path, **params)
    assert [state["settled"] for state in kept] == [own["settled"] for own in naive.clients]
    learnt = torch.cat([state["weights"] for state in kept])
    assert ((learnt > 0.1) & (learnt < 0.9)).any()

    def logits(client: int, x: Array) -> Array:
        visit = reference.last_visit(naive, client)
        return naive.logits(naive.mixture(visit, dict(naive.clients[client])), x)

    reference.assert_personal_scores(record, naive, logits)


def test_a_single_client_is_fedavg_bit_for_bit():
    """The average is its own model, so there is nothing to aggregate."""
    split = {"clients": 1}
    training = {"momentum": 0.9, "weight_decay": 0.01}
    record = run(tiny("fedala", split=split, training=training))
    small.assert_same_weights(record, run(tiny(split=split, training=training)))
    assert all(row["notes"] == row["events"] == {} for row in record.history)
    np.testing.assert_array_equal(record.accuracy("personal"), record.accuracy("global"))


@pytest.mark.parametrize(
    ("losses", "most", "epochs", "events"),
    [
        ([1.0] * 50, 50, 11, []),  # ten losses are not yet more than ten
        ([9.0, *[1.0] * 50], 50, 11, []),  # only the last ten of eleven count
        ([1.0, 9.0, *[1.0] * 50], 50, 12, []),
        ([1.0, 1.19] * 50, 50, 11, []),  # a deviation of 0.095
        ([1.0, 1.21] * 50, 50, 50, [NOT_CONVERGED]),  # of 0.105
        ([1.0] * 50, 11, 11, []),  # converged in the last permitted epoch
        ([1.0] * 50, 10, 10, [NOT_CONVERGED]),
    ],
)
def test_the_first_time_ends_when_ten_losses_hardly_differ(
    losses, most, epochs, events, monkeypatch
):
    """Their deviation, divided by ten and not by nine, is below 0.1; or after max_epochs."""
    rest = iter(losses)
    monkeypatch.setattr(FedALA, "epoch", lambda *args: next(rest))
    experiment = tiny("fedala", max_epochs=most)
    worker = small.worker(experiment, small.plan(experiment))
    client_round = small.arrived(worker, worker.plans[0], 1)
    context = small.started(worker.method, client_round)
    log = client_round.log
    assert log.numbers["mixing epochs"] == epochs and log.events == events and context.settled
    assert log.seconds["mixing"] > 0


def test_a_client_without_images_learns_no_weights_and_its_first_time_is_still_to_come():
    experiment = tiny("fedala")
    plan = small.with_train(small.plan(experiment), {(0, 1): ()})
    worker = small.worker(experiment, plan)
    client_round = small.arrived(worker, plan, 1)
    context = small.started(worker.method, client_round)
    assert torch.equal(context.weights, torch.ones(HEAD)) and not context.settled
    assert client_round.log.numbers == {} and client_round.log.events == []
