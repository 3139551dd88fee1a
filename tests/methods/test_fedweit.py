"""FedWeIT against a naive reference in NumPy; what holds past weights, sparse messages."""

import numpy as np
import pytest
import reference
import torch
from reference import CLOSE, GROWING, Array, FedAvgReference, Numbers, Reply, State, Visit, sigmoid

from stamp_core.core.seeding import generator
from stamp_core.results.records import SCORINGS
from workbench.methods.fedweit.decomposed import PastWeights, to_dense, to_sparse

TASK = SCORINGS.index("task")


class FedWeITReference(FedAvgReference):
    """W1 = B s + A + sum_k alpha_k KB_k, s = sigmoid(m) of each row; the rest is (b1, W2, b2)."""

    def start(self) -> None:
        self.cut = self.shapes[0][0] * self.shapes[0][1]
        self.sent = self.theta[: self.cut]
        self.knowledge: dict[int, Array] = {}

    def first_state(self, client: int) -> State:
        cut = self.shapes[0][0] * self.shapes[0][1]
        return {"base": self.theta[:cut], "_rest": self.theta[cut:], "_tasks": {}, "_seen": set()}

    def wide(self, channels: Array) -> Array:
        return np.repeat(channels, self.shapes[0][1])

    def local(self, visit: Visit, state: State) -> Reply:
        """SGD on B, m, A, alpha and the rest; past tasks pull after each step."""
        first = visit.experience not in state["_seen"]
        if first:
            state["_known"] = np.array([a for _, a in sorted(self.knowledge.items())])
            state["_known"] = state["_known"].reshape(-1, self.cut)
        base = np.where(self.sent == 0, state["base"], self.sent)
        past = {t: own for t, own in state["_tasks"].items() if t != visit.task}
        held = bool(past) and self.params.lambda2 > 0
        target = state["base"] if first else state.get("target")
        before = target
        names = "m", "a", "rest"
        if visit.task in state["_tasks"]:
            mask, adaptive, rest = (state["_tasks"][visit.task][name] for name in names)
        else:
            mask = torch.randn(32, generator=self.draw(visit, "mask")).numpy() / np.sqrt(32)
            adaptive, rest = base * self.params.adaptive, state["_rest"]
        if self.params.head == "shared":
            rest = self.theta[self.cut :]
        count = len(state["_known"])
        if first:
            draw = self.draw(visit, "attention")
            state["_alpha"] = torch.randn(count, generator=draw).numpy() / max(1, count) ** 0.5
        parts = [base, mask, adaptive, state["_alpha"], rest]
        velocity = [np.zeros_like(part) for part in parts]
        for batch in self.batches(visit):
            gradients = self.slopes(parts, state["_known"], batch)
            for each, part in zip(gradients[1:3], parts[1:3], strict=True):
                each += self.params.weight_decay * part
            gradients[2] += self.params.lambda1 * np.sign(parts[2])
            gradients[0] += self.params.weight_decay * parts[0] * (not past)
            for place, gradient in enumerate(gradients):
                gradient = gradient + self.training.weight_decay * parts[place]
                velocity[place] = self.training.momentum * velocity[place] + gradient
                parts[place] = parts[place] - self.lr * velocity[place]
            if held:
                size = self.lr * self.params.lambda2
                q = size / (1 + size)
                pull = q * self.wide(sum(sigmoid(own["m"]) ** 2 for own in past.values()))
                parts[0] = parts[0] + pull / (1 + pull) * (target - parts[0])
                target = target + q * (parts[0] - target)
        return self.finish(visit, state, parts, before, target if held else None)

    def slopes(self, parts: list[Array], known: Array, batch: Numbers) -> list[Array]:
        """The gradients of the parts, by that of θ with the composed W1."""
        base, mask, adaptive, alpha, rest = parts
        gate = sigmoid(mask)
        theta = np.concatenate([base * self.wide(gate) + adaptive + alpha @ known, rest])
        gradient = self.gradient(theta, self.x[batch], self.y[batch])
        g = gradient[: self.cut]
        to_mask = gate * (1 - gate) * (g * base).reshape(32, -1).sum(1)
        return [g * self.wide(gate), to_mask, g.copy(), known @ g, gradient[self.cut :]]

    def finish(
        self, visit: Visit, state: State, parts: list[Array], before: Array, target: Array | None
    ) -> Reply:
        base, mask, adaptive, state["_alpha"], rest = parts
        state["base"] = base
        state["_seen"].add(visit.experience)
        if target is not None:
            state["target"] = target
            for task, own in state["_tasks"].items():
                if task != visit.task:
                    own["a"] = own["a"] + self.wide(sigmoid(own["m"])) * (before - target)
        if len(visit.indices):
            foreign = state["_alpha"] @ state["_known"]
            own = {"m": mask, "a": adaptive, "foreign": foreign, "rest": rest}
            state["_tasks"][visit.task] = own
        size = np.abs(mask)
        kept = size > np.sort(size)[int(self.params.sparsity * 32)]
        sent: State = {"base": base, "kept": kept}
        if visit.last and len(visit.indices):
            sent["adaptive"] = np.where(np.abs(adaptive) > self.params.lambda1, adaptive, 0)
        return Reply(visit.client, np.concatenate([base, rest]), len(visit.indices), sent)

    def aggregate(self, replies: list[Reply]) -> None:
        """The mean of each row of B over those who kept it; the rest by samples."""
        mean = self.theta.copy()
        if self.params.head == "shared":
            mean = self.mean([reply.theta for reply in replies], replies)
        count = self.wide(np.sum([reply.sent["kept"] for reply in replies], axis=0))
        total = sum(self.wide(reply.sent["kept"]) * reply.sent["base"] for reply in replies)
        mean[: self.cut] = np.where(count > 0, total / np.maximum(count, 1), self.theta[: self.cut])
        self.theta = self.theta + self.params.server_lr * (mean - self.theta)
        self.sent = np.where(count > 0, self.theta[: self.cut], 0)
        for reply in replies:
            if "adaptive" in reply.sent:
                self.knowledge[reply.client] = reply.sent["adaptive"]

    def personal(self, client: int, task: int) -> float:
        """The accuracy of a task's own model among its classes; B is the received one."""
        state = self.clients[client]
        base = np.where(self.sent == 0, state["base"], self.sent)
        if task not in state["_tasks"]:
            rest = self.theta[self.cut :] if self.params.head == "shared" else state["_rest"]
            theta = np.concatenate([base, rest])
        else:
            own = state["_tasks"][task]
            adaptive = np.where(np.abs(own["a"]) > self.params.lambda1, own["a"], 0)
            w1 = base * self.wide(sigmoid(own["m"])) + adaptive + own["foreign"]
            theta = np.concatenate([w1, own["rest"]])
        classes = np.array(self.plan.clients[client][task].classes)
        tests = self.plan.test_indices(self.data, client, task)
        if not len(tests):
            return float("nan")
        logits = self.logits(theta, self.normalised(self.data.x_test[tests]))[:, classes]
        return np.mean(classes[logits.argmax(1)] == self.data.y_test[tests].numpy())


@pytest.mark.parametrize("configuration", GROWING)
@pytest.mark.parametrize(
    "params",
    [{"server_lr": 1.5, "sparsity": 0.9}, {"head": "task", "lambda1": 0.01, "lambda2": 1.0}],
    ids=["shared", "task"],
)
def test_whole_runs_are_those_of_the_reference(params, configuration, tmp_path):
    """The global model, what clients keep of every task, and the personal models."""
    record, naive, kept = reference.compare(
        "fedweit", configuration, FedWeITReference, tmp_path, **params
    )
    names = {"mask": "m", "adaptive": "a", "foreign": "foreign", "rest": "rest"}
    for client, (state, own) in enumerate(zip(kept, naive.clients, strict=True)):
        assert set(state["tasks"]) == {str(task) for task in own["_tasks"]}
        for task, learnt in own["_tasks"].items():
            for name, here in names.items():
                np.testing.assert_allclose(state["tasks"][str(task)][name], learnt[here], **CLOSE)
        for task in range(3):
            found = record.scores["personal"][TASK, -1, client, task]
            np.testing.assert_allclose(found, naive.personal(client, task))
    assert np.isnan(record.scores["global"]).all() == (params.get("head") == "task")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])
def test_sparse_vectors_come_back_in_few_bytes(share):
    """Places are a bit for each number, or four bytes for each that is sent."""
    draw = generator("sparse")
    vector = torch.randn(999, generator=draw) * (torch.rand(999, generator=draw) < share)
    sparse = to_sparse(vector, 0.0)
    assert torch.equal(to_dense(**sparse, size=999), vector)
    assert sparse["places"].nbytes == min(4 * len(sparse["values"]), 125)


@pytest.mark.parametrize("size", [0.01, 1.0, 1e6])
def test_the_retaining_step_solves_its_equations(size):
    """x + size H x = x' for x = (b, a_1, a_2, a_3), where x^T H x = sum_i (b s_i + a_i)^2: one
    system for each weight, in the third of three steps."""
    draw = generator("retaining")
    anchor = torch.randn(18, generator=draw)
    gates = torch.randn(3, 18, generator=draw).sigmoid()
    weights = PastWeights(anchor, gates.square().sum(0), size)
    base = anchor.clone()
    for _ in range(3):
        base.add_(torch.randn(18, generator=draw))
        start = torch.stack([base - anchor, *(anchor - weights.target) * gates]).double().numpy()
        weights.retain(base)
    moved = torch.stack([base - anchor, *(anchor - weights.target) * gates]).double().numpy()
    for weight in range(18):
        rows = np.column_stack([gates[:, weight], np.eye(3)])  # of b s_i + a_i
        x = np.linalg.solve(np.eye(4) + size * rows.T @ rows, start[:, weight])
        np.testing.assert_allclose(moved[:, weight], x, rtol=0, atol=2e-5)
