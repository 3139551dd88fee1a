"""What a setting takes on this machine: steps counted from its plan, timed on its own batch."""

import json
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch
import torch.nn.functional as F

from stamp_core.config import ParameterError
from stamp_core.executor import enough_memory, peak_memory
from stamp_core.experiments import Experiment
from stamp_core.paths import DATA, ROOT
from stamp_core.split import Plan
from stamp_core.workspace import Workspace

SECONDS = 20.0  # for timing steps, if there are more than two
MANY = 20  # steps that are timed at most
BACKWARD = 3  # a training step works as much as so many forward passes
TWIN = "glyphs"  # where it was measured how much more work than FedAvg a method is
GB = 1e9


@dataclass(frozen=True)
class Speed:
    """What a training step of a setting takes."""

    seconds: float
    memory: int  # bytes of a process, or of the GPU
    parameters: int


@dataclass(frozen=True)
class Needs:
    """What all trainings of a setting take."""

    steps: int  # of FedAvg, one seed
    hours: float  # likewise
    all_hours: float
    memory: int  # bytes
    disk: int


def time_steps(work: Workspace) -> Speed:
    """The median step of the workspace's network on a full batch; lack of memory is said here."""
    training, model = work.setting.training, work.model
    pictures, labels = work.examples(torch.arange(min(training.batch, len(work.y_train))))
    taken: list[float] = []
    with enough_memory(work.setting):
        while len(taken) < 3 or (sum(taken) < SECONDS and len(taken) < MANY):
            start = time.perf_counter()
            work.train_mode(len(labels))
            F.cross_entropy(model.module(work.normalise(pictures)), labels).backward()
            model.parameters.add_(model.gradients, alpha=0.0)
            taken.append(_now(work.device) - start)
    gpu = work.device.type == "cuda"
    memory = torch.cuda.max_memory_allocated(work.device) if gpu else peak_memory()
    return Speed(statistics.median(taken[1:]), memory, model.parameters.numel())


def needs(cells: Sequence[Experiment], plan: Plan, work: Workspace, workers: int) -> Needs:
    """What it takes to train some methods, each with one seed, on a plan."""
    speed, training = time_steps(work), work.setting.training
    steps = training_steps(plan, work)
    evaluated = judged_pictures(plan, work) / training.batch / BACKWARD
    hours = (steps + evaluated) * speed.seconds / workers / 3600
    factors = relative()
    everything = hours * sum(factors.get(cell.method, max(factors.values())) for cell in cells)
    held = max(_held(cell, plan, work, speed) for cell in cells)
    processes = 1 if work.device.type == "cuda" else workers
    disk = 3 * held  # a checkpoint, the next one while it is written, and records
    return Needs(steps, hours, everything, processes * speed.memory + held, disk)


def training_steps(plan: Plan, work: Workspace) -> int:
    """How many steps all clients take together."""
    training = work.setting.training
    counts = [
        len(plan.train_indices(work.images, client, task))
        for client in range(len(plan.clients))
        for task in range(plan.tasks)
    ]
    batches = sum(-(-count // training.batch) for count in counts)
    return batches * training.epochs * training.rounds * plan.split.cycles


def judged_pictures(plan: Plan, work: Workspace) -> int:
    """How many test pictures pass the network: after each step everybody's, and each client's."""
    clients = range(len(plan.clients))
    tests = [[work.tests(plan, client, task) for task in range(plan.tasks)] for client in clients]
    own = [torch.cat(each).unique() for each in tests]
    return plan.steps * (len(torch.cat(own).unique()) + sum(map(len, own)))


def relative() -> dict[str, float]:
    """How much more work than FedAvg each method was on the desk twin, if that was trained."""
    summary = json.loads((ROOT / "figures" / "summary.json").read_text())
    rows = summary.get(TWIN, {"fedavg": {"client_seconds": {"mean": 1.0}}})
    seconds = {method: row["client_seconds"]["mean"] for method, row in rows.items()}
    return {method: value / seconds["fedavg"] for method, value in seconds.items()}


def refuse_lack(found: Needs, name: str) -> None:
    """Refuse to begin what memory or disk will not hold."""
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(DATA).free
    if found.memory > memory:
        raise ParameterError(
            f"settings.{name} needs about {found.memory / GB:.1f} GB of memory, {memory / GB:.1f} "
            f"GB are free: lower settings.{name}.network.at_once, methods' memory.per_class or "
            "STAMP_WORKERS"
        )
    if found.disk > disk:
        raise OSError(
            f"settings.{name} needs about {found.disk / GB:.1f} GB in {DATA}, {disk / GB:.1f} GB "
            "are free"
        )


def _held(cell: Experiment, plan: Plan, work: Workspace, speed: Speed) -> int:
    """Bytes that clients keep between rounds: remembered pictures, or a model each."""
    keep = getattr(cell.params, "memory", None)
    if keep is None:
        return len(plan.clients) * 2 * 4 * speed.parameters
    met = [len(plan.seen(client, plan.steps)) for client in range(len(plan.clients))]
    count: int = keep.per_class * sum(met)
    return count * work.images.x_train[0].numel()


def _now(device: torch.device) -> float:
    """The time when the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
