"""Which ε a run of a setting gives every client, and which noise an ε needs.

Two data sets are neighbours if they differ in the images of one client. Its clipped updates in both
are up to 2 clip apart, so the ratio of noise to sensitivity is half the noise multiplier.
"""

import math
from collections.abc import Callable, Iterable

from stamp_core.config.decode import build, invalid
from stamp_core.config.schema import Setting
from stamp_core.results.records import Record

try:
    import dp_accounting
except ImportError as error:
    text = "the accountant needs dp-accounting: run `pip install --editable 'workbench[privacy]'`"
    raise RuntimeError(text) from error

LARGEST = 10**6  # ε that is searched for
PRECISION = 1e-4  # relative, of a noise multiplier that is searched


def epsilon(setting: Setting, delta: float) -> float:
    """The ε at δ of one run of a setting with its noise multiplier."""
    spent = accountant(setting, delta)
    multiplier = setting.privacy.noise_multiplier if setting.privacy else 0
    if not multiplier:
        right = "above 0: clipping alone has no finite ε"
        raise invalid(f"{setting.name}.privacy.noise_multiplier", multiplier, right)
    return spent(multiplier)


def epsilons(records: Iterable[Record], delta: float) -> dict[tuple[str, str], float]:
    """The ε of every setting and swept value of some runs; infinite without noise."""
    spent: dict[tuple[str, str], float] = {}
    for record in records:
        setting = build(Setting, record.about["setting"], record.name)
        noisy = setting.privacy and setting.privacy.noise_multiplier
        key = setting.name, record.sweep[1]
        if key not in spent:
            spent[key] = epsilon(setting, delta) if noisy else math.inf
    return spent


def noise_multiplier(setting: Setting, delta: float, target: float) -> float:
    """The smallest noise multiplier, rounded up, at which a run's ε at δ is at most `target`."""
    spent = accountant(setting, delta)
    if not 0 < target <= LARGEST:
        raise invalid("target", target, f"an ε above 0 and at most {LARGEST:,}")
    low = high = 1.0
    while spent(high) > target:
        high *= 2
    while spent(low) <= target:
        low /= 2
    while high > low * (1 + PRECISION):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= target else (middle, high)
    return high


def accountant(setting: Setting, delta: float) -> Callable[[float], float]:
    """The ε at δ of one run of a setting, as a function of the noise multiplier.

    Sampling amplifies central noise if who is selected stays secret. It does not amplify local
    noise: there the server is the adversary, and it selects. A client may be asked in every round.
    """
    if setting.privacy is None:
        raise invalid(f"{setting.name}.privacy", None, "set")
    if not 0 < delta < 1:
        raise invalid("delta", delta, "above 0 and below 1")
    rounds = setting.split.tasks * setting.split.cycles * setting.training.rounds
    clients = setting.split.clients
    selected = setting.training.count_selected(clients)

    def composed(multiplier: float) -> float:
        """Of Gaussian mechanisms, which compose to one; exact (Balle and Wang, 2018)."""
        sigma = multiplier / 2 / math.sqrt(rounds)
        return float(dp_accounting.get_epsilon_gaussian(sigma, delta))

    def sampled(multiplier: float) -> float:
        """Of Gaussian mechanisms on fixed numbers of clients (Wang et al., 2019), if less."""
        gaussian = dp_accounting.GaussianDpEvent(multiplier / 2)
        event = dp_accounting.SampledWithoutReplacementDpEvent(clients, selected, gaussian)
        neighbours = dp_accounting.NeighboringRelation.REPLACE_ONE
        total = dp_accounting.rdp.RdpAccountant(neighboring_relation=neighbours)
        bound = float(total.compose(event, rounds).get_epsilon(delta))
        return min(bound, composed(multiplier))

    # Of clients that join later, earlier rounds select from fewer: what they spend is not counted.
    constant = setting.privacy.noise == "central" and not setting.split.joining
    amplified = constant and selected < clients
    return sampled if amplified else composed
