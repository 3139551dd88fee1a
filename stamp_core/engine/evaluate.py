"""Scores of a run's models on the clients' tasks, and samples of what they know and keep."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stamp_core.client.by_class import first_per_class
from stamp_core.client.runtime import RoundId
from stamp_core.client.scoring import Part, count_tests, to_accuracies
from stamp_core.data.plan import Plan
from stamp_core.engine.executor import Executor
from stamp_core.engine.worker import ClientResult, StateOrRef, Worker
from stamp_core.methods.base.method import Message, State
from stamp_core.results.metrics import micro_average

PART = 1000  # test images, at least, for which another worker is asked


def global_model(server: State) -> Message:
    """The global model as a message."""
    return {name: server[name] for name in ("parameters", "buffers")}


class Evaluator:
    """Scores one seed's models on an executor; it has no state that changes."""

    def __init__(self, plan: Plan, worker: Worker, executor: Executor) -> None:
        self.plan = plan
        self.worker = worker
        self.executor = executor
        self.models = worker.method.models
        runtime = worker.runtime
        self.tests = count_tests(runtime, plan, range(len(plan.clients)))  # [U, T]
        count = runtime.setting.diagnostics.features
        self.feature_indices = first_per_class(runtime.dataset.y_test, count)

    def undefined(self) -> Tensor:
        """Scores of a model that is not evaluated yet: NaN.  # [scorings, T, U, T]"""
        plan = self.plan
        shape = len(self.worker.runtime.scorings), plan.experiences, len(plan.clients), plan.tasks
        return torch.full(shape, torch.nan)

    def evaluate(
        self, state: dict[str, Any], experience: int, results: Sequence[ClientResult]
    ) -> None:
        """Fill in a run's scores after an experience; extend features and memory if recorded."""
        scores, server, clients = state["scores"], state["server"], state["clients"]
        for result in results:
            if result.scores is not None:
                scores["local"][:, experience, result.reply.client] = result.scores[:, 0]
        if "global" in self.models:
            if self.worker.runtime.training.buffers == "local" and len(server["buffers"]):
                found = self.client_scores(experience, server, clients, personal=False)
            else:
                found = self.global_scores(experience, server, self.executor)
            joined = self.plan.joined(experience)  # the others have no score
            scores["global"][:, experience, joined] = found[:, joined]
            state["features"] += self.features(server)
        if "personal" in self.models:
            found = self.client_scores(experience, server, clients, personal=True)
            scores["personal"][:, experience] = found
        if experience in (0, self.plan.experiences - 1):
            state["memory"] += self.memory_samples(experience, server, clients[0])

    def global_scores(self, experience: int, server: State, executor: Executor) -> Tensor:
        """The global model for all clients; workers share its test images.  # [scorings, U, T]"""
        runtime, seed = self.worker.runtime, self.plan.seed
        message = global_model(server)
        if runtime.dataset.masks:
            return executor.map(Worker.evaluate, [(seed, experience, message, Part())])[0]
        count = min(executor.workers, 1 + len(runtime.y_test) // PART)
        each = [(seed, experience, message, Part(k, count)) for k in range(count)]
        counts = executor.map(Worker.evaluate, each)
        return to_accuracies(torch.stack(counts).sum(0), self.tests)

    def client_scores(
        self, experience: int, server: State, clients: Sequence[StateOrRef], personal: bool
    ) -> Tensor:
        """Each joined client's own version of a model, NaN for the others.  # [scorings, U, T]"""
        last = self.worker.runtime.training.rounds - 1
        broadcast = self.worker.method.broadcast
        joined = self.plan.joined(experience)
        each = [
            (
                RoundId(self.plan.seed, client, experience, last, True),
                clients[client],
                broadcast(server, client) if personal else global_model(server),
                personal,
            )
            for client in joined
        ]
        scores = self.undefined()[:, experience]
        scores[:, joined] = torch.cat(self.executor.map(Worker.evaluate_client, each), dim=1)
        return scores

    def features(self, server: State) -> list[Tensor]:
        if not len(self.feature_indices):
            return []
        message, indices = global_model(server), self.feature_indices
        return self.executor.map(Worker.extract_features, [(message, indices)])

    def memory_samples(
        self, experience: int, server: State, client: StateOrRef
    ) -> list[dict[str, Tensor]]:
        """Images of each class in a client's memory now, if recorded and if it has any."""
        worker = self.worker
        count = worker.runtime.setting.diagnostics.memory
        if not count:
            return []
        with worker.lock:
            state = worker.load_state(self.plan.seed, client)
            samples = worker.method.memory_samples(server, state, count)
        if not samples:
            return []
        return [{**samples, "experiences": torch.full_like(samples["labels"], experience)}]

    def task_accuracies(self, scores: dict[str, Tensor], experience: int) -> list[float]:
        """Accuracy of each task after an experience, of the first model that the method has."""
        found = scores[self.models[0]]
        a = found[0, experience : experience + 1].double().numpy()  # [1, U, T]
        return [float(each) for each in micro_average(a, self.tests.numpy())[0]]
