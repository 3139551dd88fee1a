"""A sample of the campaign of faults (`make faults`), and how its outcomes are judged."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults import FAILURES, Kind, Outcome, judge_error, refusal, run_case
from benchmarks.faults.campaign import KINDS, report
from benchmarks.faults.project import Answer, Place, judge_output, without_measurements
from benchmarks.faults.slips import slip

SAMPLE = {  # numbers of cases
    "kill a training": (5,),
    "disk full, training": (2,),
    "damage small": (0, 1, 2, 7),
    "damage parameters": (0,),
    "slips": (0, 2),
    "names, first stage": (0, 1),
    "images": (2, 12),
    "npz": (0, 1),
    "pickles": (2, 6, 7),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("faults").resolve(), rounds=1)
    yield place
    place.close()


@pytest.mark.parametrize("kind", SAMPLE)
def test_nothing_is_lost_silently_wrong_or_executed(place: Place, kind: str) -> None:
    outcomes = [
        (number, outcome)
        for number in SAMPLE[kind]
        for outcome in run_case(KINDS, kind, place, 0, number)
    ]
    assert len(outcomes) >= len(SAMPLE[kind])
    assert [each for each in outcomes if each[1].verdict in FAILURES] == []


def test_every_kind_without_the_complete_pipeline_is_in_the_sample() -> None:
    assert {name for name, kind in KINDS.items() if not kind.whole} == set(SAMPLE)


@pytest.mark.parametrize(
    ("kind", "message", "lacking"),
    [
        ("ParameterError", "a.yaml: lr is -1; it must be above 0", ""),
        ("ParameterError", "lr is -1; it must be above 0", "names none of a.yaml"),
        ("ParameterError", "a.yaml: lr is -1", "names no cure"),
        ("ParameterError", "a.yaml: lr is -1;\nit must be above 0", "more than one line"),
        ("KeyError", "a.yaml must be there", "a bare KeyError"),
    ],
)
def test_a_refusal_is_one_line_with_file_and_cure(kind: str, message: str, lacking: str) -> None:
    assert refusal(kind, message, "a.yaml") == lacking
    verdict = judge_error("a fault", kind, message, "a.yaml").verdict
    assert verdict == ("lost" if lacking else "refused")


def test_the_next_call_is_judged_by_error_status_and_bytes() -> None:
    for answer, verdict in (
        (Answer(0, {"record": "x"}, None, "", 0, 0), "survived"),
        (Answer(0, {"record": "y"}, None, "", 0, 0), "silently wrong"),
        (Answer(-11, None, None, "", 0, 0), "lost"),
        (Answer(1, None, ("ValueError", "f is cut; delete it"), "", 0, 0), "refused"),
    ):
        assert answer.judged("a fault", {"record": "x"}, "f").verdict == verdict


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        ("", "refused"),
        (
            "ERROR: failed to reproduce 'train@tiny': /runs is busy, it is being blocked by:",
            "refused",
        ),
        ("ValueError: f is cut", "lost"),
    ],
)
def test_the_last_error_in_an_output_counts(last: str, verdict: str) -> None:
    """Unless DVC itself refuses, whose cure the documentation tells."""
    output = f"TypeError: first\nValueError: f is cut; delete it\nERROR: failed\n{last}\n"
    assert judge_output("a fault", 1, output, "f").verdict == verdict
    assert judge_output("a fault", 1, "ERROR: failed to reproduce\n", "f").verdict == "lost"


def test_tables_are_compared_without_measured_columns(tmp_path: Path) -> None:
    file, texts = tmp_path / "results.md", []
    for accuracy, seconds in ((1, 2), (1, 3), (4, 2)):
        row = f"| x | {accuracy} | {seconds} |"
        file.write_text(f"| name | accuracy | s / round |\n|---|---|---|\n{row}\nseconds\n")
        texts.append(without_measurements(file))
    assert texts[0] == texts[1] != texts[2]


def test_a_case_depends_on_seed_kind_and_number_alone() -> None:
    drawn = []

    def case(_: Place, draw: random.Random, number: int) -> list[Outcome]:
        drawn.append(draw.random())
        raise ValueError("broken") if number else KeyError("x")

    kinds = {"a": Kind("", case, 2), "b": Kind("", case, 2)}
    for name, seed, number in (("a", 0, 0), ("a", 0, 1), ("b", 0, 0), ("a", 1, 0), ("a", 0, 0)):
        (outcome,) = run_case(kinds, name, None, seed, number)  # type: ignore[arg-type]
        assert outcome.verdict == "lost"
    assert len(set(drawn)) == 4 and drawn[0] == drawn[-1]


def test_a_slip_changes_a_tree() -> None:
    for seed in range(200):
        tree = {"a": {"lr": 0.1, "names": ["x", "y"]}, "b": None}
        before = repr(tree)
        what, path = slip(tree, random.Random(seed), Path("trap"))
        assert what.startswith(".".join(map(str, path)))
        assert repr(tree) != before or what.endswith("is None")  # b is None already


def test_the_page_counts_and_says_how_to_repeat() -> None:
    found = [("slips", 3, Outcome("f: x", "lost", "why")), ("slips", 4, Outcome("f: y", "refused"))]
    page = report(found, seed=7, minutes=1)
    assert "| slips | 2 | 0 | 1 | 1 | 0 | 0 |" in page and "| all | 2 | 0 | 1 | 1 | 0 | 0 |" in page
    assert 'python -m benchmarks.faults --seed 7 --kind "slips" --case 3' in page
    assert "--case 4" not in page and "Of these: f 2." in page
