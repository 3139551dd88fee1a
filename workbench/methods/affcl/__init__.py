"""AF-FCL (Wuerkaixi et al., 2024): a normalising flow replays features that are credible."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.batches import Batch
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.limits import NonNegative, Positive, PositiveInt, UnitInterval, at_least
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Message, State
from stamp_core.models.flat import FlatModel
from stamp_core.models.networks import set_train_mode
from workbench.methods.affcl.flow import Flow, Scale
from workbench.methods.affcl.replay import TEMPERATURE, FlowReplay
from workbench.methods.base.distillation import soft_cross_entropy
from workbench.methods.base.generators import Pool, build_seeded, draw_inputs
from workbench.methods.base.task_server import TaskContext, TaskServer, pack_bits, unpack_bits

FEATURE_WEIGHT = 0.5  # of features in distillation


@dataclass(frozen=True)
class AFFCLParams(FedAvgParams):
    """Weights of the terms, the flow, and how credible a replayed feature is."""

    k_loss_flow: NonNegative = 0.1  # weight of the loss on replayed features; at 0 there is no flow
    k_lastflow: NonNegative = 0.4  # weight of samples of the last flow in the loss of the flow
    k_kd_last: NonNegative = 0.2  # weight of distillation from the last task's classifier
    # weight in it of softened outputs, on images and on replayed features
    k_kd_output: NonNegative = 0.1
    theta: UnitInterval = 0.2  # share of the replay loss that does not depend on the flow's density
    flow_lr: NonNegative = 1e-4  # of Adam
    flow_scale: Scale = "default"  # "general" can also expand, as features with ReLU need
    flow_layers: Annotated[int, at_least(2)] = 4  # one alone leaves half of the features as noise
    flow_hidden: PositiveInt | None = None  # width of the flow; null: the number of features
    flow_every: PositiveInt = 1  # batches for one step of the flow and one of replay
    # Largest norm of the gradient of a replay step, as a flow's features may be of any size: the
    # released Adam bounds its steps, SGD does not.
    replay_clip: Positive = 10.0

    @property
    def distils(self) -> bool:
        return self.k_kd_last > 0

    @property
    def kept(self) -> tuple[str, ...]:
        """What a client keeps of the last task: vectors of the message."""
        flow = ("flow",) if self.k_loss_flow and self.k_lastflow else ()
        return ("parameters", *flow) if self.distils else flow


@dataclass
class AFFCLContext(TaskContext):
    last: Message  # the classifier and the flow of the last task's end
    replay: FlowReplay | None


class AFFCL(TaskServer):
    """FedAvg of a classifier and a flow over its features, which replays all reported classes."""

    Params: ClassVar = AFFCLParams
    fedavg_equivalent: ClassVar = {"k_loss_flow": 0.0, "k_kd_last": 0.0}
    group = "continual"

    def __init__(self, params: AFFCLParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.features = runtime.classifier.features  # D
        if params.k_loss_flow:
            self.flow = self.new_flow(0)
            self.last_flow = self.new_flow(0)
            self.extra_networks = {"flow": self.flow}
        if params.distils:
            self.teacher = runtime.network(seed=0).to(runtime.device).eval()
            self.flat_teacher = FlatModel(self.teacher)

    def new_flow(self, seed: int) -> FlatModel:
        hidden = self.params.flow_hidden or self.features
        sizes = self.features, self.runtime.classes, hidden, self.params.flow_layers
        flow = build_seeded(partial(Flow, *sizes, self.params.flow_scale), seed, "flow")
        return FlatModel(flow.to(self.runtime.device))

    def initial_weights(self, name: str, seed: int) -> Tensor:
        return self.new_flow(seed).parameters.cpu()

    def broadcast(self, server: State, client: int) -> Message:
        message = super().broadcast(server, client)
        if self.extra_networks and client in server["informed"]:  # else they are announced
            message["learnt"] = pack_bits(server["classes"])
        return message

    def start(self, client_round: ClientRound) -> AFFCLContext:
        announced = self.announced(client_round)
        past = self.past_classes(announced)
        last = self.last_task(client_round, past)
        if "parameters" in last:
            self.flat_teacher.load(last["parameters"], last.get("buffers"))
        replay = self.flow_replay(client_round, past, last) if self.extra_networks else None
        return AFFCLContext(announced, last, replay)

    def last_task(self, client_round: ClientRound, past: Tensor) -> Any:
        """The networks of the last task's end: the first that a client receives for a task."""
        if not self.is_announced(client_round):
            return client_round.state.get("last", {})
        names = self.params.kept if past.any() else ()
        last = {name: client_round.message[name].clone() for name in names}
        if "parameters" in last and len(self.model.buffers):
            last["buffers"] = self.model.buffers.cpu().clone()
        return last

    def flow_replay(self, client_round: ClientRound, past: Tensor, last: Message) -> FlowReplay:
        message = client_round.message
        draw = client_round.generator
        classes = self.runtime.classes
        learnt = unpack_bits(message["learnt"], classes) if "learnt" in message else past
        learnt = learnt | self.current_classes(client_round)
        size = self.runtime.training.epochs * len(client_round.indices), self.features
        device = self.runtime.device
        draws = Pool(partial(draw_inputs, learnt, size, draw("replay"), device))
        old_samples = None
        if "flow" in last:
            self.last_flow.load(last["flow"])
            of_past = partial(draw_inputs, past, size, draw("replay of the last task"), device)
            old_samples = Pool(lambda: self.past_samples(*of_past()))
        old_head = self.teacher.head if "parameters" in last else None
        options = old_samples, old_head, client_round.state.get("moments", {}), client_round.log
        return FlowReplay(self.runtime, self.params, self.flow, draws, *options)

    @torch.no_grad()
    def past_samples(self, labels: Tensor, noise: Tensor) -> Sequence[Tensor]:
        """Features of past classes from the last task's flow, which is fixed.  # [N, D], [N]"""
        flow: Any = self.last_flow.module
        return flow.sample(noise, labels), labels

    def finish(self, client_round: ClientRound, context: AFFCLContext) -> None:
        if context.replay:
            context.replay.finish(client_round.message["flow"])

    def loss(self, batch: Batch, context: AFFCLContext) -> Tensor:
        distils = "parameters" in context.last
        if not context.replay and not distils:
            return super().loss(batch, context)
        features = self.classifier.encode(batch.images)  # replay leaves the encoder as it is
        if context.replay:
            context.replay.add(self.evaluated(batch.images, features), batch.targets)
        logits = self.classifier.head(features)
        loss = F.cross_entropy(logits, batch.targets)
        return loss + self.distillation(batch.images, features, logits) if distils else loss

    def evaluated(self, images: Tensor, features: Tensor) -> Tensor:
        """The features of evaluation mode, computed again only where they differ.  # [N, D]"""
        if not any(norm.training for norm in self.classifier.norms):
            return features.detach()
        set_train_mode(self.classifier, update_norms=False)
        with torch.no_grad():
            features = self.classifier.encode(images)
        set_train_mode(self.classifier, update_norms=True)
        return features

    def distillation(self, images: Tensor, features: Tensor, logits: Tensor) -> Tensor:
        with torch.no_grad():
            old_features = self.teacher.encode(images)
            old_logits = self.teacher.head(old_features)
        of_features = FEATURE_WEIGHT * F.mse_loss(features, old_features)
        of_outputs = self.params.k_kd_output * soft_cross_entropy(logits, old_logits, TEMPERATURE)
        loss: Tensor = self.params.k_kd_last * (of_features + of_outputs)
        return loss

    def update_state(self, client_round: ClientRound, context: AFFCLContext) -> State:
        state = super().update_state(client_round, context)
        if self.params.kept:
            state["last"] = context.last
        if context.replay:
            state["moments"] = context.replay.moments
        return state
