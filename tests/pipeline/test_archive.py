"""Published records: those of the pages, small, and never in the place of what was trained here."""

import csv
import io
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest

from stamp_core.core.paths import ROOT
from stamp_core.results.records import Record, load_record
from tests.report.made_records import fake_record
from workbench.report import tables
from workbench.report.frames import final_score
from workbench.workflow import archive
from workbench.workflow.profiles import read_profile
from workbench.workflow.sweeps import read_sweep

KEPT = ROOT / "figures" / "cifar100" / "records"
SWEEP = KEPT / "rounds.tar.xz"  # every other archive is of a setting, which has a table
PUBLISHED = sorted({*(ROOT / "figures").glob("*/records/*.tar.xz")} - {SWEEP})
ROUNDS = ROOT / "figures" / "cifar100" / "rounds" / "rounds.md"


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


def member(name: str, kind: bytes = tarfile.DIRTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, target, 0o755
    return made


LONG, SHORT = ["d" * 247] * 16, "/".join("abcdefghijklmnop") + "/" + "l" * 254
CHAIN = [  # CVE-2025-4517: links whose path is short, and longer than realpath() follows
    *(member("/".join(LONG[: k + 1])) for k in range(16)),
    *(member("/".join([*LONG[:k], "abcdefghijklmnop"[k]]), b"2", LONG[0]) for k in range(16)),
    member(SHORT, tarfile.SYMTYPE, "../" * 16),
    member("escape", tarfile.SYMTYPE, f"{SHORT}/../outside"),
    member("escape/made", tarfile.REGTYPE),
]


@pytest.mark.parametrize(
    "members",
    [
        CHAIN,
        [member("run/0/digest", tarfile.LNKTYPE, "/etc/hostname")],
        [member("run", tarfile.SYMTYPE, "..")],
        [member("run/0/pipe", tarfile.FIFOTYPE)],
        [member("run/0/device", tarfile.CHRTYPE)],
        [member("../outside/0/digest", tarfile.REGTYPE)],
    ],
)
def test_an_archive_writes_nothing_outside(members, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "outside").mkdir()
    with tarfile.open(tmp_path / "a.tar.xz", "w:xz") as tar:
        for each in members:
            tar.addfile(each, io.BytesIO())
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError) as error:
        archive.unpack(tmp_path / "a.tar.xz", tmp_path / "runs")
    assert sorted(tmp_path.rglob("*")) == before
    first = next(m for m in members if not m.isdir() or ".." in m.name)
    assert first.name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
def test_published_records_are_those_of_the_published_table(path, tmp_path):
    setting = path.name.removesuffix(".tar.xz")
    folder = path.parents[1]
    pages = [folder / setting / "accuracy.csv", *folder.glob("ablation/ablation.csv")]
    rows = [row for page in pages for row in csv.DictReader(page.read_text().splitlines())]
    rows = [row for row in rows if row["setting"] == setting]
    table = {  # rows are in the order of tasks: the last one stays
        (row["method"], int(row["seed"]), row["model"]): float(row["accuracy"]) for row in rows
    }
    archive.unpack(path, tmp_path)
    records = [load_record(digest.parent) for digest in tmp_path.glob("*/*/digest")]
    found = {
        (*record.run[1:], record.main_model): round(final_score(record, record.main_model), 4)
        for record in records
    }
    assert found.items() <= table.items()
    assert {name[:2] for name in found} == {name[:2] for name in table}  # every run of it


def test_the_published_page_of_rounds_is_drawn_again_from_published_records(tmp_path):
    """Five rounds are those of the setting's table: on the sweep's seeds, of its methods."""
    archive.unpack(SWEEP, tmp_path / "sweep")
    archive.unpack(KEPT / "cifar100_c2_small.tar.xz", tmp_path / "grid")
    swept, grid = (
        [load_record(each.parent) for each in (tmp_path / name).glob("*/*/digest")]
        for name in ("sweep", "grid")
    )
    shown = {record.run for record in swept}
    records = swept + [each for each in grid if each.run in shown]
    order = read_sweep("rounds", read_profile("cifar100")).method
    tables.ROUNDS.write(sorted(records, key=lambda each: order.index(each.run[1])), tmp_path)
    assert (tmp_path / ROUNDS.name).read_text() == ROUNDS.read_text()
