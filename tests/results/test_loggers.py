"""Learning curves in files, and calls of libraries that need not be there."""

import csv
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import small
from small import ROUNDS, plans, run, tiny

from stamp_core.engine import train as engine
from workbench.workflow.loggers import CsvLogger, DvcliveLogger, TensorBoardLogger

NAN = float("nan")


def rows(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------ CSV


def test_a_file_has_a_line_per_round_and_one_beside_it_the_accuracies(tmp_path: Path) -> None:
    experiment = tiny()
    logger = CsvLogger(tmp_path / "curve.csv")
    records = engine.train(experiment, plans(experiment, 0, 1), 1, "cpu", loggers=[logger])
    lines = rows(tmp_path / "curve.csv")
    assert [(int(r["seed"]), int(r["round"])) for r in lines] == [
        (seed, k) for seed in (0, 1) for k in range(ROUNDS)
    ]
    losses = [row["loss"] for record in records.values() for row in record.history]
    assert [float(line["loss"]) for line in lines] == losses
    assert {"experience", "sgd_steps", "seconds/clients", "bytes/up"} <= lines[0].keys()
    accuracies = rows(tmp_path / "curve_accuracy.csv")
    assert [(r["seed"], r["experience"]) for r in accuracies] == [
        (seed, str(e)) for seed in "01" for e in range(3)
    ]
    last = [float(accuracies[2][f"task_accuracy/{t}"]) for t in (1, 2, 3)]
    assert last == records[0].task_accuracies()[-1].tolist()


def test_every_line_is_on_disk_at_once(tmp_path: Path) -> None:
    logger = CsvLogger(str(tmp_path / "curve.csv"))
    for k in range(3):
        logger.on_round(7, k, {"loss": 1 / 3})
        assert len(rows(tmp_path / "curve.csv")) == k + 1


def test_a_stopped_training_has_no_round_twice_once_it_has_ended(tmp_path: Path) -> None:
    path, resume = tmp_path / "curve.csv", tmp_path / "resume"
    with small.stopped_after(3):
        run(tiny(), resume=resume, loggers=[CsvLogger(path)])
    assert len(rows(path)) == 2
    run(tiny(), resume=resume, loggers=[CsvLogger(path)])
    assert [int(row["round"]) for row in rows(path)] == [*range(ROUNDS)]
    assert len(rows(tmp_path / "curve_accuracy.csv")) == 3


def test_the_first_line_gives_the_columns(tmp_path: Path) -> None:
    """A number that is missing later is left empty, one that comes later left out."""
    logger = CsvLogger(tmp_path / "curve.csv")
    logger.on_round(0, 0, {"loss": NAN, "notes/clip": 2})
    logger.on_round(0, 1, {"loss": 0.5, "angles/mean": 3})
    assert (tmp_path / "curve.csv").read_text() == (
        "seed,round,loss,notes/clip\n0,0,nan,2\n0,1,0.5,\n"
    )


def test_a_second_training_is_refused(tmp_path: Path) -> None:
    logger = CsvLogger(tmp_path / "curve.csv")
    logger.on_experience(3, 0, {"accuracy": 0.5})
    with pytest.raises(ValueError, match=r"curve_accuracy\.csv has seed 3 experience 0: "):
        logger.on_experience(3, 0, {"accuracy": 0.5})


def test_a_file_that_cannot_be_written_ends_the_training(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        run(tiny(), loggers=[CsvLogger(tmp_path / "missing" / "curve.csv")])


# ------------------------------------------------------------------ libraries


@pytest.mark.parametrize(
    ("logger", "package"), [(TensorBoardLogger, "tensorboard"), (DvcliveLogger, "dvclive")]
)
def test_a_missing_library_is_named_with_its_extra(
    logger: type[TensorBoardLogger | DvcliveLogger],
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if find_spec(package):
        for name in [package, *(n for n in sys.modules if n.startswith("torch.utils.tensorboard"))]:
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"{package} is missing; the extra `live` has it"):
        logger(tmp_path)


class Writer:
    """A stand-in for TensorBoard's writer."""

    made: list["Writer"]

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.points: list[tuple[str, float, int]] = []
        self.flushed = 0
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.points.append((name, value, step))

    def flush(self) -> None:
        self.flushed = len(self.points)


class Live:
    """A stand-in for DVCLive's logger."""

    made: list["Live"]

    def __init__(self, folder: str, **options: Any) -> None:
        self.folder, self.options, self.step = folder, options, 0
        self.points: list[tuple[str, float, int]] = []
        self.summaries = 0
        Live.made.append(self)

    def log_metric(self, name: str, value: float) -> None:
        self.points.append((name, value, self.step))

    def make_summary(self) -> None:
        self.summaries += 1


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, content: Mapping[str, type]) -> None:
    """Put a module in the place of a library."""
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)
    for each in content.values():
        monkeypatch.setattr(each, "made", [], raising=False)


def tell(logger: TensorBoardLogger | DvcliveLogger) -> None:
    """Two seeds with a round each, one of them with an experience."""
    logger.on_round(4, 5, {"loss": 0.25, "seconds/clients": 2.0})
    logger.on_round(9, 5, {"loss": NAN})
    logger.on_experience(4, 2, {"accuracy": 0.75})


def test_tensorboard_has_a_run_for_each_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An undefined loss is no point; what an earlier training left in the folder is hidden."""
    stand_in(monkeypatch, "torch.utils.tensorboard", {"SummaryWriter": Writer})
    tell(TensorBoardLogger(tmp_path))
    four, nine = Writer.made
    assert (four.folder, nine.folder) == (str(tmp_path / "seed4"), str(tmp_path / "seed9"))
    assert four.points == [("loss", 0.25, 5), ("seconds/clients", 2.0, 5), ("accuracy", 0.75, 2)]
    assert nine.points == [] and four.purge_step == 0 and four.flushed == 3


def test_dvclive_has_a_curve_for_each_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """dvc.yaml, and the experiments of DVC, stay as they are."""
    stand_in(monkeypatch, "dvclive", {"Live": Live})
    tell(DvcliveLogger(tmp_path))
    (live,) = Live.made
    assert live.points == [
        ("seed4/loss", 0.25, 5),
        ("seed4/seconds/clients", 2.0, 5),
        ("seed4/accuracy", 0.75, 2),
    ]
    assert (live.folder, live.summaries) == (str(tmp_path), 3)
    assert live.options == {"save_dvc_exp": False, "dvcyaml": None}
