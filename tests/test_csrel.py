"""CSReL: reducible losses by hand, the coreset step by step, quotas, references, divergence."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from stamp_core import config, coresets, models
from stamp_core.config import Network
from stamp_core.coresets import Proposal, Task, csrel
from stamp_core.coresets.csrel import Options
from stamp_core.learner import Learner

torch.set_num_threads(1)  # as in a training
CLASSES = 4
MLP = Network("mlp", features=6)
BATCH_NORM = Network("cnn", features=6, channels=(3,), norm="batch")
NETWORKS = {
    "mlp": MLP,
    "cnn": Network("cnn", features=6, channels=(3,)),
    "batch norm": BATCH_NORM,
    "group norm": Network("cnn", features=6, channels=(4,), norm="group"),
}
# Fast enough to learn something in a few steps.
FAST = {
    "reference_epochs": 3,
    "reference_rate": 0.3,
    "steps_of_selection": 3,
    "train_steps": 4,
    "train_rate": 0.4,
    "batch": 5,
}


def to_unit(pictures: Tensor) -> Tensor:
    return pictures.float() / 255


def vector(parts: Any) -> Tensor:
    return torch.cat([torch.empty(0), *(part.detach().flatten() for part in parts if part.dim())])


def learner(
    network: Network = MLP,
    side: int = 8,
    seed: int = 0,
    normalise: Callable[[Tensor], Tensor] = to_unit,
) -> Learner:
    """Fresh weights of one seed; those that were learnt are of the next."""
    fresh, learnt = (models.build(network, (1, side, side), CLASSES, seed + i) for i in (0, 1))
    learnt_ = vector(2 * p for p in learnt.parameters()), vector(learnt.buffers())
    return Learner(fresh, normalise, *learnt_)


def task(*sizes: int, per_class: int = 2, seed: int = 0, **options: Any) -> Task:
    """So many random pictures of the classes 0, 1, ...; the memory holds one more."""
    side, network = options.pop("side", 8), options.pop("network", MLP)
    normalise = options.pop("normalise", to_unit)
    draw = torch.Generator().manual_seed(seed)
    shape = (sum(sizes) + 1, 1, side, side)
    pictures = torch.randint(250, shape, generator=draw, dtype=torch.uint8)
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    past = pictures[-1:], torch.tensor([CLASSES - 1])
    return Task(
        pictures[:-1],
        labels,
        past,
        per_class,
        Options(**{**FAST, **options}),
        learner(network, side, seed, normalise),
        torch.Generator().manual_seed(seed),
    )


def places(given: Task, proposal: Proposal) -> list[int]:
    """Where the pictures of a proposal stand in the task."""
    known = {each.numpy().tobytes(): place for place, each in enumerate(given.pictures)}
    assert len(known) == len(given.pictures)
    found = [known[each.numpy().tobytes()] for each in proposal.pictures]
    assert torch.equal(proposal.labels, given.labels[found])
    return found


def chosen(given: Task) -> list[int]:
    return places(given, csrel.propose(given))


# ------------------------------------------------------------------------------ the definition


Matrix = NDArray[np.float64]


class ByHand:
    """The network with one hidden layer in numpy, its gradients derived on paper.

    With h = relu(A x + a) and z = B h + b, a picture's loss is log sum exp z - z_y. By z its
    gradient is e = softmax z - onehot y; by B, e h'; by h, B'e; by A, (B'e where h > 0) x'.
    """

    def __init__(self, weights: Tensor, inputs: int, features: int) -> None:
        flat, sizes = weights.double().numpy(), (features * inputs, features, CLASSES * features)
        A, a, B, b = np.split(flat.copy(), np.cumsum(sizes))
        self.A, self.a = A.reshape(features, inputs), a
        self.B, self.b = B.reshape(CLASSES, features), b

    def forward(self, x: Matrix) -> tuple[Matrix, Matrix]:
        h = np.maximum(x @ self.A.T + self.a, 0)
        return h, h @ self.B.T + self.b

    def losses(self, x: Matrix, y: Matrix) -> Matrix:
        _, z = self.forward(x)
        found: Matrix = np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]
        return found

    def step(self, x: Matrix, y: Matrix, rate: float) -> None:
        h, z = self.forward(x)
        e = np.exp(z) / np.exp(z).sum(1, keepdims=True) - np.eye(CLASSES)[y]
        back = (e @ self.B) * (h > 0)
        for weights, slope in (
            (self.A, back.T @ x),
            (self.a, back.sum(0)),
            (self.B, e.T @ h),
            (self.b, e.sum(0)),
        ):
            weights -= rate * slope / len(y)


def by_hand(given: Task) -> list[int]:
    """The whole selection in numpy, one picture at a time; only the draws are torch's.

    Batches of a coreset of one picture hold as many copies as published.
    """
    options, draw = given.options, torch.Generator().manual_seed(given.draw.initial_seed())
    x = given.pictures.flatten(1).double().numpy() / 255
    y, n = given.labels.numpy(), len(given.labels)

    def start(weights: Tensor) -> ByHand:
        return ByHand(weights, x.shape[1], MLP.features)

    if options.reference == "client":
        reference = start(given.learner.learnt[0])
    else:
        reference = start(given.learner.fresh[0])
        orders = [torch.randperm(n, generator=draw) for _ in range(options.reference_epochs)]
        for order in orders:
            for at in range(0, n, options.batch):
                batch = order[at : at + options.batch].numpy()
                reference.step(x[batch], y[batch], options.reference_rate)
    least = reference.losses(x, y)
    total = sum(min(given.per_class, int((y == c).sum())) for c in set(y.tolist()))
    share = max(total // options.steps_of_selection, 1)
    selector, taken = start(given.learner.fresh[0]), []
    while True:
        score = selector.losses(x, y) - least
        for _ in range(share if len(taken) + share < total else n - len(taken)):
            taken.append(next_one(score, y, taken, options.balanced))
        if len(taken) == n:
            return taken
        selector = start(given.learner.fresh[0])
        width = 1 if len(taken) == 1 else options.batch
        drawn = torch.randint(len(taken), (options.train_steps, width), generator=draw).numpy()
        for row in drawn:
            batch = np.array(taken)[np.resize(row, options.batch)]
            selector.step(x[batch], y[batch], options.train_rate)


def next_one(score: Matrix, y: Matrix, taken: list[int], balanced: bool) -> int:
    """The highest score, if balanced among the classes that have the fewest taken."""
    left = [i for i in range(len(y)) if i not in taken]
    if balanced:
        have = {i: sum(y[j] == y[i] for j in taken) for i in left}
        left = [i for i in left if have[i] == min(have.values())]
    return max(left, key=lambda i: score[i])


VARIANTS: list[dict[str, Any]] = [
    {},
    {"reference": "client"},
    {"balanced": False},
    {"reference": "client", "balanced": False},
    {"reference_epochs": 1, "batch": 32},
    {"reference_rate": 0.05},
    {"steps_of_selection": 1},
    {"steps_of_selection": 4},
    {"steps_of_selection": 99},
    {"train_steps": 1},
    {"train_rate": 0.02},
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_pictures_are_chosen_as_an_implementation_in_numpy_chooses_them(
    options: dict[str, Any], seed: int
) -> None:
    given = task(9, 4, 1, 7, per_class=3, seed=seed, **options)
    assert chosen(given) == by_hand(given)


def test_every_variant_chooses_something_of_its_own() -> None:
    found = [tuple(chosen(task(9, 4, 1, 7, per_class=3, **options))) for options in VARIANTS]
    assert len(set(found)) == len(VARIANTS)


def test_six_pictures_and_a_budget_of_two_step_by_step() -> None:
    """The first is where an untrained network loses most more than the client's; the second where
    one does that has learnt the first alone. Neither is what losses alone would say."""
    given = task(6, per_class=2, seed=13, reference="client", train_steps=9, steps_of_selection=2)
    x, y = given.pictures.flatten(1).double().numpy() / 255, given.labels.numpy()
    least = ByHand(given.learner.learnt[0], 64, 6).losses(x, y)
    untrained = ByHand(given.learner.fresh[0], 64, 6)
    score = untrained.losses(x, y) - least
    first = int(score.argmax())
    trained = ByHand(given.learner.fresh[0], 64, 6)
    for _ in range(9):
        trained.step(x[[first]], y[[first]], 0.4)
    later = trained.losses(x, y) - least
    rest = [i for i in np.argsort(-later).tolist() if i != first]
    assert chosen(given) == [first, *rest]
    assert first != untrained.losses(x, y).argmax()
    assert rest[0] not in (np.argsort(-score)[1], trained.losses(x, y).argmax())


def test_a_reference_that_is_the_untrained_network_leaves_nothing_to_reduce_at_first() -> None:
    """All first scores are 0, so the first picture of the canonical order is chosen."""
    given = task(5, 5, reference="client")
    given.learner.learnt = given.learner.fresh
    found = coresets.propose("csrel", given)
    sorted_ = given.pictures[coresets.canonical(given.pictures, given.labels)]
    assert torch.equal(found.pictures[0], sorted_[0])


class Spy:
    """What a learner is asked to learn, without learning it."""

    def __init__(self, given: Task, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[list[Tensor], float]] = []
        self.starts: list[bool] = []
        self.given, self.descend = given, given.learner.descend
        monkeypatch.setattr(given.learner, "descend", self.noted)

    def noted(self, pictures: Tensor, labels: Tensor, batches: list[Tensor], rate: float) -> None:
        assert torch.equal(pictures, to_unit(self.given.pictures))
        assert torch.equal(labels, self.given.labels)
        now = self.given.learner.model.parameters
        self.starts.append(torch.equal(now, self.given.learner.fresh[0]))
        self.calls.append((batches, rate))
        self.descend(pictures, labels, batches, rate)


def test_each_option_sets_what_is_learnt_when(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of 10 in 4 steps grows by 2: coresets of 2, 4, 6 and 8 are learnt, always anew."""
    given = task(12, 9, per_class=5, steps_of_selection=4, train_steps=3, batch=8)
    spy = Spy(given, monkeypatch)
    found = chosen(given)
    assert [rate for _, rate in spy.calls] == [0.3, *4 * [0.4]] and all(spy.starts)
    batches = spy.calls[0][0]
    assert [len(batch) for batch in batches] == 3 * [8, 8, 5]
    for epoch in range(3):
        assert torch.cat(batches[3 * epoch :][:3]).sort().values.tolist() == list(range(21))
    assert not torch.equal(batches[0], batches[3])
    for number, (batches, _) in enumerate(spy.calls[1:], 1):
        assert [len(batch) for batch in batches] == 3 * [8]
        assert set(torch.cat(batches).tolist()) <= set(found[: 2 * number])


def test_batches_are_drawn_uniformly_with_replacement_from_the_whole_coreset() -> None:
    """Of 40000 places each of 4 pictures has a quarter, give or take 6 deviations of 87."""
    given = task(9, 4, train_steps=1000, batch=40)
    found = torch.stack(csrel.samples(torch.tensor([7, 2, 11, 5]), given))
    assert found.shape == (1000, 40)
    counts = found.flatten().bincount(minlength=13)
    assert counts[[7, 2, 11, 5]].sum() == 40000
    assert (counts[[7, 2, 11, 5]] - 10000).abs().max() < 6 * 87


def test_the_reference_of_the_client_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    given = task(6, 6, reference="client")
    spy = Spy(given, monkeypatch)
    chosen(given)
    assert {rate for _, rate in spy.calls} == {0.4}
    given.learner.restore()
    expected = given.learner.losses(*given.inputs())
    assert torch.equal(csrel.reference_losses(given, given.inputs()), expected)


# ------------------------------------------------------------------------------ quotas


def test_classes_take_turns_the_one_with_the_fewest_first() -> None:
    """0 has two already, so 1 and 2 have two turns before it; then each turn goes by score."""
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    scores = torch.tensor([9.0, 8, 7, 6, 1, 3, 2, 5, 4, -5])
    taken = torch.tensor([2, 0])
    found = csrel.ranked(scores, labels, taken, balanced=True).tolist()
    assert found == [7, 5, 8, 6, 1, 4, 9, 3]
    found = csrel.ranked(scores, labels, taken, balanced=False).tolist()
    assert found == [1, 3, 7, 8, 5, 6, 4, 9]


def test_equal_scores_are_taken_in_the_order_in_which_they_stand() -> None:
    labels = torch.tensor([1, 1, 1, 0, 0, 0])
    nothing = torch.empty(0, dtype=torch.int64)
    assert csrel.ranked(torch.zeros(6), labels, nothing, False).tolist() == [0, 1, 2, 3, 4, 5]
    assert csrel.ranked(torch.zeros(6), labels, nothing, True).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("steps", [1, 3, 40])
def test_the_coreset_has_what_will_be_remembered_of_each_class(steps: int) -> None:
    """Of 9, 2, 1 and 5 pictures, with a budget of 4: 4, 2, 1 and 4."""
    given = task(9, 2, 1, 5, per_class=4, steps_of_selection=steps)
    assert csrel.budget(given) == 11
    assert given.labels[chosen(given)[:11]].bincount().tolist() == [4, 2, 1, 4]


def test_without_balance_the_rank_is_one_of_all_classes() -> None:
    """The client's network knows class 0 by heart, so only its losses can be reduced."""
    given = task(8, 8, per_class=3, balanced=False, reference="client", train_rate=1e-6)
    learnt, buffers = given.learner.learnt
    learnt[-CLASSES:] = torch.tensor([50.0, 0, 0, 0])  # the bias of the head
    given.learner.learnt = learnt, buffers
    assert given.labels[chosen(given)].tolist() == 8 * [0] + 8 * [1]
    fair = replace(given, options=replace(given.options, balanced=True))
    assert given.labels[chosen(fair)].tolist() == 8 * [0, 1]


# ------------------------------------------------------------------------------ what holds always


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("reference", ["fresh", "client"])
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(
    ("sizes", "per_class"),
    [((1,), 1), ((1,), 5), ((6,), 2), ((1, 1), 1), ((4, 1), 3), ((3, 2, 5), 20), ((3, 3), 0)],
    ids=str,
)
def test_a_proposal_is_complete(
    name: str, reference: str, balanced: bool, sizes: tuple[int, ...], per_class: int
) -> None:
    """With nothing remembered as well as something."""
    options = {"network": NETWORKS[name], "reference": reference, "balanced": balanced}
    given = task(*sizes, per_class=per_class, **options)
    assert sorted(chosen(given)) == list(range(sum(sizes)))
    assert not given.events
    alone = replace(given, past=(given.pictures[:0], given.labels[:0]))
    assert sorted(chosen(alone)) == list(range(sum(sizes)))


def test_labels_need_not_be_consecutive() -> None:
    """Each turn of classes 1 and 3 has one of both."""
    given = task(4, 4)
    given = replace(given, labels=torch.where(given.labels == 0, 1, 3))
    turns = given.labels[chosen(given)].reshape(4, 2)
    assert turns.sort(1).values.tolist() == 4 * [[1, 3]]


@pytest.mark.parametrize("reference", ["fresh", "client"])
def test_the_order_of_the_pictures_does_not_matter(reference: str) -> None:
    given = task(9, 6, 3, reference=reference)
    order = torch.randperm(18, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(order, torch.arange(18))
    mixed = task(9, 6, 3, reference=reference)
    mixed = replace(mixed, pictures=given.pictures[order], labels=given.labels[order])
    one, other = coresets.propose("csrel", given), coresets.propose("csrel", mixed)
    assert torch.equal(one.pictures, other.pictures) and torch.equal(one.labels, other.labels)
    assert one.soft.shape == (18, 0)


@pytest.mark.parametrize("reference", ["fresh", "client"])
def test_the_draw_alone_decides(reference: str) -> None:
    """Even on a learner that was used before."""
    given = task(9, 6, 3, reference=reference)

    def again(seed: int) -> list[int]:
        return chosen(replace(given, draw=torch.Generator().manual_seed(seed)))

    torch.manual_seed(1)
    first = again(0)
    torch.manual_seed(2)
    assert again(0) == first and len({tuple(again(seed)) for seed in range(5)}) > 1


def test_nothing_that_is_given_is_changed() -> None:
    given = task(9, 6, network=BATCH_NORM)
    held = (given.pictures, given.labels, *given.past, *given.learner.learnt, *given.learner.fresh)
    before = [part.clone() for part in held]
    chosen(given)
    for part, was in zip(held, before, strict=True):
        assert torch.equal(part, was)


# ------------------------------------------------------------------------------ batch normalisation


def in_torch(given: Task, coresets_: list[list[int]]) -> list[Tensor]:
    """Scores by steps of autograd, of an untrained network and after learning each coreset."""
    draw, options = torch.Generator().manual_seed(given.draw.initial_seed()), given.options
    inputs, least = to_unit(given.pictures), csrel.reference_losses(given, given.inputs())
    found = []
    for coreset in ([], *coresets_):
        net = models.build(BATCH_NORM, (1, 8, 8), CLASSES, seed=0)
        size = (options.train_steps if coreset else 0, options.batch if len(coreset) > 1 else 1)
        for row in torch.randint(max(len(coreset), 1), size, generator=draw):
            batch = torch.tensor(coreset)[row]
            net.train()
            for part in net.modules():
                if isinstance(part, nn.BatchNorm2d):
                    part.train(len(coreset) > 1)
            loss = F.cross_entropy(net(inputs[batch]), given.labels[batch])
            slopes = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for weights, slope in zip(net.parameters(), slopes, strict=True):
                    weights -= options.train_rate * slope
        with torch.no_grad():
            answers = net.eval()(inputs)
        found.append(F.cross_entropy(answers, given.labels, reduction="none") - least)
    return found


def test_a_network_with_batch_normalisation_learns_a_coreset_of_one_picture_then_of_two() -> None:
    """One picture has no spread to gather; two have, and scores are taken in evaluation mode."""
    given = task(7, per_class=3, network=BATCH_NORM, reference="client", train_steps=6)
    found = chosen(given)
    one, two, three = in_torch(given, [found[:1], found[:2]])
    assert found[0] == int(one.argmax())
    two[found[:1]] = three[found[:2]] = -torch.inf
    assert found[1] == int(two.argmax())
    assert found[2:] == three.argsort(descending=True)[:5].tolist()


def test_what_batch_normalisation_has_gathered_stays_while_there_is_one_picture() -> None:
    given = task(7, network=BATCH_NORM)
    for coreset, stays in (([3], True), ([3, 4], False)):
        given.learner.restart()
        csrel.learn(given, given.inputs(), csrel.samples(torch.tensor(coreset), given), 0.1)
        assert torch.equal(given.learner.model.buffers, given.learner.fresh[1]) == stays
        assert not torch.equal(given.learner.model.parameters, given.learner.fresh[0])


def test_one_picture_is_learnt_as_its_copies_would_be() -> None:
    """The mean of equal gradients is the gradient; the numbers drawn do not matter."""
    given = task(7, train_steps=5, batch=8)
    ways = []
    for batches in (csrel.samples(torch.tensor([3]), given), 5 * [torch.full((8,), 3)]):
        given.learner.restart()
        csrel.learn(given, given.inputs(), batches, 0.1)
        ways.append(given.learner.model.parameters - given.learner.fresh[0])
    torch.testing.assert_close(*ways, rtol=0, atol=1e-6)
    assert ways[0].abs().max() > 0.01


# ------------------------------------------------------------------------------ divergence


def test_pictures_without_a_finite_score_come_last_of_their_class() -> None:
    """Two pictures are white, and white has no finite input; they are said once."""

    def without_white(pictures: Tensor) -> Tensor:
        return to_unit(pictures).masked_fill(pictures == 255, torch.inf)

    options = {"reference": "client", "normalise": without_white, "steps_of_selection": 4}
    given = task(6, 6, per_class=4, **options)
    given.pictures[2, 0, :4] = given.pictures[9, 0, :3] = 255
    found = chosen(given)
    assert sorted(found) == list(range(12)) and set(found[-2:]) == {2, 9}
    assert given.events == [csrel.STRANGE]
    kept = [place for place in range(12) if place not in (2, 9)]
    fine = task(6, 6, per_class=4, **options)
    fine = replace(fine, pictures=given.pictures[kept], labels=given.labels[kept])
    by_itself = [kept[place] for place in chosen(fine)]
    assert found[:2] == by_itself[:2] and not fine.events


@pytest.mark.parametrize(
    "options",
    [
        {"reference_rate": 1e30},
        {"train_rate": 1e30, "train_steps": 9},
        {"train_rate": 1e30, "train_steps": 9, "reference": "client", "balanced": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_that_diverges_is_said_and_the_proposal_complete(
    name: str, options: dict[str, Any]
) -> None:
    given = task(7, 5, per_class=4, network=NETWORKS[name], **options)
    assert sorted(chosen(given)) == list(range(12))
    assert given.events == [csrel.STRANGE]


def test_of_a_client_that_has_diverged_pictures_are_remembered_at_random() -> None:
    """As many of each class as there is room for, and not always the first or the last."""
    found = []
    for seed in range(20):
        given = task(8, 8, reference="client")
        given = replace(given, draw=torch.Generator().manual_seed(seed))
        given.learner.learnt[0].fill_(torch.nan)
        found.append(chosen(given)[0])
        assert given.events == [csrel.STRANGE]
    assert len(set(found)) > 6


def test_scores_that_are_not_finite_are_below_any_that_is() -> None:
    given = task(6)
    scores = torch.tensor([3.0, torch.nan, -3e38, torch.inf, -torch.inf, 0.0])
    found = csrel.usable(scores, given)
    assert torch.equal(found[[0, 2, 5]].float(), scores[[0, 2, 5]])
    assert found.isfinite().all() and found[[1, 3, 4]].max() < scores[2]
    assert scores.isnan().sum() == 1, "the scores given were written to"


# ------------------------------------------------------------------------------ options


def test_the_defaults_are_those_published_for_cifar100() -> None:
    found = coresets.options("csrel", {})
    assert found == Options("fresh", 10, 3e-3, 40, 7, 5e-3, 32, balanced=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reference": "server"}, "options.reference 'server' is unknown"),
        ({"reference_epochs": 0}, "options.reference_epochs is 0; it must be at least 1"),
        ({"reference_rate": 0.0}, "options.reference_rate is 0.0; it must be above 0"),
        ({"steps_of_selection": 0}, "options.steps_of_selection is 0; it must be at least 1"),
        ({"train_steps": 0}, "options.train_steps is 0; it must be at least 1"),
        ({"train_rate": -1.0}, "options.train_rate is -1.0; it must be above 0"),
        ({"batch": 0}, "options.batch is 0; it must be at least 1"),
        ({"balanced": 1}, "options.balanced is 1; it must be true or false"),
        ({"epochs": 1}, "options: 'epochs' is unknown"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(config.ParameterError, match=message):
        coresets.options("csrel", values)
