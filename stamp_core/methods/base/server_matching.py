"""Gradient matching on the server: the clients' updates are matched instead of averaged."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid
from stamp_core.config.limits import PositiveInt
from stamp_core.core.seeding import generator
from stamp_core.matching.gram import Difference, sketch
from stamp_core.matching.match import MatchingParams, MatchResult, match
from stamp_core.methods.base.method import ClientRound, Log, Message, Method, Reply, State
from stamp_core.models.sealed import weighted_sum

PROJECTION = "projection"  # in a message: k numbers from which products of updates are estimated


@dataclass(frozen=True)
class SpatialParams(MatchingParams):
    """Matching of the clients' updates; `weighted` is FedAvg's mean of them, as normalised."""

    reference: Literal["mean", "weighted", "current", "halves"] = "weighted"
    normalise: Literal["none", "mean", "current"] = "mean"
    projection: PositiveInt | None = None  # numbers of each update that are matched in its place

    def __post_init__(self) -> None:
        for name in ("reference", "normalise", "length"):
            if getattr(self, name) in ("current", "halves"):
                right = "another: no client is the current one"
                raise invalid(name, getattr(self, name), right)
        if self.projection is not None and self.blocks == "layers":
            raise invalid("blocks", self.blocks, "'model', as projection is set")


class ServerMatching(Method):
    """The server moves along the matched update where `spatial` is set; buffers are averaged."""

    in_clear: ClassVar = (PROJECTION,)

    def __init__(self, params: Any, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.averages = params.spatial is None

    def averaged_vectors(self) -> tuple[str, ...]:
        return super().averaged_vectors() if self.params.spatial is None else self.shared_buffers()

    def upload(self, client_round: ClientRound, context: Any) -> Message:
        """The trained model and, if matched, its update's projection, by one matrix for all."""
        message = super().upload(client_round, context)
        spatial: SpatialParams | None = self.params.spatial
        if spatial is None or spatial.projection is None:
            return message
        address = client_round.seed, client_round.experience, client_round.round
        draw = generator(*address, PROJECTION)
        update = Difference(client_round.message["parameters"], message["parameters"])
        return {**message, PROJECTION: sketch(update, spatial.projection, draw)}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        averaged = super().aggregate(server, replies, log)
        replies = [reply for reply in replies if reply.samples]
        if self.params.spatial is None or not replies:
            return averaged
        with log.clock("spatial"):
            models = [reply.message["parameters"] for reply in replies]
            start = server["parameters"].to(models[0].device)
            samples = torch.tensor([float(reply.samples) for reply in replies])
            if self.params.spatial.projection is None:
                direction, result = self.match_clients(start, models, samples)
            else:
                projections = [reply.message[PROJECTION] for reply in replies]
                direction, result = match_projections(
                    self.params.spatial, start, models, projections, samples
                )
        log_matches(log, "spatial", [result])
        return {**averaged, "parameters": (start - self.params.server_lr * direction).cpu()}

    def match_clients(
        self, start: Tensor, models: Sequence[Tensor], samples: Tensor
    ) -> tuple[Tensor, MatchResult]:
        params: SpatialParams = self.params.spatial
        if self.runtime.training.secure_sums:
            right = "a number from the number of updates on, as training.secure_sums is true"
            raise invalid("spatial.projection", None, right)
        sizes = self.runtime.layers() if params.blocks == "layers" else None
        return match([Difference(start, model) for model in models], params, samples, sizes)


def match_projections(
    params: SpatialParams,
    start: Tensor,
    models: Sequence[Tensor],
    projections: Sequence[Tensor],
    samples: Tensor,
) -> tuple[Tensor, MatchResult]:
    """The sum of updates, weighted by a match of their projections, and its record."""
    count, numbers = len(projections), len(projections[0])
    if numbers < count:
        raise invalid("spatial.projection", numbers, f"at least {count}, the number of updates")
    _, result = match(projections, params, samples)
    coefficients: list[float] = result.coefficients[0].tolist()
    moved = weighted_sum(models, coefficients)  # float64 [P]
    return (sum(coefficients) * start.double() - moved).to(start.dtype), result


def log_matches(log: Log, name: str, results: Sequence[MatchResult]) -> None:
    """Log the means over some matches; `name` is "spatial" or "temporal"."""
    if not results:
        return
    names = "gap value worst_product worst_product_reference length cosine support entropy"
    for key in (*names.split(), "iterations", "dropped"):
        log.numbers[f"{name} {key}"] = fmean(float(getattr(each, key)) for each in results)
    counts = [each.coefficients.shape[1] for each in results]
    log.numbers[f"{name} gradient count"] = fmean(counts)
    if any(each.dropped for each in results):
        log.events.append(f"{name} matching: a gradient was dropped")
    failures = {each.status for each in results} - {"exact", "softmax_sgd"}
    log.events += [f"{name} matching: {status}" for status in sorted(failures)]
