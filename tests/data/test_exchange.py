"""Plans that leave and come back, plans from elsewhere, and what is wrong with a file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import images

from stamp_core.config.decode import ParameterError, to_plain
from stamp_core.config.schema import Split
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.split import make_plan
from workbench.exchange import export_plan, import_plan

TEN = images(10)
DOMAINS = images(4, each=6, domains=3)
OWN = Split("classes", clients=3, tasks=5, classes_per_task=2)
SHARED = Split("classes", clients=3, tasks=2, classes_per_task=5, order="common", alpha=0.3)
PLANS: dict[str, tuple[Split, ImageDataset]] = {
    "all images": (OWN, TEN),
    "own images": (replace(OWN, images_per_class=3, order="mixed", common_clients=2), TEN),
    "shares": (SHARED, TEN),
    "domains": (Split("domains", clients=3, tasks=3), DOMAINS),
    "images of domains": (Split("domains", clients=3, tasks=2, images_per_class=5), DOMAINS),
}


@pytest.mark.parametrize("suffix", ["json", "csv"])
@pytest.mark.parametrize("name", PLANS)
def test_an_exported_plan_comes_back(name, suffix, tmp_path):
    split, dataset = PLANS[name]
    plan, path = make_plan(split, dataset, 7), tmp_path / "new" / f"plan.{suffix}"
    export_plan(plan, dataset, path)
    came = import_plan(path, dataset)
    assert came.clients == plan.clients and came.data_digest == plan.data_digest
    if suffix == "json":
        assert came == plan and came.hash == plan.hash
    assert import_plan(path, dataset, seed=3).seed == 3


@pytest.mark.parametrize("seed", [-5, 1.5, float("nan")])
def test_a_seed_is_a_whole_number(seed, tmp_path):
    export_plan(make_plan(OWN, TEN, 0), TEN, tmp_path / "plan.json")
    with pytest.raises(ParameterError, match="seed is"):
        import_plan(tmp_path / "plan.json", TEN, seed)


def test_cycles_leave_in_json_only(tmp_path):
    plan = make_plan(replace(OWN, cycles=2), TEN, 0)
    export_plan(plan, TEN, tmp_path / "plan.json")
    assert import_plan(tmp_path / "plan.json", TEN).experiences == 10
    with pytest.raises(ParameterError, match=r"^cycles is 2; it must be 1 in a table, .* \.json"):
        export_plan(plan, TEN, tmp_path / "plan.csv")
    assert not (tmp_path / "plan.csv").exists()


some_classes = st.sets(st.integers(0, 9), min_size=1, max_size=4)
sequences = st.integers(1, 3).flatmap(
    lambda tasks: st.lists(st.lists(some_classes, min_size=tasks, max_size=tasks), min_size=1)
)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@settings(deadline=None, max_examples=40)
@given(sequences, st.booleans(), st.randoms())
def test_tasks_of_any_size_in_any_order(tmp_path_factory, wanted, listed, order):
    """Written in JSON and as a table, with all images of the classes or with two of each."""

    def shuffled(values: Any) -> list[Any]:
        return order.sample(sorted(values), len(values))

    def numbers(classes: set[int]) -> list[int]:
        return [c + k for c in classes for k in (10, 30)] if listed else list(classes)

    def task(classes: set[int]) -> dict[str, Any]:
        train = {"train": shuffled(numbers(classes))} if listed else {}
        return {"classes": shuffled(classes), **train}

    folder = tmp_path_factory.mktemp("plans")
    text = json.dumps({"clients": [[task(classes) for classes in own] for own in wanted]})
    cells = [(u, t, own[t]) for u, own in enumerate(wanted) for t in range(len(own))]
    lines = [f"{n},{u},{t}" for u, t, classes in cells for n in numbers(classes)]
    header = f"{'image' if listed else 'class'},client,task"
    table = "\n".join([header, *shuffled(lines)])
    for path in (written(folder / "plan.json", text), written(folder / "plan.csv", table)):
        plan = import_plan(path, TEN)
        assert plan.split == Split("file", clients=len(wanted), tasks=len(wanted[0]))
        for u, t, classes in cells:
            train = [
                i for i in range(40) if i % 10 in classes and (i // 10 in (1, 3) or not listed)
            ]
            assert plan.clients[u][t].classes == tuple(sorted(classes))
            assert plan.train_indices(TEN, u, t).tolist() == train


def elsewhere(*tasks: Any, **more: Any) -> str:
    first: list[Any] = [{"classes": [0, 1]}, {"classes": [2], "train": [2, 12]}]
    return json.dumps({"clients": [first, list(tasks)], **more})


OTHER = {"classes": [5, 6, 7]}
ALTERED = to_plain(make_plan(SHARED, TEN, 7))
ALTERED["clients"][1][0]["train"][:] = ALTERED["clients"][0][0]["train"]
BAD_JSON = [
    ("{", " is damaged: "),
    ("[]", ": plan is []; it must be a block of keys"),
    ('{"clients": []}', ": plan.clients is 0; it must be between 1"),
    (elsewhere(OTHER), ": plan.clients[1] is a list of 1; it must be of 2"),
    (elsewhere(OTHER, {"class": [3]}), ": plan.clients[1][1]: 'class' is unknown; did you mean"),
    (
        elsewhere(OTHER, {"classes": [3, 10]}),
        "[1].classes[1] is 10; it must be above 3 and below 10",
    ),
    (
        elsewhere(OTHER, {**OTHER, "train": [4]}),
        "[1].train[0] is 4; it must be an image of the task",
    ),
    (elsewhere(OTHER, OTHER, classes=9), ": plan.classes is 9; it must be 10, as in the data"),
    (elsewhere(OTHER, OTHER, hash="0"), " was altered: it says hash 0, it has "),
    (json.dumps(ALTERED), "is listed for client 0 and then for client 1; it must be once"),
]
BAD_TABLES = [
    ("", ": the first line is []; it must be client, task and class, image or both"),
    ("client,task,clas\n0,0,0", ": column 'clas' is unknown; did you mean 'class'?"),
    ("client,task,class,class\n0,0,0,1", ": column 'class' must be there once"),
    ("client,task,class\n0,0,0\n0,1", ", line 3: the number of cells is 2; it must be 3"),
    ("client,task,class\n0,0,", ", line 2 has neither class nor image"),
    ("client,task,class\n0,0,0\n2,0,1", ": client 1 is missing; the last one is 2"),
    ("client,task,image\n0,0,40", ", line 2: image is 40; it must be below 40, the number of trai"),
    ("client,task,class,image\n0,0,1,0", ", line 2: class is 1; it must be 0, that of image 0"),
    (f"client,task,{'class' * 30_000}", " is damaged: field larger than field limit"),
]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        *(("mine.json", *case) for case in BAD_JSON),
        *(("mine.csv", *case) for case in BAD_TABLES),
        ("mine.txt", "", ": suffix '.txt' is unknown; known: .csv, .json"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(name, text, message, tmp_path):
    with pytest.raises(ParameterError) as error:
        import_plan(written(tmp_path / name, text), TEN)
    shown = str(error.value)
    assert shown.startswith(f"{tmp_path / name}") and message in shown and "\n" not in shown


def test_a_plan_from_elsewhere_is_not_drawn_and_nothing_of_it_is():
    with pytest.raises(
        ParameterError, match="kind is 'file'; it must be 'classes' or 'domains' to be drawn"
    ):
        make_plan(Split("file", clients=2, tasks=2), TEN, 0)
    drawn: list[dict[str, Any]] = [
        {"classes_per_task": 2},
        {"alpha": 0.1, "order": "common"},
        {"images_per_class": 3},
    ]
    for values in drawn:
        with pytest.raises(ParameterError, match="must be absent, as kind is 'file'"):
            Split("file", clients=2, tasks=2, **values)


LATE = replace(OWN, joining=1, tasks=3, order="given", old_share=0.4)
FEW = replace(OWN, images_per_class=3)
SPLITS = [
    (OWN, {"classes": [3]}, ".classes is a list of 1; it must be of 2"),
    (OWN, {"domain": 0}, ".domain is 0; it must be absent, as kind is 'classes'"),
    (OWN, {"train": [0]}, ".train must be absent"),
    (FEW, {"train": [0]}, ".train is a list of 1; it must be of 6"),
    (FEW, {"classes": [0, 1], "train": [0, 1, 10, 11, 20, 28]}, ".train[5] is 28; it must be an"),
    (SHARED, {"train": None}, ".train must be a list of indices"),
    (LATE, {"classes": [0, 1]}, " must be without classes, domain and images"),
]


@pytest.mark.parametrize(("split", "change", "message"), SPLITS)
def test_a_plan_is_checked_by_its_split(split, change, message, tmp_path):
    values = to_plain(make_plan(split, TEN, 0))
    values["clients"][1][0].update(change)
    with pytest.raises(ParameterError) as error:
        import_plan(written(tmp_path / "plan.json", json.dumps(values)), TEN)
    assert f"plan.clients[1][0]{message}" in str(error.value)
