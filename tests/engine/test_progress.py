"""What loggers are told while a training runs, which changes no number."""

from collections.abc import Mapping

import pytest
import small
from small import ROUNDS, kept, plans, run, tiny

from stamp_core.engine import train as engine


class Told:
    def __init__(self) -> None:
        self.rounds: list[tuple[int, int]] = []
        self.accuracies: dict[tuple[int, int], dict[str, float]] = {}
        self.values: list[dict[str, float]] = []

    def on_round(self, seed: int, round: int, values: Mapping[str, float]) -> None:
        self.rounds.append((seed, round))
        self.values.append(dict(values))

    def on_experience(self, seed: int, experience: int, values: Mapping[str, float]) -> None:
        self.accuracies[seed, experience] = dict(values)


class Full(Told):
    def on_round(self, seed: int, round: int, values: Mapping[str, float]) -> None:
        if len(self.rounds) == 3:
            small.full()
        super().on_round(seed, round, values)


@pytest.mark.parametrize("workers", [1, 2])
def test_loggers_are_told_every_number_and_change_none(workers):
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


def test_a_resumed_training_tells_the_earlier_rounds_too(tmp_path):
    whole, first, second = Told(), Told(), Told()
    run(tiny(), loggers=[whole])
    with small.stopped_after(3):
        run(tiny(), resume=tmp_path, loggers=[first])
    run(tiny(), resume=tmp_path, loggers=[second])
    assert len(first.rounds) == 2  # the third was saved, then the training ended
    assert second.rounds == whole.rounds and second.accuracies == whole.accuracies


def test_a_logger_that_fails_ends_the_training_which_then_resumes(tmp_path):
    with pytest.raises(OSError, match="No space left") as caught:
        run(tiny(), resume=tmp_path, loggers=[Full()])
    assert caught.value.__notes__ == ["seed 0; seeds that failed: [0] of 1"]
    assert small.saved(tiny(), tmp_path)["next"] == 4
    small.assert_same(run(tiny(), resume=tmp_path), run(tiny()))
