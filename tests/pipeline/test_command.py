"""The command `stamp`, also outside a checkout from a wheel."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stamp_core import load_experiment
from stamp_core.config.decode import ParameterError
from stamp_core.config.params import read_params
from stamp_core.core.paths import ROOT
from workbench import export_plan, load_plans
from workbench.workflow import command


def output(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    capsys.readouterr()
    assert command.main(words) == status
    shown = capsys.readouterr()
    return shown.err if status else shown.out


def test_an_experiment_is_compared_with_another_on_the_same_seeds(monkeypatch, capsys):
    monkeypatch.setenv("STAMP_PROGRESS", "none")
    words = ("run", "tiny", "fedavg", "--compare", "fedavg")
    one, other, difference = output(capsys, *words).splitlines()
    assert one.startswith("fedavg  accuracy ") and one.endswith("n = 2")
    assert difference.endswith("+0.0 (+0.0 to +0.0)")
    changed = output(capsys, *words, "--set", "server_lr=0.5")
    assert changed.splitlines()[0].startswith("fedavg server_lr=0.5  ")
    assert changed.splitlines()[1].split(None, 1) == other.split(None, 1)


def test_a_plan_in_a_file_takes_the_place_of_the_settings(tmp_path, monkeypatch, capsys):
    """The plan of seed 0 from a file is that of seed 0; seed 1 trains with it as well."""
    monkeypatch.setenv("STAMP_PROGRESS", "none")
    experiment = load_experiment("tiny", "fedavg")
    dataset, path = experiment.dataset(), tmp_path / "plan.csv"
    export_plan(load_plans(experiment.setting, dataset, "0")[0], dataset, path)
    words = ("run", "tiny", "fedavg", "--seeds")
    assert output(capsys, *words, "0", "--plan", str(path)) == output(capsys, *words, "0")
    assert output(capsys, *words, "1", "--plan", str(path)) != output(capsys, *words, "1")
    path.write_text("client,task,class\n0,0,10\n")
    error = output(capsys, *words, "0", "--plan", str(path), status=1)
    assert "classes[0] is 10; it must be above -1 and below 10" in error and error.count("\n") == 1
    changed = (*words, "0", "--set", "setting.split.tasks=2", "--plan", str(path))
    refused = output(capsys, *changed, status=1)
    assert f"--set setting.split.tasks: --plan {path} has a split of its own" in refused


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
        (("run", "tiny", "fedavg", "--compare", ""), "'' is unknown"),
        (("run", "tiny", "fedavg", *["--set", "server_lr=1"] * 2), "--set server_lr: it must be"),
        *(
            (("run", "tiny", "fedavg", "--set", f"setting.{key}={value}"), key)
            for key, value in HUGE
        ),
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
    with pytest.raises(ParameterError, match=r"settings\.yaml is no file"):
        read_params(tmp_path)
    monkeypatch.setattr(command, "run", lambda arguments: os.kill(os.getpid(), signal.SIGINT))
    assert output(capsys, *words, status=130) == "interrupted\n"


def test_one_set_adds_to_another():
    words = ["run", "tiny", "fedavg", "--set", "a=1", "b=2", "--set", "c=3"]
    assert [*command.parse_overrides(command.parser().parse_args(words).set)] == ["a", "b", "c"]


def test_both_experiments_have_the_changed_setting_and_the_first_alone_the_changed_preset(
    monkeypatch, capsys
):
    monkeypatch.setenv("STAMP_PROGRESS", "none")
    setting = "setting.training.lr=0.03"
    words = ("run", "tiny", "fedavg", "--compare", "replay", "--set")
    changed = output(capsys, *words, setting, "server_lr=0.5").splitlines()
    alone = output(capsys, "run", "tiny", "replay", "--set", setting).splitlines()
    assert changed[1].split(None, 1)[1] == alone[0].split(None, 2)[2]


def test_a_wheel_trains_in_an_empty_folder(tmp_path):
    """The parameters are in the wheel; what is written goes to the working directory."""
    build, site, empty = (tmp_path / name for name in ("build", "site", "empty"))
    empty.mkdir()
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in files.stdout.splitlines():
        if name.startswith(("stamp_", "params", "setup.py", "pyproject", "README", "LICENSE")):
            (build / name).parent.mkdir(parents=True, exist_ok=True)
            (build / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(build)], check=True)
    code = "import stamp_core, sys; from workbench.workflow.command import main;"
    code += "print(stamp_core.__file__); sys.exit(main(['run', 'tiny', 'fedavg', '--seeds', '0']))"
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {code}"],
        cwd=empty,
        env={"STAMP_PROGRESS": "none"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    where, result = ran.stdout.splitlines()
    assert Path(where).is_relative_to(site) and result.startswith("fedavg  accuracy ")
