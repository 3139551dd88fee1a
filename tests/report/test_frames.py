"""Frames of runs, numbers as text, and paired differences, worked out by hand."""

import io
import itertools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from made_records import fake_record, selected, shifted, three_seeds

from stamp_core.results.records import Record
from workbench.report import frames, tables
from workbench.report.tables import page


def test_run_frame_has_one_row_per_run():
    """The numbers that no page of test_pages.py shows, or shows of equal rounds."""
    rounds = [{"bytes": {"up": 1000 * k, "down": 4000 * k}} for k in (1, 2)]
    rows = frames.run_frame([fake_record(rounds=rounds), fake_record("replay", 4)])
    assert rows[["method", "seed"]].to_numpy().tolist() == [["fedavg", 0], ["replay", 4]]
    expected = {"accuracy": 0.5, "forward_transfer": 0.1, "bytes_up": 1500, "bytes_down": 6000}
    assert rows.iloc[0][list(expected)].to_dict() == pytest.approx(expected)
    assert rows.model[0] == "global" and rows.filter(like="personal_").isna().all(axis=None)


@pytest.mark.parametrize("function", [frames.run_frame, frames.experience_frame])
def test_nothing_and_a_run_twice_are_refused_but_not_two_values_of_a_sweep(function):
    with pytest.raises(ValueError, match="no records"):
        function([])
    with pytest.raises(ValueError, match="toy-fedavg seed 0 is there twice"):
        function([fake_record(), fake_record()])
    assert len(function([fake_record(sweep=["kappa", value]) for value in ("0.1", "0.5")])) >= 2


def test_experience_frame_counts_experiences_through_all_cycles():
    rows = frames.experience_frame([fake_record(seed=3, local=0.9, cycles=2)])
    assert rows.experience.tolist() == [1, 2, 3, 4] and set(rows.seed) == {3}
    assert rows.accuracy.tolist() == pytest.approx([0.8, 0.5, (0.8 + 0.1) / 2, 0.5])
    assert rows.gap.tolist() == pytest.approx([0.1, 0.3, 0.1, 0.3])
    expected = [math.nan, 0.4, math.nan, 0.4]  # within its cycle
    assert rows.forgetting.tolist() == pytest.approx(expected, nan_ok=True)


def random_record(cycles: int) -> Record:
    """Three clients with random accuracies on four tasks; one has no images of one of them."""
    random = np.random.default_rng(cycles)
    record = fake_record(cycles=cycles)
    shapes = {"initial": (3, 4)} | dict.fromkeys(("global", "local"), (4 * cycles, 3, 4))
    drawn = {name: random.random((4, *shape), np.float32) for name, shape in shapes.items()}
    tests = random.integers(1, 99, (3, 4)) * (np.arange(12).reshape(3, 4) != 6)
    personal = np.full_like(drawn["global"], np.nan)
    return replace(record, scores={**drawn, "personal": personal}, tests=tests)


@pytest.mark.parametrize("cycles", [1, 2, 3])
def test_the_running_average_incremental_accuracy_is_that_of_a_naive_computation(cycles):
    record = random_record(cycles)
    a, n = record.scores["global"][0].astype(float), record.tests
    naive = []
    for experience in range(4 * cycles):
        stages = []
        for stage in range(experience // 4 * 4, experience + 1):
            seen = range(stage % 4 + 1)
            hits = [sum(n[u, i] * a[stage, u, i] for u in range(3)) / sum(n[:, i]) for i in seen]
            stages.append(sum(hits) / len(hits))
        naive.append(sum(stages) / len(stages))
    csv = pd.read_csv(io.StringIO(tables.results.accuracy_csv([record])))
    assert csv.columns[-1] == "average_incremental_accuracy"
    assert csv.average_incremental_accuracy.tolist() == pytest.approx(naive, abs=5.1e-5)
    final = frames.run_frame([record]).main_average_incremental_accuracy[0]
    assert final == pytest.approx(naive[-1]) and csv.iloc[-1, -1] == round(final, 4)
    running = frames.experience_frame([record]).accuracy[:4].expanding().mean()
    assert running.tolist() == pytest.approx(naive[:4])  # of the first cycle alone


def test_experience_frame_shows_the_main_or_the_personal_models():
    own = fake_record("local", personal_only=True)
    both = fake_record("fedala", local=0.9, group="personalised")
    both.scores["personal"] = both.scores["global"] / 2
    rows = frames.experience_frame([own, both])
    assert rows.model.tolist() == ["personal", "personal", "global", "global"]
    assert rows.accuracy.tolist() == pytest.approx([0.8, 0.5, 0.8, 0.5])
    assert rows.gap[:2].isna().all()
    rows = frames.experience_frame([both], personal=True)
    assert rows.accuracy.tolist() == pytest.approx([0.4, 0.25])
    assert rows.gap.tolist() == pytest.approx([0.1, 0.3])  # always of the global model
    assert set(rows.model) == {"personal"} and set(rows.group) == {"personalised"}


def test_a_selection_takes_a_client_the_seconds_of_all_divided_by_selections():
    """0.04 s for 20 selections are 2 ms each; 4 x 0.5 s less 0.04 s are 98 ms of training each."""
    rows = frames.coreset_frame([*selected("ocs", 7, (0.25,), odd=3), *selected(None, 0, (0.2,))])
    assert rows.loc[0, ["selection", "exemplars", "events"]].tolist() == ["OCS", 7, {"odd": 3}]
    assert rows.loc[0, ["selection_ms", "training_ms"]].tolist() == pytest.approx([2, 98])
    assert rows.selection[1] == "no memory" and np.isnan(rows.selection_ms[1])


def test_differences_are_from_the_main_model_of_the_base():
    own = [*three_seeds(), *three_seeds("fedala", shifted(0.1), personal=0.2)]
    assert set(tables.differences(own, "fedala").model) == {"global"}


def test_a_verdict_says_where_all_points_of_the_interval_lie():
    steps = np.arange(-8, 9) / 8  # exact
    for low, high in itertools.combinations_with_replacement(steps, 2):
        points = steps[(steps >= low) & (steps <= high)]
        naive = "equal" if np.all(np.abs(points) <= 0.5) else "open"
        naive = {(1,): "above", (-1,): "below"}.get((*np.unique(np.sign(points)),), naive)
        assert page.verdict(low, high) == naive, (low, high)


def test_one_column_has_one_set_of_seeds_and_more_seeds_a_table_of_their_own():
    records = [fake_record(method, seed) for method in ("fedavg", "gem") for seed in (0, 1)]
    records += [fake_record("replay", seed) for seed in (0, 1, 2)] + [fake_record("agem", 1)]
    runs = [record.run[1:] for record in frames.shared_seeds(records)]
    both = [(method, seed) for method in ("fedavg", "gem", "replay") for seed in (0, 1)]
    assert runs == [*both, ("agem", 1)]
    counts = tables.results_table(records)[page.FINAL, "n"]
    shared = {"fedavg": 2, "gem": 2, "replay": 2, "agem": 1}
    assert dict(counts.groupby("method").first()) == shared
    more = tables.results.more_seeds_table(records)[page.FINAL, "n"]
    assert dict(more.groupby("method").first()) == {"replay": 3}
    assert tables.results.more_seeds_table(records[:4]).empty


def test_a_seed_on_which_a_method_diverged_counts_for_no_method_of_its_setting():
    left = three_seeds("replay", diverged={"1": "client 0"})
    records = [*three_seeds(), left[0], left[2], *three_seeds(setting="other")]
    kept = [record.run for record in frames.without_diverged(records)]
    assert [run[2] for run in kept if run[0] == "toy"] == [0, 2, 0, 2]
    assert [run[2] for run in kept if run[0] == "other"] == [0, 1, 2]
