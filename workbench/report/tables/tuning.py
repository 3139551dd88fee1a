"""The page of tuning: every method's candidates, and where the chosen one lies among them."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd

from stamp_core.results.records import Record
from workbench.report.frames import run_frame
from workbench.report.tables import page
from workbench.report.text import DASH, mean_std

CHOICES = ("tuning", "extended")  # candidates, and what their lists were extended by
KINDS = (*CHOICES, "explored")
ALL = "all"  # settings together
Tried = tuple[str, str, str, str]  # kind, method, candidate, setting


def tuning_frame(
    records: Sequence[Record], tried: Sequence[Tried], setting: str = ALL
) -> pd.DataFrame:
    """One row a method and candidate: mean accuracy by setting, and over settings.

    `setting` is what the candidates were tuned for: one, or all together. The accuracy is that of
    the personal models where there are any, and undefined without records.
    """
    keys = ["kind", "method", "candidate", "setting"]
    rows = pd.DataFrame(columns=[*keys, "score"])  # if every candidate diverges
    if records:
        rows = run_frame(records).rename(columns={"sweep": "kind", "value": "candidate"})
        rows["score"] = rows.personal_accuracy.fillna(rows.main_accuracy)
    means = rows.groupby(keys, sort=False).score.agg(lambda values: values.mean(skipna=False))
    table = means.reindex(pd.MultiIndex.from_tuples(tried, names=keys)).unstack(sort=False)
    table["mean"] = table.mean(axis=1, skipna=False)  # a setting on which it diverges counts
    table = table.reset_index()
    table.insert(2, "setting", setting)
    return table


def _choose(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the best candidate of each method, among which explored ones are not."""
    means = frame["mean"].where(frame.kind.isin(CHOICES))
    best = means.groupby([frame.method, frame.setting]).transform("max")
    return frame.assign(chosen=means == best)


def write_tuning(
    records: Sequence[Record],
    tried: Sequence[Tried],
    seeds: Sequence[int],
    folder: Path,
    known: Collection[tuple[str, str, str]],
    setting: str = ALL,
) -> list[Path]:
    """The files written: tuning.md to read, tuning.csv for the test of the presets.

    A candidate that was `tried` and has no records diverged. Rows of `known` kinds, methods and
    candidates that were not tried stay as they are in an earlier tuning.csv, and so do those for
    another `setting`.
    """
    frame = tuning_frame(records, tried, setting).round(4)  # as the file keeps them
    if (folder / "tuning.csv").exists():
        earlier = pd.read_csv(folder / "tuning.csv").drop(columns="chosen")
        stay = _staying_rows(earlier, frame, known, setting)
        frame = pd.concat([stay, frame], ignore_index=True)
    frame = _choose(frame)
    return [
        page.write_parts(folder / "tuning.md", _page_parts(frame, seeds)),
        page.write_parts(folder / "tuning.csv", [frame.to_csv(index=False)]),
    ]


def _page_parts(frame: pd.DataFrame, seeds: Sequence[int]) -> Iterator[str]:
    """Title and definitions, what was chosen, the candidates, and the explored ones if any."""
    yield from ("# Tuning", page.definitions("Tuning"))
    yield f"Seeds: {', '.join(map(str, seeds))}."
    yield page.markdown(chosen_table(frame))
    shown = _as_text(frame)
    is_explored = shown.pop("kind") == KINDS[-1]
    tuned, explored = shown[~is_explored], shown[is_explored].drop(columns="chosen")
    first = {method: place for place, method in enumerate(tuned.method.unique())}
    tuned = tuned.sort_values("method", key=lambda names: names.map(first), kind="stable")
    yield from ("## Candidates", page.markdown(tuned))
    if len(explored):
        yield from ("## Explored", page.definitions("Explored"), page.markdown(explored))


def _staying_rows(
    earlier: pd.DataFrame, new: pd.DataFrame, known: Collection[tuple[str, str, str]], setting: str
) -> pd.DataFrame:
    """The rows of `known` candidates that were not tried again, or were for another setting."""
    names = ["kind", "method", "candidate"]
    keys, again = (pd.MultiIndex.from_frame(frame[names]) for frame in (earlier, new))
    replaced = keys.isin(again)
    if setting != ALL:
        replaced &= earlier.setting.isin([setting, ALL])
    return earlier[keys.isin(list(known)) & ~replaced]


def _as_text(frame: pd.DataFrame) -> pd.DataFrame:
    """A tuning frame as a page shows it, one row a candidate."""
    alone = frame.setting != ALL
    shown = frame.assign(chosen=frame.setting.where(alone, "yes").where(frame.chosen, ""))
    for name in frame.columns[4:-1]:
        shown[name] = [mean_std([value]) for value in frame[name]]
        tuned = frame.setting.isin([ALL, name]) | (name == "mean")
        shown.loc[frame["mean"].isna() & frame[name].isna() & tuned, name] = "diverges"
    shown.loc[alone, "mean"] = DASH
    texts = shown.drop(columns="setting").groupby(["kind", "method", "candidate"], sort=False)

    def joined(cells: pd.Series) -> str:
        return ", ".join(cell for cell in cells if cell not in ("", DASH)) or cells.iloc[0]

    return texts.agg(joined).reset_index()  # of settings that were tuned one at a time


def chosen_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a method and setting as text: what was chosen, its edges, what is better explored."""
    rows = []
    for method, every in frame.groupby("method", sort=False):
        for setting, tried in every.groupby("setting"):
            if tried.chosen.any():
                rows.append({"method": method, "setting": setting, **_chosen_cells(tried)})
    return pd.DataFrame(rows)


def _chosen_cells(tried: pd.DataFrame) -> dict[str, str]:
    """The cells of a method whose candidates were `tried` in a setting."""
    best = tried[tried.chosen].iloc[0]
    better = tried[(tried.kind == KINDS[-1]) & (tried["mean"] > best["mean"])]
    better = better.sort_values("mean", ascending=False).head(1)
    return {
        "candidates": str(len(tried)),
        "chosen": best.candidate,
        "accuracy": mean_std([best["mean"]]),
        "at an edge": ", ".join(edges_of(best.candidate, tried.candidate)) or DASH,
        "better, explored": DASH if better.empty else better.candidate.iloc[0],
    }


def edges_of(chosen: str, tried: Iterable[str]) -> Iterator[str]:
    """The keys of a candidate with the smallest or largest number of those that were tried.

    Of a key with one number there is no list, and 0, which takes a term away, is no edge.
    """
    numbers = [_numbers(candidate) for candidate in tried]
    for key, number in _numbers(chosen).items():
        others = {each[key] for each in numbers if key in each}
        if len(others) > 1 and number and number in (min(others), max(others)):
            yield f"{'smallest' if number == min(others) else 'largest'} {key}"


def _numbers(candidate: str) -> dict[str, float]:
    """The numbers of a candidate by key; words and null are left out."""
    pairs = (pair.rpartition(" ") for pair in candidate.split(", "))
    return {key: float(text) for key, _, text in pairs if text[:1].isdigit()}
