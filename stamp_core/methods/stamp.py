"""STAMP: gradients matched in space and in time, past tasks remembered by prototypes."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from stamp_core.config import at_least, wrong
from stamp_core.coresets.memory import Keep, of_task, past
from stamp_core.coresets.mixstyle import lower_layers, mixed_styles
from stamp_core.methods import Group, Log, Reply, State, Turn
from stamp_core.methods.fedomg import Spatial, matched_server, note
from stamp_core.methods.replay import Rehearsal, Replay
from stamp_core.prototypes import prototype_loss
from stamp_core.temporal import Mixing, Past, Stored, Temporal, drawn
from stamp_core.vectors import Descent
from stamp_core.workspace import Workspace


@dataclass(frozen=True)
class Components(Rehearsal):
    """The parts of STAMP; null or 0 turns one off, and with all off it is FedAvg."""

    memory: Keep = field(default_factory=Keep)  # the prototypical coreset, PCS
    ratio: float = 0.0  # remembered pictures mixed into batches: not in the paper
    spatial: Spatial | None = None  # matching on the server, SAM
    temporal: Temporal | None = None  # matching on the client, TAM
    prototype: float = 0.0  # weight of the prototypical loss beside cross-entropy
    alternate: bool = False  # as the public code: encoder by prototypes, then head by cross-entropy

    def __post_init__(self) -> None:
        """Refuse a negative weight."""
        super().__post_init__()
        at_least(self, 0, "prototype")
        if self.alternate and not self.prototype:
            raise wrong("prototype", self.prototype, "above 0, as alternate is true")


class Stamp(Replay):
    """Spatio-temporal gradient matching with network-free prototypes."""

    Params: ClassVar = Components
    neutral: ClassVar[dict[str, Any]] = {}
    group: ClassVar[Group] = "continual"

    def __init__(self, params: Components, work: Workspace) -> None:
        super().__init__(params, work)
        if params.memory.space == "feature" and not lower_layers(work.classifier.encoder):
            raise wrong("memory.space", "feature", "'image' or 'off': this network has no maps")
        if params.alternate and work.setting.training.weight_decay:  # of both steps of a batch
            raise wrong("alternate", True, "false where training.weight_decay is set")

    # --- the server

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The server's model a step along the matched updates; buffers are averaged."""
        averaged = super().aggregate(server, replies, log)
        return matched_server(self, averaged, server, replies, log)

    # --- a client

    def train(self, turn: Turn) -> list[Tensor]:
        """Local SGD, then its whole way matched with where the past tasks point."""
        losses = super().train(turn)
        finite = bool(
            self.work.model.parameters.isfinite().all()
        )  # else it must be seen, not mended
        if self.params.temporal and losses and finite:
            with turn.log.clock("temporal"):
                self.match(turn, len(losses))
        return losses

    def match(self, turn: Turn, steps: int) -> None:
        """Replace the way of the visit by the matched one, if there is a past to match with."""
        temporal, stored = self.params.temporal, partial(self.stored, turn)
        every = self.past_tasks(turn)
        if turn.visit.step and not every:
            turn.log.events.append("temporal matching: nothing is remembered")
        if every or temporal.alone:
            received = turn.message["parameters"].to(self.work.device)
            mixing = partial(self.mixing, turn)
            way = Past(self.work, turn.visit, temporal, received, stored, mixing)
            tasks = drawn(every, temporal.tasks, turn.visit)
            note(turn.log, "temporal", way.match(tasks, steps))

    def past_tasks(self, turn: Turn) -> list[int]:
        """The other tasks that there are pictures of."""
        if self.params.temporal.source != "all data":
            return past(turn.state["memory"], turn.task)
        met = range(min(turn.visit.step, turn.plan.tasks))
        return [task for task in met if task != turn.task and len(self.stored(turn, task)[2])]

    def stored(self, turn: Turn, task: int) -> Stored:
        """Pictures, labels, and which of them are those of a past task."""
        if self.params.temporal.source == "all data":
            indices = turn.plan.train_indices(self.work.images, turn.visit.client, task)
            return self.work.x_train, self.work.y_train, indices
        kept = turn.state["memory"]
        return kept["pictures"], kept["labels"], of_task(kept, task)

    def mixing(self, turn: Turn, task: int) -> Mixing:
        """What a step on pictures of a past task is within: MixStyle, if it is on features."""
        keep = self.params.memory
        if keep.space != "feature":
            return lambda labels: nullcontext()
        draw, encoder = turn.visit.generator(f"styles of {task}"), self.work.classifier.encoder
        return lambda labels: mixed_styles(encoder, labels, keep.alpha, draw)

    def loss(self, turn: Turn, pictures: Tensor, labels: Tensor) -> Tensor:
        """The loss of replay with the prototypical loss."""
        if not self.params.prototype:
            return super().loss(turn, pictures, labels)
        encode, head = self.work.classifier.encode, self.work.classifier.head
        if self.params.alternate:
            self.step_encoder(turn, pictures, labels)
            return self.error(turn, head(encode(pictures).detach()), labels)
        features = encode(pictures)
        weighted: Tensor = self.params.prototype * prototype_loss(features, labels)
        return weighted + self.error(turn, head(features), labels)

    def step_encoder(self, turn: Turn, pictures: Tensor, labels: Tensor) -> None:
        """One step of the encoder alone along the prototypical loss."""
        model = self.work.model
        descent = turn.notes.setdefault("encoder", Descent(model, self.work.setting.training))
        loss = prototype_loss(self.work.classifier.encode(pictures), labels)
        (self.params.prototype * loss).backward()
        descent.step()
        model.gradients.zero_()
