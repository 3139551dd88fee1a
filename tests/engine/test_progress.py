"""What a training shows and tells while it runs; neither changes a number."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import small
from small import ROUNDS, kept, plans, run, tiny

from stamp_core import load_experiment, read_params
from stamp_core.core.processes import progress_mode
from stamp_core.engine import train as engine
from stamp_core.engine.progress import Logger, Progress, format_seconds
from stamp_core.pipeline.sweeps import light_experiment


class Told:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int]] = []
        self.accuracies: dict[tuple[int, int], dict[str, float]] = {}
        self.values: list[dict[str, float]] = []

    def on_round(self, seed: int, round: int, values: Mapping[str, float]) -> None:
        """Keep which round it was, and its numbers."""
        self.rounds.append((seed, round))
        self.values.append(dict(values))

    def on_experience(self, seed: int, experience: int, values: Mapping[str, float]) -> None:
        """Keep the accuracies."""
        self.accuracies[seed, experience] = dict(values)


class Full:
    """A logger whose disk is full after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def on_round(self, seed: int, round: int, values: Mapping[str, float]) -> None:
        """Fail if nothing is left."""
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device")

    def on_experience(self, seed: int, experience: int, values: Mapping[str, float]) -> None:
        """Nothing."""


# ------------------------------------------------------------------ shown


@pytest.mark.parametrize("mode", ["bar", "lines", "none"])
def test_a_training_shows_a_bar_or_lines_or_nothing(
    mode: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAMP_PROGRESS", mode)
    run(tiny())
    out, err = capfd.readouterr()
    assert bool(out) == (mode == "lines")
    assert ("tiny fedavg: 100%" in err and "accuracy" in err) == (mode == "bar")
    assert mode == "bar" or not err


def test_a_line_names_experiment_and_seed_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the end nothing is left."""
    monkeypatch.setenv("STAMP_PROGRESS", "lines")
    experiment = tiny()
    engine.train(experiment, plans(experiment, 0, 1), 1, "cpu")
    lines = capfd.readouterr().out.splitlines()
    place = [(seed, e) for seed in (0, 1) for e in (1, 2, 3)]
    for (seed, experience), line in zip(place, lines, strict=True):
        start = rf"tiny fedavg  seed {seed}  experience {experience}/3  accuracy +\d+\.\d%  "
        left = "" if (seed, experience) == (1, 3) else r", [\d.]+ s left"
        assert re.fullmatch(rf"{start}[\d.]+ s{left}", line)


def test_a_resumed_training_estimates_from_its_own_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of ten took 3 s each; six are left."""
    progress = Progress("lines", "digits stamp", rounds=10, done=2)
    progress.round()
    progress.round()
    monkeypatch.setattr("time.perf_counter", lambda: progress.started + 6)
    assert progress.times() == "6.0 s, 18 s left"


def test_a_swept_value_is_in_the_title() -> None:
    experiment = light_experiment("tiny", "stamp", read_params(), ("kappa", "-0.5"))
    assert experiment.title == "tiny stamp kappa -0.5"
    assert load_experiment("tiny", "stamp").title == "tiny stamp"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (119, "119 s"),
        (150, "2 min"),
        (9e3, "2.5 h"),
    ],
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("value", ["None", "bars", ""])
def test_another_value_is_refused_before_anything_starts(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAMP_PROGRESS", value)
    monkeypatch.setattr(engine, "start_executor", pytest.fail)
    with pytest.raises(ValueError, match=f"STAMP_PROGRESS is '{value}'; .* bar, lines, none"):
        run(tiny())


def test_without_a_value_a_stage_of_dvc_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAMP_PROGRESS", raising=False)
    monkeypatch.delenv("DVC_STAGE", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert progress_mode() == "bar"
    monkeypatch.setenv("DVC_STAGE", "train")
    assert progress_mode() == "lines"


# ------------------------------------------------------------------ told


@pytest.mark.parametrize("workers", [1, 2])
def test_loggers_are_told_every_number_and_change_none(workers: int) -> None:
    experiment, told = tiny("replay", memory=kept(5)), Told()
    both = plans(experiment, 0, 1)
    quiet = engine.train(experiment, both, workers, "cpu")
    records = engine.train(experiment, both, workers, "cpu", loggers=[told])
    assert sorted(told.rounds) == [(seed, k) for seed in (0, 1) for k in range(ROUNDS)]
    for seed, record in records.items():
        small.assert_same(record, quiet[seed])
        m = record.task_accuracies()
        for e in range(3):
            each = {f"task_accuracy/{t + 1}": m[e, t] for t in range(3)}
            accuracies = dict(told.accuracies[seed, e])
            assert accuracies.pop("accuracy") == pytest.approx(m[e, : e + 1].mean())
            assert accuracies == each
        values = [v for (s, _), v in zip(told.rounds, told.values, strict=True) if s == seed]
        assert [v["loss"] for v in values] == [row["loss"] for row in record.history]
        assert [v["bytes/up"] for v in values] == [row["bytes"]["up"] for row in record.history]
        assert [v["experience"] for v in values] == [0, 0, 1, 1, 2, 2]


def test_a_loss_that_is_undefined_is_nan() -> None:
    told = Told()
    run(tiny(training={"dropout": small.ALWAYS}), loggers=[told])
    assert all(math.isnan(values["loss"]) for values in told.values)


def test_a_resumed_training_tells_the_earlier_rounds_too(tmp_path: Path) -> None:
    whole, first, second = Told(), Told(), Told()
    run(tiny(), loggers=[whole])
    with small.stopped_after(3):
        run(tiny(), resume=tmp_path, loggers=[first])
    run(tiny(), resume=tmp_path, loggers=[second])
    assert len(first.rounds) == 2  # the third was saved, then the training ended
    assert second.rounds == whole.rounds and second.accuracies == whole.accuracies


def test_a_logger_that_fails_ends_the_training_which_then_resumes(tmp_path: Path) -> None:
    full: Logger = Full(3)
    with pytest.raises(OSError, match="No space left") as caught:
        run(tiny(), resume=tmp_path, loggers=[full])
    assert caught.value.__notes__ == ["seed 0; seeds that failed: [0] of 1"]
    assert small.saved(tiny(), tmp_path)["next"] == 4
    small.assert_same(run(tiny(), resume=tmp_path), run(tiny()))
