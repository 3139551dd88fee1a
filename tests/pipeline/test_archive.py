"""Published records: those of the pages, small, and never in the place of what was trained here."""

import csv
from pathlib import Path

import numpy as np
import pytest

from stamp_core.core.paths import ROOT
from stamp_core.results.records import Record, load_record
from tests.report.made_records import fake_record
from workbench.report.frames import final_score
from workbench.workflow import archive

PUBLISHED = sorted((ROOT / "figures").glob("*/records/*.tar.xz"))


def save(record: Record, folder: Path) -> Path:
    """The folder of the record's run, which is written below `folder`."""
    runs = folder / f"{record.name}-0to1"
    record.save(runs / str(record.run[2]))
    return runs


def test_a_record_comes_back_with_all_that_tables_show(tmp_path):
    records = [fake_record("fedavg", 0), fake_record("stamp", 1)]
    folders = [save(record, tmp_path / "runs") for record in records]
    archive.pack(folders, tmp_path / "some.tar.xz")
    assert archive.unpack(tmp_path / "some.tar.xz", tmp_path / "other") == (2, 0)
    for record, folder in zip(records, folders, strict=True):
        back = load_record(tmp_path / "other" / folder.name / str(record.run[2]))
        assert (back.about, back.history) == (record.about, record.history)
        assert back.scores.keys() == record.scores.keys()
        assert all(np.array_equal(back.scores[k], v, True) for k, v in record.scores.items())
        assert np.array_equal(back.tests, record.tests)
        assert not (back.weights or back.features or back.memory)


def test_equal_records_give_equal_bytes_in_any_order(tmp_path):
    folders = [save(fake_record(name, 0), tmp_path / "runs") for name in ("stamp", "fedavg")]
    archive.pack(folders, tmp_path / "a")
    archive.pack(folders[::-1], tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_was_trained_here_stays(tmp_path):
    folder = save(fake_record(seed=0), tmp_path / "runs")
    archive.pack([folder], tmp_path / "a")
    own = fake_record(seed=0, final=(0.1, 0.2))
    own.save(folder / "0")
    assert archive.unpack(tmp_path / "a", tmp_path / "runs") == (0, 1)
    kept = load_record(folder / "0")
    assert np.array_equal(kept.scores["global"], own.scores["global"], True)


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
def test_published_records_are_those_of_the_published_table(path, tmp_path):
    setting = path.name.removesuffix(".tar.xz")
    pages = [path.parents[1] / setting / "accuracy.csv", path.parents[1] / "ablation/ablation.csv"]
    rows = [row for page in pages for row in csv.DictReader(page.read_text().splitlines())]
    rows = [row for row in rows if row["setting"] == setting]
    table = {  # rows are in the order of tasks: the last one stays
        (row["method"], int(row["seed"]), row["model"]): float(row["accuracy"]) for row in rows
    }
    archive.unpack(path, tmp_path)
    records = [load_record(digest.parent) for digest in tmp_path.glob("*/*/digest")]
    found = {
        (*record.run[1:], model): round(final_score(record, model), 4)
        for record in records
        for model in [record.main_model]
    }
    assert found.items() <= table.items()
    assert {name[:2] for name in found} == {name[:2] for name in table}  # every run of it
