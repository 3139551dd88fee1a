"""FedAS (Yang et al., 2024): the received encoder aligned with the own, clients weighted by Fisher
information, heads that stay at home.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.config import above, at_least, wrong
from stamp_core.methods import Group, Log, Message, Method, Reply, ServerStep, State, Turn
from stamp_core.temporal import class_means
from stamp_core.vectors import average
from stamp_core.workspace import Workspace


@dataclass(frozen=True)
class Synchronised(ServerStep):
    """What a client does with the received encoder, and what the server does with the clients'."""

    align: bool = True
    align_rate: float = 0.01
    align_batch: int = 16
    align_on_new_task: bool = True  # false: not where the own encoder has never seen the task
    weights: Literal["fisher", "samples"] = "fisher"
    # "reported" averages the heads as well, for the accuracy of a global model, and no client uses
    # it; the published code sends them for nothing. "shared": clients do use it.
    head: Literal["local", "reported", "shared"] = "local"

    def __post_init__(self) -> None:
        """Refuse steps that go nowhere and empty batches."""
        super().__post_init__()
        above(self, 0, "align_rate")
        at_least(self, 1, "align_batch")


class FedAS(Method):
    """FedAvg of encoders, each aligned with its client's old one before it is trained."""

    Params: ClassVar = Synchronised
    models: tuple[str, ...] = ("personal", "local")
    neutral: ClassVar[dict[str, Any]] = {"align": False, "weights": "samples", "head": "shared"}
    group: ClassVar[Group] = "personalised"

    def __init__(self, params: Synchronised, work: Workspace) -> None:
        super().__init__(params, work)
        if params.head != "local":
            self.models = ("global", "personal", "local")

    # --- the server

    def broadcast(self, server: State, client: int) -> Message:
        """The encoder; the head as well where clients use it."""
        message = super().broadcast(server, client)
        if self.params.head == "shared":
            return message
        return {"base": message.pop("parameters")[: self.work.base], **message}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The weighted average of what came back; a head that nobody sends stays as it was."""
        replies = [reply for reply in replies if reply.samples]
        if not replies:
            return server
        weights = self.shares(replies, log)
        sent = [name for name in replies[0].message if name != "trace"]
        mean = {name: average([r.message[name] for r in replies], weights) for name in sent}
        if "base" in mean:
            head = server["parameters"][self.work.base :]
            mean["parameters"] = torch.cat([mean.pop("base"), head])
        if self.params.step != 1:
            mean["parameters"] = torch.lerp(
                server["parameters"], mean["parameters"], self.params.step
            )
        return {**server, **mean}

    def shares(self, replies: list[Reply], log: Log) -> list[float]:
        """A weight for each client: its trace, or its samples."""
        samples = [float(reply.samples) for reply in replies]
        if self.params.weights == "samples":
            return samples
        traces = torch.cat([reply.message["trace"] for reply in replies]).double()
        if not traces.isfinite().all() or not traces.any():
            what = "a trace is not finite" if traces.any() else "all traces are zero"
            log.events.append(f"synchronisation: {what}, so samples weigh")
            return samples
        log.numbers["trace, largest share"] = float(traces.max() / traces.sum())
        found: list[float] = traces.tolist()
        return found

    # --- a client

    def new_client(self, client: int, server: State) -> State:
        """The initial model, which all know: the parts of it that will be read."""
        return {**self.own(server["parameters"], server["buffers"]), "step": -1}

    def own(self, parameters: Tensor, buffers: Tensor) -> State:
        """What a client keeps of a model of its own."""
        base, head = parameters[: self.work.base], parameters[self.work.base :]
        kept: State = {}
        if self.params.align:
            kept |= {"base": base.cpu().clone(), "base buffers": buffers.cpu().clone()}
        if self.params.head != "shared":
            kept["head"] = head.cpu().clone()
        return kept

    def receive(self, turn: Turn) -> None:
        """Put the received encoder, aligned, and the client's head into the live model."""
        met = turn.state["step"] == turn.visit.step
        asked = self.params.align and (met or self.params.align_on_new_task)
        if asked and len(self.examples(turn)):
            with turn.log.clock("alignment"):
                prototypes = self.prototypes(turn)
                self.take_up(turn)
                self.align(turn, prototypes)
        else:
            self.take_up(turn)

    def take_up(self, turn: Turn) -> None:
        """Put the received encoder, as it is, and the client's head into the live model."""
        start = {**turn.message, "parameters": self.start(turn)}
        super().receive(replace(turn, message=start))

    def start(self, turn: Turn) -> Tensor:
        """The received model, with the client's own head unless heads are shared.  # [P]"""
        if self.params.head == "shared":
            return turn.message["parameters"]
        return torch.cat([turn.message["base"], turn.state["head"]])

    def prototypes(self, turn: Turn) -> Tensor:
        """Mean features of the classes present, by the client's own encoder.  # [classes, F]"""
        work, indices = self.work, self.examples(turn)
        work.model.parameters[: work.base] = turn.state["base"]
        work.model.buffers.copy_(turn.state["base buffers"])
        features = work.outputs(work.images.x_train[indices], work.classifier.encode)
        means, present = class_means(features, work.images.y_train[indices])
        table = torch.zeros(work.classes, means.shape[1])
        return table.index_copy(0, present, means).to(work.device)

    def align(self, turn: Turn, prototypes: Tensor) -> None:
        """One epoch of SGD that brings the live encoder's features to their class's prototype."""
        model, rate = self.work.model, self.params.align_rate
        for pictures, labels in self.once(turn, "alignment", self.params.align_batch):
            model.gradients.zero_()
            features = self.work.classifier.encode(pictures)
            away = (features - prototypes[labels]).square().mean(1)  # [N]
            _, own, counts = labels.unique(return_inverse=True, return_counts=True)
            (away / counts[own]).sum().backward()  # a mean for each class, added up
            model.parameters.add_(model.gradients, alpha=-rate)  # those of the head are zero
        if not model.parameters.isfinite().all():
            raise wrong("align_rate", rate, "smaller: an aligned encoder is no longer finite")

    def once(self, turn: Turn, purpose: str, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The client's pictures in mixed batches, unchanged; the model is in evaluation mode.

        So a batch of one is defined and no running statistic moves.
        """
        indices, work = self.examples(turn), self.work
        mixed = indices[torch.randperm(len(indices), generator=turn.visit.generator(purpose))]
        work.model.module.eval()
        for batch in mixed.split(size) if len(mixed) else ():
            pictures, labels = work.examples(batch)
            yield work.normalise(pictures), labels

    def remember(self, turn: Turn) -> State:
        """The model as training left it: the parts of it that will be read."""
        model = self.work.model
        own = self.own(model.parameters, model.buffers)
        return {**super().remember(turn), **own, "step": turn.visit.step}

    def upload(self, turn: Turn) -> Message:
        """The encoder, the head where the server averages it, and what weighs the client."""
        message = super().upload(turn)
        if self.params.head == "local":
            message["base"] = message.pop("parameters")[: self.work.base].clone()
        if self.params.weights == "fisher":
            with turn.log.clock("trace"):
                message["trace"] = self.trace(turn)
            turn.log.numbers["trace"] = float(message["trace"])
        return message

    def trace(self, turn: Turn) -> Tensor:
        """The sum over batches of |gradient of the mean cross-entropy|^2 as trained.  # [1]"""
        model, total = self.work.model, 0.0  # published: also of clients not asked, for nobody
        for pictures, labels in self.once(turn, "trace", self.work.setting.training.batch):
            model.gradients.zero_()
            F.cross_entropy(model.module(pictures), labels).backward()
            total += float(model.gradients.square().sum())
        return torch.tensor([total])

    # --- evaluation

    def receive_personal(self, turn: Turn) -> None:
        """Put the aligned encoder with the client's head into the live model.

        As it is before training; of a client never visited, whose head is untrained, nothing moves.
        """
        if turn.state["step"] < 0:
            self.take_up(turn)
        else:
            self.receive(turn)
