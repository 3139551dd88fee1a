"""FedAS (Yang et al., 2024): parameter alignment, client synchronisation, local heads."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.by_class import class_means
from stamp_core.client.personalisation import BatchIterator, plain_batches
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid, require_above, require_at_least
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

    align: bool = True
    align_lr: float = 0.01
    align_batch_size: int = 16
    align_on_new_task: bool = True  # false: only once the own encoder was trained on the task
    weights: Literal["fisher", "samples"] = "fisher"
    # "reported": heads are averaged for the accuracy of a global model but used by no client, as
    # in the published code. "shared": clients use the averaged head.
    head: Literal["local", "reported", "shared"] = "local"

    def __post_init__(self) -> None:
        """Refuse a learning rate of zero and empty batches."""
        super().__post_init__()
        require_above(self, 0, "align_lr")
        require_at_least(self, 1, "align_batch_size")


class FedAS(Method):
    """FedAvg of encoders; each client aligns the received one with its own before training.

    The personal model is evaluated there, after alignment and before training; the authors evaluate
    a client after training, which are the scores of the local model.
    """

    Params: ClassVar = FedASParams
    models: tuple[str, ...] = ("personal", "local")
    fedavg_equivalent: ClassVar[dict[str, Any]] = {
        "align": False,
        "weights": "samples",
        "head": "shared",
    }
    group = "personalised"

    def __init__(self, params: FedASParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        if params.head != "local":
            self.models = ("global", "personal", "local")

    def broadcast(self, server: State, client: int) -> Message:
        """The encoder, and the head where it is shared."""
        message = super().broadcast(server, client)
        if self.params.head != "shared":
            message["base"] = message.pop("parameters")[: self.runtime.encoder_size]
        return message

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The weighted average of the replies; a head that is not sent stays."""
        replies, lr = [reply for reply in replies if reply.samples], self.params.server_lr
        if not replies:
            return server
        weights = self.client_weights(replies, log)
        names = [name for name in replies[0].message if name != "trace"]
        mean = {n: self.runtime.average([r.message[n] for r in replies], weights) for n in names}
        if "base" in mean:
            head = server["parameters"][self.runtime.encoder_size :]
            mean["parameters"] = torch.cat([mean.pop("base"), head])
        if lr != 1:
            mean["parameters"] = torch.lerp(server["parameters"], mean["parameters"], lr)
        return {**server, **mean}

    def client_weights(self, replies: list[Reply], log: Log) -> list[float]:
        """The Fisher trace of each client, or its number of samples."""
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
        """The parts of the initial model that will be used."""
        return {**self.own_parts(server["parameters"], server["buffers"]), "experience": -1}

    def own_parts(self, parameters: Tensor, buffers: Tensor) -> State:
        """The parts of its own model that a client keeps for its next round."""
        parts: State = {}
        if self.params.align:
            parts["base"] = parameters[: self.runtime.encoder_size].cpu().clone()
            parts["base buffers"] = buffers.cpu().clone()
        if self.params.head != "shared":
            parts["head"] = parameters[self.runtime.encoder_size :].cpu().clone()
        return parts

    def receive(self, client_round: ClientRound) -> None:
        """Load the received encoder, aligned, with the client's head."""
        known = client_round.state["experience"] == client_round.experience
        wanted = self.params.align and (known or self.params.align_on_new_task)
        if not wanted or not len(self.train_indices(client_round)):
            self.load_unaligned(client_round)
            return
        with client_round.log.clock("alignment"):
            prototypes = self.prototypes(client_round)
            self.load_unaligned(client_round)
            self.align(client_round, prototypes)

    def load_unaligned(self, client_round: ClientRound) -> None:
        """Load the received encoder unchanged, with the client's head unless heads are shared."""
        message = client_round.message
        if self.params.head != "shared":
            model = torch.cat([message["base"], client_round.state["head"]])
            message = {**message, "parameters": model}
        super().receive(replace(client_round, message=message))

    def prototypes(self, client_round: ClientRound) -> Tensor:
        """Mean features of the classes present, by the client's own encoder.  # [classes, F]"""
        runtime, indices = self.runtime, self.train_indices(client_round)
        runtime.model.parameters[: runtime.encoder_size] = client_round.state["base"]
        runtime.model.buffers.copy_(client_round.state["base buffers"])
        features = runtime.outputs(runtime.train_images(indices)[0], runtime.classifier.encode)
        means, present = class_means(features, runtime.dataset.y_train[indices])
        table = torch.zeros(runtime.classes, means.shape[1])
        return table.index_copy(0, present, means).to(runtime.device)

    def align(self, client_round: ClientRound, prototypes: Tensor) -> None:
        """One epoch of SGD on the encoder: features approach the prototype of their class."""
        model, lr = self.model, self.params.align_lr
        size = self.params.align_batch_size
        for images, labels in self.batches_of(client_round, "alignment", size):
            model.gradients.zero_()
            features = self.classifier.encode(images)
            errors = (features - prototypes[labels]).square().mean(1)  # [N]
            _, classes, counts = labels.unique(return_inverse=True, return_counts=True)
            (errors / counts[classes]).sum().backward()  # the sum of the means of the classes
            model.parameters.add_(model.gradients, alpha=-lr)  # the head's gradients are zero
        if not model.parameters.isfinite().all():
            raise invalid("align_lr", lr, "smaller: an aligned encoder is no longer finite")

    def batches_of(self, client_round: ClientRound, purpose: str, size: int) -> BatchIterator:
        """The client's images in random order; the live model is put into evaluation mode.

        So a batch of one image is defined and no running statistics change.
        """
        indices, draw = self.train_indices(client_round), client_round.round_id.generator(purpose)
        self.model.module.eval()
        return plain_batches(
            self.runtime, indices[torch.randperm(len(indices), generator=draw)], size
        )

    def update_state(self, client_round: ClientRound) -> State:
        """The parts of the trained model that the client's next round uses."""
        parts = self.own_parts(self.model.parameters, self.model.buffers)
        state = super().update_state(client_round)
        return {**state, **parts, "experience": client_round.experience}

    def upload(self, client_round: ClientRound) -> Message:
        """The encoder, the head where the server averages it, and the Fisher trace."""
        message = super().upload(client_round)
        if self.params.head == "local":
            message["base"] = message.pop("parameters")[: self.runtime.encoder_size].clone()
        if self.params.weights == "fisher":
            with client_round.log.clock("trace"):
                message["trace"] = self.trace(client_round)
            client_round.log.numbers["trace"] = float(message["trace"])
        return message

    def trace(self, client_round: ClientRound) -> Tensor:
        """The sum over batches of |gradient of the mean cross-entropy|^2, after training.  # [1]"""
        model, size = self.model, self.runtime.training.batch_size
        total = torch.zeros((), dtype=torch.float64, device=self.runtime.device)
        for images, labels in self.batches_of(client_round, "trace", size):
            model.gradients.zero_()
            F.cross_entropy(model.module(images), labels).backward()
            total += model.gradients.square().sum()
        return total.float().cpu()[None]

    def load_personal_model(self, client_round: ClientRound) -> None:
        """Load the aligned encoder with the client's head, before training.

        Without alignment for a client that was never selected: its head is untrained.
        """
        if client_round.state["experience"] < 0:
            self.load_unaligned(client_round)
        else:
            self.receive(client_round)
