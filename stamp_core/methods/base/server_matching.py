"""Gradient matching on the server: the clients' updates are matched instead of averaged."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from stamp_core.config.decode import invalid, require_at_least
from stamp_core.core.seeding import generator
from stamp_core.matching.gram import Difference, sketch
from stamp_core.matching.match import MatchingParams, MatchResult, match
from stamp_core.methods.base.method import ClientRound, Log, Message, Method, Reply, State
from stamp_core.models.sealed import weighted_sum

PROJECTION = "projection"  # in a message: k numbers from which products of updates are estimated


@dataclass(frozen=True)
class SpatialParams(MatchingParams):
    """Matching of the clients' updates; the weighted reference is FedAvg's update."""

    reference: Literal["mean", "weighted", "current", "halves"] = "weighted"
    normalise: Literal["none", "mean", "current"] = "mean"
    projection: int | None = None  # numbers of each update that are matched in its place

    def __post_init__(self) -> None:
        """Refuse what is undefined among clients."""
        super().__post_init__()
        for name in ("reference", "normalise", "length"):
            if getattr(self, name) in ("current", "halves"):
                right = "another: no client is the current one"
                raise invalid(name, getattr(self, name), right)
        require_at_least(self, 1, "projection")
        if self.projection is not None and self.blocks == "layers":
            raise invalid("blocks", self.blocks, "'model', as projection is set")


def with_projection(method: Method, client_round: ClientRound, message: Message) -> Message:
    """The client's message, with the projection of its update where projections are matched.

    The random matrix is the same for all clients of a round.
    """
    spatial: SpatialParams | None = method.params.spatial
    if spatial is None or spatial.projection is None:
        return message
    round_id = client_round.round_id
    draw = generator(round_id.seed, round_id.experience, round_id.round, PROJECTION)
    update = Difference(client_round.message["parameters"], message["parameters"])
    return {**message, PROJECTION: sketch(update, spatial.projection, draw)}


def match_server(
    method: Method, averaged: State, server: State, replies: list[Reply], log: Log
) -> State:
    """The averaged server state with the matched update instead of the mean one."""
    params, replies = method.params.spatial, [reply for reply in replies if reply.samples]
    if params is None or not replies:
        return averaged
    with log.clock("spatial"):
        models = [reply.message["parameters"] for reply in replies]
        start = server["parameters"].to(models[0].device)
        samples = torch.tensor([float(reply.samples) for reply in replies])
        if params.projection is None:
            direction, result = match_updates(method, start, models, samples)
        else:
            projections = [reply.message[PROJECTION] for reply in replies]
            direction, result = match_projections(params, start, models, projections, samples)
    log_matches(log, "spatial", [result])
    moved = start - method.params.server_lr * direction
    return {**averaged, "parameters": moved.cpu()}


def match_updates(
    method: Method, start: Tensor, models: Sequence[Tensor], samples: Tensor
) -> tuple[Tensor, MatchResult]:
    """The match of the updates themselves, whose inner products secure sums hide."""
    params: SpatialParams = method.params.spatial
    if method.runtime.training.secure_sums:
        right = "a number from the number of updates on, as training.secure_sums is true"
        raise invalid("spatial.projection", None, right)
    sizes = method.runtime.layers() if params.blocks == "layers" else None
    return match([Difference(start, model) for model in models], params, samples, sizes)


def match_projections(
    params: SpatialParams,
    start: Tensor,
    models: Sequence[Tensor],
    projections: Sequence[Tensor],
    samples: Tensor,
) -> tuple[Tensor, MatchResult]:
    """The sum of updates whose coefficients are matched on their projections.

    The numbers of the result are those of the projections. Of the models one weighted sum is read.
    """
    count, numbers = len(projections), len(projections[0])
    if numbers < count:
        raise invalid("spatial.projection", numbers, f"at least {count}, the number of updates")
    _, result = match(projections, params, samples)
    coefficients: list[float] = result.coefficients[0].tolist()
    moved = weighted_sum(models, coefficients)  # float64 [P]
    return (sum(coefficients) * start.double() - moved).to(start.dtype), result


def log_matches(log: Log, place: str, results: Sequence[MatchResult]) -> None:
    """Log the means over some matches; `place` is "spatial" or "temporal"."""
    if not results:
        return
    names = "gap value worst_product worst_product_reference length cosine support entropy"
    for name in (*names.split(), "iterations", "dropped"):
        log.numbers[f"{place} {name}"] = fmean(float(getattr(each, name)) for each in results)
    counts = [each.coefficients.shape[1] for each in results]
    log.numbers[f"{place} gradient count"] = fmean(counts)
    if any(each.dropped for each in results):
        log.events.append(f"{place} matching: a gradient was dropped")
    failures = {each.status for each in results} - {"exact", "softmax_sgd"}
    log.events += [f"{place} matching: {status}" for status in sorted(failures)]
