"""ε against integrals of the privacy loss, a second implementation and published values."""

import math
import re
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy.stats import norm
from small import plans, tiny

from stamp_core.config.decode import ParameterError
from stamp_core.config.schema import Privacy, Setting
from stamp_core.engine.train import train

# Nothing but ε needs this package, so the environment of most machines does not have it.
pytest.importorskip("dp_accounting", reason="`make test-privacy` installs the extra `privacy`")

from workbench.studies.accountant import epsilon, epsilons, noise_multiplier

DELTA = 1e-5
ONCE = {"tasks": 1, "rounds": 1}


def setting(
    multiplier: float, noise: Any = "central", clients: int = 4, tasks: int = 3, **training: Any
) -> Setting:
    whole = tiny(split={"clients": clients, "tasks": tasks}, training=training).setting
    return replace(whole, privacy=Privacy(1.0, multiplier, noise))


def hockey_stick(epsilon: float, share: float, deviation: float) -> float:
    """δ at ε of one round, for the pair of neighbours whose updates are 1 and -1.

    A client takes part with probability `share`; the other updates are 0. By a sum over a fine grid
    of the sum's values: no formula of an accountant.
    """
    x = np.linspace(-40, 40, 2_000_001) * deviation
    absent = (1 - share) * norm.pdf(x, 0, deviation)
    one, other = (absent + share * norm.pdf(x, sign, deviation) for sign in (1, -1))
    return float(np.maximum(one - math.exp(epsilon) * other, 0).sum() * (x[1] - x[0]))


@pytest.mark.parametrize("multiplier", [0.8, 3.0, 20.0])
@pytest.mark.parametrize("noise", ["local", "central"])
def test_one_round_of_all_clients_has_the_privacy_loss_of_two_opposite_updates(noise, multiplier):
    found = epsilon(setting(multiplier, noise, **ONCE), DELTA)
    assert hockey_stick(found, 1.0, multiplier) == pytest.approx(DELTA, rel=1e-4)


def test_the_noise_for_an_epsilon_of_1_is_the_published_one():
    """Balle and Wang (2018): σ = 3.73 for ε = 1 and δ = 1e-5 at sensitivity 1; here it is 2."""
    found = noise_multiplier(setting(1.0, **ONCE), DELTA, 1.0)
    assert found == pytest.approx(2 * 3.730632, rel=2e-4)


@pytest.mark.parametrize("cycles", [1, 2])
def test_rounds_of_all_experiences_compose_as_one_round_with_less_noise(cycles):
    once = epsilon(setting(1.0, **ONCE), DELTA)
    whole = setting(math.sqrt(3 * 4 * cycles), rounds=4)
    whole = replace(whole, split=replace(whole.split, cycles=cycles))
    assert epsilon(whole, DELTA) == pytest.approx(once, rel=1e-9)


def sampled_rdp(order: int, share: float, sigma: float) -> Any:
    """Theorem 27 of Wang, Balle and Kasiviswanathan (2019) for a Gaussian, in 100 digits.

    An upper bound of the Rényi divergence at a whole order, with sampling without replacement.
    """
    mpmath.mp.dps = 100
    share, variance = mpmath.mpf(share), mpmath.mpf(sigma) ** 2

    def growth(x: int) -> Any:  # exp((x - 1) times the Gaussian's divergence at order x)
        return mpmath.exp(mpmath.mpf(x) * (x - 1) / (2 * variance))

    def ternary(j: int) -> Any:  # the j-th forward difference of `growth` at 0
        return sum((-1) ** (j - i) * mpmath.binomial(j, i) * growth(i) for i in range(j + 1))

    second = mpmath.exp(2 / (2 * variance))
    total = 1 + share**2 * mpmath.binomial(order, 2) * min(4 * (second - 1), 2 * second)
    for j in range(3, order + 1):
        root = 4 * mpmath.sqrt(ternary(2 * (j // 2)) * ternary(2 * -(-j // 2)))
        total += share**j * mpmath.binomial(order, j) * min(root, 2 * growth(j))
    return mpmath.log(total) / (order - 1)


def test_sampled_rounds_compose_by_the_published_bound():
    """The best of the whole orders; the library also has orders between them."""
    multiplier, rounds, clients = 10.0, 1000, 100
    values = setting(multiplier, clients=clients, tasks=1, rounds=rounds, participation=0.01)
    best = min(
        rounds * float(sampled_rdp(order, 1 / clients, multiplier / 2))
        + math.log1p(-1 / order)
        - math.log(DELTA * order) / (order - 1)
        for order in range(25, 40)  # the best one is 31
    )
    assert epsilon(values, DELTA) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("participation", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("multiplier", [1.0, 4.0])
def test_sampled_noise_is_never_counted_below_the_privacy_loss(multiplier, participation):
    training = {**ONCE, "participation": participation}
    found = epsilon(setting(multiplier, clients=10, **training), DELTA)
    assert hockey_stick(found, participation, multiplier) <= DELTA * (1 + 1e-4)
    assert found <= epsilon(setting(multiplier, clients=10, **ONCE), DELTA)


def test_sampling_counts_for_central_noise_alone():
    few, all_ = {"clients": 10, "participation": 0.1}, {"clients": 10}
    central, local = (
        [epsilon(setting(4.0, noise, **each), DELTA) for each in (few, all_)]
        for noise in ("central", "local")
    )
    assert central[0] < 0.8 * central[1] and local[0] == local[1] == central[1]


@pytest.mark.parametrize("target", [1e-3, 0.5, 8.0, 300.0])
def test_the_noise_multiplier_is_the_smallest_that_reaches_an_epsilon(target):
    found = noise_multiplier(setting(0.0, "local"), DELTA, target)
    assert epsilon(setting(found, "local"), DELTA) <= target
    assert epsilon(setting(found * (1 - 2e-4), "local"), DELTA) > target


def test_what_has_no_epsilon_is_refused_by_name():
    private = setting(1.0)
    for refused, message in [
        (lambda: epsilon(tiny().setting, DELTA), "tiny.privacy is None; it must be set"),
        (lambda: epsilon(setting(0.0), DELTA), "tiny.privacy.noise_multiplier is 0.0; it must be"),
        (lambda: epsilon(private, 0.0), "delta is 0.0; it must be above 0 and below 1"),
        (lambda: noise_multiplier(private, DELTA, 0.0), "target is 0.0; it must be an ε above 0"),
        (lambda: noise_multiplier(private, DELTA, 1e300), "target is 1e+300; it must be an ε ab"),
    ]:
        with pytest.raises(ParameterError, match=re.escape(message)):
            refused()


def test_runs_of_a_sweep_spend_what_their_settings_say():
    plain = tiny()
    records = []
    for multiplier in (0.0, 2.0):
        noisy = replace(plain, setting=setting(multiplier), sweep=("noise", str(multiplier)))
        records += train(noisy, plans(noisy, 0), device="cpu").values()
    expected = {("tiny", "0.0"): math.inf, ("tiny", "2.0"): epsilon(setting(2.0), DELTA)}
    assert epsilons(records, DELTA) == expected
