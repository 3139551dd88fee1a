"""The page of measurements on a device: whole on any device, refused where it is not here."""

import re

import pytest
import torch

from benchmarks import device
from benchmarks.device import Case, Client, Sizes, page, remembering
from stamp_core.config.schema import Network

CNN = Network("cnn", channels=(4,), features=8, norm="batch")
CASES = (Case("CNN", CNN, 8, 4, 3), Case("MLP", Network("mlp", features=8), 8, 4, 3))
TINY = Sizes(CASES, images=20, epochs=1, past=(1, 3), matrix=16, repeats=1, counted=("fedavg",))


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return page("cpu", TINY)


def cells(lines: list[str], start: str) -> list[list[str]]:
    """The cells of the rows whose first cell is `start`."""
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [row[1:] for row in rows if row[0] == start]


def test_each_network_is_measured(lines: list[str]) -> None:
    for case in CASES:
        rows = cells(lines, case.name)
        for eager, graphs, _, ratio, share, memory in rows:
            assert int(eager.replace(",", "")) > 0 and graphs == "none here"
            assert re.fullmatch(r"[\d.]+ \(from [\d.]+ to [\d.]+, n = 1\)", ratio)
            assert float(share) >= 0 and memory.endswith(" GB")


def test_every_row_of_a_table_has_the_columns_of_its_head(lines: list[str]) -> None:
    tables = "\n".join(lines).split("\n\n")
    widths = [{row.count("|") for row in t.split("\n")} for t in tables if t.startswith("|")]
    assert len(widths) == 5 and all(len(width) == 1 for width in widths)


def test_stamp_is_timed_with_past_tasks_and_runs_are_compared(lines: list[str]) -> None:
    for past in TINY.past:
        assert "s a client round" in cells(lines, f"STAMP, {past} past tasks")[0][0]
    assert cells(lines, "two runs are bit-identical") == [["True"]]
    assert not cells(lines, "graphs and eager are bit-identical")  # a CPU has no graphs
    step, round_ = cells(lines, "fedavg")  # copies of a step, and of a round beside its steps
    assert step == ["0.00", "0.00", "0.00", "0.00"] and len(round_) == 6


def test_the_memory_of_past_tasks_is_matched() -> None:
    client = Client(CASES[0], "cpu", 20, classes=2, method="stamp")
    assert not client.round().log.numbers  # nothing is remembered, nothing matched
    assert any("temporal" in name for name in remembering(client, 3).round().log.numbers)
    assert client.state["memory"]["tasks"].unique().tolist() == [1, 2, 3]


def test_the_operations_of_a_step_by_hand() -> None:
    """An MLP 192-8-100 on 4 images: a product forward; for the head two backward, else one."""
    module = Client(CASES[1], "cpu", 100).runtime.network(0)
    products = 2 * 4 * (192 * 8) * 2 + 2 * 4 * (8 * 100) * 3
    assert device.step_operations(module, CASES[1], torch.device("cpu")) == products


def test_a_device_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "resolve_device", lambda _: "cpu")
    with pytest.raises(SystemExit, match="DEVICE=cuda: no GPU here"):
        device.main("cuda")
