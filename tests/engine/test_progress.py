"""What a training shows of itself: a bar, lines, or nothing."""

import pytest
from small import run, tiny


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
