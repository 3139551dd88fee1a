"""What a client remembers: pictures of each class that it has met, and how many there were."""

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from stamp_core.config import above, at_least, wrong
from stamp_core.coresets import Candidates, Proposal, get, options, proposes, prototype
from stamp_core.coresets.mixstyle import mixstyle, shares

# "pictures" uint8 [M, C, H, W], "labels" int64 [M], "tasks" int64 [M] where each came from,
# "soft" float32 [M, classes] logits of a teacher, or [M, 0] where labels are all there is,
# "seen" int64 [classes] training pictures of each class met so far
Memory = dict[str, Tensor]


@dataclass(frozen=True)
class Keep:
    """What is kept of a class, and what becomes of it when the class is met again."""

    rule: str = "herding"  # a file of stamp_core/coresets
    options: Mapping[str, Any] = field(default_factory=dict)  # of the rule; then its Options
    per_class: int = 20  # the most pictures kept of a class
    # Old pictures take the style of new ones | new pictures replace them | the rule takes of both.
    merge: Literal["mixstyle", "replace", "reselect"] = "mixstyle"
    alpha: float = 0.1  # of MixStyle's Beta
    # Where MixStyle works: on the pictures at a merge | on features in training | nowhere.
    space: Literal["image", "feature", "off"] = "image"

    def __post_init__(self) -> None:
        """Refuse unknown rules and impossible numbers."""
        at_least(self, 0, "per_class")
        above(self, 0, "alpha")
        if self.merge == "reselect" and proposes(self.rule):
            right = f"'mixstyle' or 'replace': {self.rule} looks at whole tasks"
            raise wrong("merge", self.merge, right)
        if not is_dataclass(self.options):
            object.__setattr__(self, "options", options(self.rule, self.options))

    @property
    def soft(self) -> bool:
        """Whether the rule labels its pictures with logits of a teacher."""
        return bool(getattr(self.options, "soft", False))


@dataclass(frozen=True, eq=False)
class Stock:
    """Pictures of one class, the tasks they came from, their soft labels and their features."""

    pictures: Tensor  # uint8 [n, C, H, W]
    tasks: Tensor  # int64 [n]
    soft: Tensor  # [n, classes or 0]
    features: Tensor  # [n, D]

    def __len__(self) -> int:
        """How many pictures there are."""
        return len(self.tasks)

    def __getitem__(self, places: Tensor | slice) -> "Stock":
        """Some of the pictures."""
        return Stock(*(part[places] for part in self.parts()))

    def __add__(self, other: "Stock") -> "Stock":
        """These pictures and then the others."""
        pairs = zip(self.parts(), other.parts(), strict=True)
        return Stock(*(torch.cat(pair) for pair in pairs))

    def parts(self) -> tuple[Tensor, ...]:
        """All that there is of the pictures."""
        return self.pictures, self.tasks, self.soft, self.features


def empty(like_pictures: Tensor, classes: int, soft: bool = False) -> Memory:
    """A memory of nothing, ready for pictures of this shape, and for soft labels."""
    return {
        "pictures": like_pictures[:0].clone(),
        "labels": torch.empty(0, dtype=torch.int64),
        "tasks": torch.empty(0, dtype=torch.int64),
        "soft": torch.empty(0, classes if soft else 0),
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
    """The bytes of all pictures and soft labels: what remembering costs."""
    return int(memory["pictures"].nbytes + memory["soft"].nbytes)


def of_class(proposal: Proposal, label: int, task: int, features: Tensor) -> Stock:
    """What a proposal has of one class of a task; `features` are those of its pictures."""
    mine = proposal.labels == label
    tasks = torch.full_like(proposal.labels[mine], task)
    return Stock(proposal.pictures[mine], tasks, proposal.soft[mine], features)


def update(
    memory: Memory,
    label: int,
    new: Stock,
    met: int,
    kept_features: Tensor,
    options: Keep,
    draw: torch.Generator,
) -> Memory:
    """The memory after a visit with `met` pictures of the class `label`, all that the task has.

    `new` is what of them, or made from them, may be remembered; `kept_features` are those of the
    pictures of the class that are remembered, in their order.
    A class fills up while it has fewer than `per_class` pictures: later tasks add to what an
    earlier, smaller one has left. Whatever is remembered is only ever dropped for something new.
    """
    if not len(new):
        return memory
    mine = memory["labels"] == label
    pictures, tasks, soft = (memory[name][mine] for name in ("pictures", "tasks", "soft"))
    old = Stock(pictures, tasks, soft, kept_features)
    revised = merged(old, new, int(memory["seen"][label]), options, draw)
    labels = torch.full_like(revised.tasks, label)
    seen = memory["seen"].clone()
    seen[label] += met
    return {
        "pictures": torch.cat([memory["pictures"][~mine], revised.pictures]),
        "labels": torch.cat([memory["labels"][~mine], labels]),
        "tasks": torch.cat([memory["tasks"][~mine], revised.tasks]),
        "soft": torch.cat([memory["soft"][~mine], revised.soft]),
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
    return replace(old, pictures=mixstyle(old.pictures, picks.pictures[pairs], share))
