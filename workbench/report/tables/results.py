"""The comparison of all methods: results.md and accuracy.csv."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from stamp_core.results.records import Record
from workbench.report import metrics
from workbench.report.frames import (
    GROUPS,
    UNIT,
    coreset_frame,
    experience_frame,
    machine,
    model_frame,
    relative_costs,
    run_frame,
    shared_seeds,
)
from workbench.report.ranks import rank_correlation
from workbench.report.tables import page, printed
from workbench.report.text import DASH, MB, mean_std, significant

_BASES = ("fedavg", "replay", "stamp")  # that the page compares all methods with
_BOUND = "joint"  # has the data of all clients: it is no method under a budget
_LEAST_ROOM = 5.0  # points between replay and joint training
_RECOGNISED = "synthesis accuracy"  # a round's note
_FEWEST = 5  # methods, below which an order says nothing
_MEASURES = {
    **page.ENDPOINTS,
    "forgetting": "main_forgetting",
    "learning accuracy": "main_learning_accuracy",
}
_SCORES = {  # and the columns of `run_frame` behind them
    **page.ENDPOINTS,
    "nearest mean": "nearest_mean",
    "personal final accuracy": "personal_accuracy",
    "personal average incremental accuracy": "personal_average_incremental_accuracy",
    "local accuracy": "local_accuracy",
    "task-incremental": "task_accuracy",
    "learning accuracy": "main_learning_accuracy",
    "forgetting": "main_forgetting",
    "forgetting (diagonal)": "main_forgetting_diagonal",
    "personal learning accuracy": "personal_learning_accuracy",
    "personal forgetting": "personal_forgetting",
    "worst client": "main_worst_client",
    "gap": "gap",
}
_COSTS: dict[str, page.Cell] = {
    "1000 images": page.average("images", 1000),
    "update length": page.average("update_length"),
    "MB up / round": page.average("bytes_up", MB),
    "MB down / round": page.average("bytes_down", MB),
    "MB setup": page.average("bytes_setup", MB),
    "disk MB": page.peak("disk"),
}
_MEASURED: dict[str, page.Cell] = {
    "s / round": page.average("client_seconds", figures=2),
    "s setup": page.average("setup_seconds", figures=2),
    "selection, ms": page.average("selection_ms", figures=2),
    "training, ms": page.average("training_ms", figures=2),
    "memory MB": page.peak("memory"),
    "GPU MB": page.peak("gpu"),
}
_MATCHED = {  # columns and the note behind each; products are relative to |reference|²
    "gradients": "gradient count",
    "worst product, mean": "worst_product_reference",
    "worst product, matched": "worst_product",
    "length": "length",
    "cosine": "cosine",
    "gradients with weight": "support",
}


def results_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row an experiment: mean, std and n of accuracies and forgetting, as numbers in %.

    Over the seeds that most methods have; with all seeds the others are in `more_seeds_table`. See
    `page.score_table` on how to sort, draw and print it; `page.show` shows it as text.
    """
    return _score_table(shared_seeds(records))


def more_seeds_table(records: Sequence[Record]) -> pd.DataFrame:
    """`results_table` over all seeds, of the methods that have more of them than most."""
    fewer = Counter(record.run[:2] for record in shared_seeds(records))
    counts = Counter(record.run[:2] for record in records)
    more = [record for record in records if counts[record.run[:2]] > fewer[record.run[:2]]]
    return _score_table(more) if more else pd.DataFrame()


def results_text(table: pd.DataFrame) -> pd.DataFrame:
    """A table of results as text, with the paper's numbers of the setting or of CIFAR-100."""
    text = page.score_text(table)
    label, data = printed.table_of(text.setting.iloc[0]) or printed.MAIN
    return text.assign(**{f"paper ({data})": [printed.scores(m, label, data) for m in text.method]})


def cost_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row an experiment as text: images of a run, bytes of a mean round, peak of the disk."""
    rows = run_frame(_ordered(shared_seeds(records)))
    return page.group_table(rows, ["setting", "group", "method"], _COSTS)


def measured_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row an experiment as text: its time and memory on the machine that trained it."""
    rows = coreset_frame(_ordered(records))
    return page.group_table(rows, ["setting", "method", "value"], _MEASURED)


def _score_table(records: Sequence[Record]) -> pd.DataFrame:
    keys = ["setting", "group", "method", "verified", "model"]
    return page.score_table(run_frame(_ordered(records)), keys, _SCORES)


def _ordered(records: Sequence[Record]) -> list[Record]:
    settings = list(dict.fromkeys(record.run[0] for record in records))
    return sorted(records, key=lambda r: (settings.index(r.run[0]), GROUPS.index(r.group)))


def differences(records: Sequence[Record], base: str = "fedavg") -> pd.DataFrame:
    """The paired differences of each method's models from the main model of `base`."""
    return model_differences(run_frame(records), [base]).drop(columns="base")


def model_differences(rows: pd.DataFrame, bases: Sequence[str]) -> pd.DataFrame:
    """`differences` of the runs of a frame from each of `bases`."""
    return page.paired_differences(model_frame(rows), "method", bases, ["setting"], _MEASURES)


def matching_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row an experiment and side (spatial, temporal) as text: means over rounds and seeds."""
    table = []
    for setting, method in dict.fromkeys(record.run[:2] for record in records):
        runs = [record for record in records if record.run[:2] == (setting, method)]
        history = [row for record in runs for row in record.history]
        for side in ("spatial", "temporal"):
            noted = [row["notes"] for row in history if f"{side} gap" in row.get("notes", {})]
            if noted:
                labels = {"setting": setting, "method": method, "where": side, "n": str(len(runs))}
                events = [row["events"] for row in history]
                table.append(labels | _matching_cells(side, pd.DataFrame(noted), events))
    return pd.DataFrame(table)


def _matching_cells(side: str, notes: pd.DataFrame, events: list[dict[str, int]]) -> dict[str, str]:
    """The means of one side's notes, the largest gap, and what happened how often."""
    counts = Counter[str]()
    for each in events:
        counts.update({k.partition(": ")[2]: n for k, n in each.items() if k.startswith(side)})
    means = {name: notes[f"{side} {key}"].mean(skipna=False) for name, key in _MATCHED.items()}
    return {
        "rounds": str(len(notes)),
        **{name: f"{value:.2f}" for name, value in means.items()},
        "duality gap": f"{notes[f'{side} gap'].max():.0e}",
        "events": ", ".join(f"{event}: {n}" for event, n in counts.items()) or DASH,
    }


def accuracy_csv(records: Sequence[Record]) -> str:
    """Accuracies, forgetting and gap of every run after each experience, as fractions."""
    curves: str = experience_frame(records).round(4).to_csv(index=False, lineterminator="\n")
    return curves


def write_results(records: Sequence[Record], folder: Path) -> list[Path]:
    """The files written: results.md to read and accuracy.csv for programs.

    Beside them measured.md, which no other file depends on: it differs with every training.
    """
    return [
        page.write_page(folder / "results.md", "Results", records, _section),
        page.write_parts(folder / "accuracy.csv", [accuracy_csv(records)]),
        write_measured(records, folder),
    ]


def write_measured(records: Sequence[Record], folder: Path) -> Path:
    """Write measured.md: which machines trained these records, how long it took, in what memory."""
    machines = Counter(machine(record) for record in records)
    which = "; ".join(f"{name}: {count} runs" for name, count in machines.items())
    table, title = page.markdown(measured_table(records)), "Seconds and memory"
    parts = [f"# {title}", which, table, page.definitions(title)]
    return page.write_parts(folder / "measured.md", parts)


def _section(records: Sequence[Record]) -> list[str]:
    data = records[0].about["setting"].get("data", {})  # not in records from elsewhere
    paper = data.get("source") not in ("features", "subset")  # other images, fewer classes
    rows, table = run_frame(records), _score_page(results_table(records), paper)
    costs = page.markdown(cost_table(records).drop(columns=["setting", "n"]))
    pairs = model_differences(rows, _BASES)
    sections = page.difference_sections(pairs, ["method", "model"], "{measure}")
    more = []
    if len(seeds := more_seeds_table(records)):
        more = ["Methods with more seeds:", _score_page(seeds, paper)]
    budgets = page.markdown(budget_table(run_frame(shared_seeds(records))))
    shown = [table, *more, *room_section(rows), *order_section(rows), *sections]
    return [*shown, "Costs:", costs, "Under a budget:", budgets, *synthesis_section(records)]


def _score_page(table: pd.DataFrame, paper: bool) -> str:
    text = results_text(table) if paper else page.score_text(table)
    return page.markdown(text.drop(columns="setting"))


# --- the order of methods beside the paper's


def room_section(rows: pd.DataFrame) -> list[str]:
    """A warning where joint training is hardly above replay: other methods lie between the two."""
    scores = {
        method: {row.seed: 100 * row.main_accuracy for row in runs.itertuples()}
        for method, runs in rows.groupby("method")
    }
    room = metrics.paired_difference(scores.get(_BOUND, {}), scores.get("replay", {}))["mean"]
    if not room < _LEAST_ROOM:  # or undefined
        return []
    return [f"Joint training is {room:.1f} points above replay: too little room to rank methods."]


def order_section(rows: pd.DataFrame) -> list[str]:
    """The ranks of a setting's methods here and in its table in the paper, if many have both."""
    table = printed.table_of(rows.setting.iloc[0])
    if table is None:
        return []
    groups = rows.groupby("method").main_accuracy
    scores = pd.DataFrame({"ours": groups.mean(), "paper": printed.rows(*table).accuracy}).dropna()
    if len(scores) < _FEWEST:
        return []
    scores = scores.sort_values("paper", ascending=False)
    ranks = scores.rank(ascending=False)
    shown = {
        "method": scores.index,
        "accuracy": [mean_std(groups.get_group(method)) for method in scores.index],
        "rank, ours": ranks.ours.map("{:g}".format),
        "paper": scores.paper.map("{:.1f}".format),
        "rank, paper": ranks.paper.map("{:g}".format),
    }
    found = rank_correlation(scores.ours, scores.paper)
    agreement = (
        f"Spearman's ρ between the two orders is {found['rho']:+.2f} "
        f"({found['low']:+.2f} to {found['high']:+.2f}, n = {len(scores)} methods)."
    )
    return ["Order beside the paper's:", page.markdown(pd.DataFrame(shown)), agreement]


# --- images that a server synthesises


def synthesis_section(records: Sequence[Record]) -> list[str]:
    """How many synthesised images the server's model recognises, where a method has some."""
    rows = pd.DataFrame(
        {"method": record.run[1], "task": row["experience"] + 1, "share": row["notes"][_RECOGNISED]}
        for record in shared_seeds(records)
        for row in record.history
        if _RECOGNISED in row.get("notes", {})
    )
    if rows.empty:
        return []
    shares = rows.pivot_table(index="method", columns="task", values="share", sort=False) * 100
    table = shares.map("{:.0f}".format).rename(columns="after task {}".format).reset_index()
    return ["Synthesised images that the model recognises, %:", page.markdown(table)]


# --- budgets: of images, of bytes, of what a client keeps


def budget_table(rows: pd.DataFrame) -> pd.DataFrame:
    """For each cost the methods that are more accurate than all that cost less, as text.

    `rows` is a `run_frame` of one setting. From a row's cost on its method is the most accurate,
    until the cost of the next row. The difference is that from the row before, over common seeds.
    """
    rows = rows[rows.main_accuracy.notna() & (rows.method != _BOUND)]
    relative = {f"{name}, {UNIT} = 1": cost for name, cost in relative_costs(rows).items()}
    costs = {**relative, "kept by a client, kB": rows.disk / 1e3}
    return pd.DataFrame(line for cost in costs.items() for line in _frontier(rows, *cost))


def _frontier(rows: pd.DataFrame, name: str, costs: pd.Series) -> Iterator[dict[str, str]]:
    """A line for each method that is more accurate than all that cost no more."""
    groups = rows.assign(cost=costs).groupby("method")
    table = groups[["cost", "main_accuracy"]].mean().dropna().round({"cost": 2})
    table = table.sort_values(["cost", "main_accuracy"], ascending=[True, False])
    before: dict[int, float] = {}
    best = -1.0
    for method, (cost, accuracy) in zip(table.index, table.to_numpy(), strict=True):
        if accuracy <= best:
            continue
        runs = groups.get_group(method)
        scores = dict(zip(runs.seed, 100 * runs.main_accuracy, strict=True))
        pair = metrics.paired_difference(scores, before)
        gained = "{mean:+.1f} ({low:+.1f} to {high:+.1f})".format(**pair)
        yield {
            "budget": name,
            "from": significant(cost),
            "method": str(method),
            "n": str(len(runs)),
            "accuracy": mean_std(runs.main_accuracy),
            "above the row before": gained if pair["n"] > 1 else DASH,
        }
        before, best = scores, accuracy
