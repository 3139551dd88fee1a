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
_MEASURES = {**page.ENDPOINTS, "forgetting": "main_forgetting"}
_SCORES = {"psnr": "PSNR, dB", "ssim": "SSIM", "identified": "identified"}
Spent = Mapping[tuple[str, str], float]


def noise_differences(records: Sequence[Record]) -> pd.DataFrame:
    """One row a setting, pair, value and measure: what matching changes under noise."""
    rows, by = run_frame(records), ["setting", "value"]
    found = [
        page.paired_differences(rows[rows.method.isin(pair)], "method", pair[1:], by, _MEASURES)
        for pair in PAIRS
    ]
    numbers = [pairs for pairs in found if len(pairs)]  # an empty one would make them objects
    return pd.concat(numbers, ignore_index=True)


def noise_table(records: Sequence[Record], spent: Spent) -> pd.DataFrame:
    """One row a setting and value as text: ε where it is known, and each method's accuracy."""
    rows = run_frame(records)
    rows["ε"] = [epsilon_text(spent.get(key)) for key in zip(rows.setting, rows.value, strict=True)]
    rows = rows.rename(columns={"value": "noise multiplier"})
    return page.accuracy_table(rows, ["setting", "noise multiplier", "ε"], "{method}")


def projection_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a setting and method of `projection_frame`, as text: accuracy by k, and exact."""
    numbers = rows[rows.value != "exact"].assign(k=lambda each: each.value.astype(int))
    table = page.accuracy_table(numbers, ["setting", "method"], "k = {k}")
    exact = rows[rows.value == "exact"].groupby(["setting", "method"]).main_accuracy.agg(mean_std)
    return table.merge(exact.rename("exact").reset_index())


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
    judged = pairs[pairs.measure.isin(page.ENDPOINTS)].assign(base="the method without it")
    rows = projection_frame(projected, exact)
    keys = ["setting", "method"]
    sizes = page.paired_differences(rows, "value", ["exact"], keys).assign(base="exact matching")
    parts = [
        *("# Privacy", page.describe_runs(noisy), "## Noise"),
        page.markdown(noise_table(noisy, spent)),
        *page.difference_sections(judged, ["setting", "pair"], "{value}"),
        *("## Matching on projections", page.describe_runs(projected)),
        page.markdown(projection_table(rows)),
        *page.difference_sections(sizes, keys, "k = {value}"),
    ]
    if inversion:
        parts += ["## Inversion", *_inversion_section(*inversion)]
    parts += ["## Definitions", page.definitions("Intervals")]
    return page.write_parts(folder / "privacy.md", parts)


def _inversion_section(
    cases: pd.DataFrame, contrasts: pd.DataFrame, windows: pd.DataFrame, gains: pd.DataFrame
) -> list[str]:
    pairs = contrasts[contrasts.score.isin(_SCORES)]
    more = [f"{rounds} rounds" for rounds in gains.rounds]
    tables = {
        f"n = {cases.n.min()} clients; mean with its 95 % interval.": _scores(
            cases.assign(upload=cases.name), ["upload", "kind"]
        ),
        "Differences on the same clients and images:": _wide(
            pairs, ["one", "other", "kind"], pairs.score.map(_SCORES)
        ),
        "Several rounds inverted together:": _scores(windows, ["method", "rounds", "kind"]),
        "PSNR of several rounds together minus that of one, dB, on the same clients:": _wide(
            gains, ["method", "kind"], more
        ),
    }
    return [part for text, table in tables.items() for part in (text, page.markdown(table))]


def _scores(rows: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    table = rows[list(keys)].astype(str)
    for column, label in _SCORES.items():
        table[label] = _intervals(rows, column, f"{column}_low", f"{column}_high")
        gain = f"{column}_gain"
        table[f"{label}: gain"] = _intervals(rows, gain, f"{gain}_low", f"{gain}_high")
    if "labels" in rows:
        table["labels recovered"] = [f"{value:.2f}" for value in rows.labels]
    return table


def _wide(rows: pd.DataFrame, keys: Sequence[str], columns: Sequence[str]) -> pd.DataFrame:
    """Differences as text: a row per combination of keys, `columns` has the column of each."""
    rows = rows.assign(text=_intervals(rows, "mean", "low", "high"), column=columns)
    return rows.pivot_table("text", list(keys), "column", "first", sort=False).reset_index()


def _intervals(rows: pd.DataFrame, *columns: str) -> list[str]:
    """Of each row a mean and the ends of its interval, where it has one."""
    return [
        f"{mean:.2f}" + (f" ({low:.2f} to {high:.2f})" if low <= high else "")
        for mean, low, high in rows[list(columns)].to_numpy()
    ]
