"""FedProx: the pull towards the received model, by hand and at its limits."""

from typing import Any

import numpy as np
import pytest
import small
import torch
from small import plan, run, tiny
from torch import Tensor, nn

from stamp_core import models
from stamp_core.config import ParameterError
from stamp_core.methods import Method, Reply, Turn
from stamp_core.methods.fedprox import FedProx
from stamp_core.seeding import generator
from stamp_core.workspace import Visit

HARD: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01}
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}


def visit(mu: float, step: int = 0, **training: Any) -> tuple[Tensor, Reply]:
    """What client 0 was sent, with its answer."""
    kind: dict[str, Any] = {"kind": "fedprox", "mu": mu} if mu else {"kind": "fedavg"}
    cell = tiny(**kind, training=training)
    here = small.worker(cell, plan(cell))
    turn = small.arrived(here, plan(cell), step)
    return turn.message["parameters"], here.method.local(turn)


def test_one_round_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax regression z = W x + b with two full batches of one client each, mu = 3.

    The mean cross-entropy of n pictures has dL/dW = G^T X, dL/db = sum_n G with G = (softmax(z) -
    onehot) / n. From theta, step 1 gives theta_1 = theta - eta dL(theta), where the pull is 0; step
    2 gives theta_2 = theta_1 - eta (dL(theta_1) + mu (theta_1 - theta)).
    """
    monkeypatch.setitem(models.ENCODERS, "mlp", lambda network, shape: (nn.Flatten(), 64))
    split, training = {"clients": 2, "tasks": 1}, {"rounds": 1, "batch": 1000, "epochs": 2}
    cell = tiny("fedprox", split=split, training=training, mu=3.0)
    images, whole = cell.images(), plan(cell)
    few = whole.train_indices(images, 0, 0)[:7]
    plan_ = small.with_train(whole, {(0, 0): tuple(few.tolist())})
    head = models.build(cell.setting.network, (1, 8, 8), 10, seed=0).head
    start = np.hstack([p.detach().double().numpy().reshape(10, -1) for p in head.parameters()])

    total, mean = 0, np.zeros((10, 65))
    for u in range(2):
        own = plan_.train_indices(images, u, 0).numpy()
        x = images.x_train.numpy()[own].reshape(-1, 64) / 255
        x = np.hstack([(x - float(images.mean)) / float(images.std), np.ones((len(own), 1))])
        theta = start
        for _ in range(2):
            z = np.exp(x @ theta.T)
            g = (z / z.sum(1, keepdims=True) - np.eye(10)[images.y_train.numpy()[own]]) / len(own)
            theta = theta - 0.1 * (g.T @ x + 3.0 * (theta - start))
        mean, total = mean + len(own) * theta, total + len(own)

    found = run(cell, plan_).weights
    np.testing.assert_allclose(found["head.weight"], mean[:, :-1] / total, **CLOSE)
    np.testing.assert_allclose(found["head.bias"], mean[:, -1] / total, **CLOSE)


@pytest.mark.parametrize("hard", [{}, HARD], ids=["plain", "hard"])
def test_it_is_sgd_on_the_loss_with_the_quadratic_term(hard: dict[str, Any]) -> None:
    """torch.optim.SGD on CE + mu / 2 |theta - received|^2, with momentum and weight decay too."""
    cell = tiny("fedprox", training={**hard, "epochs": 2}, mu=2.0)
    images, t = cell.images(), cell.setting.training
    start, reply = visit(2.0, epochs=2, **hard)
    net = small.network(cell, start)
    descent = torch.optim.SGD(net.parameters(), t.rate, t.momentum, weight_decay=t.weight_decay)
    own, draw = plan(cell).train_indices(images, 0, 0), generator(0, 0, 0, 0, "order")
    for _ in range(t.epochs):
        for batch in own[torch.randperm(len(own), generator=draw)].split(t.batch):
            away = nn.utils.parameters_to_vector(net.parameters()) - start
            logits = net(small.normalised(cell, images.x_train[batch]))
            loss = nn.functional.cross_entropy(logits, images.y_train[batch])
            descent.zero_grad()
            (loss + 2.0 / 2 * away.square().sum()).backward()
            descent.step()
    expected = nn.utils.parameters_to_vector(net.parameters())
    torch.testing.assert_close(reply.message["parameters"], expected.detach(), **CLOSE)


def test_the_first_step_of_a_round_is_that_of_fedavg_bit_for_bit() -> None:
    expected = visit(0.0, batch=1000)[1]
    for mu in (0.1, 1.0, 15.0):
        _, reply = visit(mu, batch=1000)
        assert torch.equal(reply.message["parameters"], expected.message["parameters"])
    assert not torch.equal(visit(1.0)[1].message["parameters"], visit(0.0)[1].message["parameters"])


def test_the_pull_is_to_what_was_received_last() -> None:
    """Two rounds: from the second model sent, the first step is again that of FedAvg."""
    cell = tiny("fedprox", training={"batch": 1000}, mu=5.0)
    here = small.worker(cell, plan(cell))
    other = small.worker(tiny(training={"batch": 1000}), plan(cell))
    server, states, *_ = here.begin(0)
    sent = {"parameters": server["parameters"] + 0.1}
    state = here.attend(Visit(0, 0, 0, 0), states[0], here.method.broadcast(server, 0)).reply.state
    found = here.attend(Visit(0, 0, 0, 1), state, sent).reply.message["parameters"]
    expected = other.attend(Visit(0, 0, 0, 1), {}, sent).reply.message["parameters"]
    assert torch.equal(found, expected)


def test_at_mu_times_rate_1_every_step_starts_from_the_received_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """theta_u - eta (g + mu (theta_u - theta)) = theta - eta g, where g is the gradient at theta_u:
    also after the last step of a visit."""
    slopes: list[Tensor] = []
    pulled = FedProx.correct

    def correct(self: FedProx, turn: Turn) -> None:
        slopes.append(self.work.model.gradients.clone())
        pulled(self, turn)

    monkeypatch.setattr(FedProx, "correct", correct)
    start, reply = visit(10.0)
    assert len(slopes) == reply.steps > 1
    torch.testing.assert_close(reply.message["parameters"], start - 0.1 * slopes[-1], **CLOSE)


def test_the_way_of_a_client_never_grows_with_mu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On |theta_u - 1|^2 / 2, k steps lead to (1 - (1 - eta (1 + mu))^k) / (1 + mu) of the way."""

    def loss(self: Method, turn: Turn, pictures: Tensor, labels: Tensor) -> Tensor:
        every = nn.utils.parameters_to_vector(self.work.classifier.parameters())
        return 0.5 * (every - 1).square().sum()

    monkeypatch.setattr(Method, "loss", loss)
    lengths = []
    for mu in (0.0, 0.5, 1.0, 2.0, 5.0):
        start, reply = visit(mu)
        share = (1 - (1 - 0.1 * (1 + mu)) ** reply.steps) / (1 + mu)
        way = reply.message["parameters"] - start
        torch.testing.assert_close(way, share * (1 - start), **CLOSE)
        lengths.append(float(way.norm()))
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) == 5


def test_past_tasks_leave_nothing_behind() -> None:
    """A client keeps nothing: it is pulled to the newest model alone, on any task."""
    assert visit(1.0, step=2)[1].state == {}


@pytest.mark.parametrize(
    ("mu", "rate", "message"),
    [
        (-0.1, 0.1, r"mu is -0.1; it must be at least 0"),
        (20.0, 0.1, r"mu is 20.0; it must be below 2 / training.rate = 20"),
        (5.0, 0.5, r"mu is 5.0; it must be below 2 / training.rate = 4"),
    ],
)
def test_a_pull_that_pushes_is_refused(mu: float, rate: float, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        small.worker(tiny("fedprox", training={"rate": rate}, mu=mu))


def test_a_pull_just_below_the_bound_is_taken() -> None:
    small.worker(tiny("fedprox", mu=19.9))
    small.worker(tiny("fedprox", training={"rate": 0.0}, mu=1e6))
