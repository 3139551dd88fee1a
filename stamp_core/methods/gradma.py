"""GradMA (Luo et al., 2023): steps of clients and of the server agree with what came before."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from stamp_core.config import at_least, fraction
from stamp_core.methods import Log, Method, Reply, ServerStep, State, Turn
from stamp_core.methods.agem import take
from stamp_core.projection import correction
from stamp_core.rows import Difference, Vector
from stamp_core.vectors import average, flatten


@dataclass(frozen=True)
class Memories(ServerStep):
    """Which steps are corrected, and what the server remembers of clients."""

    worker: bool = True  # alone: GradMA-W
    server: bool = True  # alone: GradMA-S
    worker_rho: float = 0.0  # the least cosine, relative to the uncorrected vector's length
    server_rho: float = 0.0
    beta1: float = 0.9  # what stays of the server's momentum
    beta2: float = 0.0  # what stays of the remembered ways of clients
    remembered: int = 100  # clients that the server remembers
    # The paper's program is one over the whole vector; its code solves one for every tensor.
    scope: Literal["model", "tensor"] = "model"

    def __post_init__(self) -> None:
        """Refuse memories that grow and negative numbers."""
        super().__post_init__()
        at_least(self, 0, "worker_rho", "server_rho", "remembered")
        fraction(self, "beta1", "beta2")


class GradMA(Method):
    """FedAvg with gradient memories on clients and server; a visit is epochs, not 5 batches."""

    Params: ClassVar = Memories
    neutral: ClassVar[dict[str, Any]] = {"worker": False, "server": False}

    def sizes(self) -> list[int] | None:
        """The sizes of the blocks that are corrected on their own."""
        tensors = self.work.model.module.parameters()
        return None if self.params.scope == "model" else [p.numel() for p in tensors]

    # --- the server

    def new_server(self, seed: int) -> State:
        """The initial weights with no momentum and nobody remembered."""
        server = super().new_server(seed)
        if not self.params.server:
            return server
        still = torch.zeros_like(server["parameters"])
        return {**server, "momentum": still, "memory": {}, "counts": {}}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The server's model a step along the corrected momentum; buffers are averaged."""
        averaged = super().aggregate(server, replies, log)
        replies = [reply for reply in replies if reply.samples]
        if not self.params.server or not replies:
            return averaged
        start, params = server["parameters"], self.params
        ways = {str(reply.client): start - reply.message["parameters"] for reply in replies}
        mean = average(list(ways.values()), [float(reply.samples) for reply in replies])
        momentum = mean.add_(server["momentum"], alpha=params.beta1)
        with log.clock("gradma server"):
            memory, counts = self.remembered(server, ways, log)
            rows = list(memory.values())
            found = correction(momentum, rows, self.sizes(), rho=params.server_rho)
        if found.added is not None:
            momentum.add_(found.added)
        log.numbers["gradma server corrected"] = float(found.added is not None)
        log.events += [f"gradma server: {trouble}, left as it was" for trouble in found.troubles]
        return {
            **averaged,
            "parameters": start.sub(momentum, alpha=params.step),
            "momentum": momentum,  # the corrected one, as published
            "memory": {client: row * params.beta2 for client, row in memory.items()},
            "counts": counts,
        }

    def remembered(
        self, server: State, ways: dict[str, Tensor], log: Log
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The ways of remembered clients with this round's, and how often each took part since."""
        memory, counts = dict(server["memory"]), dict(server["counts"])
        for client, way in ways.items() if self.params.remembered else ():
            if client not in memory and len(memory) == self.params.remembered:
                absent = [(counts[other], int(other)) for other in memory if other not in ways]
                if not absent:
                    log.events.append("gradma server: no room to remember a client")
                    continue
                forgotten = str(min(absent)[1])
                del memory[forgotten], counts[forgotten]
            memory[client] = memory[client] + way if client in memory else way
            counts[client] = counts.get(client, 0) + 1
        return memory, counts

    # --- a client

    def batches(self, turn: Turn) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of a turn, each noted for the gradients elsewhere."""
        for batch in super().batches(turn):
            turn.notes["batch"] = batch
            yield batch

    def correct(self, turn: Turn) -> None:
        """Make the step agree with those at the iterate before and at the received model, and not
        lead farther from there."""
        if not self.params.worker:
            return
        model, decay = self.work.model, self.work.setting.training.weight_decay
        with turn.log.clock("gradma"):
            here, buffers = model.parameters.clone(), model.buffers.clone()
            received = turn.message["parameters"].to(self.work.device)
            points = [turn.notes.get("before", received), received]
            rows: list[Vector] = [self.slope(turn, point) for point in points]
            rows.append(Difference(here, received))
            model.load(here, buffers)  # what the statistics saw elsewhere is no step
            vector = model.gradients.add(here, alpha=decay)
            found = correction(vector, rows, self.sizes(), rho=self.params.worker_rho)
        take(self, turn, found, "gradma")
        turn.notes["before"] = here

    def slope(self, turn: Turn, point: Tensor) -> Tensor:
        """The gradient of the step's batch at another point, with weight decay.  # [P]

        In the mode of the step, so that all gradients are those of one function.
        """
        self.work.model.parameters.copy_(point)
        loss = self.loss(turn, *turn.notes["batch"])
        own = flatten(torch.autograd.grad(loss, list(self.work.model.module.parameters())))
        return own.add_(point, alpha=self.work.setting.training.weight_decay)
