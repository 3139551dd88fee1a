"""A bar in an interactive session, one line per experience in logs."""

import io
import re
import sys

import pytest

from stamp_core.core.processes import is_interactive
from stamp_core.engine.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment variable, no DVC stage, no notebook."""
    for name in ("STAMP_PROGRESS", "DVC_STAGE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)


@pytest.mark.parametrize(
    ("environment", "place", "expected"),
    [
        ({}, "log", False),
        ({}, "terminal", True),
        ({}, "notebook", True),
        ({"DVC_STAGE": "train"}, "terminal", False),
        ({"DVC_STAGE": "train"}, "notebook", False),
        ({"STAMP_PROGRESS": "lines"}, "notebook", False),
        ({"STAMP_PROGRESS": "bar", "DVC_STAGE": "train"}, "log", True),
    ],
)
def test_interactive_sessions_are_recognised(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], place: str, expected: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal() if place == "terminal" else io.StringIO())
    if place == "notebook":
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert is_interactive() == expected


def test_logs_have_one_line_per_experience(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAMP_PROGRESS", "lines")
    with Progress(rounds=4, done=0) as progress:
        for place, accuracy in (("1/2", 0.5), ("2/2", float("nan"))):
            progress.round()
            progress.round()
            progress.experience(7, place, accuracy)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"seed 7  experience 1/2  accuracy  50\.0%  \d+\.\d s", lines[0])
    assert re.fullmatch(r"seed 7  experience 2/2  accuracy +nan%  \d+\.\d s", lines[1])


def test_a_bar_starts_at_the_rounds_done_and_shows_the_mean_accuracy_of_the_seeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seeds at 80 % (after 50 %) and 40 %: their mean is 60 %."""
    monkeypatch.setenv("STAMP_PROGRESS", "bar")
    with Progress(rounds=6, done=3) as progress:
        assert progress.bar is not None and progress.bar.n == 3
        for seed, accuracy in ((0, 0.5), (1, 0.4), (0, 0.8)):
            progress.round()
            progress.experience(seed, "1/2", accuracy)
    drawn = capsys.readouterr()
    last = drawn.err.split("\r")[-1]
    assert drawn.out == ""
    assert "6/6" in last and "accuracy 60.0%" in last and last.endswith("\n")


def test_a_bar_is_closed_when_training_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAMP_PROGRESS", "bar")
    with pytest.raises(ArithmeticError), Progress(rounds=2, done=0) as progress:
        raise ArithmeticError
    assert progress.bar is not None and progress.bar.disable  # what tqdm's close() leaves
