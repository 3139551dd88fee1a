"""papermill, as DVC's stages call it: without what only its authors need, and ended by one line."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

LINE = "interrupted: finished experiments keep their records, and `dvc repro` goes on from there"


def end(number: int, frame: FrameType | None) -> None:
    """End at once; the kernel and its processes end when papermill is gone."""
    os.write(sys.stderr.fileno(), f"{LINE}\n".encode())
    os._exit(130)


def execute() -> None:
    """papermill's command, whose kernels report errors alone: not that TCP has no encryption."""
    from papermill.cli import papermill
    from papermill.engines import NBClientEngine, papermill_engines

    class Engine(NBClientEngine):  # type: ignore[misc]
        @classmethod
        def execute_managed_notebook(cls, *arguments: Any, **options: Any) -> Any:
            more = ["--IPKernelApp.log_level=ERROR"]
            return super().execute_managed_notebook(*arguments, extra_arguments=more, **options)

    papermill_engines.register(None, Engine)  # the default one
    for executed in (Path(word) for word in sys.argv if word.endswith(".ipynb")):
        executed.parent.mkdir(parents=True, exist_ok=True)  # DVC does not know this folder
    papermill(default_map={"log_level": "WARNING"})


if __name__ == "__main__":
    signal.signal(signal.SIGINT, end)  # before the imports, which take a second
    del sys.path[0]  # this folder, whose names are not those of packages
    execute()
