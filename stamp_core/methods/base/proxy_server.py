"""A proxy server: it chooses an old model by images that it reconstructs from gradients."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.by_class import class_means, first_per_class
from stamp_core.config.decode import require_at_least
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Log, Message, Reply, State
from stamp_core.methods.base.proxy import GradientEncoder, reconstruct
from stamp_core.methods.base.task_server import TaskServer, pack_bits

CHUNK = 64  # images that are reconstructed side by side: more would take too much memory
OLD = "old "  # of the parts of an announcement that make up the old model
NOT_FINITE = "proxy: a gradient is not finite"


@dataclass(frozen=True)
class ProxyParams(FedAvgParams):
    """How the old model is chosen; with an `old_weight` of 0 nothing of this is done."""

    old_weight: float = 0.5  # of the loss that uses the old model; LGA: 1
    proxy: Literal["dlg", "none"] = "dlg"  # none: the old model is a task's last, not its best
    proxy_init: int = 0  # rounds of a task in which the latest model counts as the best; LGA: 6
    perturb_steps: int = 50  # of SGD on a prototype before its gradient is taken
    perturb_lr: float = 0.2  # a tenth of the published learning rate of 2
    recon_steps: int = 5000  # of L-BFGS; published: 250 of 20 inner steps each

    def __post_init__(self) -> None:
        """Refuse negative numbers."""
        super().__post_init__()
        counts = ("proxy_init", "perturb_steps", "recon_steps")
        require_at_least(self, 0, "old_weight", "perturb_lr", *counts)


class ProxyServer(TaskServer, ABC):
    """A server that announces the best global model of the experience before.

    A client with `scratch["signal"]` sends the gradient of a public encoder on a perturbed
    prototype of each class. The server reconstructs images from them, and the best model of an
    experience is the most accurate one on these images. State of the server: "monitor" (the
    images), "best" (of the running experience so far), "old" (of the one before).
    """

    # --- the server

    def init_server(self, seed: int) -> State:
        """The initial model; no reconstructed images, no best and no old model."""
        images, labels = self.runtime.dataset.x_train[:0].clone(), torch.empty(0, dtype=torch.int64)
        monitor = {"images": images, "labels": labels, "experience": 0}
        return {**super().init_server(seed), "monitor": monitor, "best": None, "old": None}

    def announcement(self, server: State) -> Message:
        """The old model with the classes that it was trained on."""
        old = server["old"]
        if old is None:
            return {}
        parts = {name: old[name] for name in self.shared_vectors()}
        parts["classes"] = pack_bits(old["classes"])
        return {OLD + name: part for name, part in parts.items()}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The mean of the models, and the best model of the experience so far."""
        monitor = self.extended_monitor(server, replies, log)
        state = super().aggregate({**server, "monitor": monitor}, replies, log)
        if not self.params.old_weight:
            return state
        state["best"] = self.better_model(state, server, log)
        ended = state["round"] % self.runtime.training.rounds == 0
        return {**state, "old": state["best"]} if ended else state

    def better_model(self, state: State, before: State, log: Log) -> State:
        """The new global model or the best one of this experience, whichever is more accurate.

        The comparison starts anew with each experience and with every extension of the monitor.
        """
        accuracy = log.numbers["proxy accuracy"] = self.monitor_accuracy(state)
        round_ = before["round"] % self.runtime.training.rounds
        extended = state["monitor"] is not before["monitor"]
        start = extended or round_ < max(1, self.params.proxy_init)
        best: State = before["best"]
        if not start and best["accuracy"] > accuracy:
            return best
        names = ("parameters", "buffers", "classes")
        return {**{name: state[name] for name in names}, "accuracy": accuracy}

    def monitor_accuracy(self, state: State) -> float:
        """The global model's accuracy on the reconstructed images; 0 if there are none."""
        images, labels = state["monitor"]["images"], state["monitor"]["labels"]
        if not len(labels):
            return 0.0
        self.model.load(state["parameters"], state["buffers"])
        return float((self.runtime.outputs(images).argmax(1) == labels).double().mean())

    def extended_monitor(self, server: State, replies: list[Reply], log: Log) -> State:
        """The images reconstructed in this experience, with those of the gradients received now."""
        received = [r.message["gradients"] for r in replies if "gradients" in r.message]
        monitor: State = server["monitor"]
        if not received:
            return monitor
        with log.clock("reconstruction"):
            images, labels = self.reconstructed(server, torch.cat(received), log)
        experience = server["round"] // self.runtime.training.rounds
        if monitor["experience"] == experience:
            images = torch.cat([monitor["images"], images])
            labels = torch.cat([monitor["labels"], labels])
        return {"images": images, "labels": labels, "experience": experience}

    def reconstructed(self, server: State, gradients: Tensor, log: Log) -> tuple[Tensor, Tensor]:
        """Images with these gradients, and their labels.  # uint8 [n, C, H, W], [n]"""
        finite = gradients.isfinite().all(1)
        log.events += [NOT_FINITE] * int((~finite).sum())
        gradients, encoder = gradients[finite].to(self.runtime.device), self.encoder(server["seed"])
        labels = encoder.recover_labels(gradients)
        grey = torch.full((len(labels), *self.runtime.shape), 0.5, device=self.runtime.device)
        parts = [
            reconstruct(encoder, g, y, x, self.params.recon_steps)
            for g, y, x in zip(
                gradients.split(CHUNK), labels.split(CHUNK), grey.split(CHUNK), strict=True
            )
        ]
        images, left = (torch.cat(part) for part in zip(*parts, strict=True))
        log.numbers["reconstruction error"] = float(left.mean())
        return images.clamp(0, 1).mul(255).round().to("cpu", torch.uint8), labels.cpu()

    def encoder(self, seed: int) -> GradientEncoder:
        """The public encoder of a run."""
        return GradientEncoder(self.runtime.shape, self.runtime.classes, seed, self.runtime.device)

    def memory_samples(self, server: State, client: State, count: int) -> dict[str, Tensor]:
        """The first `count` reconstructed images of each class, with their labels."""
        monitor = server["monitor"]
        indices = first_per_class(monitor["labels"], count)
        return {name: monitor[name][indices] for name in ("images", "labels")}

    # --- a client

    def upload(self, client_round: ClientRound) -> Message:
        """The trained model and, where there is a signal, the gradients of the prototypes."""
        message, params = super().upload(client_round), self.params
        asked = params.proxy == "dlg" and params.old_weight and client_round.scratch["signal"]
        if not asked or not len(client_round.indices):
            return message
        with client_round.log.clock("prototypes"):
            images, labels = self.perturbed_prototypes(client_round)
            gradients = self.encoder(client_round.seed).gradients(images, labels)
        return {**message, "gradients": gradients.cpu()}

    def perturbed_prototypes(self, client_round: ClientRound) -> tuple[Tensor, Tensor]:
        """The image of each class nearest to its mean feature, perturbed, and the classes.

        SGD on its pixels lowers its loss under the trained model. Values are about 0 to 1.
        """
        runtime, indices = self.runtime, client_round.indices
        images, labels = runtime.dataset.x_train[indices], runtime.dataset.y_train[indices]
        features = self.normalised_features(images)
        means, classes = class_means(features, labels)
        distances = torch.cdist(means, features)  # [classes, n]
        nearest = distances.masked_fill(classes[:, None] != labels, torch.inf).argmin(1)
        pixels, classes = images[nearest].to(runtime.device) / 255, classes.to(runtime.device)
        module = runtime.model.module.eval()
        for _ in range(self.params.perturb_steps):
            pixels.requires_grad_()
            logits = module(runtime.normalise(255 * pixels))
            loss = self.label_losses(client_round, logits, classes).sum()
            slope = torch.autograd.grad(loss, pixels)[0]
            pixels = pixels.detach() - self.params.perturb_lr * slope
        return pixels, classes

    def normalised_features(self, images: Tensor) -> Tensor:
        """Features of length 1, by the live model in evaluation mode.  # [n, D]"""
        return F.normalize(self.runtime.outputs(images, self.classifier.encode))

    @abstractmethod
    def label_losses(self, client_round: ClientRound, logits: Tensor, labels: Tensor) -> Tensor:
        """The method's loss of each image's label, by which prototypes are perturbed.  # [n]"""
