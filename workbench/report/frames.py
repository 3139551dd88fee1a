"""Runs as rows of a data frame: what every table and figure starts from."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from stamp_core.config.decode import invalid
from stamp_core.config.params import require_name
from stamp_core.results.metrics import final_accuracy, last_cycle, mean, micro_average
from stamp_core.results.records import Record, history_total
from workbench.report import metrics
from workbench.report.text import BY_HAND, VERIFIED, plain

EXPERIMENT = ["setting", "method"]  # columns that name an experiment; its rows are its seeds
GROUPS = ("federated", "personalised", "continual", "control")  # of methods, in a table's order

RULES = {  # names of selection rules that people read
    "uniform": "random",
    "herding": "herding (PCS)",
    "k_centre": "k-centre",
    "least_squares": "PCS as printed",
    "nonnegative": "PCS as printed, a ≥ 0",
    "ocs": "OCS",
    "bcsr": "BCSR",
    "csrel": "CSReL",
    "sre2l": "SRe²L",
}
UNIT = "fedavg"  # whose images and bytes are 1
CHOOSING = 10  # seeds below it choose values, the others report
ALL_IMAGES = 10**6  # exemplars per class with which every image is kept


def unique_runs(records: Sequence[Record]) -> Sequence[Record]:
    """The records; refused if there are none, or if one run is there twice: n would be wrong."""
    if not records:
        raise ValueError("no records: train something first")
    for record in records:  # names on pages, and of figures
        for name in record.run[:2]:
            require_name("a record of", name)
        if type(record.run[2]) is not int or plain(record.name) != record.name:
            raise invalid("the name of a record", record.name, "plain, its seed a whole number")
    counts = Counter(f"{record.name} seed {record.run[2]}" for record in records)
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise ValueError(f"{name} is there twice; n would be too large")
    return records


def shared_seeds(records: Sequence[Record]) -> list[Record]:
    """The records with the seeds that most methods of their setting have, or else their own."""
    seeds: dict[tuple[str, str], set[int]] = {}
    for record in records:
        setting, method, seed = record.run
        seeds.setdefault((setting, method), set()).add(seed)
    counts: dict[str, Counter[frozenset[int]]] = {}
    for (setting, _), own in seeds.items():
        counts.setdefault(setting, Counter())[frozenset(own)] += 1
    shared = {setting: count.most_common(1)[0][0] for setting, count in counts.items()}
    kept = {(s, method): own & shared[s] or own for (s, method), own in seeds.items()}
    return [record for record in records if record.run[2] in kept[record.run[:2]]]


def without_diverged(records: Sequence[Record]) -> list[Record]:
    """The records without the seeds on which a method of their setting diverged."""
    lost = {(r.run[0], int(seed)) for r in records for seed in r.about.get("diverged", {})}
    return [record for record in records if (record.run[0], record.run[2]) not in lost]


def final_score(record: Record, model: str, scoring: str = "all") -> float:
    """The final score of one model by one scoring, over all tasks and clients."""
    a = last_cycle(record.accuracy(model, scoring), record.tests.shape[1])
    return final_accuracy(micro_average(a, record.tests))


def machine(record: Record) -> str:
    """The device that trained a run, and the machine's number of cores, where they are known."""
    known = record.environment
    return f"{known['device']}, {known['cores']} cores" if known else "unknown"


# --- runs and their models


def run_frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a run: its metrics (metrics.run_metrics, class-incremental) and its costs.

    Columns without prefix are of the global model, `personal_` of the clients' personal models,
    `main_` of the one that column `model` names. Accuracies are fractions, NaN where undefined;
    seconds and bytes are sums over all clients in a mean round; memory, gpu and disk are peaks.
    `alpha` is Dirichlet's, `cycles` the number of passes over the tasks, `rounds` those of a task.
    """
    return pd.DataFrame(
        _labels(record) | _scores(record) | _costs(record) for record in unique_runs(records)
    )


def _labels(record: Record) -> dict[str, Any]:
    setting, method, seed = record.run
    sweep, value = record.sweep
    split = record.about["setting"]["split"]
    return {
        **{"setting": setting, "method": method, "seed": seed, "sweep": sweep, "value": value},
        **{"group": record.group, "model": record.main_model},
        "verified": VERIFIED.get(record.about["method"]["kind"], BY_HAND),
        **{"alpha": split.get("alpha") or np.nan, "cycles": split["cycles"]},
        "rounds": record.about["setting"].get("training", {}).get("rounds"),
    }


def _scores(record: Record) -> dict[str, float]:
    initial = record.scores["initial"][0].astype(float)
    local = record.accuracy("local")
    scores = {
        name: metrics.run_metrics(record.accuracy(name), record.tests, initial, local)
        for name in ("global", "personal")
    }
    task_model = "global" if np.isnan(record.accuracy("personal", "task")).all() else "personal"
    return {
        **scores["global"],
        **{f"personal_{name}": value for name, value in scores["personal"].items()},
        **{f"main_{name}": value for name, value in scores[record.main_model].items()},
        "nearest_mean": final_score(record, "global", "nearest mean"),
        "local_accuracy": final_score(record, "local"),
        "task_accuracy": final_score(record, task_model, "task"),
    }


def _costs(record: Record) -> dict[str, float]:
    history = record.history
    setup = record.about["setup"]
    lengths = [row.get("angles", {}).get("update length", np.nan) for row in history]
    inside = [row.get("notes", {}).get("drift", np.nan) for row in history]
    return {
        "client_seconds": history_total(history, "seconds", "clients") / len(history),
        "images": history_total(history, "images"),
        "bytes_up": history_total(history, "bytes", "up") / len(history),
        "bytes_down": history_total(history, "bytes", "down") / len(history),
        "memory": max(row["memory"]["process"] for row in history),
        "gpu": max(row["memory"]["gpu"] for row in history),
        "disk": max(row["disk"] for row in history),
        "bytes_setup": setup["down"] + setup["up"],
        "setup_seconds": record.environment.get("setup_seconds", np.nan),
        # means over the rounds that recorded them; `inside` is the share of the global update
        # that lies in the subspaces which clients protect
        "update_length": metrics.summarise(lengths)["mean"],
        "inside": metrics.summarise(inside)["mean"],
    }


def relative_costs(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """Images and bytes of runs in units of `UNIT`'s mean in their setting; NaN without it."""
    costs = {"images": rows.images, "bytes": rows.bytes_up + rows.bytes_down}
    units = {
        name: cost[rows.method == UNIT].groupby(rows.setting).mean() for name, cost in costs.items()
    }
    return {name: cost / rows.setting.map(units[name]) for name, cost in costs.items()}


def model_frame(rows: pd.DataFrame) -> pd.DataFrame:
    """`run_frame`, then rows with the personal models as `main_` of runs with a global one."""
    both = rows[(rows.model == "global") & rows.personal_accuracy.notna()]
    personal = {c: both[c.replace("main_", "personal_")] for c in rows if c.startswith("main_")}
    return pd.concat([rows, both.assign(model="personal", **personal)], ignore_index=True)


def experience_frame(records: Sequence[Record], personal: bool = False) -> pd.DataFrame:
    """One row an experience of a run: accuracy over the tasks met so far, forgetting and gap.

    Experiences are counted from 1. Accuracies and forgetting are those of the main model, or with
    `personal` those of the personal models; forgetting and average incremental accuracy are those
    within the cycle, so the last ones are the run's. The gap is local minus global accuracy on the
    task just learnt.
    """
    rows = [row for record in unique_runs(records) for row in _experience_rows(record, personal)]
    return pd.DataFrame(rows)


def _experience_rows(record: Record, personal: bool) -> Iterator[dict[str, Any]]:
    setting, method, seed = record.run
    model = "personal" if personal else record.main_model
    own, global_, local = (
        record.task_accuracies(name)  # [S, T]
        for name in (model, "global", "local")
    )
    for experience, row in enumerate(own):
        task = experience % len(row)
        cycle = own[experience - task : experience + 1, : task + 1]  # [task + 1, task + 1]
        yield {
            **{"setting": setting, "method": method, "seed": seed, "experience": experience + 1},
            **{"group": record.group, "model": model},
            "accuracy": mean(row[: experience + 1]),
            "forgetting": metrics.average_forgetting(cycle),
            "gap": float(local[experience, task] - global_[experience, task]),
            "average_incremental_accuracy": metrics.average_incremental_accuracy(cycle),
        }


# --- selection rules


def coreset_frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a run: that of `run_frame`, selection rule, exemplars per class, times and events."""
    return pd.concat([run_frame(records), pd.DataFrame(map(_selection, records))], axis=1)


def _selection(record: Record) -> dict[str, Any]:
    memory: dict[str, Any] = record.about["method"].get("memory") or {}
    rounds = [row for row in record.history if "coreset" in row["seconds"]]
    selections = sum(row["completed"] for row in rounds) or np.nan
    seconds = history_total(rounds, "seconds", "coreset")
    training = history_total(record.history, "seconds", "clients") - seconds
    rule = memory.get("selection", "no memory")
    return {
        "selection": RULES.get(rule, rule),
        "exemplars": memory.get("exemplars_per_class", 0),
        "selection_ms": 1000 * seconds / selections,
        "training_ms": 1000 * training / selections,
        "events": sum((Counter(row["events"]) for row in record.history), Counter[str]()),
    }


def reference_memories(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Of the rows of `coreset_frame` those without a memory, and those that keep all images."""
    return {
        "no memory": rows[rows.exemplars == 0],
        "all images": rows[rows.exemplars >= ALL_IMAGES],
    }


def limited_memory(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `coreset_frame` that keep some exemplars, but not all images."""
    return rows[(rows.exemplars > 0) & (rows.exemplars < ALL_IMAGES)]


# --- values of the setting


def sorted_frame(records: Sequence[Record], by: str) -> pd.DataFrame:
    """The rows of `run_frame` by a column."""
    return run_frame(records).sort_values(by, kind="stable")


# --- overlap of classes


def overlap_frame(records: Sequence[Record]) -> pd.DataFrame:
    """`run_frame` on reporting seeds with chosen values; `overlap` in % of classes, task `size`."""
    rows = run_frame(records)
    settings = [record.about["setting"] for record in records]
    sizes = [setting["split"]["classes_per_task"] for setting in settings]
    shares = [
        100 * size * setting["split"]["tasks"] / setting["data"]["classes"]
        for size, setting in zip(sizes, settings, strict=True)
    ]
    rows = rows.assign(overlap=shares, size=sizes)
    keys = ["setting", "method", "value"]
    choosing = rows[rows.seed < CHOOSING].groupby(keys).main_accuracy.mean().reset_index()
    best = choosing.loc[choosing.groupby(keys[:2]).main_accuracy.idxmax(), keys]
    return rows[rows.seed >= CHOOSING].merge(best, on=keys)


def mask_frame(records: Sequence[Record]) -> pd.DataFrame:
    """The rows of `run_frame` with the accuracy of pixels."""
    pixels = [final_score(record, "global", "pixels") for record in records]
    return run_frame(records).assign(pixels=pixels)


def projection_frame(projected: Sequence[Record], exact: Sequence[Record]) -> pd.DataFrame:
    """`run_frame` of runs on projections, and of the same runs with the value "exact"."""
    own = {record.run for record in projected}
    same = [record for record in exact if record.run in own]
    return pd.concat([run_frame(projected), run_frame(same).assign(value="exact")])
