"""A sample of the campaign of faults (`make faults`), and how its outcomes are judged."""

import random

import pytest

from benchmarks.faults import FAILURES, Kind, Outcome, judge_error, refusal, run_case
from benchmarks.faults.campaign import KINDS
from benchmarks.faults.project import Answer, Place, judge_output

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
    "archives": (0, 5),
    "PFLlib": (0, 7),
    "forged records": (0, 1),
    "counts": (0, 9),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = Place(tmp_path_factory.mktemp("faults").resolve(), rounds=1)
    yield place
    place.close()


@pytest.mark.parametrize("kind", SAMPLE)
def test_nothing_is_lost_silently_wrong_or_executed(place, kind):
    outcomes = [
        (number, outcome)
        for number in SAMPLE[kind]
        for outcome in run_case(KINDS, kind, place, 0, number)
    ]
    assert len(outcomes) >= len(SAMPLE[kind])
    assert [each for each in outcomes if each[1].verdict in FAILURES] == []


def test_every_kind_without_the_complete_pipeline_is_in_the_sample():
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
def test_a_refusal_is_one_line_with_file_and_cure(kind, message, lacking):
    assert refusal(kind, message, "a.yaml") == lacking
    verdict = judge_error("a fault", kind, message, "a.yaml").verdict
    assert verdict == ("lost" if lacking else "refused")


def test_the_next_call_is_judged_by_error_status_and_bytes():
    for answer, verdict in (
        (Answer(0, {"record": "x"}, None, "", 0, 0), "survived"),
        (Answer(0, {"record": "y"}, None, "", 0, 0), "silently wrong"),
        (Answer(-11, None, None, "", 0, 0), "lost"),
        (Answer(1, None, ("ValueError", "f is cut; delete it"), "", 0, 0), "refused"),
    ):
        assert answer.judged("a fault", {"record": "x"}, "f").verdict == verdict


@pytest.mark.parametrize(
    ("output", "verdict"),
    [
        ("'./dvc.lock' validation failed.\n\nrequired key not provided", "refused"),
        ("ERROR: [Errno 21] Is a directory: '/a/.dvc/cache/files/md5/20/d3'", "refused"),
        ("ERROR: [Errno 21] Is a directory: '/a/params.yaml'", "lost"),
        ("ERROR: unexpected error", "lost"),
    ],
)
def test_what_dvc_refuses_counts_where_the_pages_tell_its_cure(output, verdict):
    assert judge_output("a fault", 255, output).verdict == verdict


def test_a_case_depends_on_seed_kind_and_number_alone():
    drawn = []

    def case(_: Place, draw: random.Random, number: int) -> list[Outcome]:
        drawn.append(draw.random())
        raise ValueError("broken") if number else KeyError("x")

    kinds = {"a": Kind("", case, 2), "b": Kind("", case, 2)}
    for name, seed, number in (("a", 0, 0), ("a", 0, 1), ("b", 0, 0), ("a", 1, 0), ("a", 0, 0)):
        (outcome,) = run_case(kinds, name, None, seed, number)  # type: ignore[arg-type]
        assert outcome.verdict == "lost"
    assert len(set(drawn)) == 4 and drawn[0] == drawn[-1]
