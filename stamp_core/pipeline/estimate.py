"""Time, memory and disk of a setting on this machine: steps counted from its plan, and timed."""

import json
import shutil
import statistics
import time
from dataclasses import dataclass

import psutil
import torch
import torch.nn.functional as F

from stamp_core.client.workspace import Workspace
from stamp_core.config.decode import ParameterError
from stamp_core.config.params import PAPER, expand_grid, parse_seeds, read_params
from stamp_core.core.devices import device_name, device_peak, resolve_device, synchronise
from stamp_core.core.paths import DATA, ROOT
from stamp_core.data.split import Plan, make_plan
from stamp_core.engine.executor import explain_out_of_memory, peak_memory, resolve_workers
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.pipeline.sweeps import sweep_experiments

SECONDS = 20.0  # for timing steps, if there are more than two
MOST_STEPS = 20  # that are timed
FORWARD_SHARE = 1 / 3  # of a training step's work
REFERENCE = "glyphs"  # where the cost of each method relative to FedAvg was measured
GB = 1e9


@dataclass(frozen=True)
class StepCost:
    """The cost of a training step of a setting."""

    seconds: float
    memory: int  # bytes of a process, or of the GPU
    parameters: int


@dataclass(frozen=True)
class Needs:
    """The resources for all trainings of a setting."""

    steps: int  # of FedAvg, one seed
    hours: float  # likewise
    all_hours: float  # of all methods, one seed
    memory: int  # bytes
    disk: int


def estimate_setting(name: str) -> Needs:
    """The resources that one of the paper's settings needs; they are also printed."""
    params = read_params(PAPER)
    runs = list(expand_grid(f"grid.{name}", params))
    experiments = {method: load_experiment(name, method, params) for _, method, _ in runs}
    device = resolve_device("auto")
    workers = resolve_workers(0, device)
    torch.set_num_threads(1)  # as each worker process has
    first = next(iter(experiments.values()))
    setting, dataset = first.setting, first.dataset()
    plan, work = make_plan(setting.split, dataset, seed=0), Workspace(setting, dataset, device)
    needs = compute_needs(list(experiments.values()), plan, work, workers)
    where = f"{workers} cores, no GPU" if device == "cpu" else device_name(work.device)
    seeds = sum(len(parse_seeds(s)) for s in params["grid"]["seeds"])
    swept = [e for sweep in params["sweeps"] for e in sweep_experiments(sweep, params)]
    extra = sum(experiment.setting.name == name for experiment in swept) * seeds
    print(f"{name}: {dataset}")
    print(f"on {where}: {needs.memory / GB:.1f} GB of memory, {needs.disk / GB:.1f} GB of disk")
    print(f"FedAvg takes {needs.steps:,} steps a seed, about {needs.hours:,.1f} hours")
    print(f"{len(experiments)} methods, {seeds} seeds: about {seeds * needs.all_hours:,.0f} hours")
    if extra:
        print(f"and {extra} runs at several values of α")
    return needs


def compute_needs(
    experiments: list[Experiment], plan: Plan, work: Workspace, workers: int
) -> Needs:
    """The resources to train some methods, each with one seed, on a plan."""
    cost, training = time_steps(work), work.training
    steps = count_steps(plan, work)
    evaluated = count_evaluated(plan, work) / training.batch_size * FORWARD_SHARE
    hours = (steps + evaluated) * cost.seconds / workers / 3600
    factors = relative_costs()
    highest = max(factors.values())
    all_hours = hours * sum(factors.get(e.method, highest) for e in experiments)
    state = max(_state_bytes(experiment, plan, work, cost) for experiment in experiments)
    processes = workers if work.device.type == "cpu" else 1
    disk = 3 * state  # a checkpoint, the next one while it is written, and records
    return Needs(steps, hours, all_hours, processes * cost.memory + state, disk)


def time_steps(work: Workspace) -> StepCost:
    """The median cost of a training step of the workspace's network on a full batch."""
    training, model = work.training, work.model
    count = min(training.batch_size, len(work.y_train))
    images, labels = work.train_images(torch.arange(count))
    seconds: list[float] = []
    with explain_out_of_memory(work.setting):
        while len(seconds) < 3 or (sum(seconds) < SECONDS and len(seconds) < MOST_STEPS):
            start = time.perf_counter()
            work.train_mode(len(labels))
            F.cross_entropy(model.module(work.normalise(images)), labels).backward()
            model.parameters.add_(model.gradients, alpha=0.0)
            synchronise(work.device)
            seconds.append(time.perf_counter() - start)
    memory = device_peak(work.device) or peak_memory()
    return StepCost(statistics.median(seconds[1:]), memory, model.parameters.numel())


def count_steps(plan: Plan, work: Workspace) -> int:
    """The number of SGD steps of all clients together."""
    training = work.training
    counts = [
        len(plan.train_indices(work.dataset, client, task))
        for client in range(len(plan.clients))
        for task in range(plan.tasks)
    ]
    batches = sum(-(-count // training.batch_size) for count in counts)
    return batches * training.epochs * training.rounds * plan.split.cycles


def count_evaluated(plan: Plan, work: Workspace) -> int:
    """The number of evaluated images: per experience those of all clients, and each client's."""
    clients = range(len(plan.clients))
    tests = [[work.tests(plan, client, task) for task in range(plan.tasks)] for client in clients]
    own = [torch.cat(each).unique() for each in tests]
    return plan.experiences * (len(torch.cat(own).unique()) + sum(map(len, own)))


def relative_costs() -> dict[str, float]:
    """Each method's seconds relative to FedAvg's on the small-scale counterpart, if trained."""
    summary = json.loads((ROOT / "figures" / "summary.json").read_text())
    methods = summary.get(REFERENCE, {"fedavg": {"client_seconds": {"mean": 1.0}}})
    seconds = {method: row["client_seconds"]["mean"] for method, row in methods.items()}
    return {method: value / seconds["fedavg"] for method, value in seconds.items()}


def refuse_shortage(needs: Needs, name: str) -> None:
    """Refuse a setting that needs more memory or disk space than is free."""
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(DATA).free
    if needs.memory > memory:
        raise ParameterError(
            f"{name} needs about {needs.memory / GB:.1f} GB of memory, {memory / GB:.1f} GB are "
            f"free: lower {name}.network.micro_batch_size in params/settings.yaml, the methods' "
            "memory.exemplars_per_class in params/methods.yaml or STAMP_WORKERS"
        )
    if needs.disk > disk:
        raise OSError(
            f"{name} needs about {needs.disk / GB:.1f} GB in {DATA}, {disk / GB:.1f} GB are free"
        )


def _state_bytes(experiment: Experiment, plan: Plan, work: Workspace, cost: StepCost) -> int:
    """Bytes that clients keep between rounds: exemplars, or a model each."""
    memory = getattr(experiment.params, "memory", None)
    if memory is None:
        return len(plan.clients) * 2 * 4 * cost.parameters
    classes = [len(plan.seen(client, plan.experiences)) for client in range(len(plan.clients))]
    count: int = memory.exemplars_per_class * sum(classes)
    return count * work.dataset.x_train[0].numel()
