"""FedOMG (Nguyen et al., 2025): the server matches the clients' updates instead of averaging."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from stamp_core.config import wrong
from stamp_core.matching import Matched, Matching, match
from stamp_core.methods import Log, Method, Reply, ServerStep, State
from stamp_core.rows import Difference


@dataclass(frozen=True)
class Spatial(Matching):
    """Matching on the server: a row is a client's way, the reference what FedAvg would do."""

    reference: Literal["mean", "weighted", "current", "half"] = "weighted"
    normalise: Literal["none", "mean", "current"] = "mean"

    def __post_init__(self) -> None:
        """Refuse what has no meaning among clients."""
        super().__post_init__()
        for name in ("reference", "normalise", "length"):
            if getattr(self, name) in ("current", "half"):
                raise wrong(name, getattr(self, name), "another: no client is the current one")


@dataclass(frozen=True)
class ServerMatching(ServerStep):
    """Whether and how the server matches."""

    spatial: Spatial | None = Spatial()


class FedOMG(Method):
    """FedAvg whose server goes where all clients' updates agree."""

    Params: ClassVar = ServerMatching
    neutral: ClassVar[dict[str, Any]] = {"spatial": None}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The server's model a step along the matched updates; buffers are averaged."""
        averaged = super().aggregate(server, replies, log)
        return matched_server(self, averaged, server, replies, log)


def matched_server(
    method: Method, averaged: State, server: State, replies: list[Reply], log: Log
) -> State:
    """What averaging made of the server, with the matched step instead of the mean one."""
    spatial, replies = method.params.spatial, [reply for reply in replies if reply.samples]
    if spatial is None or not replies:
        return averaged
    with log.clock("spatial"):
        rows = [Difference(server["parameters"], r.message["parameters"]) for r in replies]
        samples = torch.tensor([float(reply.samples) for reply in replies])
        sizes = method.work.layers() if spatial.blocks != "model" else None
        direction, found = match(rows, spatial, samples, sizes)
    note(log, "spatial", found)
    return {**averaged, "parameters": server["parameters"] - method.params.step * direction}


def note(log: Log, where: str, found: Matched) -> None:
    """Put what matching found into the record of the run."""
    names = "gap value least least_reference length cosine support entropy iterations dropped"
    log.numbers |= {f"{where} {name}": float(getattr(found, name)) for name in names.split()}
    log.numbers[f"{where} rows"] = float(found.coefficients.shape[1])
    if found.dropped:
        log.events.append(f"{where} matching: a row was dropped")
    if found.status not in ("exact", "authors"):
        log.events.append(f"{where} matching: {found.status}")
