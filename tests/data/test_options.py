"""A source is found by the name of its file; invalid options: tests/config/test_refusals.py."""

import sys
from pathlib import Path

import pytest

from stamp_core.config.decode import ParameterError
from stamp_core.data import sources
from stamp_core.data.dataset import source_options


def test_a_source_is_a_file_of_its_folder_with_a_plain_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other name is imported, whatever file it would find."""
    code = "from stamp_core.data.images import ImageOptions as Options\n"
    (tmp_path / "pack").mkdir()
    for name in ("mine_2.py", "a-b.py", "a b.py", "a;b.py", "pack/__init__.py"):
        (tmp_path / name).write_text(code)
    monkeypatch.setattr(sources, "__path__", [str(tmp_path)])
    source_options({"source": "mine_2"})
    del sys.modules[f"{sources.__name__}.mine_2"]
    for name in ("a-b", "a b", "a;b", "pack", "../mine_2", "mine_2.py", "__init__", "mine_2\n", 3):
        with pytest.raises(ParameterError) as error:
            source_options({"source": name})
        assert f".source {name!r} is unknown; " in str(error.value)
        assert "mine_2" in str(error.value).partition("known: ")[2] or name == "mine_2"


def test_a_source_must_be_named() -> None:
    with pytest.raises(ParameterError, match=r"params.yaml: data.source is missing"):
        source_options({"classes": 2})
