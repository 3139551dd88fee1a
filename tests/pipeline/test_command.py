"""The command `stamp`, also outside a checkout from a wheel."""

import subprocess
import sys
from pathlib import Path

import pytest

from stamp_core import load_experiment
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "tinny", "fedavg"), "'tinny' is unknown; did you mean 'tiny'"),
        (("run", "tiny", "fedavg", "--set", "server_lr"), "key=value"),
        (("run", "tiny", "fedavg", "--set", "server_lr=[1"), "must be YAML"),
        (("run", "tiny", "fedavg", "--seeds", "2to1"), "rising range"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words, message, capsys):
    error = output(capsys, *words, status=1)
    assert message in error and error.count("\n") == 1


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
