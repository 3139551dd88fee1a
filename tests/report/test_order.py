"""Ranks beside the paper's, on scores whose order is known."""

import pandas as pd
import pytest

from stamp_core.results.records import Record
from tests.report.made_records import fake_record
from workbench.report.frames import run_frame
from workbench.report.tables import results
from workbench.report.tables.results import order_section

# The paper has, with 20 classes: lander 45.1, stamp 41.3, fedas 40.2, fedomg 36.8, fedavg 27.2.
OURS = {"fedomg": 0.5, "fedavg": 0.1, "lander": 0.3, "stamp": 0.6, "replay": 0.9, "fedas": 0.2}


def records(setting: str, methods: dict[str, float] = OURS) -> list[Record]:
    return [
        fake_record(method, seed, (accuracy, accuracy), setting=setting)
        for method, accuracy in methods.items()
        for seed in (0, 1)
    ]


@pytest.mark.parametrize("setting", ["cifar100_c20", "cifar100_c20_small"])
def test_methods_of_both_tables_have_both_ranks_in_the_papers_order(setting):
    _, table, agreement = order_section(run_frame(records(setting)))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [row[0] for row in cells] == ["lander", "stamp", "fedas", "fedomg", "fedavg"]
    assert [row[4] for row in cells] == ["1", "2", "3", "4", "5"]
    assert [row[2] for row in cells] == ["3", "1", "4", "2", "5"]
    assert cells[0][1] == "30.0 ± 0.0" and cells[0][3] == "45.1"
    squares = sum((int(row[2]) - int(row[4])) ** 2 for row in cells)
    rho = 1 - 6 * squares / (5 * 24)  # the definition without ties
    assert f"is {rho:+.2f} (" in agreement and "n = 5 methods" in agreement


@pytest.mark.parametrize(
    ("joint", "said"), [((90, 92), ["2.5 points above replay"]), ((93, 96), [])]
)
def test_a_page_says_where_joint_training_leaves_little_room(joint, said):
    """Differences of 3 and 2 points, then of 6 and 6; without joint training nothing is said."""
    scores = [score / 100 for score in (*joint, 87, 90)]
    rows = pd.DataFrame({"method": ["joint", "joint", "replay", "replay"], "seed": [0, 1, 0, 1]})
    rows["main_accuracy"] = scores
    found = results.room_section(rows)
    assert len(found) == len(said) and all(text in found[0] for text in said)
    assert results.room_section(rows[2:]) == []
