"""What one process works with: the pictures, the one live model, batches and scores."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stamp_core import rows
from stamp_core.config import Setting, Training
from stamp_core.data import ImageSet
from stamp_core.models import Classifier, Shape, build, train_mode
from stamp_core.records import SCORINGS
from stamp_core.seeding import generator
from stamp_core.split import Plan
from stamp_core.vectors import FlatModel

CHUNK = 512  # pictures of up to 32 x 32 pixels per forward pass in evaluation; of larger fewer
SHARE = 4  # training pictures stay on the GPU if they take at most a quarter of what is free there


@dataclass(frozen=True)
class Visit:
    """One client's turn: who, at which step of its sequence, in which of the step's rounds."""

    seed: int
    client: int
    step: int
    round: int
    last: bool = False  # the last round of the step

    def generator(self, purpose: str) -> torch.Generator:
        """Fresh randomness for one purpose of this visit."""
        return generator(self.seed, self.client, self.step, self.round, purpose)


class Workspace:
    """Pictures and model of one setting on one device; methods of any seed take turns in it."""

    def __init__(self, setting: Setting, images: ImageSet, device: str = "cpu") -> None:
        self.setting, self.images, self.device = setting, images, torch.device(device)
        self.shape: Shape = tuple(images.x_train.shape[1:])
        self.classes = len(images.classes)
        self.classifier = self.network(seed=0).to(self.device)
        self.model = FlatModel(self.classifier)  # the same one, as vectors
        self.base = sum(p.numel() for p in self.classifier.encoder.parameters())  # then the head
        self.untrained = self.model.buffers.clone()  # what batch normalisation starts from
        self.chunk = chunk(self.shape, setting.network.at_once)
        home = home_of(images.x_train, self.device)
        self.x_train, self.y_train = images.x_train.to(home), images.y_train.to(home)
        self.found: dict[tuple[str, int, int], Tensor] = {}  # test pictures, by plan and task
        self.scale = (1 / (255 * images.std)).view(-1, 1, 1).to(self.device)
        self.offset = (images.mean / images.std).view(-1, 1, 1).to(self.device)

    def network(self, seed: int) -> Classifier:
        """The setting's network with the initial weights of `seed`."""
        return build(self.setting.network, self.shape, self.classes, seed)

    def layers(self) -> list[int]:
        """How many parameters each block has where matching goes layer by layer."""
        return rows.layers([p.numel() for p in self.model.module.parameters()])

    def normalise(self, pictures: Tensor) -> Tensor:
        """uint8 pictures as floats with mean 0 and deviation 1 a channel."""  # [N, C, H, W]
        floats = pictures.to(self.device, torch.float32, memory_format=torch.channels_last)
        return floats.mul_(self.scale).sub_(self.offset)

    def examples(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Training pictures and their labels, on the device.  # uint8 [n, C, H, W], [n]"""
        return self.of(self.x_train, self.y_train, places)

    def of(self, pictures: Tensor, labels: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Some of `pictures` and of their labels, wherever these are, on the device."""
        places = places.to(pictures.device)
        return pictures[places].to(self.device), labels[places].to(self.device)

    def batches(self, visit: Visit, indices: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The visit's epochs over the training pictures `indices`, in batches."""
        return self.epochs(visit, self.x_train, self.y_train, indices)

    def epochs(
        self, visit: Visit, pictures: Tensor, labels: Tensor, indices: Tensor, of: str = ""
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The visit's epochs over some of `pictures`, in batches; `of` names what they are."""
        training = self.setting.training
        if not len(indices):  # which `split` would make one empty batch of
            return
        order, change = visit.generator("order" + of), visit.generator("augment" + of)
        for _ in range(training.epochs):
            shuffled = indices[torch.randperm(len(indices), generator=order)].to(pictures.device)
            for batch in shuffled.split(training.batch):
                chosen, known = self.of(pictures, labels, batch)
                yield self.normalise(augment(chosen, training, change)), known

    def train_mode(self, pictures: int) -> None:
        """Make the live module ready for a training step on a batch of so many pictures.

        Batch normalisation uses what it has gathered where it is frozen, and on a single picture,
        which has no spread of its own.
        """
        gathers = pictures > 1 and self.setting.training.buffers != "frozen"
        train_mode(self.classifier, gathers)

    @torch.no_grad()
    def outputs(self, pictures: Tensor, layer: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """What the live model (or one layer of it) gives for uint8 pictures, in evaluation mode."""
        module = self.model.module.eval()
        chunks = [(layer or module)(self.normalise(part)) for part in pictures.split(self.chunk)]
        return torch.cat(chunks).cpu()  # [N, classes]

    def score(self, plan: Plan, clients: list[int], step: int) -> Tensor:
        """The live model's share of right answers.  # [scorings, U, T], nan where undefined"""
        tests = {
            (row, task): self.tests(plan, clients[row], task)
            for row in range(len(clients))
            for task in range(plan.tasks)
        }
        needed = torch.cat(list(tests.values())).unique()
        logits = torch.empty(len(self.images.y_test), self.classes)
        for part in needed.split(self.chunk):  # of a large set never all pictures at once
            logits[part] = self.outputs(self.images.x_test[part])
        scores = torch.full((len(SCORINGS), len(clients), plan.tasks), torch.nan)
        for (row, task), test in tests.items():
            own, seen = plan.clients[clients[row]][task].classes, plan.seen(clients[row], step)
            for place, allowed in enumerate((range(self.classes), seen, own)):  # as in SCORINGS
                if len(test) and set(own) <= set(allowed):  # a task to come is not seen yet
                    scores[place, row, task] = self.share(logits, test, allowed)
        return scores

    def tests(self, plan: Plan, client: int, task: int) -> Tensor:
        """The test pictures of a client's task, looked up once.  # [n]"""
        key = (plan.hash, client, task)
        if key not in self.found:
            self.found[key] = plan.test_indices(self.images, client, task)
        return self.found[key]

    def share(self, logits: Tensor, test: Tensor, classes: Sequence[int]) -> float:
        """The share of right answers on `test` where only `classes` may be answered."""
        allowed = torch.tensor(classes)
        answers = allowed[logits[test][:, allowed].argmax(1)]
        return float((answers == self.images.y_test[test]).double().mean())


def chunk(shape: Shape, at_once: int | None) -> int:
    """How many pictures of a shape are evaluated at a time."""
    many = max(1, min(CHUNK, CHUNK * 32 * 32 // (shape[1] * shape[2])))
    return min(many, at_once or many)


def home_of(pictures: Tensor, device: torch.device) -> torch.device:
    """Where training pictures are kept: on the device if there is room, else where they are."""
    if device.type != "cuda":
        return device
    free, _ = torch.cuda.mem_get_info(device)
    return device if SHARE * pictures.numel() <= free else pictures.device


def augment(pictures: Tensor, training: Training, draw: torch.Generator) -> Tensor:
    """Pictures shifted (edges repeated) and mirrored at random, each on its own."""
    n, _, height, width = pictures.shape
    if training.flip:
        mirrored = torch.randint(2, (n, 1, 1, 1), generator=draw).bool().to(pictures.device)
        pictures = torch.where(mirrored, pictures.flip(3), pictures)
    if training.shift:
        by = torch.randint(-training.shift, training.shift + 1, (2, n, 1), generator=draw)
        by = by.to(pictures.device)
        ys = (torch.arange(height, device=by.device) + by[0]).clamp(0, height - 1)  # [N, H]
        xs = (torch.arange(width, device=by.device) + by[1]).clamp(0, width - 1)  # [N, W]
        each = torch.arange(n, device=by.device)[:, None, None]
        moved = pictures.permute(0, 2, 3, 1)[each, ys[:, :, None], xs[:, None, :]]
        pictures = moved.permute(0, 3, 1, 2)
    return pictures


def first_of_each(labels: Tensor, count: int) -> Tensor:
    """Indices of the first `count` pictures of each class, rising.  # [n]"""
    places = [(labels == label).nonzero().flatten()[:count] for label in labels.unique()]
    found: Tensor = torch.cat([labels[:0], *places]).sort().values
    return found
