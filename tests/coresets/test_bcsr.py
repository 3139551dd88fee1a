"""BCSR: its gradients, its weights and its samples are those of its bilevel problem."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import rule_tasks
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from rule_tasks import BATCH_NORM, generator, indices_of, random_learner, random_samples
from rule_tasks import bcsr_task as make_task
from torch import Tensor
from torch.func import functional_call

from stamp_core.coresets.learner import Learner
from stamp_core.coresets.selection import bcsr
from stamp_core.coresets.selection.base import TaskData
from stamp_core.coresets.selection.bcsr import Options
from stamp_core.matching.simplex import project_simplex

Array = NDArray[np.float64]
Curve = Callable[[Tensor, Tensor], Tensor]  # parameters and weights -> a loss
LOWERED = "bcsr: the proxy's learning rate was lowered"
DIVERGED = "bcsr: the proxy diverged"
NOT_FINITE = "bcsr: a loss is not finite"
normal = partial(rule_tasks.normal, dtype=torch.float64)
quick = settings(deadline=None, max_examples=50, derandomize=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in training; more are far slower on so little work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def weights_of(task: TaskData) -> Array:
    """The weights of all images of a task in one batch."""
    return bcsr._optimise_weights(task, torch.arange(len(task.labels))).numpy()


def proposed(task: TaskData) -> list[int]:
    """The proposal as indices of the task's images."""
    return indices_of(bcsr.propose(task), task)


def equal_weights(n: int) -> Tensor:
    return torch.full((n,), 1 / n, dtype=torch.float64)


# ----------------------------------------------------------------------- the implicit gradient


def implicit_gradient(
    inner: Curve, outer: Curve, theta: Tensor, p: Tensor, lr: float, terms: int
) -> Tensor:
    """The implicit gradient at some parameters and weights."""
    theta, p = theta.clone().requires_grad_(), p.clone().requires_grad_()
    return bcsr._implicit_gradient(inner(theta, p), outer(theta, p), p, [theta], lr, terms)


def differences(value: Callable[[Tensor], float], p: Tensor, step: float = 1e-5) -> Tensor:
    """Central differences of a function of the weights."""
    units = step * torch.eye(len(p), dtype=p.dtype)
    quotients = [(value(p + unit) - value(p - unit)) / (2 * step) for unit in units]
    return torch.tensor(quotients, dtype=p.dtype)


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
    for lr in (0.04, 0.1):
        found = implicit_gradient(inner, outer, solution(p), p, lr, terms=1500)
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-8)
    far = [
        (implicit_gradient(inner, outer, solution(p), p, 0.02, t) - exact).norm()
        for t in (1, 4, 30)
    ]
    assert far[0] > far[1] > far[2]


def test_a_few_terms_are_the_first_of_the_neumann_series() -> None:
    """With l_i = x_i theta + h theta^2 / 2, sum p = 1, terms K and theta = 1, H = h: the outer
    loss b theta has the gradient v = b, and -x_i lr sum_{k<K} (1 - lr h)^k b comes back.

    For h = 2 and lr 0.25 the powers are 1, 1/2, 1/4, 1/8, which add up to 1, 3/2, 7/4, 15/8.
    """
    x, p = torch.tensor([1.0, -2.0]).double(), torch.tensor([0.25, 0.75]).double()
    theta = torch.ones(1).double()

    def inner(theta: Tensor, p: Tensor) -> Tensor:
        return (p @ x * theta + theta**2).sum()

    def outer(theta: Tensor, p: Tensor) -> Tensor:
        return 3 * theta.sum()

    for terms, total in enumerate((1, 3 / 2, 7 / 4, 15 / 8), start=1):
        found = implicit_gradient(inner, outer, theta, p, 0.25, terms)
        torch.testing.assert_close(found, -0.25 * total * 3 * x)
    assert bcsr.NEUMANN_TERMS == 4


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
            gradient = x.T @ (p * (likely - y)) + 0.2 * theta
            hessian = x.T @ (x * (p * likely * (1 - likely))[:, None]) + 0.2 * torch.eye(size)
            theta = theta - torch.linalg.solve(hessian, gradient)
        assert gradient.abs().max() < 1e-12
        return theta

    exact = differences(lambda q: float(losses(solution(q)).mean()), p)
    found = implicit_gradient(inner, outer, solution(p), p, lr=1.0, terms=300)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-9)
    assert exact.abs().max() > 1e-2


# --------------------------------------------------------------------------- the regulariser


def rotations(z: Array) -> list[Array]:
    return [np.roll(z, shift) for shift in range(len(z))]


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("smoothing", [0.02, 0.5])
def test_inclusion_probabilities_are_the_gradient_of_the_smoothed_sum(
    count: int, smoothing: float
) -> None:
    """The sum of the largest of p + smoothing z is piecewise linear, so differences are exact."""
    p = normal(7, seed=4).softmax(0)
    z = torch.randn(7, generator=generator(3), dtype=torch.float64).numpy()

    def smoothed(q: Tensor) -> float:
        sums = [np.sort(q.numpy() + smoothing * each)[-count:].sum() for each in rotations(z)]
        return float(np.mean(sums))

    found = bcsr._inclusion_probabilities(p, count, smoothing, generator(3))
    torch.testing.assert_close(found, differences(smoothed, p, 1e-7), rtol=0, atol=1e-6)
    assert float(found.sum()) == pytest.approx(count)


def test_equal_weights_are_equally_likely_and_the_largest_certain() -> None:
    p = torch.full((40,), 1 / 40).double()
    torch.testing.assert_close(
        bcsr._inclusion_probabilities(p, 6, 1e-3, generator()), 0 * p + 6 / 40
    )
    p[[3, 30]] += 0.1
    found = bcsr._inclusion_probabilities(p, 2, 1e-3, generator())
    assert found.nonzero().flatten().tolist() == [3, 30] and found[3] == 1


def test_a_batch_is_regularised_towards_its_share_of_the_selection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 13 images of 3 classes 2 each are selected: 6/13 of 5 images are 2.3, of one 0.5."""
    counts: list[int] = []

    def recording(weights: Tensor, count: int, *_: Any) -> Tensor:
        counts.append(count)
        return 0 * weights

    monkeypatch.setattr(bcsr, "_inclusion_probabilities", recording)
    for exemplars, size, expected in ((2, 13, 6), (2, 5, 3), (2, 1, 1), (50, 5, 5)):
        task = make_task(13, exemplars_per_class=exemplars, outer_steps=1)
        bcsr._optimise_weights(task, torch.arange(size))
        assert counts.pop() == expected and not counts


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


def nearest_on_simplex(v: Array) -> Array:
    """The projection on the simplex, its level found by bisection."""
    low, high = v.min() - 1, v.max()
    for _ in range(100):
        level = (low + high) / 2
        low, high = (level, high) if np.maximum(v - level, 0).sum() > 1 else (low, level)
    return np.asarray(np.maximum(v - high, 0))


class Exact:
    """Per-image losses, gradients and Hessians of a network as functions of its parameters."""

    def __init__(self, learner: Learner, head: bool) -> None:
        self.learner = learner
        learner.load_client_weights()
        self.values = {n: p.detach().clone() for n, p in learner.network.named_parameters()}
        self.names = list(self.values)[-2:] if head else list(self.values)
        self.start = torch.cat([self.values[name].flatten() for name in self.names])

    def losses(self, theta: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        sizes = [self.values[name].numel() for name in self.names]
        pieces = zip(self.names, theta.split(sizes), strict=True)
        values = self.values | {name: v.view_as(self.values[name]) for name, v in pieces}
        inputs = (self.learner.normalise(images),)
        logits = functional_call(self.learner.network, values, inputs)
        return F.cross_entropy(logits, labels, reduction="none")

    def gradients(self, theta: Tensor, images: Tensor, labels: Tensor) -> Array:
        theta = theta.clone().requires_grad_()
        return jacobian(self.losses(theta, images, labels), theta)

    def hessian(self, theta: Tensor, p: Array, images: Tensor, labels: Tensor) -> Array:
        theta = theta.clone().requires_grad_()
        loss = torch.from_numpy(p) @ self.losses(theta, images, labels)
        return jacobian(torch.autograd.grad(loss, theta, create_graph=True)[0], theta)


def jacobian(values: Tensor, theta: Tensor) -> Array:
    """The gradient of each value."""
    gradients = [torch.autograd.grad(value, theta, retain_graph=True)[0] for value in values]
    return torch.stack(gradients).numpy()


def defined_weights(task: TaskData, seed: int = 0) -> Array:
    """The weights by the definition, with whole Hessians in place of products with them."""
    options, own, draws = task.options, (task.images, task.labels), generator(seed)
    exact, n = Exact(task.learner, options.space == "head"), len(task.labels)
    sample = torch.randperm(len(task.past[1]), generator=draws)[: options.batch_size]
    past, theta, p = [part[sample] for part in task.past], exact.start, np.full(n, 1 / n)
    lr, count = options.proxy_lr, task.exemplars_per_class * len(set(task.labels.tolist()))
    for _ in range(options.outer_steps):
        for _ in range(options.inner_steps):
            theta = theta - lr * torch.from_numpy(p @ exact.gradients(theta, *own))
        gradients = exact.gradients(theta, *own)
        v = gradients.mean(0)
        if len(sample):
            v = v + options.past_weight * exact.gradients(theta, *past).mean(0)
        s = np.exp(p) / np.exp(p).sum() if options.softmax else p
        step = np.eye(len(v)) - lr * exact.hessian(theta, s, *own)
        series = v + step @ (v + step @ (v + step @ v))
        gradient = -lr * gradients @ series
        if options.softmax:  # the chain rule of softmax
            gradient = s * (gradient - s @ gradient)
        if options.direct_term:
            z = torch.randn(n, generator=draws, dtype=torch.float64).numpy()
            noisy = [p + options.smoothing * rotated for rotated in rotations(z)]
            among = [np.argsort(-values)[: min(n, count)] for values in noisy]
            gradient -= options.beta * np.bincount(np.concatenate(among), minlength=n) / n
        p = nearest_on_simplex(p - options.weights_lr / n * gradient)
    return p


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"past": 0},
        {"direct_term": False},
        {"direct_term": False, "past_weight": 0.0},
        {"direct_term": False, "past_weight": 5.0, "batch_size": 13},
        {"inner_steps": 3, "proxy_lr": 0.4},
        {"outer_steps": 2, "beta": 0.7, "smoothing": 0.05},
        {"softmax": True, "weights_lr": 100.0},
        {"space": "head"},
        {"space": "head", "direct_term": False, "weights_lr": 60.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(2))
def test_the_weights_are_those_of_the_definition(options: dict[str, Any], seed: int) -> None:
    task = make_task(**{"past": 20, "seed": seed, **options})
    weights = weights_of(task)
    assert task.events == []
    assert np.abs(weights - 1 / 13).max() > 1e-3
    np.testing.assert_allclose(weights, defined_weights(task, seed), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"outer_steps": 6},
        {"inner_steps": 2},
        {"proxy_lr": 0.2},
        {"weights_lr": 5.0},
        {"beta": 0.2},
        {"smoothing": 0.1},
        {"past_weight": 3.0},
        {"direct_term": False},
        {"softmax": True},
        {"space": "head"},
    ],
    ids=str,
)
def test_each_option_changes_the_weights(options: dict[str, Any]) -> None:
    assert np.abs(weights_of(make_task(**options)) - weights_of(make_task())).max() > 1e-6


def test_without_the_direct_term_the_regulariser_changes_nothing() -> None:
    expected = weights_of(make_task(beta=0.0))
    for beta in (0.0, 0.1, 9.0):
        weights = weights_of(make_task(direct_term=False, beta=beta))
        np.testing.assert_array_equal(weights, expected)


def test_a_strong_regulariser_leaves_weight_on_as_many_as_are_selected() -> None:
    weights = weights_of(make_task(40, 0, beta=50.0, weights_lr=1.0, smoothing=1e-9))
    assert (weights > 0).sum() == 6


def test_the_weights_lower_the_outer_loss_after_training_with_them() -> None:
    """A proxy that takes two steps with them ends up lower than one with equal weights."""
    task = make_task(30, 0, direct_term=False, outer_steps=1, weights_lr=0.01)
    weights = torch.from_numpy(weights_of(task))

    def loss_after(weights: Tensor) -> float:
        proxy = bcsr._Proxy(task.learner, "all")
        inputs = proxy.inputs(task.images, task.labels)
        for _ in range(2):
            proxy.train(inputs, weights, 0.1)
        return float(proxy.losses(inputs).detach().mean())

    assert loss_after(weights) < loss_after(equal_weights(30))


# --------------------------------------------------------------------------------- divergence

Attempt = tuple[float, list[float], bool]  # learning rate, mean losses, whether it gave weights


def record_attempts(monkeypatch: pytest.MonkeyPatch) -> list[Attempt]:
    """The attempts of every optimisation of weights, in a list that fills as they happen."""
    found: list[Attempt] = []
    descend, hypergradient, train = bcsr._descend, bcsr._hypergradient, bcsr._Proxy.train

    def recorded_train(*args: Any) -> float:
        found[-1][1].append(train(*args))
        return found[-1][1][-1]

    def recorded_hypergradient(*args: Any) -> tuple[float, Tensor]:
        loss, gradient = hypergradient(*args)
        found[-1][1].append(loss)
        return loss, gradient

    def recorded_descend(task: TaskData, proxy: Any, *args: Any) -> Tensor | None:
        found.append((args[-1], [], False))
        weights = descend(task, proxy, *args)
        found[-1] = (*found[-1][:2], weights is not None)
        return weights

    monkeypatch.setattr(bcsr._Proxy, "train", recorded_train)
    monkeypatch.setattr(bcsr, "_hypergradient", recorded_hypergradient)
    monkeypatch.setattr(bcsr, "_descend", recorded_descend)
    return found


# A rate at which the first step diverges; rates at which only later ones do, on the few images
# that the first step leaves with weight.
FIRST: dict[str, Any] = {"proxy_lr": 3e4}
LATER: dict[str, Any] = {"proxy_lr": 5.0, "weights_lr": 1e5, "inner_steps": 3}


@pytest.mark.parametrize(("options", "later"), [(FIRST, False), (LATER, True)])
def test_the_proxys_learning_rate_is_halved_until_no_step_diverges(
    options: dict[str, Any], later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step diverges where the mean loss is more than ten times the first one.

    The weights are those of an optimisation that starts with the lowered learning rate.
    """
    found = record_attempts(monkeypatch)
    task = make_task(**options)
    weights = weights_of(task)
    assert task.events == [LOWERED] and len(found) > 1
    assert [lr for lr, *_ in found] == [options["proxy_lr"] / 2**k for k in range(len(found))]
    for _, losses, stable in found:
        assert stable == all(loss <= 10 * losses[0] for loss in losses)
    assert [stable for *_, stable in found] == [*(len(found) - 1) * [False], True]
    inner = options.get("inner_steps", 1)
    after_first_steps = found[0][1][inner]
    assert (after_first_steps <= 10 * found[0][1][0]) == later
    calm = make_task(**{**options, "proxy_lr": found[-1][0]})
    np.testing.assert_array_equal(weights_of(calm), weights)
    assert calm.events == [] and np.abs(weights - 1 / 13).max() > 1e-3


@pytest.mark.parametrize("trouble", ["high loss", "nan loss", "nan gradient", "inner step"])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_an_attempt_that_diverges_anywhere_is_repeated_at_half_the_learning_rate(
    step: int, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same random draws."""
    expected = weights_of(make_task(proxy_lr=0.05, inner_steps=2))
    calls, hypergradient, train = Counter[str](), bcsr._hypergradient, bcsr._Proxy.train

    def failing_hypergradient(*args: Any) -> tuple[float, Tensor]:
        loss, gradient = hypergradient(*args)
        calls["outer"] += 1
        if calls["outer"] != step + 1:
            return loss, gradient
        if trouble == "nan gradient":
            gradient[4] = torch.nan
        return {"high loss": 1e3, "nan loss": math.nan}.get(trouble, loss), gradient

    def failing_train(*args: Any) -> float:
        calls["inner"] += 1
        loss = train(*args)
        return math.nan if trouble == "inner step" and calls["inner"] == 2 * step + 2 else loss

    monkeypatch.setattr(bcsr, "_hypergradient", failing_hypergradient)
    monkeypatch.setattr(bcsr._Proxy, "train", failing_train)
    task = make_task(inner_steps=2)
    np.testing.assert_array_equal(weights_of(task), expected)
    assert task.events == [LOWERED] and calls["outer"] == step + 1 + 5


def test_if_the_proxy_always_diverges_the_weights_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = record_attempts(monkeypatch)
    monkeypatch.setattr(bcsr, "DIVERGENCE", 0)
    task = make_task()
    np.testing.assert_array_equal(weights_of(task), equal_weights(13))
    assert task.events == [DIVERGED]
    assert [lr for lr, *_ in found] == [0.1 / 2**k for k in range(31)]


# --------------------------------------------------------------------------------- the choice


def test_images_are_sampled_without_replacement_by_their_weights() -> None:
    """The probability of i and then j is p_i p_j / (1 - p_i); 5 deviations are allowed."""
    p, times, task = [0.5, 0.3, 0.2, 0.0], 4000, make_task()
    orders = [bcsr._rank(7 * torch.tensor(p).double(), task).tolist() for _ in range(times)]
    assert all(sorted(order) == [0, 1, 2, 3] and order[3] == 3 for order in orders)
    counts = Counter((order[0], order[1]) for order in orders)
    for i in range(3):
        for j in {0, 1, 2} - {i}:
            chance = p[i] * p[j] / (1 - p[i])
            assert abs(counts[i, j] - times * chance) < 5 * math.sqrt(times * chance)


@pytest.mark.parametrize(
    ("choice", "weights", "expected"),
    [
        ("top", [0.1, 0.0, 0.5, 0.0, 0.4], [2, 4, 0, 1, 3]),
        ("sample", [0.0, 0.0, 1.0, 0.0], [2, 0, 1, 3]),
    ],
)
def test_the_largest_weights_come_first_and_zeros_stay_in_their_order(
    choice: str, weights: list[float], expected: list[int]
) -> None:
    task = make_task(choice=choice)
    assert bcsr._rank(torch.tensor(weights).double(), task).tolist() == expected


def test_images_without_weight_come_last_in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def two_images(task: TaskData, batch: Tensor) -> Tensor:
        return torch.isin(batch, torch.tensor([2, 7])).double() / 2

    monkeypatch.setattr(bcsr, "_optimise_weights", two_images)
    orders = [proposed(make_task(9, seed=seed)) for seed in range(6)]
    assert all(set(order[:2]) == {2, 7} for order in orders)
    assert len({tuple(order[2:]) for order in orders}) > 3


def test_the_weights_of_several_batches_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """13 images are 3 batches of 5, 4 and 4: in a smaller batch the same weight is less."""
    batches: list[Tensor] = []

    def first_largest(task: TaskData, batch: Tensor) -> Tensor:
        batches.append(batch)
        weights = torch.full((len(batch),), 0.4 / (len(batch) - 1)).double()
        weights[0] = 0.6 + 0.001 * len(batches)
        return weights

    monkeypatch.setattr(bcsr, "_optimise_weights", first_largest)
    order = proposed(make_task(13, batch_size=5, choice="top"))
    assert [len(batch) for batch in batches] == [5, 4, 4]
    assert sorted(torch.cat(batches).tolist()) == list(range(13))
    assert order[:3] == [int(batches[k][0]) for k in (0, 2, 1)]  # 5 * 0.601, 4 * 0.603, 4 * 0.602
    assert torch.cat(batches).tolist() != list(range(13)), "the batches are not random"


def test_each_batch_starts_from_the_clients_weights() -> None:
    task, batch = make_task(13, 0, direct_term=False), torch.tensor([3, 1, 12, 7])
    alone = bcsr._optimise_weights(task, batch)
    bcsr._optimise_weights(task, torch.arange(5))
    assert torch.equal(bcsr._optimise_weights(task, batch), alone)


def test_at_most_a_batch_of_past_exemplars_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, hypergradient = [], bcsr._hypergradient

    def recording(proxy: Any, inputs: Any, past: Any, *args: Any) -> tuple[float, Tensor]:
        sizes.append(len(past[1]))
        assert not torch.equal(past[0], task.learner.normalise(task.past[0][:8]))
        return hypergradient(proxy, inputs, past, *args)

    monkeypatch.setattr(bcsr, "_hypergradient", recording)
    task = make_task(past=30, batch_size=8)
    bcsr._optimise_weights(task, torch.arange(8))
    assert set(sizes) == {8}


def test_the_largest_weights_are_independent_of_the_seed() -> None:
    """Without the regulariser's noise; samples by the same weights are not."""
    mild: dict[str, Any] = {"direct_term": False, "weights_lr": 1.0, "past": 0}
    assert (weights_of(make_task(30, **mild)) > 0).all()
    top = {tuple(proposed(make_task(30, choice="top", seed=s, **mild))[:9]) for s in range(3)}
    assert len(top) == 1
    assert top != {tuple(proposed(make_task(30, **mild))[:9])}


@pytest.mark.parametrize("choice", ["top", "sample"])
def test_an_image_without_a_finite_loss_comes_last_and_changes_nothing(choice: str) -> None:
    """Even after those without weight; the others are weighted as if it were not there."""
    images, labels = random_samples(14, (1, 2, 2))
    images[[4, 9], 0, 0, 0] = 255
    finite = torch.tensor([i for i in range(14) if i not in (4, 9)])
    task = replace(make_task(choice=choice, direct_term=False), images=images, labels=labels)
    order = proposed(task)
    assert set(order[-2:]) == {4, 9} and task.events == [NOT_FINITE]
    alone = weights_of(replace(task, images=images[finite], labels=labels[finite]))
    positive, zero = finite[alone > 0].tolist(), finite[alone == 0].tolist()
    assert set(order[: len(positive)]) == set(positive) and 0 < len(zero) < 11
    if choice == "top":
        assert order[: len(positive)] == finite[(-alone).argsort()[: len(positive)]].tolist()


@pytest.mark.parametrize("space", ["all", "head"])
@pytest.mark.parametrize("scale", [math.inf, 1e200, 1e100, 0.0])
def test_a_network_with_extreme_weights_proposes_all_images(scale: float, space: str) -> None:
    learner = random_learner(rule_tasks.MLP, (1, 2, 2), torch.float64, scale)
    task = replace(make_task(space=space), learner=learner)
    assert sorted(proposed(task)) == list(range(13))
    assert (NOT_FINITE in task.events) == (scale not in (0.0, 1e100))


@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("space", ["all", "head"])
def test_batch_normalisation_uses_and_keeps_its_running_statistics(space: Any, past: int) -> None:
    """An image's loss is its own, and the weights have one solution."""
    shape = (1, 8, 8)
    learner = random_learner(BATCH_NORM, shape, torch.float64)
    samples = *random_samples(11, shape), random_samples(past, shape, 1)
    task = TaskData(*samples, 2, Options(space=space, outer_steps=2), learner, generator())
    weights = weights_of(task)
    assert torch.equal(learner.model.buffers, learner.client_weights[1])
    assert not torch.equal(learner.model.parameters, learner.client_weights[0])
    np.testing.assert_allclose(weights, defined_weights(task), rtol=0, atol=1e-9)


def test_in_the_space_of_the_head_only_the_head_is_trained() -> None:
    task = make_task(space="head")
    weights_of(task)
    moved = task.learner.model.parameters != task.learner.client_weights[0]
    head = sum(p.numel() for p in task.learner.network.head.parameters())
    assert moved[-head:].any() and not moved[:-head].any()
