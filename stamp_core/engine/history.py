"""What a record says of a round: who took part, loss, seconds, bytes, memory, angles, notes."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stamp_core.client.diagnostics import spatial_angles
from stamp_core.engine.trees import Stored
from stamp_core.engine.worker import ClientResult, StateOrRef, peak_memory
from stamp_core.methods.base.method import Log, Message, Reply, State
from stamp_core.results.records import tree_bytes


def round_entry(
    messages: Mapping[int, Message],
    results: Sequence[ClientResult],
    log: Log,
    angles: Mapping[str, float],
    disk: Iterable[int],
    saving: float,
) -> dict[str, Any]:
    """The numbers of a round; seconds are of clients' own work, of the last save, and of logs."""
    logs = [*(result.reply.log for result in results), log]
    trained = [result.reply for result in results if result.reply.sgd_steps]
    samples = sum(reply.samples for reply in trained)
    loss = sum(reply.loss * reply.samples for reply in trained)
    seconds = {"clients": sum(result.seconds for result in results), "checkpoint": saving}
    for each in logs:
        for phase, spent in each.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + spent
    return {
        "participants": len(messages),
        "completed": len(results),
        "sgd_steps": sum(reply.sgd_steps for reply in trained),
        "images": sum(result.reply.log.images for result in results),  # encoded for a gradient
        "loss": loss / samples if samples else None,
        "seconds": seconds,
        "bytes": {
            "down": sum(map(tree_bytes, messages.values())),
            "up": sum(tree_bytes(result.reply.message) for result in results),
        },
        "memory": {
            "process": max([peak_memory(), *(result.memory for result in results)]),
            "gpu": max([0, *(result.gpu for result in results)]),
        },
        "disk": max(disk),  # of the client that keeps most
        "angles": angles,
        "notes": mean_by_name(each.numbers for each in logs),
        "events": dict(Counter(event for each in logs for event in each.events)),
    }


def round_angles(
    before: State, after: State, replies: Sequence[Reply], temporal: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Angles between updates of clients that trained and, if recorded, between a client's tasks."""
    messages = [reply.message for reply in replies if reply.sgd_steps]
    received = [message["parameters"] for message in messages if "parameters" in message]
    if not received:
        return mean_by_name(temporal)
    start, end = (server["parameters"].to(received[0].device) for server in (before, after))
    return mean_by_name([*temporal, spatial_angles(start, end, received)])


def state_bytes(kept: StateOrRef) -> int:
    """The size of a client's state."""
    return kept.bytes if isinstance(kept, Stored) else tree_bytes(kept)


def mean_by_name(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each named number where it is defined; absent if it is defined nowhere."""
    values: dict[str, list[float]] = {}
    for name, value in (item for numbers in each for item in numbers.items()):
        if not math.isnan(value):
            values.setdefault(name, []).append(value)
    return {name: sum(v) / len(v) for name, v in values.items()}
