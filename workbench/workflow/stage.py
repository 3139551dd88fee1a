"""papermill, as DVC's stages call it: interrupted, it ends with one line instead of tracebacks."""

import os
import signal
import sys
from types import FrameType

LINE = "interrupted: finished experiments keep their records, and `dvc repro` goes on from there"


def end(number: int, frame: FrameType | None) -> None:
    """End at once; the kernel and its processes end when papermill is gone."""
    os.write(sys.stderr.fileno(), f"{LINE}\n".encode())
    os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, end)  # before the imports, which take a second
    del sys.path[0]  # this folder, whose names are not those of packages
    from papermill.cli import papermill

    papermill()
