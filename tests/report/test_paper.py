"""The paper's numbers as typed, its settings and its networks; its page: test_pages.py."""

import copy
from typing import Any

import pytest
import torch
from made_records import fake_record

from stamp_core.config.params import read_block, read_params, read_setting
from stamp_core.config.schema import Network
from stamp_core.models.networks import build_network
from workbench.report import tables
from workbench.report.tables import printed
from workbench.report.tables.paper import OURS
from workbench.report.text import DASH, MB

TWO = "tab:baselines-task2"
MIB = 2**20


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
    params, places = read_params(), typed[["setting", "classes"]].drop_duplicates()
    for name, classes in places.itertuples(index=False):
        assert read_setting(name, params).split.classes_per_task == classes


def test_a_score_without_a_deviation_and_without_a_row() -> None:
    place = (TWO, "ImageNet-1K")
    assert printed.scores("fedweit", *place) == "39.7 ± 3.1, AF 21.5"
    assert printed.scores("gem", *place) == DASH


def test_without_a_gpu_and_without_a_completed_round_costs_are_undefined() -> None:
    rounds = [{"completed": 0, "memory": {"process": 1, "gpu": 0}, "bytes": {"up": 9, "down": 4e6}}]
    record = fake_record(setting="cifar100_c2", rounds=rounds)
    costs = tables.compare_costs_with_paper(TWO, [record]).set_index(["data", "method"])
    columns = ["GPU GB, ours", "MB up, ours", "MB down, ours"]
    assert costs.loc[("CIFAR-100", "fedavg"), columns].tolist() == [DASH, DASH, "2"]


# --- settings


def changed(setting: str, block: str, key: str, value: object) -> dict[str, Any]:
    """The parameters with one number of a setting changed, and of none that extends it."""
    params = read_params()
    whole = {name: read_block(params, "settings", name) for name in params["settings"]}
    settings = {name: copy.deepcopy(each) for name, each in whole.items()}  # that share no values
    settings[setting][block][key] = value
    return {**params, "settings": settings}


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
        text = f"3 x 224 x 224 ≠ {side} x {side}"
        marked = differing(changed("imagenet1k_c20", "data", "size", side))
        assert marked == {("ImageNet-1K, 20 classes", "Image Size"): text}


# --- networks

PARTS: dict[str, Any] = {"cnn": {"features": 512, "channels": (32, 64)}}


def network_size(network: Network, shape: Any, classes: int) -> tuple[int, int]:
    """The numbers of parameters and of values in buffers, counted without storing any."""
    with torch.device("meta"):
        module = build_network(network, shape, classes, seed=0)
    buffers = (b.numel() for b in module.buffers() if b.is_floating_point())
    return sum(p.numel() for p in module.parameters()), sum(buffers)


@pytest.mark.parametrize("row", printed.NETWORKS.to_dict("records"), ids=str)
def test_stored_sizes_of_networks_are_those_of_networks_that_are_built(row: Any) -> None:
    given = {key: row[key] for key in ("stem", "norm") if row[key] != DASH}
    network = Network(row["network"], **given, **PARTS.get(row["network"], {}))
    shape = tuple(map(int, row["images"].split(" x ")))
    found = network_size(network, shape, int(row["classes"]))
    assert found == (int(row["parameters"]), int(row["buffers"]))


def test_what_the_page_says_about_the_papers_sizes_is_true() -> None:
    """11.7 M and 44.6 are ResNet-18 with 1,000 classes in MiB, no smaller head, and not in MB;
    Swin-T is 28.3 M, and 112.5 is its size in neither unit."""
    sizes = {  # of the first network of a kind and number of classes
        (row.network, int(row.classes)): int(row.parameters)
        for row in printed.NETWORKS[::-1].itertuples()
    }
    big, own, swin = sizes["resnet18", 1000], sizes["resnet18", 100], sizes["swin_t", 1000]
    assert [round(big / 1e6, 1), round(4 * big / MIB, 1)] == [11.7, 44.6]
    assert (own, round(4 * own / MIB, 1)) == (11_176_512 + 100 * 513, 42.8)
    assert 44.6 not in (round(4 * big / MB, 1), round(4 * own / MB, 1))
    assert swin == 27_519_354 + 1000 * 769
    assert [round(4 * swin / unit, 1) for unit in (MB, MIB)] == [113.2, 107.9]
