"""The command `stamp`."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from stamp_core import load_experiment
from stamp_core.config.decode import ParameterError
from stamp_core.config.params import read_params
from stamp_core.core.paths import ROOT
from workbench import export_plan, load_plans
from workbench.workflow import command
from workbench.workflow import run as runs


def output(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    capsys.readouterr()
    assert command.main(words) == status
    shown = capsys.readouterr()
    return shown.err if status else shown.out


@pytest.fixture
def ran(tmp_path, monkeypatch, capsys):
    """What `stamp run tiny` prints, its records in a folder of this test alone."""
    monkeypatch.setenv("STAMP_PROGRESS", "none")

    def run(*words: str, out: str = "own") -> list[str]:
        where = "--out", str(tmp_path / out)
        return output(capsys, "run", "tiny", *words, *where).splitlines()

    return run


def scores(line: str, label: str) -> str:
    return line.strip().removeprefix(label).strip()


def test_an_experiment_is_compared_with_another_on_the_same_seeds(ran):
    _, one, other, same, _ = ran("fedavg", "fedavg", "--set", "server_lr=1.0")
    assert scores(one, "fedavg server_lr=1.0") == scores(other, "fedavg") and one.endswith(" 2")
    assert same.startswith("fedavg server_lr=1.0 - fedavg: +0.0 (+0.0 to +0.0) points")
    single = ran("fedavg", "fedavg", "--set", "server_lr=1.0", "--seeds", "0")[-2]
    assert single.endswith("fedavg: +0.0 points of final accuracy, of one seed")
    changed = ran("fedavg", "fedavg", "replay", "--set", "server_lr=0.5")
    assert scores(changed[2], "fedavg") == scores(other, "fedavg") != scores(changed[1], "fedavg")
    assert [line.partition(":")[0] for line in changed[4:6]] == [
        f"fedavg server_lr=0.5 - {name}" for name in ("fedavg", "replay")
    ]


def test_a_seed_with_a_current_record_is_not_trained_again(ran, monkeypatch):
    trained = list[int]()
    real = runs.train

    def train(experiment, plans, *rest, **more):
        trained.extend(plans)
        return real(experiment, plans, *rest, **more)

    monkeypatch.setattr(runs, "train", train)
    first = ran("fedavg", "--seeds", "0to1")
    assert ran("fedavg", "--seeds", "0to1") == first and trained == [0, 1]
    ran("fedavg", "--seeds", "1to2")
    assert trained == [0, 1, 2]
    ran("fedavg", "--seeds", "0", "--set", "training.lr=0.03")
    assert trained[3:] == [0]


@pytest.mark.parametrize("kind", ["md", "csv", "tex"])
def test_the_table_has_a_file_of_each_kind(kind, ran, tmp_path):
    file = tmp_path / "tables" / f"mine.{kind}"
    lines = ran("fedavg", "replay", "--table", str(file))
    text = file.read_text()
    accuracy = lines[1].split()[1:4]  # mean, sign and deviation
    assert (r"$\pm$" if kind == "tex" else "±") in text
    assert all(number in text for number in accuracy[::2]) and "replay" in text
    if kind == "csv":
        assert [*pd.read_csv(file).method] == ["fedavg", "replay"]


def test_a_plan_in_a_file_takes_the_place_of_the_settings(ran, tmp_path, capsys):
    """The plan of seed 0 from a file is that of seed 0; seed 1 trains with it as well."""
    experiment = load_experiment("tiny", "fedavg")
    dataset, path = experiment.dataset(), tmp_path / "plan.csv"
    export_plan(load_plans(experiment.setting, dataset, "0")[0], dataset, path)
    words = ("fedavg", "--seeds")
    file = ("--plan", str(path))
    assert ran(*words, "0", *file, out="file")[:2] == ran(*words, "0")[:2]
    assert ran(*words, "1", *file, out="file")[1] != ran(*words, "1")[1]
    path.write_text("client,task,class\n0,0,10\n")
    error = output(capsys, "run", "tiny", *words, "0", *file, status=1)
    assert "classes[0] is 10; it must be above -1 and below 10" in error and error.count("\n") == 1
    for key in ("setting.split.tasks", "split.tasks"):
        changed = ("run", "tiny", *words, "0", "--set", f"{key}=2", *file)
        refused = output(capsys, *changed, status=1)
        assert f"--set {key}: --plan {path} has a split of its own" in refused


HUGE = [
    *((f"split.{name}", 10**11) for name in ("clients", "tasks", "cycles")),
    *(("network.features", 10**9), ("network.channels", [10**9]), ("training.shift", 10**5)),
    *(("training.rounds", value) for value in ("9" * 5000, "0x" + "f" * 5000, 2**63)),
]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "tinny", "fedavg"), "'tinny' is unknown; did you mean 'tiny'"),
        (("run", "tiny", "fedavg", "--set", "server_lr"), "key=value"),
        (("run", "tiny", "fedavg", "--set", "server_lr=[1"), "must be YAML"),
        (("run", "tiny", "fedavg", "--seeds", "2to1"), "rising range"),
        (("run", "tiny", "fedavg", "--seeds", "0to999999999"), "seeds is '0to999999999'"),
        (("run", "tiny", "fedavg", ""), "'' is unknown"),
        (("run", "tiny", "fedavg", "fedavg"), "named once each"),
        (("run", "tiny", "fedavg", *["--set", "server_lr=1"] * 2), "--set server_lr: it must be"),
        *(
            (("run", "tiny", "fedavg", "--set", f"setting.{key}={value}"), key)
            for key, value in HUGE
        ),
        (("run", "tiny", "fedavg", "--table", "mine.xlsx"), "must end with .csv or .md or .tex"),
        (("verify", "/nowhere"), "/nowhere"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words, message, capsys):
    error = output(capsys, *words, status=1)
    assert message in error and error.count("\n") == 1


def test_a_pipe_is_no_file_and_an_interrupt_is_a_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "params").mkdir()
    for path in (tmp_path / "plan.json", tmp_path / "params/settings.yaml"):
        os.mkfifo(path)
    words = ("run", "tiny", "fedavg", "--plan", str(tmp_path / "plan.json"))
    assert "plan.json must be a file" in output(capsys, *words, status=1)
    with pytest.raises(ParameterError, match=r"settings\.yaml is no file or does not exist; every"):
        read_params(tmp_path)
    monkeypatch.setattr(command, "run", lambda arguments: os.kill(os.getpid(), signal.SIGINT))
    assert output(capsys, *words, status=130) == "interrupted\n"


def test_both_experiments_have_the_changed_setting_and_the_first_alone_the_changed_preset(ran):
    words = ("fedavg", "replay", "--set")
    changed = ran(*words, "training.lr=0.03", "server_lr=0.5")
    alone = ran("replay", "--set", "training.lr=0.03")
    assert scores(changed[2], "replay") == scores(alone[1], "replay training.lr=0.03")


def test_images_of_a_folder_are_trained_as_the_page_says(tmp_path):
    """In an empty folder with the settings of docs/data.md and six classes of images."""
    block = re.search(r"```yaml\n(birds:.*?)```", (ROOT / "docs/data.md").read_text(), re.DOTALL)
    (tmp_path / "params").mkdir()
    (tmp_path / "params/settings.yaml").write_text(block[1])
    draw = np.random.default_rng(0)
    for label in range(6):
        images = tmp_path / f"data/raw/birds/bird {label}"
        images.mkdir(parents=True)
        for each in range(10):
            pixels = draw.integers(0, 256, (40, 36, 3), np.uint8)
            Image.fromarray(pixels).save(images / f"{each}.png")
    words = [sys.executable, "-m", "workbench.workflow.command", "run", "birds", "stamp", "replay"]
    environment = {"PYTHONPATH": str(ROOT), "STAMP_PROGRESS": "none"}
    ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert [line.split()[0] for line in ran.stdout.splitlines()[1:3]] == ["stamp", "replay"]
    assert len([*(tmp_path / "data/own/birds").glob("*/*/run.json")]) == 4


def test_a_setting_is_shown_with_who_learns_what(capsys):
    values, schedule = output(capsys, "settings", "--show", "tiny").split("\n\n")
    assert "split.clients" in values and "params/settings.yaml: tiny" in values
    experiment = load_experiment("tiny", "fedavg")
    plan = experiment.plans("0")[0]
    for client, line in enumerate(schedule.splitlines()[1:]):
        cells = line.partition(":")[2].split("|")
        shown = [tuple(map(int, cell.partition("(")[0].split())) for cell in cells]
        assert shown == [task.classes for task in plan.clients[client]]
    assert client == len(plan.clients) - 1
