"""Bilevel coreset selection: its gradients, its weights and its draws are those of its problem."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from stamp_core import config, coresets, models
from stamp_core.config import Network
from stamp_core.coresets import Task, bcsr
from stamp_core.coresets.bcsr import Options, Proxy
from stamp_core.learner import Learner
from stamp_core.simplex import project_simplex

Array = NDArray[np.float64]
Curve = Callable[[Tensor, Tensor], Tensor]  # parameters and weights -> a loss
CLASSES = 4
NETWORKS = {
    "mlp": Network(kind="mlp", features=3),
    "cnn": Network(kind="cnn", features=6, channels=(3,), norm="batch"),
}
LOWERED = "bcsr: the proxy's rate was lowered"
DIVERGED = "bcsr: the proxy diverged"
STRANGE = "bcsr: a loss is no number"
quick = settings(deadline=None, max_examples=50, derandomize=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a training; several are far slower with so little to do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def some(n: int, seed: int = 0, side: int = 2) -> tuple[Tensor, Tensor]:
    """Pictures of three of the classes, none of them white."""
    draw = generator(seed)
    pictures = torch.randint(0, 255, (n, 1, side, side), generator=draw).to(torch.uint8)
    return pictures, torch.randint(0, 5, (n,), generator=draw).clamp(min=2) - 2


def normalise(pictures: Tensor) -> Tensor:
    """Values between -2 and 2 in double precision; a white pixel is no number."""
    return (pictures.double() / 63.5 - 2).masked_fill(pictures == 255, torch.nan)


def learner(kind: str = "mlp", side: int = 2, scale: float = 1.0) -> Learner:
    """A network in double precision that has learnt something else than its fresh weights."""
    network = models.build(NETWORKS[kind], (1, side, side), CLASSES, seed=0).double()
    weights = nn.utils.parameters_to_vector(network.parameters()).detach()
    count = sum(b.numel() for b in network.buffers() if b.is_floating_point())
    buffers = torch.rand(count, generator=generator(1), dtype=torch.float64)
    return Learner(network, normalise, scale * (weights + 0.1 * normal(len(weights))), buffers)


def task(n: int = 13, old: int = 7, seed: int = 0, per_class: int = 2, **options: Any) -> Task:
    """A task of n pictures."""
    told = (Options(**options), learner(), generator(seed))
    return Task(*some(n), some(old, seed=1), per_class, *told)


def weights_of(given: Task) -> Array:
    """The weights of all pictures of a task in one batch."""
    return bcsr.weigh(given, torch.arange(len(given.labels))).numpy()


def places_of(given: Task) -> list[int]:
    """The proposal as places among the pictures of the task, which are all different."""
    proposal = bcsr.propose(given)
    contents = [picture.numpy().tobytes() for picture in given.pictures]
    found = [contents.index(picture.numpy().tobytes()) for picture in proposal.pictures]
    assert torch.equal(proposal.labels, given.labels[found])
    assert proposal.soft.shape == (len(found), 0)
    return found


# ----------------------------------------------------------------------- the implicit gradient


def slopes(inner: Curve, outer: Curve, theta: Tensor, p: Tensor, rate: float, terms: int) -> Tensor:
    """`bcsr.implicit` at some parameters and weights."""
    theta, p = theta.clone().requires_grad_(), p.clone().requires_grad_()
    return bcsr.implicit(inner(theta, p), outer(theta, p), p, [theta], rate, terms)


def differences(value: Callable[[Tensor], float], p: Tensor, step: float = 1e-5) -> Tensor:
    """Central differences of a function of the weights."""
    found = [
        (value(p + step * unit) - value(p - step * unit)) / (2 * step)
        for unit in torch.eye(len(p), dtype=p.dtype)
    ]
    return torch.tensor(found, dtype=p.dtype)


def test_the_gradient_of_a_quadratic_problem_is_that_of_its_exact_solution() -> None:
    """With l_i = (theta - a_i)' C_i (theta - a_i) / 2 the inner solution is
    (sum_i p_i C_i)^-1 sum_i p_i C_i a_i, whatever the p_i add up to."""
    n, size = 5, 3
    roots, a, p = normal(n, size, size), normal(n, size, seed=1), normal(n, seed=2).softmax(0)
    C = roots @ roots.mT + 0.5 * torch.eye(size)

    def losses(theta: Tensor) -> Tensor:
        return torch.einsum("ni,nij,nj->n", theta - a, C, theta - a) / 2

    def solution(p: Tensor) -> Tensor:
        matrix = torch.einsum("n,nij->ij", p, C)
        return torch.linalg.solve(matrix, torch.einsum("n,nij,nj->i", p, C, a))

    def inner(theta: Tensor, p: Tensor) -> Tensor:
        return p @ losses(theta)

    def outer(theta: Tensor, p: Tensor) -> Tensor:
        return losses(theta).mean()

    exact = differences(lambda q: float(losses(solution(q)).mean()), p)
    assert exact.abs().min() > 1e-3
    for rate in (0.04, 0.1):
        found = slopes(inner, outer, solution(p), p, rate, terms=1500)
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-8)
    far = [(slopes(inner, outer, solution(p), p, 0.02, t) - exact).norm() for t in (1, 4, 30)]
    assert far[0] > far[1] > far[2]


def test_few_terms_are_the_first_of_the_neumann_series() -> None:
    """With l_i = x_i theta + h theta^2 / 2, sum p = 1, terms K and theta = 1, H = h: the outer
    loss b theta has the slope v = b, and -x_i rate sum_{k<K} (1 - rate h)^k b comes back.

    For h = 2 and rate 0.25 the powers are 1, 1/2, 1/4, 1/8, which add up to 1, 3/2, 7/4, 15/8.
    """
    x, p = torch.tensor([1.0, -2.0]).double(), torch.tensor([0.25, 0.75]).double()
    theta = torch.ones(1).double()

    def inner(theta: Tensor, p: Tensor) -> Tensor:
        return (p @ x * theta + theta**2).sum()

    def outer(theta: Tensor, p: Tensor) -> Tensor:
        return 3 * theta.sum()

    for terms, total in enumerate((1, 3 / 2, 7 / 4, 15 / 8), start=1):
        found = slopes(inner, outer, theta, p, 0.25, terms)
        torch.testing.assert_close(found, -0.25 * total * 3 * x)
    assert bcsr.TERMS == 4


def test_the_gradient_of_logistic_regression_is_that_of_its_exact_solution() -> None:
    """Ridge makes the inner problem strongly convex; Newton's method solves it to rounding."""
    n, size = 8, 3
    x, p = normal(n, size), normal(n, seed=1).softmax(0)
    y = (torch.arange(n) % 2).double()

    def losses(theta: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(x @ theta, y, reduction="none")

    def inner(theta: Tensor, p: Tensor) -> Tensor:
        return p @ losses(theta) + 0.1 * theta @ theta

    def outer(theta: Tensor, p: Tensor) -> Tensor:
        return losses(theta).mean()

    def solution(p: Tensor) -> Tensor:
        theta = torch.zeros(size).double()
        for _ in range(20):
            likely = (x @ theta).sigmoid()
            slope = x.T @ (p * (likely - y)) + 0.2 * theta
            curvature = x.T @ (x * (p * likely * (1 - likely))[:, None]) + 0.2 * torch.eye(size)
            theta = theta - torch.linalg.solve(curvature, slope)
        assert slope.abs().max() < 1e-12
        return theta

    exact = differences(lambda q: float(losses(solution(q)).mean()), p)
    found = slopes(inner, outer, solution(p), p, rate=1.0, terms=300)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-9)
    assert exact.abs().max() > 1e-2


# --------------------------------------------------------------------------- the regulariser


def rotations(z: Array) -> list[Array]:
    return [np.roll(z, shift) for shift in range(len(z))]


def drawn(n: int, seed: int) -> Array:
    return torch.randn(n, generator=generator(seed), dtype=torch.float64).numpy()


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("spread", [0.02, 0.5])
def test_chances_are_the_gradient_of_the_smoothed_sum_of_the_largest(
    count: int, spread: float
) -> None:
    """The sum of the largest of p + spread z is piecewise linear, so differences are exact."""
    p = normal(7, seed=4).softmax(0)
    z = drawn(7, seed=3)

    def smoothed(q: Tensor) -> float:
        sums = [np.sort(q.numpy() + spread * each)[-count:].sum() for each in rotations(z)]
        return float(np.mean(sums))

    found = bcsr.chances(p, count, Options(spread=spread), generator(3))
    torch.testing.assert_close(found, differences(smoothed, p, 1e-7), rtol=0, atol=1e-6)
    assert float(found.sum()) == pytest.approx(count)


def test_equal_weights_have_equal_chances_and_the_largest_are_certain() -> None:
    p = torch.full((40,), 1 / 40).double()
    torch.testing.assert_close(bcsr.chances(p, 6, Options(), generator()), 0 * p + 6 / 40)
    p[[3, 30]] += 0.1
    found = bcsr.chances(p, 2, Options(), generator())
    assert found.nonzero().flatten().tolist() == [3, 30] and found[3] == 1


def test_a_batch_stands_for_its_share_of_what_will_be_chosen() -> None:
    """13 pictures of 3 classes, 2 to be chosen of each: 6/13 of 5 are 2.3, and of 1 0.5."""
    given = task(13)
    for size, expected in ((13, 6), (5, 3), (1, 1)):
        assert bcsr.places(given, torch.arange(size)) == expected
    assert bcsr.places(replace(given, per_class=50), torch.arange(5)) == 5


# -------------------------------------------------------------------------------- the weights


@quick
@given(seed=st.integers(0, 10**6), n=st.integers(1, 30), scale=st.sampled_from([1e-3, 1.0, 1e6]))
def test_the_projection_on_the_simplex_satisfies_its_conditions(
    seed: int, n: int, scale: float
) -> None:
    """Of v - p all entries where p > 0 are equal, and none is larger where p = 0."""
    v = scale * normal(n, seed=seed).numpy()
    p = project_simplex(v)
    assert (p >= 0).all() and p.sum() == pytest.approx(1)
    level = (v - p)[p > 0]
    np.testing.assert_allclose(level, level[0], rtol=0, atol=1e-9 * max(scale, 1))
    assert (v[p == 0] <= level[0] + 1e-9 * max(scale, 1)).all()


def nearest(v: Array) -> Array:
    """The projection on the simplex, its level found by bisection."""
    low, high = v.min() - 1, v.max()
    for _ in range(100):
        level = (low + high) / 2
        low, high = (level, high) if np.maximum(v - level, 0).sum() > 1 else (low, level)
    return np.asarray(np.maximum(v - high, 0))


class Exact:
    """Per-picture losses, gradients and Hessians of a network, as functions of what it learns."""

    def __init__(self, learner: Learner, head: bool) -> None:
        self.learner, self.head = learner, head
        learner.restore()
        names = [name for name, _ in learner.network.named_parameters()]
        self.values = {n: p.detach().clone() for n, p in learner.network.named_parameters()}
        self.names = names[-2:] if head else names
        self.start = torch.cat([self.values[name].flatten() for name in self.names])

    def losses(self, theta: Tensor, pictures: Tensor, labels: Tensor) -> Tensor:
        sizes = [self.values[name].numel() for name in self.names]
        pieces = zip(self.names, theta.split(sizes), strict=True)
        values = self.values | {name: v.view_as(self.values[name]) for name, v in pieces}
        answers = functional_call(self.learner.network, values, (normalise(pictures),))
        return F.cross_entropy(answers, labels, reduction="none")

    def gradients(self, theta: Tensor, pictures: Tensor, labels: Tensor) -> Array:
        theta = theta.clone().requires_grad_()
        return rows(self.losses(theta, pictures, labels), theta)

    def curvature(self, theta: Tensor, p: Array, pictures: Tensor, labels: Tensor) -> Array:
        theta = theta.clone().requires_grad_()
        loss = torch.from_numpy(p) @ self.losses(theta, pictures, labels)
        return rows(torch.autograd.grad(loss, theta, create_graph=True)[0], theta)


def rows(values: Tensor, theta: Tensor) -> Array:
    """The gradient of each value."""
    found = [torch.autograd.grad(value, theta, retain_graph=True)[0] for value in values]
    return torch.stack(found).numpy()


def defined(given: Task, seed: int) -> Array:
    """The weights by the definition, with whole Hessians in place of products with them."""
    options, own = given.options, (given.pictures, given.labels)
    exact, n, draw = Exact(given.learner, options.space == "head"), len(given.labels), generator()
    draw.manual_seed(seed)
    kept = torch.randperm(len(given.past[1]), generator=draw)[: options.candidates]
    past, theta, p, rate = [each[kept] for each in given.past], exact.start, np.full(n, 1 / n), 0.0
    rate = options.rate_proxy
    for _ in range(options.outer):
        for _ in range(options.inner):
            theta = theta - rate * torch.from_numpy(p @ exact.gradients(theta, *own))
        each = exact.gradients(theta, *own)
        v = each.mean(0)
        if len(kept):
            v = v + options.past * exact.gradients(theta, *past).mean(0)
        s = np.exp(p) / np.exp(p).sum() if options.softmax else p
        step = np.eye(len(v)) - rate * exact.curvature(theta, s, *own)
        series = v + step @ (v + step @ (v + step @ v))
        gradient = -rate * each @ series
        if options.softmax:  # the chain rule of softmax
            gradient = s * (gradient - s @ gradient)
        if options.direct:
            z = torch.randn(n, generator=draw, dtype=torch.float64).numpy()
            count = min(n, math.ceil(given.per_class * len(set(given.labels.tolist()))))
            noisy = [p + options.spread * turned for turned in rotations(z)]
            among = [np.argsort(-each)[:count] for each in noisy]
            gradient -= options.beta * np.bincount(np.concatenate(among), minlength=n) / n
        p = nearest(p - options.rate_weights / n * gradient)
    return p


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"direct": False},
        {"direct": False, "past": 0.0},
        {"direct": False, "past": 5.0, "candidates": 13},
        {"inner": 3, "rate_proxy": 0.4},
        {"outer": 2, "beta": 0.7, "spread": 0.05},
        {"softmax": True, "rate_weights": 100.0},
        {"space": "head"},
        {"space": "head", "direct": False, "rate_weights": 60.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(2))
def test_the_weights_are_those_of_the_definition(options: dict[str, Any], seed: int) -> None:
    given = task(13, 20, seed, **options)
    found = weights_of(given)
    assert given.events == []
    assert np.abs(found - 1 / 13).max() > 1e-3
    np.testing.assert_allclose(found, defined(given, seed), rtol=0, atol=1e-9)


def test_without_remembered_pictures_the_outer_loss_is_the_mean() -> None:
    given = task(13, old=0)
    np.testing.assert_allclose(weights_of(given), defined(given, 0), rtol=0, atol=1e-9)


OTHERS: list[dict[str, Any]] = [
    {"outer": 6},
    {"inner": 2},
    {"rate_proxy": 0.2},
    {"rate_weights": 5.0},
    {"beta": 0.2},
    {"spread": 0.1},
    {"past": 3.0},
    {"direct": False},
    {"softmax": True},
    {"space": "head"},
]


@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_each_option_changes_the_weights(options: dict[str, Any]) -> None:
    assert np.abs(weights_of(task(**options)) - weights_of(task())).max() > 1e-6


def test_without_the_direct_term_the_regulariser_changes_nothing() -> None:
    found = [weights_of(task(direct=False, beta=beta)) for beta in (0.0, 0.1, 9.0)]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[0], weights_of(task(beta=0.0)))


def test_a_strong_regulariser_leaves_weight_on_as_many_as_will_be_chosen() -> None:
    found = weights_of(task(40, old=0, beta=50.0, rate_weights=1.0, spread=1e-9))
    assert (found > 0).sum() == 6


def test_the_weights_lower_the_outer_loss_of_what_is_learnt_with_them() -> None:
    """A proxy that takes one step with them ends up lower than one with equal weights."""
    given = task(30, old=0, direct=False, outer=1, rate_weights=0.01)
    found = torch.from_numpy(weights_of(given))

    def after(weights: Tensor) -> float:
        proxy = Proxy(given.learner, "all")
        inputs = proxy.inputs(given.inputs())
        for _ in range(2):
            proxy.step(proxy.slope(inputs, weights), 0.1)
        return float(proxy.losses(inputs).detach().mean())

    assert after(found) < after(bcsr.uniform(30))


# ------------------------------------------------------------------------- rates that are too high


def test_a_rate_that_the_proxy_cannot_bear_is_halved_until_it_can() -> None:
    """What is found raises the loss of a first step at most tenfold, and twice as much does not."""
    given = task(rate_proxy=3e4)
    proxy = Proxy(given.learner, "all")
    inputs = proxy.inputs(given.inputs())
    first = float(proxy.losses(inputs).detach().mean())
    rate, highest = bcsr.bearable(proxy, inputs, 3e4)
    assert highest == pytest.approx(10 * first) and math.log2(3e4 / rate) % 1 == 0
    assert torch.equal(given.learner.model.parameters, given.learner.learnt[0])

    def after(rate: float) -> float:
        there = Proxy(given.learner, "all")
        there.step(there.slope(inputs, bcsr.uniform(13)), rate)
        return float(there.losses(inputs).detach().mean())

    assert after(rate) <= 10 * first < after(2 * rate) and rate < 3e4
    weights_of(given)
    assert given.events.count(LOWERED) == 1
    weights_of(calm := task(rate_proxy=0.1))
    assert calm.events == []


def test_the_lowered_rate_is_the_one_that_is_used() -> None:
    given = task(rate_proxy=3e4)
    rate = bcsr.bearable(proxy := Proxy(given.learner, "all"), proxy.inputs(given.inputs()), 3e4)[0]
    np.testing.assert_array_equal(weights_of(given), weights_of(task(rate_proxy=rate)))


@pytest.mark.parametrize("trouble", ["loss", "no loss", "gradient"])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_where_the_proxy_diverges_the_weights_are_those_before_the_last_step(
    step: int, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step gave the weights that it could not bear; without a step they are equal."""
    outer = max(step - 1, 0)
    expected = weights_of(task(outer=outer)) if outer else np.full(13, 1 / 13)
    calls, through = [0], bcsr.through

    def failing(*told: Any) -> tuple[float, Tensor]:
        loss, gradient = through(*told)
        calls[0] += 1
        if calls[0] <= step:
            return loss, gradient
        if trouble == "gradient":
            gradient[4] = torch.nan
        return {"loss": 1e3, "no loss": math.nan, "gradient": loss}[trouble], gradient

    monkeypatch.setattr(bcsr, "through", failing)
    given = task()
    np.testing.assert_array_equal(weights_of(given), expected)
    assert given.events == [DIVERGED] and calls == [step + 1]


def test_weights_that_a_proxy_cannot_bear_are_taken_back() -> None:
    """The first step of the weights puts all on one picture, on which a high rate runs away."""
    given = task(13, rate_weights=1e5, rate_proxy=20.0, inner=3)
    found = weights_of(given)
    assert DIVERGED in given.events
    np.testing.assert_allclose(found, 1 / 13)


# --------------------------------------------------------------------------------- the choice


def ranks(p: list[float], seed: int = 0, choice: Any = "draw") -> list[int]:
    given = task(seed=seed, choice=choice)
    return bcsr.ranked(torch.tensor(p).double(), given).tolist()


def test_pictures_are_drawn_without_replacement_with_the_weights_as_chances() -> None:
    """The chance of i and then j is p_i p_j / (1 - p_i); 5 deviations are allowed."""
    p, times = [0.5, 0.3, 0.2, 0.0], 4000
    given = task()
    weights = 7 * torch.tensor(p).double()
    orders = [bcsr.ranked(weights, given).tolist() for _ in range(times)]
    assert all(sorted(order) == [0, 1, 2, 3] and order[3] == 3 for order in orders)
    found = Counter((order[0], order[1]) for order in orders)
    for i in range(3):
        for j in {0, 1, 2} - {i}:
            chance = p[i] * p[j] / (1 - p[i])
            assert abs(found[i, j] - times * chance) < 5 * math.sqrt(times * chance)


def test_the_largest_weights_come_first_where_asked_and_zeros_stay_in_their_order() -> None:
    assert ranks([0.1, 0.0, 0.5, 0.0, 0.4], choice="top") == [2, 4, 0, 1, 3]
    assert ranks([0.0, 0.0, 1.0, 0.0]) == [2, 0, 1, 3]


def test_pictures_without_weight_come_last_in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def pair(given: Task, batch: Tensor) -> Tensor:
        return torch.isin(batch, torch.tensor([2, 7])).double() / 2

    monkeypatch.setattr(bcsr, "weigh", pair)
    orders = [places_of(task(9, seed=seed)) for seed in range(6)]
    assert all(set(order[:2]) == {2, 7} for order in orders)
    assert len({tuple(order[2:]) for order in orders}) > 3


def test_several_batches_share_the_task_and_their_weights_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """13 pictures are 3 batches of 5, 4 and 4: in a smaller batch the same weight is less."""
    batches: list[Tensor] = []

    def first(given: Task, batch: Tensor) -> Tensor:
        batches.append(batch)
        rest = torch.full((len(batch),), 0.4 / (len(batch) - 1)).double()
        rest[0] = 0.6 + 0.001 * len(batches)
        return rest

    monkeypatch.setattr(bcsr, "weigh", first)
    found = places_of(task(13, candidates=5, choice="top"))
    assert [len(batch) for batch in batches] == [5, 4, 4]
    assert sorted(torch.cat(batches).tolist()) == list(range(13))
    assert found[:3] == [int(batches[k][0]) for k in (0, 2, 1)]  # 5 * 0.601, 4 * 0.603, 4 * 0.602
    assert torch.cat(batches).tolist() != list(range(13)), "the batches are not drawn"


def test_each_batch_is_weighed_for_itself() -> None:
    """From the client's weights, whatever the batch before has made of them."""
    given = task(13, old=0, direct=False)
    batch = torch.tensor([3, 1, 12, 7])
    alone = bcsr.weigh(given, batch)
    bcsr.weigh(given, torch.arange(5))
    torch.testing.assert_close(bcsr.weigh(given, batch), alone, rtol=0, atol=0)


def test_a_learner_left_elsewhere_takes_up_the_weights_of_the_client() -> None:
    given = task(30)
    given.learner.model.parameters.fill_(torch.nan)
    assert places_of(given) == places_of(task(30)) and given.events == []


def test_no_more_remembered_pictures_than_candidates_are_looked_at() -> None:
    given = task(old=30, candidates=8)
    pictures, labels = bcsr.remembered(given)
    assert pictures.shape == (8, 1, 2, 2) and labels.shape == (8,)
    assert not torch.equal(pictures, given.past[0][:8])


# -------------------------------------------------------------------------------- the proposal


@pytest.mark.parametrize("options", [{}, {"choice": "top"}, {"space": "head"}], ids=str)
def test_the_order_of_the_pictures_does_not_matter(options: dict[str, Any]) -> None:
    pictures, labels = some(40)
    order = torch.randperm(40, generator=generator(3))
    one, other = (
        coresets.propose("bcsr", replace(task(candidates=15, **options), pictures=p, labels=y))
        for p, y in ((pictures, labels), (pictures[order], labels[order]))
    )
    assert torch.equal(one.pictures, other.pictures) and torch.equal(one.labels, other.labels)


def test_a_proposal_is_a_matter_of_the_generator() -> None:
    assert places_of(task(30)) == places_of(task(30))
    assert places_of(task(30)) != places_of(task(30, seed=1))
    mild: dict[str, Any] = {"direct": False, "rate_weights": 1.0, "old": 0}
    assert (weights_of(task(30, **mild)) > 0).all()
    top = {tuple(places_of(task(30, choice="top", seed=s, **mild))[:9]) for s in range(3)}
    assert len(top) == 1, "the order of different weights is a matter of chance"
    assert top != {tuple(places_of(task(30, **mild))[:9])}


@pytest.mark.parametrize("per_class", [1, 50])
@pytest.mark.parametrize("candidates", [1, 4, 250])
@pytest.mark.parametrize("past", [0, 7])
@pytest.mark.parametrize("n", [1, 2, 13])
def test_all_pictures_of_the_task_are_proposed_once(
    n: int, past: int, candidates: int, per_class: int
) -> None:
    given = task(n, past, candidates=candidates, per_class=per_class)
    assert sorted(places_of(given)) == list(range(n))


def test_one_class_is_no_exception() -> None:
    given = replace(task(9), labels=torch.full((9,), 3))
    assert sorted(places_of(given)) == list(range(9))


def test_a_picture_whose_loss_is_no_number_comes_last_and_changes_nothing() -> None:
    """Even after those without weight; the others are weighed as if it were not there."""
    pictures, labels = some(14)
    pictures[[4, 9], 0, 0, 0] = 255
    fine = torch.tensor([i for i in range(14) if i not in (4, 9)])
    for choice in ("top", "draw"):
        given = replace(task(choice=choice, direct=False), pictures=pictures, labels=labels)
        found = places_of(given)
        assert set(found[-2:]) == {4, 9} and given.events == [STRANGE]
        alone = weights_of(replace(given, pictures=pictures[fine], labels=labels[fine]))
        positive, free = fine[alone > 0].tolist(), fine[alone == 0].tolist()
        assert set(found[: len(positive)]) == set(positive) and 0 < len(free) < 11
        if choice == "top":
            assert found[: len(positive)] == fine[(-alone).argsort()[: len(positive)]].tolist()


@pytest.mark.parametrize("space", ["all", "head"])
@pytest.mark.parametrize("scale", [math.nan, math.inf, 1e200, 1e100, 0.0])
def test_a_network_that_has_diverged_proposes_all_pictures(scale: float, space: str) -> None:
    """Weights without a number leave a random order; any others weights that are numbers."""
    given = replace(task(space=space), learner=learner(scale=scale))
    assert sorted(places_of(given)) == list(range(13))
    assert (STRANGE in given.events) == (scale not in (0.0, 1e100))


def test_what_a_rule_is_given_stays_as_it_is() -> None:
    given = task(candidates=5)
    copies = [t.clone() for t in (given.pictures, given.labels, *given.past, *given.learner.learnt)]
    bcsr.propose(given)
    now = (given.pictures, given.labels, *given.past, *given.learner.learnt)
    assert all(torch.equal(one, other) for one, other in zip(copies, now, strict=True))


@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("space", ["all", "head"])
def test_batch_normalisation_goes_by_what_it_has_gathered(space: str, past: int) -> None:
    """And gathers nothing: a picture's loss is its own, and weights have one solution."""
    own = learner("cnn", side=8)
    options = Options(space=space, outer=2)  # type: ignore[arg-type]
    given = Task(*some(11, side=8), some(past, 1, 8), 2, options, own, generator())
    found = weights_of(given)
    assert torch.equal(own.model.buffers, own.learnt[1])
    assert not torch.equal(own.model.parameters, own.learnt[0])
    np.testing.assert_allclose(found, defined(given, 0), rtol=0, atol=1e-9)


def test_the_head_learns_alone_where_asked() -> None:
    given = task(space="head")
    weights_of(given)
    moved = given.learner.model.parameters != given.learner.learnt[0]
    head = sum(p.numel() for p in given.learner.network.head.parameters())
    assert moved[-head:].any() and not moved[:-head].any()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"candidates": 0}, "here.candidates is 0; it must be at least 1"),
        ({"outer": 0}, "here.outer is 0; it must be at least 1"),
        ({"inner": 0}, "here.inner is 0; it must be at least 1"),
        ({"rate_proxy": 0.0}, "here.rate_proxy is 0.0; it must be above 0"),
        ({"rate_weights": -1.0}, "here.rate_weights is -1.0; it must be above 0"),
        ({"spread": 0.0}, "here.spread is 0.0; it must be above 0"),
        ({"beta": -0.1}, "here.beta is -0.1; it must be at least 0"),
        ({"past": -0.1}, "here.past is -0.1; it must be at least 0"),
        ({"space": "haed"}, "here.space 'haed' is unknown; did you mean 'head'"),
        ({"choice": "best"}, "here.choice 'best' is unknown"),
    ],
)
def test_impossible_options_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(config.ParameterError, match=message):
        config.build(Options, values, "here")
