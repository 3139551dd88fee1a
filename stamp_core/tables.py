"""Tables from run records: a row a run, results for people, paired differences, files for DVC."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stamp_core import metrics
from stamp_core.records import Record, total

CELL = ["setting", "method"]
DASH = "\N{EN DASH}"  # what people read where a number is undefined
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
are about: the global model, or the clients' own where a method has no other. Forgetting is the
paper's AF, *diagonal* that since a task was learnt; lower is better. Gap: local models minus the
global one on the task just learnt. Seconds are the clients' own work in a round, added up; MB
(decimal) are sent by all clients in a round; disk is that of the client that keeps most, memory
the peak of the process.

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
        "step_length": step_length(record),
    }


def step_length(record: Record) -> float:
    """How long the server's step was in a mean round; NaN where there is no server."""
    noted = [row.get("angles", {}).get("update length", np.nan) for row in record.history]
    return metrics.describe(noted)["mean"]


def curves(records: Sequence[Record]) -> pd.DataFrame:
    """One row a step of a run, counted from 1: accuracy over the tasks met so far, forgetting, gap.

    Accuracy and forgetting are those of the judged model, `model`; forgetting is that up to the
    step inside its cycle. The gap is local minus global accuracy on the task just learnt.
    """
    return pd.DataFrame([row for record in distinct(records) for row in _steps(record)])


def _steps(record: Record) -> Iterator[dict[str, Any]]:
    """The rows of one run in `curves`."""
    (setting, method, seed), model = record.cell, judged(record)
    of = {
        name: metrics.pooled(record.accuracy(name), record.tests)  # [S, T]
        for name in (model, "global", "local")
    }
    for step, row in enumerate(of[model]):
        task = step % len(row)
        cycle = of[model][step - task : step + 1, : task + 1]  # [task + 1, task + 1]
        yield {
            **{"setting": setting, "method": method, "seed": seed, "step": step + 1},
            **{"model": model, "accuracy": metrics.mean(row[: step + 1])},
            "forgetting": metrics.forgetting(cycle),
            "gap": float(of["local"][step, task] - of["global"][step, task]),
        }


def results(records: Sequence[Record]) -> pd.DataFrame:
    """One row a cell for people, as text: % as mean ± standard deviation, costs as means."""
    return pd.DataFrame([_cell(rows) for _, rows in frame(records).groupby(CELL, sort=False)])


def _cell(rows: pd.DataFrame) -> dict[str, str]:
    """The row of `results` for the runs of one cell."""
    return {
        **{name: rows[name].iloc[0] for name in CELL},
        "n": str(len(rows)),
        "model": rows.score_model.iloc[0],
        "accuracy": percent(rows.accuracy),
        "personal accuracy": percent(rows.personal_accuracy),
        "learning accuracy": percent(rows.judged_learning_accuracy),
        "forgetting": percent(rows.judged_forgetting),
        "forgetting (diagonal)": percent(rows.judged_forgetting_diagonal),
        "worst client": percent(rows.judged_worst_client),
        "gap": percent(rows.gap),
        "s / round": amount(rows.client_seconds.mean(), 2),
        "MB up / round": amount(rows.bytes_up.mean() / MB),
        "MB down / round": amount(rows.bytes_down.mean() / MB),
        "disk MB": amount(rows.disk.max() / MB),
        "memory MB": amount(rows.memory.max() / MB),
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
    """results.md: both tables of each setting under its heading."""
    parts = ["# Results", NOTE.strip()]
    compared = differences(records)
    for setting, rows in results(records).groupby("setting", sort=False):
        parts += [f"## {setting}", markdown(rows.drop(columns="setting"))]
        against = compared[compared.setting == setting]
        if len(against):
            parts += ["Difference from fedavg:", markdown(_wide(against))]
    return "\n\n".join(parts) + "\n"


def _wide(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `differences` of one setting as text, one a method."""
    found: dict[str, dict[str, str]] = {}
    for row in rows.itertuples():
        begun = {"method": row.method, "model": row.model, "n": str(row.n)}
        line = found.setdefault(row.method, begun)
        line[row.measure] = _points(row)
        line[f"{row.measure} is"] = row.verdict
    return pd.DataFrame(found.values())


def _points(row: Any) -> str:
    """A difference with its interval as `+8.6 (+5.1 to +12.0)`."""
    if not row.n:
        return DASH
    text = f"{row.difference:+z.1f}"
    return text if np.isnan(row.low) else f"{text} ({row.low:+z.1f} to {row.high:+z.1f})"


def markdown(rows: pd.DataFrame) -> str:
    """A GitHub table; columns are not padded, so that one changed cell is one changed line."""
    lines = [list(rows.columns), ["---"] * len(rows.columns), *rows.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# --- the ablation: what each part of STAMP is worth

PAPER = {  # accuracy and AF on CIFAR-100, 10 clients, 2 classes a task
    "fedavg": (31.7, 22.1),
    "sam": (38.1, 23.8),
    "tam": (37.8, 21.7),
    "sam_tam": (44.7, 21.5),
    "sam_pcs": (46.1, 24.7),
    "tam_pcs": (44.9, 21.8),
    "sam_tam_pcs": (52.8, 24.3),
}
ABLATION = f"""\
What each part of STAMP is worth, beside controls that match nothing. Numbers are % (accuracy:
class-incremental; learning accuracy: each task right after it was learnt), mean ± standard
deviation over n seeds; {DASH} is off or undefined. *SAM* and *TAM* are matching on the server and
on the client with their radius, κ = 0 the mean instead; *coreset* is the rule and the pictures kept
of a class; *rehearsal* are the remembered pictures mixed into a batch, as a multiple of its new
ones; *otherwise* is what else differs from `stamp`. *Step* is how long the server's steps are
relative to those of `fedavg`, paired by seed: a longer step is a larger learning rate, which is why
`fedavg_step` is there. Seconds are those of all clients in a round. *Paper* is accuracy and
forgetting (AF) as it prints them for CIFAR-100 with 10 clients and 2 classes a task: another
setting, there to compare the order of the rows and not the numbers.

Differences are paired by seed, in percentage points with their 95 % Student t interval over n
seeds; each interval stands for itself: of twenty that hold nothing but noise, about one leaves zero
out.
"""


PARTS = {"control": "nothing matched", "paper": "parts of the paper", "choice": "choices"}
COVERED = {"name", "kind", "memory", "ratio", "prototype"}  # columns of their own
VERBS = {  # what another method's difference says of the one it is compared with
    ("accuracy", "lower"): "is more accurate than",
    ("accuracy", "higher"): "is less accurate than",
    ("forgetting", "higher"): "forgets less than",
    ("forgetting", "lower"): "forgets more than",
}


def part(record: Record) -> str:
    """The part of the ablation that a run belongs to, a key of PARTS: a control matches nothing."""
    about = record.about["method"]
    if not any((about.get(place) or {}).get("kappa") for place in ("spatial", "temporal")):
        return "control"
    return "paper" if record.cell[1] in PAPER else "choice"


def by_part(records: Sequence[Record]) -> list[Record]:
    """The records, those of one part together."""
    return sorted(records, key=lambda record: [*PARTS].index(part(record)))


def variant(record: Record) -> str:
    """The method's name, with its server's step where that is not 1."""
    about = record.about["method"]
    step = about.get("step", 1.0)
    return str(about["name"]) + ("" if step == 1 else f" (step {step:g})")


def ablation(records: Sequence[Record]) -> pd.DataFrame:
    """One row a variant and setting for people, as text: what is on, and what it comes to."""
    records = by_part(records)
    rows = frame(records).assign(record=records)
    whole: dict[str, Any] = next((r.about["method"] for r in records if r.cell[1] == "stamp"), {})
    found = []
    for (setting, _), cell in rows.groupby(CELL, sort=False):
        base = rows[(rows.setting == setting) & (rows.method == "fedavg")]
        found.append(
            {"setting": setting, **_made_of(cell.record.iloc[0], whole), **_worth(cell, base)}
        )
    return pd.DataFrame(found)


def _made_of(record: Record, whole: dict[str, Any]) -> dict[str, str]:
    """What a variant consists of, from the parameters of its run; `whole` are those of stamp."""
    about = record.about["method"]
    rate, ratio = about.get("prototype"), about.get("ratio")
    return {
        "variant": variant(record),
        "part": PARTS[part(record)],
        "SAM": _radius(about.get("spatial")),
        "TAM": _radius(about.get("temporal")),
        "coreset": _coreset(about),
        "prototypical loss": f"{rate:g}" if rate else DASH,
        "rehearsal": f"{ratio:g}" if ratio else DASH,
        "otherwise": ", ".join(_otherwise(about, whole)) or DASH,
    }


def _radius(matching: dict[str, Any] | None) -> str:
    """The radius of a matching, or that there is none."""
    return f"κ = {matching['kappa']:g}" if matching else DASH


def _coreset(about: dict[str, Any]) -> str:
    """The rule and size of a memory, and whether anything reads it."""
    memory, temporal = about.get("memory") or {}, about.get("temporal") or {}
    if not memory.get("per_class"):
        return DASH
    read = about.get("ratio") or temporal.get("source") in ("memory", "prototypes", "mean pictures")
    return f"{memory['rule']}, {memory['per_class']}" + ("" if read else " (not read)")


def _otherwise(about: dict[str, Any], whole: dict[str, Any]) -> Iterator[str]:
    """What a method of stamp's kind does otherwise than stamp, beside what has a column."""
    if about.get("kind") != whole.get("kind"):
        return
    for name in sorted(about.keys() - COVERED):
        mine, theirs = about[name], whole[name]
        if not isinstance(mine, dict) and mine is not None and mine != theirs:
            yield f"{name} {mine}"
        if isinstance(mine, dict) and isinstance(theirs, dict):
            keys = [key for key in mine if key != "kappa" and mine[key] != theirs[key]]
            yield from (f"{name}.{key} {mine[key]}" for key in keys)


def _worth(rows: pd.DataFrame, base: pd.DataFrame) -> dict[str, str]:
    """What the runs of a cell come to; `base` are those of fedavg in the same setting."""
    mine, theirs = (dict(zip(r.seed, r.step_length, strict=True)) for r in (rows, base))
    ratio = metrics.describe(mine[seed] / theirs[seed] for seed in mine.keys() & theirs.keys())
    accuracy, forgetting = PAPER.get(rows.method.iloc[0], (None, None))
    return {
        "n": str(len(rows)),
        "accuracy": percent(rows.judged_accuracy),
        "forgetting": percent(rows.judged_forgetting),
        "learning accuracy": percent(rows.judged_learning_accuracy),
        "step": amount(ratio["mean"]) if ratio["n"] else DASH,
        "s / round": amount(rows.client_seconds.mean(), 2),
        "paper (CIFAR-100)": f"{accuracy}, AF {forgetting}" if accuracy else DASH,
    }


def sentences(records: Sequence[Record], setting: str, against: str) -> str:
    """Two sentences made from the intervals: what `against` is beyond the noise, and what not."""
    controls = {record.cell[1] for record in records if part(record) == "control"}
    rows = differences(by_part(records), against)
    rows = rows[rows.setting == setting]
    beyond, within = [], []
    for (measure, word), verb in VERBS.items():
        found = rows[(rows.measure == measure) & (rows.verdict == word)]
        beyond += [f"{verb} {_listed(found, controls)}"] if len(found) else []
    for measure, found in rows[~rows.verdict.isin(["higher", "lower"])].groupby("measure"):
        within.append(f"in {measure} from {_listed(found, controls)}")
    holds = f"Beyond the noise {against} {'; '.join(beyond) or 'differs from none of these'}."
    if not within:
        return f"{holds} It can be told from all of these in both."
    return f"{holds} It cannot be told {'; '.join(within)}."


def _listed(rows: pd.DataFrame, controls: set[str]) -> str:
    """The methods of some differences, those from controls with their intervals."""
    named = []
    for row in rows.itertuples():
        if np.isnan(row.low):
            named.append(f"{row.method} (no interval)")
        elif row.method in controls:
            low, high = sorted(abs(end) for end in (row.low, row.high))
            size = f" (by {low:.1f} to {high:.1f})" if row.low * row.high > 0 else ""
            named.append(f"the control {row.method}{size}")
        else:
            named.append(row.method)
    return ", ".join(named)


def ablation_page(records: Sequence[Record]) -> str:
    """ablation.md: of each setting what every variant is and comes to, and two tables of pairs."""
    records, parts = by_part(records), ["# Ablation", ABLATION.strip()]
    for setting, rows in ablation(records).groupby("setting", sort=False):
        parts += [f"## {setting}", markdown(rows.drop(columns="setting"))]
        for against in ("stamp", "replay"):
            compared = differences(records, against)
            compared = compared[compared.setting == setting]
            if len(compared):
                found = sentences(records, setting, against)
                parts += [f"Difference from {against}:", markdown(_wide(compared)), found]
    return "\n\n".join(parts) + "\n"


def write_ablation(records: Sequence[Record], folder: Path) -> Path:
    """The file written: ablation.md."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ablation.md"
    path.write_text(ablation_page(records), encoding="utf-8", newline="\n")
    return path


# --- how well gradients were matched

MATCHED = {  # columns and the number behind each; lengths are relative to the reference's
    "rows": "rows",
    "worst row, mean": "least_reference",
    "worst row, matched": "least",
    "length": "length",
    "cosine": "cosine",
    "rows used": "support",
}


def matching(records: Sequence[Record]) -> pd.DataFrame:
    """One row a cell and place of matching: means over rounds and seeds, as text; none if none."""
    found = []
    for (setting, method), rows in frame(records).groupby(CELL, sort=False):
        cell = [record for record in records if record.cell[:2] == (setting, method)]
        history = [row for record in cell for row in record.history]
        for place in ("spatial", "temporal"):
            notes = [row["notes"] for row in history if f"{place} rows" in row.get("notes", {})]
            if notes:
                begun = {"setting": setting, "method": method, "where": place, "n": str(len(rows))}
                found.append({**begun, **_matched(notes, place), "events": _events(history, place)})
    return pd.DataFrame(found)


def _matched(notes: Sequence[dict[str, float]], place: str) -> dict[str, str]:
    """The numbers of `matching` for one place, and the farthest from the optimum of all rounds."""
    means = {k: metrics.mean([row[f"{place} {v}"] for row in notes]) for k, v in MATCHED.items()}
    gap = max(row[f"{place} gap"] for row in notes)
    return {
        "rounds": str(len(notes)),
        **{k: f"{v:.2f}" for k, v in means.items()},
        "gap": f"{gap:.0e}",
    }


def _events(history: Sequence[dict[str, Any]], place: str) -> str:
    """What was out of the ordinary, and how often."""
    counts: Counter[str] = Counter()
    for row in history:
        counts.update({k: v for k, v in row.get("events", {}).items() if k.startswith(place)})
    said = [f"{name.partition(': ')[2]}: {count}" for name, count in counts.items()]
    return ", ".join(said) or DASH
