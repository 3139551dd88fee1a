"""TagFed: pruning, masks and losses by hand; owners, groups, messages, returning tasks."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import P, first, plan, run, tiny

from stamp_core.client.workspace import RoundId
from stamp_core.config.decode import ParameterError
from stamp_core.core.seeding import generator
from stamp_core.data.split import Plan
from stamp_core.engine.executor import Worker
from stamp_core.methods.base.method import ClientRound, Log, Reply, State
from stamp_core.methods.tagfed import TagFed
from stamp_core.models.flat import FlatModel
from stamp_core.models.generators import build_seeded
from stamp_core.models.packed import (
    COPIED,
    FREE,
    TaskWeights,
    final_free_share,
    free_share,
    initial_owners,
    prune,
)

FEW = {"images_per_class": 20}  # 40 images in a task
WEIGHTS = 64 * 32  # of the small network's encoder; R other parameters are copied for each task
R = P - WEIGHTS


def tagfed_worker(**options: Any) -> tuple[Worker, Plan, TagFed]:
    """A worker for TagFed on 40 images per task, its plan and its method."""
    experiment = tiny("tagfed", **{"split": FEW, "keep": 0.3, "mask_lr": 0.01, **options})
    plan_ = plan(experiment)
    worker = small.worker(experiment, plan_)
    assert isinstance(worker.method, TagFed)
    return worker, plan_, worker.method


def rounds(worker: Worker, plan_: Plan) -> Iterator[tuple[int, State, list[Reply]]]:
    """After every round: the experience, the server's state, and all clients' replies."""
    server, states, *_ = worker.initial_states(0)
    per_experience = worker.work.training.rounds
    for experience in range(plan_.experiences):
        for round_ in range(per_experience):
            replies = []
            for client, state in enumerate(states):
                address = RoundId(0, client, experience, round_, round_ == per_experience - 1)
                message = worker.method.broadcast(server, client)
                client_round = ClientRound(address, plan_, dict(state), message)
                replies.append(worker.method.train_client(client_round))
                states[client] = replies[-1].state
            server = worker.method.aggregate(server, replies, Log())
            yield experience, server, replies


def settled(worker: Worker, plan_: Plan, server: State, reply: Reply) -> State:
    """A client's state with what the server would send next."""
    method = worker.method
    assert isinstance(method, TagFed)
    message = method.broadcast(server, reply.client)
    address = RoundId(0, reply.client, 0, 0)
    return method.settled(ClientRound(address, plan_, reply.state, message))


def after_experiences(worker: Worker, plan_: Plan, client: int = 0) -> list[State]:
    """A client's settled state after each experience."""
    last = worker.work.training.rounds - 1
    states = []
    for place, (_, server, replies) in enumerate(rounds(worker, plan_)):
        if place % (last + 1) == last:
            states.append(settled(worker, plan_, server, replies[client]))
    return states


# --- pruning by hand


def test_the_schedule_of_pruning_by_hand() -> None:
    """s(k) = 0.75 (1 - (1 - k / 4)^3) of 16 weights: 6.94, 10.5, 11.8 and 12 are rounded."""
    counts = [round(16 * free_share(k, 4, 0.75)) for k in range(5)]
    assert counts == [0, 7, 10, 12, 12]
    values = torch.randperm(16, generator=generator("weights")) + 1.0
    owners = torch.ones(16, dtype=torch.uint8)
    for k, expected in enumerate(counts):
        owners = prune(values, owners, 1, free_share(k, 4, 0.75), [16])
        assert values[owners == FREE].sort().values.tolist() == list(range(1, expected + 1))


def test_what_is_free_after_each_task_by_hand() -> None:
    """Each of ten tasks keeps a tenth of all: 1 - 0.1 / (1 - 0.1 (t - 1)) of what was free."""
    expected = [0.9, 0.8889, 0.875, 0.8571, 0.8333, 0.8, 0.75, 0.6667, 0.5, 0]
    shares = [final_free_share(0.1, task) for task in range(1, 11)]
    assert shares == pytest.approx(expected, abs=5e-5)
    assert final_free_share(1.0, 1) == final_free_share(0.3, 4) == final_free_share(0.5, 3) == 0


def test_pruning_is_by_tensor_and_touches_no_other_task() -> None:
    """In the second tensor the weights of task 1 and what is copied do not count.

    Half of 4 weights of task 2 and 2 free ones are 3: besides the free ones the smallest, -1.
    """
    values = torch.tensor([4.0, -3.0, 2.0, 1.0, 9.0, -1.0, 5.0, 0.1, 7.0, 0.0, -6.0, 0.2])
    owners = torch.tensor([2, 2, 2, 2, 2, 2, 2, 1, 0, 0, 2, COPIED], dtype=torch.uint8)
    after = prune(values, owners, 2, 0.5, [4, 8])
    assert after.tolist() == [2, 2, 0, 0, 2, 0, 2, 1, 0, 0, 2, COPIED]
    assert owners.tolist()[2] == 2  # not in place


def test_only_weights_of_the_encoder_are_owned() -> None:
    worker, _, _ = tagfed_worker()
    owners = initial_owners(worker.work.classifier)
    assert (owners[:WEIGHTS] == FREE).all() and (owners[WEIGHTS:] == COPIED).all()


# --- masks by hand


def test_masks_by_hand() -> None:
    """Weights: two of the task, an earlier one picked, one not picked, and a free one.

    Live are (5, 6, 2, 0, 0). With dL/dw' = (1, 2, 3, -4, 5): dL/dm = w dL/dw' = 2 x 3 and 3 x -4
    for the earlier ones, and only the task's own weights keep their gradient. Adam's first step is
    0.01 against the sign: m = (0.01 - 0.01, 0 + 0.01), so now the other one is picked.
    """
    trained = torch.tensor([True, True, False, False, False])
    earlier = torch.tensor([0.0, 0.0, 2.0, 3.0, 0.0])
    picked = torch.tensor([False, False, True, False, False])
    live = torch.tensor([5.0, 6.0, 7.0, 8.0, 9.0])
    weights = TaskWeights(trained, earlier, picked, lr=0.01)
    weights.compose(live)
    assert live.tolist() == [5, 6, 2, 0, 0]
    gradients = torch.tensor([1.0, 2.0, 3.0, -4.0, 5.0])
    weights.correct(gradients)
    assert gradients.tolist() == [1, 2, 0, 0, 0]
    assert weights.mask.gradients.tolist() == [0, 0, 6, -12, 0]
    expected = torch.tensor([0, 0, 0.0, 0.01, 0])
    torch.testing.assert_close(weights.mask.parameters, expected, rtol=0, atol=1e-6)
    weights.compose(live)
    assert live.tolist() == [5, 6, 0, 3, 0]
    assert weights.picked().tolist() == [False, False, False, True, False]


def test_without_a_learning_rate_a_mask_stays() -> None:
    ones = torch.ones(3)
    weights = TaskWeights(ones == 0, ones, ones > 0, lr=None)
    weights.correct(gradients := torch.ones(3))
    assert not gradients.any() and weights.picked().all()


def test_a_weight_is_dropped_after_50_steps_at_the_published_rate() -> None:
    """From 0.01 to 0.005 at 1e-4 a step, where the gradient keeps its sign."""
    ones = torch.ones(1)
    weights = TaskWeights(ones == 0, ones, ones > 0, lr=1e-4)
    steps = 0
    while weights.picked().any() and steps < 60:
        weights.correct(torch.ones(1))
        steps += 1
    assert 49 <= steps <= 51


# --- owners in a run


@pytest.mark.parametrize("exchange", ["weights", "features"])
def test_owners_divide_the_weights_and_each_task_keeps_its_share(exchange: str) -> None:
    """30 % of 2048 weights in each of three tasks, up to one by rounding; 10 % stay free."""
    worker, plan_, _ = tagfed_worker(exchange=exchange)
    for number, state in enumerate(after_experiences(worker, plan_), 1):
        owners = state["owners"][:WEIGHTS]
        counts = [int((owners == task).sum()) for task in range(number + 1)]
        assert sum(counts) == WEIGHTS
        assert all(abs(count - 0.3 * WEIGHTS) <= 1 for count in counts[1:])
        assert (state["owners"][WEIGHTS:] == COPIED).all()


@pytest.mark.parametrize("exchange", ["weights", "features"])
def test_what_earlier_tasks_own_never_changes(exchange: str) -> None:
    """Bit for bit, though weights decay: their weights and each of their whole sub-models."""
    training = {"weight_decay": 0.01, "momentum": 0.9}
    worker, plan_, method = tagfed_worker(exchange=exchange, training=training)
    states = after_experiences(worker, plan_)
    for number, (before, after) in enumerate(pairwise(states), 1):
        for task in range(1, number + 1):
            small.assert_equal_trees(
                list(method.sub_model(after, task)), list(method.sub_model(before, task))
            )
            own = before["owners"] == task
            assert torch.equal(after["owners"] == task, own)
            assert torch.equal(after["weights"][own], before["weights"][own])
        new = after["owners"] == number + 1
        assert not torch.equal(after["weights"][new], before["weights"][new])


def test_fixed_weights_do_not_decay_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step all weights but the task's own are those that the round started with."""
    worker, plan_, method = tagfed_worker(training={"weight_decay": 1.0, "rounds": 1}, mask_lr=0.0)
    state = after_experiences(worker, plan_)[1]
    client_round = ClientRound(RoundId(0, 0, 2, 0, True), plan_, state, {})
    corrected, live = TagFed.correct_gradient, worker.work.model.parameters
    seen = []

    def correct_gradient(self: TagFed, client_round: ClientRound) -> None:
        trained = self.trained(client_round.scratch["own"])
        seen.append((live[~trained].clone(), live[trained].clone()))
        corrected(self, client_round)

    monkeypatch.setattr(TagFed, "correct_gradient", correct_gradient)
    method.train_client(client_round)
    (fixed, own), *later = seen
    assert len(later) == 2 and fixed.any()
    for fixed_later, own_later in later:
        assert torch.equal(fixed_later, fixed) and not torch.equal(own_later, own)


@pytest.mark.parametrize("exchange", ["weights", "features"])
def test_a_returning_task_is_trained_in_a_copy(exchange: str) -> None:
    """In a second cycle owners and all first weights stay; only its own copies change."""
    split = {**FEW, "tasks": 2, "cycles": 2}
    worker, plan_, method = tagfed_worker(exchange=exchange, split=split)
    _, before_return, *later = after_experiences(worker, plan_)
    for task, (before, after) in enumerate(pairwise([before_return, *later]), 1):
        assert after["task"] == task and len(after["keys"]) == 2
        for name in ("owners", "weights"):
            assert torch.equal(after[name], before[name])
        own = after["owners"] == task
        assert not torch.equal(after["augmented"][own], before["augmented"][own])
        others = (after["owners"] != task) & (after["owners"] != COPIED)
        assert torch.equal(after["augmented"][others], before["augmented"][others])
        other = 3 - task
        small.assert_equal_trees(
            list(method.sub_model(after, other)), list(method.sub_model(before, other))
        )


def test_masks_learn_in_the_first_round_of_a_task_alone() -> None:
    """The first task has none; at a large learning rate some earlier weights are dropped."""
    worker, plan_, _ = tagfed_worker(exchange="weights", mask_lr=0.01)
    picked = []
    for experience, _, replies in rounds(worker, plan_):
        record = replies[0].state["tasks"][str(experience + 1)]
        picked.append(record["picked"])
    every = torch.full_like(picked[0], 255)
    every[-1] = 2 ** (P % 8 or 8) - 1
    assert torch.equal(picked[0], every) and torch.equal(picked[1], every)
    assert not torch.equal(picked[2], every)
    assert torch.equal(picked[3], picked[2]) and torch.equal(picked[5], picked[4])


def test_free_weights_do_not_count_and_earlier_ones_do_only_if_picked() -> None:
    worker, plan_, method = tagfed_worker(exchange="weights")
    state = after_experiences(worker, plan_)[1]
    parameters, _ = method.sub_model(state, 2)
    owners = state["owners"]
    assert not parameters[owners == FREE].any()
    assert torch.equal(parameters[owners == 2], state["augmented"][owners == 2])
    earlier = owners == 1
    kept = parameters[earlier] != 0
    assert torch.equal(parameters[earlier][kept], state["weights"][earlier][kept])
    assert 0 < kept.sum() < earlier.sum()
    of_first, _ = method.sub_model(state, 1)
    assert not of_first[owners == 2].any()


# --- simpler methods


@pytest.mark.parametrize("training", [{}, {"momentum": 0.9, "shift": 1, "epochs": 2}], ids=str)
def test_without_tracing_pruning_and_distillation_it_is_local_training(
    training: dict[str, Any],
) -> None:
    """Features are of no use then; nothing is sent."""
    alone: dict[str, Any] = {"exchange": "features", "trace": "none", "keep": 1.0, "kd": 0.0}
    record = run(tiny("tagfed", split=FEW, training=training, **alone))
    local = run(tiny("local", split=FEW, training=training))
    np.testing.assert_array_equal(record.scores["personal"][:3], local.scores["personal"][:3])
    losses = [[row["loss"] for row in each.history] for each in (record, local)]
    assert losses[0] == losses[1]
    assert all(row["bytes"] == {"down": 0, "up": 0} for row in record.history)
    distilled = run(tiny("tagfed", split=FEW, training=training, **{**alone, "kd": 0.5}))
    assert [row["loss"] for row in distilled.history] != losses[0]


def test_the_first_task_of_equal_clients_is_fedavg_until_it_is_pruned() -> None:
    """One group of all clients, of which none prunes in its first round."""
    split = {**FEW, "tasks": 1, "order": "common"}
    once = {"rounds": 1}
    record = run(tiny("tagfed", split=split, training=once, exchange="weights", trace="task"))
    plain = run(tiny(split=split, training=once))
    np.testing.assert_array_equal(record.scores["personal"][:3], plain.scores["global"][:3])
    np.testing.assert_array_equal(record.scores["local"][:3], plain.scores["local"][:3])


# --- groups


def test_clients_are_averaged_with_those_that_train_the_same_task_on_the_same_past() -> None:
    """0 and 1 have one order of tasks, 2 another one of the same tasks, 3 other ones."""
    experiment = tiny("tagfed", split=FEW, exchange="weights", keep=0.3)
    whole = plan(experiment)
    a, b, c = whole.clients[0]
    clients = ((a, b, c), (a, b, c), (b, a, c), whole.clients[3])
    changed = replace(whole, clients=clients)
    worker = small.worker(experiment, changed)
    for _, server, replies in rounds(worker, changed):
        numbers = [int(reply.message["group"]) for reply in replies]
        assert numbers[0] == numbers[1] and len(set(numbers)) == 3
        sent = [worker.method.broadcast(server, client)["parameters"] for client in range(4)]
        mean = (replies[0].message["parameters"] + replies[1].message["parameters"]) / 2
        torch.testing.assert_close(sent[0], mean, rtol=0, atol=1e-6)
        assert torch.equal(sent[0], sent[1])
        for alone in (2, 3):
            assert torch.equal(sent[alone], replies[alone].message["parameters"])
        assert len(server["groups"]) == 3  # what nobody needs is forgotten
        owners = [reply.state["owners"] for reply in replies]
        assert torch.equal(owners[0], owners[1])


def test_equal_owners_with_another_past_are_another_group() -> None:
    """The first task keeps all weights: after it both clients train none for one task."""
    experiment = tiny("tagfed", split=FEW, exchange="weights", keep=1.0)
    whole = plan(experiment)
    a, b, c = whole.clients[0]
    changed = replace(first(whole, 2), clients=((a, b, c), (c, b, a)))
    worker = small.worker(experiment, changed)
    last = [replies for experience, _, replies in rounds(worker, changed) if experience == 1][-1]
    states = [reply.state for reply in last]
    assert [state["keys"][1] for state in states] == [states[0]["keys"][1]] * 2
    assert not any((state["owners"] == 2).any() for state in states)
    assert len({int(reply.message["group"]) for reply in last}) == 2


def test_features_are_pooled_by_task_whatever_was_learnt_before() -> None:
    """Clients that train one task in the same round share its tail; the others have their own."""
    experiment = tiny("tagfed", split=FEW)
    whole = plan(experiment)
    a, b, c = whole.clients[0]
    clients = ((a, b, c), (b, a, c), (c, b, a), (b, c, a))
    changed = replace(whole, clients=clients)
    worker = small.worker(experiment, changed)
    numbers = {}
    for experience, _, replies in rounds(worker, changed):
        if "group" in replies[0].message:
            numbers[experience] = [int(reply.message["group"]) for reply in replies]
    start, second, third = (numbers[experience] for experience in range(3))
    key_a, key_b, key_c = start[0], start[1], start[2]
    assert len({key_a, key_b, key_c}) == 3 and start[3] == key_b
    assert second == [key_b, key_a, key_b, key_c] and third == [key_c, key_c, key_a, key_a]


# --- features


def test_what_is_sent_and_answered() -> None:
    """Up: 32 features, 10 logits and a label of 40 training images, and the group. Down: logits."""
    worker, plan_, _ = tagfed_worker(training={"rounds": 3})
    dataset = worker.work.dataset
    for place, (experience, server, replies) in enumerate(rounds(worker, plan_)):
        down = worker.method.broadcast(server, 0)
        if place % 3 == 2:  # after the last round there is nobody to use an answer
            assert replies[0].message == down == {}
            continue
        message = replies[0].message
        up = sum(tensor.nbytes for tensor in message.values())
        assert up == 40 * (4 * 32 + 4 * 10 + 1) + 8
        assert down["answers"].shape == (40, 10) and down["answers"].nbytes == 40 * 4 * 10
        indices = plan_.train_indices(dataset, 0, experience)
        assert message["labels"].tolist() == dataset.y_train[indices].tolist()
    record = run(tiny("tagfed", split=FEW, training={"rounds": 2}))
    sizes = [row["bytes"] for row in record.history]
    assert sizes[0] == {"down": 0, "up": 4 * (40 * 169 + 8)}
    assert sizes[1] == {"down": 4 * 40 * 40, "up": 0} and sizes[2]["down"] == 0


def test_features_and_logits_are_those_of_the_trained_sub_model() -> None:
    worker, plan_, method = tagfed_worker()
    _, _, replies = next(rounds(worker, plan_))
    message, state = replies[0].message, replies[0].state
    worker.work.model.load(*method.sub_model(state, 1))
    images = worker.work.dataset.x_train[plan_.train_indices(worker.work.dataset, 0, 0)]
    assert torch.equal(message["logits"], worker.work.outputs(images))
    features = worker.work.outputs(images, worker.work.classifier.encode)
    assert torch.equal(message["features"], features)


def test_each_image_meets_its_own_answer() -> None:
    """The batches are those of before; the teacher's rows are found by the image's place."""
    worker, plan_, method = tagfed_worker(training={"shift": 1, "epochs": 2, "rounds": 3})
    state = next(rounds(worker, plan_))[2][0].state
    indices = plan_.train_indices(worker.work.dataset, 0, 0)
    labels = worker.work.dataset.y_train[indices]
    answers = torch.arange(40.0)[:, None] + 100 * labels[:, None]
    client_round = ClientRound(RoundId(0, 0, 0, 1), plan_, state, {"answers": answers})
    client_round.indices = indices
    method.receive(client_round)
    plain = list(worker.work.batches(client_round.round_id, indices))
    met = []
    for (images, known), (expected, own) in zip(method.batches(client_round), plain, strict=True):
        assert torch.equal(images, expected) and torch.equal(known, own)
        rows = client_round.scratch["teacher"][:, 0]
        assert torch.equal(rows.div(100, rounding_mode="floor").long(), known)
        met += (rows % 100).tolist()
    assert sorted(met) == sorted(2 * list(range(40)))


def test_the_loss_is_a_mixture_by_hand() -> None:
    """kd = 1/4, T = 2: z = (ln 3, 0) gives CE = -ln 3/4; softened (sqrt 3, 1) / (1 + sqrt 3).

    The teacher (0, 0) gives (1/2, 1/2): KL = -ln 2 - (ln p + ln (1 - p)) / 2, times T^2 = 4.
    """
    _, _, method = tagfed_worker(kd=0.25, temperature=2.0)
    outputs = torch.tensor([[3.0, 1.0]]).log()
    loss = method.mixed_loss(outputs, torch.tensor([0]), torch.zeros(1, 2))
    p = 3**0.5 / (1 + 3**0.5)
    divergence = -np.log(2) - (np.log(p) + np.log(1 - p)) / 2
    assert float(loss) == pytest.approx(0.75 * -np.log(0.75) + 0.25 * 4 * divergence, rel=1e-5)


def test_a_tail_that_only_distils_imitates_its_client() -> None:
    worker, _, method = tagfed_worker(kd=1.0, temperature=1.0, tail_epochs=300)
    draw = generator("features")
    features, logits = torch.randn(40, 32, generator=draw), torch.randn(40, 10, generator=draw)
    message = {"features": features, "logits": logits, "labels": torch.zeros(40).long()}
    tail = FlatModel(build_seeded(method.build_tail, 0, "tail"))

    def divergence() -> float:
        student = tail.module(features).detach().log_softmax(1)
        return float(F.kl_div(student, logits.softmax(1), reduction="batchmean"))

    before = divergence()
    method.fit_tail(tail, [message], generator("order"))
    assert divergence() < before / 20
    assert len(tail.parameters) == 32 * 64 + 64 + 64 * 10 + 10
    assert worker.work.classes == 10


# --- evaluation


def test_each_task_is_scored_by_its_own_sub_model_where_it_is_known() -> None:
    """Otherwise by the class with the largest probability of all sub-models."""
    worker, plan_, method = tagfed_worker(exchange="weights")
    state = after_experiences(worker, plan_)[1]
    client_round = ClientRound(RoundId(0, 0, 1, 1, True), plan_, state, {})
    scores, dataset = method.personal_scores(client_round), worker.work.dataset
    for task in range(2):
        test = plan_.test_indices(dataset, 0, task)
        images, labels = dataset.x_test[test], dataset.y_test[test]
        each = []
        for number in (1, 2):
            worker.work.model.load(*method.sub_model(state, number))
            each.append(worker.work.outputs(images).softmax(1))
        own = torch.tensor(plan_.clients[0][task].classes)
        told = own[each[task][:, own].argmax(1)] == labels
        routed = torch.stack(each).amax(0).argmax(1) == labels
        assert float(scores[2, 0, task]) == pytest.approx(float(told.double().mean()))
        assert float(scores[0, 0, task]) == pytest.approx(float(routed.double().mean()))


# --- bytes and refused parameters


def test_a_client_sends_what_its_task_owns_and_keeps_little_of_each_task() -> None:
    """Of the first task all weights at first, then 30 % of them, and the copied parameters.

    Kept: two networks, a byte for each owner, and of each task a bit for each weight and copies.
    """
    record = run(tiny("tagfed", split=FEW, exchange="weights", keep=0.25))
    sizes = [row["bytes"]["up"] // 4 for row in record.history]
    owned = [WEIGHTS, 0.25 * WEIGHTS, 0.75 * WEIGHTS, 0.25 * WEIGHTS, 0.5 * WEIGHTS, 0.25 * WEIGHTS]
    assert sizes == [4 * (int(own) + R) + 8 for own in owned]
    downs = [row["bytes"]["down"] // 4 for row in record.history]
    assert downs == [4 * P, *(size - 8 for size in sizes[:-1])]
    bits = -(-P // 8)
    disks = [row["disk"] for row in record.history]
    assert disks == [2 * 4 * P + P + tasks * (bits + 4 * R) for tasks in (1, 1, 2, 2, 3, 3)]


def test_more_tasks_than_a_byte_can_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan_, method = tagfed_worker()
    monkeypatch.setattr(Plan, "tasks", 255)
    with pytest.raises(ParameterError, match="tasks is 255; it must be below 255"):
        method.initial_states(plan_)
