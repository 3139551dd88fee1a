"""FedL2P: fine-tuning is learnt, averaged and used; the network is FedAvg's, or frozen."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import BATCH_NORM, BN_B, BN_P, P, plan, run, tiny
from stamp_core.client.personalisation import endless_batches, layer_statistics
from stamp_core.client.workspace import RoundId
from torch import Tensor, nn

from stamp_core.client import personalisation
from stamp_core.client.scoring import score
from stamp_core.data.split import Plan
from stamp_core.engine.executor import Worker
from stamp_core.methods.base.method import ClientRound, Log, Reply
from stamp_core.methods.fedl2p import FedL2P
from stamp_core.models import networks as models

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}
FEW = {"images_per_class": 20}  # 40 images a task, 8 of them held out
BN: dict[str, Any] = {"network": BATCH_NORM, "split": FEW}
MLP_META = 4 * 100 + 100 + 10_100 + 4 * 100 + 4 + 4  # LRNet 2 L = 4 -> K = 4, and the lrs
BN_META = 100 + 100 + 10_100 + 100 + 1 + 8 * 100 + 100 + 10_100 + 8 * 100 + 8 + 8
NEGATIVE = "meta-networks: a learning rate is negative"
SKIPPED = "meta-networks: skipped a step that is not finite"


def method(experiment: Any, plan_: Plan | None = None) -> tuple[FedL2P, Worker]:
    """The method of an experiment and its worker."""
    worker = small.worker(experiment, plan_ or plan(experiment))
    assert isinstance(worker.method, FedL2P)
    return worker.method, worker


def arrived(worker: Worker, experience: int = 0, **changes: Any) -> ClientRound:
    """A client round of client 0 with the received model, ready to train."""
    client_round = small.arrived(worker, worker.plans[0], experience)
    client_round.message = {**client_round.message, **changes}
    worker.method.receive(client_round)
    client_round.indices = worker.method.train_indices(client_round)
    return client_round


def batches(worker: Worker, client_round: ClientRound) -> tuple[Any, Any, Tensor]:
    """The inner and the outer batches of a client round, and the images of the inner ones."""
    assert isinstance(worker.method, FedL2P)
    held, others = worker.method.split_indices(client_round)
    inner = endless_batches(worker.work, client_round.round_id, others, "inner")
    return inner, endless_batches(worker.work, client_round.round_id, held, "outer"), others


def constant(l2p: FedL2P, beta: float, multiplier: float, lr: float) -> Tensor:
    """Meta-networks with the same output for every client: no weights, and these last biases."""
    parts = [torch.zeros_like(part) for part in l2p.nets.parts]
    if l2p.nets.bn_size:
        parts[5].fill_(beta)
    parts[-2].fill_(multiplier)
    parts[-1].fill_(lr)
    return torch.cat([part.flatten() for part in parts])


def other_buffers(worker: Worker) -> Tensor:
    """Other buffers than those of an untrained network."""
    return torch.rand(len(worker.work.model.buffers), generator=torch.Generator().manual_seed(3))


def tuned(experiment: Any, source: Any, steps: int, lr: float, net: nn.Module | None = None) -> Any:
    """A network after steps of torch.optim.SGD."""
    net = net or models.build_network(experiment.setting.network, (1, 8, 8), 10, seed=0).train()
    sgd = torch.optim.SGD(net.parameters(), lr)
    for x, y in islice(source, steps):
        sgd.zero_grad()
        F.cross_entropy(net(x), y).backward()
        sgd.step()
    return net


# --- bytes


@pytest.mark.parametrize(
    ("options", "net", "meta"),
    [({"split": FEW}, P, MLP_META), (BN, BN_P + BN_B, BN_META)],
    ids=["mlp", "cnn"],
)
@pytest.mark.parametrize("backbone", ["federated", "frozen"])
def test_meta_networks_are_sent_each_way_and_a_frozen_network_only_once(
    backbone: str, options: dict[str, Any], net: int, meta: int
) -> None:
    """4 (P + M) bytes each way and client, or 4 M after two rounds of FedAvg and a download."""
    record = run(tiny("fedl2p", backbone=backbone, warm_rounds=2, **options))
    frozen = backbone == "frozen"
    each = 16 * (meta + (0 if frozen else net))
    assert all(row["bytes"] == {"down": each, "up": each} for row in record.history)
    setup = record.about["setup"]
    assert (setup["down"], setup["up"]) == ((3 * 16 * net, 2 * 16 * net) if frozen else (0, 0))
    assert all(row["disk"] == (4 * net if frozen else 0) for row in record.history)


def test_with_frozen_buffers_there_is_no_bnnet() -> None:
    record = run(tiny("fedl2p", **BN, training={"buffers": "frozen"}))
    each = 16 * (BN_P + BN_META - (100 + 100 + 10_100 + 100 + 1))
    assert all(row["bytes"]["up"] == each for row in record.history)
    assert all("beta" not in row["notes"] for row in record.history)


# --- the network and the server


@pytest.mark.parametrize("buffers", ["shared", "local"])
def test_outer_steps_do_not_change_the_network(buffers: str) -> None:
    """The network is FedAvg's bit for bit."""
    training = {"momentum": 0.9, "shift": 1, "dropout": 0.3, "buffers": buffers}
    record = run(tiny("fedl2p", **BN, training=training, outer_steps=2, lr=0.1))
    expected = run(tiny(**BN, training=training))
    small.assert_same_weights(record, expected)
    for model in ("initial", "global", "local"):
        np.testing.assert_array_equal(record.scores[model], expected.scores[model], model)
    assert [row["loss"] for row in record.history] == [row["loss"] for row in expected.history]
    assert all("lr" in row["notes"] and row["seconds"]["meta"] > 0 for row in record.history)


def test_meta_networks_are_averaged_by_held_out_images() -> None:
    """int(0.2 n) of 4, 12, 40 and no images are 0, 2, 8 and 0: (2 x 3 + 8 x 1) / 10 = 1.4."""
    l2p, worker = method(tiny("fedl2p", backbone="frozen", warm_rounds=1))
    server = worker.initial_states(0)[0]
    replies = [
        Reply(u, {}, {"meta": torch.full((5,), value)}, n, 0, 0.0)
        for u, (n, value) in enumerate([(4, float("nan")), (12, 3.0), (40, 1.0), (0, 9.0)])
    ]
    after = l2p.aggregate(server, replies, Log())
    torch.testing.assert_close(after["meta"], torch.full((5,), 1.4))
    assert after["parameters"] is server["parameters"]
    assert l2p.aggregate(server, [replies[0], replies[3]], Log()) is server
    assert l2p.aggregate(server, [], Log()) is server


@pytest.mark.parametrize("backbone", ["federated", "frozen"])
def test_without_learning_rates_meta_networks_stay_bit_for_bit(
    backbone: str, tmp_path: Path
) -> None:
    experiment = tiny("fedl2p", **BN, meta_lr=0.0, hyper_lr=0.0, backbone=backbone)
    run(experiment, resume=tmp_path)
    meta = small.saved(experiment, tmp_path)["server"]["meta"]
    assert torch.equal(meta, method(experiment)[0].nets.initial(0, 0.001))


# --- the outer step


def test_held_out_images_are_the_same_in_all_rounds_of_a_task() -> None:
    l2p, worker = method(tiny("fedl2p", split={**FEW, "cycles": 2}))
    first, actual = replace(arrived(worker), indices=torch.arange(100, 140)), {}
    for client, experience, round_ in ((0, 0, 0), (0, 0, 1), (0, 3, 0), (0, 1, 0), (1, 0, 0)):
        client_round = replace(first, round_id=RoundId(0, client, experience, round_))
        held, others = l2p.split_indices(client_round)
        assert sorted([*held.tolist(), *others.tolist()]) == client_round.indices.tolist()
        assert len(held) == 8
        actual[client, experience, round_] = held.tolist()
    assert actual[0, 0, 0] == actual[0, 0, 1] == actual[0, 3, 0]
    assert actual[0, 0, 0] != actual[0, 1, 0] and actual[0, 0, 0] != actual[1, 0, 0]


def softmax(x: Any, y: Any, w: Any, b: Any) -> tuple[Any, Any]:
    """Gradient and Hessian of softmax regression's mean loss in theta = (W row by row, b).

    With p the probabilities of an image and x~ = (x, 1): G = (p - onehot) x~^T and
    H = (diag(p) - p p^T) kron x~ x~^T, both averaged.
    """
    n, d = x.shape
    e = np.exp(x @ w.T + b)
    p = e / e.sum(1, keepdims=True)
    ones = np.concatenate([x, np.ones((n, 1))], 1)
    g = (p - np.eye(10)[y]).T @ ones / n  # [10, d + 1]
    s = np.einsum("nk,kl->nkl", p, np.eye(10)) - np.einsum("nk,nl->nkl", p, p)
    h = np.einsum("nkl,ni,nj->kilj", s, ones, ones, optimize=True) / n
    order = np.r_[[k * (d + 1) + i for k in range(10) for i in range(d)]]
    order = np.r_[order, [k * (d + 1) + d for k in range(10)]].astype(int)
    size = 10 * (d + 1)
    return g.reshape(-1)[order], h.reshape(size, size)[np.ix_(order, order)]


def test_one_outer_step_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax regression in float64, W with the learning rate a_1 m_1, b with a_2 m_2, K = 3.

    Inner steps theta <- theta - a m g; the last of them has the derivatives -m_k g and -a_k g with
    respect to a_k and m_k, in the tensor's own entries. With v the gradient on held-out images, H
    the Hessian on a fresh batch, p = sum_{j <= 3} (I - 0.1 H)^j v, published is -p^T H (-m_k g)
    for a_k. The last biases of LRNet change m one for one. Steps: clamped to +-c, times 0.001 or
    0.0001.
    """
    monkeypatch.setitem(models.ENCODERS, "mlp", lambda network, shape: (nn.Flatten(), 64))
    l2p, worker = method(tiny("fedl2p", split=FEW, inner_steps=3, lr=0.05, clamp=2.0))
    meta = constant(l2p, 0.0, 0.0, 0.0)
    meta[-2:] = torch.tensor([0.05, 0.02])
    meta[-4:-2] = torch.tensor([2.0, 5.0])  # the last biases of LRNet
    client_round = arrived(worker, meta=meta)
    actual, (loss,) = l2p.learn_meta(client_round)

    inner, outer, _ = batches(worker, client_round)
    given = [*islice(inner, 4), next(outer)]
    numbers = [(x.flatten(1).double().numpy(), y.numpy()) for x, y in given]
    a, m, sizes = np.array([0.05, 0.02]), np.array([2.0, 5.0]), [640, 10]
    theta = worker.work.model.parameters.double().numpy()
    for x, y in numbers[:3]:
        g, _ = softmax(x, y, theta[:640].reshape(10, 64), theta[640:])
        theta = theta - np.repeat(a * m, sizes) * g
    w, b = theta[:640].reshape(10, 64), theta[640:]
    v, _ = softmax(*numbers[4], w, b)
    _, h = softmax(*numbers[3], w, b)
    p = -h @ sum(np.linalg.matrix_power(np.eye(650) - 0.1 * h, j) @ v for j in range(4))
    per_tensor = np.array([(p * g)[:640].sum(), (p * g)[640:].sum()])
    of_lrs, of_biases = (-per_tensor * m).clip(-2, 2), (-per_tensor * a).clip(-2, 2)
    np.testing.assert_allclose(actual[-2:], [0.05, 0.02] - 0.0001 * of_lrs, **CLOSE)
    np.testing.assert_allclose(actual[-4:-2], [2.0, 5.0] - 0.001 * of_biases, **CLOSE)
    x, y = numbers[4]
    z = x @ w.T + b
    expected = (np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]).mean()
    assert float(loss) == pytest.approx(expected, abs=1e-5)
    assert abs(of_biases).max() > 0.01  # or nothing is compared


@pytest.mark.parametrize("tensor", [0, 1])
def test_the_published_direction_of_learning_rates_is_opposite_to_that_of_the_last_step(
    tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one inner step the held-out loss is a function of the learning rates; a difference
    quotient gives its derivative. The published direction has the opposite sign: softmax
    regression has no negative curvature and, on pixels divided by 20, none above 20."""
    monkeypatch.setitem(models.ENCODERS, "mlp", lambda network, shape: (nn.Flatten(), 64))

    def outer_step(change: float = 0.0) -> tuple[float, float]:
        params = {"inner_steps": 1, "clamp": 1e9, "hyper_lr": 1.0}
        l2p, worker = method(tiny("fedl2p", split=FEW, **params))
        worker.work.scale, worker.work.offset = worker.work.scale / 20, worker.work.offset / 20
        meta = constant(l2p, 0.0, 1.0, 0.5)
        meta[-2 + tensor] += change
        inner, outer, others = batches(worker, arrived(worker))
        statistics = layer_statistics(worker.work, l2p.norms, others)
        step, loss = l2p.outer_step(meta, statistics, inner, outer)
        return float(step[-2:][tensor]), float(loss)

    quotient = (outer_step(0.2)[1] - outer_step(-0.2)[1]) / 0.4
    assert outer_step()[0] * quotient < 0


def test_the_hypergradient_of_a_quadratic_by_hand() -> None:
    """theta = c - r(meta), held-out loss v . theta + d . meta, training loss
    theta^T Q theta / 2 + theta^T B meta. H = Q, so p = sum_j (I - 0.1 Q)^j v and published is
    -p^T (B - Q R) with R = dr / dmeta, plus d for BNNet's numbers alone."""
    l2p, _ = method(tiny("fedl2p", **BN))
    bn, draw = l2p.nets.bn_size, torch.Generator().manual_seed(1)
    size = len(l2p.nets.initial(0, 0.1))
    meta = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    v, c = torch.randn(2, 3, generator=draw, dtype=torch.float64)
    root, (d,) = torch.randn(3, 3, generator=draw).double(), torch.randn(1, size, generator=draw)
    d, q = d.double(), root @ root.T
    r, b = torch.randn(2, 3, size, generator=draw, dtype=torch.float64)
    r[:, :bn] = 0  # only learning rates change the last step
    theta = c - r @ meta
    outer, inner = v @ theta + d @ meta, theta @ q @ theta / 2 + theta @ b @ meta
    actual = l2p.hypergradient(outer, inner, theta, meta)
    p = sum(torch.linalg.matrix_power(torch.eye(3) - 0.1 * q, j) @ v for j in range(4))
    expected = -(p @ (b - q @ r))
    expected[:bn] += d[:bn]
    torch.testing.assert_close(actual, expected)


def test_an_outer_step_changes_all_parts_of_meta_by_at_most_clamp_times_lr() -> None:
    l2p, worker = method(tiny("fedl2p", **BN, lr=0.1, clamp=0.01))
    client_round = arrived(worker, experience=1)
    change = (l2p.learn_meta(client_round)[0] - client_round.message["meta"]).abs()
    bn, lr, lrs = change.split([l2p.nets.bn_size, len(change) - l2p.nets.bn_size - 8, 8])
    assert all((part > 0).any() for part in (bn, lr, lrs))
    assert float(torch.cat([bn, lr]).max()) == pytest.approx(0.01 * 0.001, rel=0.01)
    assert float(lrs.max()) == pytest.approx(0.01 * 0.0001, rel=0.01)


def test_each_outer_step_starts_from_the_result_of_the_one_before() -> None:
    """And from the received network."""
    l2p, worker = method(tiny("fedl2p", split=FEW, outer_steps=2, inner_steps=2, lr=0.1))
    client_round = arrived(worker)
    twice, losses = l2p.learn_meta(client_round)
    inner, outer, others = batches(worker, client_round)
    meta, statistics = client_round.message["meta"], layer_statistics(worker.work, [], others)
    for loss in losses:
        step, again = l2p.outer_step(meta, statistics, inner, outer)
        worker.method.receive(client_round)
        assert torch.equal(again, loss)
        meta = meta - step
    assert torch.equal(meta, twice) and len(losses) == 2


def test_a_step_that_is_not_finite_is_skipped_and_named() -> None:
    """With learning rates of 1e30 the meta-networks stay, and all models stay finite."""
    l2p, worker = method(tiny("fedl2p", split=FEW, inner_steps=4))
    client_round = arrived(worker, meta=constant(l2p, 0.0, 1.0, 1e30))
    actual, losses = l2p.learn_meta(client_round)
    assert torch.equal(actual, client_round.message["meta"]) and losses == []
    assert client_round.log.events == [SKIPPED]
    record = run(tiny("fedl2p", split=FEW, lr=1e30))
    assert all(row["events"] == {SKIPPED: 4} for row in record.history)
    small.assert_same_weights(record, run(tiny(split=FEW)))
    assert np.isfinite(record.accuracy("personal")).all()


@pytest.mark.parametrize(("lr", "events"), [(0.1, []), (-0.1, [NEGATIVE])])
def test_learning_rates_are_logged_and_negative_ones_named(lr: float, events: list[str]) -> None:
    """Nothing keeps them from it. Logged are a_k m_k, here 2 a and for the last tensor 3 a."""
    l2p, worker = method(tiny("fedl2p", **BN, meta_lr=0.0, hyper_lr=0.0))
    meta = constant(l2p, 0.25, 2.0, lr)
    meta[-9] = 3.0  # the multiplier of the last tensor
    client_round = arrived(worker, meta=meta)
    l2p.learn_meta(client_round)
    assert client_round.log.events == events
    smallest, mean = min(2 * lr, 3 * lr), (7 * 2 + 3) * lr / 8
    expected = {"lr": mean, "smallest lr": smallest, "beta": 0.25}
    assert client_round.log.numbers == pytest.approx(expected)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_the_outer_loss_is_that_of_a_fine_tuned_copy(beta: float) -> None:
    """With beta 0 normalisation uses the received statistics in training too, with beta 1 new
    ones: the held-out loss is that of a copy after four steps of torch.optim.SGD."""
    experiment = tiny("fedl2p", **BN, inner_steps=4)
    l2p, worker = method(experiment)
    meta = constant(l2p, beta, 4.0, 0.02)
    client_round = arrived(worker, meta=meta, buffers=other_buffers(worker))
    _, (loss,) = l2p.learn_meta(client_round)
    net = models.build_network(experiment.setting.network, (1, 8, 8), 10, seed=0)
    if not beta:
        net.encoder[1].running_mean.copy_(client_round.message["buffers"][:4])
        net.encoder[1].running_var.copy_(client_round.message["buffers"][4:])
    inner, outer, _ = batches(worker, client_round)
    net = tuned(experiment, inner, 4, 0.08, net.train(bool(beta))).eval()
    x, y = next(outer)
    torch.testing.assert_close(loss, F.cross_entropy(net(x), y).detach(), **CLOSE)


# --- personal models


def personal(worker: Worker, client: int = 0, experience: int = 0, **changes: Any) -> ClientRound:
    """A client round whose personal model is in the live model."""
    server, states, *_ = worker.initial_states(0)
    message = {**worker.method.broadcast(server, client), **changes}
    round_id = RoundId(0, client, experience, 1, last=True)
    client_round = ClientRound(round_id, worker.plans[0], states[client], message)
    worker.method.load_personal_model(client_round)
    return client_round


@pytest.mark.parametrize("backbone", ["federated", "frozen"])
def test_with_beta_and_multiplier_0_the_personal_model_is_the_global_one(backbone: str) -> None:
    """Weights, statistics and accuracies, bit for bit."""
    l2p, worker = method(tiny("fedl2p", **BN, backbone=backbone))
    changes = {"buffers": other_buffers(worker)} if backbone == "federated" else {}
    client_round = personal(worker, meta=constant(l2p, 0.0, 0.0, 0.1), **changes)
    source = client_round.message if backbone == "federated" else client_round.state
    model = worker.work.model
    assert torch.equal(model.parameters, source["parameters"])
    assert torch.equal(model.buffers, source["buffers"])
    scores = score(worker.work, worker.plans[0], [0], 0)
    model.load(source["parameters"], source["buffers"])
    same = score(worker.work, worker.plans[0], [0], 0)
    assert torch.equal(scores.nan_to_num(7), same.nan_to_num(7))


def test_with_beta_1_and_one_learning_rate_it_is_plain_fine_tuning() -> None:
    """a m = 0.08: torch.optim.SGD on a copy whose running statistics are reset; 2 epochs of 40
    images are 6 batches of at most 16."""
    experiment = tiny("fedl2p", **BN, ft_epochs=2)
    l2p, worker = method(experiment)
    meta = constant(l2p, 1.0, 4.0, 0.02)
    client_round = personal(worker, meta=meta, buffers=other_buffers(worker))
    own = worker.method.train_indices(client_round)
    source = endless_batches(worker.work, client_round.round_id, own, "personal")
    expected = tuned(experiment, source, 6, 0.08).state_dict()
    for name, value in worker.work.classifier.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("client", "experience"), [(0, 0), (0, 1), (1, 0)])
def test_beta_and_learning_rates_follow_from_the_clients_current_images(
    client: int, experience: int
) -> None:
    """By their statistics in the received network."""
    l2p, worker = method(tiny("fedl2p", **BN, ft_epochs=3))
    draw, work = torch.Generator().manual_seed(2), worker.work
    meta = l2p.nets.initial(0, 0.05)
    meta[:-8] += 0.02 * torch.randn(len(meta) - 8, generator=draw)
    client_round = personal(worker, client, experience, meta=meta)
    actual = work.model.parameters.clone(), work.model.buffers.clone()

    l2p.receive(client_round)
    own = worker.plans[0].train_indices(work.dataset, client, experience)
    with torch.no_grad():
        beta, lrs = l2p.nets(meta, layer_statistics(work, l2p.norms, own))
    net = l2p.reset_statistics()
    with personalisation.mixed_normalisation(l2p.norms, net, beta):
        source = endless_batches(work, client_round.round_id, own, "personal")
        l2p.fine_tune(islice(source, 9), lrs)  # 3 epochs of 40 images in batches of 16
    personalisation.store_mixture(l2p.norms, net, beta)
    assert len(lrs.unique()) > 1 and 0 < float(beta) < 1
    assert torch.equal(work.model.parameters, actual[0])
    assert torch.equal(work.model.buffers, actual[1])


@pytest.mark.parametrize("changes", [{"ft_epochs": 0}, {}], ids=["no epochs", "one image"])
def test_without_batch_statistics_normalisation_is_not_mixed(changes: dict[str, Any]) -> None:
    """Else it would use the reset mean of 0 and variance of 1."""
    experiment = tiny("fedl2p", **BN, **changes)
    l2p, worker = method(experiment, None if changes else small.awkward(experiment))
    meta = constant(l2p, 0.5, 1.0, 0.1)
    client_round = personal(worker, meta=meta, buffers=other_buffers(worker))
    assert torch.equal(worker.work.model.buffers, client_round.message["buffers"])
    same = torch.equal(worker.work.model.parameters, client_round.message["parameters"])
    assert same == bool(changes)


def test_a_client_without_images_has_the_global_model() -> None:
    experiment = tiny("fedl2p", **BN)
    _, worker = method(experiment, small.awkward(experiment))
    client_round = personal(worker, client=2, buffers=other_buffers(worker))
    assert torch.equal(worker.work.model.parameters, client_round.message["parameters"])
    assert torch.equal(worker.work.model.buffers, client_round.message["buffers"])


@pytest.mark.parametrize("backbone", ["federated", "frozen"])
def test_fine_tuning_improves_the_accuracy_on_the_current_task(backbone: str) -> None:
    """Over the same network without fine-tuning."""

    def learning_accuracy(epochs: int) -> float:
        record = run(tiny("fedl2p", backbone=backbone, lr=0.05, ft_epochs=epochs))
        return float(np.mean([record.accuracy("personal")[t, :, t].mean() for t in range(3)]))

    assert learning_accuracy(5) > learning_accuracy(0) + 0.1


# --- the frozen network


FROZEN: dict[str, Any] = {"backbone": "frozen", "warm_rounds": 3}


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_the_frozen_network_is_fedavgs_on_the_first_tasks(policy: str, tmp_path: Path) -> None:
    """The weights are those of a run of FedAvg that ends there, and never change; with local
    buffers every client keeps its own. There is no global model."""
    experiment = tiny("fedl2p", **BN, **FROZEN, training={"rounds": 2, "buffers": policy})
    short = tiny(**BN, training={"rounds": 3, "buffers": policy})
    whole = plan(experiment)
    clients = tuple(sequence[:1] for sequence in whole.clients)
    first = replace(whole, split=replace(whole.split, tasks=1), clients=clients)
    run(short, first, resume=tmp_path / "fedavg")
    record = run(experiment, resume=tmp_path)
    state, warm = small.saved(experiment, tmp_path), small.saved(short, tmp_path / "fedavg")
    for name in ("parameters", "buffers"):
        assert torch.equal(state["server"][name], warm["server"][name])
    for own, before in zip(state["clients"], warm["clients"], strict=True):
        assert own.keys() == {"parameters", "buffers"}
        assert torch.equal(own["parameters"], state["server"]["parameters"])
        assert torch.equal(own["buffers"], before.get("buffers", state["server"]["buffers"]))
    assert np.isnan(record.scores["local"]).all() and np.isnan(record.scores["global"]).all()
    assert np.isfinite(record.accuracy("personal")).all() and record.weights == {}
    assert all(row["loss"] > 0 and row["sgd_steps"] == 4 for row in record.history)


@pytest.mark.parametrize("network", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
def test_with_a_frozen_network_clients_with_few_images_do_no_harm(
    network: dict[str, Any], tmp_path: Path
) -> None:
    """One image, one class, none at all: weights, meta-networks and accuracies stay finite."""
    training = {"dropout": 0.3}
    experiment = tiny("fedl2p", network=network, split=FEW, **FROZEN, training=training)
    record = run(experiment, small.awkward(experiment), resume=tmp_path)
    for name, value in small.tensors(small.saved(experiment, tmp_path)["server"]):
        assert value.isfinite().all(), name
    accuracy = record.accuracy("personal")
    assert ((accuracy >= 0) & (accuracy <= 1)).all()


@pytest.mark.parametrize("policy", ["shared", "local"])
def test_a_client_round_with_a_frozen_network_depends_on_its_arguments_alone(policy: str) -> None:
    """Not on the former live model; the state stays, and only the meta-networks are sent."""
    _, worker = method(tiny("fedl2p", **BN, **FROZEN, training={"buffers": policy}))
    server, states, *_ = worker.initial_states(0)
    args = RoundId(0, 1, 0, 0, last=True), states[1], worker.method.broadcast(server, 1)
    before = small.copied(states[1])
    result = worker.train_client(*args)
    small.assert_equal_trees(result.reply.state, before)
    worker.work.model.parameters.fill_(7)
    worker.work.model.buffers.fill_(7)
    small.assert_equal_trees(worker.train_client(*args).reply.message, result.reply.message)
    assert result.scores is None and set(result.reply.message) == {"meta"}


# --- refused parameters
