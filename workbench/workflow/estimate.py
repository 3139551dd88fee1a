"""Time, memory and disk of a setting on this machine, before its data are there.

FedAvg's SGD steps are counted and one is timed, in a short training on synthetic images: by the
process's own time on a CPU, which what else runs there does not change. What another method takes
is FedAvg's time multiplied by the ratio of their seconds on photographs in miniature, or on glyphs.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO

import numpy as np
import psutil
import torch
from torch import Tensor

from stamp_core.config.decode import ParameterError
from stamp_core.config.params import Params, parse_seeds
from stamp_core.config.schema import Diagnostics, Split, Training
from stamp_core.core.devices import device_name, resolve_device
from stamp_core.core.paths import DATA
from stamp_core.data.cache import Numbers
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.plan import Plan, Task
from stamp_core.data.split import make_plan
from stamp_core.engine.executor import resolve_workers
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.engine.train import train
from workbench.workflow.command import SEEDS
from workbench.workflow.profiles import PAPER, PROFILES, expand_grid, read_profile
from workbench.workflow.synthetic import published_dataset, synthetic_data
from workbench.workflow.training import relative_seconds

SECONDS = 5.0  # for a timed round
STEPS = 3  # of SGD in it
TRIAL = 4  # images in a batch of the first training, which shows how many there is time for
ROUNDS = 3  # of the timed training: the first is slower, and an evaluation follows the last
FORWARD_SHARE = 1 / 3  # of a training step's work
GB = 1e9


@dataclass(frozen=True)
class StepCost:
    """The cost of FedAvg's training step of a setting, on a whole batch."""

    seconds: float
    memory: int  # bytes of a process, or of the GPU
    parameters: int


@dataclass(frozen=True)
class Needs:
    """The resources for all trainings of a setting."""

    steps: int  # of FedAvg, one seed
    hours: float  # likewise
    methods: dict[str, float | None]  # hours of each; None without a ratio
    memory: int  # bytes
    disk: int
    largest: str  # the preset whose clients keep most


class ProcessClock:
    """A logger that notes the process's own seconds after each round."""

    def __init__(self) -> None:
        self.seconds = list[float]()

    def on_round(self, seed: int, round: int, values: Mapping[str, float]) -> None:
        self.seconds.append(time.process_time())

    def on_experience(self, seed: int, experience: int, values: Mapping[str, float]) -> None:
        """An evaluation is no step."""


class SyntheticExperiment(Experiment):
    """An experiment on three batches of random images of the shape of its data set's."""

    def dataset(self) -> ImageDataset:
        shape = published_dataset(self.setting.data)
        classes = self.setting.split.classes_per_task or 1
        return synthetic_data(shape, classes, STEPS * self.setting.training.batch_size)


def chosen_runs(
    name: str, params: Params, methods: Sequence[str] = (), seeds: str = ""
) -> list[tuple[str, str]]:
    """Methods and seeds: those that are named, otherwise the grid's of the setting."""
    if methods:
        return [(method, seeds or SEEDS) for method in methods]
    runs = [(method, seeds or own) for _, method, own in expand_grid(f"grid.{name}", params)]
    return list(dict.fromkeys(runs))  # a method has several ranges of seeds in a grid


def estimate_setting(
    name: str, profile: str = PAPER, methods: Sequence[str] = (), seeds: str = ""
) -> Needs:
    """The resources that a setting needs with methods of a profile; they are also printed."""
    params = read_profile(profile)
    runs = chosen_runs(name, params, methods, seeds)
    names = dict.fromkeys(method for method, _ in runs)
    experiments = [load_experiment(name, method, params) for method in names]
    fedavg = load_experiment(name, "fedavg", params)
    device = resolve_device("auto")
    workers = resolve_workers(0, device)
    dataset = published_dataset(fedavg.setting.data)
    plan = make_plan(fedavg.setting.split, dataset, seed=0)
    cost = time_step(fedavg, dataset, device)
    needs = compute_needs(experiments, plan, dataset, cost, workers, fedavg.setting.training)
    cpu = f"{workers} cores, no GPU"
    where = cpu if device == "cpu" else device_name(torch.device(device))
    print(f"{name}: {dataset}")
    print(f"on {where}: {needs.memory / GB:.1f} GB of memory, {needs.disk / GB:.1f} GB of disk")
    print(f"FedAvg takes {needs.steps:,} steps a seed, about {in_digits(needs.hours)} hours")
    print(format_methods(needs.methods))
    trained = [(needs.methods[method], len(parse_seeds(each))) for method, each in runs]
    print(format_hours(trained))
    return needs


def in_digits(hours: float) -> str:
    """Hours as text: two digits of those that are few, tenths of the others."""
    return f"{hours:.2g}" if hours < 1 else f"{hours:,.1f}"


def format_hours(runs: Sequence[tuple[float | None, int]]) -> str:
    """The number of runs and the sum of their hours, where they are known."""
    hours = sum(each * seeds for each, seeds in runs if each is not None)
    return f"{sum(seeds for _, seeds in runs)} runs: about {in_digits(hours)} hours"


def format_methods(methods: Mapping[str, float | None]) -> str:
    """A table of all methods, one per line, and where a ratio is missing."""
    width = max(map(len, methods))
    lines = [f"{'method':{width}}  hours a seed"]
    for name, hours in methods.items():
        lines.append(f"{name:{width}} {'?' if hours is None else in_digits(hours):>13}")
    lines.append("by each method's seconds in miniature, relative to FedAvg's")
    if missing := [name for name, hours in methods.items() if hours is None]:
        lines.append(f"?: no seconds of {', '.join(missing)} in benchmarks/seconds.json")
    return "\n".join(lines)


def compute_needs(
    experiments: Sequence[Experiment],
    plan: Plan,
    dataset: ImageDataset,
    cost: StepCost,
    workers: int,
    training: Training,
) -> Needs:
    """The resources to train some methods, each with one seed, on a plan; FedAvg's `training`."""
    batches = -(-count_images(plan, dataset) // training.batch_size)  # [U, T]
    joined = [len(plan.joined(task)) for task in range(plan.tasks)]
    shares = [training.count_selected(clients) / clients for clients in joined]  # [T]
    rounds = training.epochs * training.rounds * plan.split.cycles
    steps = round(batches.sum(0) @ np.array(shares) * rounds)
    tests = count_tests(plan, dataset) / training.batch_size * FORWARD_SHARE
    hours = (steps + tests) * cost.seconds / workers / 3600
    ratios = relative_seconds()
    methods = {e.method: multiply(hours, ratios, e) for e in experiments}
    states = {e.method: state_bytes(e, plan, dataset, cost) for e in experiments}
    largest = max(states, key=states.__getitem__)
    memory = workers * cost.memory + states[largest]
    disk = 3 * states[largest]  # checkpoints old and new, records
    return Needs(steps, hours, methods, memory, disk, largest)


def multiply(hours: float, ratios: Mapping[str, float], experiment: Experiment) -> float | None:
    """An experiment's hours by FedAvg's; without seconds it counts like its kind or small form."""
    method, kind = experiment.method, experiment.resolved()["method"]["kind"]
    known = (ratios[m] for m in (method, method.removesuffix("_published"), kind) if m in ratios)
    ratio = next(known, None)
    return None if ratio is None else hours * ratio


def time_step(fedavg: Experiment, dataset: ImageDataset, device: str) -> StepCost:
    """FedAvg's step on a whole batch, by the last round of a training on a batch or a part."""
    whole = fedavg.setting.training.batch_size
    few = min(whole, TRIAL)
    first = _train_briefly(fedavg, dataset, device, few)
    count = min(whole, max(few + 1, int(few * SECONDS / (STEPS * first.seconds))))
    cost = _train_briefly(fedavg, dataset, device, count)
    per_image = (cost.memory - first.memory) / max(1, count - few)
    memory = cost.memory + int(per_image * (whole - count))
    return StepCost(cost.seconds * whole / count, memory, cost.parameters)


def _train_briefly(fedavg: Experiment, dataset: ImageDataset, device: str, batch: int) -> StepCost:
    setting = fedavg.setting
    classes = min(setting.split.classes_per_task or len(dataset.classes), batch)
    short = replace(
        setting,
        split=Split("classes", clients=1, tasks=1, classes_per_task=classes, order="given"),
        network=replace(setting.network, pretrained=None),  # a file that may not be there
        training=replace(setting.training, batch_size=batch, rounds=ROUNDS, epochs=1),
        diagnostics=Diagnostics(),
    )
    experiment = SyntheticExperiment(short, fedavg.method, fedavg.kind, fedavg.params)
    plan = make_plan(short.split, experiment.dataset(), seed=0)
    clock = ProcessClock()
    with redirect_stdout(StringIO()):  # its accuracies say nothing
        record = train(experiment, {0: plan}, 1, device, loggers=[clock])[0]
    _, timed, last = record.history
    first, end, _ = clock.seconds
    seconds = end - first if device == "cpu" else timed["seconds"]["clients"]
    memory = last["memory"]["gpu"] or last["memory"]["process"]
    parameters = sum(values.size for values in record.weights.values())
    return StepCost(seconds / timed["sgd_steps"], memory, parameters)


def count_images(plan: Plan, dataset: ImageDataset) -> Numbers:
    """The number of training images of each client's tasks.  # [U, T]"""
    table = _count_pairs(dataset.y_train, dataset.domain_train, dataset)

    def count(task: Task) -> int:
        return int(table[_of_task(task)].sum()) if task.train is None else len(task.train)

    return np.array([[count(task) for task in tasks] for tasks in plan.clients])


def count_tests(plan: Plan, dataset: ImageDataset) -> int:
    """The number of evaluated images: per experience those of all clients, and each client's."""
    table = _count_pairs(dataset.y_test, dataset.domain_test, dataset)
    total = 0
    everybody = np.zeros(table.shape, bool)
    for tasks in plan.clients:
        seen = np.zeros(table.shape, bool)
        for task in tasks:
            seen[_of_task(task)] = True
        everybody |= seen
        total += int(table[seen].sum())
    return plan.experiences * (total + int(table[everybody].sum()))


def _count_pairs(labels: Tensor, domains: Tensor, dataset: ImageDataset) -> Numbers:
    shape = len(dataset.domains), len(dataset.classes)
    pairs = domains * shape[1] + labels
    counts: Numbers = torch.bincount(pairs, minlength=shape[0] * shape[1]).numpy()
    return counts.reshape(shape)


def _of_task(task: Task) -> tuple[int | slice, list[int]]:
    """The place of a task's images in a table of domains and classes."""
    return slice(None) if task.domain is None else task.domain, list(task.classes)


def state_bytes(experiment: Experiment, plan: Plan, dataset: ImageDataset, cost: StepCost) -> int:
    """Bytes that clients keep between rounds: exemplars, of their own images, or a model each."""
    memory = getattr(experiment.params, "memory", None)
    if memory is None:
        return len(plan.clients) * 2 * 4 * cost.parameters
    classes = [len(plan.seen(client, plan.experiences)) for client in range(len(plan.clients))]
    images = count_images(plan, dataset).sum(1)  # [U]
    count = np.minimum(memory.exemplars_per_class * np.array(classes), images).sum()
    return int(count) * dataset.x_train[0].numel()


def require_resources(needs: Needs, name: str) -> None:
    """Validate that memory and disk space for a setting are free."""
    memory = psutil.virtual_memory().available
    if needs.memory > memory:
        raise ParameterError(
            f"{name} needs about {needs.memory / GB:.1f} GB of memory, {memory / GB:.1f} GB are "
            "free: take a smaller network or smaller images in params/settings.yaml, fewer "
            "STAMP_WORKERS, or lower what clients keep, most of all with "
            f"{needs.largest}, in params/methods.yaml"
        )
    disk = shutil.disk_usage(DATA).free
    if needs.disk > disk:
        raise OSError(
            f"{name} needs about {needs.disk / GB:.1f} GB in {DATA} for {needs.largest}, "
            f"{disk / GB:.1f} GB are free"
        )


def main() -> int:
    """The exit status of the command line."""
    parser = argparse.ArgumentParser(description="Estimate what the settings of a profile take.")
    parser.add_argument("profile", choices=PROFILES)
    parser.add_argument("settings", nargs="*", help="default: all of the profile's grid")
    parser.add_argument("--method", nargs="+", default=(), help="default: those of the grid")
    parser.add_argument("--seeds", default="", help="as 0to2; default: those of the grid")
    arguments = parser.parse_args()
    elsewhere = os.environ.get("RAY") or os.environ.get("SLURM")
    try:
        params = read_profile(arguments.profile)
        grid = (setting for setting, _, _ in expand_grid("grid", params))
        for name in dict.fromkeys(arguments.settings or grid):
            needs = estimate_setting(name, arguments.profile, arguments.method, arguments.seeds)
            if not elsewhere:
                require_resources(needs, name)
    except (ParameterError, OSError, MemoryError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
