"""Limits of values. They stand in a parameter's type, and `decode.convert` checks them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Limit:
    """What a value must be, in words and as a test."""

    right: str
    holds: Callable[[Any], bool]


def at_least(low: float) -> Limit:
    """A number from `low` on."""
    return Limit(f"at least {low}", lambda value: value >= low)


def above(low: float) -> Limit:
    """A number greater than `low`."""
    return Limit(f"above {low}", lambda value: value > low)


def between(low: float, high: float) -> Limit:
    """A number in [low, high]."""
    return Limit(f"between {low} and {high}", lambda value: low <= value <= high)


Count = Annotated[int, between(1, 100_000)]  # of what is in memory at a time
PositiveInt = Annotated[int, at_least(1)]
NonNegativeInt = Annotated[int, at_least(0)]
Positive = Annotated[float, above(0)]
NonNegative = Annotated[float, at_least(0)]
OpenFraction = Annotated[float, Limit("above 0 and below 1", lambda value: 0 < value < 1)]
UnitInterval = Annotated[float, between(0, 1)]  # [0, 1]
Fraction = Annotated[float, Limit("at least 0 and below 1", lambda value: 0 <= value < 1)]
Share = Annotated[float, Limit("above 0 and at most 1", lambda value: 0 < value <= 1)]
