"""Numbers and names as text, the same in tables and in figures."""

import re
from collections.abc import Iterable

import numpy as np

from workbench.report import metrics

DASH = "\N{EN DASH}"  # an undefined number
MB = 1e6
MARK = "\N{DAGGER}"  # of reconstructions
# How the methods were verified, by their files: the table of docs/deviations.md gives the rest.
_EXECUTED = (
    *("gradma", "fedssi", "gem", "agem", "gpm", "fsdgpm", "vrmcl", "affcl", "fedweit", "target"),
    *("lander", "glfc", "fedcil", "stamp", "stsa", "fedl2p", "fedas", "feddbe"),
)
RECONSTRUCTED = ("refed", "pfeddil", "srfdil")
SCENES = "_scenes"  # ends the names of presets for scenes, on pages that show nothing else
BY_HAND = "by hand"  # all others
VERIFIED = dict.fromkeys(_EXECUTED, "execution") | dict.fromkeys(RECONSTRUCTED, "reconstruction")


def mean_std(fractions: Iterable[float]) -> str:
    """Fractions of several seeds in %, `54.1 ± 1.2`; with n where some of them are undefined."""
    summary = metrics.summarise(fractions)
    mean, std = 100 * summary["mean"], 100 * summary["std"]
    return score(mean, std, int(summary["n"]), int(summary["n"] + summary["undefined"]))


def score(mean: float, std: float, n: int, runs: int) -> str:
    """A mean in % with its deviation, `54.1 ± 1.2`; with n where not all `runs` have a value."""
    if not n:
        return DASH
    text = f"{mean:z.1f}" + (f" ± {std:.1f}" if n > 1 else "")
    return f"{text} (n = {n})" if n < runs else text


def significant(value: float, figures: int = 3) -> str:
    """A size or time with so many significant figures and no exponent; a dash for NaN."""
    if np.isnan(value):
        return DASH
    return np.format_float_positional(value, figures, unique=False, fractional=False, trim="-")


def epsilon_text(epsilon: float | None) -> str:
    """An ε with two figures; a dash where it is not known."""
    if epsilon is None:
        return DASH
    return "∞" if np.isinf(epsilon) else f"{float(significant(epsilon, 2)):,.0f}"


def plain(text: object) -> str:
    """Text of a record for a cell of a page: without markup, link, bar and newline."""
    return re.sub(r"[\x00-\x1f\x7f\u2028\u2029|<>\[\]`]|://|www\.", " ", str(text))


def count_range(counts: Iterable[int]) -> str:
    """Numbers of seeds, `3`, or `2 to 3` where they differ."""
    values = sorted(set(counts))
    return " to ".join(map(str, values[:: max(1, len(values) - 1)]))


def marked(method: str) -> str:
    """The name of a method without its data, marked where it is a reconstruction."""
    name = method.removesuffix(SCENES)
    return f"{name} {MARK}" if method in RECONSTRUCTED else name
