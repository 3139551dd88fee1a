"""First and last rounds of a task, from the experiences that a client's state lists.

A state that needs it keeps "experiences", sorted: those in which the client has completed a round
or, with a memory, those whose tasks are in it.
"""

from collections.abc import Mapping
from typing import Any

from stamp_core.methods.base.method import ClientRound


def is_first(client_round: ClientRound) -> bool:
    """Whether the client has completed no round of this experience yet."""
    return client_round.experience not in client_round.state["experiences"]


def latest(state: Mapping[str, Any]) -> int:
    """The experience in which the client last completed a round; -1 before the first."""
    return int(max(state["experiences"], default=-1))


def recorded(client_round: ClientRound) -> list[int]:
    """The experiences with this one."""
    return sorted({*client_round.state["experiences"], client_round.experience})
