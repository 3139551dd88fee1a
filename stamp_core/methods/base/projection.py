"""A gradient corrected by projection, with the share of corrected steps in the run record."""

from stamp_core.matching.projection import Projection
from stamp_core.methods.base.method import ClientRound, Log, Method


def apply_projection(
    method: Method, client_round: ClientRound, projection: Projection, name: str
) -> None:
    """Correct the live gradient, and log the share of the round's steps that were corrected."""
    corrected = client_round.scratch.setdefault("corrected", [])
    corrected.append(projection.added is not None)
    log_projection(client_round.log, projection, name, sum(corrected) / len(corrected))
    if projection.added is not None:
        method.work.model.gradients.add_(projection.added)


def log_projection(log: Log, projection: Projection, name: str, corrected: float) -> None:
    """Log a share of corrected vectors, and why blocks of the last one were not corrected."""
    log.numbers[f"{name} corrected"] = corrected
    log.events += [f"{name}: {trouble}, not corrected" for trouble in projection.troubles]
