"""STAMP: spatio-temporal gradient matching, with past tasks remembered by prototypical coresets."""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from torch import Tensor

from stamp_core.client.temporal import StoredImages, TemporalMatcher, TemporalParams, sample_tasks
from stamp_core.client.workspace import Workspace
from stamp_core.config.decode import invalid, require_at_least
from stamp_core.coresets.memory import MemoryParams, past_tasks, task_indices
from stamp_core.methods.base.method import ClientRound, Log, Reply, State
from stamp_core.methods.base.rehearsal import Rehearsal, RehearsalParams
from stamp_core.methods.base.server_matching import SpatialParams, log_match, match_server
from stamp_core.models.flat import FlatSGD
from stamp_core.models.prototypes import prototype_loss


@dataclass(frozen=True)
class StampParams(RehearsalParams):
    """The parts of STAMP; null or 0 turns one off, and with all off it is FedAvg."""

    memory: MemoryParams = field(default_factory=MemoryParams)  # prototypical coresets, PCS
    ratio: float = 0.0  # exemplars mixed into batches: not in the paper
    spatial: SpatialParams | None = None  # matching on the server, SAM
    temporal: TemporalParams | None = None  # matching on the client, TAM
    prototype: float = 0.0  # weight of the prototypical loss, added to cross-entropy
    alternate: bool = False  # as the public code: encoder by prototypes, then head by cross-entropy

    def __post_init__(self) -> None:
        """Refuse a negative weight."""
        super().__post_init__()
        require_at_least(self, 0, "prototype")
        if self.alternate and not self.prototype:
            raise invalid("prototype", self.prototype, "above 0, as alternate is true")


class Stamp(Rehearsal):
    """Spatio-temporal gradient matching with network-free prototypes."""

    Params: ClassVar = StampParams
    neutral: ClassVar = {}
    masks: ClassVar = True
    captures = True

    def __init__(self, params: StampParams, work: Workspace) -> None:
        super().__init__(params, work)
        if params.alternate and work.training.weight_decay:  # a batch takes two steps
            raise invalid("alternate", True, "false, as training.weight_decay is set")
        if params.prototype and work.dataset.masks:
            raise invalid("prototype", params.prototype, "0, as the data have masks")
        self.captures = not params.alternate  # whose optimiser of the encoder is in `scratch`

    # --- the server

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The server's model moved along the matched update; buffers are averaged."""
        averaged = super().aggregate(server, replies, log)
        return match_server(self, averaged, server, replies, log)

    def averaged_vectors(self) -> tuple[str, ...]:
        """The buffers alone where the parameters are matched."""
        names = super().averaged_vectors()
        return names if self.params.spatial is None else names[1:]

    # --- a client

    def train(self, client_round: ClientRound) -> list[Tensor]:
        """Local SGD, then its update matched with gradients of past tasks."""
        losses = super().train(client_round)
        finite = bool(self.work.model.parameters.isfinite().all())  # else matching would hide it
        if self.params.temporal and losses and finite:
            with client_round.log.clock("temporal"):
                self.match_past(client_round, len(losses))
        return losses

    def match_past(self, client_round: ClientRound, sgd_steps: int) -> None:
        """Replace the client round's update by the matched one, if there are past tasks."""
        params, past = self.params.temporal, self.past_tasks(client_round)
        if client_round.experience and not past:
            client_round.log.events.append("temporal matching: nothing is remembered")
        if past or params.alone:
            matcher = TemporalMatcher(
                self.work,
                client_round.round_id,
                params,
                client_round.message["parameters"].to(self.work.device),
                partial(self.stored, client_round),
            )
            tasks = sample_tasks(past, params.tasks, client_round.round_id)
            log_match(client_round.log, "temporal", matcher.match(tasks, sgd_steps))

    def past_tasks(self, client_round: ClientRound) -> list[int]:
        """The other tasks of which images are stored, ascending."""
        if self.params.temporal.source != "all data":
            return past_tasks(client_round.state["memory"], client_round.task)
        met = set(range(min(client_round.experience, client_round.plan.tasks)))
        others = sorted(met - {client_round.task})
        return [task for task in others if len(self.stored(client_round, task)[2])]

    def stored(self, client_round: ClientRound, task: int) -> StoredImages:
        """Images and labels, and the indices of those of a past task."""
        if self.params.temporal.source == "all data":
            indices = client_round.plan.train_indices(self.work.dataset, client_round.client, task)
            return self.work.x_train, self.work.y_train, indices
        indices = task_indices(client_round.state["memory"], task)
        return *self.remembered(client_round), indices

    def loss(self, client_round: ClientRound, images: Tensor, labels: Tensor) -> Tensor:
        """The rehearsal loss and the prototypical loss."""
        if not self.params.prototype:
            return super().loss(client_round, images, labels)
        encode, head = self.work.classifier.encode, self.work.classifier.head
        if self.params.alternate:
            self.step_encoder(client_round, images, labels)
            return self.weighted_loss(client_round, head(encode(images).detach()), labels)
        features = encode(images)
        prototypical: Tensor = self.params.prototype * prototype_loss(features, labels)
        return prototypical + self.weighted_loss(client_round, head(features), labels)

    def step_encoder(self, client_round: ClientRound, images: Tensor, labels: Tensor) -> None:
        """One SGD step of the encoder alone on the prototypical loss."""
        model = self.work.model
        sgd = client_round.scratch.setdefault("encoder", FlatSGD(model, self.work.training))
        loss = prototype_loss(self.work.classifier.encode(images), labels)
        (self.params.prototype * loss).backward()
        sgd.step()
        model.gradients.zero_()
