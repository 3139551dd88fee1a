"""FedProx: the proximal term by hand and at its limits."""

from typing import Any

import numpy as np
import pytest
import small
import torch
from by_hand import CLOSE, FULL_BATCH, softmax_gradient, task_data, use_softmax_regression
from small import plan, run, tiny
from stamp_core.client.workspace import RoundId
from torch import Tensor, nn

from stamp_core.config.decode import ParameterError
from stamp_core.core.seeding import generator
from stamp_core.methods.base.method import ClientRound, Method, Reply
from stamp_core.methods.fedprox import FedProx


def client_update(mu: float, experience: int = 0, **training: Any) -> tuple[Tensor, Reply]:
    """What client 0 was sent, and its reply."""
    method: dict[str, Any] = {"kind": "fedprox", "mu": mu} if mu else {"kind": "fedavg"}
    experiment = tiny(**method, training=training)
    worker = small.worker(experiment, plan(experiment))
    client_round = small.arrived(worker, plan(experiment), experience)
    return client_round.message["parameters"], worker.method.train_client(client_round)


def test_one_round_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax regression with two full batches for each of two clients, mu = 3.

    At the received model the proximal term is 0; the second step from theta_1 is
    theta_2 = theta_1 - lr (g(theta_1) + mu (theta_1 - theta)).
    """
    use_softmax_regression(monkeypatch)
    split, training = {"clients": 2, "tasks": 1}, {**FULL_BATCH, "epochs": 2}
    experiment = tiny("fedprox", split=split, training=training, mu=3.0)
    whole = plan(experiment)
    seven = whole.train_indices(experiment.dataset(), 0, 0)[:7].tolist()
    uneven = small.with_train(whole, {(0, 0): tuple(seven)})
    worker = small.worker(experiment, uneven)
    total, mean = 0, np.zeros(650)
    for client in range(2):
        client_round = small.arrived(worker, uneven, 0, client)
        data = task_data(client_round, worker)
        start = theta = client_round.message["parameters"].double().numpy()
        for _ in range(2):
            theta = theta - 0.1 * (softmax_gradient(theta, *data) + 3.0 * (theta - start))
        mean, total = mean + len(data[1]) * theta, total + len(data[1])
    weights = run(experiment, uneven).weights
    np.testing.assert_allclose(weights["head.weight"].ravel(), mean[:640] / total, **CLOSE)
    np.testing.assert_allclose(weights["head.bias"], mean[640:] / total, **CLOSE)


@pytest.mark.parametrize("training", [{}, {"momentum": 0.9, "weight_decay": 0.01}], ids=str)
def test_it_is_sgd_on_the_loss_with_the_quadratic_term(training: dict[str, Any]) -> None:
    """torch.optim.SGD on CE + mu / 2 |theta - received|^2, with momentum and weight decay too."""
    experiment = tiny("fedprox", training={**training, "epochs": 2}, mu=2.0)
    dataset, t = experiment.dataset(), experiment.setting.training
    start, reply = client_update(2.0, epochs=2, **training)
    net = small.network(experiment, start)
    sgd = torch.optim.SGD(net.parameters(), t.lr, t.momentum, weight_decay=t.weight_decay)
    own, order = plan(experiment).train_indices(dataset, 0, 0), generator(0, 0, 0, 0, "order")
    for _ in range(t.epochs):
        for batch in own[torch.randperm(len(own), generator=order)].split(t.batch_size):
            displacement = nn.utils.parameters_to_vector(net.parameters()) - start
            logits = net(small.normalised(experiment, dataset.x_train[batch]))
            loss = nn.functional.cross_entropy(logits, dataset.y_train[batch])
            sgd.zero_grad()
            (loss + 2.0 / 2 * displacement.square().sum()).backward()
            sgd.step()
    expected = nn.utils.parameters_to_vector(net.parameters())
    torch.testing.assert_close(reply.message["parameters"], expected.detach(), **CLOSE)


def test_the_first_step_of_a_round_is_that_of_fedavg_bit_for_bit() -> None:
    fedavg = client_update(0.0, batch_size=1000)[1].message["parameters"]
    for mu in (0.1, 1.0, 15.0):
        _, reply = client_update(mu, batch_size=1000)
        assert torch.equal(reply.message["parameters"], fedavg)
    several, plain = (client_update(mu)[1].message["parameters"] for mu in (1.0, 0.0))
    assert not torch.equal(several, plain)


def test_the_term_is_about_the_model_received_last() -> None:
    """In the second round, too, the first step is that of FedAvg."""
    experiment = tiny("fedprox", training={"batch_size": 1000}, mu=5.0)
    worker = small.worker(experiment, plan(experiment))
    fedavg = small.worker(tiny(training={"batch_size": 1000}), plan(experiment))
    server, states, *_ = worker.initial_states(0)
    message, first = worker.method.broadcast(server, 0), RoundId(0, 0, 0, 0)
    state = worker.train_client(first, states[0], message).reply.state
    message, second = {"parameters": server["parameters"] + 0.1}, RoundId(0, 0, 0, 1)
    reply = worker.train_client(second, state, message).reply
    expected = fedavg.train_client(second, {}, message).reply
    assert torch.equal(reply.message["parameters"], expected.message["parameters"])


def test_at_mu_times_lr_1_every_step_starts_from_the_received_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """theta_u - lr (g + mu (theta_u - theta)) = theta - lr g, where g is the gradient at theta_u:
    also after the last step of a client round."""
    gradients: list[Tensor] = []
    correct = FedProx.correct_gradient

    def noted(self: FedProx, client_round: ClientRound) -> None:
        gradients.append(self.work.model.gradients.clone())
        correct(self, client_round)

    monkeypatch.setattr(FedProx, "correct_gradient", noted)
    start, reply = client_update(10.0)
    assert len(gradients) == reply.sgd_steps > 1
    torch.testing.assert_close(reply.message["parameters"], start - 0.1 * gradients[-1], **CLOSE)


def test_updates_get_shorter_with_mu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On |theta_u - 1|^2 / 2, k steps from theta make the update
    (1 - (1 - lr (1 + mu))^k) / (1 + mu) (1 - theta)."""

    def loss(self: Method, client_round: ClientRound, images: Tensor, labels: Tensor) -> Tensor:
        parameters = nn.utils.parameters_to_vector(self.work.classifier.parameters())
        return 0.5 * (parameters - 1).square().sum()

    monkeypatch.setattr(Method, "loss", loss)
    lengths = []
    for mu in (0.0, 0.5, 1.0, 2.0, 5.0):
        start, reply = client_update(mu)
        share = (1 - (1 - 0.1 * (1 + mu)) ** reply.sgd_steps) / (1 + mu)
        update = reply.message["parameters"] - start
        torch.testing.assert_close(update, share * (1 - start), **CLOSE)
        lengths.append(float(update.norm()))
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) == 5


def test_a_client_keeps_no_state() -> None:
    assert client_update(1.0, experience=2)[1].state == {}


@pytest.mark.parametrize(
    ("mu", "lr", "message"),
    [
        (-0.1, 0.1, r"mu is -0.1; it must be at least 0"),
        (20.0, 0.1, r"mu is 20.0; it must be below 2 / training.lr = 20"),
        (5.0, 0.5, r"mu is 5.0; it must be below 2 / training.lr = 4"),
    ],
)
def test_a_term_that_increases_the_distance_is_refused(mu: float, lr: float, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        small.worker(tiny("fedprox", training={"lr": lr}, mu=mu))
    small.worker(tiny("fedprox", training={"lr": lr}, mu=0.99 * 2 / lr))  # just below the bound


def test_at_learning_rate_0_any_mu_is_accepted() -> None:
    small.worker(tiny("fedprox", training={"lr": 0.0}, mu=1e6))
