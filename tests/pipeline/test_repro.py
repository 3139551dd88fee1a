"""The driver of `make repro`, `make cifar100` and others: which stages it runs."""

import subprocess
from typing import Any

import pytest

from stamp_core.config.params import OWN
from stamp_core.core.paths import ROOT
from stamp_core.pipeline import repro
from stamp_core.pipeline.repro import PIPELINES, Driver


@pytest.mark.parametrize("profile", OWN)
def test_every_stage_of_a_profile_is_run(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all settings together: what DVC finds in the file of the pipeline, each stage once."""
    run: list[Any] = []
    monkeypatch.setattr(Driver, "run_groups", lambda self, groups: run.extend(groups))
    Driver().run(profile, None, tour=False)
    command = ["dvc", "stage", "list", "--name-only", PIPELINES[profile]]
    known = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert sorted(stage for group in run for stage in group) == sorted(known.stdout.split())


def test_of_no_stages_none_is_out_of_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make studies` draws no plans, and DVC answers for all pipelines if it is asked for none."""
    monkeypatch.setattr(repro, "dvc_answer", lambda *arguments: '{"attack@0": []}')
    assert repro.outdated([]) == [] and repro.outdated(["attack@0"]) == ["attack@0"]
