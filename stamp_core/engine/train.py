"""Experiences x rounds x clients: trains one experiment, all its seeds side by side."""

import concurrent.futures
import logging
import math
import os
import platform
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stamp_core.client.by_class import first_per_class
from stamp_core.client.diagnostics import spatial_angles
from stamp_core.client.runtime import RoundId
from stamp_core.client.scoring import Part, count_tests, to_accuracies
from stamp_core.core.devices import device_name, resolve_device
from stamp_core.core.seeding import generator
from stamp_core.data.split import Plan
from stamp_core.engine.checkpoint import (
    FSYNC_MIN_SECONDS,
    Checkpoint,
    checkpoint_folder,
    checkpoint_lock,
    locked,
)
from stamp_core.engine.executor import (
    ClientResult,
    Executor,
    SerialExecutor,
    StateOrRef,
    Worker,
    peak_memory,
    resolve_workers,
    start_executor,
)
from stamp_core.engine.experiment import Experiment
from stamp_core.engine.progress import Progress
from stamp_core.engine.trees import Stored
from stamp_core.methods.base.method import Log, Message, Reply
from stamp_core.models.flat import split_like
from stamp_core.results.metrics import micro_average
from stamp_core.results.records import Record, tree_bytes

logger = logging.getLogger("stamp_core.engine")
PART = 1000  # test images, at least, for which another worker is asked

Start = Callable[[Experiment, Mapping[int, Plan], int, str, Path | None], tuple[Worker, Executor]]


def train(
    experiment: Experiment,
    plans: Mapping[int, Plan],
    workers: int = 1,
    device: str = "auto",
    resume: Path | None = None,
    start: Start = start_executor,
) -> dict[int, Record]:
    """The records of an experiment, one for each seed's plan.

    With a folder `resume` every round is saved there, and a killed training resumes from there
    when it is called again. `workers` 0 is one process per core; results never depend on it.
    `start` returns this process's worker and where the clients run.
    """
    device = resolve_device(device)
    count = resolve_workers(workers, device)
    with checkpoint_lock(resume, experiment.name, plans) as folder:
        worker, executor = start(experiment, plans, count, device, folder)
        try:
            runs = [Run(experiment, plan, worker, executor, folder) for plan in plans.values()]
            total, done = sum(r.rounds for r in runs), sum(r.state["next"] for r in runs)
            with Progress(total, done) as progress:
                return _train_side_by_side(runs, progress)
        finally:
            executor.close()


def save_records(records: Mapping[int, Record], folder: Path, resume: Path | None = None) -> None:
    """Write the records of an experiment, one folder per seed, and delete their checkpoints."""
    for seed, record in records.items():
        record.save(folder / str(seed))
    for seed, record in records.items():
        if resume and checkpoint_folder(resume, record.name, seed).exists():
            remove_checkpoint(resume, record.name, seed)


def remove_checkpoint(resume: Path, name: str, seed: int) -> None:
    """Delete the folder of a finished run; if that fails, warn: its record is saved."""
    folder = checkpoint_folder(resume, name, seed)
    try:
        with locked(resume, name, seed):
            shutil.rmtree(folder)
    except BlockingIOError:  # another process trains the same: it will delete the folder
        pass
    except OSError as error:
        warnings.warn(f"checkpoint {folder} of a finished run stays: {error}", stacklevel=3)


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
        self.experiment, self.plan, self.worker, self.executor = experiment, plan, worker, executor
        self.method, self.models = worker.method, worker.method.models
        self.training, self.seed = experiment.setting.training, plan.seed
        self.rounds = plan.experiences * self.training.rounds
        self.identity = experiment.identity(plan, str(worker.runtime.device))
        self.checkpoint: Checkpoint | None = None
        if resume:
            of_run = resume, experiment.name, plan.seed, self.identity
            self.checkpoint = Checkpoint(*of_run, worker.stores[plan.seed])
        saved = self.checkpoint.load() if self.checkpoint else None
        self.state = saved or self.initial_state()
        self.disk = [state_bytes(kept) for kept in self.state["clients"]]
        self.saving, self.stop = 0.0, False
        if saved:
            logger.info(
                "%s seed %d resumes after round %d", experiment.name, self.seed, saved["next"]
            )
        else:
            self.save(evaluated=True, flush=False)  # a warm-up is kept as well
        count = experiment.setting.diagnostics.features
        self.feature_indices = first_per_class(worker.runtime.dataset.y_test, count)

    def initial_state(self) -> dict[str, Any]:
        """The state before the first round, with the untrained model's accuracies."""
        start = time.perf_counter()
        server, clients, down, up = self.worker.run(partial(Worker.initial_states, seed=self.seed))
        setup = {"down": down, "up": up, "seconds": time.perf_counter() - start}
        scorings = len(self.worker.runtime.scorings)
        shape = (scorings, self.plan.experiences, len(clients), self.plan.tasks)
        scores = {model: torch.full(shape, torch.nan) for model in ("global", "personal", "local")}
        here = SerialExecutor(self.worker)
        scores["initial"] = self.evaluate_global(0, global_model(server), here)
        progress = {"next": 0, "history": [], "features": [], "memory": [], "setup": setup}
        return {"server": server, "clients": clients, "scores": scores, **progress}

    def finish(self, progress: Progress) -> Record:
        """Train from the current state to the end; returns the record of the whole run."""
        while self.state["next"] < self.rounds:
            if self.stop:
                raise InterruptedError(f"seed {self.seed} stopped")
            experience, round_ = divmod(self.state["next"], self.training.rounds)
            self.train_round(experience, round_)
            progress.round()
            if round_ == self.training.rounds - 1:
                place = f"{experience + 1}/{self.plan.experiences}"
                progress.experience(self.seed, place, self.accuracy(experience))
        return self.record()

    def train_round(self, experience: int, round_: int) -> None:
        """One round: broadcast, train clients, aggregate, evaluate, record, save."""
        selected, completing = self.select_clients(experience, round_)
        state, last = self.state, round_ == self.training.rounds - 1
        clock = [time.perf_counter()]
        messages = {client: self.method.broadcast(state["server"], client) for client in selected}
        results = self.executor.map(
            partial(
                Worker.train_client,
                round_id=RoundId(self.seed, client, experience, round_, last),
                state=state["clients"][client],
                message=messages[client],
            )
            for client in completing
        )
        clock.append(time.perf_counter())
        with self.worker.lock:  # one seed at a time uses this process's live model
            before, log = state["server"], Log()
            replies = self.method.gather([result.reply for result in results])
            state["server"] = self.method.aggregate(before, replies, log)
        for result in results:
            client = result.reply.client
            state["clients"][client], self.disk[client] = result.state, state_bytes(result.state)
        clock.append(time.perf_counter())
        angles = self.angles(before, replies, [result.angles for result in results])
        del replies  # they may fill the device
        if last:
            self.evaluate(experience, results)
        clock.append(time.perf_counter())
        entry = self.history_entry(experience, round_, messages, results, clock)
        logs = [*(result.reply.log for result in results), log]
        entry["seconds"] |= sum_by_name(each.seconds for each in logs)
        state["history"].append({**entry, "angles": angles, **summarise_logs(logs)})
        state["next"] += 1
        logger.debug(
            "%s seed %d: experience %d round %d, %d of %d clients, loss %s, %.2f s",
            *(self.experiment.name, self.seed, experience, round_),
            *(len(results), len(selected), entry["loss"], clock[-1] - clock[0]),
        )
        self.save(last, flush=clock[-1] - clock[0] > FSYNC_MIN_SECONDS)

    def select_clients(self, experience: int, round_: int) -> tuple[list[int], list[int]]:
        """The clients that receive the model in a round, and those of them that complete it."""
        clients = len(self.plan.clients)
        address = (self.seed, experience, round_)
        count = max(1, math.ceil(self.training.participation * clients - 1e-9))  # 0.28 * 25 > 7
        order = torch.randperm(clients, generator=generator(*address, "participation"))
        draws = torch.rand(clients, generator=generator(*address, "dropout"))
        selected = sorted(order[:count].tolist())
        completing = [client for client in selected if draws[client] >= self.training.dropout]
        server, method = self.state["server"], self.method
        return method.participants(selected, server), method.participants(completing, server)

    def angles(
        self, before: Mapping[str, Any], replies: list[Reply], temporal: list[dict[str, float]]
    ) -> dict[str, float]:
        """Angles between the clients' updates and, where recorded, between each client's tasks."""
        messages = [reply.message for reply in replies if reply.sgd_steps]
        received = [message["parameters"] for message in messages if "parameters" in message]
        if not received or "global" not in self.models:
            return mean_by_name(temporal)
        start, end = (
            server["parameters"].to(received[0].device) for server in (before, self.state["server"])
        )
        return mean_by_name([*temporal, spatial_angles(start, end, received)])

    def evaluate(self, experience: int, results: list[ClientResult]) -> None:
        """Fill in the accuracies after an experience, of all models that the method has."""
        scores, message = self.state["scores"], global_model(self.state["server"])
        for result in results:
            if result.scores is not None:
                scores["local"][:, experience, result.reply.client] = result.scores[:, 0]
        if "global" in self.models and self.has_local_buffers():
            scores["global"][:, experience] = self.evaluate_clients(experience, personal=False)
        elif "global" in self.models:
            found = self.evaluate_global(experience, message, self.executor)
            scores["global"][:, experience] = found
        if "personal" in self.models:
            scores["personal"][:, experience] = self.evaluate_clients(experience, personal=True)
        if "global" in self.models and len(self.feature_indices):
            extract = partial(
                Worker.extract_features, message=message, indices=self.feature_indices
            )
            self.state["features"] += self.executor.map([extract])
        if experience in (0, self.plan.experiences - 1):
            self.state["memory"] += self.memory_samples(experience)

    def evaluate_global(self, experience: int, message: Message, executor: Executor) -> Tensor:
        """Scores of a global model for all clients; workers share its test images.

        # [scorings, U, T]
        """
        runtime = self.worker.runtime
        evaluate = partial(Worker.evaluate, seed=self.seed, experience=experience, message=message)
        if runtime.dataset.masks:
            return executor.map([partial(evaluate, part=Part())])[0]
        count = min(executor.workers, 1 + len(runtime.y_test) // PART)
        counts = executor.map([partial(evaluate, part=Part(k, count)) for k in range(count)])
        return to_accuracies(torch.stack(counts).sum(0), torch.from_numpy(self.test_counts()))

    def evaluate_clients(self, experience: int, personal: bool) -> Tensor:
        """Scores of each client's own version of a model.  # [scorings, U, T]"""
        server, last = self.state["server"], self.training.rounds - 1
        calls = [
            partial(
                Worker.evaluate_client,
                round_id=RoundId(self.seed, client, experience, last, True),
                state=state,
                message=(
                    self.method.broadcast(server, client) if personal else global_model(server)
                ),
                personal=personal,
            )
            for client, state in enumerate(self.state["clients"])
        ]
        return torch.cat(self.executor.map(calls), dim=1)

    def has_local_buffers(self) -> bool:
        """Whether the global model needs each client's own batch normalisation."""
        return self.training.buffers == "local" and len(self.worker.runtime.model.buffers) > 0

    def history_entry(
        self,
        experience: int,
        round_: int,
        messages: Mapping[int, Message],
        results: list[ClientResult],
        clock: list[float],
    ) -> dict[str, Any]:
        """A round's history entry: loss, images, seconds by phase, bytes, memory, disk."""
        replies = [result.reply for result in results]
        losses = [(reply.loss, reply.samples) for reply in replies if reply.sgd_steps]
        samples = sum(n for _, n in losses)
        return {
            "experience": experience,
            "round": round_,
            "participants": len(messages),
            "completed": len(results),
            "sgd_steps": sum(reply.sgd_steps for reply in replies),
            "images": sum(reply.log.images for reply in replies),
            "loss": sum(loss * n for loss, n in losses) / samples if samples else None,
            "seconds": {
                "clients": sum(result.seconds for result in results),  # their own work, added up
                "waiting": clock[1] - clock[0],  # for the clients, which work side by side
                "server": clock[2] - clock[1],
                "evaluation": clock[3] - clock[2],
                "checkpoint": self.saving,  # of the round before
            },
            "bytes": {
                "down": sum(map(tree_bytes, messages.values())),
                "up": sum(tree_bytes(reply.message) for reply in replies),
            },
            "memory": {
                "process": max([peak_memory(), *(result.memory for result in results)]),
                "gpu": max([0, *(result.gpu for result in results)]),
            },
            "disk": max(self.disk),  # of the client that keeps most
        }

    def save(self, evaluated: bool, flush: bool) -> None:
        """Write the checkpoint; if that fails, as on a full disk, warn and continue training."""
        if self.checkpoint is None:
            return
        start, where = time.perf_counter(), self.checkpoint.folder
        try:
            self.checkpoint.save(self.state, evaluated, flush)
        except OSError as error:
            warnings.warn(f"no checkpoint at {where}: {error}; training goes on", stacklevel=2)
        self.saving = time.perf_counter() - start

    def accuracy(self, experience: int) -> float:
        """Mean accuracy over the tasks learnt so far, of the first model that the method has."""
        scores = self.state["scores"][self.models[0]]
        a = scores[0, experience : experience + 1].double().numpy()  # [1, U, T]
        return float(micro_average(a, self.test_counts())[0, : experience + 1].mean())

    def test_counts(self) -> npt.NDArray[np.int64]:
        """How many test images each client has of each task.  # [U, T]"""
        clients = range(len(self.plan.clients))
        return count_tests(self.worker.runtime, self.plan, clients).numpy()

    def record(self) -> Record:
        """The record of the finished run."""
        runtime = self.worker.runtime
        graphs = self.method.graph_safe and runtime.graphs.usable(self.training.batch_size)
        about = {
            **self.experiment.resolved(),
            "group": self.experiment.kind.group,
            "sweep": self.experiment.sweep,
            "seed": self.seed,
            "setup": self.state["setup"],  # before the first round
            "identity": self.identity,
            "environment": {
                "python": platform.python_version(),
                "device": device_name(runtime.device),
                "steps": "graphs" if graphs else "eager",  # of local training, on whole batches
                "cores": os.cpu_count(),
            },
        }
        return Record(
            about,
            self.state["history"],
            {name: values.numpy() for name, values in self.state["scores"].items()},
            self.test_counts(),
            self.weights(),
            self.features(),
            concatenate(self.state["memory"]),
        )

    def features(self) -> dict[str, Any]:
        """Features of test images after each experience, with their labels, if recorded."""
        if not self.state["features"]:
            return {}
        labels = self.worker.runtime.dataset.y_test[self.feature_indices]
        return {"features": torch.stack(self.state["features"]).numpy(), "labels": labels.numpy()}

    def memory_samples(self, experience: int) -> list[dict[str, Tensor]]:
        """Images of each class in the first client's memory now, if recorded and if it has any."""
        count, state = self.experiment.setting.diagnostics.memory, self.state
        if not count:
            return []
        with self.worker.lock:
            client = self.worker.load_state(self.seed, state["clients"][0])
            samples = self.method.memory_samples(state["server"], client, count)
        if not samples:
            return []
        return [{**samples, "experiences": torch.full_like(samples["labels"], experience)}]

    def weights(self) -> dict[str, Any]:
        """The final global model's tensors by name; none where there is no global model.

        As torch has them, on any device: a convolution's are O, I, H, W.
        """
        if "global" not in self.models:
            return {}
        module, server = self.worker.runtime.model.module, self.state["server"]
        weights = {}
        for named, vector in (
            (dict(module.named_parameters()), server["parameters"]),
            (dict(module.named_buffers()), server["buffers"]),
        ):
            values = split_like(vector, list(named.values()))
            weights.update(
                {name: v.contiguous().numpy() for name, v in zip(named, values, strict=True)}
            )
        return weights


def state_bytes(kept: StateOrRef) -> int:
    """The size of a client's state."""
    return kept.bytes if isinstance(kept, Stored) else tree_bytes(kept)


def mean_by_name(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each named number where it is defined; absent if it is defined nowhere."""
    values: dict[str, list[float]] = {}
    for name, value in (item for numbers in each for item in numbers.items()):
        if not math.isnan(value):
            values.setdefault(name, []).append(value)
    return {name: sum(v) / len(v) for name, v in values.items()}


def concatenate(parts: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The tensors of each name, one after the other."""
    names = parts[0] if parts else ()
    return {name: torch.cat([part[name] for part in parts]).numpy() for name in names}


def sum_by_name(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each named number."""
    total: Counter[str] = Counter()
    for numbers in each:
        total.update(numbers)
    return dict(total)


def summarise_logs(logs: list[Log]) -> dict[str, Any]:
    """A round's notes, as means over clients, and how often each event occurred."""
    events = Counter(event for log in logs for event in log.events)
    return {"notes": mean_by_name(log.numbers for log in logs), "events": dict(events)}


def global_model(server: Mapping[str, Any]) -> Message:
    """The global model as a message."""
    return {name: server[name] for name in ("parameters", "buffers")}


def _train_side_by_side(runs: list[Run], progress: Progress) -> dict[int, Record]:
    """The records of all runs; the error of a failed run is raised after the others have ended."""
    if isinstance(runs[0].executor, SerialExecutor):
        return _gather(runs, [_outcome(run, progress) for run in runs])
    threads = concurrent.futures.ThreadPoolExecutor(len(runs))
    try:
        futures = [threads.submit(_outcome, run, progress) for run in runs]
        return _gather(runs, [future.result() for future in futures])
    finally:
        for run in runs:
            run.stop = True  # Ctrl-C: the threads end after their round, which is saved
        threads.shutdown()


def _outcome(run: Run, progress: Progress) -> Record | Exception:
    """The record of a run, or the error that ended it."""
    try:
        return run.finish(progress)
    except Exception as error:  # any error is raised again when the others have ended
        return error


def _gather(runs: list[Run], outcomes: list[Record | Exception]) -> dict[int, Record]:
    """The records by seed, or the first error with the seeds that failed."""
    pairs = list(zip(runs, outcomes, strict=True))
    errors = [(run.seed, outcome) for run, outcome in pairs if isinstance(outcome, Exception)]
    if errors:
        seed, error = errors[0]
        error.add_note(f"seed {seed}; seeds that failed: {[s for s, _ in errors]} of {len(runs)}")
        raise error
    return {run.seed: outcome for run, outcome in pairs if isinstance(outcome, Record)}
