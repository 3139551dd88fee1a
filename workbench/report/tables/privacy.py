"""The page of privacy: accuracy under noise, matching on projections, and gradient inversion."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from stamp_core.results.records import Record
from workbench.report.frames import projection_frame, run_frame
from workbench.report.tables import page
from workbench.report.text import epsilon_text, mean_std

# a method, and the one that lacks nothing but what the pair is about
PAIRS = (
    ("fedomg", "fedavg"),
    ("stamp", "stamp_mean"),
    ("stamp_mean", "replay"),
    ("stamp", "replay"),
)
_MEASURES = {"accuracy": "main_accuracy", "forgetting": "main_forgetting"}
_SCORES = {"psnr": "PSNR, dB", "ssim": "SSIM", "identified": "identified"}
Spent = Mapping[tuple[str, str], float]


def noise_differences(records: Sequence[Record]) -> pd.DataFrame:
    """One row a setting, pair, value and measure: what matching changes under noise."""
    rows = run_frame(records)
    found = []
    for pair in PAIRS:
        own = rows[rows.method.isin(pair)]
        by = ["setting", "value"]
        found.append(page.paired_differences(own, "method", [pair[1]], by, _MEASURES))
    numbers = [pairs for pairs in found if len(pairs)]  # an empty one would make them objects
    return pd.concat(numbers, ignore_index=True)


def noise_table(records: Sequence[Record], spent: Spent) -> pd.DataFrame:
    """One row a setting and value as text: ε where it is known, and each method's accuracy."""
    rows = run_frame(records)
    rows["ε"] = [epsilon_text(spent.get(key)) for key in zip(rows.setting, rows.value, strict=True)]
    rows = rows.rename(columns={"value": "noise multiplier"})
    return _accuracies(rows, ["setting", "noise multiplier", "ε"], "method", "{}")


def projection_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a setting and method of `projection_frame`, as text: accuracy by k, and exact."""
    numbers = rows[rows.value != "exact"].assign(k=lambda each: each.value.astype(int))
    table = _accuracies(numbers, ["setting", "method"], "k", "k = {}")
    exact = rows[rows.value == "exact"].groupby(["setting", "method"]).main_accuracy.agg(mean_std)
    return table.assign(exact=[exact[row.setting, row.method] for row in table.itertuples()])


def _accuracies(rows: pd.DataFrame, keys: Sequence[str], by: str, heading: str) -> pd.DataFrame:
    """`page.accuracy_table` with a row for each combination of keys."""
    joined = rows[list(keys)].agg(" ".join, axis=1)
    table = page.accuracy_table(rows.assign(joined=joined), ["joined", *keys], by, heading)
    return table.drop(columns="joined")


def write_privacy(
    noisy: Sequence[Record],
    projected: Sequence[Record],
    exact: Sequence[Record],
    spent: Spent,
    inversion: Sequence[pd.DataFrame],
    folder: Path,
) -> Path:
    """The file written, privacy.md; `inversion`: cases, contrasts, windows, gains of rounds."""
    pairs = noise_differences(noisy)
    pairs["pair"] = [f"{pair.method} - {pair.base}" for pair in pairs.itertuples()]
    accuracy = pairs[pairs.measure == "accuracy"].assign(base="the method without it, in accuracy")
    rows = projection_frame(projected, exact)
    keys = ["setting", "method"]
    sizes = page.paired_differences(rows, "value", ["exact"], keys).assign(base="exact matching")
    parts = [
        *("# Privacy", page.describe_runs(noisy), "## Noise"),
        page.markdown(noise_table(noisy, spent)),
        *page.difference_sections(accuracy, ["setting", "pair"], "value"),
        *("## Matching on projections", page.describe_runs(projected)),
        page.markdown(projection_table(rows)),
        *page.difference_sections(sizes, keys, "value", "k = {}"),
    ]
    if inversion:
        parts += ["## Inversion", *_inversion_section(*inversion)]
    parts += ["## Definitions", page.definitions("Intervals")]
    return page.write_parts(folder / "privacy.md", parts)


def _inversion_section(
    cases: pd.DataFrame, contrasts: pd.DataFrame, windows: pd.DataFrame, gains: pd.DataFrame
) -> list[str]:
    """Tables of the attacks: of single uploads, of pairs of them, and of several together."""
    pairs = contrasts[contrasts.score.isin(_SCORES)]
    pairs = pairs.assign(
        value=[_interval(*row) for row in pairs[["mean", "low", "high"]].to_numpy()]
    )
    shown = pairs.pivot_table(
        "value", ["one", "other", "kind"], "score", aggfunc="first", sort=False
    ).reset_index()[["one", "other", "kind", *_SCORES]]
    return [
        f"n = {cases.n.min()} clients; mean with its 95 % interval.",
        page.markdown(_scores(cases, ["name", "kind"]).rename(columns={"name": "upload"})),
        "Differences on the same clients and images:",
        page.markdown(shown.rename(columns=_SCORES)),
        "Several rounds inverted together:",
        page.markdown(_scores(windows, ["method", "rounds", "kind"])),
        "PSNR of several rounds together minus that of one, dB, on the same clients:",
        page.markdown(_gains(gains)),
    ]


def _scores(rows: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Each score with its interval and its gain over other images, as text."""
    table = rows[list(keys)].astype(str)
    for column, label in _SCORES.items():
        ends = rows[[column, f"{column}_low", f"{column}_high"]].to_numpy()
        table[label] = [_interval(*each) for each in ends]
        ends = rows[[f"{column}_gain", f"{column}_gain_low", f"{column}_gain_high"]].to_numpy()
        table[f"{label}: gain"] = [_interval(*each) for each in ends]
    if "labels" in rows:
        table["labels recovered"] = [f"{value:.2f}" for value in rows.labels]
    return table


def _gains(gains: pd.DataFrame) -> pd.DataFrame:
    """The gains of `gains_of_rounds` as text: a column for each number of rounds."""
    text = [_interval(*each) for each in gains[["mean", "low", "high"]].to_numpy()]
    gains = gains.assign(text=text, column=[f"{rounds} rounds" for rounds in gains.rounds])
    keys = ["method", "kind"]
    return gains.pivot_table("text", keys, "column", "first", sort=False).reset_index()


def _interval(mean: float, low: float, high: float) -> str:
    """A mean and the ends of its interval, where it has one."""
    return f"{mean:.2f}" + (f" ({low:.2f} to {high:.2f})" if low <= high else "")
