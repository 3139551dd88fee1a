"""Gradient matching on the server: the clients' updates are matched instead of averaged."""

from dataclasses import dataclass
from typing import Literal

import torch

from stamp_core.config.decode import invalid
from stamp_core.matching.gram import Difference
from stamp_core.matching.match import MatchingParams, MatchResult, match
from stamp_core.methods.base.method import Log, Method, Reply, State


@dataclass(frozen=True)
class SpatialParams(MatchingParams):
    """Matching of the clients' updates; the weighted reference is FedAvg's update."""

    reference: Literal["mean", "weighted", "current"] = "weighted"
    normalise: Literal["none", "mean", "current"] = "mean"

    def __post_init__(self) -> None:
        """Refuse what is undefined among clients."""
        super().__post_init__()
        for name in ("reference", "normalise", "length"):
            if getattr(self, name) == "current":
                raise invalid(name, "current", "another: no client is the current one")


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
        updates = [Difference(start, model) for model in models]
        samples = torch.tensor([float(reply.samples) for reply in replies])
        sizes = method.runtime.layers() if params.blocks == "layers" else None
        direction, result = match(updates, params, samples, sizes)
    log_match(log, "spatial", result)
    moved = start - method.params.server_lr * direction
    return {**averaged, "parameters": moved.cpu()}


def log_match(log: Log, place: str, result: MatchResult) -> None:
    """Log a match; `place` is "spatial" or "temporal"."""
    names = "gap value worst_product worst_product_reference length cosine support entropy"
    for name in (*names.split(), "iterations", "dropped"):
        log.numbers[f"{place} {name}"] = float(getattr(result, name))
    log.numbers[f"{place} gradient count"] = float(result.coefficients.shape[1])
    if result.dropped:
        log.events.append(f"{place} matching: a gradient was dropped")
    if result.status not in ("exact", "softmax_sgd"):
        log.events.append(f"{place} matching: {result.status}")
