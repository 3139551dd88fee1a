"""The paper's numbers as typed, its settings and its networks; its page: test_pages.py."""

import copy
from typing import Any

import pytest
import torch

from stamp_core.config.params import read_block, read_params
from stamp_core.config.schema import Network
from stamp_core.models.networks import build_network
from workbench.report import tables
from workbench.report.tables import printed
from workbench.report.tables.paper import OURS
from workbench.report.text import DASH


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


def test_our_settings_hold_the_papers_numbers():
    assert differing() == {}
    rows = tables.training_details().set_index("attribute")
    assert rows.shape == (1 + 11 + 1, 8)
    compared = ~rows.drop(index=["setting", "Options of the data"]).map(lambda t: t[0] == "(")
    assert compared.to_numpy().sum() == 8 * len(OURS) + 3  # three sizes of images


@pytest.mark.parametrize(
    ("attribute", "value", "paper"),
    [
        ("Task number", 4, "5"),
        ("Learning Rate", 0.0101, "0.01"),
        ("Data heterogeneity", 1.0, "0.1"),
        ("Data heterogeneity", None, "0.1"),
    ],
)
def test_a_changed_number_is_marked(attribute, value, paper):
    params = changed("cifar10_alpha", *OURS[attribute].split("."), value)
    text = f"{paper} ≠ {'N/A' if value is None else value}"
    assert differing(params) == {("CIFAR-10, non-IID", attribute): text}


def test_numbers_are_compared_by_value_and_images_by_their_sides():
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


@pytest.mark.parametrize("row", printed.NETWORKS.to_dict("records"), ids=str)
def test_stored_sizes_of_networks_are_those_of_networks_that_are_built(row):
    given = {key: row[key] for key in ("stem", "norm") if row[key] != DASH}
    if row["network"] == "cnn":
        given |= {"features": 512, "channels": (32, 64)}
    shape = tuple(map(int, row["images"].split(" x ")))
    with torch.device("meta"):  # which stores no values
        net = build_network(Network(row["network"], **given), shape, int(row["classes"]), seed=0)
    assert sum(p.numel() for p in net.parameters()) == int(row["parameters"])
    buffers = (b.numel() for b in net.buffers() if b.is_floating_point())
    assert sum(buffers) == int(row["buffers"])
