"""Time, memory and disk of a setting on this machine, before its data are there.

Steps are counted from its plan, drawn for the published numbers of images, and timed.
"""

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import psutil
import torch
import torch.nn.functional as F

from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import ParameterError
from stamp_core.config.params import PAPER, expand_grid, parse_seeds, read_params
from stamp_core.core.devices import device_name, device_peak, resolve_device
from stamp_core.core.paths import DATA, ROOT
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.split import Plan, make_plan
from stamp_core.engine.executor import explain_out_of_memory, peak_memory, resolve_workers
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.pipeline.costs import (
    BOUND,
    PER_CLASS,
    ROUNDS,
    clock,
    find_scale,
    time_methods,
    timed_workspace,
)
from stamp_core.pipeline.stand_in import cut_dataset, expected_dataset
from stamp_core.pipeline.sweeps import sweep_experiments

SECONDS = 10.0  # for timing steps, if there are more than two
MOST_STEPS = 20  # that are timed
TRIAL = 4  # images of the first step
REFERENCE = "glyphs"  # the setting whose costs stand for those that were not timed
GB = 1e9


@dataclass(frozen=True)
class StepCost:
    """The cost of a training step of a setting."""

    seconds: float
    memory: int  # bytes of a process, or of the GPU
    parameters: int


@dataclass(frozen=True)
class MethodCost:
    """What a method takes for one seed."""

    name: str
    step: float  # seconds, as a multiple of FedAvg's
    hours: float
    timed: bool  # else by its cost in the small-scale counterpart


@dataclass(frozen=True)
class Needs:
    """The resources for all trainings of a setting."""

    steps: int  # of FedAvg, one seed
    hours: float  # likewise
    methods: tuple[MethodCost, ...]
    memory: int  # bytes
    disk: int


def estimate_setting(name: str) -> Needs:
    """The resources that one of the paper's settings needs; they are also printed."""
    params = read_params(PAPER)
    names = dict.fromkeys(method for _, method, _ in expand_grid(f"grid.{name}", params))
    experiments = [load_experiment(name, method, params) for method in names]
    device = resolve_device("auto")
    workers = resolve_workers(0, device)
    torch.set_num_threads(1)  # as each worker process has
    dataset = expected_dataset(experiments[0].setting.data)
    plan = make_plan(experiments[0].setting.split, dataset, seed=0)
    needs = compute_needs(experiments, plan, dataset, device, workers)
    cpu = f"{workers} cores, no GPU"
    where = cpu if device == "cpu" else device_name(torch.device(device))
    seeds = sum(len(parse_seeds(s)) for s in params["grid"]["seeds"])
    swept = [e for sweep in params["sweeps"] for e in sweep_experiments(sweep, params)]
    extra = sum(experiment.setting.name == name for experiment in swept) * seeds
    hours = sum(method.hours for method in needs.methods)
    print(f"{name}: {dataset}")
    print(f"on {where}: {needs.memory / GB:.1f} GB of memory, {needs.disk / GB:.1f} GB of disk")
    print(f"FedAvg takes {needs.steps:,} steps a seed, about {needs.hours:,.1f} hours")
    print(format_methods(needs.methods))
    print(f"{len(experiments)} methods, {seeds} seeds: about {seeds * hours:,.0f} hours")
    if extra:
        print(f"and {extra} runs at several values of α")
    return needs


def format_methods(methods: Sequence[MethodCost]) -> str:
    """A table of all methods, one per line, and how its numbers were found."""
    width = max(len(method.name) for method in methods)
    lines = [f"{'method':{width}}  step (FedAvg: 1)  hours a seed"]
    for method in methods:
        mark = "" if method.timed else " *"
        lines.append(f"{method.name:{width}} {method.step:17.2f} {method.hours:13,.1f}{mark}")
    timed = sum(method.timed for method in methods)
    rounds = f"each in {2 * ROUNDS} short rounds of a client with random images"
    lines.append(f"{timed} of {len(methods)} methods were timed, {rounds}")
    if timed < len(methods):
        lines.append(f"* not timed within {BOUND:g} seconds: by its cost on {REFERENCE}")
    return "\n".join(lines)


def compute_needs(
    experiments: Sequence[Experiment], plan: Plan, dataset: ImageDataset, device: str, workers: int
) -> Needs:
    """The resources to train some methods, each with one seed, on a plan."""
    setting = experiments[0].setting  # weights from a file cost no step, and may not be there
    setting = replace(setting, network=replace(setting.network, pretrained=None))
    cost = time_steps(ClientRuntime(setting, cut_dataset(dataset, plan, PER_CLASS), device))
    work, cut = timed_workspace(setting, plan, dataset, device, cost.seconds)
    factors = relative_costs()
    cheap_first = sorted(experiments, key=lambda each: _factor(each.method, factors, 1.0))
    fedavg, timed = time_methods(cheap_first, work, cut)
    scale = find_scale(setting.training, plan, dataset, work, cost.seconds, workers)
    hours = scale.hours(fedavg)

    def method_cost(experiment: Experiment) -> MethodCost:
        name, ratio = experiment.method, getattr(experiment.params, "ratio", 0.0)
        if (timing := timed.get(name)) is None:
            factor = _factor(name, factors, max(factors.values()))
            return MethodCost(name, factor, factor * hours, False)
        step = scale.relative_step(timing, ratio)
        return MethodCost(name, step, scale.hours(timing, ratio), True)

    methods = tuple(method_cost(experiment) for experiment in experiments)
    state = max(_state_bytes(experiment, plan, dataset, cost) for experiment in experiments)
    processes = workers if device == "cpu" else 1
    disk = 3 * state  # a checkpoint, the next one while it is written, and records
    return Needs(scale.steps, hours, methods, processes * cost.memory + state, disk)


def time_steps(work: ClientRuntime) -> StepCost:
    """The median cost of a training step of the workspace's network on a full batch.

    If that takes long, on a part of a batch, as time and memory grow with its images.
    """
    training, model = work.training, work.model
    with explain_out_of_memory(work.setting):
        start, trial = _memory(work), min(training.batch_size, TRIAL)
        first = min(_step_seconds(work, trial) for _ in range(2))
        whole = trial * SECONDS / (3 * first)  # images of which three batches fit into the time
        count = min(training.batch_size, max(trial, int(whole)))
        seconds: list[float] = []
        while len(seconds) < 3 or (sum(seconds) < SECONDS and len(seconds) < MOST_STEPS):
            seconds.append(_step_seconds(work, count))
    more = training.batch_size / count
    memory = start + int((_memory(work) - start) * more)
    return StepCost(statistics.median(seconds[1:]) * more, memory, model.parameters.numel())


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


def _factor(method: str, factors: Mapping[str, float], other: float) -> float:
    """A method's cost on the small-scale counterpart, `other` if it was not trained there."""
    return factors.get(method.removesuffix("_published"), other)


def _step_seconds(work: ClientRuntime, count: int) -> float:
    """The seconds of a training step on so many images; the weights stay as they are."""
    images, labels = work.train_images(torch.arange(count) % len(work.y_train))
    start = clock(work.device)
    work.train_mode(count)
    F.cross_entropy(work.model.module(work.normalise(images)), labels).backward()
    work.model.parameters.add_(work.model.gradients, alpha=0.0)
    return clock(work.device) - start


def _memory(work: ClientRuntime) -> int:
    """The peak memory of the GPU, or of this process."""
    return device_peak(work.device) or peak_memory()


def _state_bytes(experiment: Experiment, plan: Plan, dataset: ImageDataset, cost: StepCost) -> int:
    """Bytes that clients keep between rounds: exemplars, or a model each."""
    memory = getattr(experiment.params, "memory", None)
    if memory is None:
        return len(plan.clients) * 2 * 4 * cost.parameters
    classes = [len(plan.seen(client, plan.experiences)) for client in range(len(plan.clients))]
    count: int = memory.exemplars_per_class * sum(classes)
    return count * dataset.x_train[0].numel()
