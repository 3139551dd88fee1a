"""FedAS against a naive reference in NumPy; weights of the server, bytes, rare cases."""

import numpy as np
import pytest
import reference
import small
import torch
from reference import CONFIGURATIONS, Array, FedAvgReference, Reply, State, Visit
from small import BATCH_NORM, BN_B, BN_P, run, tiny

from stamp_core.methods.base.method import DivergedError, Log
from stamp_core.methods.base.method import Reply as MethodReply

BASE = 64 * 32 + 32  # parameters of the encoder of `tiny`
BN_BASE = BN_P - (8 * 10 + 10)  # and of that of `BATCH_NORM`
ZERO = "synchronisation: all traces are zero, weighted by samples"
INFINITE = "synchronisation: a trace is not finite, weighted by samples"


class FedASReference(FedAvgReference):
    """Clients align the received encoder with their own; Fisher traces weight the average."""

    def first_state(self, client: int) -> State:
        """The parts of the initial model that the next round uses, as the head is not shared."""
        base = {"base": self.theta[:BASE]} if self.params.align else {}
        return {**base, "head": self.theta[BASE:]}

    def local(self, visit: Visit, state: State) -> Reply:
        theta = self.sgd(visit, self.aligned(visit, state), state)
        state["head"] = theta[BASE:]
        if self.params.align:
            state["base"] = theta[:BASE]
        trace, draw = 0.0, self.draw(visit, "trace")
        for batch in self.passes(visit.indices, draw, self.training.batch_size):
            trace += float((self.gradient(theta, self.x[batch], self.y[batch]) ** 2).sum())
        return Reply(visit.client, theta, len(visit.indices), {"trace": trace})

    def aligned(self, visit: Visit, state: State) -> Array:
        """The received encoder after an epoch on sum_c mean_i |h_i - p_c|^2 / F, with the own head.

        p_c is the mean feature of class c by the own encoder.
        """
        theta = np.concatenate([self.theta[:BASE], state["head"]])
        if not self.params.align or not len(visit.indices):
            return theta
        own = self.features(np.concatenate([state["base"], state["head"]]), self.x[visit.indices])
        labels = self.y[visit.indices]
        prototypes = {c: own[labels == c].mean(0) for c in np.unique(labels)}
        draw = self.draw(visit, "alignment")
        for batch in self.passes(visit.indices, draw, self.params.align_batch_size):
            y = self.y[batch]
            h = self.features(theta, self.x[batch])
            wanted = np.stack([prototypes[c] for c in y])
            members = np.array([(y == c).sum() for c in y])[:, None]
            slopes = 2 * (h - wanted) / h.shape[1] / members
            none = np.zeros((len(y), self.classes))
            theta = theta - self.params.align_lr * self.backward(theta, self.x[batch], none, slopes)
        return theta

    def mean(self, values: list[Array], replies: list[Reply]) -> Array:
        if self.params.weights == "samples":
            return super().mean(values, replies)
        weights = np.array([reply.sent["trace"] for reply in replies])
        return np.asarray(weights / weights.sum() @ np.stack(values))


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(
    "params",
    [
        {"head": "reported", "align_lr": 0.1, "server_lr": 0.7},
        {"head": "local", "align_batch_size": 7, "weights": "samples"},
        {"head": "reported", "align": False},
    ],
    ids=["reported", "local", "not aligned"],
)
def test_whole_runs_are_those_of_the_reference(params, configuration, tmp_path):
    kind = FedASReference
    record, naive, kept = reference.compare("fedas", configuration, kind, tmp_path, **params)
    assert all(("base" in state) == params.get("align", True) for state in kept)
    assert (record.weights == {}) == (params["head"] == "local")

    def logits(client: int, x: Array) -> Array:
        visit = reference.last_visit(naive, client)
        return naive.logits(naive.aligned(visit, naive.clients[client]), x)

    reference.assert_personal_scores(record, naive, logits)


def test_alignment_that_diverges_names_its_learning_rate_and_counts_as_diverged():
    where = r"client 0, experience 0, round 0: .* lower align_lr \(now 1e\+30\)"
    with pytest.raises(DivergedError, match=where):  # so that tuning goes on without the candidate
        run(tiny("fedas", align_lr=1e30))


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_alignment_and_trace_change_no_running_statistics(policy):
    """Prototypes are those of the own encoder with its own statistics."""
    training, split = {"buffers": policy, "shift": 1}, {"images_per_class": 20}
    experiment = tiny("fedas", split, training, BATCH_NORM, align_lr=0.3)
    worker = small.worker(experiment, small.plan(experiment))
    client_round = small.arrived(worker, worker.plans[0], experience=1)
    method = worker.method
    received = client_round.state.get("buffers", client_round.message.get("buffers"))
    received = worker.runtime.untrained if received is None else received
    worker.runtime.model.module.train()
    small.started(method, client_round)
    assert torch.equal(worker.runtime.model.buffers, received)
    model = worker.runtime.model
    base = client_round.message["base"]
    assert not torch.equal(model.parameters[: len(base)], base)
    model.load(torch.cat([client_round.state["base"], client_round.state["head"]]))
    model.buffers.copy_(client_round.state["base_buffers"])
    images, labels = worker.runtime.train_images(client_round.indices)
    own = worker.runtime.outputs(images, worker.runtime.classifier.encode)
    prototypes = method.prototypes(client_round)
    for label in client_round.classes:
        torch.testing.assert_close(prototypes[label], own[labels == label].mean(0))
    before = model.buffers.clone()
    method.trace(client_round)
    assert torch.equal(model.buffers, before)


def test_a_client_never_selected_has_the_untrained_head_and_the_unaligned_encoder():
    experiment = tiny("fedas")
    worker = small.worker(experiment, small.plan(experiment))
    client_round = small.arrived(worker, worker.plans[0], 0)
    client_round.message["base"] += 1
    worker.method.load_personal_model(client_round)
    base, head = worker.initial_states(0)[0]["parameters"].tensor_split([BASE])
    assert torch.equal(worker.runtime.model.parameters, torch.cat([base + 1, head]))


def answer(client: int, samples: int, trace: float, fill: float) -> MethodReply:
    message = {"base": torch.full((BN_BASE,), fill), "trace": torch.tensor([trace])}
    message["buffers"] = torch.full((BN_B,), fill)
    return MethodReply(client, {}, message, samples, 1, 0.0)


@pytest.mark.parametrize(
    ("traces", "expected", "events"),
    [
        ((1.0, 3.0), (1 * 2 + 3 * 6) / 4, []),
        ((0.0, 3.0), 6.0, []),
        ((0.0, 0.0), (5 * 2 + 3 * 6) / 8, [ZERO]),
        ((float("nan"), 3.0), (5 * 2 + 3 * 6) / 8, [INFINITE]),
        ((1.0, float("inf")), (5 * 2 + 3 * 6) / 8, [INFINITE]),
    ],
)
def test_encoders_are_averaged_by_their_traces(traces, expected, events):
    """2 and 6 with 5 and 3 samples; a reply without samples must not count. If one trace is not
    finite there is no scale for the others. The head stays the initial one. Running statistics have
    the same weights; the server's learning rate is not theirs."""
    experiment = tiny("fedas", network=BATCH_NORM, server_lr=0.5)
    worker = small.worker(experiment, small.plan(experiment))
    server = worker.initial_states(0)[0]
    log = Log()
    replies = [answer(0, 5, traces[0], 2.0), answer(1, 3, traces[1], 6.0)]
    empty = answer(2, 0, float("nan"), float("nan"))
    after = worker.method.aggregate(server, [*replies, empty], log)
    base, head = after["parameters"].split([BN_BASE, BN_P - BN_BASE])
    before, same = server["parameters"].split([BN_BASE, BN_P - BN_BASE])
    torch.testing.assert_close(base, (before + expected) / 2)
    torch.testing.assert_close(after["buffers"], torch.full((BN_B,), expected))
    assert torch.equal(head, same) and log.events == events
    log = Log()
    assert worker.method.aggregate(server, [empty], log) is server and log == Log()
