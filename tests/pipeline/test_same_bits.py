"""`make verify`: three runs beside what is published."""

import copy
import json
import sys

import pytest

from workbench.workflow import same_bits


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A file made here, of one short run."""
    monkeypatch.setattr(same_bits, "PUBLISHED", tmp_path / "bits.json")
    monkeypatch.setattr(same_bits, "RUNS", [("tiny", "replay")])
    monkeypatch.setattr(sys, "argv", ["same_bits", "--write"])
    assert same_bits.main() == 0
    monkeypatch.setattr(sys, "argv", ["same_bits"])
    return json.loads(same_bits.PUBLISHED.read_text())


def test_the_first_number_that_differs_is_named(published, monkeypatch, capsys):
    assert same_bits.main() == 0 and "gives the published bits." in capsys.readouterr().out
    monkeypatch.setattr(same_bits, "train_run", lambda *run: published["-".join(run)])  # once more
    changed = copy.deepcopy(published)
    losses = changed["tiny-replay"]["losses"]
    losses[2], losses[5] = losses[2] * (1 + 2**-50), 0.0
    same_bits.PUBLISHED.write_text(json.dumps(changed))
    assert same_bits.main() == 1
    said = capsys.readouterr().out
    assert "tiny, replay, seed 200: number 3 of its losses is " in said
    changed = copy.deepcopy(published)
    changed["tiny-replay"]["weights"] = "0"
    same_bits.PUBLISHED.write_text(json.dumps(changed))
    assert same_bits.main() == 1 and "the final weights are others" in capsys.readouterr().out
