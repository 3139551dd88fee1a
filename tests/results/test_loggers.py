"""Learning curves in files, and calls of libraries that need not be there."""

import csv
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import small
from small import ROUNDS, plans, tiny

from stamp_core.config.decode import ParameterError
from stamp_core.engine import train as engine
from workbench.workflow.loggers import CsvLogger, DvcliveLogger, TensorBoardLogger, WandbLogger

NAN = float("nan")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_file_has_a_line_per_round_and_one_beside_it_the_accuracies(tmp_path):
    """Also of a training that was stopped: no round is there twice."""
    experiment, path = tiny(), tmp_path / "curve.csv"
    trained = experiment, plans(experiment, 0, 1), 1, "cpu", tmp_path / "resume"
    with small.stopped_after(3):
        engine.train(*trained, loggers=[CsvLogger(path)])
    assert len(rows(path)) == 2
    records = engine.train(*trained, loggers=[CsvLogger(path)])
    lines = rows(path)
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


def test_the_first_line_gives_the_columns(tmp_path):
    """A number that is missing later is left empty, one that comes later left out."""
    logger = CsvLogger(str(tmp_path / "curve.csv"))
    logger.on_round(0, 0, {"loss": NAN, "notes/clip": 2})
    logger.on_round(0, 1, {"loss": 0.5, "angles/mean": 3})
    assert (tmp_path / "curve.csv").read_text() == (
        "seed,round,loss,notes/clip\n0,0,nan,2\n0,1,0.5,\n"
    )


def test_a_second_training_is_refused(tmp_path):
    logger = CsvLogger(tmp_path / "curve.csv")
    logger.on_experience(3, 0, {"accuracy": 0.5})
    with pytest.raises(ValueError, match=r"curve_accuracy\.csv has seed 3 experience 0: "):
        logger.on_experience(3, 0, {"accuracy": 0.5})


@pytest.mark.parametrize(
    ("logger", "package"),
    [(TensorBoardLogger, "tensorboard"), (DvcliveLogger, "dvclive"), (WandbLogger, "wandb")],
)
def test_a_missing_library_is_named_with_its_extra(logger, package, tmp_path, monkeypatch):
    if find_spec(package):
        for name in [package, *(n for n in sys.modules if n.startswith("torch.utils.tensorboard"))]:
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ParameterError, match=rf"{package} is missing; the extra `live` has it"):
        logger(tmp_path)


def test_curves_for_weights_and_biases_have_an_axis_each(monkeypatch):
    """Seeds arrive in turn: one step for all would not rise, and such points are dropped."""
    logged, axes = [], {}

    class Pretended:
        def define_metric(self, name: str, step_metric: str) -> None:
            axes[name] = step_metric

        def log(self, values: dict[str, float]) -> None:
            logged.append(values)

    package = SimpleNamespace(init=lambda project, name: Pretended())
    monkeypatch.setitem(sys.modules, "wandb", package)
    experiment = tiny()
    engine.train(experiment, plans(experiment, 0, 1), 1, "cpu", loggers=[WandbLogger("tiny")])
    for seed in (0, 1):
        rounds = [each[f"seed{seed}/round"] for each in logged if f"seed{seed}/round" in each]
        assert rounds == [*range(ROUNDS)]
        assert axes[f"seed{seed}/round/*"] == f"seed{seed}/round"
    assert not any(math.isnan(value) for values in logged for value in values.values())
