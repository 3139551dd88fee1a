"""The method that the README adds is a method: whoever follows it has no test to write."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import small
import test_engine
import test_methods

from stamp_core import config, experiments, methods
from stamp_core.experiments import experiment
from stamp_core.paths import ROOT

FENCE = re.compile(r"stamp_core/methods/(\w+)\.py.*?```python\n(.*?)```", re.S)


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of the README's method, which for once is in the package."""
    found = FENCE.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert found
    (tmp_path / f"{found[1]}.py").write_text(found[2])
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.setattr(experiments.Experiment, "files", lambda cell: [])
    yield found[1]
    sys.modules.pop(f"stamp_core.methods.{found[1]}", None)


def test_the_method_of_the_readme_is_short(added: str) -> None:
    source = FENCE.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert source and len([line for line in source[2].splitlines() if line.strip()]) <= 30


@pytest.mark.parametrize("setting", test_methods.SETTINGS)
def test_the_method_of_the_readme_passes_the_generic_tests(
    added: str, setting: str, tmp_path: Path
) -> None:
    test_methods.test_with_its_extras_off_a_method_is_fedavg_bit_for_bit(added, setting)
    test_methods.test_nothing_given_is_written_to(added)
    test_methods.test_a_visit_depends_on_nothing_but_its_arguments(added, "shared")
    test_methods.test_clients_with_next_to_nothing_do_no_harm(added, {}, small.NETWORK)
    test_engine.test_when_all_drop_out_nothing_changes_and_the_run_ends(added)


def test_it_needs_one_line_of_params(added: str) -> None:
    """Its name in the grid; it does something, and a slip in its row is named."""
    params = config.read()
    params["grid"]["method"].append(added)
    experiments.check(params)
    assert experiment("tiny", added, params).params.momentum == 0.9
    moved, still = (small.run(small.tiny(kind)) for kind in (added, "fedavg"))
    with pytest.raises(AssertionError):
        small.assert_same_weights(moved, still)
    params["methods"][added] = {"momentun": 0.5}
    with pytest.raises(config.ParameterError, match="did you mean 'momentum'"):
        experiment("tiny", added, params)
