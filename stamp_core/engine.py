"""Tasks x rounds x clients: trains one cell of the grid, all its seeds side by side."""

import concurrent.futures
import math
import os
import platform
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stamp_core import checkpoint, diagnostics
from stamp_core.executor import (
    Answer,
    Executor,
    Here,
    Worker,
    peak_memory,
    resolve_device,
    resolve_workers,
    start,
)
from stamp_core.experiments import Experiment
from stamp_core.methods import Log, Message
from stamp_core.metrics import pooled
from stamp_core.progress import Progress
from stamp_core.records import SCORINGS, Record, tree_bytes
from stamp_core.seeding import generator
from stamp_core.split import Plan
from stamp_core.vectors import pieces
from stamp_core.workspace import Visit, first_of_each


def train(
    experiment: Experiment,
    plans: Mapping[int, Plan],
    workers: int = 1,
    device: str = "auto",
    resume: Path | None = None,
) -> dict[int, Record]:
    """The records of an experiment, one for each seed's plan.

    With a folder `resume` every round is saved there, and a killed training goes on where it was
    when it is called again. `workers` 0 is one process per core; results never depend on it.
    """
    device = resolve_device(device)
    here, executor = start(experiment, plans, resolve_workers(workers, device), device)
    try:
        runs = [Run(experiment, plan, here, executor, resume) for plan in plans.values()]
        with Progress(sum(r.rounds for r in runs), sum(r.state["next"] for r in runs)) as progress:
            return _side_by_side(runs, progress)
    finally:
        executor.close()


class Run:
    """One seed's training; `state` is all of it, so a checkpoint is `state` on disk."""

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan,
        here: Worker,
        executor: Executor,
        resume: Path | None,
    ) -> None:
        self.experiment, self.plan, self.here, self.executor = experiment, plan, here, executor
        self.training, self.seed = experiment.setting.training, plan.seed
        self.rounds = plan.steps * self.training.rounds
        self.identity = experiment.identity(plan, str(here.work.device))
        name = f"{experiment.setting.name}-{experiment.method}-{plan.seed}.safetensors"
        self.file = resume / name if resume else None
        saved = checkpoint.load(self.file, self.identity) if self.file else None
        self.state = saved or self.fresh()
        self.saving, self.stop = 0.0, False
        self.shown = first_of_each(here.work.images.y_test, experiment.setting.observe.features)

    def fresh(self) -> dict[str, Any]:
        """The state before the first round, with the untrained model's accuracies."""
        began = time.perf_counter()
        server, clients, down, up = self.here.call("begin", (self.seed,))
        setup = {"down": down, "up": up, "seconds": time.perf_counter() - began}
        shape = (len(SCORINGS), self.plan.steps, len(clients), self.plan.tasks)
        scores = {model: torch.full(shape, torch.nan) for model in ("global", "personal", "local")}
        scores["initial"] = self.here.call("judge", (self.seed, 0, model_of(server)))
        begun = {"next": 0, "history": [], "features": [], "setup": setup}
        return {"server": server, "clients": clients, "scores": scores, **begun}

    def finish(self, progress: Progress) -> Record:
        """Train to the end from wherever the state is; the record of the whole run."""
        while self.state["next"] < self.rounds:
            if self.stop:
                raise InterruptedError(f"seed {self.seed} stopped")
            step, round_ = divmod(self.state["next"], self.training.rounds)
            self.advance(step, round_)
            progress.round()
            if round_ == self.training.rounds - 1:
                progress.step(self.seed, f"{step + 1}/{self.plan.steps}", self.accuracy(step))
        return self.record()

    def advance(self, step: int, round_: int) -> None:
        """One round: send, train, gather, note what it cost, save."""
        asked, answering = self.draw(step, round_)
        method, state, last = self.here.method, self.state, round_ == self.training.rounds - 1
        clock = [time.perf_counter()]
        messages = {client: method.broadcast(state["server"], client) for client in asked}
        visits = [Visit(self.seed, client, step, round_, last) for client in answering]
        answers: list[Answer] = self.executor.call(
            "attend", [(v, state["clients"][v.client], messages[v.client]) for v in visits]
        )
        clock.append(time.perf_counter())
        with self.here.lock:  # one seed at a time uses this process's live model
            before, replies, log = state["server"], [answer.reply for answer in answers], Log()
            state["server"] = method.aggregate(before, replies, log)
        for client, answer in zip(answering, answers, strict=True):
            state["clients"][client] = answer.reply.state
        clock.append(time.perf_counter())
        angles = self.angles(before, answers)
        if last:
            self.evaluate(step, answering, answers)
        clock.append(time.perf_counter())
        row = self.row(step, round_, messages, answers, clock)
        logs = [*(answer.reply.log for answer in answers), log]
        row["seconds"] |= added(each.seconds for each in logs)
        state["history"].append({**row, "angles": angles, **told(logs)})
        state["next"] += 1
        self.save()

    def angles(self, before: Mapping[str, Any], answers: list[Answer]) -> dict[str, float]:
        """Between the clients' updates and, where looked at, between the tasks of each of them."""
        rows = [answer.angles for answer in answers]
        messages = [answer.reply.message for answer in answers if answer.reply.steps]
        received = [each["parameters"] for each in messages if "parameters" in each]
        if received and "global" in self.here.method.models:
            after = self.state["server"]["parameters"]
            rows.append(diagnostics.spatial(before["parameters"], after, received))
        return means(rows)

    def draw(self, step: int, round_: int) -> tuple[list[int], list[int]]:
        """Who is sent the model in a round, and who of them answers."""
        clients = len(self.plan.clients)
        address = (self.seed, step, round_)
        some = max(1, math.ceil(self.training.participation * clients - 1e-9))  # 0.28 * 25 > 7
        shuffled = torch.randperm(clients, generator=generator(*address, "participation"))
        stays = torch.rand(clients, generator=generator(*address, "dropout"))
        chosen = sorted(shuffled[:some].tolist())
        answering = [client for client in chosen if stays[client] >= self.training.dropout]
        method = self.here.method
        return method.participants(chosen), method.participants(answering)

    def evaluate(self, step: int, answering: list[int], answers: list[Answer]) -> None:
        """Fill the accuracies after a step of all models that the method has."""
        scores, models = self.state["scores"], self.here.method.models
        for client, answer in zip(answering, answers, strict=True):
            if answer.scores is not None:
                scores["local"][:, step, client] = answer.scores[:, 0]
        if "global" in models and self.buffers_are_local():
            scores["global"][:, step] = self.judge_clients(step, personal=False)
        elif "global" in models:
            call = (self.seed, step, model_of(self.state["server"]))
            scores["global"][:, step] = self.executor.call("judge", [call])[0]
        if "personal" in models:
            scores["personal"][:, step] = self.judge_clients(step, personal=True)
        if "global" in models and len(self.shown):
            shown = (model_of(self.state["server"]), self.shown)
            self.state["features"] += self.executor.call("describe", [shown])

    def judge_clients(self, step: int, personal: bool) -> Tensor:
        """Scores of a model that is every client's own.  # [scorings, U, T]"""
        server, calls = self.state["server"], []
        for client, state in enumerate(self.state["clients"]):
            message = model_of(server)
            if personal:
                message = self.here.method.broadcast(server, client)
            visit = Visit(self.seed, client, step, self.training.rounds - 1, True)
            calls.append((visit, state, message, personal))
        return torch.cat(self.executor.call("judge_client", calls), dim=1)

    def buffers_are_local(self) -> bool:
        """Whether the global model needs each client's own batch normalisation."""
        return self.training.buffers == "local" and len(self.here.work.model.buffers) > 0

    def row(
        self,
        step: int,
        round_: int,
        messages: Mapping[int, Message],
        answers: list[Answer],
        clock: list[float],
    ) -> dict[str, Any]:
        """The history's entry of a round: loss, seconds by phase, bytes each way, memory, disk."""
        replies = [answer.reply for answer in answers]
        losses = [(r.loss, r.samples) for r in replies if r.steps]
        samples = sum(n for _, n in losses)
        return {
            "step": step,
            "round": round_,
            "asked": len(messages),
            "answered": len(answers),
            "steps": sum(reply.steps for reply in replies),
            "loss": sum(loss * n for loss, n in losses) / samples if samples else None,
            "seconds": {
                "clients": sum(answer.seconds for answer in answers),  # their own work, added up
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
                "process": max([peak_memory(), *(answer.memory for answer in answers)]),
                "gpu": max([0, *(answer.gpu for answer in answers)]),
            },
            "disk": max(map(tree_bytes, self.state["clients"])),  # of the client that keeps most
        }

    def save(self) -> None:
        """Write the checkpoint; a full disk costs the chance to resume, not the run."""
        if self.file is None:
            return
        began = time.perf_counter()
        try:
            checkpoint.save(self.file, self.state, self.identity)
        except OSError as error:
            warnings.warn(f"no checkpoint at {self.file}: {error}; training goes on", stacklevel=2)
        self.saving = time.perf_counter() - began

    def accuracy(self, step: int) -> float:
        """Mean accuracy over the tasks met so far, of the first model that the method has."""
        model = self.here.method.models[0]
        row = self.state["scores"][model][0, step : step + 1].double().numpy()  # [1, U, T]
        return float(pooled(row, self.tests())[0, : step + 1].mean())

    def tests(self) -> npt.NDArray[np.int64]:
        """How many test pictures each client has of each task.  # [U, T]"""
        tests, plan = self.here.work.tests, self.plan
        rows = [
            [len(tests(plan, u, t)) for t in range(plan.tasks)] for u in range(len(plan.clients))
        ]
        return np.array(rows)

    def record(self) -> Record:
        """The finished run."""
        about = {
            **self.experiment.resolved(),
            "group": self.experiment.kind.group,
            "seed": self.seed,
            "setup": self.state["setup"],  # before the first round
            "identity": self.identity,
            "environment": {
                "python": platform.python_version(),
                "device": device_in_words(self.here.work.device),
                "cores": os.cpu_count(),
            },
        }
        scores = {name: values.numpy() for name, values in self.state["scores"].items()}
        looked_at = self.features(), self.exhibit()
        return Record(
            about, self.state["history"], scores, self.tests(), self.weights(), *looked_at
        )

    def features(self) -> dict[str, Any]:
        """Features of test pictures after each step, with their labels, where they were kept."""
        if not self.state["features"]:
            return {}
        labels = self.here.work.images.y_test[self.shown]
        return {"features": torch.stack(self.state["features"]).numpy(), "labels": labels.numpy()}

    def exhibit(self) -> dict[str, Any]:
        """Pictures of each class that the first client remembers, where they are looked at."""
        count = self.experiment.setting.observe.memory
        shown = self.here.method.exhibit(self.state["clients"][0], count) if count else {}
        return {name: values.numpy() for name, values in shown.items()}

    def weights(self) -> dict[str, Any]:
        """The final global model's tensors by name; none where there is no global model."""
        if "global" not in self.here.method.models:
            return {}
        model, server = self.here.work.model, self.state["server"]
        found = {}
        for like, vector in (
            (dict(model.module.named_parameters()), server["parameters"]),
            (dict(model.module.named_buffers()), server["buffers"]),
        ):
            values = pieces(vector, list(like.values()))
            found.update({name: v.numpy() for name, v in zip(like, values, strict=True)})
        return found


def means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each named number over the rows where it is defined; absent if it is nowhere."""
    values: dict[str, list[float]] = {}
    for name, value in (item for row in rows for item in row.items()):
        if not math.isnan(value):
            values.setdefault(name, []).append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}


def added(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each named number."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row)
    return dict(total)


def told(logs: list[Log]) -> dict[str, Any]:
    """What the method says of a round: numbers, means over clients, and how often what happened."""
    events = Counter(event for log in logs for event in log.events)
    return {"notes": means(log.numbers for log in logs), "events": dict(events)}


def model_of(server: Mapping[str, Any]) -> Message:
    """The global model as a message."""
    return {name: server[name] for name in ("parameters", "buffers")}


def device_in_words(device: torch.device) -> str:
    """What a device is called."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def keep(records: Mapping[int, Record], folder: Path, resume: Path | None = None) -> None:
    """Save the records of a cell, one folder a seed; its checkpoints have done their work."""
    for seed, record in records.items():
        record.save(folder / str(seed))
        if resume:
            setting, method, _ = record.cell
            (resume / f"{setting}-{method}-{seed}.safetensors").unlink(missing_ok=True)


def _side_by_side(runs: list[Run], progress: Progress) -> dict[int, Record]:
    """The records of all runs; a run that fails lets the others end before it is raised."""
    if isinstance(runs[0].executor, Here):
        return _gather(runs, [_outcome(run, progress) for run in runs])
    threads = concurrent.futures.ThreadPoolExecutor(len(runs))
    try:
        waiting = [threads.submit(_outcome, run, progress) for run in runs]
        return _gather(runs, [each.result() for each in waiting])
    finally:
        for run in runs:
            run.stop = True  # Ctrl-C: the threads end after their round, which is saved
        threads.shutdown()


def _outcome(run: Run, progress: Progress) -> Record | Exception:
    """The record of a run, or what ended it."""
    try:
        return run.finish(progress)
    except Exception as error:  # whatever it is, it is raised again when the others are done
        return error


def _gather(runs: list[Run], outcomes: list[Record | Exception]) -> dict[int, Record]:
    """The records by seed, or the first error with the seeds that it left standing."""
    errors = [
        (run.seed, o) for run, o in zip(runs, outcomes, strict=True) if isinstance(o, Exception)
    ]
    if errors:
        seed, error = errors[0]
        error.add_note(f"seed {seed}; seeds that failed: {[s for s, _ in errors]} of {len(runs)}")
        raise error
    return {r.seed: o for r, o in zip(runs, outcomes, strict=True) if isinstance(o, Record)}
