"""STAMP: spatio-temporal gradient matching, with past tasks remembered by prototypical coresets."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from stamp_core.client.batches import Batch
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid, require_at_least
from stamp_core.coresets.memory import Memory, MemoryParams, past_tasks, task_indices
from stamp_core.methods.base.method import ClientRound, Log, Reply, State
from stamp_core.methods.base.rehearsal import Rehearsal, RehearsalContext, RehearsalParams
from stamp_core.methods.base.server_matching import SpatialParams, log_match, match_server
from stamp_core.methods.stamp.prototypes import prototype_loss
from stamp_core.methods.stamp.temporal import PastTask, TemporalParams, match_update, sample_tasks
from stamp_core.models.flat import FlatSGD


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
        """Validate the weight of the prototypical loss, which alternating steps need."""
        super().__post_init__()
        require_at_least(self, 0, "prototype")
        if self.alternate and not self.prototype:
            raise invalid("prototype", self.prototype, "above 0, as alternate is true")


@dataclass
class StampContext(RehearsalContext):
    """What the steps read besides their batches."""

    encoder_sgd: FlatSGD | None  # with alternating losses


class Stamp(Rehearsal):
    """Spatio-temporal gradient matching with network-free prototypes."""

    Params: ClassVar = StampParams
    fedavg_equivalent: ClassVar = {}
    masks: ClassVar = True
    graph_safe = True

    def __init__(self, params: StampParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        if params.alternate and runtime.training.weight_decay:  # a batch takes two steps
            raise invalid("alternate", True, "false, as training.weight_decay is set")
        if params.prototype and runtime.dataset.masks:
            raise invalid("prototype", params.prototype, "0, as the data have masks")
        self.graph_safe = not params.alternate  # whose second optimiser is no tensor

    # --- the server

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The server's model moved along the matched update; buffers are averaged."""
        averaged = super().aggregate(server, replies, log)
        return match_server(self, averaged, server, replies, log)

    def averaged_vectors(self) -> tuple[str, ...]:
        """The buffers alone where the parameters are matched."""
        return super().averaged_vectors() if self.params.spatial is None else self.shared_buffers()

    # --- a client

    def start(self, client_round: ClientRound) -> StampContext:
        """Load the received model."""
        self.receive(client_round)
        sgd = FlatSGD(self.model, self.runtime.training) if self.params.alternate else None
        return StampContext(self.anchors_on_device(client_round), sgd)

    def train(self, client_round: ClientRound, context: StampContext) -> list[Tensor]:
        """Local SGD, then its update matched with gradients of past tasks."""
        losses = super().train(client_round, context)
        finite = bool(self.model.parameters.isfinite().all())  # else matching would hide it
        if self.params.temporal and losses and finite:
            with client_round.log.clock("temporal"):
                self.match_past(client_round, len(losses))
        return losses

    def match_past(self, client_round: ClientRound, sgd_steps: int) -> None:
        """Replace the client round's update by the matched one, if there are past tasks."""
        params: TemporalParams = self.params.temporal
        past = self.past_tasks(client_round)
        if client_round.experience and not past:
            client_round.log.events.append("temporal matching: nothing is remembered")
        if not past and not params.alone:
            return
        chosen = sample_tasks(sorted(past), params.tasks, client_round.round_id)
        received = client_round.message["parameters"].to(self.runtime.device)
        tasks = {task: past[task] for task in chosen}
        result = match_update(
            self.runtime, client_round.round_id, params, received, tasks, sgd_steps
        )
        log_match(client_round.log, "temporal", result)

    def past_tasks(self, client_round: ClientRound) -> dict[int, PastTask]:
        """The stored images of the client's other tasks."""
        if self.params.temporal.source == "all data":
            return self.all_data(client_round)
        memory: Memory = client_round.state["memory"]
        images, labels = self.exemplars_on_device(client_round)
        tasks = past_tasks(memory, client_round.task)
        return {task: PastTask(images, labels, task_indices(memory, task)) for task in tasks}

    def all_data(self, client_round: ClientRound) -> dict[int, PastTask]:
        """All images of the other tasks so far, as the public code reads them again."""
        runtime, plan = self.runtime, client_round.plan
        met = set(range(min(client_round.experience, plan.tasks))) - {client_round.task}
        found = {task: self.train_indices(plan, client_round.client, task) for task in sorted(met)}
        return {
            task: PastTask(runtime.x_train, runtime.y_train, indices)
            for task, indices in found.items()
            if len(indices)
        }

    # --- a step

    def loss(self, batch: Batch, context: StampContext) -> Tensor:
        """The rehearsal loss and the prototypical loss."""
        if not self.params.prototype:
            return super().loss(batch, context)
        if context.encoder_sgd is not None:
            self.step_encoder(batch, context.encoder_sgd)
            features = self.classifier.encode(batch.images).detach()
            return self.weighted_loss(self.classifier.head(features), batch, context)
        features = self.classifier.encode(batch.images)
        prototypical: Tensor = self.params.prototype * prototype_loss(features, batch.targets)
        return prototypical + self.weighted_loss(self.classifier.head(features), batch, context)

    def step_encoder(self, batch: Batch, sgd: FlatSGD) -> None:
        """One SGD step of the encoder alone on the prototypical loss."""
        loss = prototype_loss(self.classifier.encode(batch.images), batch.targets)
        (self.params.prototype * loss).backward()
        sgd.step()
        self.model.gradients.zero_()
