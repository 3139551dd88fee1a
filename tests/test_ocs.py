"""Online coreset selection scores by its definition and proposes a batch's best pictures first."""

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
from stamp_core.coresets import Proposal, Task, ocs
from stamp_core.coresets.ocs import Options
from stamp_core.learner import Learner
from stamp_core.models import Classifier

CLASSES = 4
FEW = {"batch": 5, "kept": 2, "tau": 3.0}  # 13 pictures are batches of 5, 5 and 3
NETWORKS = {
    "mlp": Network(kind="mlp", features=8),
    "cnn": Network(kind="cnn", features=6, channels=(3,), norm="batch"),
}
SHORTAGE = "ocs: a class had too few candidates"
STRANGE = "ocs: a gradient was not finite"
LOST = "ocs: the gradient of the past was not finite"


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def some(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pictures of three of the classes, the first class the most frequent one."""
    draw = generator(seed)
    pictures = torch.randint(0, 255, (n, 2, 8, 8), generator=draw).to(torch.uint8)
    return pictures, torch.randint(0, 5, (n,), generator=draw).clamp(min=2) - 2


def normalise(pictures: Tensor) -> Tensor:
    """White is no number; otherwise values between -1 and 1."""
    return (pictures.float() / 127 - 1).masked_fill(pictures == 255, torch.nan)


def learner(kind: str = "mlp", seed: int = 0) -> Learner:
    """A network with buffers unlike the fresh ones."""
    network = models.build(NETWORKS[kind], (2, 8, 8), CLASSES, seed)
    found = Learner(network, normalise, *states(network, seed))
    assert torch.equal(found.model.parameters, found.learnt[0])
    return found


def states(network: Classifier, seed: int) -> tuple[Tensor, Tensor]:
    """Parameters near those of a network, and running means and variances between 0 and 1."""
    weights = nn.utils.parameters_to_vector(network.parameters()).detach()
    values = sum(b.numel() for b in network.buffers() if b.is_floating_point())
    return weights + 0.05 * normal(len(weights), seed=seed), torch.rand(
        values, generator=generator(1)
    )


def task(
    n: int = 13, past: int = 7, seed: int = 0, kind: str = "mlp", per_class: int = 2, **options: Any
) -> Task:
    """A task of n pictures."""
    given = (Options(**{**FEW, **options}), learner(kind), generator(seed))
    return Task(*some(n), some(past, seed=1), per_class, *given)


def scores(given: Task) -> NDArray[np.float64]:
    """The scores of a task's pictures in the order of its stream."""
    return ocs.stream_scores(given, stream(given)).double().numpy()


def stream(given: Task, seed: int = 0) -> Tensor:
    return torch.randperm(len(given.labels), generator=generator(seed))


# ------------------------------------------------------------------------- an independent version


def slopes(given: Task, pictures: Tensor, labels: Tensor) -> NDArray[np.float64]:
    """The gradient of each picture, one after the other."""
    network, found = given.learner.network.eval(), []
    wanted = list(network.parameters())[-2 if given.options.gradients == "head" else 0 :]
    for picture, label in zip(given.learner.normalise(pictures), labels, strict=True):
        loss = F.cross_entropy(network(picture[None]), label[None])
        parts = torch.autograd.grad(loss, wanted)
        found.append(torch.cat([part.flatten() for part in parts]).double().numpy())
    return np.array(found)


def cosine(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    size = np.linalg.norm(one) * np.linalg.norm(other)
    return float(one @ other / size) if size else 0.0


def defined(given: Task, order: Tensor) -> NDArray[np.float64]:
    """Cosine with the batch's mean, less the mean cosine, and tau times that with the past."""
    each = slopes(given, given.pictures[order], given.labels[order])
    past = slopes(given, *given.past).mean(0) if len(given.past[1]) else 0 * each[0]
    options, found = given.options, []
    for start in range(0, len(each), options.batch):
        batch = each[start : start + options.batch]
        for g in batch:
            score = cosine(g, batch.mean(0)) - np.mean([cosine(g, h) for h in batch])
            found.append(score + options.tau * cosine(g, past))
    return np.array(found)


def places(found: Proposal, given: Task) -> list[int]:
    """Where the pictures of a proposal stand in the task; no two of them are alike."""
    where = {picture.numpy().tobytes(): n for n, picture in enumerate(given.pictures)}
    assert len(where) == len(given.pictures)
    order = [where[picture.numpy().tobytes()] for picture in found.pictures]
    assert torch.equal(found.labels, given.labels[order])
    assert found.soft.shape == (len(order), 0) and found.pictures.dtype == torch.uint8
    return order


def halves(given: Task, seed: int = 0) -> tuple[list[int], list[int]]:
    """The candidates of all batches by their score, then the others by theirs."""
    order, options = stream(given, seed), given.options
    values = dict(zip(order.tolist(), defined(given, order), strict=True))
    first: list[int] = []
    for batch in order.split(options.batch):
        first += sorted(batch.tolist(), key=lambda n: -values[n])[: options.kept]
    ranked = sorted(values, key=lambda n: -values[n])
    return [n for n in ranked if n in first], [n for n in ranked if n not in first]


# --------------------------------------------------------------------------------------- the score


@pytest.mark.parametrize("past", [0, 7])
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("gradients", ["all", "head"])
def test_a_score_is_what_its_definition_says(gradients: str, kind: str, past: int) -> None:
    """Each of the other gradients' scores lies farther away than what rounding does."""
    given = task(kind=kind, past=past, gradients=gradients)
    expected = defined(given, stream(given))
    np.testing.assert_allclose(scores(given), expected, rtol=0, atol=1e-5)
    other = {"all": "head", "head": "all"}[gradients]
    assert abs(scores(task(kind=kind, past=past, gradients=other)) - expected).max() > 1e-2


def test_scores_by_hand() -> None:
    """Gradients (3, 0), (0, 1), (1, 0) and 0 add up to (4, 1); the past's is (0, 5).

    The cosine of 0 is 0 with everything, but it is one of the four that a mean is over. Of the
    second batch there is one gradient, (-1, 0), alone with itself and what is not finite.
    """
    low, lost, none = -torch.inf, [torch.nan, 0], [-torch.inf, 1]
    right = torch.tensor([[3.0, 0], [0, 1], [1, 0], [0, 0], lost, [-1, 0], none])
    options, past = Options(batch=4, kept=1, tau=10.0), torch.tensor([[0.0, 1.0]])
    far, near = 4 / 17**0.5 - 2 / 4, 1 / 17**0.5 - 1 / 4
    found = ocs.batch_scores(torch.ones(7, 1), right.clone(), None, options)
    np.testing.assert_allclose(found, [far, near, far, 0, low, 0, low], atol=1e-6)
    found = ocs.batch_scores(torch.ones(7, 1), right.clone(), past, options)
    np.testing.assert_allclose(found, [far, 10 + near, far, 0, low, 0, low], atol=1e-6)


def test_gradients_that_cancel_have_no_direction() -> None:
    right = torch.tensor([[0.6, 0.8], [-0.6, -0.8]])
    found = ocs.batch_scores(torch.ones(2, 1), right, None, Options(batch=2, kept=1))
    np.testing.assert_allclose(found, 0, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-33, 1e-25, 1e25, 1e33])
def test_the_size_of_gradients_does_not_matter(scale: float) -> None:
    """Though their squares and the factors' products are 0, or infinite, in float32."""
    left, right, past = normal(9, 3).abs() + 1, normal(9, 6, seed=1), normal(3, 6, seed=2)
    past, options = past / past.norm(), Options(**FEW)
    expected = ocs.batch_scores(left.clone(), right.clone(), past, options)
    for one, other in ((scale, 1), (1, scale), (scale, scale)):
        found = ocs.batch_scores(one * left, other * right, past, options)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_sure_answers_have_a_score_of_nothing() -> None:
    """An error of exactly 0 leaves no gradient."""
    for gradients in ("all", "head"):
        given = task(past=0, gradients=gradients)
        given = replace(given, labels=torch.zeros_like(given.labels))
        network = given.learner.network
        with torch.no_grad():
            network.head.bias[0] = 1e4  # type: ignore[index]
        assert (scores(given) == 0).all()
        assert sorted(places(ocs.propose(given), given)) == list(range(13))
        assert given.events == []


def test_head_and_all_are_one_where_the_encoder_learns_nothing() -> None:
    network = Classifier(nn.Flatten(), 128, CLASSES)
    weights = nn.utils.parameters_to_vector(network.parameters()).detach()
    plain = Learner(network, normalise, weights, torch.zeros(0))
    found = [
        scores(replace(task(gradients=gradients), learner=plain)) for gradients in ("all", "head")
    ]
    np.testing.assert_allclose(*found, rtol=0, atol=1e-5)
    assert np.ptp(found[0]) > 0.1


@pytest.mark.parametrize("gradients", ["all", "head"])
def test_how_many_are_looked_at_at_a_time_does_not_matter(
    gradients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, calls = scores(task(gradients=gradients)), list[int]()
    inner = ocs.factors

    def counting(given: Task, pictures: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(labels))
        return inner(given, pictures, labels)

    monkeypatch.setattr(ocs, "factors", counting)
    monkeypatch.setattr(ocs, "FORWARD", 3)
    two = 2 * 5 * len(task().learner.model.parameters)
    past, whole = ([3, 3, 1], [13]) if gradients == "head" else ([], [10, 3])
    for room, wanted in ((1, [5, 5, 3]), (two, whole)):
        calls.clear()
        monkeypatch.setattr(ocs, "ROOM", room)
        np.testing.assert_allclose(scores(task(gradients=gradients)), expected, rtol=0, atol=1e-5)
        assert calls == past + wanted


# ------------------------------------------------------------------------------------ the proposal


@pytest.mark.parametrize("past", [0, 7])
@pytest.mark.parametrize("gradients", ["all", "head"])
def test_the_best_of_each_batch_come_first(gradients: str, past: int) -> None:
    """In any of 5 streams; some other is always better than some candidate."""
    for seed in range(5):
        given = task(past=past, seed=seed, gradients=gradients)
        first, others = halves(given, seed)
        assert len(first) == 6 and len(others) == 7
        assert places(ocs.propose(given), given) == first + others


def test_candidates_by_hand() -> None:
    """Equal ones by their place, and never one without a score."""
    low = -torch.inf
    values = torch.tensor([1.0, 3.0, 2.0, 5.0, 5.0, 5.0, low, 0.0, low, -9.0])
    found = ocs.candidates(values, Options(batch=3, kept=2))
    assert found.nonzero().flatten().tolist() == [1, 2, 3, 4, 7, 9]
    found = ocs.candidates(values, Options(batch=3, kept=1))
    assert found.nonzero().flatten().tolist() == [1, 3, 7, 9]


def test_candidates_may_come_in_random_order() -> None:
    """All six orders of three; the others follow by their score, which in a single batch is the
    same for any stream."""
    given = task(n=9, batch=9, kept=3, order="random", gradients="head")
    first, others = halves(given)
    found = {
        tuple(places(ocs.propose(replace(given, draw=generator(seed))), given))
        for seed in range(40)
    }
    assert len({order[:3] for order in found}) == 6
    assert {tuple(sorted(order[:3])) for order in found} == {tuple(sorted(first))}
    assert {order[3:] for order in found} == {tuple(others)}


def test_tau_weighs_the_past() -> None:
    """Without weight the past is nothing; with much of it candidates come in its order."""
    expected = places(ocs.propose(task(past=0)), task())
    assert places(ocs.propose(task(tau=0.0)), task()) == expected
    assert places(ocs.propose(task(tau=3.0)), task()) != expected
    given = task(batch=13, kept=13, tau=1e6)
    mean = slopes(given, *given.past).mean(0)
    near = [cosine(g, mean) for g in slopes(given, given.pictures, given.labels)]
    assert places(ocs.propose(given), given) == np.argsort(near)[::-1].tolist()


def test_gradients_of_earlier_do_not_matter() -> None:
    given = task()
    expected = scores(given)
    given.learner.model.gradients.fill_(7)
    np.testing.assert_array_equal(scores(given), expected)


def test_the_whole_past_counts_by_its_pictures() -> None:
    """The same pictures twice change nothing; one more does."""
    given = task()
    pictures, labels = given.past
    double = replace(given, past=(pictures.repeat(2, 1, 1, 1), labels.repeat(2)))
    np.testing.assert_allclose(scores(double), scores(given), rtol=0, atol=1e-5)
    less = replace(given, past=(pictures[:-1], labels[:-1]))
    assert abs(scores(less) - scores(given)).max() > 1e-2


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("gradients", ["all", "head"])
def test_the_order_of_the_pictures_does_not_matter(gradients: str, kind: str) -> None:
    given = task(kind=kind, gradients=gradients)
    one = coresets.propose("ocs", given)
    for seed in range(3):
        order = torch.randperm(13, generator=generator(seed))
        shuffled = replace(given, pictures=given.pictures[order], labels=given.labels[order])
        other = coresets.propose("ocs", replace(shuffled, draw=generator()))
        assert torch.equal(one.pictures, other.pictures)
        assert torch.equal(one.labels, other.labels)


@pytest.mark.parametrize("order", ["score", "random"])
def test_a_proposal_is_a_matter_of_the_generator_alone(order: str) -> None:
    one = places(ocs.propose(task(order=order)), task())
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert places(ocs.propose(task(order=order)), task()) == one
    assert torch.equal(torch.get_rng_state(), before)
    assert places(ocs.propose(task(order=order, seed=1)), task()) != one


@pytest.mark.parametrize("gradients", ["all", "head"])
def test_nothing_given_is_written_to(gradients: str) -> None:
    given = task(kind="cnn", gradients=gradients)
    model = given.learner.model
    held = (given.pictures, given.labels, *given.past, model.parameters, model.buffers)
    before = [each.clone() for each in held]
    ocs.propose(given)
    assert all(torch.equal(one, other) for one, other in zip(held, before, strict=True))


# ---------------------------------------------------------------------------- out of the ordinary


def without(given: Task, n: int) -> Task:
    """A task without one of its pictures."""
    rest = torch.arange(len(given.labels)) != n
    return replace(given, pictures=given.pictures[rest], labels=given.labels[rest], events=[])


@pytest.mark.parametrize("gradients", ["all", "head"])
def test_a_picture_that_is_no_number_comes_last_and_changes_nothing(gradients: str) -> None:
    """As if its batch, here the whole task, had one picture less."""
    given = task(batch=13, kept=13, gradients=gradients)
    given.pictures[4] = 255
    found = places(ocs.propose(given), given)
    rest = without(given, 4)
    expected = places(ocs.propose(replace(rest, draw=generator(5))), rest)
    assert found == [n + (n >= 4) for n in expected] + [4]
    assert given.events == [STRANGE] and rest.events == []


@pytest.mark.parametrize("gradients", ["all", "head"])
def test_a_past_that_is_no_number_is_none(gradients: str) -> None:
    given, alone = task(gradients=gradients), task(past=0, gradients=gradients)
    given.past[0][2] = 255
    assert places(ocs.propose(given), given) == places(ocs.propose(alone), alone)
    assert given.events == [LOST, *alone.events] and LOST not in alone.events


@pytest.mark.parametrize("order", ["score", "random"])
@pytest.mark.parametrize("gradients", ["all", "head"])
def test_a_diverged_network_leaves_a_random_order(gradients: str, order: str) -> None:
    found = []
    for seed in range(2):
        given = task(seed=seed, gradients=gradients, order=order)
        given.learner.model.parameters.fill_(torch.nan)
        found.append(places(ocs.propose(given), given))
        assert sorted(found[-1]) == list(range(13))
        assert given.events == [LOST, STRANGE, SHORTAGE]
    assert found[0] != found[1]


@pytest.mark.parametrize("gradients", ["all", "head"])
@pytest.mark.parametrize("past", [0, 1, 7])
@pytest.mark.parametrize("batch", [1, 4, 100])
@pytest.mark.parametrize("n", [1, 2, 8, 13])
def test_a_proposal_has_every_picture_once(n: int, batch: int, past: int, gradients: str) -> None:
    """So that of each class there are as many as it may keep, or all."""
    options = {"batch": batch, "kept": 1, "gradients": gradients}
    given = task(n, past, per_class=50, **options)
    assert sorted(places(ocs.propose(given), given)) == list(range(n))
    assert given.events == ([] if n == 1 or batch == 1 else [SHORTAGE])


def test_a_shortage_of_candidates_is_said_once() -> None:
    """Two of three classes have none but those of the third; each may keep one or two."""
    labels = torch.tensor([0, 0, 2, 2, 3])
    for had, per_class, short in (
        ([0, 2, 3], 1, False),
        ([0, 2, 2], 1, True),
        ([0, 0], 1, True),
        ([0, 0, 2, 3], 2, True),
        ([0, 0, 2, 2, 3], 2, False),
        ([0, 0, 2, 2, 3], 9, False),
        ([], 0, False),
    ):
        given = replace(task(5, per_class=per_class), labels=labels)
        ocs.note_shortage(given, torch.tensor(had, dtype=torch.int64))
        assert given.events == [SHORTAGE] * short


def test_it_is_said_where_the_candidates_are_short() -> None:
    """Of which there are nine in each of these streams."""
    said = []
    for seed in range(10):
        given = task(seed=seed, kept=3, gradients="head")
        labels = given.labels[places(ocs.propose(given), given)[:9]]
        said.append(any((labels == label).sum() < 2 for label in range(3)))
        assert given.events == [SHORTAGE] * said[-1]
    assert len(set(said)) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch": 0}, "here.batch is 0; it must be at least 1"),
        ({"kept": 0}, "here.kept is 0; it must be at least 1"),
        ({"kept": 21}, "here.kept is 21; it must be at most batch, 20"),
        ({"tau": -1.0}, "here.tau is -1.0; it must be at least 0"),
        ({"gradients": "heads"}, "here.gradients 'heads' is unknown; did you mean 'head'"),
        ({"order": "scores"}, "here.order 'scores' is unknown; did you mean 'score'"),
        ({"gamma": 1}, "here: 'gamma' is unknown"),
    ],
)
def test_impossible_options_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(config.ParameterError, match=message):
        config.build(Options, values, "here")


def test_the_options_are_the_published_ones() -> None:
    """But for the order of the candidates; and as many may be kept as there are."""
    assert Options() == Options(20, 10, 1000.0, "all", "score")
    assert coresets.options("ocs", {"kept": 20}) == Options(kept=20)
    assert coresets.proposes("ocs")
