"""Files and folders that are replaced whole: a reader finds the old or the new, never a part."""

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO


@contextmanager
def atomic_write(path: Path, flush: bool = True) -> Iterator[Path]:
    """A scratch file beside `path` that takes its place when the context ends without error.

    Without `flush`, which takes milliseconds, a power failure soon after may leave it damaged.
    """
    part = _scratch(path)
    try:
        with add_path_to_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield part
            if flush:
                with part.open("rb") as file:
                    os.fsync(file.fileno())  # a rename may reach the disk before the data
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """A context whose OSErrors name a file: `path` where they name none, as for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)
        elif type(error) is OSError and str(path) not in str(error):  # numpy's, of a short write
            raise OSError(f"{path}: {error}; is the disk full? free space on it") from error
        raise


def is_running(pid: int) -> bool:
    """Whether there is a process with a number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True


def open_lock(path: Path) -> TextIO:
    """The empty file `path`, open for `fcntl.flock`."""
    try:
        return path.open("w")
    except IsADirectoryError as error:
        raise IsADirectoryError(f"{path} must be a file, a lock; remove the folder") from error


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A scratch folder beside `folder` that takes its place when the context ends without error."""
    for left in folder.parent.glob(f"{folder.name}.*.part"):
        if not is_running(int(left.name.split(".")[-3])):  # it was killed
            shutil.rmtree(left)
    part = _scratch(folder)
    try:
        with add_path_to_errors(folder):
            part.mkdir(parents=True)
            yield part
            for path in part.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            _rename_over(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _scratch(path: Path) -> Path:
    """A name beside `path` that no other thread of any process uses."""
    return path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")


def _rename_over(part: Path, folder: Path) -> None:
    """Give a folder the name of another one, which is deleted; others may do so meanwhile."""
    before = part.with_name(f"{part.stem}-before.part")
    while True:
        try:
            part.rename(folder)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with suppress(FileNotFoundError):  # another process was first
            folder.rename(before)
            shutil.rmtree(before)


def quarantine(path: Path, aside: Path) -> Path:
    """Rename a file or folder that must not be used to `aside`, which gives way."""
    if aside.is_dir():
        shutil.rmtree(aside)
    aside.unlink(missing_ok=True)
    aside.parent.mkdir(parents=True, exist_ok=True)
    return path.replace(aside)
