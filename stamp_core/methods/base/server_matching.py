"""Gradient matching on the server: the clients' updates are matched instead of averaged."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch

from stamp_core.config.decode import invalid
from stamp_core.matching.gram import Difference
from stamp_core.matching.match import MatchingParams, MatchResult, match
from stamp_core.methods.base.method import Log, Method, Reply, State


@dataclass(frozen=True)
class SpatialParams(MatchingParams):
    """Matching of the clients' updates; the weighted reference is FedAvg's update."""

    reference: Literal["mean", "weighted", "current", "halves"] = "weighted"
    normalise: Literal["none", "mean", "current"] = "mean"

    def __post_init__(self) -> None:
        """Refuse what is undefined among clients."""
        super().__post_init__()
        for name in ("reference", "normalise", "length"):
            if getattr(self, name) in ("current", "halves"):
                right = "another: no client is the current one"
                raise invalid(name, getattr(self, name), right)


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
    log_matches(log, "spatial", [result])
    moved = start - method.params.server_lr * direction
    return {**averaged, "parameters": moved.cpu()}


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
