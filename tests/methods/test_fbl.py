"""FBL: weights, relations and thresholds by hand; the old model; labels that are hidden."""

import math
from typing import Any

import pytest
import small
import torch
import torch.nn.functional as F
from small import plan, run, tiny
from stamp_core.client.workspace import RoundId
from test_methods import FEW, client_rounds
from torch import Tensor

from stamp_core.engine.executor import Worker
from stamp_core.engine.experiment import Experiment
from stamp_core.methods import fbl as module
from stamp_core.methods.base.method import ClientRound
from stamp_core.methods.fbl import (
    UNSURE,
    class_members,
    class_thresholds,
    entropies,
    relation_loss,
    samples,
)

ONE_CLASS = small.SCENES["split"]
OFF: dict[str, Any] = {"weights": "none", "relation": 0.0, "pseudo": False}


def images(**options: Any) -> Experiment:
    """FBL-C on the digits."""
    return tiny("fbl", **{"split": FEW, "training": {"rounds": 1}, **options})


def scenes(**options: Any) -> Experiment:
    """FBL on a few small scenes."""
    return tiny("fbl", **{**small.SCENES, "training": {"rounds": 1}, **options})


def begun(experiment: Experiment, experience: int = 1) -> tuple[Worker, ClientRound]:
    """A client round in which the teacher is ready; the live model is the received one."""
    whole = plan(experiment)
    worker = small.worker(experiment, whole)
    client_round = small.arrived(worker, whole, experience)
    method = worker.method
    method.receive(client_round)
    client_round.indices = method.train_indices(client_round)
    live = worker.work.model
    old = {"parameters": live.parameters.clone(), "buffers": live.buffers.clone()}
    client_round.scratch |= {"old": old, "epochs": 0, "epoch": 0, "entropy": -1.0}
    method.prepare_teacher(client_round)
    return worker, client_round


# --- by hand


def weigh(power: float, p: list[float], labels: list[int], **params: Any) -> Tensor:
    """The weights of samples with these probabilities of their labels; classes 0, 1, 2 | 3 4 5.

    The first two tasks have the classes 0 and 1, and 2; the current one has the others.
    """
    worker, client_round = begun(images(**params))
    groups = torch.tensor([0, 0, 1, 2, 2, 2, 2, 2, 2, 2])
    client_round.scratch |= {"power": power, "groups": F.one_hot(groups, 3).float()}
    logits = torch.full((len(p), 10), -1e9)
    logits[:, 9] = (1 - torch.tensor(p)).log()
    logits[range(len(p)), labels] = torch.tensor(p).log()
    members = class_members(torch.tensor(labels), 10)
    weights: Tensor = worker.method.compensation(client_round, logits, members)
    return weights


def test_weights_by_hand() -> None:
    """z = 0.6: g = (1 - p)^z = .1^.6, .5^.6, .9^.6 = .2512, .6598, .9387, mean .6166."""
    weights = weigh(0.6, [0.9, 0.5, 0.1], [3, 4, 5])
    assert weights.tolist() == pytest.approx([0.4074, 1.0701, 1.5225], abs=1e-4)
    assert float(weights.mean()) == pytest.approx(1)


def test_weights_have_the_mean_one_in_each_tasks_classes() -> None:
    """The groups are disjoint: the two of the first task, one of the second, two current ones."""
    p, labels = [0.9, 0.3, 0.2, 0.7, 1.0], [0, 1, 2, 3, 4]
    weights = weigh(0.4, p, labels)
    for group in ([0, 1], [2], [3, 4]):
        assert float(weights[group].mean()) == pytest.approx(1)
    assert weights[2] == 1 and weights[1] > 1 > weights[0]
    assert weigh(0.0, p, labels).tolist() == pytest.approx([1] * 5)
    old = weigh(0.4, p, labels, weights="old")
    assert torch.equal(old[:3], weights[:3]) and (old[3:] == 1).all()


def test_the_divergence_of_class_means_by_hand() -> None:
    """One class with P = (.6, .3, .1) and Y = (.8, .1, .1): .8 ln(4/3) + .1 ln(1/3) = .1203.

    Samples whose mean is P count as P does. A second class where both agree halves the mean, and
    weights of 3 and 1, which are 1.5 and 0.5 times their mean, bring it to three quarters.
    """
    p, y = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1]]), torch.tensor([[0.8, 0.1, 0.1]] * 2)
    one = relation_loss(p, y, class_members(torch.zeros(2), 3), torch.ones(2))
    assert float(one) == pytest.approx(0.1203, abs=1e-4)
    members = class_members(torch.tensor([0, 0, 1]), 3)
    both = torch.cat([p, y[:1]]), torch.cat([y, y[:1]]), members
    half = relation_loss(*both, torch.ones(3))
    assert float(half) == pytest.approx(0.1203 / 2, abs=1e-4)
    assert float(relation_loss(*both, torch.tensor([2.0, 4, 1]))) == pytest.approx(
        0.1203 * 0.75, abs=1e-4
    )


def test_relations_are_zero_where_means_agree() -> None:
    """The value and its gradient, although single predictions differ; a share of 0 is no nan."""
    logits = torch.tensor([[0.3, 0.1, -200.0], [0.1, 0.3, -200.0]], requires_grad=True)
    p, members = logits.softmax(1), class_members(torch.tensor([1, 1]), 3)
    loss = relation_loss(p, p.detach().flip(0), members, torch.ones(2))
    loss.backward()
    assert logits.grad is not None
    assert abs(loss.item()) < 1e-6 and float(logits.grad.abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("share", "threshold", "kept"), [(0.2, 0.09, 1), (0.5, 0.2, 3), (0.8, 0.48, 4), (1.0, 0.8, 5)]
)
def test_thresholds_by_hand(share: float, threshold: float, kept: int) -> None:
    """Quantiles of .05, .1, .2, .4, .8 at class 2; class 1 is sure; class 0 is never predicted."""
    entropy = torch.tensor([0.8, 0.05, 0.0, 0.2, 0.4, 0.1])
    predicted = torch.tensor([2, 2, 1, 2, 2, 2])
    found = class_thresholds(entropy, predicted, share, 3)
    assert found.tolist() == pytest.approx([0.001, 0.001, threshold])
    assert int((entropy[predicted == 2] <= found[2]).sum()) == kept


def test_entropies_by_hand() -> None:
    """Of four equal shares 1, of two 1/2, of one 0; a single column has none."""
    p = torch.tensor([[0.25] * 4, [0.5, 0.5, 0, 0], [1.0, 0, 0, 0]])
    assert entropies(p).tolist() == pytest.approx([1, 0.5, 0])
    assert entropies(torch.ones(2, 1)).tolist() == [0, 0]


def test_a_row_for_each_pixel() -> None:
    maps = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    assert torch.equal(samples(maps)[27], maps[1, :, 1, 2])
    assert torch.equal(samples(maps[:, :, 0, 0]), maps[:, :, 0, 0])


def test_targets_by_hand() -> None:
    """Old classes have the old model's prediction, new ones a tenth of it and nine of their own."""
    worker, client_round = begun(images(split={**FEW, "order": "given"}))
    assert client_round.scratch["columns"].tolist() == [0, 1]
    teacher = torch.tensor([[0.7, 0.3], [0.2, 0.8]])
    members = class_members(torch.tensor([1, 3]), 10)
    targets = worker.method.relation_targets(client_round, teacher, members)
    assert targets[0].tolist() == pytest.approx([0.7, 0.3, *[0] * 8])
    assert targets[1].tolist() == pytest.approx([0.02, 0.08, 0, 0.9, *[0] * 6])


# --- the loss


def test_the_loss_of_images_is_that_of_its_parts() -> None:
    """Without exemplars all images are new: their weights have the mean 1."""
    worker, client_round = begun(images())
    work, method = worker.work, worker.method
    pictures = work.normalise(work.dataset.x_train[client_round.indices])
    labels = work.dataset.y_train[client_round.indices]
    client_round.scratch["soft"] = torch.empty(0, dtype=torch.int64)
    logits = work.model.module(pictures)
    p, own = logits.softmax(1), torch.eye(10)[labels]
    old = client_round.scratch["columns"]
    q = torch.zeros(len(labels), 10)
    q[:, old] = logits[:, old].softmax(1)  # the received model is the old one
    gaps = (1 - (p * own).sum(1)).detach().sqrt()  # two old classes of four
    weights = gaps / gaps.mean()
    expected = (weights * -(own * p.log()).sum(1)).mean()
    classes = labels.unique().tolist()
    importance = {c: float(weights[labels == c].mean()) for c in classes}
    for c in classes:
        y, mean = (0.9 * own + 0.1 * q)[labels == c].mean(0), p[labels == c].mean(0)
        divergence = (y[y > 0] * (y[y > 0] / mean[y > 0]).log()).sum()
        expected = expected + importance[c] / sum(importance.values()) * divergence
    loss = method.loss(client_round, pictures, labels)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_model_that_is_its_own_teacher_has_no_relation_loss_on_old_samples() -> None:
    """Neither a value nor a gradient: its softmax over old classes alone is all of it."""
    worker, client_round = begun(images(weights="none"))
    columns = client_round.scratch["columns"]
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    others = torch.ones(10, dtype=torch.bool)
    others[columns] = False
    logits[:, others] = -1e4
    logits.requires_grad_()
    members = class_members(columns[torch.arange(6) % len(columns)], 10)
    teacher = logits.detach()[:, columns].softmax(1)
    targets = worker.method.relation_targets(client_round, teacher, members)
    loss = relation_loss(logits.softmax(1), targets, members, torch.ones(6))
    loss.backward()
    assert logits.grad is not None
    assert abs(loss.item()) < 1e-6 and float(logits.grad.abs().max()) < 1e-6


# --- FedAvg


def test_the_first_task_is_fedavgs_whatever_the_parameters() -> None:
    short = {"training": {"rounds": 1}}
    once = {**FEW, "tasks": 1}
    small.assert_same_weights(run(images(split=once)), run(tiny(split=once, **short)))
    blocks = {**small.SCENES, "split": {**ONE_CLASS, "tasks": 1}, **short}
    small.assert_same_weights(run(tiny("fbl", **blocks)), run(tiny(**blocks)))


def test_on_scenes_it_is_fedavg_with_neutral_parameters() -> None:
    neutral = module.FBL.neutral
    small.assert_same_weights(run(scenes(training={}, **neutral)), run(tiny(**small.SCENES)))


@pytest.mark.parametrize("kind", ["images", "scenes"])
def test_each_part_changes_the_second_task(kind: str) -> None:
    make = {"images": images, "scenes": scenes}[kind]
    memory = {"memory": small.kept(3)} if kind == "images" else {}
    parts: list[dict[str, Any]] = [
        {**OFF, "from_background": False},
        {"weights": "all"},
        {"relation": 1.0},
        {"pseudo": True},
        *([{"from_background": True}] if kind == "scenes" else []),
    ]
    results = []
    for part in parts:
        params = {**parts[0], **memory, **part}
        results.append(run(make(**params)).weights["head.bias"].tobytes())
    assert len(set(results)) == len(parts)


# --- the old model


@pytest.mark.parametrize("make", [images, scenes])
def test_the_old_model_is_the_one_received_when_the_task_began(make: Any) -> None:
    """And stays so, bit for bit, through the rounds of the task."""
    experiment = make()
    whole = plan(experiment)
    worker = small.worker(experiment, whole)
    server, states, *_ = worker.initial_states(0)
    message, state = worker.method.broadcast(server, 0), states[0]
    held = []
    for experience, round_ in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)):
        sent = {"parameters": message["parameters"] + experience + 0.1 * round_}
        before = sent["parameters"].clone()
        address = RoundId(0, 0, experience, round_)
        state = worker.train_client(address, state, sent).reply.state
        held.append(state["old"].get("parameters"))
        if round_ == 0 and experience:
            assert torch.equal(held[-1], before)
        assert state["epochs"] == round_ + 1
    assert held[0] is held[1] is None
    assert torch.equal(held[2], held[3]) and torch.equal(held[2], held[4])
    assert not torch.equal(held[4], held[5])


def test_the_monitor_is_logged_with_hits_and_false_alarms() -> None:
    """The first visit is one; a model that is as unsure as before tells nothing."""
    experiment = images()
    whole = plan(experiment)
    worker = small.worker(experiment, whole)
    server, states, *_ = worker.initial_states(0)
    unsure, sure = torch.zeros(small.P), torch.zeros(small.P)
    sure[-10] = 50.0
    state, found = states[0], []
    rounds = [(0, unsure), (0, unsure), (0, sure), (1, sure), (1, unsure), (1, unsure)]
    for round_, (experience, parameters) in enumerate(rounds):
        sent = {**worker.method.broadcast(server, 0), "parameters": parameters}
        result = worker.train_client(RoundId(0, 0, experience, round_), state, sent)
        state = result.reply.state
        found.append(dict(result.reply.log.numbers))
    assert [each["entropy"] for each in found] == pytest.approx(
        [math.log(10), math.log(10), 0, 0, math.log(10), math.log(10)], abs=1e-3
    )
    told = [each.get("monitor: hits", each.get("monitor: false alarms")) for each in found]
    assert told == [1, 0, 0, 0, 1, 0]
    assert ["monitor: hits" in each for each in found] == [True, False, False, True, False, False]


# --- labels that are hidden


def test_hidden_labels_change_nothing_and_are_predicted() -> None:
    """With `pseudo` an exemplar's own label has no effect; without it has one."""
    for pseudo in (True, False):
        experiment = images(memory=small.kept(4), pseudo=pseudo)
        whole = plan(experiment)
        worker = small.worker(experiment, whole)
        arrived = small.arrived(worker, whole, 1)
        memory, ends = arrived.state["memory"], []
        for labels in (memory["labels"], memory["labels"].flip(0)):
            state = {**arrived.state, "memory": {**memory, "labels": labels}}
            reply = worker.train_client(arrived.round_id, state, arrived.message).reply
            ends.append(reply.message["parameters"])
        assert torch.equal(*ends) == pseudo


def hidden(worker: Worker, client_round: ClientRound, limit: float) -> tuple[Tensor, Tensor]:
    """The labels of some scenes and what becomes of them at a limit for all classes."""
    work = worker.work
    client_round.scratch["thresholds"] = [torch.full((4,), limit)]
    scenes_, masks = work.train_images(client_round.indices[:3])
    columns = client_round.scratch["columns"]
    maps = worker.method.teacher.module(work.normalise(scenes_))
    teacher = samples(maps)[:, columns].softmax(1)
    return masks.flatten(), worker.method.pseudo_labels(client_round, teacher, masks)


def test_the_background_of_scenes_has_labels_of_the_old_model() -> None:
    """All of them at the limit 1; none below 0; labels of the task's class stay."""
    worker, client_round = begun(scenes())
    masks, labels = hidden(worker, client_round, 1.0)
    own = masks != 3
    assert torch.equal(labels[own], masks[own]) and own.any()
    assert set(labels[~own].tolist()) <= set(client_round.scratch["columns"].tolist())
    masks, labels = hidden(worker, client_round, -1.0)
    assert torch.equal(labels[own], masks[own]) and (labels[~own] == UNSURE).all()


def test_unsure_pixels_have_no_gradient_and_do_no_harm() -> None:
    """The gradient of every logit is 0 there; if all are unsure, the loss is that of the rest."""
    worker, client_round = begun(scenes(weights="none", relation=0.0))
    work, method = worker.work, worker.method
    client_round.scratch["thresholds"] = [torch.full((4,), -1.0)]
    client_round.scratch["soft"] = torch.empty(0, dtype=torch.int64)
    pictures, masks = work.train_images(client_round.indices[:3])
    logits = work.classifier(work.normalise(pictures)).detach().requires_grad_()
    work.classifier.forward = lambda _: logits  # type: ignore[method-assign]
    loss = method.loss(client_round, work.normalise(pictures), masks)
    loss.backward()
    own = masks != 3
    assert logits.grad is not None
    assert (logits.grad.movedim(1, -1)[~own] == 0).all()
    expected = F.cross_entropy(samples(logits)[own.flatten()], masks[own]) * own.float().mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    empty = method.loss(client_round, work.normalise(pictures), torch.full_like(masks, 3))
    assert empty.item() == 0


def test_more_pseudo_labels_are_used_from_epoch_to_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of 0.2 + 0.1 e of each class, up to 0.8, counted over the rounds of a task."""
    shares: list[float] = []

    def recorded(entropy: Tensor, predicted: Tensor, share: float, classes: int) -> Tensor:
        shares.append(share)
        return class_thresholds(entropy, predicted, share, classes)

    monkeypatch.setattr(module, "class_thresholds", recorded)
    experiment = scenes(
        split={**ONE_CLASS, "clients": 1, "tasks": 2}, training={"rounds": 4, "epochs": 2}
    )
    run(experiment)
    assert shares == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.8])


def test_a_new_class_starts_as_a_part_of_the_background() -> None:
    """p(background) + p(new) is p(background) among the other classes, at every pixel."""
    experiment = scenes()
    worker, client_round = begun(experiment)
    work, method = worker.work, worker.method
    pictures = work.normalise(work.train_images(client_round.indices)[0])
    (new,) = method.current_classes(client_round)
    with torch.no_grad():
        before = work.classifier(pictures)
        method.start_from_background(client_round)
        after = work.classifier(pictures)
    before[:, new] = -torch.inf
    shared = after.softmax(1)[:, [new, 3]]
    torch.testing.assert_close(shared.sum(1), before.softmax(1)[:, 3], rtol=0, atol=1e-6)
    torch.testing.assert_close(shared[:, 0], shared[:, 1], rtol=0, atol=1e-6)


def test_messages_are_fedavgs() -> None:
    """The old model costs no byte on the way, and the bytes of a model on the disk."""
    record = run(images())
    for entry in record.history:
        assert entry["bytes"] == {"down": 16 * small.P, "up": 16 * small.P}
    rounds = client_rounds(small.worker(images(), plan(images())), plan(images()))
    sizes = [each.result.reply.state["old"] for each in rounds]
    assert [len(old) for old in sizes] == [0] * 4 + [2] * 8
