"""Files that are replaced whole: a reader finds the old content or the new one, never a part."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A scratch file beside `path` that takes its place when the context ends without error."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield part
            with part.open("rb") as file:
                os.fsync(file.fileno())  # a rename may reach the disk before the data
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A context whose OSErrors name a file: `path` where they name none, as for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)
        elif type(error) is OSError and str(path) not in str(error):  # numpy's, of a short write
            raise OSError(f"{path}: {error}") from error
        raise
