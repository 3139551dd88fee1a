"""The lock files of DVC, which say with what each stage ran: a good copy of them, one writer.

DVC rewrites such a file in place after every stage. A process that is killed meanwhile leaves a
part of it, which no DVC command accepts.
"""

import fcntl
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import yaml

from stamp_core.config.params import OWN
from stamp_core.core import paths
from stamp_core.core.atomic import atomic_write, quarantine

NAMES = ("dvc.lock", *(f"pipelines/{name}/dvc.lock" for name in ("paper", *OWN)))


@contextmanager
def driver_lock() -> Iterator[None]:
    """A context in which no other driver works on this copy of the project: the second waits.

    DVC inherits the lock, so that it waits for what a killed driver has left as well.
    """
    with (_temporary_folder() / "driver").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            print(f"process {file.read()} runs this pipeline: waiting for its end", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        os.set_inheritable(file.fileno(), True)
        yield


def clear_rwlock() -> None:
    """Remove DVC's list of paths in use, once the processes in it have ended.

    A killed driver leaves DVC processes, which end with their kernels, and one that is killed while
    it writes this list leaves a part of it, which no DVC command accepts.
    """
    file = _temporary_folder() / "rwlock"
    told = False
    while users := _running_users(file):
        if not told:
            print(
                f"DVC process {users[0]} of an earlier call runs: waiting for its end", flush=True
            )
        told = True
        time.sleep(0.2)
    file.unlink(missing_ok=True)


def _running_users(rwlock: Path) -> list[int]:
    """The running processes among those that use a path of the project."""
    try:
        users = json.loads(rwlock.read_text())
        infos = [*itertools.chain(*users["read"].values()), *users["write"].values()]
        return [info["pid"] for info in infos if psutil.pid_exists(info["pid"])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing or damaged
        return []


def is_sound(content: bytes) -> bool:
    """Return whether this is a whole lock file: DVC accepts it, and the last line has an end."""
    from dvc.schema import COMPILED_LOCKFILE_SCHEMA
    from voluptuous import Invalid

    try:  # the C loader takes a tenth of the time of ruamel.yaml
        COMPILED_LOCKFILE_SCHEMA(yaml.load(content, yaml.CSafeLoader))
    except (yaml.YAMLError, Invalid):
        return False
    return content.endswith(b"\n")


def copy_sound_files() -> None:
    """Copy every lock file that is sound to where `restore_damaged_files` looks."""
    for name in NAMES:
        path = paths.ROOT / name
        if path.exists() and is_sound(content := path.read_bytes()):
            _write(_copy_of(name), content)


def restore_damaged_files() -> None:
    """Replace every damaged lock file by its last good copy, or set it aside."""
    for name in NAMES:
        path = paths.ROOT / name
        copy = _copy_of(name)
        if not path.exists() or (path.is_file() and is_sound(path.read_bytes())):
            continue
        if path.is_dir() or not copy.exists():
            quarantine(path, path.with_suffix(".damaged"))
        if copy.exists():
            _write(path, copy.read_bytes())
            print(f"{name} was damaged: its last good copy is back", flush=True)
        else:
            print(f"{name} was damaged, and is now {path.stem}.damaged", flush=True)


def remove_folders_from_cache() -> None:
    """Remove folders in the place of objects of DVC's cache, which it makes again from its outputs.

    DVC itself ends with "Is a directory" and names no cure.
    """
    for path in (paths.ROOT / ".dvc" / "cache" / "files" / "md5").glob("*/*"):
        if path.is_dir():
            shutil.rmtree(path)
            print(f"{path.relative_to(paths.ROOT)} was a folder, and is removed", flush=True)


def drop_gone_stages(stages: Collection[str]) -> None:
    """Remove from the root's lock file what is none of these stages."""
    path = paths.ROOT / NAMES[0]
    head, *blocks = re.split(r"^(?=  \S.*:$)", path.read_text(), flags=re.MULTILINE)
    known = [block for block in blocks if block[2:].partition(":\n")[0] in stages]
    if len(known) < len(blocks):
        _write(path, (head + "".join(known)).encode())


def _write(path: Path, content: bytes) -> None:
    """Replace a file whole."""
    with atomic_write(path) as scratch:
        scratch.write_bytes(content)


def _temporary_folder() -> Path:
    """DVC's folder for what is in no cache and no commit."""
    folder = paths.ROOT / ".dvc" / "tmp"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _copy_of(name: str) -> Path:
    """The last good copy of a lock file."""
    return _temporary_folder() / name.replace("/", "-")
