"""Fingerprints: they include all code that a number can depend on, but no comments."""

from pathlib import Path

import pytest

from stamp_core.core import fingerprint

FILES = {
    "engine.py": "import json\nfrom stamp_core.methods import get\n\ndef train(): return get",
    "base.py": "STEP = 1",
    "lonely.py": "",
    "methods/__init__.py": "from stamp_core import base\n\ndef get(): return base.STEP",
    "methods/fedavg.py": "from stamp_core.methods import get",
    "methods/late.py": "def work():\n    from stamp_core.engine import train\n    return train",
    "methods/near.py": "from . import fedavg\nfrom ..base import STEP",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    root = tmp_path / "stamp_core"
    (root / "methods").mkdir(parents=True)
    for name, code in FILES.items():
        (root / name).write_text(code)
    monkeypatch.setattr(fingerprint, "PACKAGES", {"stamp_core": root})
    return root


def imported(package: Path, code: str) -> set[str]:
    script = package.parent / "script.py"
    script.write_text(code)
    return {file.relative_to(package).as_posix() for file in fingerprint.find_imports(script)}


@pytest.mark.parametrize(
    ("code", "files"),
    [
        ("import json, numpy.linalg", set()),
        ("from other.stamp_core import base", set()),
        ("import stamp_core.base", {"base.py"}),
        ("from stamp_core.base import STEP as step", {"base.py"}),
        ("from stamp_core import base, lonely", {"base.py", "lonely.py"}),
        ("from stamp_core.methods import get", {"methods/__init__.py"}),
        ("from stamp_core.methods import late", {"methods/__init__.py", "methods/late.py"}),
        ("import stamp_core.methods.late", {"methods/__init__.py", "methods/late.py"}),
        ("def f():\n    if 1:\n        from stamp_core import base", {"base.py"}),
        ("from stamp_core import nothing", set()),
    ],
)
def test_the_files_of_an_import(package, code, files):
    assert imported(package, code) == files


def closure(package: Path, *files: str) -> list[str]:
    found = fingerprint.import_closure(*(package / file for file in files))
    return [file.relative_to(package).as_posix() for file in found]


def test_the_closure_goes_through_functions_relative_and_circular_imports_and_no_further(package):
    methods = ["base.py", "engine.py", "methods/__init__.py"]
    assert closure(package, "methods/late.py") == [*methods, "methods/late.py"]
    near = ["base.py", "methods/__init__.py", "methods/fedavg.py", "methods/near.py"]
    assert closure(package, "methods/near.py") == near
    assert closure(package, "lonely.py", "base.py", "lonely.py") == ["base.py", "lonely.py"]
    (package / "base.py").write_text("from stamp_core.engine import train")
    assert closure(package, "base.py") == methods


CODE = '''"""What it is."""
class A:
    """A class."""
    def f(self, x: int) -> int:
        """What comes back."""
        return x + 1  # the next
'''


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        (
            "class A:\n\n\n    def f(self, x: int) -> int:\n        return (x\n          + 1)\n",
            True,
        ),
        (CODE.replace("x + 1", "x + 2"), False),
        (CODE.replace("x + 1", "x + 1.0"), False),
        (CODE.replace("class A", "class B"), False),
        (CODE.replace("return x + 1", 'return "What comes back."'), False),
        (f"{CODE}'a string after the docstring'", False),
    ],
)
def test_code_counts_but_not_comments_layout_and_docstrings(other, equal, tmp_path):
    (tmp_path / "a.py").write_text(CODE)
    (tmp_path / "b.py").write_text(other)
    digests = [fingerprint.code_digest(tmp_path / name) for name in ("a.py", "b.py")]
    assert (digests[0] == digests[1]) == equal


def test_the_fingerprint_changes_with_indirect_imports_only(package):
    late = package / "methods" / "late.py"
    before, short = fingerprint.fingerprint_files(late), fingerprint.combined_fingerprint(late)
    (package / "lonely.py").write_text("x = 1")
    (package / "base.py").write_text('"""Steps."""\nSTEP = 1  # one')
    assert fingerprint.fingerprint_files(late) == before
    (package / "base.py").write_text("STEP = 2")
    changed = fingerprint.fingerprint_files(late)
    assert {name for name in changed if changed[name] != before[name]} == {"base"}
    assert fingerprint.combined_fingerprint(late) != short
    assert len(short) == 64


def test_the_name_of_a_module_counts(package):
    (package / "other.py").write_text(FILES["base.py"])
    other, base = (fingerprint.combined_fingerprint(package / f"{n}.py") for n in ("other", "base"))
    assert other != base


def test_where_a_module_is_does_not_count(package, monkeypatch):
    """`base` moves to a folder of another package, which an importing file names below others."""
    importing = package / "importing.py"
    importing.write_text("from stamp_core.base import STEP\nfrom stamp_core.lonely import x\nSTEP")
    before = fingerprint.combined_fingerprint(importing)
    parts = package.parent / "workbench" / "parts"
    parts.mkdir(parents=True)
    monkeypatch.setitem(fingerprint.PACKAGES, "workbench", parts.parent)
    (package / "base.py").rename(parts / "base.py")
    importing.write_text(
        "from stamp_core.lonely import x\nfrom workbench.parts.base import STEP\nSTEP"
    )
    assert fingerprint.find_imports(importing) == {package / "lonely.py", parts / "base.py"}
    assert fingerprint.combined_fingerprint(importing) == before
    (parts / "base.py").write_text("STEP = 2")
    assert fingerprint.combined_fingerprint(importing) != before


def test_the_closure_in_the_real_package():
    source = fingerprint.PACKAGES["workbench"] / "sources" / "glyphs.py"
    names = fingerprint.fingerprint_files(source).keys()
    assert {"decode", "images", "cache"} <= names
    assert not {"digits", "stamp_core"} & names
    assert "data" not in names  # its file has a docstring alone
