"""Past tasks as rows, checked against the same network written out in plain torch."""

import json
import math
from functools import partial
from typing import Any, NamedTuple

import pytest
import small
import torch
import torch.nn.functional as F
from small import BATCH_NORM, kept, network, normalised, plan, run, slope, tiny
from torch import Tensor

from stamp_core import config, methods, temporal
from stamp_core.config import ParameterError
from stamp_core.executor import Worker
from stamp_core.experiments import Experiment
from stamp_core.matching import match
from stamp_core.methods import Turn
from stamp_core.methods.stamp import Stamp
from stamp_core.rows import Sketch
from stamp_core.seeding import generator
from stamp_core.temporal import Past, Temporal, balanced, class_means, drawn
from stamp_core.workspace import Visit

MEMORY = kept(5)
FREE: dict[str, Any] = {"length": "free"}
MEAN: dict[str, Any] = {"kappa": 0.0, **FREE}  # no matching: the plain mean of the rows
MOMENTUM = {"momentum": 0.9, "weight_decay": 0.01, "epochs": 2}
WIDE = {"kind": "mlp", "features": 128}  # two layers of more than 1024 parameters
WIDE_SIZES = [64 * 128 + 128, 128 * 10 + 10]
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}


class Look(NamedTuple):
    """A client that has been trained and looks back."""

    cell: Experiment
    here: Worker
    turn: Turn
    received: Tensor
    trained: Tensor  # by local SGD alone
    steps: int

    @property
    def way(self) -> Tensor:
        """What local SGD has done."""
        return self.received - self.trained

    @property
    def past(self) -> Past:
        """The past as it is looked at after training."""
        self.here.work.model.load(self.trained)
        method = self.here.method
        assert isinstance(method, Stamp)
        stored, mixing = (partial(f, self.turn) for f in (method.stored, method.mixing))
        given = (self.here.work, self.turn.visit, method.params.temporal, self.received)
        return Past(*given, stored, mixing)

    def remembered(self, task: int) -> tuple[Tensor, Tensor]:
        """Pictures and labels of a task in the memory."""
        memory = self.turn.state["memory"]
        mine = memory["tasks"] == task
        return normalised(self.cell, memory["pictures"][mine]), memory["labels"][mine]

    def upload(self) -> Tensor:
        """The parameters that the client sends."""
        return self.here.method.local(self.turn).message["parameters"]


def look(at: int = 2, /, memory: Any = MEMORY, params: Any = None, **options: Any) -> Look:
    """A client in the first round of a step; options of matching and of the experiment."""
    outer = {k: options.pop(k) for k in ("split", "training", "network") if k in options}
    given = {"memory": memory, "temporal": options} if params is None else params
    cell, plain = tiny("stamp", **outer, **given), tiny("fedavg", **outer)
    here = small.worker(cell, plan(cell))
    turn = small.arrived(here, plan(cell), at)
    free = {**given, "temporal": None}  # the same training without matching
    alone = small.worker(tiny("stamp", **outer, **free) if params else plain, plan(cell))
    reply = alone.method.local(Turn(turn.visit, turn.plan, turn.state, turn.message))
    start = turn.message["parameters"]
    return Look(cell, here, turn, start, reply.message["parameters"], reply.steps)


def mean_loss(at: Look, where: Tensor, task: int) -> Tensor:
    """The gradient of the mean cross-entropy on what is remembered of a task."""
    net = network(at.cell, where)
    pictures, labels = at.remembered(task)
    return slope(net, F.cross_entropy(net(pictures), labels))


# ------------------------------------------------------------------ rows


@pytest.mark.parametrize("start", ["trained", "received"])
def test_a_gradient_is_that_of_the_mean_loss_times_rate_and_steps(start: str) -> None:
    """17 or 18 batches at rate 0.1: as far as such a slope would have led in the visit."""
    at = look(past="gradient", start=start)
    where = at.trained if start == "trained" else at.received
    assert at.steps > 10
    for task in (0, 1):
        expected = at.steps * 0.1 * mean_loss(at, where, task)
        torch.testing.assert_close(at.past.row(task, at.steps * 0.1), expected, **CLOSE)
        assert expected.norm() > 0.01


def test_a_gradient_agrees_with_finite_differences() -> None:
    """Along a random direction u, (L(theta + h u) - L(theta - h u)) / 2 h, in float64."""
    at = look(past="gradient")
    u = torch.randn(small.P, generator=generator("direction"), dtype=torch.float64) / small.P**0.5
    pictures, labels = at.remembered(1)

    @torch.no_grad()
    def loss(h: float) -> float:
        net = network(at.cell, at.trained).double()
        torch.nn.utils.vector_to_parameters(at.trained.double() + h * u, net.parameters())
        return float(F.cross_entropy(net(pictures.double()), labels))

    numeric = (loss(1e-5) - loss(-1e-5)) / 2e-5
    assert float(at.past.row(1, 1.0).double() @ u) == pytest.approx(numeric, rel=1e-4)


@pytest.mark.parametrize("training", [{}, MOMENTUM], ids=str)
@pytest.mark.parametrize("start", ["trained", "received"])
def test_a_trajectory_is_sgd_on_the_memory_seen_from_the_received_model(
    start: str, training: dict[str, Any]
) -> None:
    """So many epochs as the visit has, with an optimiser and an order of its own."""
    at = look(past="trajectory", start=start, training={"batch": 4, **training})
    t = at.cell.setting.training
    for task in (0, 1):
        net = network(at.cell, at.trained if start == "trained" else at.received)
        descent = torch.optim.SGD(
            net.parameters(), t.rate, momentum=t.momentum, weight_decay=t.weight_decay
        )
        (pictures, labels), draw = (
            at.remembered(task),
            generator(0, 0, 2, 0, f"order of task {task}"),
        )
        for _ in range(t.epochs):
            for batch in torch.randperm(len(labels), generator=draw).split(4):
                descent.zero_grad()
                F.cross_entropy(net(pictures[batch]), labels[batch]).backward()
                descent.step()
        expected = at.received - torch.nn.utils.parameters_to_vector(net.parameters()).detach()
        torch.testing.assert_close(at.past.row(task, 1.0), expected, **CLOSE)


def test_a_memory_that_stays_put_gives_the_way_itself() -> None:
    at = look(past="unmoved")
    past = at.past
    assert all(torch.equal(past.row(task, 1.0), at.way) for task in (0, 1))


def test_prototypes_have_no_slope_in_the_encoder() -> None:
    """The head alone sees the class means of features: dL/dW = G^T means, dL/db = sum G."""
    at = look(past="gradient", source="prototypes")
    net = network(at.cell, at.trained)
    pictures, labels = at.remembered(0)
    features, classes = net.encoder(pictures).detach(), labels.unique()
    means = torch.stack([features[labels == each].mean(0) for each in classes])
    share = (net.head(means).softmax(1) - F.one_hot(classes, 10)) / len(classes)
    expected = torch.cat([(share.T @ means).flatten(), share.sum(0)]).detach()
    row, head = at.past.row(0, 1.0), 32 * 10 + 10
    assert not row[:-head].any()
    torch.testing.assert_close(row[-head:], expected, **CLOSE)


def test_mean_pictures_are_class_means_of_pixels() -> None:
    at = look(past="gradient", source="mean pictures")
    pictures, labels = at.remembered(0)
    classes = labels.unique()
    means = torch.stack([pictures[labels == each].mean(0) for each in classes])
    net = network(at.cell, at.trained)
    expected = slope(net, F.cross_entropy(net(means), classes))
    torch.testing.assert_close(at.past.row(0, 1.0), expected, **CLOSE)
    assert not torch.allclose(expected, mean_loss(at, at.trained, 0), atol=1e-3)


def test_class_means_by_hand() -> None:
    """Classes may come in any order and number: (1 + 5) / 2, 3 and (0 + 2 + 4) / 3."""
    values = torch.tensor([[3.0], [0.0], [1.0], [2.0], [5.0], [4.0]])
    means, classes = class_means(values, torch.tensor([4, 9, 1, 9, 1, 9]))
    assert (means.flatten().tolist(), classes.tolist()) == ([3.0, 3.0, 2.0], [1, 4, 9])
    shaped, _ = class_means(values.view(6, 1, 1, 1), torch.tensor([4, 9, 1, 9, 1, 9]))
    assert shaped.shape == (3, 1, 1, 1)


def test_all_data_are_the_training_pictures_of_the_task() -> None:
    """Whatever is remembered: here nothing is."""
    at = look(memory=kept(0), past="gradient", source="all data", pictures=1000)
    images, net = at.cell.images(), network(at.cell, at.trained)
    own = plan(at.cell).train_indices(images, 0, 1)
    loss = F.cross_entropy(net(normalised(at.cell, images.x_train[own])), images.y_train[own])
    assert len(own) > 200
    torch.testing.assert_close(at.past.row(1, 1.0), slope(net, loss), **CLOSE)


def test_of_more_pictures_so_many_are_drawn_in_every_round_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never more than `pictures` behind a gradient; as many as there are where there are fewer."""
    seen: list[Tensor] = []
    loss = Past.loss
    monkeypatch.setattr(Past, "loss", lambda p, x, y: (seen.append(x), loss(p, x, y))[1])
    whole = look(past="gradient", pictures=10).past
    seen.clear()
    whole.row(0, 1.0)
    assert len(seen.pop()) == 10
    at = look(past="gradient", pictures=3)
    seen.clear()
    at.past.row(0, 1.0)
    at.past.row(0, 1.0)
    turn = Turn(Visit(0, 0, 2, 1), at.turn.plan, at.turn.state, at.turn.message)
    at._replace(turn=turn).past.row(0, 1.0)
    assert [len(each) for each in seen] == [3, 3, 3]
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])
    memory = at.turn.state["memory"]
    stored = at.here.work.normalise(memory["pictures"][memory["tasks"] == 0])
    known = {each.numpy().tobytes() for each in stored}
    assert all(each.numpy().tobytes() in known for batch in seen for each in batch)


# ------------------------------------------------------------------ matching through a whole visit


def test_without_matching_the_upload_is_the_mean_of_the_rows() -> None:
    """The third of three tasks weighs 1 / 3: theta - (way + n rate (g_0 + g_1)) / 3."""
    at = look(past="gradient", reference="mean", **MEAN)
    length = at.steps * 0.1
    rows = at.way + length * (mean_loss(at, at.trained, 0) + mean_loss(at, at.trained, 1))
    torch.testing.assert_close(at.upload(), at.received - rows / 3, **CLOSE)


def test_two_rows_of_one_length_are_not_moved_by_matching() -> None:
    """By symmetry w = (1/2, 1/2), so d = (1 + kappa) g0, which is divided by 1 + kappa."""
    at = look(1, past="gradient", normalise="current", kappa=0.5, length="1+kappa")
    past = mean_loss(at, at.trained, 0)
    mean = (at.way + past * at.way.norm() / past.norm()) / 2
    torch.testing.assert_close(at.upload(), at.received - mean, **CLOSE)
    assert not torch.allclose(mean, at.way, atol=1e-3)


def test_the_matched_way_is_the_best_in_its_ball() -> None:
    """|d - g0| = kappa |g0|, and no other d of the ball does better for the worst row: neither g0
    itself, nor 300 of random, nor 300 between d and a row."""
    kappa = 0.5
    at = look(past="gradient", normalise="none", kappa=kappa, **FREE)
    length = at.steps * 0.1
    rows = [length * mean_loss(at, at.trained, task) for task in (0, 1)]
    table = torch.stack([*rows, at.way]).double()
    g0, d = table.mean(0), (at.received - at.upload()).double()
    radius = float(kappa * g0.norm())
    assert float((d - g0).norm()) == pytest.approx(radius, rel=1e-4)
    least = float((table @ d).min())
    assert least > float((table @ g0).min()) * 1.001
    draw = generator("directions")
    for _ in range(300):
        weights = torch.rand(3, generator=draw, dtype=torch.float64)
        noise = torch.randn(small.P, generator=draw, dtype=torch.float64)
        for direction in (weights @ table, noise, d - g0 + 0.1 * radius * noise / noise.norm()):
            other = g0 + radius * direction / direction.norm()
            assert float((table @ other).min()) <= least * (1 + 1e-4)


@pytest.mark.parametrize("normalise", ["none", "current"])
def test_with_the_current_task_as_reference_and_no_radius_training_stands(normalise: str) -> None:
    at = look(reference="current", normalise=normalise, kappa=0.0)
    torch.testing.assert_close(at.upload(), at.trained, **CLOSE)


@pytest.mark.parametrize("step", [0.5, 2.0])
def test_the_clients_step_is_along_the_matched_way(step: float) -> None:
    at = look(reference="current", kappa=0.0, step=step)
    torch.testing.assert_close(at.upload(), at.received - step * at.way, **CLOSE)


def test_half_of_the_reference_is_the_current_task() -> None:
    at = look(past="gradient", reference="half", **MEAN)
    past = mean_loss(at, at.trained, 0) + mean_loss(at, at.trained, 1)
    half = at.way / 2 + at.steps * 0.1 * past / 4
    torch.testing.assert_close(at.upload(), at.received - half, **CLOSE)


def test_the_first_task_is_not_touched_bit_for_bit() -> None:
    """There is nothing to match with."""
    at = look(0)
    assert torch.equal(at.upload(), at.trained)


def row_of_params(name: str) -> dict[str, Any]:
    """A row of params.yaml: methods, with what it takes from others."""
    row = methods.row(name, config.read())
    row.pop("kind")
    return row


LONGER = 2 * 1.25 / (1 + 0.25**2)  # twice (1 + c) / (1 + c^2) at c = 0.25


@pytest.mark.parametrize(
    ("name", "step"), [("stamp_code", 0), ("stamp_code_coreset", 0), ("stamp_code_coreset", 2)]
)
def test_equal_rows_make_the_public_codes_step_2_353_times_as_long(name: str, step: int) -> None:
    """On the first task there is one row, and copies that stay put are all the same row.

    The code adds 1e-4 to lengths, relative to rows of about 1.
    """
    assert round(LONGER, 3) == 2.353
    at = look(step, params=row_of_params(name))
    found = at.received - at.upload()
    assert float((found - LONGER * at.way).norm() / at.way.norm()) < 1e-3
    assert float(found @ at.way / at.way.square().sum()) == pytest.approx(LONGER, rel=1e-4)


def test_later_tasks_of_the_public_code_without_coresets_are_matched() -> None:
    at = look(1, params=row_of_params("stamp_code"))
    found = at.received - at.upload()
    assert float((found - LONGER * at.way).norm() / at.way.norm()) > 0.1


# ------------------------------------------------------------------ sketches, caps, blocks


@pytest.mark.parametrize("past", ["gradient", "trajectory"])
def test_a_sketch_wider_than_the_model_changes_nothing(past: str) -> None:
    """No two positions share a place, so all inner products are the same."""
    options = {"past": past, "normalise": "current"}
    held, sketched = (look(rows=rows, **options).upload() for rows in ("held", "sketched"))
    torch.testing.assert_close(sketched, held, **CLOSE)


def test_a_narrow_sketch_gives_nearly_the_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inner product is wrong by sqrt(2 / width) |a| |b| or so, one deviation; d by as much.

    With F(w) known to within e |g0|^2 for all w, d is within sqrt(4 kappa e / |g_w|) of the best.
    """
    width = 1024
    held = look(normalise="current", reference="mean")
    monkeypatch.setattr(temporal, "Sketch", partial(Sketch, width=width))
    sketched = look(normalise="current", reference="mean", rows="sketched")
    exact, found = held.received - held.upload(), held.received - sketched.upload()
    error = float((found - exact).norm() / exact.norm())
    assert 1e-6 < error < 3 * math.sqrt(2 / width)


def test_rows_are_never_two_in_memory_where_they_are_sketched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is formed twice, and the second time it is what it was the first."""
    formed: list[tuple[int, Tensor]] = []
    row = Past.row
    monkeypatch.setattr(
        Past, "row", lambda p, t, n: (formed.append((t, row(p, t, n))), formed[-1][1])[1]
    )
    at = look(rows="sketched", normalise="current")
    formed.clear()
    at.upload()
    assert [task for task, _ in formed] == [0, 1, 0, 1]
    assert torch.equal(formed[0][1], formed[2][1]) and torch.equal(formed[1][1], formed[3][1])


def test_rows_with_mixed_styles_are_formed_the_same_way_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sketched rows are formed again for the sum: another style would make them other rows."""
    formed: list[Tensor] = []
    row = Past.row
    monkeypatch.setattr(Past, "row", lambda p, t, n: (formed.append(row(p, t, n)), formed[-1])[1])
    memory = kept(5, space="feature", alpha=1.0)
    net = {**BATCH_NORM, "norm": "none"}
    at = look(memory=memory, network=net, rows="sketched", normalise="current")
    formed.clear()
    at.upload()
    assert len(formed) == 4
    torch.testing.assert_close(formed[2], formed[0], **CLOSE)
    torch.testing.assert_close(formed[3], formed[1], **CLOSE)


def test_so_many_tasks_are_drawn_in_every_round_anew() -> None:
    tasks = list(range(3, 13))
    rounds = [drawn(tasks, 4, Visit(0, 1, 2, round_)) for round_ in range(40)]
    assert all(len(set(each)) == 4 and each == sorted(each) for each in rounds)
    assert set().union(*rounds) == set(tasks) and len({tuple(each) for each in rounds}) > 10
    assert drawn(tasks, 4, Visit(0, 1, 2, 0)) == rounds[0]
    assert drawn(tasks, 10, Visit(0, 1, 2, 0)) == drawn(tasks, 50, Visit(0, 1, 2, 0)) == tasks


def test_a_match_has_no_more_rows_than_asked_for() -> None:
    """So many past tasks and the current one: 0, 1 + 1, 1 + 1 and 1 + 1 rows of 4 tasks."""
    split = {"tasks": 4}
    options = {"split": split, "memory": MEMORY}
    for most, expected in ((1, [2, 2, 2]), (2, [2, 3, 3]), (50, [2, 3, 4])):
        record = run(tiny("stamp", **options, temporal={"tasks": most}))
        found = [row["notes"].get("temporal rows") for row in record.history[::2]]
        assert found == [None, *expected]


def test_buffers_after_a_match_are_those_of_local_training() -> None:
    """What past pictures do to batch normalisation on the way is undone."""
    at = look(network=BATCH_NORM, normalise="current")
    reply = at.here.method.local(at.turn)
    plain = small.worker(tiny(network=BATCH_NORM), plan(at.cell))
    plain.method.local(Turn(at.turn.visit, at.turn.plan, {}, at.turn.message))
    local = plain.work.model
    assert torch.equal(reply.message["buffers"], local.buffers)
    assert not torch.allclose(reply.message["parameters"], local.parameters, atol=1e-3)


@pytest.mark.parametrize("past", ["gradient", "trajectory"])
def test_rows_start_from_the_buffers_of_local_training(past: str) -> None:
    """Gradients in evaluation mode; steps with a batch's own statistics, but for the last batch of
    one picture of ten, which has none. The order of rows does not matter."""
    at = look(network=BATCH_NORM, past=past, training={"batch": 9})
    plain = small.worker(tiny(network=BATCH_NORM, training={"batch": 9}), plan(at.cell))
    plain.method.local(Turn(at.turn.visit, at.turn.plan, {}, at.turn.message))
    buffers = plain.work.model.buffers
    expected = []
    for task in (0, 1):
        net = network(at.cell, at.trained).eval()
        norm = net.encoder[1]
        norm.running_mean.copy_(buffers[:4])
        norm.running_var.copy_(buffers[4:])
        pictures, labels = at.remembered(task)
        if past == "gradient":
            expected.append(slope(net, F.cross_entropy(net(pictures), labels)))
            continue
        draw = generator(0, 0, 2, 0, f"order of task {task}")
        for batch in torch.randperm(10, generator=draw).split(9):
            norm.train(len(batch) > 1)
            step = slope(net, F.cross_entropy(net(pictures[batch]), labels[batch]))
            weights = torch.nn.utils.parameters_to_vector(net.parameters()).detach() - 0.1 * step
            torch.nn.utils.vector_to_parameters(weights, net.parameters())
        expected.append(at.received - weights)
    method = at.here.method
    assert isinstance(method, Stamp)
    for order in ((0, 1), (1, 0)):
        at.here.work.model.load(at.trained, buffers)
        at.here.work.model.module.train(past == "gradient")
        given = (at.here.work, at.turn.visit, method.params.temporal, at.received)
        way = Past(*given, partial(method.stored, at.turn))
        for task in order:
            torch.testing.assert_close(way.row(task, 1.0), expected[task], **CLOSE)


def test_the_blocks_of_a_visit_are_the_layers_of_its_model() -> None:
    """Two layers here; each is matched as if it were the model, and elements by their formula."""
    options: dict[str, Any] = {"past": "gradient", "network": WIDE, "normalise": "current", **FREE}
    found = {}
    for blocks in ("model", "layers", "coupled", "elements"):
        at = look(blocks=blocks, **options)
        found[blocks] = at.received - at.upload()
    past = [mean_loss(at, at.trained, task) for task in (0, 1)]
    rows = [*(row * (at.way.norm() / row.norm()) for row in past), at.way]
    assert at.here.work.layers() == WIDE_SIZES
    parts = zip(*(row.split(WIDE_SIZES) for row in rows), strict=True)
    alone = [match(list(part), Temporal(**FREE))[0] for part in parts]
    torch.testing.assert_close(found["layers"], torch.cat(alone), **CLOSE)
    table = torch.stack(rows)
    g0 = table.mean(0)
    agree = (table * g0 >= 0).all(0)
    torch.testing.assert_close(found["elements"], torch.where(agree, 1.5, 0.5) * g0, **CLOSE)
    pairs = [("model", "layers"), ("model", "coupled"), ("layers", "coupled")]
    assert all(not torch.allclose(found[a], found[b], atol=1e-4) for a, b in pairs)


# ------------------------------------------------------------------ failures


@pytest.mark.parametrize("rows", ["held", "sketched"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_no_number_is_dropped_and_counted(
    rows: str, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remembered picture whose forward pass overflows costs its task the say, nothing else."""
    gradient = Past.gradient

    def overflowing(past: Past, task: int) -> Tensor:
        found = gradient(past, task)
        return found.index_fill(0, torch.tensor([7]), bad) if task == 0 else found

    monkeypatch.setattr(Past, "gradient", overflowing)
    options = {"past": "gradient", "rows": rows, "normalise": "current"}
    record = run(tiny("stamp", memory=MEMORY, temporal=options))
    assert all(bool(value.all()) for value in map(torch.isfinite, weights(record)))
    told = [row["events"].get("temporal matching: a row was dropped", 0) for row in record.history]
    assert told == [0, 0, 4, 4, 4, 4]  # at all four clients
    assert record.history[-1]["notes"]["temporal dropped"] == 1


def weights(record: Any) -> list[Tensor]:
    """The final tensors of a run."""
    return [torch.from_numpy(value) for value in record.weights.values()]


def test_the_dropped_row_leaves_the_match_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """theta - (way + g_1) / 2, as if task 0 had never been met."""
    at = look(past="gradient", **MEAN)
    expected = at.received - (at.way + at.steps * 0.1 * mean_loss(at, at.trained, 1)) / 2
    gradient = Past.gradient
    monkeypatch.setattr(Past, "gradient", lambda p, t: gradient(p, t) * (1 if t else math.nan))
    torch.testing.assert_close(at.upload(), expected, **CLOSE)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": 0.0}, "step is 0.0; it must be above 0"),
        ({"tasks": 0}, "tasks is 0; it must be at least 1"),
        ({"pictures": 0}, "pictures is 0; it must be at least 1"),
        ({"kappa": -0.1}, "kappa is -0.1; it must be at least 0"),
        (
            {"reference": "weighted"},
            "reference is 'weighted'; it must be 'mean', 'current' or 'half' in time",
        ),
        (
            {"source": "prototypes"},
            "source is 'prototypes'; it must be 'memory' or 'all data', as past is 'trajectory'",
        ),
        (
            {"source": "mean pictures", "past": "trajectory"},
            "source is 'mean pictures'; it must be 'memory' or 'all data', as past is 'trajectory'",
        ),
        (
            {"rows": "sketched", "blocks": "layers"},
            "blocks is 'layers'; it must be 'model', as rows are sketched",
        ),
    ],
    ids=lambda v: json.dumps(v) if isinstance(v, dict) else "",
)
def test_what_cannot_be_matched_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as error:
        Temporal(**values)
    assert str(error.value) == message


def test_of_many_pictures_every_class_gives_as_many_as_the_others() -> None:
    """Of 9, 2 and 5 pictures of three classes: 8 are 3, 2 and 3; each is there once."""
    labels = torch.tensor([0] * 9 + [1] * 2 + [2] * 5)[generator_order(16)]
    found = balanced(labels, 8, generator("balanced"))
    assert len(found.unique()) == 8
    assert sorted(labels[found].bincount().tolist()) == [2, 3, 3]
    assert balanced(labels, 16, generator("balanced")).tolist() == [*range(16)]
    another = balanced(labels, 8, generator("balanced", 1))
    assert sorted(another.tolist()) != sorted(found.tolist())


def generator_order(count: int) -> Tensor:
    """A mixed order."""
    return torch.randperm(count, generator=generator("order"))
