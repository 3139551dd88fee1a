"""A server that sets the head from statistics of features, which clients send once for a task."""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.batches import StepContext
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid
from stamp_core.methods.base.method import ClientRound, Group, Log, Message, Method, Reply, State
from stamp_core.models.sealed import weighted_sum


def product(a: Tensor, b: Tensor) -> Tensor:
    """a^T b; on a CPU by NumPy, in an eighth of the time: pinned, MKL has no wide instructions."""
    if a.device.type != "cpu":
        return a.T @ b
    return torch.from_numpy(a.numpy().T @ b.numpy())


class StatisticsServer(Method):
    """Clients send statistics of their features once for a task; nobody trains the encoder.

    The server sends nothing. What it keeps is the same, but for rounding (of float64), for every
    order and division of the images. An image that two clients have counts twice.
    """

    models: tuple[str, ...] = ("global",)
    fedavg_equivalent: ClassVar = None
    group: ClassVar[Group] = "continual"
    averages = False
    graph_safe = False  # there are no steps

    def __init__(self, params: Any, runtime: ClientRuntime) -> None:
        if (kind := runtime.setting.network.kind) != "identity":
            name = type(self).__module__.rpartition(".")[2]  # of the method, as it is written
            raise invalid("network.kind", kind, f"'identity': {name} trains no encoder")
        super().__init__(params, runtime)

    def statistics(self, x: Tensor, y: Tensor, client_round: ClientRound) -> Message:
        """What is sent of features and one-hot labels.  # float64 [n, D], [n, L]"""
        raise NotImplementedError

    def merged(self, server: State, sent: list[Any]) -> State:
        """The statistics of the server and of some clients; sums, which may be secure ones."""
        found = {name: [each[name] for each in (server, *sent)] for name in sent[0]}
        return {name: weighted_sum(each, [1.0] * len(each)) for name, each in found.items()}

    def head(self, server: State) -> tuple[Tensor, Tensor]:
        """The weights and biases for the server's statistics.  # [L, D], [L]"""
        raise NotImplementedError

    def init_client(self, client: int, server: State) -> State:
        return {"tasks": []}  # whose statistics are sent

    def init_server(self, seed: int) -> State:
        """A head of zeros, and no image of any class yet."""
        counts = torch.zeros(self.runtime.classes, dtype=torch.float64)
        parameters = torch.zeros(len(self.model.parameters))
        return {"parameters": parameters, "buffers": torch.zeros(0), "seed": seed, "counts": counts}

    def broadcast(self, server: State, client: int) -> Message:
        return {}

    def train_client(self, client_round: ClientRound) -> Reply:
        """The statistics that the server does not have; without steps there is no loss."""
        log, tasks = client_round.log, client_round.state["tasks"]
        with log.clock("statistics"):
            message = self.upload(client_round, StepContext())
        state = {"tasks": sorted([*tasks, client_round.task])} if message else client_round.state
        samples, client = len(client_round.indices), client_round.client
        return Reply(client, state, message, samples, sgd_steps=0, loss=math.nan, log=log)

    def upload(self, client_round: ClientRound, context: StepContext) -> Message:
        """Nothing without images, or if the task was sent in an earlier round or cycle."""
        if client_round.task in client_round.state["tasks"] or not len(client_round.indices):
            return {}
        images, labels = self.runtime.train_images(client_round.indices)
        x = self.runtime.normalise(images).flatten(1).double()
        y = F.one_hot(labels, self.runtime.classes).double()
        return {n: each.cpu() for n, each in self.statistics(x, y, client_round).items()}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        sent = [reply.message for reply in replies if reply.message]
        if not sent:
            return server
        with log.clock("head"):
            server = {**server, **self.merged(server, sent)}
            weight, bias = self.head(server)
        bias = bias.where(server["counts"] > 0, -1e30)  # a class not received is not predicted
        fixed = server["parameters"][: self.runtime.encoder_size]
        head = torch.cat([weight.flatten(), bias]).to(fixed)
        return {**server, "parameters": torch.cat([fixed, head])}
