"""Runs as rows of a data frame: what every table and figure starts from."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from stamp_core.results import metrics
from stamp_core.results.records import Record, history_total

EXPERIMENT = ["setting", "method"]  # columns that name an experiment; its rows are its seeds
GROUPS = ("federated", "personalised", "continual", "control")  # of methods, in a table's order


def unique_runs(records: Sequence[Record]) -> Sequence[Record]:
    """The records; refused if there are none, or if one run is there twice: n would be wrong."""
    if not records:
        raise ValueError("no records: train something first")
    counts = Counter(f"{record.name} seed {record.run[2]}" for record in records)
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise ValueError(f"{name} is there twice; n would be too large")
    return records


def main_model(record: Record) -> str:
    """The model that a method is compared by: 'global' if it has one, else 'personal'."""
    return "personal" if np.isnan(record.accuracy()).all() else "global"


def run_frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a run: its metrics (metrics.run_metrics, class-incremental) and its costs.

    Columns without prefix are of the global model, `personal_` of the clients' personal models,
    `main_` of the one that column `model` names. Accuracies are fractions, NaN where undefined;
    seconds and bytes are sums over all clients in a mean round; memory, gpu and disk are peaks.
    """
    return pd.DataFrame([_run_row(record) for record in unique_runs(records)])


def model_frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a model: those of `run_frame`, then the personal models of runs with a global one.

    In the latter `main_` are the columns of the personal models.
    """
    rows = run_frame(records)
    both = rows[(rows.model == "global") & rows.personal_accuracy.notna()]
    personal = {c: both[c.replace("main_", "personal_")] for c in rows if c.startswith("main_")}
    return pd.concat([rows, both.assign(model="personal", **personal)], ignore_index=True)


def _run_row(record: Record) -> dict[str, Any]:
    setting, method, seed = record.run
    initial, local = record.scores["initial"][0].astype(float), record.accuracy("local")
    scores = {
        name: metrics.run_metrics(record.accuracy(name), record.tests, initial, local)
        for name in ("global", "personal")
    }
    model = main_model(record)
    return {
        **{"setting": setting, "method": method, "seed": seed, "model": model},
        "group": record.group,
        **scores["global"],
        **{f"personal_{name}": value for name, value in scores["personal"].items()},
        **{f"main_{name}": value for name, value in scores[model].items()},
        "nearest_mean": final_score(record, "global", "nearest mean"),
        "local_accuracy": final_score(record, "local"),
        "task_accuracy": final_score(record, _task_model(record), "task"),
        **_costs(record),
    }


def _task_model(record: Record) -> str:
    """The model that is tested where the task is told: the personal one if there is any."""
    return "global" if np.isnan(record.accuracy("personal", "task")).all() else "personal"


def final_score(record: Record, model: str, scoring: str = "all") -> float:
    """The final score of one model by one scoring, over all tasks and clients."""
    a = metrics.last_cycle(record.accuracy(model, scoring), record.tests.shape[1])
    return metrics.final_accuracy(metrics.micro_average(a, record.tests))


def _costs(record: Record) -> dict[str, float]:
    history, setup, rounds = record.history, record.about["setup"], len(record.history)
    return {
        "client_seconds": history_total(history, "seconds", "clients") / rounds,
        "images": history_total(history, "images"),
        "bytes_up": history_total(history, "bytes", "up") / rounds,
        "bytes_down": history_total(history, "bytes", "down") / rounds,
        "memory": max(row["memory"]["process"] for row in history),
        "gpu": max(row["memory"]["gpu"] for row in history),
        "disk": max(row["disk"] for row in history),
        "bytes_setup": setup["down"] + setup["up"],
        "setup_seconds": setup["seconds"],
        "update_length": mean_update_length(record),
    }


def mean_update_length(record: Record) -> float:
    """The length of the global update in a mean round; NaN where it was not recorded."""
    lengths = [row.get("angles", {}).get("update length", np.nan) for row in record.history]
    return metrics.summarise(lengths)["mean"]


def experience_frame(records: Sequence[Record], personal: bool = False) -> pd.DataFrame:
    """One row an experience of a run: accuracy over the tasks met so far, forgetting and gap.

    Experiences are counted from 1. Accuracy and forgetting are those of the main model, or with
    `personal` those of the personal models; forgetting is that within the cycle. The gap is local
    minus global accuracy on the task just learnt.
    """
    rows = [
        row
        for record in unique_runs(records)
        for row in _experience_rows(record, "personal" if personal else main_model(record))
    ]
    return pd.DataFrame(rows)


def _experience_rows(record: Record, model: str) -> Iterator[dict[str, Any]]:
    setting, method, seed = record.run
    own, global_, local = (
        metrics.micro_average(record.accuracy(name), record.tests)  # [S, T]
        for name in (model, "global", "local")
    )
    for experience, row in enumerate(own):
        task = experience % len(row)
        cycle = own[experience - task : experience + 1, : task + 1]  # [task + 1, task + 1]
        yield {
            **{"setting": setting, "method": method, "seed": seed, "experience": experience + 1},
            **{"group": record.group, "model": model},
            "accuracy": metrics.mean(row[: experience + 1]),
            "forgetting": metrics.average_forgetting(cycle),
            "gap": float(local[experience, task] - global_[experience, task]),
        }
