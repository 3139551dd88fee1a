"""A bar where a person watches, one line a step in logs."""

import io
import re
import sys

import pytest

from stamp_core.progress import Progress, watched


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting, no DVC, no notebook."""
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
        ({"STAMP_PROGRESS": "lines"}, "terminal", False),
        ({"STAMP_PROGRESS": "lines"}, "notebook", False),
        ({"STAMP_PROGRESS": "bar"}, "log", True),
        ({"STAMP_PROGRESS": "bar", "DVC_STAGE": "train"}, "log", True),
    ],
)
def test_who_watches(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], place: str, expected: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal() if place == "terminal" else io.StringIO())
    if place == "notebook":
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert watched() == expected


def test_lines_are_one_a_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAMP_PROGRESS", "lines")
    with Progress(rounds=4, done=0) as progress:
        for step, accuracy in (("1/2", 0.5), ("2/2", float("nan"))):
            progress.round()
            progress.round()
            progress.step(7, step, accuracy)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"seed 7  step 1/2  accuracy  50\.0%  \d+\.\d s", lines[0])
    assert re.fullmatch(r"seed 7  step 2/2  accuracy +nan%  \d+\.\d s", lines[1])


def test_a_bar_goes_on_from_what_is_done_and_shows_the_mean_of_the_seeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seeds at 80 % (after 50 %) and 40 %: their mean is 60 %."""
    monkeypatch.setenv("STAMP_PROGRESS", "bar")
    with Progress(rounds=6, done=3) as progress:
        assert progress.bar is not None and progress.bar.n == 3
        for seed, accuracy in ((0, 0.5), (1, 0.4), (0, 0.8)):
            progress.round()
            progress.step(seed, "1/2", accuracy)
    drawn = capsys.readouterr()
    last = drawn.err.split("\r")[-1]
    assert drawn.out == ""
    assert "6/6" in last and "accuracy 60.0%" in last and last.endswith("\n")


def test_a_bar_is_closed_when_training_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAMP_PROGRESS", "bar")
    with pytest.raises(ArithmeticError), Progress(rounds=2, done=0) as progress:
        raise ArithmeticError
    assert progress.bar is not None and progress.bar.disable  # what tqdm's close() leaves


def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever moves the bar, or writes at it, holds the lock."""
    monkeypatch.setenv("STAMP_PROGRESS", "bar")
    held = []
    with Progress(rounds=1, done=0) as progress:
        assert progress.bar is not None
        for name in ("update", "set_postfix_str"):
            noted = lambda *_: held.append(progress.lock.locked())  # noqa: E731
            monkeypatch.setattr(progress.bar, name, noted)
        progress.round()
        progress.step(0, "1/1", 0.5)
        assert not progress.lock.locked()
    assert held == [True, True]
