"""What a script prints that trains on the pretend device, in a process of its own."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from stamp_core.methods.base.registry import get_method, method_names

DRAWING = ("fedavg", "replay", "affcl", "agem", "fedcil")  # methods with other kinds of draws
ROOT = Path(__file__).resolve().parents[2]


def kinds() -> list[str]:
    """All methods; with $STAMP_SAMPLE those with most paths, and one of each other group."""
    if "STAMP_SAMPLE" not in os.environ:
        return method_names()
    groups = {get_method(kind).group: kind for kind in method_names()}
    return sorted({*groups.values(), "fedavg", "replay", "stamp"})


@cache
def results(script: str, *names: str) -> dict[str, Any]:
    """The JSON that a script prints: a process must register the device before it trains."""
    folders = (ROOT, ROOT / "tests", *filter(None, [os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), *names],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
