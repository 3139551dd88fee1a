"""The paper's tables compared with records whose numbers are worked out by hand."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from table_records import FINALS, fake_record

from stamp_core.config.params import PAPER, read_params, read_setting
from stamp_core.config.schema import Network
from stamp_core.report import tables
from stamp_core.report.tables import printed
from stamp_core.report.tables.paper import MIB, OURS, TABLES, network_size
from stamp_core.report.text import DASH, MB
from stamp_core.results.records import Record

TWO, TWENTY, PARTS = TABLES


def run(
    method: str = "fedavg",
    seed: int = 0,
    setting: str = "cifar100_c2",
    personal_only: bool = False,
    gpu: float = 1e9,
    completed: tuple[int, int] = (2, 1),
) -> Record:
    """Two clients; personal models are 20 points below the global one."""
    rounds = [
        {
            **{"participants": 2, "completed": completed[k]},
            "seconds": {"clients": (1.0, 3.0)[k] + seed, "server": 9.0},
            "bytes": {"up": (30e6, 15e6)[k], "down": (40e6, 80e6)[k] * (1 + seed)},
            "memory": {"process": 5e9, "gpu": (gpu, gpu / 2)[k] * (1 + seed)},
            "disk": 7e6 * (1 + seed),
        }
        for k in range(2)
    ]
    options: dict[str, Any] = {"setting": setting, "personal_only": personal_only}
    record = fake_record(method, seed, FINALS[seed], rounds=rounds, **options)
    if not personal_only:
        record.scores["personal"] = record.scores["global"] - 0.2
    return record


def three(method: str = "fedavg", **changes: Any) -> list[Record]:
    """Three seeds of a method."""
    return [run(method, seed, **changes) for seed in range(3)]


def row(rows: pd.DataFrame, method: str, data: str = "CIFAR-100") -> dict[str, str]:
    """The one row of a method on a data set."""
    (only,) = rows[(rows.method == method) & (rows.data == data)].to_dict("records")
    return {str(name): text for name, text in only.items()}


def test_accuracy_and_forgetting_are_compared_with_the_papers() -> None:
    """Accuracies 50, 60 and 55 against 31.7; the first task falls from 80 to 40, 50 and 30, by 40
    on average, against 25.2; personal models are 20 points below."""
    assert row(tables.compare_with_paper(TWO, three()), "fedavg") == {
        **{"data": "CIFAR-100", "method": "fedavg", "n": "3", "model": "global"},
        "accuracy, paper": "31.7 ± 1.7",
        "accuracy, ours": "55.0 ± 5.0",
        "accuracy, difference": "+23.3",
        "AF, paper": "25.2 ± 1.3",
        "AF, ours": "40.0 ± 10.0",
        "AF, difference": "+14.8",
        "personal accuracy, ours": "35.0 ± 5.0",
    }
    one = row(tables.compare_with_paper(TWO, [run("fedas")]), "fedas")
    assert (one["accuracy, difference"], one["AF, difference"]) == ("-8.2", "-16.1")
    own = row(tables.compare_with_paper(TWO, three("fedas", personal_only=True)), "fedas")
    assert (own["model"], own["accuracy, ours"]) == ("personal", "55.0 ± 5.0")
    assert own["personal accuracy, ours"] == "55.0 ± 5.0"


def test_costs_are_those_of_one_client_in_a_mean_round() -> None:
    """Clients worked 2, 3 and 4 s in a mean round. 45 MB were sent by 3 clients that completed, in
    every seed; 120, 240 and 360 MB to 4 participants. The GPU had 3 GB at most, the disk 21 MB.
    """
    assert row(tables.compare_costs_with_paper(TWO, three("stamp")), "stamp") == {
        **{"data": "CIFAR-100", "method": "stamp", "n": "3"},
        **{"s / round, paper": "9.1", "s / round, ours": "3"},
        **{"MB up, paper": "44.6", "MB up, ours": "15"},
        **{"MB down, paper": "44.6", "MB down, ours": "60"},
        **{"GPU GB, paper": "1.92", "GPU GB, ours": "3"},
        **{"disk MB, paper": "16.3", "disk MB, ours": "21"},
    }
    none = row(tables.compare_costs_with_paper(TWO, [run(gpu=0, completed=(0, 0))]), "fedavg")
    assert (none["GPU GB, ours"], none["MB up, ours"]) == (DASH, DASH)
    assert (none["MB down, ours"], none["disk MB, ours"]) == ("30", "7")


@pytest.mark.parametrize("label", TABLES)
def test_without_records_the_papers_numbers_are_complete_and_ours_are_dashes(label: str) -> None:
    scores = tables.compare_with_paper(label, [])
    costs = tables.compare_costs_with_paper(label, [])
    for rows in (scores, costs):
        ours = [name for name in rows if name.endswith(("ours", "difference"))]
        assert len(ours) == 5 and (rows[[*ours, "n"]] == DASH).all(axis=None)
    columns = {"seconds": "s / round", "mb_up": "MB up", "mb_down": "MB down"}
    columns |= {"gpu_gb": "GPU GB", "disk_mb": "disk MB"}
    for typed in printed.PRINTED[printed.PRINTED.table == label].to_dict("records"):
        own = row(scores, typed["method"], typed["data"])
        for name, column in {"accuracy": "accuracy", "AF": "forgetting"}.items():
            number = printed.number(typed[column], typed[f"{column}_std"])
            assert own[f"{name}, paper"] == number
        own = row(costs, typed["method"], typed["data"])
        for column, name in columns.items():
            text, number = own[f"{name}, paper"], typed[column]
            assert text == DASH if np.isnan(number) else float(text) == number


def test_methods_are_the_papers_then_ours_then_what_else_was_run() -> None:
    """A preset of published size stands in the row of its method."""
    records = [*three("gem"), *three("stamp"), *three("sam_tam_pcs"), *three("fedcil_published")]
    theirs = list(printed.rows(TWO, "CIFAR-100").index)
    grid = [name.removesuffix("_published") for name in read_params(PAPER)["grid"]["method"]]
    ours = [name for name in grid if name not in theirs]
    rows = tables.compare_with_paper(TWO, records)
    assert list(rows[rows.data == "CIFAR-100"].method) == [*theirs, *ours, "gem"]
    assert list(rows[rows.data == "ImageNet-1K"].method) == [*theirs, *ours]
    gem, glfc, fedcil = (row(rows, name) for name in ("gem", "glfc", "fedcil"))
    assert fedcil["accuracy, ours"] == "55.0 ± 5.0" and fedcil["accuracy, difference"] != DASH
    assert (gem["accuracy, paper"], gem["accuracy, ours"]) == (DASH, "55.0 ± 5.0")
    assert (gem["accuracy, difference"], gem["AF, difference"]) == (DASH, DASH)
    assert (glfc["accuracy, paper"], glfc["accuracy, ours"]) == ("44.8 ± 2.1", DASH)
    rows = tables.compare_with_paper(PARTS, records)  # the paper's alone
    parts = ["fedavg", "sam", "tam", "sam_tam", "sam_pcs", "tam_pcs", "sam_tam_pcs"]
    assert list(rows.method) == 2 * parts
    assert row(rows, "sam_tam_pcs")["accuracy, difference"] == "+2.2"  # 55.0 - 52.8


@pytest.mark.parametrize(
    ("setting", "data", "label"),
    [
        ("cifar100_c2", "CIFAR-100", TWO),
        ("cifar100_c20", "CIFAR-100", TWENTY),
        ("imagenet1k_c2", "ImageNet-1K", TWO),
        ("imagenet1k_c20", "ImageNet-1K", TWENTY),
    ],
)
def test_runs_are_in_the_tables_of_their_setting(setting: str, data: str, label: str) -> None:
    records = three(setting=setting)
    shown = {
        (table, each.data)
        for table in (TWO, TWENTY)
        for each in tables.compare_with_paper(table, records).itertuples()
        if each.n == "3"
    }
    assert shown == {(label, data)}


def test_a_run_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="cifar100_c2-fedavg seed 0 is there twice"):
        tables.compare_with_paper(TWO, [run(), run()])


# --- typed by hand


def test_typed_tables_are_complete_and_name_settings_of_the_same_size() -> None:
    """13 methods in two tables and 7 variants on two data sets each, 11 attributes of 8 settings,
    9 methods for two groups of data sets; nothing twice."""
    typed, details, networks = printed.PRINTED, printed.DETAILS, printed.ARCHITECTURES
    assert typed.groupby("table", sort=False).size().tolist() == [26, 26, 14]
    assert details.groupby(["table", "data", "setting"]).size().tolist() == [11] * 8
    assert networks.groupby(["table", "data"]).size().tolist() == [9, 9]
    assert not typed.duplicated(["table", "data", "method"]).any()
    assert not details.duplicated(["table", "data", "attribute"]).any()
    assert not networks.duplicated(["table", "data", "method"]).any()
    params, places = read_params(PAPER), typed[["setting", "classes"]].drop_duplicates()
    for name, classes in places.itertuples(index=False):
        assert read_setting(name, params).split.classes_per_task == classes


# --- settings


def changed(setting: str, block: str, key: str, value: object) -> dict[str, Any]:
    """The parameters with one number of a setting changed."""
    params = copy.deepcopy(read_params(PAPER))
    params["settings"][setting][block][key] = value
    return params


def differing(params: dict[str, Any] | None = None) -> dict[tuple[str, str], str]:
    """The cells where the paper and our settings differ, by data set and attribute."""
    rows = tables.training_details(params).set_index("attribute")
    cells = {(d, a): rows.loc[a, d] for d in rows for a in rows.index}
    return {place: text for place, text in cells.items() if "≠" in text}


def test_our_settings_hold_the_papers_numbers() -> None:
    assert differing() == {}
    rows = tables.training_details().set_index("attribute")
    assert rows.shape == (1 + 11 + 1, 8)
    compared = ~rows.drop(index=["setting", "Options of the data"]).map(lambda t: t[0] == "(")
    assert compared.to_numpy().sum() == 8 * len(OURS) + 3  # three sizes of images
    own = rows["Digit-10, non-IID"]
    assert (own["setting"], own["Task number"]) == ("digit10_alpha", "4")
    assert (own["Task size"], own["Image Size"]) == ("(480 M)", "(1 x 28 x 28)")
    assert own["Options of the data"].startswith("per_class: ")
    assert rows.loc["Options of the data", "CIFAR-10, non-IID"] == DASH


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
    params = changed("cifar10_alpha", *OURS[attribute].split("."), value)
    text = f"{paper} ≠ {'N/A' if value is None else value}"
    assert differing(params) == {("CIFAR-10, non-IID", attribute): text}


def test_numbers_are_compared_by_value_and_images_by_their_sides() -> None:
    assert differing(changed("cifar100_alpha", "split", "alpha", 10)) == {}
    params = changed("cifar100_c2", "split", "alpha", 0.5)
    params["settings"]["cifar100_c2"]["split"]["order"] = "common"
    place = ("CIFAR-100, 2 classes", "Data heterogeneity")
    assert differing(params) == {place: "N/A ≠ 0.5"}
    assert differing(changed("imagenet1k_c20", "data", "size", 224)) == {}
    for side in (32, 24, 4):
        marked = differing(changed("imagenet1k_c20", "data", "size", side))
        text = f"3 x 224 x 224 ≠ {side} x {side}"
        assert marked == {("ImageNet-1K, 20 classes", "Image Size"): text}


# --- networks


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


def test_sizes_of_networks_and_what_the_paper_states_of_them() -> None:
    """11,176,512 + 100 * 513 parameters and 9,600 buffers: 4 * 11,237,412 = 44,949,648 bytes;
    27,519,354 + 1000 * 769 parameters: 4 * 28,288,354 = 113,153,416 bytes. The paper states sizes
    of ResNet-18 and of Swin-T for its own data alone."""
    table = tables.architectures()
    rows = {(*each[:4], each[5]): each for each in table.to_numpy().tolist()}
    columns = ["data", "network", "stem", "norm", "images", "classes", "parameters", "buffers"]
    assert list(table.columns[:8]) == columns
    assert len(rows) == 11
    resnet = rows["CIFAR-100", "resnet18", "published", "batch", "100"]
    assert resnet[6:] == ["11,227,812", "9,600", "44.95", "42.87", "11.7 M", "44.6"]
    swin = rows["ImageNet-1K", "swin_t", DASH, DASH, "1,000"]
    assert swin[6:] == ["28,288,354", "0", "113.2", "107.9", "28.8 M", "112.5"]
    for (data, kind, *_), each in rows.items():
        stated = kind == "resnet18" and data != "ImageNet-1K"
        if kind != "swin_t":
            sent = "44.6" if data == "CIFAR-100" else DASH
            assert each[-2:] == (["11.7 M", sent] if stated else [DASH, DASH])


def test_what_the_page_says_about_the_papers_sizes_is_true() -> None:
    """11.7 M and 44.6 are ResNet-18 with 1,000 classes in MiB, no smaller head, and not in MB;
    Swin-T is 28.3 M, and 112.5 is its size in neither unit."""
    big, _ = network_size(Network("resnet18", norm="batch"), (3, 224, 224), 1000)
    own = network_size(Network("resnet18", norm="batch"), (3, 32, 32), 100)[0]
    swin, _ = network_size(Network("swin_t"), (3, 224, 224), 1000)
    assert [round(big / 1e6, 1), round(4 * big / MIB, 1)] == [11.7, 44.6]
    assert round(own / 1e6, 1) == 11.2 and round(4 * own / MIB, 1) == 42.8
    assert 44.6 not in (round(4 * big / MB, 1), round(4 * own / MB, 1))
    assert round(swin / 1e6, 1) == 28.3
    assert [round(4 * swin / unit, 1) for unit in (MB, MIB)] == [113.2, 107.9]


def test_a_network_is_counted_without_its_file_of_weights() -> None:
    """16 * 3 + 3 hidden, 3 * 5 + 5 in the head."""
    network = Network("mlp", features=3, pretrained="nowhere.pth")
    assert network_size(network, (1, 4, 4), 5) == (71, 0)


# --- the page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of three methods, one with a setting that the paper prints no table of."""
    records = [*three(), *three("gem"), *three("fedssi", setting="cifar10_alpha")]
    return tables.write_paper(records, tmp_path_factory.mktemp("paper")).read_text("utf-8")


def lines(page: str, label: str, data: str, first: str = "accuracy") -> list[str]:
    """The lines of that table of a data set whose first number is the paper's `first`."""
    section = page.split(f"({label})\n")[1].split("\n## ")[0]
    part = section.split(f"### {data}, ")[1].split("\n### ")[0]
    (table,) = [each for each in part.split("\n\n") if f"| {first}, paper |" in each]
    return table.splitlines()


def test_the_page_has_every_row_that_is_typed(page: str) -> None:
    for typed in printed.PRINTED.itertuples():
        texts = {"accuracy": printed.number(typed.accuracy, typed.accuracy_std)}
        if typed.table != PARTS:
            texts["s / round"] = f"{typed.seconds}"
        for first, text in texts.items():
            own = lines(page, typed.table, typed.data, first)
            (line,) = [each for each in own if each.startswith(f"| {typed.method} |")]
            assert f" {text} |" in line and line.count("|") == own[0].count("|")
    for each in printed.DETAILS.itertuples():
        assert f"| {each.attribute} |" in page and f"{each.value}" in page
    for each in printed.ARCHITECTURES.itertuples():
        assert f"| {each.data} | {each.method} | {each.model or DASH} |" in page


def test_the_page_has_every_table_once_with_settings_and_n(page: str) -> None:
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        "## 2 classes per task (tab:baselines-task2)",
        "## 20 classes per task (tab:baselines-task20)",
        "## Components of STAMP (tab:component-effectiveness)",
        "## Settings without a printed table",
        "## Settings (tab:training-details)",
        "## Networks of methods (tab:modified-arch)",
        "## Networks",
        "## Definitions",
    ]
    headings = [line for line in page.splitlines() if line.startswith("### ")]
    assert headings[1::2] == [f"### ImageNet-1K, setting `imagenet1k_c{n}`" for n in (2, 20, 2)]
    assert page.count("\n| fedavg | 3 | global |") == 2  # baselines and components
    other = page.split("## Settings without a printed table")[1].split("\n## ")[0]
    assert "| cifar10_alpha | federated | fedssi | 3 |" in other and "gem" not in other


def test_the_page_without_records_has_the_papers_numbers(tmp_path: Path) -> None:
    path = tables.write_paper([], tmp_path / "new")
    text = path.read_text(encoding="utf-8")
    assert path == tmp_path / "new" / "paper.md"
    assert "Settings without a printed table" not in text and "nan" not in text.lower()
