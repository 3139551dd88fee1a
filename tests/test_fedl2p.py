"""FedL2P: how to fine-tune is learnt, averaged and used; the network is FedAvg's, or frozen."""

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
from torch import Tensor, nn

from stamp_core import checkpoint, models
from stamp_core.config import ParameterError
from stamp_core.executor import Worker
from stamp_core.methods import Log, Reply, State, Turn
from stamp_core.methods import fedl2p as module
from stamp_core.methods.fedl2p import FedL2P
from stamp_core.personal import endless, gathered, look
from stamp_core.split import Plan
from stamp_core.workspace import Visit

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}
FEW = {"images_per_class": 20}  # 40 pictures a task, 8 of them held out
BN: dict[str, Any] = {"network": BATCH_NORM, "split": FEW}
MLP_META = 4 * 100 + 100 + 10_100 + 4 * 100 + 4 + 4  # LRNet 2 L = 4 -> K = 4, and the rates
BN_META = 100 + 100 + 10_100 + 100 + 1 + 8 * 100 + 100 + 10_100 + 8 * 100 + 8 + 8
NEGATIVE = "meta-networks: a rate is below 0"
SKIPPED = "meta-networks: a step was no number and is skipped"


def method(cell: Any) -> tuple[FedL2P, Worker]:
    """The method of an experiment and the worker it is in."""
    here = small.worker(cell, plan(cell))
    assert isinstance(here.method, FedL2P)
    return here.method, here


def visited(here: Worker, step: int = 0, **changes: Any) -> Turn:
    """A turn of client 0 in its first round of a step, ready to train."""
    turn = small.arrived(here, here.plans[0], step)
    turn.message = {**turn.message, **changes}
    here.method.receive(turn)
    turn.indices = here.method.examples(turn)
    return turn


def constant(l2p: FedL2P, share: float, multiplier: float, rate: float) -> Tensor:
    """Meta-networks that say the same of every client: no weights, and these last biases."""
    parts = [torch.zeros_like(part) for part in l2p.nets.parts]
    if l2p.nets.mixing:
        parts[5].fill_(share)
    parts[-2].fill_(multiplier)
    parts[-1].fill_(rate)
    return torch.cat([part.flatten() for part in parts])


def moved(here: Worker) -> Tensor:
    """Other buffers than an untrained network has."""
    return torch.rand(len(here.work.model.buffers), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"outer_steps": -1}, "outer_steps is -1; it must be at least 0"),
        ({"inner_steps": 0}, "inner_steps is 0; it must be at least 1"),
        ({"ft_steps": -1}, "ft_steps is -1; it must be at least 0"),
        ({"warm_rounds": 0}, "warm_rounds is 0; it must be at least 1"),
        ({"held_out": 0.0}, "held_out is 0.0; it must be above 0"),
        ({"held_out": 1.0}, "held_out is 1.0; it must be at least 0 and below 1"),
        ({"rate": -0.1}, "rate is -0.1; it must be at least 0"),
        ({"meta_rate": -0.1}, "meta_rate is -0.1; it must be at least 0"),
        ({"rates_rate": -0.1}, "rates_rate is -0.1; it must be at least 0"),
        ({"clamp": 0.0}, "clamp is 0.0; it must be above 0"),
        ({"neumann_steps": -1}, "neumann_steps is -1; it must be at least 0"),
        ({"neumann_rate": -0.1}, "neumann_rate is -0.1; it must be at least 0"),
        ({"step": 0.0}, "step is 0.0; it must be above 0"),
        ({"backbone": "free"}, "backbone 'free' is unknown"),
        ({"hypergradient": "none"}, "hypergradient 'none' is unknown"),
        ({"pretrained": "x"}, "backbone is 'federated'; it must be 'frozen' where pretrained is"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_parameters_are_refused_by_name(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        tiny("fedl2p", **params)


# ------------------------------------------------------------------ what travels


@pytest.mark.parametrize(
    ("options", "net", "meta"),
    [({"split": FEW}, P, MLP_META), (BN, BN_P + BN_B, BN_META)],
    ids=["mlp", "cnn"],
)
@pytest.mark.parametrize("backbone", ["federated", "frozen"])
def test_meta_networks_travel_each_way_and_a_frozen_network_only_once(
    backbone: str, options: dict[str, Any], net: int, meta: int
) -> None:
    """4 (P + M) bytes each way and client, or 4 M after two rounds of FedAvg and a download."""
    record = run(tiny("fedl2p", backbone=backbone, warm_rounds=2, **options))
    each = 16 * (meta + (net if backbone == "federated" else 0))
    assert all(row["bytes"] == {"down": each, "up": each} for row in record.history)
    setup = record.about["setup"]
    warm = (3 * 16 * net, 2 * 16 * net) if backbone == "frozen" else (0, 0)
    assert (setup["down"], setup["up"]) == warm
    kept = 4 * net if backbone == "frozen" else 0
    assert all(row["disk"] == kept for row in record.history)


def test_frozen_buffers_are_nobodys_to_mix() -> None:
    """BNNet is gone where normalisation's statistics are not to change."""
    record = run(tiny("fedl2p", **BN, training={"buffers": "frozen"}))
    each = 16 * (BN_P + BN_META - (100 + 100 + 10_100 + 100 + 1))
    assert all(row["bytes"]["up"] == each for row in record.history)
    assert all("share" not in row["notes"] for row in record.history)


# ------------------------------------------------------------------ the network is FedAvg's


@pytest.mark.parametrize("buffers", ["shared", "local"])
def test_outer_steps_leave_no_trace_in_the_network(buffers: str) -> None:
    """All that FedAvg leaves behind is the same bit for bit, with the outer steps at work."""
    training = {"momentum": 0.9, "shift": 1, "dropout": 0.3, "buffers": buffers}
    record = run(tiny("fedl2p", **BN, training=training, outer_steps=2, rate=0.1))
    expected = run(tiny(**BN, training=training))
    small.assert_same_weights(record, expected)
    for model in ("initial", "global", "local"):
        np.testing.assert_array_equal(record.scores[model], expected.scores[model], model)
    assert [row["loss"] for row in record.history] == [row["loss"] for row in expected.history]
    assert all("rate" in row["notes"] and row["seconds"]["meta"] > 0 for row in record.history)


def test_the_live_model_is_as_it_was_received_after_the_outer_steps() -> None:
    l2p, here = method(tiny("fedl2p", **BN, rate=0.1))
    turn = visited(here)
    before = here.work.model.parameters.clone(), here.work.model.buffers.clone()
    meta, losses = l2p.learn(turn)
    assert not torch.equal(meta, turn.message["meta"]) and len(losses) == 1
    assert torch.equal(here.work.model.parameters, before[0])
    assert torch.equal(here.work.model.buffers, before[1])
    assert not any(m._forward_hooks for m in here.work.classifier.modules())


# ------------------------------------------------------------------ the server


def test_meta_networks_are_averaged_by_held_out_pictures() -> None:
    """int(0.2 n) of 4, 12, 40 and no pictures are 0, 2, 8 and 0: (2 x 3 + 8 x 1) / 10 = 1.4."""
    l2p, here = method(tiny("fedl2p", backbone="frozen", warm_rounds=1))
    server = here.begin(0).server
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
def test_at_outer_rates_0_meta_networks_stay_as_they_started(backbone: str, tmp_path: Path) -> None:
    """Averages of equal vectors are that vector, bit for bit."""
    params = {"meta_rate": 0.0, "rates_rate": 0.0, "backbone": backbone}
    cell = tiny("fedl2p", **BN, **params)
    l2p, _ = method(cell)
    run(cell, resume=tmp_path)
    assert torch.equal(small.saved(cell, tmp_path)["server"]["meta"], l2p.nets.start(0, 0.001))


# ------------------------------------------------------------------ the outer step


def test_held_out_pictures_stay_so_as_long_as_a_task_lasts() -> None:
    l2p, here = method(tiny("fedl2p", split={**FEW, "cycles": 2}))
    turn = visited(here)
    found = {}
    for client, step, round_ in ((0, 0, 0), (0, 0, 1), (0, 3, 0), (0, 1, 0), (1, 0, 0)):
        turn.visit = Visit(0, client, step, round_)
        turn.indices = torch.arange(100, 140)
        held, others = l2p.parted(turn)
        assert sorted([*held.tolist(), *others.tolist()]) == turn.indices.tolist()
        assert len(held) == 8
        found[client, step, round_] = held.tolist()
    assert found[0, 0, 0] == found[0, 0, 1] == found[0, 3, 0]
    assert found[0, 0, 0] != found[0, 1, 0] and found[0, 0, 0] != found[1, 0, 0]


def test_inner_steps_see_no_held_out_picture_and_judges_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {}

    def noted(work: Any, visit: Visit, indices: Tensor, purpose: str) -> Any:
        given[purpose] = indices
        return endless(work, visit, indices, purpose)

    monkeypatch.setattr(module, "endless", noted)
    l2p, here = method(tiny("fedl2p", split=FEW))
    turn = visited(here)
    l2p.learn(turn)
    held, others = l2p.parted(turn)
    assert torch.equal(given["outer"], held) and torch.equal(given["inner"], others)


def softmax(x: Any, y: Any, w: Any, b: Any) -> tuple[Any, Any]:
    """Gradient and Hessian of softmax regression's mean loss in theta = (W row by row, b).

    With p the probabilities of a picture and x~ = (x, 1): G = (p - onehot) x~^T and
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


@pytest.mark.parametrize("kind", ["implicit", "scaled", "last step"])
def test_one_outer_step_by_hand(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax regression in 64-bit numbers, W with the rate a_1 m_1, b with a_2 m_2, K = 3.

    Inner steps theta <- theta - a m g; the last of them has the derivatives -m_k g and -a_k g in
    a_k and in m_k, on the tensor's own places. With v the gradient on held-out pictures, H the
    Hessian on a fresh batch, p = sum_{j <= 3} (I - 0.1 H)^j v (times 0.1 if scaled), published is
    -p^T H (-m_k g) for a_k; the derivative of the last step as it is would be -v^T m_k g. The last
    biases of LRNet change m one for one. Steps: clamped to +-c, times 0.001 or 0.0001.
    """
    monkeypatch.setitem(models.ENCODERS, "mlp", lambda network, shape: (nn.Flatten(), 64))
    params: dict[str, Any] = {"inner_steps": 3, "rate": 0.05, "clamp": 2.0}
    params |= {"hypergradient": "last step"} if kind == "last step" else {}
    params |= {"neumann_scaled": True} if kind == "scaled" else {}
    l2p, here = method(tiny("fedl2p", split=FEW, **params))
    meta = constant(l2p, 0.0, 0.0, 0.0)
    meta[-2:] = torch.tensor([0.05, 0.02])
    meta[-4:-2] = torch.tensor([2.0, 5.0])  # the last biases of LRNet
    turn = visited(here, step=0, meta=meta)
    found, (loss,) = l2p.learn(turn)

    held, others = l2p.parted(turn)
    batches = list(islice(endless(here.work, turn.visit, others, "inner"), 4))
    judge = next(endless(here.work, turn.visit, held, "outer"))
    numbers = [(x.flatten(1).double().numpy(), y.numpy()) for x, y in [*batches, judge]]
    a, m, sizes = np.array([0.05, 0.02]), np.array([2.0, 5.0]), [640, 10]
    theta = here.work.model.parameters.double().numpy()
    for x, y in numbers[:3]:
        g, _ = softmax(x, y, theta[:640].reshape(10, 64), theta[640:])
        theta = theta - np.repeat(a * m, sizes) * g
    w, b = theta[:640].reshape(10, 64), theta[640:]
    v, _ = softmax(*numbers[4], w, b)
    _, h = softmax(*numbers[3], w, b)
    factor, p = np.eye(650) - 0.1 * h, v
    if kind != "last step":
        p = sum(np.linalg.matrix_power(factor, j) @ v for j in range(4))
        p = -h @ p * (0.1 if kind == "scaled" else 1.0)
    per_tensor = np.array([(p * g)[:640].sum(), (p * g)[640:].sum()])
    of_rates, of_biases = (-per_tensor * m).clip(-2, 2), (-per_tensor * a).clip(-2, 2)
    np.testing.assert_allclose(found[-2:], [0.05, 0.02] - 0.0001 * of_rates, **CLOSE)
    np.testing.assert_allclose(found[-4:-2], [2.0, 5.0] - 0.001 * of_biases, **CLOSE)
    x, y = numbers[4]
    z = x @ w.T + b
    expected = (np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]).mean()
    assert float(loss) == pytest.approx(expected, abs=1e-5)
    assert abs(of_biases).max() > 0.01  # or nothing is compared


def outer(l2p: FedL2P, here: Worker, turn: Turn, meta: Tensor) -> tuple[Tensor, float]:
    """The step of one outer step from these meta-networks, and its held-out loss."""
    held, others = l2p.parted(turn)
    batches = endless(here.work, turn.visit, others, "inner")
    judges = endless(here.work, turn.visit, held, "outer")
    here.method.receive(turn)
    given = look(here.work, l2p.norms, others)
    step, loss = l2p.outer_step(meta, given, batches, judges)
    here.method.receive(turn)
    return step, float(loss)


@pytest.mark.parametrize("tensor", [0, 1])
def test_the_published_direction_of_rates_is_not_that_of_the_last_step(
    tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one inner step the held-out loss is a function of the rates whose slope a difference
    quotient gives. "last step" has it; "implicit" the opposite sign, as softmax regression has no
    negative curvature and, on pixels divided by 20, none above 20."""
    monkeypatch.setitem(models.ENCODERS, "mlp", lambda network, shape: (nn.Flatten(), 64))
    found = {}
    for kind in ("implicit", "last step"):
        cell = tiny(
            "fedl2p", split=FEW, inner_steps=1, clamp=1e9, rates_rate=1.0, hypergradient=kind
        )
        l2p, here = method(cell)
        here.work.scale, here.work.offset = here.work.scale / 20, here.work.offset / 20
        turn, meta = visited(here), constant(l2p, 0.0, 1.0, 0.5)
        found[kind] = float(outer(l2p, here, turn, meta)[0][-2:][tensor])
    losses = []
    for change in (0.2, -0.2):
        other = meta.clone()
        other[-2 + tensor] += change
        losses.append(outer(l2p, here, turn, other)[1])
    quotient = (losses[0] - losses[1]) / 0.4
    assert found["last step"] == pytest.approx(quotient, rel=0.02)
    assert found["implicit"] * quotient < 0


@pytest.mark.parametrize(
    ("kind", "scaled"), [("implicit", False), ("implicit", True), ("last step", False)]
)
def test_hypergradients_of_a_quadratic_by_hand(kind: str, scaled: bool) -> None:
    """theta = c - r(meta), held-out loss v . theta + d . meta, training loss
    theta^T Q theta / 2 + theta^T B meta. H = Q, so p = sum_j (I - 0.1 Q)^j v and published is
    -p^T (B - Q R) with R = dr / dmeta, plus d for BNNet's numbers alone; "last step" is
    d - R^T v for all of them."""
    l2p, _ = method(tiny("fedl2p", **BN, hypergradient=kind, neumann_scaled=scaled))
    bn, size, draw = l2p.nets.mixing, len(l2p.nets.start(0, 0.1)), torch.Generator().manual_seed(1)
    meta = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    v, c = torch.randn(2, 3, generator=draw, dtype=torch.float64)
    root, (d,) = torch.randn(3, 3, generator=draw).double(), torch.randn(1, size, generator=draw)
    d, q = d.double(), root @ root.T
    r, b = torch.randn(2, 3, size, generator=draw, dtype=torch.float64)
    r[:, :bn] = 0  # only rates move the last step
    theta = c - r @ meta
    loss, inner = v @ theta + d @ meta, theta @ q @ theta / 2 + theta @ b @ meta
    found = l2p.hypergradient(loss, inner, theta, meta)
    factor = torch.eye(3) - 0.1 * q
    p = sum(torch.linalg.matrix_power(factor, j) @ v for j in range(4))
    p = 0.1 * p if scaled else p
    expected = -(p @ (b - q @ r))
    expected[:bn] += d[:bn]
    torch.testing.assert_close(found, expected if kind == "implicit" else d - v @ r)


def test_the_gradient_reaches_all_that_travels() -> None:
    """BNNet, LRNet and the rates all move in one outer step, each by no more than clamp x rate."""
    l2p, here = method(tiny("fedl2p", **BN, rate=0.1, clamp=0.01))
    turn = visited(here, step=1)
    change = (l2p.learn(turn)[0] - turn.message["meta"]).abs()
    bn, lr, rates = change.split([l2p.nets.mixing, len(change) - l2p.nets.mixing - 8, 8])
    assert all((part > 0).any() for part in (bn, lr, rates))
    assert float(torch.cat([bn, lr]).max()) == pytest.approx(0.01 * 0.001, rel=0.01)
    assert float(rates.max()) == pytest.approx(0.01 * 0.0001, rel=0.01)


def test_more_outer_steps_go_on_from_the_one_before() -> None:
    """Two outer steps on the same batches as one and another from what it has learnt."""
    l2p, here = method(tiny("fedl2p", split=FEW, outer_steps=2, inner_steps=2, rate=0.1))
    turn = visited(here)
    twice, losses = l2p.learn(turn)
    held, others = l2p.parted(turn)
    batches = endless(here.work, turn.visit, others, "inner")
    judges = endless(here.work, turn.visit, held, "outer")
    meta, given = turn.message["meta"], look(here.work, [], others)
    for loss in losses:
        step, again = l2p.outer_step(meta, given, batches, judges)
        here.method.receive(turn)
        assert torch.equal(again, loss)
        meta = meta - step
    assert torch.equal(meta, twice) and len(losses) == 2


def test_a_step_that_is_no_number_is_skipped_and_named() -> None:
    """Rates of 1e30 blow the network up; the meta-networks stay, and everything stays finite."""
    l2p, here = method(tiny("fedl2p", split=FEW, inner_steps=4))
    meta = constant(l2p, 0.0, 1.0, 1e30)
    turn = visited(here, meta=meta)
    found, losses = l2p.learn(turn)
    assert torch.equal(found, meta) and losses == []
    assert turn.log.events == [SKIPPED]
    record = run(tiny("fedl2p", split=FEW, rate=1e30))
    assert all(row["events"] == {SKIPPED: 4} for row in record.history)
    small.assert_same_weights(record, run(tiny(split=FEW)))
    assert np.isfinite(record.accuracy("personal")).all()


@pytest.mark.parametrize(("rate", "events"), [(0.1, []), (-0.1, [NEGATIVE])])
def test_a_rate_below_0_is_named(rate: float, events: list[str]) -> None:
    """Nothing keeps the rates from it. What the record says is a_k m_k, here 2 a and for b 3 a."""
    l2p, here = method(tiny("fedl2p", **BN, meta_rate=0.0, rates_rate=0.0))
    meta = constant(l2p, 0.25, 2.0, rate)
    meta[-9] = 3.0  # the multiplier of the last tensor
    turn = visited(here, meta=meta)
    l2p.learn(turn)
    assert turn.log.events == events
    least, mean = min(2 * rate, 3 * rate), (7 * 2 + 3) * rate / 8
    expected = {"rate": mean, "least rate": least, "share": 0.25}
    assert turn.log.numbers == pytest.approx(expected)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_outer_step_judges_what_fine_tuning_would_make(share: float) -> None:
    """With beta 0 normalisation goes by the received statistics in training too, with beta 1 by
    new ones: the held-out loss is that of a copy that torch.optim.SGD has tuned four times."""
    cell = tiny("fedl2p", **BN, inner_steps=4)
    l2p, here = method(cell)
    turn = visited(here, meta=constant(l2p, share, 4.0, 0.02), buffers=moved(here))
    _, (loss,) = l2p.learn(turn)
    net = models.build(cell.setting.network, (1, 8, 8), 10, seed=0)
    if not share:
        net.encoder[1].running_mean.copy_(turn.message["buffers"][:4])
        net.encoder[1].running_var.copy_(turn.message["buffers"][4:])
    descent, (held, others) = torch.optim.SGD(net.parameters(), 0.08), l2p.parted(turn)
    for x, y in islice(endless(here.work, turn.visit, others, "inner"), 4):
        descent.zero_grad()
        F.cross_entropy(net.train(bool(share))(x), y).backward()
        descent.step()
    x, y = next(endless(here.work, turn.visit, held, "outer"))
    torch.testing.assert_close(loss, F.cross_entropy(net.eval()(x), y).detach(), **CLOSE)


# ------------------------------------------------------------------ personal models


def personal(here: Worker, client: int = 0, step: int = 0, **changes: Any) -> Turn:
    """The turn of a client whose personal model has been put into the live model."""
    server, states, *_ = here.begin(0)
    message = {**here.method.broadcast(server, client), **changes}
    turn = Turn(Visit(0, client, step, 1, last=True), here.plans[0], states[client], message)
    here.method.receive_personal(turn)
    return turn


@pytest.mark.parametrize("backbone", ["federated", "frozen"])
def test_without_share_and_rate_the_personal_model_is_everybodys_bit_for_bit(backbone: str) -> None:
    """beta = 0 and m = 0: weights, statistics and accuracies."""
    cell = tiny("fedl2p", **BN, backbone=backbone)
    l2p, here = method(cell)
    meta = constant(l2p, 0.0, 0.0, 0.1)
    if backbone == "federated":
        turn = personal(here, meta=meta, buffers=moved(here))
        expected = turn.message["parameters"], turn.message["buffers"]
    else:
        turn = personal(here, meta=meta)
        expected = turn.state["parameters"], turn.state["buffers"]
    assert torch.equal(here.work.model.parameters, expected[0])
    assert torch.equal(here.work.model.buffers, expected[1])
    scores = here.work.score(here.plans[0], [0], 0)
    here.work.model.load(*expected)
    same = here.work.score(here.plans[0], [0], 0)
    assert torch.equal(scores.nan_to_num(7), same.nan_to_num(7))


def test_with_full_share_and_one_rate_it_is_plain_fine_tuning_with_new_statistics() -> None:
    """beta = 1 and a m = 0.08: torch.optim.SGD on a copy whose normalisation starts anew."""
    cell = tiny("fedl2p", **BN, ft_steps=7)
    l2p, here = method(cell)
    turn = personal(here, meta=constant(l2p, 1.0, 4.0, 0.02), buffers=moved(here))
    net = models.build(cell.setting.network, (1, 8, 8), 10, seed=0)
    descent = torch.optim.SGD(net.parameters(), 0.08)
    own = here.method.examples(turn)
    for x, y in islice(endless(here.work, turn.visit, own, "personal"), 7):
        descent.zero_grad()
        F.cross_entropy(net.train()(x), y).backward()
        descent.step()
    found = dict(here.work.classifier.named_parameters())
    for name, value in net.named_parameters():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)
    norm, (mean, variance) = net.encoder[1], gathered(l2p.norms)[0]
    torch.testing.assert_close(mean, norm.running_mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(variance, norm.running_var, rtol=0, atol=1e-5)


def test_shares_and_rates_of_a_personal_model_are_those_of_its_client() -> None:
    """From what all its pictures of the current task are to the received network."""
    l2p, here = method(tiny("fedl2p", **BN))
    draw = torch.Generator().manual_seed(2)
    meta = l2p.nets.start(0, 0.05)
    meta[:-8] += 0.2 * torch.randn(len(meta) - 8, generator=draw)
    nets, said = l2p.nets, []

    class Noted:
        def __call__(self, *given: Any) -> Any:
            said.append(nets(*given))
            return said[-1]

        def __getattr__(self, name: str) -> Any:
            return getattr(nets, name)

    l2p.nets = Noted()  # type: ignore[assignment]
    turns = [personal(here, u, step, meta=meta) for u, step in ((0, 0), (0, 1), (1, 0))]
    for turn, answer in zip(turns, said, strict=True):
        here.method.receive(turn)
        given = look(here.work, l2p.norms, here.method.examples(turn))
        for one, other in zip(answer, nets(meta, given), strict=True):
            assert torch.equal(one, other)
    for k, other in ((0, 1), (0, 2)):
        assert not torch.equal(said[k][1], said[other][1])


@pytest.mark.parametrize("changes", [{"ft_steps": 0}, {}], ids=["no steps", "one picture"])
def test_where_normalisation_gathers_nothing_it_is_not_mixed(changes: dict[str, Any]) -> None:
    """Else it would go by a mean of 0 and a variance of 1 that nobody has measured."""
    cell = tiny("fedl2p", **BN, **changes)
    plan_ = plan(cell) if changes else small.awkward(cell)
    here = small.worker(cell, plan_)
    assert isinstance(here.method, FedL2P)
    turn = personal(here, meta=constant(here.method, 0.5, 1.0, 0.1), buffers=moved(here))
    assert torch.equal(here.work.model.buffers, turn.message["buffers"])
    still = torch.equal(here.work.model.parameters, turn.message["parameters"])
    assert still == bool(changes)


def test_a_client_without_pictures_has_everybodys_model() -> None:
    cell = tiny("fedl2p", **BN)
    here = small.worker(cell, small.awkward(cell))
    turn = personal(here, client=2, buffers=moved(here))
    assert torch.equal(here.work.model.parameters, turn.message["parameters"])
    assert torch.equal(here.work.model.buffers, turn.message["buffers"])


@pytest.mark.parametrize("backbone", ["federated", "frozen"])
def test_fine_tuning_helps_on_the_task_at_hand(backbone: str) -> None:
    record = run(tiny("fedl2p", backbone=backbone, rate=0.05, ft_steps=20))
    diagonal = [
        np.mean([record.accuracy(model)[t, :, t].mean() for t in range(3)])
        for model in ("personal", "global")
    ]
    assert diagonal[0] > diagonal[1] + 0.1


# ------------------------------------------------------------------ frozen


FROZEN: dict[str, Any] = {"backbone": "frozen", "warm_rounds": 3}


def first_tasks(plan_: Plan) -> Plan:
    """The plan that ends after everybody's first task."""
    clients = tuple(sequence[:1] for sequence in plan_.clients)
    return replace(plan_, split=replace(plan_.split, tasks=1), clients=clients)


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_without_a_network_fedavg_trains_one_on_first_tasks(policy: str, tmp_path: Path) -> None:
    """Its weights are those of a run of FedAvg that ends there, and never change; with local
    buffers every client keeps its own."""
    cell = tiny("fedl2p", **BN, **FROZEN, training={"rounds": 2, "buffers": policy})
    short = tiny(**BN, training={"rounds": 3, "buffers": policy})
    expected = run(short, first_tasks(plan(cell)), resume=tmp_path / "fedavg")
    record = run(cell, resume=tmp_path)
    small.assert_same_weights(record, expected)
    state, warm = small.saved(cell, tmp_path), small.saved(short, tmp_path / "fedavg")
    for own, before in zip(state["clients"], warm["clients"], strict=True):
        assert own.keys() == {"parameters", "buffers"}
        assert torch.equal(own["parameters"], state["server"]["parameters"])
        assert torch.equal(own["buffers"], before.get("buffers", state["server"]["buffers"]))
    assert np.isnan(record.scores["local"]).all()
    assert np.isfinite(record.accuracy("global")).all()
    assert np.isfinite(record.accuracy("personal")).all()
    assert all(row["loss"] > 0 and row["steps"] == 4 for row in record.history)


def test_a_network_of_an_earlier_run_is_taken_up(tmp_path: Path) -> None:
    """The global model is that of the run; every client loads it once."""
    earlier = run(tiny(**BN))
    earlier.save(tmp_path)
    file = str(tmp_path / "weights.safetensors")
    record = run(tiny("fedl2p", **BN, backbone="frozen", pretrained=file))
    small.assert_same_weights(record, earlier)
    np.testing.assert_array_equal(record.accuracy()[0], earlier.accuracy()[-1])
    np.testing.assert_array_equal(record.accuracy()[-1], earlier.accuracy()[-1])
    setup = record.about["setup"]
    assert (setup["down"], setup["up"]) == (4 * 4 * (BN_P + BN_B), 0)


@pytest.mark.parametrize("file", ["weights.safetensors", "nowhere"])
def test_weights_that_do_not_fit_or_are_not_there_are_refused(file: str, tmp_path: Path) -> None:
    run(tiny(split=FEW)).save(tmp_path)
    cell = tiny("fedl2p", **BN, backbone="frozen", pretrained=str(tmp_path / file))
    right = "pretrained is .*; it must be weights.safetensors of a run with this network"
    with pytest.raises(ParameterError, match=right):
        run(cell)


@pytest.mark.parametrize("network", [small.NETWORK, BATCH_NORM], ids=["mlp", "cnn"])
def test_clients_with_next_to_nothing_do_no_harm_to_what_is_frozen(network: dict[str, Any]) -> None:
    cell = tiny("fedl2p", network=network, split=FEW, **FROZEN, training={"dropout": 0.3})
    record = run(cell, small.awkward(cell))
    assert all(np.isfinite(value).all() for value in record.weights.values())
    for model in ("global", "personal"):
        accuracy = record.accuracy(model)
        assert ((accuracy >= 0) & (accuracy <= 1)).all(), model


@pytest.mark.parametrize("policy", ["shared", "local"])
def test_a_frozen_client_is_the_same_before_and_after_and_from_a_file(
    policy: str, tmp_path: Path
) -> None:
    """Nothing but its arguments decides what a visit gives back, and it keeps what it had."""
    cell = tiny("fedl2p", **BN, **FROZEN, training={"buffers": policy})
    _, here = method(cell)
    server, states, *_ = here.begin(0)
    visit, sent = Visit(0, 1, 0, 0, last=True), here.method.broadcast(server, 1)
    before: State = small.copied(states[1])
    answer = here.attend(visit, states[1], sent)
    small.assert_equal_trees(answer.reply.state, before)
    checkpoint.save(tmp_path / "state", states[1], {})
    here.work.model.parameters.fill_(7)
    here.work.model.buffers.fill_(7)
    again = here.attend(visit, checkpoint.load(tmp_path / "state", {}), sent)
    small.assert_equal_trees(again.reply.message, answer.reply.message)
    assert answer.scores is None and set(answer.reply.message) == {"meta"}
