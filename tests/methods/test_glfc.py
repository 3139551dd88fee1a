"""GLFC and LGA: losses by hand, tasks and exemplars, old models, and what is sent for them."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import small
import torch
from by_hand import FULL_BATCH, Array, inputs, use_softmax_regression
from small import P, plan, run, tiny, with_train
from stamp_core.client.workspace import RoundId
from test_bytes import P as RESNET_P
from test_bytes import images, workspace
from test_methods import FEW, Trained, client_rounds
from torch import Tensor

from stamp_core.data.split import make_plan
from stamp_core.engine.executor import Worker
from stamp_core.methods.base import registry
from stamp_core.methods.base.method import ClientRound, Log, Reply, State
from stamp_core.methods.base.proxy_server import NOT_FINITE, OLD
from stamp_core.methods.base.task_server import PREFIX
from stamp_core.results.records import tree_bytes

ANNOUNCED = PREFIX + OLD  # of the old model's parts in a message
LGA = {"groups": "tasks", "new_weight": 1.0, "old_weight": 1.0}
FAST: dict[str, Any] = {"signal": "oracle", "recon_steps": 5, "perturb_steps": 2, "exemplars": 12}


def glfc(**options: Any) -> Worker:
    """A worker with the method, quick and with known tasks unless told otherwise."""
    options = {**FAST, "training": {"rounds": 1}, **options}
    experiment = tiny("glfc", **options)
    return small.worker(experiment, plan(experiment))


def trained(worker: Worker, client: int = 0) -> list[Trained]:
    """A client's rounds, one in every experience, of a federation that learns."""
    every = client_rounds(worker, worker.plans[0])
    return [each for each in every if each.client_round.client == client]


# --- losses by hand


def by_hand(worker: Worker, each: Trained, params: Any) -> Array:
    """Softmax regression's weights after one full batch of a client round, in numpy.

    With z = W x + b, s = sigmoid(z) and C columns, the gradient of a mean binary cross-entropy
    with targets y is dL/dz = w (s - y) / (n C) in the columns and 0 outside, where w are the
    weights; dL/dW = (dL/dz)^T X. The gap of an image is g = 1 - s_y, and w = g / mean of g in its
    group; with groups by task, g is raised to t / (t + 1) after t tasks.
    """
    client_round, state, message = each.client_round, each.client_round.state, each.before[1]
    plan_, client, e = client_round.plan, client_round.client, client_round.experience
    own = plan_.train_indices(worker.work.dataset, client, e)
    memory, data = state["memory"], worker.work.dataset
    x = np.concatenate([inputs(worker, data.x_train[own]), inputs(worker, memory["images"])])
    labels = torch.cat([data.y_train[own], memory["labels"]]).numpy()
    current = set(plan_.clients[client][e].classes)
    past = {c for u in range(len(plan_.clients)) for c in plan_.seen(u, e - 1)}
    columns = np.isin(np.arange(10), sorted(current | past))

    def scores(theta: Array) -> Array:
        z = x @ theta[:640].reshape(10, 64).T + theta[640:]
        return np.asarray(1 / (1 + np.exp(-z)))

    theta = message["parameters"].double().numpy()
    s, y, weights = scores(theta), np.eye(10)[labels], np.ones(len(labels))
    if e:
        tasks = [set(task.classes) for task in plan_.clients[client][:e]]
        newest = [max([-1, *(t for t in range(e) if c in tasks[t])]) for c in labels]
        group = np.array([-1 if c in current else t for c, t in zip(labels, newest, strict=True)])
        if params["groups"] == "old_new":
            group = np.minimum(group, 0)
        gaps = 1 - s[np.arange(len(labels)), labels]
        gaps = gaps ** (e / (e + 1) if params["groups"] == "tasks" else 1)
        for each_group in set(group.tolist()):
            weights[group == each_group] = (
                gaps[group == each_group] / gaps[group == each_group].mean()
            )
    size = len(labels) * columns.sum()
    slope = weights[:, None] * (s - y) * columns / size
    if e:
        distilled = np.isin(np.arange(10), sorted(past - current))
        targets = np.where(distilled, scores(message[ANNOUNCED + "parameters"].double().numpy()), y)
        shared = weights if params["groups"] == "tasks" else np.ones(len(labels))
        second = shared[:, None] * (s - targets) * columns / size
        slope = params["new_weight"] * slope + params["old_weight"] * second
    slope = params["scale"] * slope
    return np.asarray(theta - 0.1 * np.concatenate([(slope.T @ x).ravel(), slope.sum(0)]))


@pytest.mark.parametrize("variant", [{}, LGA], ids=["glfc", "lga"])
def test_rounds_by_hand(variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three experiences of softmax regression: no past task, one, and two."""
    use_softmax_regression(monkeypatch)
    worker = glfc(training=FULL_BATCH, scale=3.0, proxy="none", **variant)
    params = {"groups": "old_new", "new_weight": 0.5, "old_weight": 0.5, "scale": 3.0, **variant}
    for client in (0, 3):
        rounds = trained(worker, client)
        assert [len(each.client_round.state["memory"]["labels"]) for each in rounds] == [0, 12, 12]
        for each in rounds:
            expected = by_hand(worker, each, params)
            actual = each.result.reply.message["parameters"]
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


def test_the_parts_can_be_switched_off_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them changes the second task, and none the first."""
    use_softmax_regression(monkeypatch)
    parts: list[dict[str, Any]] = [{}, {"groups": "none"}, {"old_weight": 0.0}, {"exemplars": 0}]
    ends = []
    for part in parts:
        rounds = trained(glfc(training=FULL_BATCH, **part))
        ends.append([each.result.reply.message["parameters"] for each in rounds])
    for part in ends[1:]:
        assert torch.equal(part[0], ends[0][0]) and not torch.equal(part[1], ends[0][1])


def test_logits_outside_the_columns_have_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    use_softmax_regression(monkeypatch)
    for columns in ("known", "all"):
        worker = glfc(training=FULL_BATCH, columns=columns)
        first = trained(worker)[0]
        moved = first.result.reply.message["parameters"] - first.before[1]["parameters"]
        rows = moved[:640].view(10, 64).abs().sum(1).nonzero().flatten().tolist()
        own = worker.plans[0].clients[0][0].classes
        assert rows == (sorted(own) if columns == "known" else list(range(10)))


def prepared(worker: Worker, **scratch: Any) -> ClientRound:
    """A client round in which the classes 0 to 2 were learnt in turn and 7 to 9 are current."""
    learnt, current = torch.full((10,), -1), torch.zeros(10, dtype=torch.bool)
    learnt[:3], current[7:] = torch.arange(3), True
    round_ = ClientRound(RoundId(0, 0, 3, 0), worker.plans[0], {}, {})
    groups = torch.tensor([1, 2, 3, *[0] * 7])
    if worker.method.params.groups == "old_new":
        groups = groups.clamp(max=1)
    members = torch.eye(int(groups.max()) + 1)[groups]
    round_.scratch = {"learnt": learnt, "current": current, "groups": members, **scratch}
    return round_


@pytest.mark.parametrize("groups", ["old_new", "tasks"])
def test_weights_have_the_mean_one_in_each_group(groups: str) -> None:
    """Also where all gaps are 0, in float32, and for a single image."""
    worker = glfc(groups=groups)
    client_round = prepared(worker)
    table = client_round.scratch["groups"].argmax(1)
    for scale, n in ((1.0, 40), (1e4, 40), (1.0, 1)):
        draw = torch.Generator().manual_seed(n)
        labels = torch.tensor([0, 1, 2, 7, 8, 9])[torch.randint(6, (n,), generator=draw)]
        logits = scale * torch.randn(n, 10, generator=draw)
        if scale > 1:
            logits[torch.arange(n), labels] = scale * 10
        weights = worker.method.compensation(client_round, logits, labels)
        for group in table[labels].unique():
            mean = weights[table[labels] == group].mean()
            assert float(mean) == pytest.approx(1.0, abs=1e-5)


def test_images_with_larger_gaps_have_larger_weights() -> None:
    """Powers of the gaps below 1 bring the weights of LGA nearer to each other."""
    labels, logits = torch.tensor([7, 8, 9]), torch.zeros(3, 10)
    logits[[0, 1, 2], labels] = torch.tensor([-2.0, 0.0, 2.0])
    spreads = []
    for groups in ("old_new", "tasks"):
        worker = glfc(groups=groups)
        weights = worker.method.compensation(prepared(worker), logits, labels)
        assert weights.tolist() == sorted(weights.tolist(), reverse=True)
        spreads.append(float(weights.std()))
    assert spreads[1] < spreads[0]


def test_distillation_from_the_same_model_moves_no_past_logit() -> None:
    """Its value is the entropy of the outputs, but its gradient is 0 where they are the targets."""
    worker = glfc(new_weight=1e-9, old_weight=1.0, columns="all")
    distilled = torch.arange(10) < 3
    client_round = prepared(worker, distilled=distilled, columns=slice(None))
    model = worker.work.model
    worker.method.teacher.load(model.parameters, model.buffers)
    images = worker.work.normalise(worker.work.dataset.x_train[:8])
    worker.method.loss(client_round, images, torch.full((8,), 7)).backward()
    rows = model.gradients[-10:].abs()  # of the biases of the logits
    assert rows[:3].max() < 1e-6 and rows[3:].min() > 1e-3


# --- tasks and exemplars


def test_a_known_task_is_signalled_in_a_clients_first_round_of_it() -> None:
    """Also if that is not the first round of the task, or a whole task was missed."""
    worker = glfc(proxy="none")
    server, states, *_ = worker.initial_states(0)
    message, state, signals = worker.method.broadcast(server, 0), states[0], []
    for experience, round_ in ((0, 1), (0, 2), (2, 0), (2, 1)):
        client_round = ClientRound(
            RoundId(0, 0, experience, round_), worker.plans[0], state, message
        )
        state = worker.method.train_client(client_round).state
        signals.append(client_round.scratch["signal"])
    assert signals == [True, False, True, False]
    learnt = (state["learnt"] >= 0).nonzero().flatten().tolist()
    assert learnt == sorted(worker.plans[0].clients[0][0].classes)


def entropies(worker: Worker, rounds: list[tuple[int, Tensor]]) -> list[ClientRound]:
    """Client rounds in given experiences with given models."""
    server, states, *_ = worker.initial_states(0)
    message, state, done = worker.method.broadcast(server, 0), states[0], []
    for round_, (experience, parameters) in enumerate(rounds):
        message = {**message, "parameters": parameters}
        address = RoundId(0, 0, experience, round_)
        client_round = ClientRound(address, worker.plans[0], state, message)
        state = worker.method.train_client(client_round).state
        done.append(client_round)
    return done


def test_a_jump_of_the_entropy_is_a_signal() -> None:
    """A model with weights 0 has the entropy ln 10, one with a bias of 50 has none."""
    worker = glfc(signal="entropy", proxy="none")
    unsure, sure = torch.zeros(P), torch.zeros(P)
    sure[-10] = 50.0
    done = entropies(
        worker, [(0, unsure), (0, unsure), (0, sure), (1, sure), (1, unsure), (1, sure)]
    )
    values = [each.log.numbers["entropy"] for each in done]
    ln10 = math.log(10)
    assert values == pytest.approx([ln10, ln10, 0, 0, ln10, 0], abs=1e-3)
    assert [each.scratch["signal"] for each in done] == [True, False, False, False, True, False]
    first = sorted(worker.plans[0].clients[0][0].classes)
    learnt = [(each.scratch["learnt"] >= 0).nonzero().flatten().tolist() for each in done]
    assert learnt == [[], [], [], [], first, first]


def test_without_a_signal_nothing_is_learnt_sent_or_distilled() -> None:
    worker = glfc(signal="entropy", threshold=1e9)
    for each in client_rounds(worker, worker.plans[0]):
        state, client_round = each.result.reply.state, each.client_round
        assert (state["learnt"] == -1).all() and not state["old"]
        assert "gradients" not in each.result.reply.message
        own = worker.plans[0].clients[client_round.client][client_round.task].classes
        assert set(state["memory"]["labels"].tolist()) == set(own)  # none of tasks before
    never = {**FAST, "signal": "entropy", "threshold": 1e9}
    off = {"exemplars": 0, "old_weight": 0.0, "groups": "none"}
    small.assert_same_weights(run(tiny("glfc", **never)), run(tiny("glfc", **{**FAST, **off})))


def exemplars(memory: State) -> list[tuple[int, int, bytes]]:
    """Every exemplar with its task and class, in the order of the memory."""
    numbers = memory["tasks"].tolist(), memory["labels"].tolist()
    return list(zip(*numbers, [image.numpy().tobytes() for image in memory["images"]], strict=True))


@pytest.mark.parametrize("budget", [1, 13, 100_000])
def test_the_classes_share_the_memory_equally(budget: int) -> None:
    """floor(M / classes) each, or all images. What stays of a list is its beginning."""
    worker = glfc(exemplars=budget, proxy="none")
    before: list[tuple[int, int, bytes]] = []
    for e, each in enumerate(trained(worker)):
        now = exemplars(each.result.reply.state["memory"])
        classes = worker.plans[0].seen(0, e)
        share = budget // len(classes)
        assert len(now) <= budget
        for task, own in enumerate(worker.plans[0].clients[0][: e + 1]):
            for label in own.classes:
                kept = [x for x in now if x[:2] == (task, label)]
                available = int((worker.work.dataset.y_train == label).sum())
                assert len(kept) == len(set(kept)) == min(share, available)
                if task < e:
                    assert kept == [x for x in before if x[:2] == (task, label)][: len(kept)]
        before = now


def test_where_a_class_returns_its_exemplars_of_both_tasks_stay() -> None:
    """Three tasks with the same two classes: 6, 3 and 2 exemplars of each class of each task."""
    experiment = tiny("glfc", training={"rounds": 1}, **{**FAST, "proxy": "none"})
    whole, data = plan(experiment), experiment.dataset()
    own = whole.train_indices(data, 0, 0)
    halves = {(0, t): tuple(own[t::3].tolist()) for t in range(3)}
    same = with_train(replace(whole, clients=(whole.clients[0][:1] * 3,)), halves)
    worker = small.worker(experiment, same)
    for e, each in enumerate(trained(worker)):
        memory = each.result.reply.state["memory"]
        for task in range(e + 1):
            for label in same.clients[0][0].classes:
                chosen = (memory["tasks"] == task) & (memory["labels"] == label)
                assert int(chosen.sum()) == 12 // (2 * (e + 1))


def test_herding_brings_the_mean_of_features_near_that_of_the_class() -> None:
    """Nearer than the first images of the class, and each choice is the best one, by search."""
    worker = glfc(exemplars=10)
    first = trained(worker)[0]
    worker.train_client(first.client_round.round_id, *first.before)
    data, memory = worker.work.dataset, first.result.reply.state["memory"]
    label = int(memory["labels"][0])
    own = data.x_train[data.y_train == label]
    features = worker.method.normalised_features(own).double()
    mean, total = features.mean(0), torch.zeros(features.shape[1]).double()
    for k, image in enumerate(memory["images"][memory["labels"] == label]):
        place = int((own == image).flatten(1).all(1).nonzero()[0])
        distances = (mean - (total + features) / (k + 1)).norm(dim=1)
        assert float(distances[place]) <= float(distances.min()) + 1e-6
        total += features[place]


def test_batches_hold_each_image_and_each_exemplar_once_an_epoch() -> None:
    worker = glfc(training={"rounds": 1, "epochs": 2})
    for e, each in enumerate(trained(worker)):
        client_round, memory = each.client_round, each.client_round.state["memory"]
        method = worker.method
        method.receive(client_round)
        client_round.indices = method.train_indices(client_round)
        method.detect_task(client_round)
        labels = torch.cat([labels for _, labels in method.batches(client_round)])
        new = worker.work.dataset.y_train[client_round.indices]
        expected = torch.cat([new, memory["labels"]]).repeat(2)
        assert len(memory["labels"]) == (12 if e else 0)
        assert torch.equal(labels.sort().values, expected.sort().values)


# --- old models


def server_rounds(worker: Worker, accuracies: list[float], **state: Any) -> list[State]:
    """The server's states after rounds in which the new models have these accuracies."""
    method = worker.method
    server = worker.initial_states(0)[0]
    server["monitor"] = {**server["monitor"], **state}
    states = []
    for n, accuracy in enumerate(accuracies):
        method.monitor_accuracy = lambda _, accuracy=accuracy: accuracy  # type: ignore[method-assign]
        message = {"parameters": torch.full((P,), float(n))}
        server = method.aggregate(server, [Reply(0, {}, message, 1, 1, 0.0)], Log())
        states.append(server)
    return states


def models(states: list[State], name: str) -> list[int | None]:
    """Which round's model it is."""
    return [int(s[name]["parameters"][0]) if s[name] else None for s in states]


def test_the_old_model_is_the_best_one_of_the_experience_before() -> None:
    """Of equals the newest. Each experience starts anew."""
    worker = glfc(training={"rounds": 4})
    states = server_rounds(worker, [0.5, 0.7, 0.7, 0.2, 0.1, 0.0, 0.3, 0.2, 0.0])
    assert models(states, "best") == [0, 1, 2, 2, 4, 4, 6, 6, 8]
    assert models(states, "old") == [None, None, None, 2, 2, 2, 2, 6, 6]


def test_in_the_first_rounds_the_latest_model_may_be_the_best() -> None:
    worker = glfc(training={"rounds": 4}, proxy_init=3)
    states = server_rounds(worker, [0.9, 0.7, 0.1, 0.05, 0.9, 0.8, 0.7, 0.7])
    assert models(states, "best") == [0, 1, 2, 2, 4, 5, 6, 7]


def test_without_a_proxy_the_last_model_of_a_task_is_announced_once_and_never_changed() -> None:
    worker = glfc(training={"rounds": 2}, proxy="none")
    experiment = tiny("glfc", **{**FAST, "proxy": "none"})
    plan_ = plan(experiment)
    server, states, *_ = worker.initial_states(0)
    for experience in range(3):
        for round_ in range(2):
            replies = []
            for client in range(4):
                message = worker.method.broadcast(server, client)
                announced = {k for k in message if k.startswith(ANNOUNCED)}
                assert len(announced) == (2 if experience and not round_ else 0)
                address = RoundId(0, client, experience, round_, round_ == 1)
                reply = worker.method.train_client(
                    ClientRound(address, plan_, states[client], message)
                )
                if experience:
                    used = worker.method.teacher.parameters
                    assert torch.equal(used, server["old"]["parameters"])
                    assert torch.equal(reply.state["old"]["parameters"], used)
                states[client] = reply.state
                replies.append(reply)
            server = worker.method.aggregate(server, replies, Log())
        assert torch.equal(server["old"]["parameters"], server["parameters"])


def test_the_proxy_sees_each_class_of_each_client() -> None:
    """4 clients with 2 classes: 8 images of these classes, of the running experience alone."""
    worker = glfc()
    plan_ = worker.plans[0]
    last = None
    for each in client_rounds(worker, plan_):
        if each.client_round.experience and each.client_round.client == 0:
            monitor = each.server["monitor"]
            tasks = [own[each.client_round.experience - 1] for own in plan_.clients]
            expected = sorted(c for task in tasks for c in task.classes)
            assert sorted(monitor["labels"].tolist()) == expected
            assert monitor["images"].dtype == torch.uint8 and len(monitor["images"]) == 8
            samples = worker.method.memory_samples(each.server, each.client_round.state, 1)
            assert samples["labels"].tolist() == sorted(
                set(expected), key=monitor["labels"].tolist().index
            )
            last = monitor
    assert last is not None


def test_gradients_of_later_rounds_extend_the_reconstructed_images() -> None:
    """And those that are not finite are left out, with an event."""
    worker = glfc(training={"rounds": 3})
    method, server = worker.method, worker.initial_states(0)[0]
    client_round = small.arrived(worker, worker.plans[0], 0)
    reply = method.train_client(client_round)
    broken = reply.message["gradients"].clone()
    broken[0, 3] = torch.nan
    counts, accuracy = [], []
    for message in (reply.message, reply.message, {**reply.message, "gradients": broken}):
        log = Log()
        server = method.aggregate(server, [replace(reply, message=message)], log)
        counts.append(len(server["monitor"]["labels"]))
        accuracy.append(log.events)
    assert counts == [2, 4, 5] and accuracy == [[], [], [NOT_FINITE]]
    later = method.aggregate(server, [reply], Log())
    assert later["monitor"]["experience"] == 1 and len(later["monitor"]["labels"]) == 2


def test_prototypes_are_the_images_nearest_to_the_mean_of_their_class() -> None:
    """Perturbed so that their loss falls; at learning rate 0 they are the images themselves."""
    still, moved = glfc(perturb_lr=0.0), glfc(perturb_steps=30)
    found = []
    for worker in (still, moved):
        first = trained(worker)[0]
        client_round = first.client_round
        client_round.indices = worker.method.train_indices(client_round)
        worker.method.receive(client_round)
        worker.method.detect_task(client_round)
        worker.method.prepare_loss(client_round)
        found.append((worker, client_round, *worker.method.perturbed_prototypes(client_round)))
    worker, client_round, pixels, labels = found[0]
    data = worker.work.dataset
    for image, label in zip(pixels, labels, strict=True):
        own = data.x_train[data.y_train == label]
        features = worker.method.normalised_features(own)
        nearest = own[(features - features.mean(0)).norm(dim=1).argmin()]
        assert torch.equal((image * 255).round().byte(), nearest)
    losses = []
    for worker, client_round, pixels, labels in found:
        logits = worker.work.model.module.eval()(worker.work.normalise(255 * pixels))
        losses.append(worker.method.label_losses(client_round, logits, labels))
    assert (losses[1] < losses[0]).all()


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_the_old_model_has_the_statistics_of_the_policy(policy: str) -> None:
    """Those of the old model, or the client's own where they are not sent."""
    training = {"buffers": policy, "rounds": 1}
    worker = glfc(network=small.BATCH_NORM, split=FEW, training=training, proxy="none")
    for each in trained(worker)[1:]:
        client_round = ClientRound(each.client_round.round_id, worker.plans[0], *each.before)
        worker.method.train_client(client_round)
        message, state = each.before[1], each.before[0]
        expected = {
            "shared": message.get(ANNOUNCED + "buffers"),
            "local": state.get("buffers"),
            "frozen": worker.work.untrained,
        }[policy]
        assert torch.equal(worker.method.teacher.buffers, expected)
        assert (ANNOUNCED + "buffers" in message) == (policy == "shared")


# --- what is sent and kept


def test_bytes_of_resnet18_with_100_classes() -> None:
    """In the first round of a task of one class the gradient of the encoder, 85,036 numbers, and
    from the second task on the old model; classes are bits. The memory has 4 images."""
    work = workspace("local")
    method = registry.get_method("glfc")(tiny("glfc", **FAST).params, work)
    plan_ = make_plan(work.setting.split, images(), seed=0)
    server, (state, *_), *_ = method.initial_states(plan_)
    down, up = [], []
    for round_ in range(3):
        message = method.broadcast(server, 0)
        address = RoundId(0, 0, round_ // 2, round_ % 2, round_ % 2 == 1)
        reply = method.train_client(ClientRound(address, plan_, state, message))
        state, server = reply.state, method.aggregate(server, [reply], Log())
        down.append(tree_bytes(message) - 4 * RESNET_P)
        up.append(tree_bytes(reply.message) - 4 * RESNET_P)
    assert down == [13, 0, 13 + 4 * RESNET_P + 13] and up == [13 + 340_144, 0, 13 + 340_144]
    assert tree_bytes(state["memory"]) == 4 * (3 * 32 * 32 + 8 + 8)
