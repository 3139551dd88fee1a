"""FedAS (Yang et al., 2024): parameter alignment, client synchronisation, local heads."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.by_class import class_means
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid
from stamp_core.config.limits import Positive, PositiveInt
from stamp_core.methods.base.method import (
    ClientRound,
    FedAvgParams,
    Log,
    Message,
    Method,
    Reply,
    State,
)


@dataclass(frozen=True)
class FedASParams(FedAvgParams):
    """How clients align the received encoder, and how the server weights the clients."""

    align: bool = True  # the received encoder with the client's own features
    align_lr: Positive = 0.01  # of its SGD
    align_batch_size: PositiveInt = 16  # images of its steps
    weights: Literal["fisher", "samples"] = "fisher"  # of clients in the average
    # "reported": heads are averaged for the accuracy of a global model but used by no client, as
    # in the published code. "shared": clients use the averaged head.
    head: Literal["local", "reported", "shared"] = "local"


class FedAS(Method):
    """FedAvg of encoders; the personal model is the received one, aligned with the own features."""

    Params: ClassVar = FedASParams
    models: tuple[str, ...] = ("personal", "local")
    fedavg_equivalent: ClassVar = {"align": False, "weights": "samples", "head": "shared"}
    group = "personalised"

    def __init__(self, params: FedASParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        if params.align and not runtime.encoder_size:
            raise invalid(
                "align", True, "false, as an encoder without weights has nothing to align"
            )
        self.base = slice(runtime.encoder_size)  # of the vector of parameters
        self.head = slice(runtime.encoder_size, None)
        if params.head != "local":
            self.models = ("global", "personal", "local")

    def broadcast(self, server: State, client: int) -> Message:
        message = super().broadcast(server, client)
        return message if self.params.head == "shared" else self.without_head(message)

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        replies = [reply for reply in replies if reply.samples]
        if not replies:
            return server
        lr = self.params.server_lr
        weights = self.client_weights(replies, log)
        head = server["parameters"][self.head]
        sent = [with_head(reply.message, head) for reply in replies]
        names = self.shared_vectors()
        mean = {n: self.runtime.average([each[n] for each in sent], weights) for n in names}
        if lr != 1:
            mean["parameters"] = torch.lerp(server["parameters"], mean["parameters"], lr)
        return {**server, **mean}

    def client_weights(self, replies: list[Reply], log: Log) -> list[float]:
        samples = [float(reply.samples) for reply in replies]
        if self.params.weights == "samples":
            return samples
        traces = torch.cat([reply.message["trace"] for reply in replies]).double()
        if not traces.isfinite().all() or not traces.any():
            reason = "a trace is not finite" if traces.any() else "all traces are zero"
            log.events.append(f"synchronisation: {reason}, weighted by samples")
            return samples
        log.numbers["trace, largest share"] = float(traces.max() / traces.sum())
        return [float(trace) for trace in traces]

    def init_client(self, client: int, server: State) -> State:
        return {**self.own_parts(server["parameters"], server["buffers"]), "experiences": []}

    def own_parts(self, parameters: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        parts = dict[str, Tensor]()
        if self.params.align:
            parts |= {"base": parameters[self.base], "base_buffers": buffers}
        if self.params.head != "shared":
            parts["head"] = parameters[self.head]
        return {name: part.cpu().clone() for name, part in parts.items()}

    def start(self, client_round: ClientRound) -> StepContext:
        if self.params.align and len(client_round.indices):
            with client_round.log.clock("alignment"):
                prototypes = self.prototypes(client_round)
                self.receive(client_round)  # again: prototypes are those of the own encoder
                self.align(client_round, prototypes)
        return StepContext()

    def receive(self, client_round: ClientRound) -> None:
        message = client_round.message
        if self.params.head != "shared":
            message = with_head(message, client_round.state["head"])
        self.runtime.load_received(message, client_round.state)

    def prototypes(self, client_round: ClientRound) -> Tensor:
        """Mean features of the classes present, by the client's own encoder.  # [classes, F]"""
        runtime = self.runtime
        indices = client_round.indices
        self.model.parameters[self.base] = client_round.state["base"]
        self.model.buffers.copy_(client_round.state["base_buffers"])
        features = runtime.outputs(runtime.train_images(indices)[0], self.classifier.encode)
        means, present = class_means(features, runtime.dataset.y_train[indices])
        table = torch.zeros(runtime.classes, means.shape[1])
        return table.index_copy(0, present, means).to(runtime.device)

    def align(self, client_round: ClientRound, prototypes: Tensor) -> None:
        model = self.model
        lr = self.params.align_lr
        for batch in self.shuffled(client_round, "alignment", self.params.align_batch_size):
            model.gradients.zero_()
            features = self.classifier.encode(batch.images)
            errors = (features - prototypes[batch.targets]).square().mean(1)  # [N]
            _, classes, counts = batch.targets.unique(return_inverse=True, return_counts=True)
            (errors / counts[classes]).sum().backward()  # the sum of the means of the classes
            model.parameters.add_(model.gradients, alpha=-lr)  # the head's gradients are zero
        self.require_finite(model.parameters, client_round, f"align_lr (now {lr:g})")

    def shuffled(self, client_round: ClientRound, purpose: str, size: int) -> Iterator[Batch]:
        """The client's images in random order, and the live model in evaluation mode."""
        self.model.module.eval()
        indices = client_round.indices
        order = torch.randperm(len(indices), generator=client_round.generator(purpose))
        return self.runtime.plain_batches(indices[order], size)

    def update_state(self, client_round: ClientRound, context: StepContext) -> State:
        state = super().update_state(client_round, context)
        parts = self.own_parts(self.model.parameters, self.model.buffers)
        return {**state, **parts, "experiences": client_round.recorded}

    def upload(self, client_round: ClientRound, context: StepContext) -> Message:
        message = super().upload(client_round, context)
        if self.params.head == "local":
            message = self.without_head(message)
        if self.params.weights == "fisher":
            with client_round.log.clock("trace"):
                message["trace"] = self.trace(client_round)
            client_round.log.numbers["trace"] = float(message["trace"])
        return message

    def without_head(self, message: Message) -> Message:
        base = message["parameters"][self.base].clone()
        return {**{k: v for k, v in message.items() if k != "parameters"}, "base": base}

    def trace(self, client_round: ClientRound) -> Tensor:
        """The sum over batches of |gradient of the mean cross-entropy|^2, after training.  # [1]"""
        model = self.model
        total = torch.zeros((), dtype=torch.float64, device=self.runtime.device)
        for batch in self.shuffled(client_round, "trace", self.runtime.training.batch_size):
            model.gradients.zero_()
            F.cross_entropy(model.module(batch.images), batch.targets).backward()
            total += model.gradients.square().sum()
        return total.float().cpu()[None]

    def load_personal_model(self, client_round: ClientRound) -> None:
        """Load the aligned encoder with the client's head; unaligned without a trained head."""
        self.receive(client_round)
        if client_round.state["experiences"]:
            self.start(client_round)


def with_head(message: Message, head: Tensor) -> Message:
    """A message with all parameters: where the encoder was sent alone, with this head."""
    if "base" not in message:
        return message
    return {**message, "parameters": torch.cat([message["base"], head])}
