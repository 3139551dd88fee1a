"""A run on disk, from which a killed training resumes: a folder of these files.

    run.safetensors  the server's state, the progress, and how much of the journal counts
    journal.jsonl    a line per round: its entry in the history, and where changed states are
    states/          the clients' states, unless they are kept elsewhere, and the results

A round writes what has changed in it, whatever the number of clients and of earlier rounds. A
process that is killed at any moment leaves it whole. What takes less than FSYNC_MIN_SECONDS is not
flushed to the disk: after a power failure a run of such short rounds may have to start afresh.
One process at a time uses the folder, by a lock beside it that ends with the process.
"""

import fcntl
import hashlib
import json
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path

from stamp_core.core.atomic import open_lock, quarantine
from stamp_core.engine.trees import UNUSABLE, Store, Stored, Tree, read_tree, write_tree

FSYNC_MIN_SECONDS = 0.2  # seconds of work; a flush takes some milliseconds
RESULTS = ("scores", "features", "memory")  # parts of a run's state that evaluations alone change
OF_RESULTS = -1  # their place among the clients' states


@dataclass(frozen=True)
class Journal:
    """How much of the journal is part of the checkpoint."""

    size: int = 0  # in bytes
    rounds: int = 0
    digest: str = ""

    def extended(self, line: bytes, rounds: int) -> "Journal":
        """The journal with one more line."""
        digest = hashlib.sha256(self.digest.encode() + line).hexdigest()
        return Journal(self.size + len(line), self.rounds + rounds, digest)


class Checkpoint:
    """The folder of one run, which after any failure holds its complete old or new state.

    `client_states` is the store of the clients' states, if it is not the folder's own.
    """

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
        self.lines = self.folder / "journal.jsonl"
        self.store = state_store(resume, name, seed)
        self.client_states = client_states or self.store
        self.journal = Journal()
        self.evaluated = True
        self.saved: dict[int, Stored] = {}  # clients' states and results
        self.named = Counter[str]()  # how many of them have a digest

    def save(self, state: Tree, evaluated: bool = True, flush: bool = True) -> None:
        """Write what has changed; the results only if there was an evaluation."""
        self.evaluated |= evaluated  # or one whose results could not be written
        changed: dict[int, Stored] = {}
        for client, kept in enumerate(state["clients"]):
            if kept is not self.saved.get(client):
                stored = kept if isinstance(kept, Stored) else self.store.put(kept, flush)
                changed[client] = stored
                state["clients"][client] = stored
        if self.evaluated:
            results = {name: state[name] for name in RESULTS}
            changed[OF_RESULTS] = self.store.put(results, flush)
        journal = self._append(state["history"][self.journal.rounds :], changed, flush)
        small = {key: state[key] for key in state if key not in (*RESULTS, "clients", "history")}
        write_tree(self.file, {**small, "journal": list(astuple(journal))}, self.identity, flush)
        self.journal, self.evaluated = journal, False
        for digest in self._rename(changed):
            self.store.path(digest).unlink(missing_ok=True)

    def load(self) -> Tree | None:
        """The state saved for this identity, or None; a folder that is unusable is renamed."""
        if not self.file.exists():
            shutil.rmtree(self.folder, ignore_errors=True)  # the run was killed before it saved
            return None
        try:
            tree, header = read_tree(self.file)
            mine, found = self.identity, json.loads(header["identity"])
            state = self._read_parts(tree)
        except UNUSABLE as error:
            self._refuse(f"is damaged ({error})")
            return None
        if other := [key for key in {**found, **mine} if found.get(key) != mine.get(key)]:
            self._refuse(f"belongs to other {', '.join(other)}")
            return None
        for part in self.folder.glob("*.part"):  # the process was killed while it saved
            part.unlink()
        self.store.keep_only(set(self.named))
        return state

    def _append(self, history: list[Tree], changed: dict[int, Stored], flush: bool) -> Journal:
        """Write a line with new rounds and changed states behind the saved ones."""
        stored = [[client, *astuple(kept)] for client, kept in changed.items()]
        line = json.dumps({"history": history, "stored": stored}).encode() + b"\n"
        with self.lines.open("ab") as file:
            file.truncate(self.journal.size)  # a line may be left of a save that failed
            file.write(line)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        return self.journal.extended(line, len(history))

    def _read_parts(self, tree: Tree) -> Tree:
        """The whole state of a saved tree; every part is verified."""
        expected, history = Journal(*tree.pop("journal")), list[Tree]()
        for line in self.lines.read_bytes()[: expected.size].splitlines(keepends=True):
            content = json.loads(line)
            history += content["history"]
            self._rename({client: Stored(*each) for client, *each in content["stored"]})
            self.journal = self.journal.extended(line, len(content["history"]))
        if self.journal != expected:
            raise ValueError(f"the digest of {self.lines.name} does not fit its content")
        results = self.store.get(self.saved[OF_RESULTS].digest)
        clients = [self.saved[client] for client in range(len(self.saved) - 1)]
        for digest in {kept.digest for kept in clients}:
            self.client_states.verify(digest)
        self.evaluated = False
        return {**tree, **results, "clients": clients, "history": history}

    def _rename(self, changed: dict[int, Stored]) -> set[str]:
        """Note where changed states are; returns the digests that nothing has any more."""
        before = [self.saved[client].digest for client in changed if client in self.saved]
        self.saved.update(changed)
        self.named.update(kept.digest for kept in changed.values())
        self.named.subtract(before)
        gone = {digest for digest in before if not self.named[digest]}
        for digest in gone:
            del self.named[digest]
        return gone

    def _refuse(self, why: str) -> None:
        """Rename a folder that must not be used, with a warning; start with nothing saved."""
        aside = quarantine(self.folder, self.folder.with_name(f"{self.folder.name}.aside"))
        self.journal, self.evaluated = Journal(), True
        self.saved.clear()
        self.named.clear()
        text = f"checkpoint {self.folder} {why}; kept as {aside.name}, starting afresh"
        warnings.warn(text, stacklevel=3)


@contextmanager
def checkpoint_lock(resume: Path | None, name: str, seeds: Iterable[int]) -> Iterator[Path | None]:
    """A context in which no other process uses the checkpoints of these runs: their folder.

    None if another one does: this one trains without checkpoints, with a warning.
    """
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
