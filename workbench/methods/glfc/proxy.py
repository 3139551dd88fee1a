"""A proxy server: it chooses an old model by images that it reconstructs from gradients."""

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid
from stamp_core.config.limits import NonNegative, NonNegativeInt
from stamp_core.methods.base.method import FedAvgParams, Log, Message, Reply, State
from workbench.methods.base.task_server import TaskServer, pack_bits
from workbench.methods.glfc.gradients import GradientEncoder, reconstruct

CHUNK = 64  # images that are reconstructed side by side: more would take too much memory
OLD = "old "  # of the parts of an announcement that make up the old model
NOT_FINITE = "proxy: a gradient is not finite"


@dataclass(frozen=True)
class ProxyParams(FedAvgParams):
    """How the old model is chosen; with an `old_weight` of 0 nothing of this is done."""

    old_weight: NonNegative = 0.5  # of the loss that uses the old model; LGA: 1
    proxy: Literal["dlg", "none"] = "dlg"  # none: the old model is a task's last, not its best
    # rounds of a task in which the latest model counts as the best; LGA: 6
    proxy_init: NonNegativeInt = 0
    perturb_steps: NonNegativeInt = 50  # of SGD on a prototype before its gradient is taken
    perturb_lr: NonNegative = 0.2  # a tenth of the published learning rate of 2
    recon_steps: NonNegativeInt = 5000  # of L-BFGS; published: 250 of 20 inner steps each


class Monitor(TypedDict):
    """The images reconstructed in an experience."""

    images: Tensor  # uint8 [n, C, H, W]
    labels: Tensor  # int64 [n]
    experience: int


class BestModel(TypedDict):
    """The global model that was the most accurate one on the reconstructed images."""

    parameters: Tensor
    buffers: Tensor
    classes: Tensor  # bool [L], reported by then
    accuracy: float


class ProxyServer(TaskServer):
    """A server that announces the most accurate model on images it has reconstructed."""

    def __init__(self, params: Any, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        if runtime.has_features and params.proxy == "dlg" and params.old_weight:
            raise invalid(
                "proxy", params.proxy, "'none': no images are made where data are features"
            )

    def init_server(self, seed: int) -> State:
        server: State = super().init_server(seed)
        images, labels = self.runtime.dataset.x_train[:0].clone(), torch.empty(0).long()
        server["monitor"] = Monitor(images=images, labels=labels, experience=0)
        server["best"] = None  # of the running experience so far
        server["old"] = None  # of the experience before
        return server

    def announcement(self, server: State) -> Message:
        if (old := server["old"]) is None:
            return {}
        message = {OLD + name: old[name] for name in self.shared_vectors()}
        return {**message, OLD + "classes": pack_bits(old["classes"])}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        monitor = self.extended_monitor(server, replies, log)
        state: State = super().aggregate({**server, "monitor": monitor}, replies, log)
        if not self.params.old_weight:
            return state
        state["best"] = self.better_model(state, server, log)
        return {**state, "old": state["best"]} if self.is_between(state) else state

    def better_model(self, state: State, before: State, log: Log) -> BestModel:
        """The more accurate of the new model and this experience's best; anew with each monitor."""
        accuracy = self.monitor_accuracy(state)
        log.numbers["proxy accuracy"] = accuracy
        round_ = before["round"] % self.runtime.training.rounds
        extended = state["monitor"] is not before["monitor"]
        best: BestModel | None = before["best"]
        compares = best and not extended and round_ >= max(1, self.params.proxy_init)
        if best and compares and best["accuracy"] > accuracy:
            return best
        return {
            "parameters": state["parameters"],
            "buffers": state["buffers"],
            "classes": state["classes"],
            "accuracy": accuracy,
        }

    def monitor_accuracy(self, state: State) -> float:
        images = state["monitor"]["images"]
        labels = state["monitor"]["labels"]
        if not len(labels):
            return 0.0
        self.model.load(state["parameters"], state["buffers"])
        return float((self.runtime.outputs(images).argmax(1) == labels).double().mean())

    def extended_monitor(self, server: State, replies: list[Reply], log: Log) -> Monitor:
        received = [r.message["gradients"] for r in replies if "gradients" in r.message]
        monitor: Monitor = server["monitor"]
        if not received:
            return monitor
        with log.clock("reconstruction"):
            images, labels = self.reconstructed(server["seed"], torch.cat(received), log)
        experience = server["round"] // self.runtime.training.rounds
        if monitor["experience"] == experience:
            images = torch.cat([monitor["images"], images])
            labels = torch.cat([monitor["labels"], labels])
        return {"images": images, "labels": labels, "experience": experience}

    def reconstructed(self, seed: int, gradients: Tensor, log: Log) -> tuple[Tensor, Tensor]:
        """Images with these gradients, and their labels.  # uint8 [n, C, H, W], [n]"""
        finite = gradients.isfinite().all(1)
        log.events += [NOT_FINITE] * int((~finite).sum())
        gradients = gradients[finite].to(self.runtime.device)
        encoder = self.encoder(seed)
        labels = encoder.recover_labels(gradients)
        grey = torch.full((len(labels), *self.runtime.shape), 0.5, device=self.runtime.device)
        chunks = zip(gradients.split(CHUNK), labels.split(CHUNK), grey.split(CHUNK), strict=True)
        parts = [reconstruct(encoder, *chunk, self.params.recon_steps) for chunk in chunks]
        images, left = (torch.cat(part) for part in zip(*parts, strict=True))
        log.numbers["reconstruction error"] = float(left.mean())
        return images.clamp(0, 1).mul(255).round().to("cpu", torch.uint8), labels.cpu()

    def encoder(self, seed: int) -> GradientEncoder:
        return GradientEncoder(self.runtime.shape, self.runtime.classes, seed, self.runtime.device)

    def remembered(self, server: State, client: Any) -> Any:
        monitor = server["monitor"]
        return monitor if len(monitor["labels"]) else client["memory"]
