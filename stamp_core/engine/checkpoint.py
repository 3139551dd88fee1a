"""A run on disk, from which a killed training resumes: a folder of these files.

    run.safetensors  the server's state, the progress, the history, and the names of the other files
    states/          the results, and the clients' states unless they are kept elsewhere

A file in `states` is named by the digest of its content, and is written once. A round writes the
states that have changed, then run.safetensors, whose old or new content is there whole at any
moment. What takes less than FLUSH_AFTER is not flushed to the disk: after a power failure a
run of such short rounds may have to start afresh.
One process at a time uses the folder, by a lock beside it that ends with the process.
"""

import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import astuple
from pathlib import Path

from stamp_core.core.atomic import open_lock, quarantine
from stamp_core.engine.trees import UNUSABLE, Store, Stored, Tree, read_tree, write_tree

FLUSH_AFTER = 0.2  # seconds of work; a flush takes some milliseconds
RESULTS = ("scores", "features", "memory")  # parts of a run's state that evaluations alone change


class Checkpoint:
    """The folder of one run, which after any failure holds its complete old or new state."""

    def __init__(
        self,
        resume: Path,
        name: str,
        seed: int,
        identity: Mapping[str, str],
        client_states: Store | None = None,
    ) -> None:
        self.folder = checkpoint_folder(resume, name, seed)
        self.identity = dict(identity)
        self.file = self.folder / "run.safetensors"
        self.store = state_store(resume, name, seed)
        self.client_states = client_states or self.store
        self.results: Stored | None = None  # None: the latest are not in the store
        self.named = set[str]()  # digests in run.safetensors

    def save(self, state: Tree, evaluated: bool = True, flush: bool = True) -> None:
        """Write what has changed; kept states take the place of the clients' states."""
        if evaluated:
            self.results = None
        clients = state["clients"]
        for client, kept in enumerate(clients):
            if not isinstance(kept, Stored):
                clients[client] = self.store.put(kept, flush)
        self.results = self.results or self.store.put({n: state[n] for n in RESULTS}, flush)
        stored: list[Stored] = [self.results, *clients]
        names = {"stored": [list(astuple(kept)) for kept in stored]}
        small = {key: value for key, value in state.items() if key not in (*RESULTS, "clients")}
        history = json.dumps(state["history"])  # as one text it is fast to write
        write_tree(self.file, {**small, **names, "history": history}, self.identity, flush)
        before, self.named = self.named, {kept.digest for kept in stored}
        for digest in before - self.named:
            self.store.path(digest).unlink(missing_ok=True)

    def load(self) -> Tree | None:
        """The state saved for this identity, or None; a folder that is unusable is renamed."""
        if not self.file.exists():
            shutil.rmtree(self.folder, ignore_errors=True)  # the run was killed before it saved
            return None
        try:
            tree, header = read_tree(self.file)
            mine, found = self.identity, json.loads(header["identity"])
            if other := [key for key in {**found, **mine} if found.get(key) != mine.get(key)]:
                self._refuse(f"belongs to other {', '.join(other)}")
                return None
            state = self._read_parts(tree)
            for part in self.folder.glob("*.part"):  # the process was killed while it saved
                part.unlink()
            self.store.keep_only(self.named)  # fails at a folder in the place of a file
        except UNUSABLE as error:
            self._refuse(f"is damaged ({error})")
            return None
        return state

    def _read_parts(self, tree: Tree) -> Tree:
        self.results, *clients = (Stored(*each) for each in tree.pop("stored"))
        for digest in {kept.digest for kept in clients}:
            self.client_states.verify(digest)
        self.named = {self.results.digest, *(kept.digest for kept in clients)}
        results = self.store.get(self.results.digest)
        return {**tree, **results, "clients": clients, "history": json.loads(tree["history"])}

    def _refuse(self, why: str) -> None:
        """Rename a folder that must not be used, with a warning; start with nothing saved."""
        aside = quarantine(self.folder, self.folder.with_name(f"{self.folder.name}.aside"))
        self.results, self.named = None, set()
        text = f"checkpoint {self.folder} {why}; kept as {aside.name}, starting afresh"
        warnings.warn(text, stacklevel=3)


@contextmanager
def checkpoint_lock(resume: Path | None, name: str, seeds: Iterable[int]) -> Iterator[Path | None]:
    """The folder of these runs, locked; None, with a warning, if another process uses it."""
    with ExitStack() as locks:
        try:
            for seed in seeds:
                locks.enter_context(locked(resume, name, seed) if resume else nullcontext())
        except BlockingIOError:
            text = f"another process trains {name}: this one trains it without checkpoints"
            warnings.warn(text, stacklevel=4)
            resume = None
        yield resume


@contextmanager
def locked(resume: Path, name: str, seed: int) -> Iterator[None]:
    """A context with the lock of a run's checkpoint; BlockingIOError if a process has it."""
    resume.mkdir(parents=True, exist_ok=True)
    path = resume / f".{name}-{seed}.lock"
    with open_lock(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino:
            raise BlockingIOError  # who had it has just deleted the file
        try:
            yield
        finally:
            path.unlink()


def checkpoint_folder(resume: Path, name: str, seed: int) -> Path:
    """The folder of a run of the experiment `name`."""
    return resume / f"{name}-{seed}"


def state_store(resume: Path, name: str, seed: int) -> Store:
    """The store of a run's checkpoint, in which workers keep the clients' states."""
    return Store(checkpoint_folder(resume, name, seed) / "states")


def remove_checkpoint(resume: Path, name: str, seed: int) -> None:
    """Delete the folder of a finished run; if that fails, warn: its record is saved."""
    folder = checkpoint_folder(resume, name, seed)
    if not folder.exists():
        return
    try:
        with locked(resume, name, seed):
            shutil.rmtree(folder)
    except BlockingIOError:  # another process trains the same: it will delete the folder
        pass
    except OSError as error:
        warnings.warn(f"checkpoint {folder} of a finished run stays: {error}", stacklevel=3)
