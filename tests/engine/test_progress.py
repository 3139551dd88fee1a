"""What a training shows and tells while it runs; neither changes a number."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import small
from small import ROUNDS, kept, plans, run, tiny

from stamp_core.engine import train as engine
from stamp_core.engine.progress import Logger


def shown(form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("STAMP_PROGRESS", form)
    capsys.readouterr()
    run(tiny("fedavg"))
    drawn = capsys.readouterr()
    return drawn.out + drawn.err


def test_a_line_names_the_training_and_estimates_what_is_left_until_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown("lines", monkeypatch, capsys).splitlines()
    assert len(lines) > 1
    assert all(line.startswith("tiny-fedavg  seed 0  experience ") for line in lines)
    assert ["left" in line for line in lines] == [True] * (len(lines) - 1) + [False]


def test_a_bar_names_the_training_and_none_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "tiny-fedavg" in shown("bar", monkeypatch, capsys)
    assert shown("none", monkeypatch, capsys) == ""


def test_another_form_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="STAMP_PROGRESS is 'bars': it must be one of bar, lines"):
        shown("bars", monkeypatch, capsys)


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
