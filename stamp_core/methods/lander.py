"""LANDER (Tran et al., 2024): images synthesised near the text embeddings of their classes."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid, require_at_least
from stamp_core.core import paths
from stamp_core.core.fingerprint import file_digest
from stamp_core.core.seeding import generator
from stamp_core.methods.base.inversion import BETAS, Inversion, InversionParams, Synthesis
from stamp_core.methods.base.method import ClientRound, Log, Message, Reply, State
from stamp_core.models.flat import FlatModel, FlatSGD
from stamp_core.models.generators import NoisyLabelGenerator, build_seeded
from stamp_core.models.inversion import MappedClassifier, Outputs

# Random anchors are as far from each other as the published ones of CIFAR-100: the mean square of
# the difference of two numbers is 0.081, so `radius` keeps its meaning.
ANCHOR_DEVIATION = math.sqrt(0.081 / 2)


@dataclass(frozen=True)
class LanderParams(InversionParams):
    """How images are synthesised and used; the defaults are those published for CIFAR-100."""

    kd: float = 0.4  # w_pre before it is balanced by the numbers of classes
    ce: float = 0.2  # w_cur before the same: the weight of new images where there is replay
    anchors: str = "random"  # or a .npy file in the folder of downloads, with a row per class
    anchor_features: int = 512  # of random anchors
    anchor_weight: float = 5.0  # of staying near the anchors, in training and in synthesis
    radius: float = 0.015  # mean squared distance to the anchors that has no loss
    images: int = 10000
    generator_steps: int = 40
    statistics_weight: float = 1.0
    warmup: int = 10  # the images of these rounds are not kept either
    student_steps: int = 50
    student_lr: float = 0.1
    student_weight_decay: float = 2e-4

    def __post_init__(self) -> None:
        """Refuse negative weights and anchors without numbers."""
        super().__post_init__()
        require_at_least(self, 0, "ce", "anchor_weight", "radius")
        require_at_least(self, 1, "anchor_features")

    def file_digests(self) -> dict[str, str]:
        """The sha256 of the file of anchors, on which numbers depend, if there is one."""
        random = self.anchors == "random"
        return {} if random else {"anchors": file_digest(anchors_path(self.anchors))}


def anchor_hinge(mapped: Tensor, anchors: Tensor, radius: float) -> Tensor:
    """By how much the mean squared distance of a batch exceeds the radius.  # of [N, A]"""
    return F.relu(F.mse_loss(mapped, anchors) - radius)


def balance(known: int, new: int) -> tuple[float, float]:
    """The factors of the losses of new and of past images, by the numbers of classes."""
    alpha = math.log2((known + new) / 2 + 1)
    beta = math.sqrt(known / (known + new))
    return (1 + 1 / alpha) / beta, alpha * beta


def anchors_path(name: str) -> Path:
    """The path of a file of anchors."""
    path = paths.RAW / name
    if not path.is_file():
        raise invalid("anchors", name, f"'random' or a file: there is none at {path}")
    return path


def read_anchors(name: str, classes: int) -> Tensor:
    """The first rows of a file in the folder of downloads, one per class.  # float16 [L, A]"""
    path = anchors_path(name)
    try:
        rows = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise invalid("anchors", name, f"a .npy file of numbers: {path} is not one") from error
    if rows.ndim != 2 or rows.dtype.kind not in "fiu":
        found = f"{rows.dtype} {list(rows.shape)}"
        raise invalid("anchors", name, f"a table of numbers, a row per class: {path} is {found}")
    if len(rows) < classes:
        right = f"a table with a row per class: {path} has {len(rows)} rows for {classes} classes"
        raise invalid("anchors", name, right)
    table = torch.from_numpy(rows[:classes].astype(np.float32)).half()
    if not table.isfinite().all():
        raise invalid("anchors", name, f"a table of finite numbers in float16: {path} is not")
    return table


class AnchoredSynthesis(Synthesis):
    """A generator whose inputs are anchors, through noisy layers that every round draws anew."""

    def __init__(self, method: Inversion, server: State, log: Log) -> None:
        super().__init__(method, server, log)
        self.first_saved = self.params.warmup
        self.anchor_weight: float = self.params.anchor_weight
        self.anchors = server["anchors"][self.classes].float().to(self.runtime.device)  # [K, A]

    def new_generator(self, server: State, *seed: int) -> nn.Module:
        """A generator whose inputs are anchors."""
        sizes = self.runtime.shape, self.params.latent, self.params.generator_width
        anchors = server["anchors"].shape[1], self.params.synthesis_batch_size
        return build_seeded(partial(NoisyLabelGenerator, *sizes, *anchors), *seed, "generator")

    def draw_targets(self, count: int) -> Tensor:
        """Labels as places in `classes`: all in turn, and for the rest random ones.  # [N]"""
        cycles, rest = divmod(count, len(self.classes))
        drawn = torch.randint(len(self.classes), (rest,), generator=self.draw)
        return torch.cat([torch.arange(len(self.classes)).repeat(cycles), drawn])

    def start_round(self, targets: Tensor) -> tuple[Tensor, torch.optim.Optimizer]:
        """The anchors of the labels, and a new optimiser after the noisy layers are drawn."""
        module = self.generator.module
        assert isinstance(module, NoisyLabelGenerator)
        module.redraw(self.draw)
        adam = torch.optim.Adam([self.generator.parameters], self.params.generator_lr, BETAS)
        return self.anchors[targets], adam

    def teacher_loss(self, teacher: Outputs, targets: Tensor) -> Tensor:
        """The loss on the labels and, for mapped features, on their anchors."""
        loss = super().teacher_loss(teacher, targets)
        return loss + self.anchor_weight * anchor_hinge(
            teacher[1], self.anchors[targets], self.params.radius
        )

    def student_loss(self, student: Outputs, teacher: Outputs) -> Tensor:
        """The student's divergence from the teacher, also in mapped features."""
        loss = super().student_loss(student, teacher)
        return loss + self.anchor_weight * F.mse_loss(student[1], teacher[1])


class Lander(Inversion):
    """FedAvg with anchors per class, near which a linear map brings features and images.

    The map is trained, sent and averaged with the model. Clients receive the anchors once.
    """

    Params: ClassVar = LanderParams
    fedavg_equivalent: ClassVar[dict[str, Any]] = {
        "kd": 0.0,
        "anchor_weight": 0.0,
        "ce_classes": "all",
    }
    synthesis = AnchoredSynthesis

    def __init__(self, params: LanderParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        random = params.anchors == "random"
        self.file = None if random else read_anchors(params.anchors, runtime.classes)

    # --- the server

    def init_server(self, seed: int) -> State:
        """The model, the map and the anchors, which no client has yet."""
        table = self.file
        if table is None:
            size = self.runtime.classes, self.params.anchor_features
            draw = generator(seed, "anchors")
            table = (ANCHOR_DEVIATION * torch.randn(size, generator=draw)).half()
        own = {"anchors": table, "map": FlatModel(self.feature_map(seed, "map")).parameters}
        return {**super().init_server(seed), **own, "holders": []}

    def feature_map(self, *seed: int | str) -> nn.Module:
        """A linear map from features to the space of the anchors."""
        width = self.params.anchor_features if self.file is None else self.file.shape[1]
        head = self.classifier.head
        assert isinstance(head, nn.Linear)
        return build_seeded(partial(nn.Linear, head.in_features, width), *seed)

    def teacher_vector(self, server: State) -> Tensor:
        """The parameters of the server's model and map.  # [P + M]"""
        return torch.cat([server["parameters"], server["map"]])

    def broadcast(self, server: State, client: int) -> Message:
        """The model and the map; the anchors, until the client has replied once."""
        message = {**super().broadcast(server, client), "map": server["map"]}
        held = client in server["holders"]
        return message if held else {**message, "anchors": server["anchors"]}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The mean of the models and of the maps."""
        holders = sorted({*server["holders"], *(reply.client for reply in replies)})
        server, trained = {**server, "holders": holders}, [r for r in replies if r.samples]
        if trained:
            weights = [float(reply.samples) for reply in trained]
            mean = self.runtime.average([reply.message["map"] for reply in trained], weights)
            server["map"] = torch.lerp(server["map"], mean, self.params.server_lr)
        return super().aggregate(server, replies, log)

    # --- a client

    def receive(self, client_round: ClientRound) -> None:
        """Load the received model and map; the map is trained by an SGD of its own."""
        super().receive(client_round)
        message, scratch = client_round.message, client_round.scratch
        live = FlatModel(self.feature_map().to(self.runtime.device))
        live.load(message["map"])
        scratch["map"], scratch["map's sgd"] = live, FlatSGD(live, self.runtime.training)
        scratch["network"] = MappedClassifier(self.classifier, live.module)
        held = client_round.state
        anchors: Tensor = held["anchors"] if "anchors" in held else message["anchors"]
        scratch["anchors"] = anchors.to(self.runtime.device, torch.float32)  # [L, A]

    def new_loss(self, client_round: ClientRound, outputs: Outputs, labels: Tensor) -> Tensor:
        """Cross-entropy and, for mapped features, the distance from the anchors."""
        loss = super().new_loss(client_round, outputs, labels)
        if not self.params.anchor_weight:
            return loss
        anchors, weight = client_round.scratch["anchors"][labels], float(self.params.anchor_weight)
        return loss + weight * anchor_hinge(outputs[1], anchors, self.params.radius)

    def distillation_loss(self, student: Outputs, teacher: Outputs, classes: Tensor) -> Tensor:
        """Distillation over past classes, and the distance of the mapped features."""
        loss = super().distillation_loss(student, teacher, classes)
        return loss + F.mse_loss(student[1], teacher[1])

    def loss_weights(self, client_round: ClientRound) -> tuple[float, float]:
        """The weights balanced by the numbers of classes in distillation and in the task."""
        known = len(client_round.scratch["kd classes"])
        own = client_round.plan.clients[client_round.client][client_round.task].classes
        new, past = balance(known, len(own))
        return self.params.ce * new, self.params.kd * past

    def correct_gradient(self, client_round: ClientRound) -> None:
        """Take the SGD step of the map."""
        client_round.scratch["map's sgd"].step()
        client_round.scratch["map"].gradients.zero_()

    def update_state(self, client_round: ClientRound) -> State:
        """The client's state with the anchors."""
        anchors = client_round.scratch["anchors"].cpu().half()
        return {**super().update_state(client_round), "anchors": anchors}

    def upload(self, client_round: ClientRound) -> Message:
        """The trained model and map."""
        trained = client_round.scratch["map"].parameters
        return {**super().upload(client_round), "map": trained.cpu().clone()}
