"""Tables from run records: a row a run, results for people, paired differences, files for DVC."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stamp_core import metrics
from stamp_core.records import Record, total
from stamp_core.tables.paper import DASH, MAIN, accuracy_and_forgetting

CELL = ["setting", "method"]
COMPARED = ("fedavg", "stamp")  # with whom the page compares
GROUPS = ("federated", "personalised", "continual", "control")
MB = 1e6

# Rows of summary.json and the columns of `frame` behind them.
SUMMARY = {
    "accuracy": "accuracy",
    "personal_accuracy": "personal_accuracy",
    "average_incremental_accuracy": "judged_average_incremental_accuracy",
    "learning_accuracy": "judged_learning_accuracy",
    "forgetting": "judged_forgetting",
    "forgetting_diagonal": "judged_forgetting_diagonal",
    "worst_client": "judged_worst_client",
    "gap": "gap",
    "client_seconds": "client_seconds",
    "bytes_up": "bytes_up",
    "bytes_down": "bytes_down",
    "disk": "disk",
}
NOTE = f"""\
Accuracies are class-incremental (arg-max over all classes), in %, mean ± standard deviation over n
seeds; {DASH} is undefined. *Model* is the one that learning accuracy, forgetting and worst client
are about: the global model, or the clients' own where a method has no other. *Personal* tells of
the clients' own models, each on all tasks of its client. Forgetting is the paper's AF, *diagonal*
that since a task was learnt; lower is better. Gap: local models minus the global one on the task
just learnt. *Paper* is what the paper prints for the method of that name on CIFAR-100 with 10
clients and 2 classes a task: another setting, there to compare the order of rows, not the numbers.

Seconds are the clients' own work in a round, added up; MB (decimal) are sent by all clients in a
round, or both ways before the first one (*setup*); disk is that of the client that keeps most,
memory the peak of the process.

Differences are paired by seed, in percentage points with their 95 % Student t interval over n
seeds; each interval stands for itself, none is widened for the number of comparisons.
"""


def judged(record: Record) -> str:
    """The model that a method is judged by: 'global' if it has one, else 'personal'."""
    return "personal" if np.isnan(record.accuracy()).all() else "global"


def frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row a run: every number of metrics.summary, class-incremental, and what the run cost.

    Columns without prefix tell of the global model, `personal_` of the clients' own and `judged_`
    of the one that `score_model` names, by which figures compare methods. Accuracies are
    fractions, NaN where undefined; seconds and bytes are means per round over the whole
    federation; memory, gpu and disk are the most bytes ever.
    """
    return pd.DataFrame([_run(record) for record in distinct(records)])


def distinct(records: Sequence[Record]) -> Sequence[Record]:
    """The records, refused if there is none, or one run twice: n would be too large."""
    if not records:
        raise ValueError("no records: train something first")
    cells = [record.cell for record in records]
    if twice := [cell for cell in cells if cells.count(cell) > 1]:
        setting, method, seed = twice[0]
        raise ValueError(f"{setting} {method} seed {seed} is there twice; n would be too large")
    return records


def _run(record: Record) -> dict[str, Any]:
    """The row of one run."""
    setting, method, seed = record.cell
    of = {model: _numbers(record, model) for model in ("global", "personal")}
    model = judged(record)
    return {
        **{"setting": setting, "method": method, "seed": seed, "score_model": model},
        "group": record.group,
        **of["global"],
        **{f"personal_{name}": value for name, value in of["personal"].items()},
        **{f"judged_{name}": value for name, value in of[model].items()},
        **{f"{scoring}_accuracy": _final(record, scoring) for scoring in ("seen", "task")},
        **_costs(record),
    }


def _numbers(record: Record, model: str) -> dict[str, float]:
    """metrics.summary of one model of a run, under class-incremental scoring."""
    initial = record.scores["initial"][0].astype(float)  # [U, T]
    a, own = record.accuracy(model), record.accuracy("local")
    return metrics.summary(a, record.tests, initial, own)


def _final(record: Record, scoring: str) -> float:
    """The global model's final accuracy under another scoring."""
    a = metrics.last_cycle(record.accuracy(scoring=scoring), record.tests.shape[1])
    return metrics.final_accuracy(metrics.pooled(a, record.tests))


def _costs(record: Record) -> dict[str, float]:
    """Seconds, bytes and the server's step of a mean round, the most memory and disk ever."""
    history, rounds = record.history, len(record.history)
    return {
        "client_seconds": total(history, "seconds", "clients") / rounds,
        "server_seconds": total(history, "seconds", "server") / rounds,
        "bytes_up": total(history, "bytes", "up") / rounds,
        "bytes_down": total(history, "bytes", "down") / rounds,
        "memory": max(row["memory"]["process"] for row in history),
        "gpu": max(row["memory"]["gpu"] for row in history),
        "disk": max(row["disk"] for row in history),
        "bytes_setup": record.about["setup"]["down"] + record.about["setup"]["up"],
        "setup_seconds": record.about["setup"]["seconds"],
        "step_length": step_length(record),
    }


def step_length(record: Record) -> float:
    """How long the server's step was in a mean round; NaN where there is no server."""
    noted = [row.get("angles", {}).get("update length", np.nan) for row in record.history]
    return metrics.describe(noted)["mean"]


def curves(records: Sequence[Record], own: bool = False) -> pd.DataFrame:
    """One row a step of a run, counted from 1: accuracy over the tasks met so far, forgetting, gap.

    Accuracy and forgetting are those of the judged model, `model`, or with `own` those of the
    clients' own models; forgetting is that up to the step inside its cycle. The gap is local minus
    global accuracy on the task just learnt.
    """
    rows = [
        row
        for record in distinct(records)
        for row in _steps(record, "personal" if own else judged(record))
    ]
    return pd.DataFrame(rows)


def _steps(record: Record, model: str) -> Iterator[dict[str, Any]]:
    """The rows of one run in `curves`."""
    setting, method, seed = record.cell
    of = {
        name: metrics.pooled(record.accuracy(name), record.tests)  # [S, T]
        for name in (model, "global", "local")
    }
    for step, row in enumerate(of[model]):
        task = step % len(row)
        cycle = of[model][step - task : step + 1, : task + 1]  # [task + 1, task + 1]
        yield {
            **{"setting": setting, "method": method, "seed": seed, "step": step + 1},
            **{"group": record.group, "model": model},
            "accuracy": metrics.mean(row[: step + 1]),
            "forgetting": metrics.forgetting(cycle),
            "gap": float(of["local"][step, task] - of["global"][step, task]),
        }


def results(records: Sequence[Record]) -> pd.DataFrame:
    """One row a cell for people, as text: % as mean ± standard deviation, by groups of methods."""
    return _by_cell(records, _accuracies)


def costs(records: Sequence[Record]) -> pd.DataFrame:
    """One row a cell for people, as text: what a mean round costs, and the most memory and disk."""
    return _by_cell(records, _prices)


def _by_cell(
    records: Sequence[Record], row: Callable[[pd.DataFrame], dict[str, str]]
) -> pd.DataFrame:
    """A row a cell: setting, group, method and n, then what `row` makes of its runs."""
    rows = frame(records)
    settings = list(rows.setting.unique())
    places = zip(map(settings.index, rows.setting), map(GROUPS.index, rows.group), strict=True)
    rows = rows.assign(place=list(places)).sort_values("place", kind="stable")
    found = [
        {
            **{name: cell[name].iloc[0] for name in ("setting", "group", "method")},
            "n": str(len(cell)),
            **row(cell),
        }
        for _, cell in rows.groupby(CELL, sort=False)
    ]
    return pd.DataFrame(found)


def _accuracies(rows: pd.DataFrame) -> dict[str, str]:
    """The columns of `results` for the runs of one cell."""
    method = rows.method.iloc[0]
    return {
        "model": rows.score_model.iloc[0],
        "accuracy": percent(rows.accuracy),
        "personal accuracy": percent(rows.personal_accuracy),
        "learning accuracy": percent(rows.judged_learning_accuracy),
        "forgetting": percent(rows.judged_forgetting),
        "forgetting (diagonal)": percent(rows.judged_forgetting_diagonal),
        "personal learning accuracy": percent(rows.personal_learning_accuracy),
        "personal forgetting": percent(rows.personal_forgetting),
        "worst client": percent(rows.judged_worst_client),
        "gap": percent(rows.gap),
        "paper (CIFAR-100)": accuracy_and_forgetting(method, *MAIN),
    }


def _prices(rows: pd.DataFrame) -> dict[str, str]:
    """The columns of `costs` for the runs of one cell."""
    return {
        "s / round": amount(rows.client_seconds.mean(), 2),
        "MB up / round": amount(rows.bytes_up.mean() / MB),
        "MB down / round": amount(rows.bytes_down.mean() / MB),
        "MB setup": amount(rows.bytes_setup.mean() / MB),
        "s setup": amount(rows.setup_seconds.mean(), 2),
        "disk MB": amount(rows.disk.max() / MB),
        "memory MB": amount(rows.memory.max() / MB),
        "GPU MB": amount(rows.gpu.max() / MB),
    }


def percent(fractions: Sequence[float]) -> str:
    """Fractions of several seeds as `54.1 ± 1.2`; a smaller n is named where some are undefined."""
    found = metrics.describe(fractions)
    if not found["n"]:
        return DASH
    text = f"{100 * found['mean']:z.1f}"
    text += f" ± {100 * found['std']:.1f}" if found["n"] > 1 else ""
    return f"{text} (n = {found['n']})" if found["undefined"] else text


def amount(value: float, figures: int = 3) -> str:
    """A size or time with so many significant figures and no exponent."""
    return np.format_float_positional(value, figures, unique=False, fractional=False, trim="-")


def differences(records: Sequence[Record], against: str = "fedavg") -> pd.DataFrame:
    """Each method's paired difference from `against`, in points, with its 95 % interval and n.

    A method without a global model is judged by its clients' own: column `model` says so. Settings
    without `against` have no rows.
    """
    columns = [*CELL, "model", "measure", "difference", "low", "high", "n", "verdict"]
    found = [
        {**dict(zip(CELL, (setting, method), strict=True)), **row}
        for setting, rows in frame(records).groupby("setting", sort=False)
        for method, group in rows.groupby("method", sort=False)
        for row in _compared(group, rows[rows.method == against])
        if method != against and against in set(rows.method)
    ]
    return pd.DataFrame(found, columns=columns)


def _compared(rows: pd.DataFrame, base: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """The rows of `differences` for one method."""
    for measure in ("accuracy", "forgetting"):
        mine, theirs = (
            dict(zip(r.seed, r[f"judged_{measure}"], strict=True)) for r in (rows, base)
        )
        found = metrics.paired(mine, theirs)
        mean, low, high = (100 * found[name] for name in ("mean", "low", "high"))
        yield {
            **{"model": rows.score_model.iloc[0], "measure": measure},
            **{"difference": mean, "low": low, "high": high, "n": found["n"]},
            "verdict": verdict(low, high),
        }


def verdict(low: float, high: float) -> str:
    """What an interval of differences says in plain words."""
    if np.isnan(low):
        return "no interval"  # of one seed: nothing can be said
    return "higher" if low > 0 else "lower" if high < 0 else "not distinguishable"


def summary(records: Sequence[Record]) -> dict[str, dict[str, dict[str, Any]]]:
    """Mean, std and n of each number by setting and method, fit for JSON: undefined is None."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for (setting, method), rows in frame(records).groupby(CELL, sort=False):
        numbers = {name: _brief(rows[column]) for name, column in SUMMARY.items()}
        found.setdefault(setting, {})[method] = numbers
    return found


def _brief(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, std and n with four decimals."""
    found = metrics.describe(values)
    return {k: None if np.isnan(found[k]) else round(found[k], 4) for k in ("mean", "std", "n")}


def write(records: Sequence[Record], folder: Path) -> list[Path]:
    """The files written: results.md to read, accuracy.csv and summary.json for DVC to compare."""
    made = {
        "results.md": page(records),
        "accuracy.csv": curves(records).round(4).to_csv(index=False, lineterminator="\n"),
        "summary.json": json.dumps(summary(records), indent=1, allow_nan=False) + "\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return [folder / name for name in made]


def page(records: Sequence[Record]) -> str:
    """results.md: accuracies, differences and costs of each setting under its heading."""
    parts = ["# Results", NOTE.strip()]
    compared = {against: differences(records, against) for against in COMPARED}
    prices = costs(records)
    for setting, rows in results(records).groupby("setting", sort=False):
        parts += [f"## {setting}", markdown(rows.drop(columns="setting"))]
        for against, pairs in compared.items():
            if len(pairs := pairs[pairs.setting == setting]):
                parts += [f"Difference from {against}:", markdown(wide(pairs))]
        price = prices[prices.setting == setting].drop(columns=["setting", "n"])
        parts += ["What it costs:", markdown(price)]
    return "\n\n".join(parts) + "\n"


def wide(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `differences` of one setting as text, one a method."""
    found: dict[str, dict[str, str]] = {}
    for row in rows.itertuples():
        begun = {"method": row.method, "model": row.model, "n": str(row.n)}
        line = found.setdefault(row.method, begun)
        line[row.measure] = points(row)
        line[f"{row.measure} is"] = row.verdict
    return pd.DataFrame(found.values())


def points(row: Any) -> str:
    """A difference with its interval as `+8.6 (+5.1 to +12.0)`."""
    if not row.n:
        return DASH
    text = f"{row.difference:+z.1f}"
    return text if np.isnan(row.low) else f"{text} ({row.low:+z.1f} to {row.high:+z.1f})"


def markdown(rows: pd.DataFrame) -> str:
    """A GitHub table; columns are not padded, so that one changed cell is one changed line."""
    lines = [list(rows.columns), ["---"] * len(rows.columns), *rows.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
