"""GradMA (Luo et al., 2023): updates of clients and server are corrected by gradient memories."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.limits import Fraction, NonNegative, NonNegativeInt
from stamp_core.matching.gram import Difference, Vector
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Log, Method, Reply, State
from stamp_core.models.flat import flatten_like, weighted_average
from workbench.methods.base.gradient_projection import Corrections, log_projection, project_gradient


@dataclass(frozen=True)
class GradMAParams(FedAvgParams):
    """Which updates are corrected, and what the server remembers of clients."""

    worker: bool = True  # alone: GradMA-W
    server: bool = True  # alone: GradMA-S
    worker_rho: NonNegative = 0.0  # lower bound of <g, corrected> / (|g| |uncorrected|)
    server_rho: NonNegative = 0.0  # the same of the server's correction
    beta1: Fraction = 0.9  # decay of the server's momentum
    beta2: Fraction = 0.0  # decay of the remembered updates
    remembered: NonNegativeInt = 100  # clients whose updates the server remembers
    # The paper's program is one over the whole vector; its code solves one for every tensor.
    scope: Literal["model", "tensor"] = "model"


@dataclass
class GradMAContext(StepContext):
    received: Tensor  # [P]
    previous: Tensor  # [P], the iterate before
    corrections: Corrections
    log: Log


class GradMA(Method):
    """FedAvg with gradient memories; a client round is whole epochs, not 5 batches."""

    Params: ClassVar = GradMAParams
    fedavg_equivalent: ClassVar = {"worker": False, "server": False}

    def __init__(self, params: GradMAParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.averages = not params.server

    def block_sizes(self) -> list[int] | None:
        tensors = self.model.module.parameters()
        return None if self.params.scope == "model" else [p.numel() for p in tensors]

    def init_server(self, seed: int) -> State:
        server = super().init_server(seed)
        if self.params.server:
            server["momentum"] = torch.zeros_like(server["parameters"])
            server["memory"] = {}  # the update of each client that is remembered
            server["counts"] = {}  # how often each of them took part since
        return server

    def to_device(self, replies: list[Reply]) -> list[Reply]:
        """The replies as they are: the updates that the server remembers are on the CPU."""
        return replies

    def averaged_vectors(self) -> tuple[str, ...]:
        return self.shared_buffers() if self.params.server else super().averaged_vectors()

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
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

    def start(self, client_round: ClientRound) -> GradMAContext:
        received = client_round.message["parameters"].to(self.runtime.device)
        return GradMAContext(received, received, Corrections(), client_round.log)

    def finish(self, client_round: ClientRound, context: GradMAContext) -> None:
        context.corrections.log(client_round.log, "gradma")

    def correct_gradient(self, batch: Batch, context: GradMAContext) -> None:
        """Remove conflicts with the displacement and gradients at the last and received iterate."""
        if not self.params.worker:
            return
        model = self.model
        decay = self.runtime.training.weight_decay
        with context.log.clock("gradma"):
            here = model.parameters.clone()
            buffers = model.buffers.clone()
            points = [context.previous, context.received]
            memory: list[Vector] = [self.gradient_at(point, batch, context) for point in points]
            memory.append(Difference(here, context.received))
            model.load(here, buffers)  # also restores the statistics that the passes changed
            gradient = model.gradients.add(here, alpha=decay)
            rho = self.params.worker_rho
            projection = project_gradient(gradient, memory, self.block_sizes(), rho=rho)
        context.corrections.apply(model.gradients, projection)
        context.previous = here

    def gradient_at(self, point: Tensor, batch: Batch, context: GradMAContext) -> Tensor:
        """The gradient of a batch at another point, with weight decay.  # [P]"""
        self.model.parameters.copy_(point)
        loss = self.loss(batch, context)
        tensors = self.model.tensors
        gradient = flatten_like(torch.autograd.grad(loss, tensors), tensors)
        return gradient.add_(point, alpha=self.runtime.training.weight_decay)
