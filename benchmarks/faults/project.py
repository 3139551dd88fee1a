"""Copies of the project in which faults are tried, their processes, and the bytes they end with."""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from benchmarks.faults import Outcome, judge_error
from stamp_core.core.paths import ROOT

COPIED = (
    *("stamp_core", "workbench", "benchmarks", "notebooks", "params", "pipelines"),
    *(".dvc", ".dvcignore", ".gitignore", "dvc.yaml", "pyproject.toml"),
)
PAPER = {  # the paper's images are on few machines
    "grid": {"setting": ["tiny"], "method": ["fedavg"], "seeds": [0]},
    "ablation": {"baselines": ["fedavg"], "method": []},
    "sweeps": {},
}
SWEEPS = ("kappa", "exemplars_tiny", "alpha_tiny")  # of the quick profile
SMALLER: dict[str, Any] = {  # than the quick profile, but with every stage
    "grid.method": ["fedavg", "replay", "spatial_only"],
    "tour.method": ["fedavg", "replay", "spatial_only"],
    "ablation.baselines": ["fedavg", "replay"],
    "sweeps.kappa.values": [0.5],
    "sweeps.exemplars_tiny.method": ["keep_herding"],
    "sweeps.exemplars_tiny.values": [1],
    "sweeps.alpha_tiny.method": ["fedavg"],
    "sweeps.alpha_tiny.values": [0.1],
}
MEASURED = re.compile(
    r"\bs (/|setup)|\bms\b|seconds|memory|time|peak|\bshare\b"
)  # columns of tables
PATIENCE = 120  # seconds until a call counts as hanging
QUIET = 300  # seconds without a line of output until a pipeline counts as hanging
HANGING = -1000  # status of a call that was killed as it printed nothing
KEPT = ("data/splits", "data/metrics", "figures")  # folders of results beside records
REPRO = ("dvc", "repro")  # what `make repro` runs
OF_DVC = {  # refusals of DVC itself, whose cures docs/pipeline.md tells; what has to be deleted
    "is busy, it is being blocked by": "",  # wait
    "Unable to acquire lock": "",
    "RWLock-file": ".dvc/tmp/rwlock",
    r"dvc\.lock": "dvc.lock",
    r"Is a directory: '\S+/(\.dvc/cache/\S+)'": r"\1",
}


def copy_project(root: Path, rounds: int = 2) -> None:
    """A copy of the project without results, with a profile of seconds as its default."""
    leave = shutil.ignore_patterns("cache", "tmp", "results.md", "faults.md")
    root.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=leave if name != "params" else None)
        else:
            shutil.copy(source, root / name)
    (root / "data/executed").mkdir(parents=True)
    (root / "figures").mkdir()
    shutil.copy(root / "params/quick.yaml", root / "params.yaml")
    quick = YAML().load(root / "params.yaml")
    change(root / "params.yaml", "sweeps", {name: quick["sweeps"][name] for name in SWEEPS})
    for key, value in SMALLER.items():
        change(root / "params.yaml", key, value)
    change(root / "params/settings.yaml", "tiny.training.rounds", rounds)
    YAML().dump(PAPER, root / "params/paper.yaml")
    (root / ".dvc/config.local").write_text("[core]\n    no_scm = true\n")


def change(file: Path, key: str, value: Any) -> None:
    """Change one value of a parameter file."""
    values = block = YAML().load(file)
    *path, last = key.split(".")
    for part in path:
        block = block[part]
    block[last] = value
    YAML().dump(values, file)


def environment(root: Path, **changes: str | None) -> dict[str, str]:
    """The environment of processes in a copy: that of a user, with some changes."""
    foreign = ("STAMP_", "DVC_", "PYTEST", "JUPYTER_", "GIT_", "PYTHONDONTWRITEBYTECODE")
    own = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ours = {"PATH": path, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "STAMP_WORKERS": "2"}
    return {k: v for k, v in {**own, **ours, **changes}.items() if v is not None}


@dataclass(frozen=True)
class Answer:
    """How a call in a forked process ended."""

    status: int  # negative: the signal that ended it
    value: Any
    error: tuple[str, str] | None  # type and message
    output: str
    seconds: float
    operations: int  # on files below data, if they were counted

    def judged(self, what: str, right: object, *names: str) -> Outcome:
        """The outcome of a fault after which this was the next call."""
        if self.error:
            return judge_error(what, *self.error, *names)
        if self.status == -signal.SIGXCPU:
            return Outcome(what, "lost", "still runs at its limit of CPU seconds")
        if self.status:
            return Outcome(what, "lost", f"ended with status {self.status}")
        if self.value != right:
            return Outcome(what, "silently wrong", "other bytes than those of an unbroken run")
        return Outcome(what, "survived")


class Agent:
    """A copy of the project with a process that has imported everything: a call is a fork of it."""

    def __init__(self, root: Path, rounds: int) -> None:
        self.root, self.answers = root, root.parent / f"{root.name}-answers"
        copy_project(root, rounds)
        self.answers.mkdir()
        self.params = {path: path.read_bytes() for path in self.parameter_files()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faults.agent"],
            cwd=root,
            env=environment(
                root, PYTHONDONTWRITEBYTECODE="1"
            ),  # Python writes it cut on a full disk
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._line()

    def parameter_files(self) -> list[Path]:
        """The files that a user edits."""
        return [self.root / "params.yaml", *sorted((self.root / "params").glob("*.yaml"))]

    def call(
        self, function: str, during: Callable[[int], None] | None = None, **request: Any
    ) -> Answer:
        """Perform a function of `calls` in a fork; `during` gets its process while it runs."""
        limits = ("die_at", "file_limit", "memory_limit", "cpu_limit", "count")
        arguments = {k: v for k, v in request.items() if k not in limits}
        files = {name: self.answers / name for name in ("result", "output")}
        request = {k: v for k, v in request.items() if k in limits}
        request |= {"function": function, "arguments": arguments}
        request |= {name: str(path) for name, path in files.items()}
        assert self.process.stdin
        for path in files.values():
            path.unlink(missing_ok=True)
        start = time.monotonic()
        print(json.dumps(request), file=self.process.stdin, flush=True)
        child = int(self._line())
        timer = threading.Timer(PATIENCE, os.kill, (child, 9))
        timer.start()
        if during:
            during(child)
        status = int(self._line())
        timer.cancel()
        text = files["result"].read_text() if files["result"].exists() else ""
        answer = json.loads(text) if text else {}
        error = tuple(answer["error"]) if "error" in answer else None
        output = files["output"].read_text(errors="replace") if files["output"].exists() else ""
        seconds, operations = time.monotonic() - start, answer.get("operations", 0)
        return Answer(status, answer.get("value"), error, output, seconds, operations)

    def forget(self) -> None:
        """Remove everything computed, and undo changes of parameters."""
        remove(self.root / "data")
        (self.root / "data").mkdir()
        for path, content in self.params.items():
            path.write_bytes(content)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the agent has ended"
        return line.strip()


def delete(path: Path) -> None:
    """Remove a file, or a folder in its place."""
    remove(path) if path.is_dir() else path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a folder, be it read-only."""
    if path.exists():
        for folder in (path, *(each for each in path.rglob("*") if each.is_dir())):
            if not folder.is_symlink():
                folder.chmod(0o755)
        shutil.rmtree(path)


class Pipeline:
    """A copy of the project in which the complete pipeline runs."""

    def __init__(self, root: Path, finished: Path | None = None, **changes: str | None) -> None:
        self.root = root
        if finished:
            shutil.copytree(finished, root)
        else:
            copy_project(root)
        self.environment = environment(root, **changes)

    def start(self, command: tuple[str, ...] = REPRO, **options: Any) -> "subprocess.Popen[bytes]":
        """Start a command in a session of its own; its output goes into the file `output`."""
        with self.log.open("ab") as output:
            self.begin = output.tell()
            return subprocess.Popen(
                command,
                cwd=self.root,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **options,
            )

    @property
    def log(self) -> Path:
        """Where the output of the pipeline goes."""
        return self.root.parent / f"{self.root.name}.log"

    def run(self, command: tuple[str, ...] = REPRO) -> tuple[int, str]:
        """The exit status and the output of a command."""
        return self.ended(self.start(command))

    def ended(self, process: "subprocess.Popen[bytes]") -> tuple[int, str]:
        """The exit status and the output of the command that was started last, once it has ended.

        One that prints nothing for long is killed.
        """
        size, last = 0, time.monotonic()
        while (status := process.poll()) is None:
            if (now := self.log.stat().st_size) > size:
                size, last = now, time.monotonic()
            if time.monotonic() > last + QUIET:
                process.kill()
                process.wait()
                status = HANGING
                break
            time.sleep(0.05)
        output = self.log.read_bytes()[self.begin :].decode(errors="replace")
        return status, re.sub(r"\x1b\[[0-9;]*m", "", output)

    def cure(self, output: str) -> bool:
        """Whether DVC itself has refused; the file that it refuses is deleted."""
        said = refusal_of_dvc(output)
        if said and (wrong := said.expand(OF_DVC[said.re.pattern])):
            delete(self.root / wrong)
        return said is not None

    def digests(self, agent: Agent) -> dict[str, str]:
        """All results but what is measured: plans, records, tables and figures."""
        found = {}
        for path in sorted(path for name in KEPT for path in self.root.glob(f"{name}/**/*")):
            if path.is_file() and path.name != "measured.md":
                content = without_measurements(path).encode("latin-1")
                found[str(path.relative_to(self.root))] = hashlib.sha256(content).hexdigest()
        for name in ("runs", "sweeps"):
            answer = agent.call("record_digests", root=str(self.root / "data" / name))
            if answer.error:
                found[name] = " ".join(answer.error)
            else:
                found |= {f"{name}/{key}": value for key, value in answer.value.items()}
        return found

    def judged(self, what: str, status: int, output: str, place: "Place", *names: str) -> Outcome:
        """The outcome of a fault after which the next call ended so; DVC's refusals are cured."""
        if not status:
            return self.compared(Outcome(what, "survived"), place)
        said = judge_output(what, status, output, *names)
        if not self.cure(output):
            return said
        status, output = self.run()
        again = f"still ends with status {status} after the cure: {output[-200:]}"
        return Outcome(what, "lost", again) if status else self.compared(said, place)

    def compared(self, said: Outcome, place: "Place") -> Outcome:
        """An outcome of a pipeline that has ended well, unless its results are others."""
        right, found = place.shared.digests, self.digests(place.agent)
        wrong = [key for key in {**right, **found} if right.get(key) != found.get(key)]
        if wrong:
            return Outcome(said.what, "silently wrong", f"differ: {', '.join(sorted(wrong))}"[:300])
        return said


def errors_of_dvc(output: str) -> list[str]:
    """The lines that DVC has printed as errors."""
    return re.findall(r"^ERROR: .+$|^'\S*dvc\.lock' validation failed\.$", output, re.M)


def refusal_of_dvc(output: str) -> "re.Match[str] | None":
    """The refusal of DVC itself in an output, by a pattern of OF_DVC."""
    text = "\n".join(errors_of_dvc(output))
    return next((said for words in OF_DVC if (said := re.search(words, text))), None)


def judge_output(what: str, status: int, output: str, *names: str) -> Outcome:
    """The outcome of a fault after which a command ended with an error: its last line counts."""
    if status == HANGING:
        return Outcome(what, "lost", "the call hangs")
    if said := refusal_of_dvc(output):
        return Outcome(what, "refused", f"by DVC: {said[0]}")
    found = re.findall(r"^(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception)): (.+)$", output, re.M)
    found = [each for each in found if each[0] != "PapermillExecutionError"]
    lines = errors_of_dvc(output) or output.split("\n")
    return judge_error(what, *(found or [(f"status {status}", lines[-1])])[-1], *names)


def without_measurements(path: Path) -> str:
    """The content of a file of results without columns and values that are measured."""
    text = path.read_bytes().decode("latin-1")
    if path.suffix == ".json" and path.parent.name != "splits":
        return json.dumps(_unmeasured(json.loads(text)), sort_keys=True)
    if path.suffix != ".md":
        return text
    kept, measured = [], set[int]()
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) < 3:
            measured = set()
        elif not measured:
            measured = {k for k, cell in enumerate(cells) if MEASURED.search(cell)} or {-1}
        kept.append("|".join(cell for k, cell in enumerate(cells) if k not in measured))
    return "\n".join(kept)


def _unmeasured(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _unmeasured(v) for k, v in tree.items() if not MEASURED.search(k)}
    return tree


@dataclass
class Shared:
    """What an unbroken run gives, for all places."""

    first_stage: str
    small: dict[str, Any]  # of the small training, by method
    seconds: dict[str, float]  # of the small training, by method
    operations: dict[str, int]  # of the small training on files, by method
    digests: dict[str, str]  # of the complete pipeline
    finished: Path | None  # a copy of the project in which it has run


class Place:
    """A folder with an agent, where one thread tries one case after the other."""

    def __init__(self, folder: Path, shared: Shared | None = None, rounds: int = 4) -> None:
        self.folder, self.agent = folder, Agent(folder / "small", rounds)
        self.traps = folder / "traps"  # what hostile input would make there
        self.traps.mkdir()
        self.shared = shared or self.measure()

    def measure(self) -> Shared:
        """The small training without a fault."""
        first = self.agent.call("first_stage").value
        shared = Shared(first, {}, {}, {}, {}, None)
        for method in ("stamp", "replay"):
            answer = self.agent.call("train_small", method=method, count=True)
            assert not answer.error, answer
            shared.small[method] = answer.value
            shared.seconds[method], shared.operations[method] = answer.seconds, answer.operations
            self.agent.forget()
        return shared

    def measure_pipeline(self) -> None:
        """The complete pipeline without a fault."""
        pipeline = Pipeline(self.folder / "finished")
        status, output = pipeline.run()
        assert status == 0, output[-2000:]
        self.shared.digests = pipeline.digests(self.agent)
        self.shared.finished = pipeline.root

    def pipeline(self, draw: random.Random, finished: bool = False, **changes: Any) -> Pipeline:
        """A fresh copy, or one in which the pipeline has run."""
        root = self.folder / f"pipeline-{draw.getrandbits(32):x}"
        return Pipeline(root, self.shared.finished if finished else None, **changes)

    def sprung(self) -> list[str]:
        """The names of the traps that hostile input has made; they are removed."""
        names = sorted(path.name for path in self.traps.iterdir())
        for path in self.traps.iterdir():
            path.rmdir() if path.is_dir() else path.unlink()
        return names

    def close(self) -> None:
        """End the agent and remove the folder."""
        self.agent.close()
        remove(self.folder)
