"""SRe2L: moments and pictures by hand, the teacher and its answers, ranges, quotas, divergence."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stamp_core import checkpoint, config, coresets, models
from stamp_core.config import Network
from stamp_core.coresets import Task, memory, sre2l
from stamp_core.coresets.memory import Keep
from stamp_core.coresets.sre2l import Options
from stamp_core.learner import Learner
from stamp_core.models import Classifier
from stamp_core.vectors import flatten

CLASSES = 4
MLP = Network("mlp", features=6)
BATCH_NORM = Network("cnn", features=6, channels=(3,), norm="batch")
NETWORKS = {
    "mlp": MLP,
    "cnn": Network("cnn", features=6, channels=(3,)),
    "batch norm": BATCH_NORM,
    "group norm": Network("cnn", features=6, channels=(4,), norm="group"),
}
NO_NORM = "sre2l: no batch normalisation, no statistics to match"
NO_SQUEEZE = "sre2l: the squeeze did not lower the loss"
NO_NUMBERS = "sre2l: real pictures for made ones that are no numbers"
FAST = {"squeeze_epochs": 2, "batch": 3, "iterations": 6}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def to_unit(pictures: Tensor) -> Tensor:
    return pictures.float() / 255


def per_channel(pictures: Tensor) -> Tensor:
    """Channels of unlike mean and deviation."""
    channels = pictures.shape[1]
    mean, std = torch.tensor([0.2, 0.5, 0.7])[:channels], torch.tensor([0.5, 0.1, 0.3])[:channels]
    return (pictures.float() / 255 - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)


def learner(
    network: Network | Classifier = MLP,
    shape: tuple[int, int, int] = (1, 8, 8),
    normalise: Callable[[Tensor], Tensor] = to_unit,
) -> Learner:
    """Fresh weights of one seed; those that were learnt are of the next, and larger."""
    if isinstance(network, Classifier):
        made, learnt = network, copy.deepcopy(network)
    else:
        made, learnt = (models.build(network, shape, CLASSES, seed) for seed in (0, 1))
    buffers = [b for b in learnt.buffers() if b.is_floating_point()]
    weights = flatten(list(learnt.parameters())), flatten(buffers)
    return Learner(made, normalise, 2 * weights[0], weights[1])


def task(*sizes: int, per_class: int = 2, seed: int = 0, **options: Any) -> Task:
    """So many random pictures of the classes 0, 1, ...; the memory holds one more."""
    shape, network = options.pop("shape", (1, 8, 8)), options.pop("network", MLP)
    normalise = options.pop("normalise", to_unit)
    pictures = torch.randint(256, (sum(sizes) + 1, *shape), generator=generator(seed))
    pictures = pictures.to(torch.uint8)
    return Task(
        pictures[:-1],
        torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        (pictures[-1:], torch.tensor([CLASSES - 1])),
        per_class,
        Options(**{**FAST, **options}),
        learner(network, shape, normalise),
        generator(seed),
    )


def named(pictures: Tensor, labels: Tensor) -> set[tuple[bytes, int]]:
    """Each picture's bytes with its class."""
    several = zip(pictures, labels.tolist(), strict=True)
    return {(each.numpy().tobytes(), label) for each, label in several}


def halves(count: int) -> tuple[Tensor, Tensor]:
    """Noise whose left half is bright in class 0 and whose right half is in class 1."""
    pictures = torch.randint(60, (2 * count, 1, 8, 8), generator=generator(5))
    pictures[:count, :, :, :4] += 180
    pictures[count:, :, :, 4:] += 180
    return pictures.to(torch.uint8), torch.arange(2).repeat_interleave(count)


def two_norms(seed: int = 0) -> Classifier:
    """A network with two batch normalisations, registered in the other order than they work in."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh())
        more = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3 * 36), nn.Linear(3 * 36, 5))
        network = Classifier(Backwards(layers, more), 5, CLASSES)
        for norm in network.norms:
            nn.init.uniform_(norm.weight, 0.5, 2)
            assert norm.running_mean is not None and norm.running_var is not None
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.2, 3)
    return network.eval()


class Backwards(nn.Module):
    """Two parts, the second of which is registered first."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.second, self.first = second, first

    def forward(self, pictures: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(pictures))
        return found


def entering(network: Classifier, pictures: Tensor) -> list[Tensor]:
    """What enters the two batch normalisations, without hooks."""
    assert isinstance(network.encoder, Backwards)
    first, second = network.encoder.first, network.encoder.second
    assert isinstance(first, nn.Sequential) and isinstance(second, nn.Sequential)
    return [first[0](pictures), second[0](first(pictures))]


def gathered(network: Classifier) -> list[tuple[Tensor, Tensor]]:
    """The running means and variances of the two, in the order in which they work."""
    found = []
    for norm in network.norms[::-1]:
        assert norm.running_mean is not None and norm.running_var is not None
        found.append((norm.running_mean, norm.running_var))
    return found


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


# -------------------------------------------------------------------------------------- statistics


def gap(network: Classifier, pictures: Tensor) -> float:
    with torch.no_grad(), sre2l.entries(network) as seen:
        network(pictures)
        return float(sre2l.mismatch(seen))


def test_the_mismatch_is_its_formula() -> None:
    """Of each channel the biased variance and the mean, over pictures and places; the layer that
    is entered first counts ten times, whatever the order in which they are registered."""
    network, pictures = two_norms(), normal(7, 2, 8, 8)
    expected = 0.0
    for weight, x, (mean, variance) in zip(
        (10, 1), entering(network, pictures), gathered(network), strict=True
    ):
        channels = x.detach().double().numpy().swapaxes(0, 1).reshape(x.shape[1], -1)
        apart = channels.var(axis=1, ddof=0) - variance.numpy()
        expected += weight * np.sqrt((apart**2).sum())
        expected += weight * np.sqrt(((channels.mean(axis=1) - mean.numpy()) ** 2).sum())
    assert gap(network, pictures) == pytest.approx(expected, rel=1e-5)


def test_there_is_no_mismatch_on_a_batch_with_the_gathered_statistics() -> None:
    network, pictures = two_norms(), normal(7, 2, 8, 8)
    for place in (0, 1):  # what enters the second depends on what the first has gathered
        x = entering(network, pictures)[place].detach()
        mean, variance = gathered(network)[place]
        axes = [0, *range(2, x.dim())]
        mean.copy_(x.mean(axes))
        variance.copy_(x.var(axes, correction=0))
    assert gap(network, pictures) < 1e-5
    assert gap(network, pictures[:5]) > 1


def test_the_mismatch_of_no_layers_is_nothing() -> None:
    assert gap(models.build(MLP, (1, 8, 8), CLASSES, seed=0), normal(2, 1, 8, 8)) == 0


def test_the_gradient_of_the_mismatch_is_a_number_where_there_is_none() -> None:
    """A norm has no gradient at 0; a constant batch of the gathered mean and no variance is one."""
    norm = nn.BatchNorm2d(1)
    assert norm.running_var is not None
    norm.running_var.zero_()
    x = torch.zeros(2, 1, 3, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(sre2l.mismatch({norm: x}), x)
    assert not slope.any()


def test_nothing_listens_any_more_after_a_failure() -> None:
    network = two_norms()
    with pytest.raises(RuntimeError), sre2l.entries(network) as seen:
        network(normal(2, 2, 8, 8))
        assert len(seen) == 2
        network(normal(2, 5, 8, 8))
    assert not any(norm._forward_pre_hooks for norm in network.norms)


# ----------------------------------------------------------------------------------------- recover


def by_hand(given: Task, labels: Tensor) -> NDArray[np.float64]:
    """The iterations with Adam and its falling rate in numpy; pixels from 0 to 255, not rounded.

    m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, and x loses rate (1 + cos(pi t / T)) / 2 times
    m / (1 - b1^(t + 1)) over sqrt(v / (1 - b2^(t + 1))) + 1e-8 in iteration t = 0, 1, ... T - 1.
    """
    options, network, draw = given.options, given.learner.network, given.draw
    channels, height, width = given.pictures.shape[1:]
    black = torch.zeros(1, channels, height, width, dtype=torch.uint8)
    low, high = (given.learner.normalise(each).double().numpy() for each in (black, black + 255))
    x = torch.randn(len(labels), channels, height, width, generator=draw).double().numpy()
    down = torch.randint(min(options.roll, height // 8) + 1, (options.iterations,), generator=draw)
    right = torch.randint(min(options.roll, width // 8) + 1, (options.iterations,), generator=draw)
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, (i, j) in enumerate(zip(down.tolist(), right.tolist(), strict=True)):
        rolled = torch.tensor(np.roll(np.roll(x, i, axis=2), j, axis=3), requires_grad=True)
        answers = network(rolled.float())
        chosen = answers[torch.arange(len(labels)), labels]
        loss = (answers.logsumexp(1) - chosen).mean() + options.statistics * torch.tensor(0.0)
        for weight, entered, (mean, variance) in moments(network, rolled.float()):
            flat = entered.transpose(0, 1).flatten(1)
            spread = ((flat - flat.mean(1, keepdim=True)) ** 2).mean(1)
            apart = ((spread - variance) ** 2).sum() ** 0.5
            apart = apart + ((flat.mean(1) - mean) ** 2).sum() ** 0.5
            loss = loss + options.statistics * weight * apart
        slope = torch.autograd.grad(loss, rolled)[0].numpy()
        slope = np.roll(np.roll(slope, -i, axis=2), -j, axis=3)
        m, v = 0.5 * m + 0.5 * slope, 0.9 * v + 0.1 * slope**2
        rate = options.rate * (1 + np.cos(np.pi * t / options.iterations)) / 2
        x = x - rate * m / (1 - 0.5 ** (t + 1)) / (np.sqrt(v / (1 - 0.9 ** (t + 1))) + 1e-8)
        x = np.clip(x, low, high)
    found: NDArray[np.float64] = 255 * (x - low) / (high - low)
    return found


def moments(network: Classifier, x: Tensor) -> list[tuple[float, Tensor, tuple[Tensor, Tensor]]]:
    if not isinstance(network.encoder, Backwards):
        return []
    return list(zip((10.0, 1.0), entering(network, x), gathered(network), strict=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {"shape": (2, 8, 24), "roll": 2, "rate": 0.1, "iterations": 9},
        {"shape": (1, 16, 8), "roll": 9, "iterations": 2},
        {"shape": (2, 8, 8), "roll": 0, "iterations": 5, "rate": 2.0},
        {"shape": (2, 8, 8), "network": "two norms", "rate": 0.05, "statistics": 0.3},
    ],
    ids=["rolled", "tall", "clamped", "statistics"],
)
def test_the_pictures_are_those_of_the_iterations_by_hand(
    options: dict[str, Any], seed: int
) -> None:
    """Some lie at both ends of the range, some between."""
    if options.get("network") == "two norms":
        options = {**options, "network": two_norms()}
    given = task(3, 2, 2, seed=seed, normalise=per_channel, **options)
    labels = torch.tensor([0, 1, 2, 0, 1])
    expected = by_hand(replace(given, draw=generator(9)), labels)
    found = sre2l.recover(replace(given, draw=generator(9)), labels)
    assert found.dtype == torch.float32 and found.shape == expected.shape
    np.testing.assert_allclose(255 * found.numpy(), expected, atol=0.05)
    assert (expected == 0).any() and (expected == 255).any()
    assert ((expected > 1) & (expected < 254)).mean() > 0.02


def test_rolls_are_small_to_one_side_and_drawn() -> None:
    """At most an eighth of each side, from 0 on: of 40 x 24 pixels 4 as published, and 3."""
    given = task(1, iterations=600, shape=(1, 40, 24))
    down, right = (np.bincount(each) for each in zip(*sre2l.rolls(given), strict=True))
    assert len(down) == 5 and (abs(down - 120) < 50).all()  # 5 deviations
    assert len(right) == 4 and (abs(right - 150) < 54).all()
    still = replace(given, options=replace(given.options, roll=0))
    assert set(sre2l.rolls(still)) == {(0, 0)}
    assert len(list(sre2l.rolls(still))) == 600


def test_statistics_are_matched_the_better_the_more_they_weigh() -> None:
    labels = torch.arange(3).repeat(8)
    gaps = []
    for weight in (0.0, 0.01, 1.0):
        given = task(3, 3, 3, network=BATCH_NORM, statistics=weight, iterations=60)
        made = sre2l.recover(given, labels)
        gaps.append(gap(given.learner.network, made))
    assert gaps[0] > 1.1 * gaps[1] > 1.2 * gaps[2]


def test_the_teacher_is_neither_moved_nor_given_gradients_by_the_pictures() -> None:
    given = task(3, 3, network=BATCH_NORM)
    model = given.learner.model
    before = [t.clone() for t in (model.parameters, model.buffers, model.gradients.fill_(0.7))]
    sre2l.recover(given, torch.tensor([0, 1, 0]))
    for tensor, old in zip((model.parameters, model.buffers, model.gradients), before, strict=True):
        assert torch.equal(tensor, old)
    assert not given.learner.network.training


def test_pictures_are_made_in_groups_of_like_size_that_mix_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """3 classes, 7 each: 21 in groups of at most 8 are 3 groups of 7, not 8, 8 and 5."""
    groups: list[Tensor] = []

    def recover(given: Task, labels: Tensor) -> Tensor:
        groups.append(labels)
        return torch.full((len(labels), 1, 8, 8), len(groups) / 255)

    monkeypatch.setattr(sre2l, "recover", recover)
    for together, sizes in ((8, [7, 7, 7]), (21, [21]), (20, [11, 10]), (256, [21])):
        groups.clear()
        found = sre2l.propose(task(4, 4, 4, per_class=7, together=together))
        assert [len(each) for each in groups] == sizes
        assert all(set(each.tolist()) == {0, 1, 2} for each in groups)
        assert torch.equal(found.labels, torch.cat(groups))
        levels = torch.arange(1, len(sizes) + 1).repeat_interleave(torch.tensor(sizes))
        assert torch.equal(found.pictures[:, 0, 3, 3], levels.to(torch.uint8))


# ----------------------------------------------------------------------------------------- squeeze


@pytest.mark.parametrize("network", [MLP, BATCH_NORM], ids=lambda n: n.kind)
def test_the_teacher_is_the_clients_model_after_more_training(network: Network) -> None:
    """Step for step torch.optim.SGD over the same batches; the client's weights are kept."""
    given = task(5, 4, network=network, squeeze_epochs=3, squeeze_rate=0.05, batch=4, soft=False)
    learner = given.learner
    learnt = [t.clone() for t in learner.learnt]
    expected, (inputs, labels) = copy.deepcopy(learner.network), given.inputs()
    draw, sgd = generator(0), torch.optim.SGD(expected.parameters(), lr=0.05)
    for _ in range(3):
        for places in torch.randperm(9, generator=draw).split(4):
            models.train_mode(expected, gathers=len(places) > 1)
            sgd.zero_grad()
            nn.functional.cross_entropy(expected(inputs[places]), labels[places]).backward()
            sgd.step()
    sre2l.propose(given)
    assert given.events == ([NO_NORM] if network is MLP else [])
    moved = flatten(list(expected.parameters())), flatten(list(expected.buffers()))
    torch.testing.assert_close(learner.model.parameters, moved[0])
    torch.testing.assert_close(learner.model.buffers, moved[1])
    assert (learner.model.parameters - learnt[0]).abs().max() > 1e-3
    learner.restore()
    assert torch.equal(learner.model.parameters, learnt[0])
    assert torch.equal(learner.model.buffers, learnt[1])


@pytest.mark.parametrize("rate", [0.0, 50.0, 1e30])
def test_a_squeeze_that_fails_leaves_the_clients_model(rate: float) -> None:
    """Whether it ends at a higher loss or at no number; a rate of 0 does not fail."""
    given = task(5, 4, network=BATCH_NORM, squeeze_rate=rate, squeeze_epochs=5)
    if rate == 0:
        given = replace(given, options=replace(given.options, squeeze_epochs=0))
    found = sre2l.propose(given)
    assert given.events == [NO_SQUEEZE] * (rate > 0)
    assert torch.equal(given.learner.model.parameters, given.learner.learnt[0])
    assert torch.equal(given.learner.model.buffers, given.learner.learnt[1])
    assert found.soft.isfinite().all()


def test_the_squeeze_starts_from_the_clients_model_whatever_was_done_before() -> None:
    given, other = task(4, 4), task(4, 4)
    other.learner.restart()
    found, again = sre2l.propose(given), sre2l.propose(other)
    assert torch.equal(found.pictures, again.pictures) and torch.equal(found.soft, again.soft)


# --------------------------------------------------------------------------- pictures and answers


def test_soft_labels_are_the_teachers_answers_on_what_is_stored() -> None:
    """In one pass as in several, and in evaluation mode."""
    given = task(5, 4, 3, network=BATCH_NORM, per_class=3, together=4, normalise=per_channel)
    found = sre2l.propose(given)
    network = given.learner.network.eval()
    with torch.no_grad():
        expected = network(per_channel(found.pictures))
    assert found.soft.dtype == torch.float32 and found.soft.shape == (9, CLASSES)
    torch.testing.assert_close(found.soft, expected)
    assert not found.soft.requires_grad


def test_without_soft_labels_only_labels_are_stored() -> None:
    hard, soft = (sre2l.propose(task(5, 4, soft=soft)) for soft in (False, True))
    assert hard.soft.shape == (4, 0)
    assert torch.equal(hard.pictures, soft.pictures) and torch.equal(hard.labels, soft.labels)


def test_the_teacher_knows_the_pictures_after_enough_iterations() -> None:
    pictures, labels = halves(20)
    options: dict[str, Any] = {"squeeze_epochs": 30, "batch": 8, "roll": 1, "rate": 0.05}
    shares = []
    for iterations in (1, 100):
        given = task(1, per_class=20, iterations=iterations, **options)
        found = sre2l.propose(replace(given, pictures=pictures, labels=labels))
        sure = found.soft.softmax(1)[torch.arange(40), found.labels]
        shares.append(float((sure > 0.9).double().mean()))
    assert shares[0] < 0.7 and shares[1] == 1
    left, right = (found.pictures[found.labels == k].double().mean((0, 1, 2)) for k in (0, 1))
    assert left[:4].mean() > left[4:].mean() and right[:4].mean() < right[4:].mean()


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("sizes", [(5, 1, 3), (1,), (0, 2), (0, 0, 1)], ids=str)
@pytest.mark.parametrize("per_class", [1, 4])
def test_of_every_class_of_the_task_as_many_as_may_be_kept(
    network: Network, sizes: tuple[int, ...], per_class: int
) -> None:
    """Also where there are fewer real ones, and nothing is remembered."""
    given = task(*sizes, network=network, per_class=per_class, shape=(2, 8, 8))
    given = replace(given, past=(given.pictures[:0], given.labels[:0]))
    found = coresets.propose("sre2l", given)
    assert found.pictures.dtype == torch.uint8 and found.pictures.shape[1:] == (2, 8, 8)
    assert found.labels.dtype == torch.int64 and found.pictures.is_contiguous()
    counts = torch.bincount(found.labels, minlength=len(sizes))
    assert counts.tolist() == [per_class * (size > 0) for size in sizes]
    assert found.soft.shape == (len(found.labels), CLASSES) and found.soft.isfinite().all()
    assert len(found.pictures) == len({each.numpy().tobytes() for each in found.pictures})


def test_a_residual_network_in_colour() -> None:
    given = task(2, 1, network=Network("resnet18", norm="batch"), shape=(3, 32, 32), iterations=2)
    found = sre2l.propose(given)
    assert found.pictures.shape == (4, 3, 32, 32) and NO_NORM not in given.events


def test_the_missing_statistics_are_said_once_if_asked_for() -> None:
    for network, weight, said in ((MLP, 0.01, 1), (MLP, 0.0, 0), (BATCH_NORM, 0.01, 0)):
        given = task(3, 3, network=network, statistics=weight, together=2)
        sre2l.propose(given)
        assert given.events.count(NO_NORM) == said


# --------------------------------------------------------------------------------------- no numbers


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_a_diverged_model_gives_real_pictures_and_its_labels(network: Network) -> None:
    given = task(5, 1, 3, network=network, per_class=3)
    given.learner.learnt[0].fill_(torch.nan)
    found = coresets.propose("sre2l", given)
    assert {NO_SQUEEZE, NO_NUMBERS} <= set(given.events)
    assert torch.bincount(found.labels).tolist() == [3, 1, 3]
    real, kept = named(given.pictures, given.labels), named(found.pictures, found.labels)
    assert kept <= real and len(kept) == 7
    assert torch.equal(found.soft, 10 * nn.functional.one_hot(found.labels, CLASSES).float())


def test_real_pictures_are_drawn() -> None:
    kept = set()
    for seed in range(20):
        given = replace(task(5, 1), draw=generator(seed))
        given.learner.learnt[0].fill_(torch.nan)
        kept.add(sre2l.propose(given).pictures[0].numpy().tobytes())
    assert kept == {each.numpy().tobytes() for each in given.pictures[:5]}


def test_only_what_is_no_number_is_replaced() -> None:
    given = task(5, 4, per_class=3)
    made, labels = torch.rand(6, 1, 8, 8, generator=generator(1)), torch.tensor([0, 1, 0, 1, 0, 1])
    made[2, 0, 1, 1] = torch.nan
    pictures, found = sre2l.complete(given, made, labels)
    assert given.events == [NO_NUMBERS] and found.tolist() == [0, 0, 0, 1, 1, 1]
    expected = (made * 255).round().to(torch.uint8)
    assert torch.equal(pictures[[0, 1, 3, 4, 5]], expected[[0, 4, 1, 3, 5]])
    assert any(torch.equal(pictures[2], each) for each in given.pictures[:5])


def test_pixels_are_rounded() -> None:
    made = torch.tensor([0.0, 0.4, 0.6, 254.4, 254.6, 255.0]).view(1, 1, 2, 3) / 255
    pictures, _ = sre2l.complete(task(1), made, torch.tensor([0]))
    assert pictures.flatten().tolist() == [0, 0, 1, 254, 255, 255]


# -------------------------------------------------------------------------- the task and the memory


def test_the_order_of_the_pictures_does_not_matter_but_the_draw_does() -> None:
    given, order = task(5, 4, 3), torch.randperm(12, generator=generator(3))
    shuffled = replace(given, pictures=given.pictures[order], labels=given.labels[order])
    first, second, other = (
        coresets.propose("sre2l", replace(each, draw=generator(seed)))
        for each, seed in ((given, 4), (shuffled, 4), (given, 5))
    )
    for one, two in ((first.pictures, second.pictures), (first.soft, second.soft)):
        assert torch.equal(one, two)
    assert torch.equal(first.labels, second.labels)
    assert not torch.equal(first.pictures, other.pictures)


def test_nothing_global_is_drawn_and_nothing_given_is_written_to() -> None:
    given = task(5, 4, network=BATCH_NORM)
    parts = [given.pictures, given.labels, *given.past, *given.learner.learnt, *given.learner.fresh]
    before, state = [part.clone() for part in parts], torch.get_rng_state()
    sre2l.propose(given)
    assert all(torch.equal(part, old) for part, old in zip(parts, before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "changed",
    [
        {"squeeze_epochs": 3},
        {"squeeze_rate": 0.2},
        {"batch": 4},
        {"iterations": 7},
        {"rate": 0.5},
        {"statistics": 5.0},
        {"roll": 0},
        {"together": 3},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_option_changes_the_pictures(changed: dict[str, Any]) -> None:
    one, other = (
        sre2l.propose(task(5, 4, per_class=8, network=BATCH_NORM, **options))
        for options in ({}, changed)
    )
    assert not torch.equal(one.pictures, other.pictures)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"squeeze_epochs": -1}, "options: squeeze_epochs is -1; it must be at least 0"),
        ({"squeeze_rate": -0.1}, "squeeze_rate is -0.1; it must be at least 0"),
        ({"batch": 0}, "batch is 0; it must be at least 1"),
        ({"iterations": 0}, "iterations is 0; it must be at least 1"),
        ({"rate": 0.0}, "rate is 0.0; it must be above 0"),
        ({"statistics": -0.1}, "statistics is -0.1; it must be at least 0"),
        ({"roll": -1}, "roll is -1; it must be at least 0"),
        ({"together": 0}, "together is 0; it must be at least 1"),
        ({"soft": "yes"}, "options.soft is 'yes'"),
        ({"iteration": 5}, "options: 'iteration' is unknown; did you mean 'iterations'"),
    ],
)
def test_impossible_options_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(config.ParameterError, match=message.replace("options: ", "", 1)):
        coresets.options("sre2l", values)


def test_the_published_numbers_are_the_defaults() -> None:
    found = coresets.options("sre2l", {})
    assert (found.iterations, found.rate, found.statistics, found.roll) == (1000, 0.25, 0.01, 4)
    assert found.soft and found.squeeze_epochs == 20


def test_soft_labels_survive_a_memory_and_a_checkpoint(tmp_path: Path) -> None:
    """Beside their pictures, down to the last bit."""
    given = task(5, 4, per_class=3)
    found, options = sre2l.propose(given), Keep(rule="sre2l", per_class=2, space="off")
    assert options.soft and not Keep(rule="sre2l", options={"soft": False}).soft
    kept = memory.empty(given.pictures, CLASSES, soft=options.soft)
    for label, met in ((0, 5), (1, 4)):
        new = memory.of_class(found, label, 7, torch.zeros(3, 0))
        kept = memory.update(kept, label, new, met, torch.zeros(0, 0), options, generator())
    checkpoint.save(tmp_path / "a.safetensors", {"memory": kept}, {})
    loaded = checkpoint.load(tmp_path / "a.safetensors", {})
    assert loaded is not None
    small.assert_equal_trees(loaded["memory"], kept)
    assert kept["labels"].tolist() == [0, 0, 1, 1] and kept["tasks"].tolist() == [7] * 4
    places = torch.tensor([0, 2, 1, 3])  # classes take turns in the proposal
    assert torch.equal(loaded["memory"]["soft"], found.soft[places])
    assert torch.equal(loaded["memory"]["pictures"], found.pictures[places])
    assert kept["seen"].tolist() == [5, 4, 0, 0]


def test_replay_compares_answers_with_soft_labels(tmp_path: Path) -> None:
    """A client with one picture a task, one with one class and one with none go along."""
    kept = {"rule": "sre2l", "space": "off", "per_class": 2, "options": dict(FAST)}
    cell = small.tiny("replay", memory=kept, weight=1.0, temperature=2.0)
    plan = small.awkward(cell)
    record = small.run(cell, plan, resume=tmp_path)
    assert all(np.isfinite(value).all() for value in record.weights.values())
    for client in (0, 3):
        found = small.saved(cell, tmp_path)["clients"][client]["memory"]
        assert found["soft"].shape == (len(found["labels"]), 10)
        assert found["soft"].abs().sum(1).min() > 0
    assert torch.bincount(found["labels"]).max() == 2
