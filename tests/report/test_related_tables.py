"""The page of related work: protected subspaces, tasks that return, masks."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from table_records import fake_record, three_seeds

from stamp_core.data.dataset import load_dataset
from stamp_core.report import figures, tables
from stamp_core.results.records import Record


def run(sweep: str, value: str, method: str, seed: int, final: float, **changes: Any) -> Record:
    """A run of a sweep, with final accuracies of both tasks."""
    return fake_record(method, seed, (final, final), sweep=[sweep, value], **changes)


def projected(value: str, seed: int, drifts: tuple[float | None, ...]) -> Record:
    """A run of GPM with the noted drift of each round."""
    notes = [{"notes": {} if drift is None else {"drift": drift}} for drift in drifts]
    return run("projection", value, "gpm_drift", seed, 0.5 + seed / 10, rounds=notes)


def returned(method: str, cycles: int, seed: int, final: float, **changes: Any) -> Record:
    """A run of two tasks that return."""
    record = run("cycles", str(cycles), method, seed, final, cycles=cycles, **changes)
    record.about["setting"] = {"name": "toy", "split": {"cycles": cycles}}
    return record


def masked(method: str, seed: int, final: float) -> Record:
    """A run with a fifth scoring, the accuracy of pixels, 40 points above the first one."""
    record = run("masks", "common", method, seed, final)
    for name, scores in record.scores.items():
        record.scores[name] = np.concatenate([scores, scores[:1] + 0.4])
    return record


PROTECTION = [
    projected("step", 0, (None, 0.2, 0.4)),
    projected("step", 1, (0.1, 0.1, 0.1)),
    projected("update", 0, (0.0, 0.0, 0.0)),
    projected("update", 1, (None, None, None)),
]
RETURNING = [  # with two cycles FedAvg is 10 points better, pFedDIL 20; its personal models 10 more
    returned(method, cycles, seed, 0.3 + gain * (cycles - 1) + seed / 10, personal=personal)
    for method, gain, personal in (("fedavg", 0.1, np.nan), ("pfeddil", 0.2, 0.1))
    for cycles in (1, 2)
    for seed in range(3)
]
MASKS = [
    masked(method, seed, base + seed / 10)
    for method, base in (("fedavg", 0.1), ("fbl", 0.4))
    for seed in range(3)
]


def test_moves_inside_are_a_mean_over_the_rounds_that_have_a_note() -> None:
    """Seeds 0 and 1: means 0.3 and 0.1, so 20 % and a deviation of 0.2 / sqrt 2."""
    table = tables.protection_table(PROTECTION)
    assert table.value.tolist() == ["step", "update"] and table.n.tolist() == ["2", "2"]
    assert table["update inside, %"].tolist() == ["20.0 ± 14.1", "0.0 (n = 1)"]
    assert table.accuracy.tolist() == 2 * ["55.0 ± 7.1"]


def test_every_model_has_a_row_with_its_accuracy_by_cycles() -> None:
    table = tables.returning_table(RETURNING).set_index("method")
    assert [*table.index] == ["fedavg (global)", "pfeddil † (global)", "pfeddil † (personal)"]
    assert table.loc["pfeddil † (personal)", "accuracy, cycles = 1"] == "50.0 ± 10.0"
    assert table.loc["pfeddil † (personal)", "accuracy, cycles = 2"] == "70.0 ± 10.0"
    assert table.loc["fedavg (global)", "accuracy, cycles = 2"] == "50.0 ± 10.0"
    # where the task is told, fake records are 20 points better
    assert table.loc["fedavg (global)", "task-incremental, last"] == "70.0 ± 10.0"


def test_masks_are_scored_by_intersection_over_union_and_by_pixels() -> None:
    table = tables.masks_table(MASKS).set_index("method")
    assert table.loc["fbl", "mean IoU"] == "50.0 ± 10.0"
    assert table.loc["fbl", "pixel accuracy"] == "90.0 ± 10.0"


def test_findings_name_whose_intervals_exclude_0() -> None:
    records = {"protection": PROTECTION, "returning": RETURNING, "masks": MASKS}
    items = tables.related_findings(records).splitlines()
    assert items[0] == (
        "- toy, accuracy with 2 cycles compared with one (n = 3): higher for fedavg (by 10.0 to "
        "10.0), pfeddil † (by 20.0 to 20.0), pfeddil † (personal models, by 20.0 to 20.0)."
    )
    assert (
        "- toy, mean IoU compared with fedavg (n = 3): higher for fbl (by 30.0 to 30.0)." in items
    )


def test_the_page_has_a_part_for_each_question(tmp_path: Path) -> None:
    records = {"protection": PROTECTION, "returning": RETURNING, "masks": MASKS}
    page = tables.write_related(records, tmp_path)
    text = page.read_text(encoding="utf-8")
    titles = ["Protected subspaces", "Returning tasks", "Masks", "Definitions"]
    assert [part.splitlines()[0] for part in text.split("\n## ")[1:]] == titles
    assert "| fbl | 3 | **+30.0 (+30.0 to +30.0)** |" in text


def test_the_figure_of_protection_shows_both_measures_by_value() -> None:
    captions = {"projection": ("what is projected", "step")}
    upper, lower = figures.protection(PROTECTION, captions).axes
    assert upper.lines[0].get_ydata() == pytest.approx([20, np.nan], nan_ok=True)
    assert lower.lines[0].get_ydata() == pytest.approx([55, 55])
    assert [tick.get_text() for tick in lower.get_xticklabels()] == ["step", "update"]
    plt.close("all")


def test_the_figure_of_cycles_shows_the_runs_with_the_most() -> None:
    (axis,) = figures.returning(RETURNING).axes
    lines = {line.get_label(): line for line in axis.lines}
    assert len(lines["fedavg"].get_xdata()) == 4 and "pfeddil † (personal)" in lines
    (end,) = (line for line in axis.lines if len(set(line.get_xdata())) == 1)
    assert end.get_xdata()[0] == 2.5  # two tasks in a cycle
    plt.close("all")


def test_scores_of_masks_are_labelled_so() -> None:
    assert figures.accuracy(MASKS).axes[0].get_ylabel() == "mean IoU, %"
    assert figures.accuracy(RETURNING[:3]).axes[0].get_ylabel() == "accuracy, %"
    plt.close("all")


def test_scenes_have_one_colour_in_training_and_all_in_testing() -> None:
    dataset = load_dataset({"source": "scenes", "train_per_class": 1, "test_per_class": 1})
    (axis,) = figures.scenes(dataset).axes
    pixels = np.asarray(axis.images[0].get_array())
    height = pixels.shape[0] // 4
    colours = [
        {tuple(p) for p in pixels[row * height : (row + 1) * height, :34].reshape(-1, 3)}
        for row in (1, 3)  # the masks of the first class
    ]
    # with the background and the white frame
    assert [len(each) for each in colours] == [3, 5]
    plt.close("all")


def test_a_reconstruction_is_marked_wherever_its_numbers_stand(tmp_path: Path) -> None:
    """In tables, sentences, labels and captions; in files for programs it has its name."""
    runs = [*three_seeds("fedavg"), *three_seeds("srfdil", [(0.8, 0.9)] * 3)]
    page, csv, _ = (path.read_text() for path in tables.write_results(runs, tmp_path))
    assert "| srfdil † | 3 |" in page and "higher for srfdil † (by" in page
    assert "† marks a method that is reconstructed" in page and "†" not in csv
    figure = figures.forgetting(runs)
    labels = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert labels == ["fedavg", "srfdil †"]
    assert "†: reconstructed" in figure.legends[0].get_title().get_text()
    plt.close("all")
