"""What a client remembers: pictures of each class that it has met, and how many there were."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stamp_core.config import above, at_least
from stamp_core.coresets import Candidates, get, prototype
from stamp_core.coresets.mixstyle import mixstyle, shares

# "pictures" uint8 [M, C, H, W], "labels" int64 [M], "tasks" int64 [M] where each came from,
# "seen" int64 [classes] training pictures of each class met so far
Memory = dict[str, Tensor]


@dataclass(frozen=True)
class Keep:
    """What is kept of a class, and what becomes of it when the class is met again."""

    rule: str = "herding"  # a file of stamp_core/coresets
    per_class: int = 20  # the most pictures kept of a class
    # Old pictures take the style of new ones | new pictures replace them | the rule takes of both.
    merge: Literal["mixstyle", "replace", "reselect"] = "mixstyle"
    alpha: float = 0.1  # of MixStyle's Beta
    # Where MixStyle works: on the pictures at a merge | on features in training | nowhere.
    space: Literal["image", "feature", "off"] = "image"

    def __post_init__(self) -> None:
        """Refuse unknown rules and impossible numbers."""
        get(self.rule)
        at_least(self, 0, "per_class")
        above(self, 0, "alpha")


@dataclass(frozen=True, eq=False)
class Stock:
    """Pictures of one class, the tasks they came from and their features."""

    pictures: Tensor  # uint8 [n, C, H, W]
    tasks: Tensor  # int64 [n]
    features: Tensor  # [n, D]

    def __len__(self) -> int:
        """How many pictures there are."""
        return len(self.tasks)

    def __getitem__(self, places: Tensor | slice) -> "Stock":
        """Some of the pictures."""
        return Stock(self.pictures[places], self.tasks[places], self.features[places])

    def __add__(self, other: "Stock") -> "Stock":
        """These pictures and then the others."""
        return Stock(
            torch.cat([self.pictures, other.pictures]),
            torch.cat([self.tasks, other.tasks]),
            torch.cat([self.features, other.features]),
        )


def empty(like_pictures: Tensor, classes: int) -> Memory:
    """A memory of nothing, ready for pictures of this shape."""
    return {
        "pictures": like_pictures[:0].clone(),
        "labels": torch.empty(0, dtype=torch.int64),
        "tasks": torch.empty(0, dtype=torch.int64),
        "seen": torch.zeros(classes, dtype=torch.int64),
    }


def of_task(memory: Memory, task: int) -> Tensor:
    """Which pictures came from one task.  # [m]"""
    return (memory["tasks"] == task).nonzero().flatten()


def past(memory: Memory, task: int) -> list[int]:
    """The tasks that pictures came from, rising, without `task`."""
    found: list[int] = memory["tasks"].unique().tolist()
    return [each for each in found if each != task]


def size(memory: Memory) -> int:
    """The bytes of all pictures: what remembering costs."""
    return int(memory["pictures"].nbytes)


def update(
    memory: Memory,
    label: int,
    task: int,
    pictures: Tensor,
    features: Tensor,
    kept_features: Tensor,
    options: Keep,
    draw: torch.Generator,
) -> Memory:
    """The memory after a visit with these pictures of the class `label`, all that `task` has.

    `kept_features` are those of the pictures of the class that are remembered, in their order.
    A class fills up while it has fewer than `per_class` pictures: later tasks add to what an
    earlier, smaller one has left. Whatever is remembered is only ever dropped for something new.
    """
    if not len(pictures):
        return memory
    mine = memory["labels"] == label
    old = Stock(memory["pictures"][mine], memory["tasks"][mine], kept_features)
    new = Stock(pictures, torch.full((len(pictures),), task), features)
    revised = merged(old, new, int(memory["seen"][label]), options, draw)
    labels = torch.full_like(revised.tasks, label)
    seen = memory["seen"].clone()
    seen[label] += len(pictures)
    return {
        "pictures": torch.cat([memory["pictures"][~mine], revised.pictures]),
        "labels": torch.cat([memory["labels"][~mine], labels]),
        "tasks": torch.cat([memory["tasks"][~mine], revised.tasks]),
        "seen": seen,
    }


def merged(old: Stock, new: Stock, seen: int, options: Keep, draw: torch.Generator) -> Stock:
    """What is remembered of a class: at most `per_class` of its old and its new pictures.

    A task met again brings the same pictures, which are neither added nor chosen from twice.
    """
    nothing = torch.zeros(new.features.shape[1], dtype=torch.float64)
    kept = prototype(old.features, nothing, 0)
    target = prototype(new.features, kept, seen if len(old) else 0)
    again = old.tasks == new.tasks[0]
    if options.merge == "reselect":
        return picked(old[~again] + new, target, nothing, options, draw)
    if options.merge == "replace":
        picks = picked(new, target, nothing, options, draw)
        return (picks + old[~again])[: options.per_class]
    picks = picked(new, target, kept, options, draw)
    added = picks[:0] if again.any() else picks
    return (restyled(old, picks, options, draw) + added)[: options.per_class]


def picked(
    stock: Stock, target: Tensor, beside: Tensor, options: Keep, draw: torch.Generator
) -> Stock:
    """What the rule chooses to stand for `target`, next to pictures whose mean is `beside`."""
    among = (stock.pictures, stock.features)
    return stock[get(options.rule)(Candidates(*among, target, beside, options.per_class, draw))]


def restyled(old: Stock, picks: Stock, options: Keep, draw: torch.Generator) -> Stock:
    """The old pictures, each in the style of a random pick; as they are unless space is "image"."""
    if options.space != "image" or not len(old):
        return old
    pairs = torch.randperm(len(picks), generator=draw)
    pairs = pairs[torch.arange(len(old)) % len(pairs)]  # all picks before one comes again
    share = shares(len(pairs), draw, options.alpha)
    return Stock(mixstyle(old.pictures, picks.pictures[pairs], share), old.tasks, old.features)
