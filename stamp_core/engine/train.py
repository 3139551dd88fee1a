"""Experiences x rounds x clients: trains one experiment, all its seeds side by side."""

import concurrent.futures
import logging
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from stamp_core.client.runtime import RoundId
from stamp_core.config.decode import invalid
from stamp_core.core.devices import device_name, resolve_device
from stamp_core.core.processes import progress_bar, progress_form
from stamp_core.core.seeding import generator
from stamp_core.data.plan import Plan, Plans
from stamp_core.engine.checkpoint import FLUSH_AFTER, Checkpoint, checkpoint_lock, remove_checkpoint
from stamp_core.engine.evaluate import Evaluator
from stamp_core.engine.executor import Executor, SerialExecutor, resolve_workers, start_executor
from stamp_core.engine.experiment import Experiment
from stamp_core.engine.history import round_angles, round_entry, state_bytes
from stamp_core.engine.privacy import refused
from stamp_core.engine.progress import LOGGING, Logger, Progress, scalars
from stamp_core.engine.server import Aggregator
from stamp_core.engine.worker import ClientResult, Worker
from stamp_core.methods.base.method import DivergedError, Log, Reply
from stamp_core.models.flat import split_like
from stamp_core.results.records import Record

logger = logging.getLogger("stamp_core.engine")

_T = TypeVar("_T")
Start = Callable[[Experiment, Plans, int, str, Path | None], tuple[Worker, Executor]]


def train(
    experiment: Experiment,
    plans: Plans,
    workers: int = 1,
    device: str = "auto",
    resume: Path | None = None,
    start: Start = start_executor,
    loggers: Iterable[Logger] = (),
) -> dict[int, Record]:
    """The records of an experiment, one for each seed's plan.

    With a folder `resume` every round is saved there, and a killed training resumes from there
    when it is called again. `workers` 0 is one process per core; results never depend on it.
    `start` returns this process's worker and where the clients run. `loggers` are told of every
    round and experience. Records have the split of the plans, not that of the setting.
    """
    experiment = experiment.with_plans(plans)
    form = progress_form()  # a wrong one is refused before anything starts
    device = resolve_device(device)
    count = resolve_workers(workers, device)
    with checkpoint_lock(resume, experiment.name, plans) as folder:
        worker, executor = start(experiment, plans, count, device, folder)
        try:
            runs = [Run(experiment, plan, worker, executor, folder) for plan in plans.values()]
            done = sum(run.state["next"] for run in runs)
            rounds = sum(run.rounds for run in runs)
            with progress_bar(
                form, desc=experiment.name, total=rounds, initial=done, unit="round"
            ) as bar:
                progress = Progress(form, experiment.name, rounds - done, bar)
                finish = partial(Run.finish, progress=progress, loggers=list(loggers))
                serial = isinstance(executor, SerialExecutor)
                ends = list(map(finish, runs)) if serial else map_side_by_side(finish, runs)
                return sort_ends(dict(zip(plans, ends, strict=True)))
        finally:
            executor.close()


class SeedsDiverged(DivergedError):
    """Some seeds of a training diverged; `records` has those of the others, which are whole."""

    def __init__(self, records: dict[int, Record], errors: Mapping[int, DivergedError]) -> None:
        super().__init__(*next(iter(errors.values())).args)
        self.records = records
        self.errors = errors


def map_side_by_side(finish: "Callable[[Run], _T]", runs: "Sequence[Run]") -> list[_T]:
    """The results of `finish` for some runs, each in a thread of its own."""
    threads = concurrent.futures.ThreadPoolExecutor(len(runs))
    try:
        return list(threads.map(finish, runs))
    finally:
        for run in runs:
            run.stop = True  # Ctrl-C: the threads end after their round, which is saved
        threads.shutdown()


def sort_ends(ends: Mapping[int, Record | Exception]) -> dict[int, Record]:
    """The records of all seeds; the error of the first seed that has none."""
    records = {seed: end for seed, end in ends.items() if isinstance(end, Record)}
    errors = {seed: end for seed, end in ends.items() if isinstance(end, Exception)}
    diverged = {seed: e for seed, e in errors.items() if isinstance(e, DivergedError)}
    for seed, error in errors.items():
        first = SeedsDiverged(records, diverged) if len(diverged) == len(errors) else error
        first.add_note(f"seed {seed}; seeds that failed: {[*errors]} of {len(ends)}")
        raise first
    return records


def save_records(records: Mapping[int, Record], folder: Path, resume: Path | None = None) -> None:
    """Write the records of an experiment, one folder per seed, and delete their checkpoints."""
    for seed, record in records.items():
        record.save(folder / str(seed))
    for seed, record in records.items():
        if resume:
            remove_checkpoint(resume, record.name, seed)


class Run:
    """One seed's training; `state` is all of it, so a checkpoint is `state` on disk."""

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan,
        worker: Worker,
        executor: Executor,
        resume: Path | None,
    ) -> None:
        self.experiment = experiment
        self.plan = plan
        self.worker = worker
        self.executor = executor
        self.method = worker.method
        self.training = experiment.setting.training
        self.seed = plan.seed
        self.rounds = plan.experiences * self.training.rounds
        self.aggregator = Aggregator(worker.method, experiment.method, plan.seed)
        self.evaluator = Evaluator(plan, worker, executor)
        self.identity = experiment.identity(plan, str(worker.runtime.device))
        self.stop = False
        self.saving = 0.0  # seconds that the last checkpoint took
        self.checkpoint: Checkpoint | None = None
        if resume:
            store = worker.stores[plan.seed]
            self.checkpoint = Checkpoint(resume, experiment.name, plan.seed, self.identity, store)
        saved = self.checkpoint.load() if self.checkpoint else None
        self.state = saved or self.initial_state()
        self.disk = [state_bytes(kept) for kept in self.state["clients"]]
        if saved:
            logger.info(
                "%s seed %d resumes after round %d", experiment.name, self.seed, saved["next"]
            )
        else:
            self.save(evaluated=True, flush=False)  # a warm-up is kept as well

    def initial_state(self) -> dict[str, Any]:
        """The state before the first round, with the untrained model's accuracies."""
        start = time.perf_counter()
        here = SerialExecutor(self.worker)
        (initial,) = here.map(Worker.initial_states, [(self.seed,)])
        server, clients, down, up = initial
        if self.experiment.setting.privacy and up:
            raise refused(self.method, "uploads nothing before the first round, as privacy is set")
        seconds = time.perf_counter() - start
        scores = {model: self.evaluator.undefined() for model in ("global", "personal", "local")}
        scores["initial"] = self.evaluator.global_scores(0, server, here)
        setup = {"setup": {"down": down, "up": up}, "setup_seconds": seconds}
        progress = {"next": 0, "history": [], "features": [], "memory": [], **setup}
        return {"server": server, "clients": clients, "scores": scores, **progress}

    def finish(self, progress: Progress, loggers: Sequence[Logger]) -> Record | Exception:
        """Train to the end; the record, or the error, which does not end the other seeds."""
        try:
            for index in range(self.state["next"]):
                self.log(index, loggers)
            while self.state["next"] < self.rounds:
                if self.stop:
                    raise InterruptedError(f"seed {self.seed} stopped")
                experience, round_ = divmod(self.state["next"], self.training.rounds)
                self.train_round(experience, round_)
                progress.round()
                self.log(self.state["next"] - 1, loggers)
                if round_ == self.training.rounds - 1:
                    accuracy = self.accuracies(experience)["accuracy"]
                    progress.experience(self.seed, experience, self.plan.experiences, accuracy)
            return self.record()
        except Exception as error:
            return error

    def log(self, index: int, loggers: Iterable[Logger]) -> None:
        """Tell loggers of a round that is in the state, and of the experience that it ends."""
        values = scalars(self.state["history"][index])
        del values["round"]  # within its experience
        experience, round_ = divmod(index, self.training.rounds)
        with LOGGING:
            for each in loggers:
                each.on_round(self.seed, index, values)
                if round_ == self.training.rounds - 1:
                    each.on_experience(self.seed, experience, self.accuracies(experience))

    def accuracies(self, experience: int) -> dict[str, float]:
        """The first model's accuracy of each task, and their mean over those learnt so far."""
        tasks = self.evaluator.task_accuracies(self.state["scores"], experience)
        learnt = tasks[: experience + 1]
        each = {f"task_accuracy/{task}": accuracy for task, accuracy in enumerate(tasks, start=1)}
        return {"accuracy": sum(learnt) / len(learnt), **each}

    def train_round(self, experience: int, round_: int) -> None:
        state, before, log = self.state, self.state["server"], Log()
        last = round_ == self.training.rounds - 1
        with log.clock("waiting"):  # for the clients, which work side by side
            selected = self.select_clients(experience, round_)
            messages = {u: self.method.broadcast(before, u) for u in selected}
            ids = [RoundId(self.seed, u, experience, round_, last) for u in selected]
            each = [(id_, state["clients"][id_.client], messages[id_.client]) for id_ in ids]
            results = self.executor.map(Worker.train_client, each)
        with log.clock("server"):
            replies = self.aggregate(results, experience, round_, log)
        with log.clock("evaluation"):
            temporal = [result.angles for result in results]
            angles = round_angles(before, state["server"], replies, temporal)
            del replies  # they may fill the device
            if last:
                self.evaluator.evaluate(state, experience, results)
        passed = sum(log.seconds[phase] for phase in ("waiting", "server", "evaluation"))
        entry = round_entry(messages, results, log, angles, self.disk, self.saving)
        state["history"].append({"experience": experience, "round": round_, **entry})
        state["next"] += 1
        logger.debug(
            "%s seed %d: experience %d round %d, %d of %d clients, loss %s, %.2f s",
            *(self.experiment.name, self.seed, experience, round_),
            *(len(results), len(messages), entry["loss"], passed),
        )
        self.save(last, flush=passed > FLUSH_AFTER)

    def aggregate(
        self, results: list[ClientResult], experience: int, round_: int, log: Log
    ) -> list[Reply]:
        """Put the next states into `state`; the replies whose angles are recorded, if any."""
        state = self.state
        replies = [result.reply for result in results]
        with self.worker.lock:  # one seed at a time uses this process's live model
            handed = self.aggregator.gather(replies, log)
            address = (experience, round_)
            state["server"] = self.aggregator.aggregate(state["server"], handed, address, log)
        for result in results:
            state["clients"][result.reply.client] = result.state
            self.disk[result.reply.client] = state_bytes(result.state)
        if "global" not in self.method.models:
            return []
        # With secure sums angles are the simulator's, which sees all replies.
        return replies if self.training.secure_sums else handed

    def select_clients(self, experience: int, round_: int) -> list[int]:
        joined = self.plan.joined(experience)
        address = (self.seed, experience, round_)
        count = self.training.count_selected(len(joined))
        order = torch.randperm(len(joined), generator=generator(*address, "participation"))
        selected = sorted(joined[index] for index in order[:count].tolist())
        asked = self.method.participants(selected, self.state["server"])
        if self.experiment.setting.privacy and asked != selected:
            raise refused(self.method, "trains the selected clients, as privacy is set")
        if self.training.secure_sums and len(asked) < 2:
            right = f"false for {self.experiment.method}, as a round has one client"
            raise invalid("training.secure_sums", True, right)
        return asked

    def save(self, evaluated: bool, flush: bool) -> None:
        """Write the checkpoint; if that fails, as on a full disk, warn and continue training."""
        if self.checkpoint is None:
            return
        start = time.perf_counter()
        try:
            self.checkpoint.save(self.state, evaluated, flush)
        except OSError as error:
            where = self.checkpoint.folder
            warnings.warn(f"no checkpoint at {where}: {error}; training goes on", stacklevel=2)
        self.saving = time.perf_counter() - start

    def record(self) -> Record:
        runtime = self.worker.runtime
        state = self.state
        graphs = self.method.graph_safe and runtime.graphs and runtime.graphs.graphs
        about = {
            **self.experiment.resolved(),
            "group": self.experiment.kind.group,
            "sweep": self.experiment.sweep,
            "seed": self.seed,
            "setup": state["setup"],  # bytes before the first round
            "identity": self.identity,
        }
        environment = {
            "python": platform.python_version(),
            "device": device_name(runtime.device),
            "steps": "graphs" if graphs else "eager",  # of local training, on whole batches
            "cores": os.cpu_count(),
            "setup_seconds": state["setup_seconds"],
        }
        scores = {name: values.numpy() for name, values in state["scores"].items()}
        features = {}
        if state["features"]:
            labels = runtime.dataset.y_test[self.evaluator.feature_indices].numpy()
            features = {"features": torch.stack(state["features"]).numpy(), "labels": labels}
        memory = {
            name: torch.cat([part[name] for part in state["memory"]]).numpy()
            for name in (state["memory"][0] if state["memory"] else ())
        }
        tests = self.evaluator.tests.numpy()
        arrays = (scores, tests, self.weights(), features, memory)
        return Record(about, state["history"], *arrays, environment=environment)

    def weights(self) -> dict[str, Any]:
        """The final global model's tensors by name, if there is one; convolutions as O, I, H, W."""
        weights: dict[str, Any] = {}
        if "global" not in self.method.models:
            return weights
        module = self.worker.runtime.model.module
        for key, tensors in (
            ("parameters", dict(module.named_parameters())),
            ("buffers", dict(module.named_buffers())),
        ):
            values = split_like(self.state["server"][key], list(tensors.values()))
            for name, value in zip(tensors, values, strict=True):
                weights[name] = value.contiguous().numpy()
        return weights
