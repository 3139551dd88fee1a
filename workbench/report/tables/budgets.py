"""Who is most accurate within a budget: of images, of bytes, of what a client keeps."""

from collections.abc import Callable, Iterator

import pandas as pd

from stamp_core.results.metrics import paired_difference
from workbench.report.text import DASH, mean_std, significant

_UNIT = "fedavg"  # whose images and bytes are 1
_BOUND = "joint"  # has the data of all clients: it is no method under a budget
_COSTS: dict[str, Callable[[pd.DataFrame], pd.Series]] = {
    f"images, {_UNIT} = 1": lambda rows: _relative(rows, rows.images),
    f"bytes, {_UNIT} = 1": lambda rows: _relative(rows, rows.bytes_up + rows.bytes_down),
    "kept by a client, kB": lambda rows: rows.disk / 1e3,
}


def budget_table(rows: pd.DataFrame) -> pd.DataFrame:
    """For each cost the methods that are more accurate than all that cost less, as text.

    `rows` is a `run_frame` of one setting. From a row's cost on its method is the most accurate,
    until the cost of the next row. The difference is that from the row before, over common seeds.
    """
    rows = rows[rows.main_accuracy.notna() & (rows.method != _BOUND)]
    lines = [line for name, cost in _COSTS.items() for line in _frontier(rows, name, cost(rows))]
    return pd.DataFrame(lines)


def _frontier(rows: pd.DataFrame, name: str, costs: pd.Series) -> Iterator[dict[str, str]]:
    """A line for each method that is more accurate than all that cost no more."""
    table = (
        rows.assign(cost=costs)
        .groupby("method")
        .agg(cost=("cost", "mean"), accuracy=("main_accuracy", "mean"))
    )
    table = table.dropna().round({"cost": 2})
    before: dict[int, float] = {}
    best = -1.0
    for method, each in table.sort_values(["cost", "accuracy"], ascending=[True, False]).iterrows():
        if each.accuracy <= best:
            continue
        runs = rows[rows.method == method]
        scores = dict(zip(runs.seed, 100 * runs.main_accuracy, strict=True))
        yield {
            "budget": name,
            "from": significant(each.cost),
            "method": str(method),
            "n": str(len(runs)),
            "accuracy": mean_std(runs.main_accuracy),
            "above the row before": _difference(scores, before),
        }
        before, best = scores, each.accuracy


def _difference(scores: dict[int, float], before: dict[int, float]) -> str:
    """The paired difference with its 95 % interval; a dash where there is nothing to compare."""
    pair = paired_difference(scores, before)
    if pair["n"] < 2:
        return DASH
    return f"{pair['mean']:+.1f} ({pair['low']:+.1f} to {pair['high']:+.1f})"


def _relative(rows: pd.DataFrame, values: pd.Series) -> pd.Series:
    """Values as multiples of the unit's mean; NaN where it was not run."""
    return values / values[rows.method == _UNIT].mean()
