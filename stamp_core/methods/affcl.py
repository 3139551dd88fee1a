"""AF-FCL (Wuerkaixi et al., 2024): a normalising flow replays features that are credible."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.pool import Pool
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid, require_above, require_at_least
from stamp_core.methods.base.distillation import soft_cross_entropy
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Log, Message, Reply, State
from stamp_core.methods.base.task_server import PREFIX, TaskServer, pack_bits, unpack_bits
from stamp_core.models.acgan import draw_labels
from stamp_core.models.adam import FlatAdam
from stamp_core.models.flat import FlatModel, FlatSGD
from stamp_core.models.flow import Flow, Scale, build_flow
from stamp_core.models.networks import set_train_mode

TEMPERATURE = 2.0  # of distillation: probabilities are raised to 1/2 and normalised
DIVERGED = "flow: its density is not finite, the received flow is kept"
NOT_REPLAYED = "flow: the loss on its samples is not finite, they are not replayed"


@dataclass(frozen=True)
class AFFCLParams(FedAvgParams):
    """Weights of the terms, the flow, and how credible a replayed feature is."""

    k_loss_flow: float = 0.1  # weight of the loss on replayed features; at 0 there is no flow
    k_lastflow: float = 0.4  # weight of samples of the last task's flow in the loss of the flow
    k_kd_last: float = 0.2  # weight of distillation from the last task's classifier, of its ...
    k_kd_feature: float = 0.5  # ... features ...
    k_kd_output: float = 0.1  # ... and softened outputs, on images and on replayed features
    theta: float = 0.2  # share of the replay loss that does not depend on the flow's density
    flow_lr: float = 1e-4  # of Adam
    flow_scale: Scale = "default"  # "general" can also expand, as features with ReLU need
    flow_layers: int = 4
    flow_hidden: int | None = None  # width of the flow's networks; null: the number of features
    flow_every: int = 1  # the batches whose features make one step of the flow and one of replay
    # Which values of a sample are compared with which of the batch's images of its class: noise
    # with noise, as in the paper; features with features; or, as released, features with noise.
    credibility: Literal["noise", "features", "mixed"] = "noise"
    min_variance: float = 0.01  # released: 1e-30, at which one image of a class has weight 4e14

    def __post_init__(self) -> None:
        """Refuse negative weights, a share outside [0, 1] and an empty flow."""
        super().__post_init__()
        weights = ("k_loss_flow", "k_lastflow", "k_kd_last", "k_kd_feature", "k_kd_output")
        require_at_least(self, 0, *weights, "flow_lr")
        require_above(self, 0, "min_variance")
        require_at_least(self, 2, "flow_layers")  # fewer would leave half of the features as noise
        require_at_least(self, 1, "flow_every")
        if self.flow_hidden is not None:
            require_at_least(self, 1, "flow_hidden")
        if not 0 <= self.theta <= 1:
            raise invalid("theta", self.theta, "between 0 and 1")

    @property
    def distils(self) -> bool:
        """Whether there is distillation from the last task's classifier."""
        return self.k_kd_last > 0 and (self.k_kd_feature > 0 or self.k_kd_output > 0)

    @property
    def kept(self) -> tuple[str, ...]:
        """What a client keeps of the last task: vectors of the message."""
        flow = ("flow",) if self.k_loss_flow and self.k_lastflow else ()
        return ("parameters", *flow) if self.distils else flow


class AFFCL(TaskServer):
    """FedAvg of a classifier and of a flow over its features, from which all classes are replayed.

    State of a client: "last" (the classifier and the flow of the last task's end) and "moments"
    (of Adam). The flow replays the classes that any client has reported.
    """

    Params: ClassVar = AFFCLParams
    fedavg_equivalent: ClassVar[dict[str, Any]] = {"k_loss_flow": 0.0, "k_kd_last": 0.0}
    group = "continual"

    def __init__(self, params: AFFCLParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.features = next(runtime.classifier.head.parameters()).shape[1]  # D
        if params.k_loss_flow:  # live networks, loaded anew in every client round
            self.flow, self.last_flow = (FlatModel(self.new_flow(0)) for _ in range(2))
        if params.distils:
            self.teacher = runtime.network(seed=0).to(runtime.device).eval()
            self.flat_teacher = FlatModel(self.teacher)

    def new_flow(self, seed: int) -> Flow:
        """A flow with the initial weights of `seed`."""
        hidden = self.params.flow_hidden or self.features
        shape = (self.features, self.runtime.classes, hidden, self.params.flow_layers)
        return build_flow(*shape, self.params.flow_scale, seed).to(self.runtime.device)

    # --- the server

    def init_server(self, seed: int) -> State:
        """The initial classifier and, if it is used, the initial flow."""
        server = super().init_server(seed)
        if not self.params.k_loss_flow:
            return server
        return {**server, "flow": FlatModel(self.new_flow(seed)).parameters.cpu()}

    def broadcast(self, server: State, client: int) -> Message:
        """The model, the flow, and the classes learnt so far, as bits."""
        message = super().broadcast(server, client)
        if not self.params.k_loss_flow:
            return message
        if client in server["informed"]:  # else they are what is announced
            message = {**message, "learnt": pack_bits(server["classes"])}
        return {**message, "flow": server["flow"]}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The means of the models and of the flows, weighted by samples."""
        state, trained = super().aggregate(server, replies, log), [r for r in replies if r.samples]
        if not self.params.k_loss_flow or not trained:
            return state
        weights = [float(reply.samples) for reply in trained]
        return {
            **state,
            "flow": self.runtime.average([r.message["flow"] for r in trained], weights),
        }

    # --- a client

    def receive(self, client_round: ClientRound) -> None:
        """Load the received model; the first one of an experience is that of the last task's end.

        A client that misses this round takes the first one that it receives.
        """
        super().receive(client_round)
        message, scratch = client_round.message, client_round.scratch
        past = self.past_classes(client_round)
        last = client_round.state.get("last", {})
        if PREFIX + "past" in message:
            last = {name: message[name].clone() for name in self.params.kept if past.any()}
            if "parameters" in last and len(self.model.buffers):
                last["buffers"] = self.model.buffers.cpu().clone()
        if "parameters" in last:
            self.flat_teacher.load(last["parameters"], last.get("buffers"))
        scratch["last"] = last
        if self.params.k_loss_flow:
            self.prepare_flow(client_round, past)

    def prepare_flow(self, client_round: ClientRound, past: Tensor) -> None:
        """Load the flows; the optimisers and the classes to be drawn are in `scratch`."""
        message, scratch, runtime = client_round.message, client_round.scratch, self.runtime
        learnt = unpack_bits(message["learnt"], runtime.classes) if "learnt" in message else past
        learnt = learnt | self.current_classes(client_round)
        self.flow.load(message["flow"])
        if "flow" in scratch["last"]:
            self.last_flow.load(scratch["last"]["flow"])
        moments = client_round.state.get("moments")
        count = runtime.training.epochs * len(self.train_indices(client_round))
        names = "replay", "replay of the last task"
        draw, draw_past = map(client_round.round_id.generator, names)
        scratch |= {
            "draws": Pool(partial(self.draw_inputs, learnt, count, draw)),
            "past": Pool(partial(self.past_samples, past, count, draw_past)),
            "diverged": torch.zeros((), dtype=torch.bool, device=runtime.device),
            "adam": FlatAdam(self.flow, self.params.flow_lr, moments),
            # a second optimiser, as published; weights decay in the step on images
            "sgd": FlatSGD(runtime.model, replace(runtime.training, weight_decay=0.0)),
            "batches": [],
            "replays": [],  # of each: density, credibility, whether it was used, or failed
        }

    def train(self, client_round: ClientRound) -> list[Tensor]:
        """Local SGD, with steps of the flow and of replay between its steps."""
        losses = super().train(client_round)
        if self.params.k_loss_flow:
            if client_round.scratch["batches"]:
                self.learn_and_replay(client_round)
            self.finish_flow(client_round)
        return losses

    def loss(self, client_round: ClientRound, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy and distillation, after the steps of the flow and of replay."""
        last = "parameters" in client_round.scratch["last"]
        if not self.params.k_loss_flow and not last:
            return super().loss(client_round, images, labels)
        features = self.classifier.encode(images)  # replay leaves the encoder as it is
        if self.params.k_loss_flow:
            batches = client_round.scratch["batches"]
            batches.append((self.evaluated(images, features), labels))
            if len(batches) == self.params.flow_every:
                self.learn_and_replay(client_round)
        logits = self.classifier.head(features)
        loss = F.cross_entropy(logits, labels)
        return loss + self.distillation(images, features, logits) if last else loss

    def evaluated(self, images: Tensor, features: Tensor) -> Tensor:
        """The features of evaluation mode, computed again only where they differ.  # [N, D]"""
        classifier = self.classifier
        if not any(norm.training for norm in classifier.norms):
            return features.detach()
        set_train_mode(classifier, update_norms=False)
        with torch.no_grad():
            features = classifier.encode(images)
        set_train_mode(classifier, update_norms=True)
        return features

    def distillation(self, images: Tensor, features: Tensor, logits: Tensor) -> Tensor:
        """The weighted distances to the last task's features and outputs on a batch."""
        with torch.no_grad():
            old_features = self.teacher.encode(images)
            old_logits = self.teacher.head(old_features)
        of_features = self.params.k_kd_feature * F.mse_loss(features, old_features)
        of_outputs = self.params.k_kd_output * soft_cross_entropy(logits, old_logits, TEMPERATURE)
        loss: Tensor = self.params.k_kd_last * (of_features + of_outputs)
        return loss

    # --- the flow

    def learn_and_replay(self, client_round: ClientRound) -> None:
        """One step of the flow and one of the head, on the features of the last batches."""
        features, labels = map(torch.cat, zip(*client_round.scratch["batches"], strict=True))
        client_round.scratch["batches"].clear()
        with client_round.log.clock("flow"):
            self.fit_flow(client_round, features, labels)
            self.replay(client_round, features, labels)

    def fit_flow(self, client_round: ClientRound, features: Tensor, labels: Tensor) -> None:
        """One step of the flow; `scratch` says whether its density was not finite."""
        scratch, count = client_round.scratch, len(labels)
        if "flow" in scratch["last"]:
            samples, drawn = scratch["past"].take(count)
            features, labels = torch.cat([features, samples]), torch.cat([labels, drawn])
        density = self.flow.module(features, labels)[1]
        loss = -density[:count].mean()
        if len(density) > count:
            loss = loss - self.params.k_lastflow * density[count:].mean()
        scratch["diverged"] = scratch["diverged"] | ~loss.isfinite()
        self.flow.gradients.zero_()
        loss.backward()
        scratch["adam"].step()

    def finish_flow(self, client_round: ClientRound) -> None:
        """Check the flow and its replays, and record their means of the client round.

        Only here does the host wait for the device.
        """
        scratch, log = client_round.scratch, client_round.log
        if scratch["diverged"] or not self.flow.parameters.isfinite().all():
            log.events.append(DIVERGED)
            self.flow.load(client_round.message["flow"])
            del scratch["adam"]
        if scratch["replays"]:
            *numbers, used, failed = torch.stack(scratch["replays"], 1).cpu()  # [replays] each
            log.events += [NOT_REPLAYED] * int(failed.sum())
            for name, values in zip(("flow density", "credibility"), numbers, strict=True):
                if used.any():
                    log.numbers[name] = float(values[used > 0].mean())

    def draw_inputs(
        self, classes: Tensor, count: int, draw: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Random labels of some classes, and noise, on the device.  # [N], [N, D]"""
        labels = draw_labels(classes, count, draw)
        noise = torch.randn(count, self.features, generator=draw)
        return labels.to(self.runtime.device), noise.to(self.runtime.device)

    @torch.no_grad()
    def sample(self, flow: FlatModel, noise: Tensor, labels: Tensor) -> Tensor:
        """Features that a flow makes of noise.  # [N, D]"""
        assert isinstance(flow.module, Flow)
        return flow.module.sample(noise, labels)

    def past_samples(
        self, classes: Tensor, count: int, draw: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Features of past classes from the last task's flow, which is fixed.  # [N, D], [N]"""
        labels, noise = self.draw_inputs(classes, count, draw)
        return self.sample(self.last_flow, noise, labels), labels

    def replay(self, client_round: ClientRound, features: Tensor, labels: Tensor) -> None:
        """One SGD step of the head alone on samples of the flow, weighted by credibility.

        Its gradient is 0 if the loss is not finite, or the flow has diverged before.
        """
        scratch, params, model = client_round.scratch, self.params, self.model
        drawn, noise = scratch["draws"].take(len(labels))
        samples = self.sample(self.flow, noise, drawn)
        weights, density = self.weights(features, labels, samples, noise, drawn)
        logits = self.classifier.head(samples)
        each = F.cross_entropy(logits, drawn, reduction="none")
        loss = (weights * each).mean() * ((1 - params.theta) * density + params.theta)
        if "parameters" in scratch["last"] and params.k_kd_output:
            with torch.no_grad():
                old = self.teacher.head(samples)
            distance = soft_cross_entropy(logits, old, TEMPERATURE)
            loss = loss + params.k_kd_last * params.k_kd_output * distance
        (params.k_loss_flow * loss).backward()
        finite, usable = loss.isfinite(), ~scratch["diverged"]
        model.gradients.copy_(model.gradients.where(finite & usable, 0.0))
        scratch["sgd"].step()  # the encoder's gradients are 0
        model.gradients.zero_()
        outcome = [density, weights.mean(), finite & usable, ~finite & usable]
        scratch["replays"].append(torch.stack([each.detach().float() for each in outcome]))

    @torch.no_grad()
    def weights(
        self, features: Tensor, labels: Tensor, samples: Tensor, noise: Tensor, drawn: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The credibility of each sample, and the mean density of a batch's features.  # [N], []"""
        own_noise, log_density = self.flow.module(features, labels)
        density = (log_density / self.features).exp().mean()  # per feature
        compared = samples if self.params.credibility != "noise" else noise
        own = features if self.params.credibility == "features" else own_noise
        members = F.one_hot(labels, self.runtime.classes).to(own.dtype)
        least = self.params.min_variance
        return credibility(compared, drawn, own, members, density, least), density

    # --- state and message

    def update_state(self, client_round: ClientRound) -> State:
        """The state with what is kept of the last task, and the moments of Adam."""
        state, scratch = super().update_state(client_round), client_round.scratch
        if self.params.kept:
            state["last"] = scratch["last"]
        if self.params.k_loss_flow:
            state["moments"] = scratch["adam"].moments() if "adam" in scratch else {}
        return state

    def upload(self, client_round: ClientRound) -> Message:
        """The trained model and flow, and the classes of the task, once in an experience."""
        message = super().upload(client_round)
        if not self.params.k_loss_flow:
            return message
        return {**message, "flow": self.flow.parameters.cpu().clone()}


def credibility(
    samples: Tensor, drawn: Tensor, own: Tensor, members: Tensor, absent: Tensor, least: float
) -> Tensor:
    """How plausible samples of classes `drawn` are among a client's `own` values.  # [N]

    `members` is 1 at the class of each own value.  # [n, L]
    The mean over dimensions of the normal density with mean and variance, at least `least`, of the
    own values of the same class; `absent` for a class that the client does not have.
    """
    counts = members.sum(0)  # [L]
    shares = (members / counts.clamp(min=1)).T  # [L, n]
    means = shares @ own  # [L, D]
    variances = (shares @ (own - members @ means).square()).clamp(min=least)
    mean, variance = means[drawn], variances[drawn]  # [N, D]
    exponent = -(samples - mean).square() / (2 * variance)
    density = (exponent.exp() / (2 * math.pi * variance).sqrt()).mean(1)
    return density.where(counts[drawn] > 0, absent)
