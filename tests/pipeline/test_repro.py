"""The driver of `make repro`, `make cifar100` and others: which stages it runs."""

import subprocess
import sys
from typing import Any

import pytest

from stamp_core.config.params import OWN
from stamp_core.core.paths import ROOT
from stamp_core.data import loading
from workbench.workflow import repro
from workbench.workflow.repro import PIPELINES, Driver


@pytest.mark.parametrize("profile", OWN)
def test_every_stage_of_a_profile_is_run(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all settings together: what DVC finds in the file of the pipeline, each stage once."""
    run: list[Any] = []
    monkeypatch.setattr(Driver, "run_groups", lambda self, groups: run.extend(groups))
    monkeypatch.setattr(Driver, "provide_images", lambda self, *settings: None)
    Driver().run(profile, None, tour=False)
    command = ["dvc", "stage", "list", "--name-only", PIPELINES[profile]]
    known = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert sorted(stage for group in run for stage in group) == sorted(known.stdout.split())


def test_images_are_made_once_and_before_any_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two stages would download them at the same time, and each would show its traceback."""
    done: list[str] = []

    def run_groups(self: Driver, groups: Any) -> int:
        done.append("stages")
        return 0

    monkeypatch.setattr(Driver, "run_groups", run_groups)
    monkeypatch.setattr(loading, "load_dataset", lambda data: done.append(data["source"]))
    monkeypatch.setattr(repro, "find_driver", Driver)
    monkeypatch.setattr(sys, "argv", ["repro", "cifar100", "cifar100_c2_small"])
    assert repro.main() == 0 and done == ["cifar100", "stages"]

    def missing(data: dict[str, Any]) -> None:
        raise FileNotFoundError("cifar100 is not in data/raw")

    monkeypatch.setattr(loading, "load_dataset", missing)
    assert repro.main() == 1 and len(done) == 2
    assert capsys.readouterr().err == "FileNotFoundError: cifar100 is not in data/raw\n"


def test_of_no_stages_none_is_out_of_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make studies` draws no plans, and DVC answers for all pipelines if it is asked for none."""
    monkeypatch.setattr(repro, "dvc_answer", lambda *arguments: '{"attack@0": []}')
    assert repro.outdated([]) == [] and repro.outdated(["attack@0"]) == ["attack@0"]
