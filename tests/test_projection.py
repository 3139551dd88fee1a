"""The small quadratic program: against all its faces, and on every kind of dependent rows."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from stamp_core.projection import (
    NOT_FINITE,
    NOT_SOLVED,
    SOLVED,
    Correction,
    Double,
    correction,
    minimise,
)
from stamp_core.rows import Difference

Array = NDArray[np.float64]
quick = settings(deadline=None, max_examples=60, derandomize=True)

FAMILIES = (
    "independent",
    "equal",
    "opposed",
    "almost opposed",
    "of rank 3",
    "some zero",
    "of all lengths",
)
instances = st.tuples(
    st.sampled_from(FAMILIES),
    st.integers(1, 50),
    st.sampled_from([2, 10, 60, 5000]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 10**6),
)
Instance = tuple[str, int, int, torch.dtype, int]


def drawn(instance: Instance) -> tuple[Tensor, Tensor]:
    """Rows of a family [K, P] and a vector [P]."""
    family, count, width, dtype, seed = instance
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((count, width))
    if family in ("equal", "opposed", "almost opposed"):
        rows = rows[draw.integers(0, (count + 1) // 2, count)]
    if "opposed" in family:
        rows *= draw.choice([-1, 1], (count, 1))
    if family == "almost opposed":
        rows += 1e-3 * draw.standard_normal(rows.shape)
    if family == "of rank 3":
        rows = draw.standard_normal((count, 3)) @ draw.standard_normal((3, width))
    if family == "some zero":
        rows *= draw.integers(0, 2, (count, 1))
    if family == "of all lengths":
        rows *= np.exp(5 * draw.standard_normal((count, 1)))
    vector = draw.standard_normal(width)
    return torch.tensor(rows, dtype=dtype), torch.tensor(vector, dtype=dtype)


def corrected(vector: Tensor, found: Correction) -> Tensor:
    """The vector with its correction, in float64."""
    return vector.double() if found.added is None else vector.double() + found.added


def cosines(rows: Tensor, result: Tensor, vector: Tensor) -> Tensor:
    """<row, result> / (|row| |vector|) for the rows that have a length."""
    lengths = rows.double().norm(dim=1)
    return (rows.double() @ result)[lengths > 0] / (lengths[lengths > 0] * vector.double().norm())


def best_face(matrix: Array, linear: Array, lower: float = 0.0) -> Array:
    """The v >= lower where 0.5 v'Av + b'v is least, A regular: the best of all 2^K active sets.

    On each, the v outside is at its bound and the others solve A_SS v_S = -(b_S + A_SN lower).
    """
    count, found = len(linear), []
    for size in range(count + 1):
        for inside in map(list, combinations(range(count), size)):
            v = np.full(count, lower)
            outside = [k for k in range(count) if k not in inside]
            right = linear[inside] + matrix[np.ix_(inside, outside)] @ v[outside]
            v[inside] = np.linalg.solve(matrix[np.ix_(inside, inside)], -right)
            if (v >= lower - 1e-12).all():
                found.append((0.5 * v @ matrix @ v + linear @ v, tuple(v)))
    return np.array(min(found)[1])


# ------------------------------------------------------------------ the program


@pytest.mark.parametrize("lower", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_best_of_all_active_sets(seed: int, lower: float) -> None:
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((1 + seed % 6, 8)) * np.exp(draw.standard_normal((1 + seed % 6, 1)))
    matrix, linear = rows @ rows.T, rows @ draw.standard_normal(8)
    found = minimise(matrix, linear, lower, size=1.0)
    assert found.residual < 1e-12 and (found.v >= lower).all()
    np.testing.assert_allclose(found.v, best_face(matrix, linear, lower), rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_it_is_where_scipys_slsqp_goes(seed: int) -> None:
    """20 rows of 12 numbers: the matrix is singular and v may be another, but not what it costs."""
    draw = np.random.default_rng(seed)
    rows, vector = draw.standard_normal((20, 12)), draw.standard_normal(12)
    matrix, linear = rows @ rows.T, rows @ vector

    def cost(v: Array) -> float:
        return float(0.5 * v @ matrix @ v + linear @ v)

    found = minimise(matrix, linear, size=float(np.linalg.norm(vector)))
    other = minimize(
        cost,
        np.ones(20),
        jac=lambda v: matrix @ v + linear,
        bounds=[(0, None)] * 20,
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    assert other.success and found.residual < 1e-10
    assert cost(found.v) == pytest.approx(other.fun, abs=1e-8) and cost(found.v) < -0.1


@pytest.mark.parametrize("count", [0, 1, 3])
def test_rows_without_a_length_stay_at_the_bound(count: int) -> None:
    """Also where nothing else is left: scipy's solver must never see an empty matrix."""
    nothing = np.zeros(count)
    for lower in (0.0, 0.5):
        found = minimise(np.zeros((count, count)), nothing, lower)
        assert found.v.tolist() == [lower] * count and found.residual == 0
    beside = minimise(np.diag([0.0, 4.0]), np.array([0.0, -2.0]))
    assert beside.v.tolist() == [0.0, 0.5]


def test_what_has_no_least_value_is_seen_from_the_residual() -> None:
    """0.5 (v_1 - v_2)^2 - v_1 - v_2 falls forever along (1, 1)."""
    matrix = np.array([[1.0, -1.0], [-1.0, 1.0]])
    assert minimise(matrix, np.array([-1.0, -1.0])).residual > 0.1


# ------------------------------------------------------------------ vectors


@quick
@given(instances)
def test_the_corrected_vector_agrees_with_all_rows_and_is_the_nearest(instance: Instance) -> None:
    """<row, x> >= 0 for all; x - p is a sum of rows with v >= 0 and orthogonal to x. So for every
    other y that agrees <x - p, y> >= 0 = <x - p, x>, which makes x the projection of p."""
    rows, vector = drawn(instance)
    found = correction(vector, list(rows))
    result = corrected(vector, found)
    assert found.troubles == ()
    least = cosines(rows, result, vector).tolist()
    assert min(least, default=0.0) >= -2 * SOLVED
    assert result.norm() <= vector.double().norm() * (1 + SOLVED)  # cannot blow up
    if found.added is not None:
        square = float(vector.double() @ vector.double())
        assert abs(float(found.added @ result)) <= 1e-4 * square
    else:
        assert min(cosines(rows, vector.double(), vector).tolist(), default=0.0) >= -1e-12


def test_the_nearest_of_many_by_hand() -> None:
    """Among points of the quadrant, (-1, 2) is nearest to (0, 2); |(-3, -4)| is all in conflict."""
    rows = [torch.tensor([2.0, 0.0]), torch.tensor([0.0, 0.5])]
    for vector, result in (((-1.0, 2.0), (0.0, 2.0)), ((-3.0, -4.0), (0.0, 0.0))):
        p = torch.tensor(vector)
        np.testing.assert_allclose(corrected(p, correction(p, rows)), result, atol=1e-12)


def test_what_agrees_gets_nothing() -> None:
    """Also a row that is the vector itself, twice, and one of zeros, as in GradMA's first step."""
    vector = torch.randn(100, generator=torch.Generator().manual_seed(0))
    for rows in ([], [vector, vector, torch.zeros(100)], [torch.zeros(100)]):
        assert correction(vector, rows) == Correction(None)
    assert correction(torch.zeros(100), [vector, -vector]).added is None
    assert correction(vector, [vector], margin=0.5).added is None  # no row is violated


def test_almost_opposed_rows_of_float32_do_not_blow_up() -> None:
    """g and -g (1 + noise): from float32 sums of products the result was 850 times the vector."""
    draw = torch.Generator().manual_seed(1)
    base, vector = torch.randn(20_000, generator=draw), torch.randn(20_000, generator=draw)
    noise = torch.randn(20_000, generator=draw)
    for share in (0.0, 1e-7, 1e-6, 1e-4):
        rows = [base, -0.01 * (base + share * noise), base.clone()]
        found = correction(vector, rows)
        result = corrected(vector, found)
        assert found.troubles == () and result.norm() <= vector.norm() * 1.00001
        assert cosines(torch.stack(rows), result, vector).min() >= -2 * SOLVED


def test_one_row_with_a_ridge_and_with_a_margin() -> None:
    """v = -b / (a + eps), so <row, result> = b + a v = -eps v; a margin is the least v of all rows,
    also of those that agree, once one does not."""
    row, other, vector = torch.tensor([[3.0, 0.0], [0.0, 2.0], [-1.0, 1.0]])
    for ridge in (0.0, 1.0, 100.0):
        found = correction(vector, [row], ridge=ridge)
        v = 3 / (9 + ridge)
        assert float(row.double() @ corrected(vector, found)) == pytest.approx(-ridge * v)
    found = correction(vector, [row, other], margin=0.5)
    np.testing.assert_allclose(corrected(vector, found), [-1 + 3 * 0.5, 1 + 2 * 0.5])
    found = correction(vector, [row, other], margin=0.1)
    np.testing.assert_allclose(corrected(vector, found), [0, 1 + 2 * 0.1], atol=1e-12)


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.9])
def test_rho_is_the_least_cosine_relative_to_the_vector_that_came(rho: float) -> None:
    """Of (4, 0): the row (0, 5) asks for a second component of 4 rho."""
    vector, row = torch.tensor([4.0, 0.0]), torch.tensor([0.0, 5.0])
    result = corrected(vector, correction(vector, [row], rho=rho))
    np.testing.assert_allclose(result, [4, 4 * rho], atol=1e-12)


def test_what_cannot_be_fulfilled_is_left_and_named() -> None:
    """No x has <g, x> > 0 and <-g, x> > 0."""
    row, vector = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    found = correction(vector, [row, -row], rho=0.5)
    assert found.added is None and found.troubles == (NOT_SOLVED,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
def test_what_is_not_finite_is_left_and_named(bad: float) -> None:
    """A number whose square is too large as well."""
    row, vector = torch.tensor([[-1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    wrong = torch.tensor([bad, 0.0], dtype=torch.float64)
    for found in (correction(vector, [row, wrong]), correction(wrong, [row])):
        assert found.added is None and found.troubles == (NOT_FINITE,)
    assert correction(vector, [row]).added is not None


def test_blocks_are_corrected_each_on_its_own() -> None:
    """One conflicts, one agrees, one cannot be done: only the first is changed."""
    draw = torch.Generator().manual_seed(3)
    row = torch.randn(9, generator=draw)
    vector = torch.cat([-row[:4] + 1, row[4:7], torch.ones(2)])
    row[7:] = torch.inf
    found = correction(vector, [row], [4, 3, 2])
    alone = correction(vector[:4], [row[:4]])
    assert found.troubles == (NOT_FINITE,) and found.added is not None
    assert alone.added is not None and torch.equal(found.added[:4], alone.added)
    assert not found.added[4:].any() and alone.added.abs().min() > 0.01


def test_a_difference_is_a_row_and_nothing_given_is_changed() -> None:
    left, right, vector = torch.randn(3, 50, generator=torch.Generator().manual_seed(4))
    before = left.clone(), right.clone(), vector.clone()
    sign = -1.0 if (left - right) @ vector > 0 else 1.0
    found = correction(sign * vector, [Difference(left, right)])
    other = correction(sign * vector, [left - right])
    assert found.added is not None and other.added is not None
    assert torch.equal(found.added, other.added) and found.added.dtype == torch.float64
    assert all(torch.equal(a, b) for a, b in zip(before, (left, right, vector), strict=True))
    assert len(Double(vector)) == 50 and Double(vector).narrow(0, 3, 2).dtype == torch.float64
