"""Gradients of a step that matches: one pass for all groups of a batch, or one for each."""

import statistics
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import Row, seconds, section, spread
from stamp_core.engine.experiment import load_experiment
from stamp_core.matching.gram import combine, gram
from stamp_core.matching.match import MatchingParams, match_gram
from stamp_core.models.flat import FlatModel, flatten_like
from stamp_core.models.group_gradients import group_gradients
from stamp_core.models.networks import build_network

REPEATS, STEPS = 7, 30
SIZES = [4, 4, 4, 4, 16]  # exemplars of four tasks, and new images
NETWORKS = {"glyphs": ((1, 14, 14), 20), "cifar100_c2_small": ((3, 32, 32), 100)}
MATCHING = MatchingParams(kappa=0.25, reference="weighted", length="free")


class Step:
    """The gradient of one batch, by the mean of its images or matched."""

    def __init__(self, setting: str) -> None:
        shape, classes = NETWORKS[setting]
        network = load_experiment(setting, "stamp").setting.network
        self.classifier = build_network(network, shape, classes, seed=0)
        self.model = FlatModel(self.classifier)
        self.images = torch.randn(sum(SIZES), *shape)
        self.targets = torch.randint(classes, (sum(SIZES),))

    def mean(self) -> None:
        """The gradient of replay."""
        for _ in range(STEPS):
            self.model.gradients.zero_()
            F.cross_entropy(self.classifier(self.images), self.targets).backward()

    def at_once(self) -> None:
        """The matched gradient from one pass."""
        for _ in range(STEPS):
            found = group_gradients(self.classifier, self.images, self.targets, SIZES)
            found.weighted(match_gram(found.gram(), MATCHING, torch.tensor(SIZES)).coefficients)

    def one_by_one(self) -> None:
        """The matched gradient from a pass for each group."""
        for _ in range(STEPS):
            parts = zip(self.images.split(SIZES), self.targets.split(SIZES), strict=True)
            vectors = [self.gradient(*part) for part in parts]
            result = match_gram(gram(vectors), MATCHING, torch.tensor(SIZES))
            combine(vectors, result.coefficients)

    def gradient(self, images: Tensor, targets: Tensor) -> Tensor:
        """The gradient of the mean loss of a group.  # [P]"""
        loss = F.cross_entropy(self.classifier(images), targets)
        return flatten_like(torch.autograd.grad(loss, self.model.tensors), self.model.tensors)


def measurements() -> Iterator[Row]:
    """Times by that of replay's gradient, in alternation."""
    for setting in NETWORKS:
        step = Step(setting)
        names = {"one pass": step.at_once, "a pass for each group": step.one_by_one}
        for name, function in names.items():
            function()  # warm-up
            ratios = [seconds(function) / seconds(step.mean) for _ in range(REPEATS)]
            yield f"matched, {name} / the mean, {setting}", spread(ratios)
        plain = statistics.median(seconds(step.mean) for _ in range(REPEATS)) / STEPS
        yield (
            f"the mean, {setting}",
            f"{1000 * plain:.2f} ms, {len(step.model.parameters):,} parameters",
        )


def table() -> list[str]:
    """The lines of the section."""
    note = "Gradient, Gram matrix, match and sum for 16 new images and exemplars of four tasks."
    return section("## A step that matches", note, measurements())
