"""What one process works with: the images, the live model, batches and steps, outputs."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.batches import Batch, StepContext, apply_changes, draw_batches
from stamp_core.client.by_class import averaging_matrix, first_per_class
from stamp_core.client.graphs import Step, new_step_graphs
from stamp_core.config.decode import invalid
from stamp_core.config.schema import Setting
from stamp_core.core.devices import set_deterministic, storage_device, weights_format
from stamp_core.core.seeding import generator
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.plan import Plan
from stamp_core.models.encoders import Shape
from stamp_core.models.flat import FlatModel, FlatSGD, layer_blocks, weighted_average
from stamp_core.models.networks import Classifier, build_network, set_train_mode
from stamp_core.results.records import PIXEL_SCORINGS, SCORINGS

EVALUATION_BATCH = 512  # images per forward pass in evaluation, at most,
EVALUATION_PIXELS = 128 * 32 * 32  # and of so many pixels: more leave the cache of a CPU
MEAN_IMAGES = 100  # of a class, at most, in its mean feature; of many classes fewer,
ALL_MEAN_IMAGES = 2000  # so that there are at most as many of all together,
LEAST_MEAN_IMAGES = 20  # but not fewer than these of a class
FLOATS = 2**22  # values of images that are normalised once, not in every batch


@dataclass(frozen=True)
class RoundId:
    """The address of a client round: run, client, experience, round of the experience."""

    seed: int
    client: int
    experience: int
    round: int
    last: bool = False  # whether it is the experience's last round

    def generator(self, purpose: str) -> torch.Generator:
        """A fresh random generator for one purpose of this client round."""
        return generator(self.seed, self.client, self.experience, self.round, purpose)


class ClientRuntime:
    """The images and the live model of one setting on one device, shared by all seeds' rounds."""

    def __init__(self, setting: Setting, dataset: ImageDataset, device: str = "cpu") -> None:
        self.setting = setting
        self.dataset = dataset
        self.device = torch.device(device)
        self.training = setting.training
        set_deterministic(self.device)
        self.shape: Shape = dataset.shape
        self.has_features = self.shape[0] not in (1, 3)  # of an encoder: neither grey nor coloured
        self.classes = len(dataset.classes)
        self.scorings = PIXEL_SCORINGS if dataset.masks else SCORINGS
        check_masks(setting, dataset)
        self.classifier = self.network(seed=0).to(self.device)
        self.model = FlatModel(self.classifier)  # the same network as flat vectors
        self.rates = [self.training.lr_in(round_) for round_ in range(self.training.rounds)]
        self.lr = self.training.lr  # of the running round, and as a tensor where it changes
        constant = self.training.schedule == "constant"
        self.scheduled = None if constant else torch.tensor(self.lr).to(self.device)  # []
        self.sgd = self.new_sgd(self.model)  # of local training, restarted for each
        self.graphs = new_step_graphs(self.device, self.classifier)  # None: each step is taken
        # The encoder's parameters come first in the flat vector, then the head's.
        self.encoder_size = sum(p.numel() for p in self.classifier.encoder.parameters())
        self.untrained = self.model.buffers.clone()  # batch normalisation's initial statistics
        self.chunk = evaluation_batch_size(self.shape)
        dense = setting.network.kind == "mlp"  # which would copy other images to flatten them
        self.format = torch.contiguous_format if dense else torch.channels_last
        storage = storage_device(dataset.x_train, self.device)
        self.x_train = dataset.x_train.to(storage)
        self.y_train = dataset.y_train.to(storage)
        self.scale = (1 / (255 * dataset.std)).view(-1, 1, 1).to(self.device)
        self.offset = (dataset.mean / dataset.std).view(-1, 1, 1).to(self.device)
        self.x_test = dataset.x_test.to(storage_device(dataset.x_test, self.device))
        self.y_test = dataset.y_test.to(self.device)
        self._tests: dict[tuple[str, int, int], Tensor] = {}  # by plan, client and task

    def network(self, seed: int) -> Classifier:
        """The setting's network with the initial weights of `seed`, in memory as on the device."""
        outputs = self.classes + self.dataset.masks  # the last one for pixels of no class
        network = build_network(self.setting.network, self.shape, outputs, seed)
        network.to(memory_format=weights_format(self.device))  # type: ignore[call-overload]
        return network

    def new_sgd(self, model: FlatModel) -> FlatSGD:
        return FlatSGD(model, self.training, self.scheduled)

    def start_round(self, round_: int) -> None:
        self.lr = self.rates[round_]
        if self.scheduled is not None:
            self.scheduled.fill_(self.lr)

    def layers(self) -> list[int]:
        """The sizes of the parameter blocks for layer-wise matching."""
        return layer_blocks([p.numel() for p in self.model.module.parameters()])

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 images, without masks, with mean 0 and deviation 1 a channel.  # [N, C, H, W]"""
        images = images[:, : self.shape[0]]
        floats = images.to(self.device, torch.float32, memory_format=self.format)
        return floats.mul_(self.scale).sub_(self.offset)

    def train_images(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Training images and their targets, on the device.  # uint8 [n, C, H, W], [n]"""
        indices = indices.to(self.x_train.device)
        images, labels = self.x_train[indices].to(self.device), self.y_train[indices]
        return images, self.targets(images, labels.to(self.device))

    def targets(self, images: Tensor, labels: Tensor) -> Tensor:
        """What the network is to predict for uint8 images: labels [n], or masks [n, H, W]."""
        return images[:, -1].long() if self.dataset.masks else labels

    def test_images(self, indices: Tensor) -> Tensor:
        """Test images, where they are stored.  # uint8 [n, C, H, W]"""
        return self.x_test[indices.to(self.x_test.device)]

    def average(self, vectors: list[Tensor], weights: list[float]) -> Tensor:
        """The weighted mean of vectors, computed on the device one after the other; on the CPU."""
        first, *others = vectors
        return weighted_average([first.to(self.device), *others], weights).cpu()

    # --- batches

    def batches(self, round_id: RoundId, indices: Tensor) -> Iterator[Batch]:
        return self.epochs(round_id, self.x_train, self.y_train, indices)

    def epochs(
        self, round_id: RoundId, images: Tensor, labels: Tensor, indices: Tensor, of: str = ""
    ) -> Iterator[Batch]:
        """The local epochs over some of `images`; `of` gives them randomness of their own."""
        order = round_id.generator("order" + of)
        batches = list[Tensor]()
        for _ in range(self.training.epochs if len(indices) else 0):  # of none, `split` is one
            shuffled = torch.randperm(len(indices), generator=order)
            batches += shuffled.split(self.training.batch_size)
        reader = BatchReader(self, images, labels, indices)
        return reader.batches(batches, round_id.generator("augment" + of))

    def endless_batches(self, round_id: RoundId, indices: Tensor, purpose: str) -> Iterator[Batch]:
        """Augmented batches of training images without end, in a new order each epoch."""
        draw = round_id.generator(purpose)
        reader = BatchReader(self, self.x_train, self.y_train, indices)
        while True:
            order = torch.randperm(len(indices), generator=draw)
            yield from reader.batches(order.split(self.training.batch_size), draw)

    def plain_batches(self, indices: Tensor, size: int) -> Iterator[Batch]:
        for part in indices.to(self.x_train.device).split(size) if len(indices) else ():
            images, labels = self.train_images(part)
            yield Batch(self.normalise(images), labels)

    def batch_sizes(self, images: int) -> list[int]:
        whole, rest = divmod(images, self.training.batch_size)
        return self.training.epochs * (whole * [self.training.batch_size] + [rest] * (rest > 0))

    # --- steps

    def load_received(self, message: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Load a received model, with the client's own statistics of normalisation if kept."""
        shared = message.get("buffers", self.untrained)
        self.model.load(message["parameters"], state.get("buffers", shared))

    def run_steps(
        self, step: Step, batches: Iterable[Batch], context: StepContext, graph_safe: bool = True
    ) -> list[Tensor]:
        """The losses of one SGD step for each batch, with a restarted optimiser."""
        self.sgd.restart()
        if self.graphs and graph_safe:
            step = partial(self.graphs.take, step)
        return list(map(step, batches, itertools.repeat(context)))

    def fit(self, batches: Iterable[Batch]) -> list[Tensor]:
        return self.run_steps(self.cross_entropy_step, batches, StepContext())

    def cross_entropy_step(self, batch: Batch, context: StepContext) -> Tensor:
        self.start_step(len(batch))
        loss = F.cross_entropy(self.model.module(batch.images), batch.targets)
        loss.backward()
        self.sgd.step()
        return loss.detach()

    def start_step(self, images: int) -> None:
        """Prepare the live model for the gradient of a batch of this many images."""
        self.train_mode(images)
        self.model.gradients.zero_()

    def train_mode(self, images: int) -> None:
        """Prepare the module for a step: norms are not updated if frozen, nor by a single image."""
        gathers = images > 1 and self.training.buffers != "frozen"
        set_train_mode(self.classifier, gathers)

    # --- evaluation

    @torch.no_grad()
    def outputs(self, images: Tensor, layer: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The outputs of the live model (or of `layer`) for uint8 images, on the CPU."""
        return self.outputs_there(images, layer).cpu()  # [N, classes]

    @torch.no_grad()
    def outputs_there(
        self, images: Tensor, layer: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """The same on the device, in evaluation mode."""
        module = self.model.module.eval()
        chunks = [(layer or module)(self.normalise(part)) for part in images.split(self.chunk)]
        return torch.cat(chunks)

    @cached_property
    def mean_images(self) -> tuple[Tensor, Tensor, Tensor]:
        """First images of each class [n], what averages them by class [L, n], the classes [L]."""
        count = max(LEAST_MEAN_IMAGES, ALL_MEAN_IMAGES // self.classes)
        indices = first_per_class(self.dataset.y_train, min(MEAN_IMAGES, count))
        matrix, classes = averaging_matrix(self.dataset.y_train[indices])
        stored = indices.to(self.x_train.device)
        return stored, matrix.to(self.device), classes.to(self.device)

    def tests(self, plan: Plan, client: int, task: int) -> Tensor:
        """Indices of the test images of a client's task, computed once.  # [n]"""
        key = (plan.hash, client, task)
        if key not in self._tests:
            self._tests[key] = plan.test_indices(self.dataset, client, task)
        return self._tests[key]


class BatchReader:
    """Reads batches of images[indices] with their targets: normalised, on the device.

    Without augmentation few images are normalised once: in every batch it would take an eighth of
    a small network's step. Images that are stored elsewhere go to the device at once if there is
    room. With `soft` and `tasks` of the chosen images, these are exemplars.
    """

    def __init__(
        self,
        runtime: ClientRuntime,
        images: Tensor,
        labels: Tensor,
        indices: Tensor,
        soft: Tensor | None = None,
        tasks: Tensor | None = None,
    ) -> None:
        self.runtime, self.soft, self.tasks = runtime, soft, tasks
        indices = indices.to(labels.device)  # once for both where they are in one place
        self.targets = labels[indices].to(runtime.device)
        if images.device != runtime.device:
            images = images[indices.to(images.device)]
            images = images.to(storage_device(images, runtime.device))
            indices = torch.arange(len(indices))
        self.images, self.indices = images, indices.to(images.device)
        self.here = images.device == runtime.device
        self.floats: Tensor | None = None
        augments = runtime.training.flip or runtime.training.shift > 0
        if not augments and len(indices) * math.prod(runtime.shape) <= FLOATS:
            chosen = images[self.indices]
            self.floats = runtime.normalise(chosen)
            self.targets = runtime.targets(chosen, self.targets).to(runtime.device)

    def batches(self, order: Iterable[Tensor], draw: torch.Generator) -> Iterator[Batch]:
        """The batches of an order, which may draw from the same generator as augmentation."""
        runtime = self.runtime
        for drawn in draw_batches(order, runtime.training, draw, runtime.device):
            index, targets = drawn.index, self.targets[drawn.index]
            soft = None if self.soft is None else self.soft[index]
            tasks = None if self.tasks is None else self.tasks[index]
            if self.floats is not None:
                images = self.floats[index]
            else:
                chosen = self.images[self.indices[index if self.here else drawn.index_cpu]]
                moved = apply_changes(chosen.to(runtime.device), drawn.mirrored, drawn.shifts)
                images, targets = runtime.normalise(moved), runtime.targets(moved, targets)
            yield Batch(images, targets, 0, soft, tasks)


def check_masks(setting: Setting, dataset: ImageDataset) -> None:
    """Refuse a network that does not fit the data set, and tasks that do not fit its masks."""
    kind, split = setting.network.kind, setting.split
    if (kind == "fcn") != dataset.masks:
        right = "'fcn', as the data have masks" if dataset.masks else "another: no masks are there"
        raise invalid("network.kind", kind, right)
    for name in ("shift", "flip"):
        if (value := getattr(setting.training, name)) and dataset.shape[1:] == (1, 1):
            raise invalid(f"training.{name}", value, "absent: it does nothing to 1 x 1 features")
    if not dataset.masks:
        return
    found = (split.kind, split.classes_per_task, split.cycles)
    if found != ("classes", 1, 1):
        right = "('classes', 1, 1), as a mask for training shows one class alone"
        raise invalid("split: kind, classes_per_task, cycles", found, right)
    for name in ("features", "memory"):  # no page shows maps of features or masks
        if value := getattr(setting.diagnostics, name):
            raise invalid(f"diagnostics.{name}", value, "0, as the data have masks")


def evaluation_batch_size(shape: Shape) -> int:
    """How many images of a shape are evaluated at once."""
    return max(1, min(EVALUATION_BATCH, EVALUATION_PIXELS // (shape[1] * shape[2])))
