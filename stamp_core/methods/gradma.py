"""GradMA (Luo et al., 2023): updates of clients and server are corrected by gradient memories."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from stamp_core.config.decode import require_at_least, require_fraction
from stamp_core.matching.gram import Difference, Vector
from stamp_core.matching.projection import project_gradient
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Log, Method, Reply, State
from stamp_core.methods.base.projection import apply_projection, log_projection
from stamp_core.models.flat import flatten_like, weighted_average


@dataclass(frozen=True)
class GradMAParams(FedAvgParams):
    """Which updates are corrected, and what the server remembers of clients."""

    worker: bool = True  # alone: GradMA-W
    server: bool = True  # alone: GradMA-S
    worker_rho: float = 0.0  # lower bound of <g, corrected> / (|g| |uncorrected|)
    server_rho: float = 0.0
    beta1: float = 0.9  # decay of the server's momentum
    beta2: float = 0.0  # decay of the remembered updates
    remembered: int = 100  # clients whose updates the server remembers
    # The paper's program is one over the whole vector; its code solves one for every tensor.
    scope: Literal["model", "tensor"] = "model"

    def __post_init__(self) -> None:
        """Refuse decay factors outside [0, 1) and negative numbers."""
        super().__post_init__()
        require_at_least(self, 0, "worker_rho", "server_rho", "remembered")
        require_fraction(self, "beta1", "beta2")


class GradMA(Method):
    """FedAvg with gradient memories; a client round is whole epochs, not 5 batches."""

    Params: ClassVar = GradMAParams
    neutral: ClassVar = {"worker": False, "server": False}

    def block_sizes(self) -> list[int] | None:
        """The sizes of the blocks that are corrected separately."""
        tensors = self.work.model.module.parameters()
        return None if self.params.scope == "model" else [p.numel() for p in tensors]

    # --- the server

    def init_server(self, seed: int) -> State:
        """The initial weights with no momentum and no remembered update."""
        server = super().init_server(seed)
        if not self.params.server:
            return server
        momentum = torch.zeros_like(server["parameters"])
        return {**server, "momentum": momentum, "memory": {}, "counts": {}}

    def gather(self, replies: list[Reply]) -> list[Reply]:
        """The replies as they are: the updates that the server remembers are on the CPU."""
        return replies

    def averaged_vectors(self) -> tuple[str, ...]:
        """The buffers alone where the parameters move along the momentum."""
        names = super().averaged_vectors()
        return names[1:] if self.params.server else names

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The server's model moved along the corrected momentum; buffers are averaged."""
        averaged = super().aggregate(server, replies, log)
        replies = [reply for reply in replies if reply.samples]
        if not self.params.server or not replies:
            return averaged
        start, params = server["parameters"], self.params
        updates = {str(reply.client): start - reply.message["parameters"] for reply in replies}
        mean = weighted_average(list(updates.values()), [float(r.samples) for r in replies])
        momentum = mean.add_(server["momentum"], alpha=params.beta1)
        with log.clock("gradma server"):
            memory, counts = self.remember(server, updates, log)
            remembered, rho = list(memory.values()), params.server_rho
            projection = project_gradient(momentum, remembered, self.block_sizes(), rho=rho)
        if projection.added is not None:
            momentum.add_(projection.added)
        corrected = float(projection.added is not None)
        log_projection(log, "gradma server", corrected, projection.troubles)
        return {
            **averaged,
            "parameters": start.sub(momentum, alpha=params.server_lr),
            "momentum": momentum,  # the corrected one, as published
            "memory": {client: update * params.beta2 for client, update in memory.items()},
            "counts": counts,
        }

    def remember(
        self, server: State, updates: dict[str, Tensor], log: Log
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The remembered updates with this round's, and how often each client took part since."""
        memory, counts = dict(server["memory"]), dict(server["counts"])
        for client, update in updates.items() if self.params.remembered else ():
            if client not in memory and len(memory) == self.params.remembered:
                absent = [(counts[other], int(other)) for other in memory if other not in updates]
                if not absent:
                    log.events.append("gradma server: no room to remember a client")
                    continue
                forgotten = str(min(absent)[1])
                del memory[forgotten], counts[forgotten]
            memory[client] = memory[client] + update if client in memory else update
            counts[client] = counts.get(client, 0) + 1
        return memory, counts

    # --- a client

    def batches(self, client_round: ClientRound) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of local training, each saved for the gradients at other points."""
        received = client_round.message["parameters"].to(self.work.device)
        client_round.scratch["received"] = received
        for batch in super().batches(client_round):
            client_round.scratch["batch"] = batch
            yield batch

    def correct_gradient(self, client_round: ClientRound) -> None:
        """Remove conflicts of the step with three vectors: the gradients at the previous iterate
        and at the received model, and the displacement from the received model.
        """
        if not self.params.worker:
            return
        model, decay = self.work.model, self.work.training.weight_decay
        with client_round.log.clock("gradma"):
            here, buffers = model.parameters.clone(), model.buffers.clone()
            received = client_round.scratch["received"]
            points = [client_round.scratch.get("previous", received), received]
            memory: list[Vector] = [self.gradient_at(client_round, point) for point in points]
            memory.append(Difference(here, received))
            model.load(here, buffers)  # also restores the statistics that the passes changed
            gradient, rho = model.gradients.add(here, alpha=decay), self.params.worker_rho
            projection = project_gradient(gradient, memory, self.block_sizes(), rho=rho)
        apply_projection(self, client_round, projection, "gradma")
        client_round.scratch["previous"] = here

    def gradient_at(self, client_round: ClientRound, point: Tensor) -> Tensor:
        """The gradient of the current batch at another point, with weight decay.  # [P]

        In the same mode as the step, so that all gradients are those of one function.
        """
        self.work.model.parameters.copy_(point)
        loss = self.loss(client_round, *client_round.scratch["batch"])
        tensors = self.work.model.tensors
        gradient = flatten_like(torch.autograd.grad(loss, tensors), tensors)
        return gradient.add_(point, alpha=self.work.training.weight_decay)
