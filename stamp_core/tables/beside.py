"""Our runs of the paper's settings beside what its tables print, method by method."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from stamp_core import config, metrics
from stamp_core.records import Record, total
from stamp_core.tables.details import details_sections
from stamp_core.tables.paper import COMPONENTS, DASH, printed, settings, with_deviation
from stamp_core.tables.runs import MB, amount, frame, markdown, percent, results

Row = dict[str, str]

GB = 1e9
TABLES = {
    "tab:baselines-task2": "2 classes a task",
    "tab:baselines-task20": "20 classes a task",
    "tab:component-effectiveness": "components of STAMP",
}
SCORES = {"accuracy": "accuracy", "AF": "forgetting"}  # columns and the numbers behind
COSTS = {
    "s / round": "seconds",
    "MB up": "mb_up",
    "MB down": "mb_down",
    "GPU GB": "gpu_gb",
    "disk MB": "disk_mb",
}
NOTE = f"""\
What the paper prints, beside our runs of the same settings. Headings name its tables as its source
does; {DASH} is not printed, not run, or a method that is not here. Its numbers are mean ± standard
deviation over 5 trials, ours over n seeds; differences are ours minus the paper's, in percentage
points. They test nothing, as more than the method differs:

- *Accuracy*: ours is final and class-incremental (arg-max over all classes), in %, of the *model*
  that is named: the global one, or the clients' own where a method has no other. *Personal* is that
  of the clients' own models, each on all tasks of its client. The paper means the global model and
  does not say which classes are allowed as answers; in its public code the global accuracy of
  FedALA, FedAS and FedDBE is that of personal models.
- *AF* is forgetting by the paper's formula, of the same model; lower is better.
- *s / round*: the paper's are from other hardware, of one client or of all; ours are the clients'
  own work in a mean round, added up over clients.
- *MB up* and *MB down* are sent by and to one client in a mean round, decimal, without what travels
  before the first one. What the paper's sizes of a model are: see Networks below.
- *GPU GB* is the peak of a run, {DASH} without a GPU; *disk MB* is that of the client that keeps
  most. Ours are the largest of all seeds.
- *stamp* is what works best here, *stamp_paper* the text of the paper, literally.

Where the paper disagrees with itself: among the components, FedAvg's AF on CIFAR-100 and STAMP's
deviation on ImageNet-1K are not those of the same setting among the baselines. LANDER's MB up on
ImageNet-1K with 2 classes a task are printed in seconds (here {DASH}); FedWeIT's AF there has no
deviation.
"""


def beside(place: str, records: Sequence[Record]) -> pd.DataFrame:
    """One row a method of one of the paper's tables, as text: accuracy and forgetting."""
    return _table(place, records, _scores)


def costs_beside(place: str, records: Sequence[Record]) -> pd.DataFrame:
    """One row a method of one of the paper's tables, as text: time, traffic, memory and disk."""
    return _table(place, records, _prices)


def _table(
    place: str, records: Sequence[Record], columns: Callable[[pd.Series, list[Record]], Row]
) -> pd.DataFrame:
    """Data, method and n, then what `columns` makes of the paper's row and our runs."""
    found = []
    for data, setting in settings(place).items():
        theirs, here = printed(place, data), [r for r in records if r.cell[0] == setting]
        for method in _methods(place, data, here):
            ours = [record for record in here if record.cell[1] == method]
            named = {"data": data, "method": method, "n": f"{len(ours) or DASH}"}
            found.append(named | columns(theirs.reindex([method]).iloc[0], ours))
    return pd.DataFrame(found)


def _methods(place: str, data: str, records: Sequence[Record]) -> list[str]:
    """The paper's methods, then ours; of components the paper's alone."""
    theirs = list(printed(place, data).index)
    if place == COMPONENTS[0]:
        return theirs
    ours = config.read()[config.PAPER]["method"]
    return list(dict.fromkeys([*theirs, *ours, *(record.cell[1] for record in records)]))


def _scores(theirs: pd.Series, ours: list[Record]) -> Row:
    """The columns of `beside` for one method."""
    runs = frame(ours).to_dict("list") if ours else {}
    row = {"model": runs["score_model"][0] if ours else DASH}
    for name, number in SCORES.items():
        values, stated = runs.get(f"judged_{number}", []), theirs[number]
        row[f"{name}, paper"] = with_deviation(stated, theirs[f"{number}_std"])
        row[f"{name}, ours"] = percent(values)
        difference = 100 * metrics.describe(values)["mean"] - stated
        row[f"{name}, difference"] = DASH if np.isnan(difference) else f"{difference:+z.1f}"
    return row | {"personal accuracy, ours": percent(runs.get("personal_accuracy", []))}


def _prices(theirs: pd.Series, ours: list[Record]) -> Row:
    """The columns of `costs_beside` for one method."""
    spent = _spent(ours) if ours else dict.fromkeys(COSTS.values(), np.nan)
    row = {}
    for name, number in COSTS.items():
        row[f"{name}, paper"] = _size(theirs[number], 6)  # as it is typed
        row[f"{name}, ours"] = _size(spent[number], 3)
    return row


def _spent(ours: list[Record]) -> dict[str, float]:
    """What the runs of a method took, in the paper's units."""
    rows = frame(ours)
    return {
        "seconds": rows.client_seconds.mean(),
        "mb_up": float(np.mean([_each(record, "up", "answered") for record in ours])) / MB,
        "mb_down": float(np.mean([_each(record, "down", "asked") for record in ours])) / MB,
        "gpu_gb": rows.gpu.max() / GB or np.nan,  # 0: there was none
        "disk_mb": rows.disk.max() / MB,
    }


def _each(record: Record, way: str, clients: str) -> float:
    """Bytes one way of one client in a mean round."""
    return total(record.history, "bytes", way) / (total(record.history, clients) or np.nan)


def _size(value: float, figures: int) -> str:
    """An amount, or a dash where there is none."""
    return DASH if np.isnan(value) else amount(value, figures)


def paper_page(records: Sequence[Record]) -> str:
    """paper.md: every table of the paper with ours beside, and what has no table there."""
    parts = ["# The paper's tables and ours", NOTE.strip()]
    for place, title in TABLES.items():
        parts += [f"## {title[0].upper()}{title[1:]} ({place})", *_sections(place, records)]
    told = {setting for place in TABLES for setting in settings(place).values()}
    if rest := [record for record in records if record.cell[0] not in told]:
        parts += ["## Settings without a printed table", markdown(results(rest))]
    return "\n\n".join([*parts, *details_sections()]) + "\n"


def _sections(place: str, records: Sequence[Record]) -> list[str]:
    """Accuracies and costs of one of the paper's tables under a heading for each data set."""
    scores, prices = beside(place, records), costs_beside(place, records)
    found = []
    for data, setting in settings(place).items():
        rows, spent = (table[table.data == data] for table in (scores, prices))
        found += [f"### {data}, setting `{setting}`", markdown(rows.drop(columns="data"))]
        if place != COMPONENTS[0]:  # whose costs are not printed
            found += ["What it costs:", markdown(spent.drop(columns="data"))]
    return found


def write_paper(records: Sequence[Record], folder: Path) -> Path:
    """The file written: paper.md."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "paper.md"
    path.write_text(paper_page(records), encoding="utf-8", newline="\n")
    return path
