"""The paper's tables with ours beside: runs are made up, cells are worked out by hand."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from stamp_core import config, tables
from stamp_core.records import Record
from stamp_core.tables.beside import TABLES
from stamp_core.tables.details import MARK, OURS
from stamp_core.tables.paper import ARCHITECTURES, DASH, DETAILS, SETTINGS, TYPED, with_deviation

TWO, TWENTY, PARTS = TABLES
FINALS = [(0.4, 0.6), (0.5, 0.7), (0.3, 0.8)]  # accuracy 0.5, 0.6, 0.55


def run(
    method: str = "fedavg",
    seed: int = 0,
    setting: str = "cifar100_c2",
    own: bool = False,
    gpu: float = 1e9,
    answered: tuple[int, int] = (2, 1),
) -> Record:
    """Two clients that are alike and two tasks, the first at 0.8 before it is forgotten."""
    a = np.repeat(np.array([(0.8, 0.1), FINALS[seed]])[:, None], 2, axis=1)  # [S, U, T]
    scores = np.stack([a, a + 0.1, a + 0.1])
    nothing = np.full_like(scores, np.nan)
    rounds = [
        {
            **{"asked": 2, "answered": answered[place]},
            "seconds": {"clients": (1.0, 3.0)[place] + seed, "server": 9.0},
            "bytes": {"up": (30e6, 15e6)[place], "down": (40e6, 80e6)[place] * (1 + seed)},
            "memory": {"process": 5e9, "gpu": (gpu, gpu / 2)[place] * (1 + seed)},
            **{"disk": 7e6 * (1 + seed), "angles": {}},
        }
        for place in range(2)
    ]
    about = {
        **{"setting": {"name": setting}, "method": {"name": method}, "seed": seed},
        **{"group": "federated", "setup": {"down": 1e9, "up": 1e9, "seconds": 1e3}},
    }
    of = {
        "global": nothing if own else scores,
        "personal": scores - 0.2 if not own else scores,
        **{"local": nothing, "initial": nothing[:, 0]},
    }
    return Record(about, rounds, of, np.full((2, 2), 20), {})


def three(method: str = "fedavg", **rest: Any) -> list[Record]:
    """Three seeds of a method."""
    return [run(method, seed, **rest) for seed in range(3)]


def row(rows: pd.DataFrame, method: str, data: str = "CIFAR-100") -> dict[str, str]:
    """The one row of a method on a data set."""
    (found,) = rows[(rows.method == method) & (rows.data == data)].to_dict("records")
    return {str(name): text for name, text in found.items()}


def test_accuracy_and_forgetting_stand_beside_the_papers() -> None:
    """Accuracies 50, 60 and 55 against 31.7; the first task falls from 80 to 40, 50 and 30, by 40
    on average, against 25.2; personal models are 20 points below."""
    assert row(tables.beside(TWO, three()), "fedavg") == {
        **{"data": "CIFAR-100", "method": "fedavg", "n": "3", "model": "global"},
        "accuracy, paper": "31.7 ± 1.7",
        "accuracy, ours": "55.0 ± 5.0",
        "accuracy, difference": "+23.3",
        "AF, paper": "25.2 ± 1.3",
        "AF, ours": "40.0 ± 10.0",
        "AF, difference": "+14.8",
        "personal accuracy, ours": "35.0 ± 5.0",
    }


def test_a_lower_number_has_a_difference_with_a_minus() -> None:
    found = row(tables.beside(TWO, [run("fedas")]), "fedas")
    assert (found["accuracy, difference"], found["AF, difference"]) == ("-8.2", "-16.1")
    assert (found["accuracy, ours"], found["n"]) == ("50.0", "1")


def test_costs_are_those_of_one_client_in_a_mean_round() -> None:
    """Clients worked 2, 3 and 4 s in a mean round. 45 MB were sent by 3 clients that answered, in
    every seed; 120, 240 and 360 MB to 4 that were asked. The GPU had 3 GB at most, the disk 21 MB.
    """
    assert row(tables.costs_beside(TWO, three("stamp")), "stamp") == {
        **{"data": "CIFAR-100", "method": "stamp", "n": "3"},
        **{"s / round, paper": "9.1", "s / round, ours": "3"},
        **{"MB up, paper": "44.6", "MB up, ours": "15"},
        **{"MB down, paper": "44.6", "MB down, ours": "60"},
        **{"GPU GB, paper": "1.92", "GPU GB, ours": "3"},
        **{"disk MB, paper": "16.3", "disk MB, ours": "21"},
    }


def test_no_gpu_and_no_answer_are_no_numbers() -> None:
    found = row(tables.costs_beside(TWO, [run(gpu=0, answered=(0, 0))]), "fedavg")
    assert (found["GPU GB, ours"], found["MB up, ours"]) == (DASH, DASH)
    assert (found["MB down, ours"], found["disk MB, ours"]) == ("30", "7")


@pytest.mark.parametrize("place", TABLES)
def test_without_records_ours_is_dashes_and_the_paper_as_it_is_typed(place: str) -> None:
    scores, prices = tables.beside(place, []), tables.costs_beside(place, [])
    ours = [name for name in [*scores, *prices] if name.endswith(("ours", "difference"))]
    assert len(ours) == 10
    for rows in (scores, prices):
        own = rows[[name for name in rows if name in {*ours, "n", "model"}]]
        assert (own == DASH).all(axis=None)
    for typed in TYPED[TYPED.place == place].itertuples():
        found = row(scores, typed.method, typed.data)
        assert found["accuracy, paper"] == with_deviation(typed.accuracy, typed.accuracy_std)
        assert found["AF, paper"] == with_deviation(typed.forgetting, typed.forgetting_std)
        cost = row(prices, typed.method, typed.data)
        columns = ["s / round", "MB up", "MB down", "GPU GB", "disk MB"]
        numbers = [typed.seconds, typed.mb_up, typed.mb_down, typed.gpu_gb, typed.disk_mb]
        for name, number in zip(columns, numbers, strict=True):
            text = cost[f"{name}, paper"]
            assert text == DASH if np.isnan(number) else float(text) == number


def test_the_methods_are_the_papers_then_ours_then_what_else_was_run() -> None:
    records = [*three("gem"), *three("stamp")]
    theirs = list(tables.printed(TWO, "CIFAR-100").index)
    ours = [name for name in config.read()["paper"]["method"] if name not in theirs]
    rows = tables.beside(TWO, records)
    assert list(rows[rows.data == "CIFAR-100"].method) == [*theirs, *ours, "gem"]
    assert list(rows[rows.data == "ImageNet-1K"].method) == [*theirs, *ours]
    gem, glfc = row(rows, "gem"), row(rows, "glfc")
    assert (gem["accuracy, paper"], gem["accuracy, ours"]) == (DASH, "55.0 ± 5.0")
    assert (gem["accuracy, difference"], gem["AF, difference"]) == (DASH, DASH)
    assert (glfc["accuracy, paper"], glfc["accuracy, ours"]) == ("44.8 ± 2.1", DASH)


def test_components_have_the_rows_of_the_paper_alone() -> None:
    rows = tables.beside(PARTS, [*three("gem"), *three("sam_tam_pcs")])
    parts = ["fedavg", "sam", "tam", "sam_tam", "sam_pcs", "tam_pcs", "sam_tam_pcs"]
    assert list(rows.method) == 2 * parts
    assert row(rows, "sam_tam_pcs")["accuracy, difference"] == "+2.2"  # 55.0 - 52.8


@pytest.mark.parametrize(
    ("setting", "data", "place"),
    [
        ("cifar100_c2", "CIFAR-100", TWO),
        ("cifar100_c20", "CIFAR-100", TWENTY),
        ("imagenet1k_c2", "ImageNet-1K", TWO),
        ("imagenet1k_c20", "ImageNet-1K", TWENTY),
    ],
)
def test_runs_stand_in_the_tables_of_their_setting(setting: str, data: str, place: str) -> None:
    records = three(setting=setting)
    shown = {
        (table, cell.data)
        for table in (TWO, TWENTY)
        for cell in tables.beside(table, records).itertuples()
        if cell.n == "3"
    }
    assert shown == {(place, data)}


def test_a_method_without_global_model_is_judged_by_the_clients_own() -> None:
    found = row(tables.beside(TWO, three("fedas", own=True)), "fedas")
    assert (found["model"], found["accuracy, ours"]) == ("personal", "55.0 ± 5.0")
    assert found["personal accuracy, ours"] == "55.0 ± 5.0"


def test_a_run_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="cifar100_c2 fedavg seed 0 is there twice"):
        tables.beside(TWO, [run(), run()])


# --- typed by hand


def test_every_place_of_the_typed_numbers_has_its_setting() -> None:
    """And that has as many classes a task as the paper's caption says."""
    params = config.read()
    places = TYPED[["place", "data", "classes"]].drop_duplicates()
    for place, data, classes in places.itertuples(index=False):
        assert config.setting(SETTINGS[place, data], params).split.classes_per_task == classes
    told = {*zip(places.place, places.data, strict=True)}
    assert told | {*zip(DETAILS.place, DETAILS.data, strict=True)} == {*SETTINGS}


def test_typed_tables_are_whole() -> None:
    """13 methods in two tables and 7 variants on two data sets each, 11 attributes of 8 settings,
    9 methods for two groups of data sets; nothing stands there twice."""
    assert TYPED.groupby("place", sort=False).size().tolist() == [26, 26, 14]
    assert DETAILS.groupby(["place", "data"]).size().tolist() == [11] * 8
    assert ARCHITECTURES.groupby(["place", "data"]).size().tolist() == [9, 9]
    assert not TYPED.duplicated(["place", "data", "method"]).any()
    assert not DETAILS.duplicated(["place", "data", "attribute"]).any()
    assert not ARCHITECTURES.duplicated(["place", "data", "method"]).any()


# --- settings


def changed(setting: str, block: str, key: str, value: object) -> dict[str, Any]:
    """params.yaml with one number of a setting changed."""
    params = copy.deepcopy(config.read())
    params["settings"][setting][block][key] = value
    return params


def differing(params: dict[str, Any] | None = None) -> list[tuple[str, ...]]:
    """Setting, attribute, and both texts of the rows that are marked."""
    rows = tables.attributes(params)
    columns = ["setting", "attribute", "paper", "ours"]
    assert set(rows.differs) <= {"", MARK}
    return [tuple(each) for each in rows[rows.differs == MARK][columns].to_numpy()]


def test_params_hold_the_papers_numbers() -> None:
    assert differing() == []
    rows = tables.attributes()
    compared = rows[(rows.ours != DASH) & (rows.paper != DASH)]
    assert compared.groupby("data").size().sum() == 8 * len(OURS) + 3  # three sizes of pictures


@pytest.mark.parametrize(
    ("attribute", "value", "paper"),
    [
        ("Task number", 4, "5"),
        ("Batch Size", 4, "64"),
        ("Learning Rate", 0.0101, "0.01"),
        ("Data heterogeneity", 1.0, "0.1"),
        ("Data heterogeneity", None, "0.1"),
        ("Client numbers", 100, "10"),
        ("Local training epoch", 50, "5"),
        ("Client selection ratio", 0.5, "1.0"),
        ("Rounds per Task", 8, "80"),
    ],
)
def test_a_changed_number_is_marked(attribute: str, value: float | None, paper: str) -> None:
    block, key = OURS[attribute].split(".")
    params = changed("cifar10_alpha", block, key, value)
    text = "N/A" if value is None else str(value)
    assert differing(params) == [("cifar10_alpha", attribute, paper, text)]
    wide = tables.training_details(params).set_index("attribute")
    assert wide.loc[attribute, "CIFAR-10, non-IID"] == f"{paper} {MARK} {text}"
    assert MARK not in wide.drop(index=attribute).to_string()


def test_the_same_number_in_other_words_is_not_marked() -> None:
    assert differing(changed("cifar100_alpha", "split", "alpha", 10)) == []


def test_a_heterogeneous_setting_that_draws_is_marked() -> None:
    params = changed("cifar100_c2", "split", "alpha", 0.5)
    params["settings"]["cifar100_c2"]["split"]["order"] = "common"
    assert differing(params) == [("cifar100_c2", "Data heterogeneity", "N/A", "0.5")]


@pytest.mark.parametrize(("side", "marked"), [(224, False), (32, True), (24, True), (4, True)])
def test_the_side_of_a_picture_is_compared(side: int, marked: bool) -> None:
    params = changed("imagenet1k_c20", "data", "size", side)
    row = ("imagenet1k_c20", "Image Size", "3 x 224 x 224", f"{side} x {side}")
    assert differing(params) == ([row] if marked else [])


def test_settings_for_people_say_what_the_paper_alone_and_what_params_alone_says() -> None:
    wide = tables.training_details().set_index("attribute")
    assert wide.shape == (1 + 11 + 1, 8)
    cells = wide["Digit-10, non-IID"]
    assert (cells["setting"], cells["Task number"]) == ("digit10_alpha", "4")
    assert (cells["Task size"], cells["Image Size"]) == ("(480 M)", "(1 x 28 x 28)")
    assert cells["Options of the data"].startswith("per_class: ")
    assert wide.loc["Options of the data", "CIFAR-10, non-IID"] == DASH


# --- networks and the page


def test_plain_networks_are_counted_and_others_are_not() -> None:
    """ResNet-18 with heads over 10, 31 and 100 classes is 11.2 M, Swin-T over 1,000 is 28.3 M."""
    rows = tables.modified_networks()
    counted = rows[rows["parameters, ours"] != DASH]
    columns = ["method", "model", "parameters, paper", "parameters, ours"]
    assert counted[columns].to_numpy().tolist() == [
        ["FedAvg", "ResNet-18", "11.7 M", "11.2 M"],
        ["FedSSI", "ResNet-18", "11.7 M", "11.2 M"],
        ["FedAvg", "Swin-T", "28.8 M", "28.3 M"],
        ["FedSSI", "Swin-T", "28.8 M", "28.3 M"],
    ]
    assert len(rows) == 18
    weit = rows[rows.method == "FedWeIT (C)"].drop(columns=["data", "method"])
    assert weit.to_numpy().tolist() == [["Modified LeNet", "171.8 B", DASH], [DASH, DASH, DASH]]


@pytest.fixture(scope="module")
def page() -> str:
    """The page of three methods, one with a setting that the paper prints no table of."""
    return tables.paper_page([*three(), *three("gem"), *three("fedssi", setting="cifar10_alpha")])


def rows_of(page: str, place: str, data: str, first: str = "accuracy") -> list[str]:
    """The lines of that table of a data set whose first number is the paper's `first`."""
    section = page.split(f"({place})\n")[1].split("\n## ")[0]
    part = section.split(f"### {data}, ")[1].split("\n### ")[0]
    (table,) = [each for each in part.split("\n\n") if f"| {first}, paper |" in each]
    return table.splitlines()


def test_the_page_has_every_row_that_is_typed(page: str) -> None:
    for typed in TYPED.itertuples():
        lines = rows_of(page, typed.place, typed.data)
        (line,) = [each for each in lines if each.startswith(f"| {typed.method} |")]
        assert f" {with_deviation(typed.accuracy, typed.accuracy_std)} |" in line
        if typed.place != PARTS:
            lines = rows_of(page, typed.place, typed.data, "s / round")
            (line,) = [each for each in lines if each.startswith(f"| {typed.method} |")]
            assert f" {typed.seconds} |" in line
    for each in DETAILS.itertuples():
        assert f"| {each.attribute} |" in page and f"{each.value}" in page
    for each in ARCHITECTURES.itertuples():
        assert f"| {each.data} | {each.method} | {each.model or DASH} |" in page


def test_the_page_names_settings_and_n_and_has_every_table_once(page: str) -> None:
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        "## 2 classes a task (tab:baselines-task2)",
        "## 20 classes a task (tab:baselines-task20)",
        "## Components of STAMP (tab:component-effectiveness)",
        "## Settings without a printed table",
        "## Settings (tab:training-details)",
        "## Networks of methods (tab:modified-arch)",
        "## Networks",
    ]
    headings = [line for line in page.splitlines() if line.startswith("### ")]
    assert headings[1::2] == [f"### ImageNet-1K, setting `imagenet1k_c{n}`" for n in (2, 20, 2)]
    assert page.count("\n| fedavg | 3 | global |") == 2  # baselines and components
    assert page.count("What it costs:") == 4
    other = page.split("## Settings without a printed table")[1].split("\n## ")[0]
    assert "| cifar10_alpha | federated | fedssi | 3 |" in other and "gem" not in other
    widths = [line.count("|") for line in rows_of(page, TWO, "CIFAR-100")]
    assert len(set(widths)) == 1


def test_the_page_is_written_as_one_file(tmp_path: Path) -> None:
    path = tables.write_paper([], tmp_path / "new")
    text = path.read_text(encoding="utf-8")
    assert path == tmp_path / "new" / "paper.md" and text == tables.paper_page([])
    assert "Settings without a printed table" not in text and text.endswith("|\n")
    assert "nan" not in text.lower()
