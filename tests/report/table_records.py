"""Run records with accuracies chosen by hand, so that every number of a table can be worked out."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from stamp_core.results.records import SCORINGS, Record

FINALS = [(0.4, 0.6), (0.5, 0.7), (0.3, 0.8)]  # accuracy 0.5, 0.6, 0.55; forgetting 0.4, 0.3, 0.5
ROUND: dict[str, Any] = {
    **{"round": 0, "loss": 1.0, "participants": 2, "completed": 2, "images": 1000},
    "seconds": {"clients": 0.5, "server": 0.5},
    "bytes": {"up": 1000, "down": 4000},
    "memory": {"process": 20_000_000, "gpu": 7},
    **{"disk": 500, "angles": {}, "notes": {}, "events": {}},
}


def fake_record(
    method: str = "fedavg",
    seed: int = 0,
    final: tuple[float, ...] = FINALS[0],
    first: tuple[float, ...] = (0.8, 0.1),
    *,
    setting: str = "toy",
    local: float = np.nan,
    personal_only: bool = False,
    personal: float = np.nan,
    cycles: int = 1,
    rounds: Sequence[dict[str, Any]] = ({}, {}),
    params: dict[str, Any] | None = None,
    **about: Any,
) -> Record:
    """A run of two tasks and two clients whose accuracies after each task are `first` and `final`.

    `rounds` are changes of ROUND, `params` of the method; `local` is the local models' accuracy
    and `personal` what the personal models are better than the global one.
    """
    a = np.repeat(np.array([first, final] * cycles)[:, None], 2, axis=1)  # [S, U, T]
    undefined = np.full((len(SCORINGS), *a.shape), np.nan)
    scores = np.stack([a, a + 0.1, a + 0.2, a + 0.3])  # as in SCORINGS
    models = {"global": scores, "personal": scores + personal}
    if personal_only:
        models = {"global": undefined, "personal": scores}
    models |= {"local": np.full_like(scores, local), "initial": np.zeros((len(SCORINGS), 2, 2))}
    everything = {
        **{"setting": {"name": setting}, "method": {"name": method, **(params or {})}},
        **{"seed": seed, "group": "federated"},
        "setup": {"down": 300, "up": 200, "seconds": 2.0},
        **about,
    }
    tests = np.array([[10, 20], [30, 20]])  # [U, T]
    return Record(everything, [{**ROUND, **each} for each in rounds], models, tests, {})


def three_seeds(
    method: str = "fedavg", finals: Sequence[tuple[float, float]] = FINALS, **changes: Any
) -> list[Record]:
    """A run for each pair of final accuracies."""
    return [fake_record(method, seed, final, **changes) for seed, final in enumerate(finals)]
