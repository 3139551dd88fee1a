"""The table of networks: counted sizes, and what the paper states of them."""

from pathlib import Path

import pytest

from stamp_core.config import Network
from stamp_core.tables.networks import (
    MIB,
    NETWORKS,
    architectures,
    networks_page,
    size,
    write_networks,
)
from stamp_core.tables.paper import DASH
from stamp_core.tables.runs import MB


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, ...], dict[str, str]]:
    """The rows of the table by data, network, stem, norm and classes."""
    keys = ["data", "network", "stem", "norm", "classes"]
    return {tuple(row[key] for key in keys): dict(row) for _, row in architectures().iterrows()}


def test_a_row_with_batch_normalisation(rows: dict[tuple[str, ...], dict[str, str]]) -> None:
    """11,176,512 + 100 * 513 parameters and 9,600 buffers: 4 * 11,237,412 = 44,949,648 bytes."""
    row = rows["CIFAR-100", "resnet18", "published", "batch", "100"]
    assert list(row.items())[4:] == [
        ("pictures", "3 x 32 x 32"),
        ("classes", "100"),
        ("parameters", "11,227,812"),
        ("buffers", "9,600"),
        ("MB one way", "44.95"),
        ("MiB one way", "42.87"),
        ("paper: parameters", "11.7 M"),
        ("paper: MB one way", "44.6"),
    ]


def test_a_row_without(rows: dict[tuple[str, ...], dict[str, str]]) -> None:
    """27,519,354 + 1000 * 769 parameters; 4 * 28,288,354 = 113,153,416 bytes."""
    row = rows["ImageNet-1K", "swin_t", DASH, DASH, "1,000"]
    assert list(row.values())[6:] == ["28,288,354", "0", "113.2", "107.9", "28.8 M", "112.5"]


def test_the_paper_is_quoted_only_for_what_it_uses(
    rows: dict[tuple[str, ...], dict[str, str]],
) -> None:
    """It uses ResNet-18 with a head over 10, 31 or 100 classes and says sizes of CIFAR-100 alone;
    neither a ResNet-18 on ImageNet-1K nor a smaller network is its."""
    quoted = {key: list(row.values())[-2:] for key, row in rows.items()}
    assert len(rows) == len(NETWORKS) == 11
    for (data, kind, *_), words in quoted.items():
        own = kind == "resnet18" and data != "ImageNet-1K"
        if kind != "swin_t":
            sent = "44.6" if data == "CIFAR-100" else DASH
            assert words == (["11.7 M", sent] if own else [DASH, DASH])


def test_what_the_page_says_of_the_papers_numbers_is_so() -> None:
    """11.7 M and 44.6 are ResNet-18 with 1,000 classes in MiB, no smaller head, and not in MB;
    Swin-T is 28.3 M, and 112.5 is it in neither unit."""
    big, _ = size(Network("resnet18", norm="batch"), (3, 224, 224), 1000)
    own = size(Network("resnet18", norm="batch"), (3, 32, 32), 100)[0]
    swin, _ = size(Network("swin_t"), (3, 224, 224), 1000)
    assert [round(big / 1e6, 1), round(4 * big / MIB, 1)] == [11.7, 44.6]
    assert round(own / 1e6, 1) == 11.2 and round(4 * own / MIB, 1) == 42.8
    assert 44.6 not in (round(4 * big / MB, 1), round(4 * own / MB, 1))
    assert round(swin / 1e6, 1) == 28.3
    assert [round(4 * swin / unit, 1) for unit in (MB, MIB)] == [113.2, 107.9]


def test_networks_of_ones_own() -> None:
    """16 * 3 + 3 hidden, 3 * 5 + 5 in the head: 284 bytes; a file of weights is not looked for."""
    own = Network("mlp", features=3, pretrained="nowhere.pth")
    rows = architectures([("mine", own, (1, 4, 4), 5)])
    assert list(rows.iloc[0])[:8] == ["mine", "mlp", DASH, DASH, "1 x 4 x 4", "5", "71", "0"]
    assert list(rows.iloc[0])[8:] == ["0.000284", "0.0002708", DASH, DASH]


def test_the_page_is_written_as_one_file(tmp_path: Path) -> None:
    path = write_networks(tmp_path / "new")
    text = path.read_text(encoding="utf-8")
    assert path == tmp_path / "new" / "networks.md" and text == networks_page()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(NETWORKS) and {line.count("|") for line in lines} == {13}
    assert text.startswith("# Networks\n\nParameters are counted") and text.endswith("|\n")
