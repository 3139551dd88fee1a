"""Options of all sources: invalid ones are refused by name, with the place in params.yaml."""

import sys
from pathlib import Path
from typing import Any

import pytest

from stamp_core.config.decode import ParameterError
from stamp_core.data import sources
from stamp_core.data.dataset import source_options
from stamp_core.data.sources import digits, glyphs

GLYPHS = {"source": "glyphs", "classes": 5, "train_per_class": 6, "test_per_class": 4}
FOLDER = {"source": "folder", "root": "set", "size": 6}
DIGIT10, IMAGENET, NPZ, OFFICE = (
    {"source": name} for name in ("digit10", "imagenet1k", "npz", "office31")
)
NAN = float("nan")
SHARE = "; it must be above 0 and below 1"
ONE = " is 0; it must be at least 1"
NO_FILE = "; it must be the name of an .npz file, or domain_files set"
ONCE = "; it must be at least one set, and none twice"
NAMED_ONCE = "; it must be at least one folder, each named once"

INSIDE = "; it must be a path without '..', or an absolute one"
A_FOLDER = "; it must be the name of a folder inside the root"


@pytest.mark.parametrize(
    ("spec", "change", "message"),
    [
        (GLYPHS, {"source": "glyph"}, ".source 'glyph' is unknown; did you mean 'glyphs'?"),
        (GLYPHS, {"source": ["glyphs"]}, ".source ['glyphs'] is unknown"),
        (GLYPHS, {"clases": 3}, ": 'clases' is unknown; did you mean 'classes'?"),
        (GLYPHS, {"classes": 101}, ".classes is 101; it must be between 2 and 100"),
        (GLYPHS, {"classes": 1}, ".classes is 1; it must be between 2 and 100"),
        (GLYPHS, {"classes": "5"}, ".classes is '5'; it must be a whole number"),
        (GLYPHS, {"train_per_class": 0}, f".train_per_class{ONE}"),
        (GLYPHS, {"test_per_class": 0}, f".test_per_class{ONE}"),
        (GLYPHS, {"size": 7}, ".size is 7; it must be between 8 and 64"),
        (GLYPHS, {"size": 65}, ".size is 65"),
        (GLYPHS, {"style": -0.1}, ".style is -0.1; it must be between 0 and 2"),
        (GLYPHS, {"style": NAN}, ".style is nan"),
        (GLYPHS, {"seed": -1}, ".seed is -1; it must be at least 0"),
        (
            GLYPHS,
            {"face_domains": True, "train_per_class": 99},
            ".test_per_class is 4; it must be at least 16",
        ),
        (GLYPHS, {"face_domains": 1}, ".face_domains is 1; it must be true or false"),
        *(
            ({"source": "digits"}, {"test_share": share}, f".test_share is {share}{SHARE}")
            for share in (0.0, 1.0, -1.0)
        ),
        ({"source": "digits"}, {"test_share": NAN}, ".test_share is nan"),
        *((spec, {"size": 0}, f".size{ONE}") for spec in (FOLDER, IMAGENET, OFFICE)),
        (FOLDER, {"test_share": 1.0}, f".test_share is 1.0{SHARE}"),
        (FOLDER, {"test_share": 0}, f".test_share is 0.0{SHARE}"),
        (FOLDER, {"domains": ["a"]}, f".test_share is None{SHARE}"),
        (FOLDER, {"domains": ["a", "a"], "test_share": 0.5}, f".domains is ['a', 'a']{NAMED_ONCE}"),
        (FOLDER, {"gray": True}, ": 'gray' is unknown; did you mean 'grey'?"),
        *(
            (spec, {"root": root}, f".root is {root!r}{INSIDE}")
            for spec in (FOLDER, IMAGENET, OFFICE)
            for root in ("..", "../other", "set/../../other")
        ),
        *(
            (spec, {"domains": [name], "test_share": 0.5}, f".domains is {name!r}{A_FOLDER}")
            for spec in (FOLDER, OFFICE)
            for name in ("", ".", "..", "a/../../b", "/etc")
        ),
        (NPZ, {"file": "../a.npz"}, f".file is '../a.npz'{INSIDE}"),
        (NPZ, {"domain_files": ["a.npz", "x/../b.npz"]}, f".domain_files is 'x/../b.npz'{INSIDE}"),
        (OFFICE, {"test_share": -0.5}, f".test_share is -0.5{SHARE}"),
        (OFFICE, {"domains": []}, f".domains is []{NAMED_ONCE}"),
        (IMAGENET, {"per_class_train": 0}, f".per_class_train{ONE}"),
        (IMAGENET, {"per_class_test": 0}, f".per_class_test{ONE}"),
        (
            IMAGENET,
            {"test": "train"},
            ".per_class_train is None; it must be a number, as test is 'train'",
        ),
        (IMAGENET, {"test": "both"}, ".test 'both' is unknown; known: train, val"),
        (NPZ, {}, f".file is None{NO_FILE}"),
        (NPZ, {"file": ""}, f".file is ''{NO_FILE}"),
        (
            NPZ,
            {"file": "a.npz", "domain_files": ["b.npz"]},
            ".file is 'a.npz'; it must be absent where domain_files is set",
        ),
        (
            NPZ,
            {"domain_files": ["a/x.npz", "b/x.npz"]},
            ".domain_files is ['a/x.npz', 'b/x.npz']; it must be files of different names",
        ),
        (NPZ, {"file": "a.npz", "size": 0}, f".size{ONE}"),
        (NPZ, {"file": 3}, ".file is 3; it must be text"),
        (DIGIT10, {"sets": ["mnist", "uspa"]}, ".sets: 'uspa' is unknown; did you mean 'usps'?"),
        (DIGIT10, {"sets": []}, f".sets is []{ONCE}"),
        (DIGIT10, {"sets": ["usps", "usps"]}, f".sets is ['usps', 'usps']{ONCE}"),
        (DIGIT10, {"sets": "usps"}, ".sets is 'usps'; it must be a list"),
        (DIGIT10, {"per_class": 0}, f".per_class{ONE}"),
        *(
            ({"source": name}, change, message)
            for name in ("cifar10", "cifar100", "mnist", "emnist_digits", "usps", "svhn")
            for change, message in (
                ({"size": 0}, f".size{ONE}"),
                ({"size": "8"}, ".size is '8'; it must be a whole number"),
                ({"grey": 1}, ".grey is 1; it must be true or false"),
                ({"gray": True}, ": 'gray' is unknown; did you mean 'grey'? known: grey, size"),
            )
        ),
    ],
)
def test_invalid_options_are_refused_by_name(
    spec: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParameterError) as error:
        source_options({**spec, **change}, "here")
    assert str(error.value).startswith(f"here{message}")


def test_absolute_paths_and_folders_in_folders_are_options() -> None:
    for spec in (FOLDER, IMAGENET, OFFICE):
        source_options({**spec, "root": "/data/old/../set"})
    source_options({**FOLDER, "root": "sets/..a", "domains": ["photo/real"], "test_share": 0.5})
    source_options({**NPZ, "domain_files": ["/data/../a.npz", "sets/b.npz"]})


def test_a_source_is_a_file_of_its_folder_with_a_plain_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other name is imported, whatever file it would find."""
    code = "from stamp_core.data.store.downloads import ImageOptions as Options\n"
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
        assert str(error.value).endswith("known: mine_2")


def test_a_source_must_be_named() -> None:
    with pytest.raises(ParameterError, match=r"params.yaml: data.source is missing"):
        source_options({"classes": 2})


def test_valid_options_are_returned_with_their_defaults() -> None:
    expected = glyphs.Options(classes=5, train_per_class=6, test_per_class=4, size=20)
    assert source_options(GLYPHS) == expected
    assert source_options({"source": "digits"}) == digits.Options(test_share=0.25)
    assert source_options(IMAGENET).size == 224  # type: ignore[attr-defined]
    assert source_options(OFFICE).size == 300  # type: ignore[attr-defined]
