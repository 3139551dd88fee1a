"""Rounds, bytes, accuracies and failures as promised; a stopped run ends as an unbroken one."""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import BATCH_NORM, ROUNDS, kept, plan, plans, run, saved, tiny, whole, with_train

from stamp_core.data.plan import Plan
from stamp_core.engine import executor
from stamp_core.engine import train as engine
from stamp_core.engine.checkpoint import locked
from stamp_core.engine.experiment import Experiment
from stamp_core.methods.base import registry
from stamp_core.methods.base.method import DivergedError
from stamp_core.models import networks as models
from stamp_core.results import records
from stamp_core.results.records import SCORINGS, Record
from workbench.report.metrics import run_metrics

EVERY = registry.method_names()
ANGLES = {"spatial update", "spatial clients", "update length", "client length"}
SECONDS = {"clients", "waiting", "server", "evaluation", "checkpoint"}


def a_run(experiment: Experiment) -> engine.Run:
    worker = small.worker(experiment, plan(experiment))
    return engine.Run(experiment, plan(experiment), worker, executor.SerialExecutor(worker), None)


def test_the_history_has_an_entry_per_round_with_all_phases():
    """270 or so images in batches of 16 are 17 or 18 SGD steps a client."""
    experiment = tiny(split={"cycles": 2})
    record, sizes = run(experiment), plan(experiment)
    assert [(row["experience"], row["round"]) for row in record.history] == [
        (experience, round_) for experience in range(6) for round_ in range(2)
    ]
    for row in record.history:
        own = [
            len(sizes.train_indices(experiment.dataset(), u, row["experience"] % 3))
            for u in range(4)
        ]
        assert row["sgd_steps"] == sum(-(-n // 16) for n in own)
        assert row["seconds"].keys() == SECONDS and min(row["seconds"].values()) >= 0
        assert row["memory"]["process"] > 0 and row["memory"]["gpu"] == 0
        assert 0 < row["loss"] < 5
        assert row["disk"] == 0
        assert row["angles"].keys() == ANGLES
        assert row["notes"] == row["events"] == {}
    assert json.loads(json.dumps(record.history)) == record.history


def test_the_loss_is_the_mean_over_all_images():
    """One batch per client at learning rate 0: sum_u n_u L_u / sum_u n_u is the loss of all images.

    Clients have 1 image, about 135 and 270 of them, and none.
    """
    experiment = tiny(training={"lr": 0, "batch_size": 1000})
    plan_, dataset = small.awkward(experiment), experiment.dataset()
    net = models.build_network(experiment.setting.network, (1, 8, 8), 10, seed=0)
    normalise = small.worker(experiment, plan_).runtime.normalise
    for row in run(experiment, plan_).history:
        every = torch.cat([plan_.train_indices(dataset, u, row["experience"]) for u in range(4)])
        loss = F.cross_entropy(net(normalise(dataset.x_train[every])), dataset.y_train[every])
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)


@pytest.mark.parametrize(
    ("clients", "participation", "selected"),
    [(4, 0.5, 2), (4, 0.6, 3), (4, 0.01, 1), (25, 0.28, 7), (25, 0.56, 14), (4, 1.0, 4)],
)
def test_the_share_of_clients_is_rounded_up(clients, participation, selected):
    """Also where the product in floating point lies above it: 0.28 x 25 = 7.000000000000001."""
    one = a_run(tiny(split={"clients": clients}, training={"participation": participation}))
    assert len(one.select_clients(0, 0)) == selected


def test_as_many_clients_are_selected_as_are_set_or_are_there():
    """2 join with each task: 1, 3 and 5 of them; a share counts those that have joined."""
    split = {"clients": 5, "joining": 2, "order": "common"}
    for training, expected in (
        ({"clients_per_round": 2}, [1, 2, 2]),
        ({"participation": 0.5}, [1, 2, 3]),
        ({}, [1, 3, 5]),
    ):
        one = a_run(tiny(split=split, training=training))
        for experience, count in enumerate(expected):
            drawn = [one.select_clients(experience, round_) for round_ in range(20)]
            assert {len(each) for each in drawn} == {count}
            assert {u for each in drawn for u in each} == set(range(1 + 2 * experience))


def test_all_clients_with_all_classes_are_a_run_without_these_options():
    """Bit for bit; a rate that falls to itself differs in rounding alone."""
    plain = run(tiny(split={"images_per_class": 9}))
    split = {"images_per_class": 9, "classes_per_client": 2}
    small.assert_same(run(tiny(split=split, training={"clients_per_round": 4})), plain)
    constant = {"schedule": "cosine", "lr_end": small.TRAINING["lr"]}
    for name, value in run(tiny(split=split, training=constant)).weights.items():
        np.testing.assert_allclose(value, plain.weights[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["fedavg_tuned", "fedavg"])
@pytest.mark.parametrize("buffers", ["shared", "local"])
def test_clients_that_have_not_joined_have_no_score(kind, buffers):
    """The others have one for each of their tasks, learnt already or not, and for no other."""
    split = {"joining": 1, "old_share": 0.4, "order": "common", "images_per_class": 5}
    experiment = tiny(kind, split=split, network=BATCH_NORM, training={"buffers": buffers})
    record, plan_ = run(experiment), plan(experiment)
    own = np.array([[bool(task.classes) for task in tasks] for tasks in plan_.clients])  # [U, T]
    assert (record.tests > 0).tolist() == own.tolist() and not own.all()
    for model in {"global", "personal"} & set(experiment.kind.models):
        for experience in range(3):
            joined = np.isin(np.arange(4), plan_.joined(experience))
            scored = ~np.isnan(record.scores[model][0, experience])
            assert scored.tolist() == (own & joined[:, None]).tolist()
    metrics = run_metrics(record.accuracy("global"), record.tests)
    undefined = {name for name, value in metrics.items() if np.isnan(value)}
    assert undefined == {"forward_transfer", "gap"}


def test_accuracies_are_undefined_exactly_where_there_is_none():
    """A local model exists if its client completed the last round of the experience, and is scored
    on the task just learnt, at the end on all; seen-class accuracy of a task exists once the client
    has met all its classes, here of no other task. Class means are those of the global model alone.
    """
    experiment = tiny(training={"participation": 0.5})
    record, one = run(experiment), a_run(experiment)
    took_part = {(s, u) for s in range(3) for u in one.select_clients(s, 1)}
    assert 0 < len(took_part) < 12
    for s, u, t in np.ndindex(3, 4, 3):
        for scoring in SCORINGS:
            there = scoring != "seen" or t <= s
            assert np.isfinite(record.accuracy("global", scoring)[s, u, t]) == there
            there &= (s, u) in took_part and scoring != "nearest mean" and (t == s or s == 2)
            assert np.isfinite(record.accuracy("local", scoring)[s, u, t]) == there
    learnt = record.accuracy("local")[range(3), :, range(3)]  # a task just learnt
    assert (learnt[np.isfinite(learnt)] > 0.8).all()
    assert np.isnan(record.scores["personal"]).all()
    assert np.isfinite(record.scores["initial"][[0, 2, 3]]).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_divergence_is_named_and_other_seeds_end(workers, tmp_path):
    """Seed 0 has its first images in client 1's experience 1; seed 1 has none: no divergence."""
    experiment = tiny(training={"lr": 1e38})
    both = plans(experiment, 0, 1)
    calm = dict.fromkeys(small.everywhere(both[0]), ())
    late = {each: () for each in calm if each[1] == 0 or each == (0, 1)}
    plans_ = {0: with_train(both[0], late), 1: with_train(both[1], calm)}
    where = r"client 1, experience 1, round 0: .* tiny\.training\.lr \(now 1e\+38\)"
    with pytest.raises(DivergedError, match=where) as caught:
        engine.train(experiment, plans_, workers, "cpu", tmp_path)
    assert caught.value.__notes__ == ["seed 0; seeds that failed: [0] of 2"]
    assert [saved(experiment, tmp_path, seed)["next"] for seed in (0, 1)] == [2, ROUNDS]


def test_a_full_disk_costs_the_checkpoint_only(tmp_path, monkeypatch):
    experiment = tiny("replay", memory=kept(5))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", small.full)
        with pytest.warns(UserWarning, match="no checkpoint at .*No space left.*training goes on"):
            record = run(experiment, resume=tmp_path)
    small.assert_same(record, run(experiment))


RANDOM = {"participation": 0.75, "momentum": 0.5, "shift": 1, "schedule": "cosine", "lr_end": 0.02}


@pytest.mark.parametrize("kind", EVERY)
def test_a_run_stopped_after_every_round_ends_like_an_unbroken_one(kind, tmp_path):
    """Every round starts from a file, without a warning; the record comes back from its files."""
    training = {**RANDOM, "buffers": "local"}
    experiment = whole(kind, network=BATCH_NORM, split={"images_per_class": 10}, training=training)
    unbroken = run(experiment)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(ROUNDS):
            with small.stopped_after(1):
                run(experiment, resume=tmp_path)
            assert saved(experiment, tmp_path)["next"] == k + 1
        record = run(experiment, resume=tmp_path)
    small.assert_same(record, unbroken)
    engine.save_records({0: record}, tmp_path, tmp_path)
    back: Record = records.load_record(tmp_path / "0")
    small.assert_same(back, record)
    assert (back.about, back.history) == (record.about, record.history)
    assert back.run == ("tiny", kind, 0)
    np.testing.assert_array_equal(back.tests, record.tests)


CHANGES: dict[str, Callable[[], tuple[Experiment, Plan]]] = {
    "parameters": lambda: (tiny(training={"lr": 0.05}), plan(tiny())),
    "plan": lambda: (tiny(), replace(plan(tiny(), seed=1), seed=0)),
    "code": lambda: (tiny(), plan(tiny())),
}


@pytest.mark.parametrize("part", CHANGES)
def test_a_checkpoint_of_something_else_is_set_aside(part, tmp_path, monkeypatch):
    with small.stopped_after(3):
        run(tiny(), resume=tmp_path)
    if part == "code":
        monkeypatch.setattr(small.Quick, "code", lambda self: "edited")
    with pytest.warns(UserWarning, match=f"belongs to other {part}; kept as"):
        record = run(*CHANGES[part](), resume=tmp_path)
    small.assert_same(record, run(*CHANGES[part]()))


def test_the_checkpoints_of_kept_records_go(tmp_path):
    experiment, resume = tiny(), tmp_path / "resume"
    done = engine.train(experiment, plans(experiment, 0, 1), 1, "cpu", resume)
    run(tiny("replay"), resume=resume)
    assert len(list(resume.glob("tiny*"))) == 3
    engine.save_records({0: done[0]}, tmp_path, resume)
    assert {folder.name for folder in resume.glob("tiny*")} == {"tiny-fedavg-1", "tiny-replay-0"}


def test_what_another_process_trains_is_trained_without_checkpoints(tmp_path):
    """The checkpoint in use stays as it is, also when a record of the run is saved."""
    folder, other = tmp_path / "resume", tmp_path / "other"
    finished = run(tiny(), resume=folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with locked(folder, "tiny-fedavg", 0):
        with pytest.warns(UserWarning, match="another process trains tiny-fedavg: "):
            record = run(tiny(), resume=folder)
        engine.save_records({0: record}, other, folder)
        engine.save_records({0: finished}, other, folder)
    small.assert_same(record, finished)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    engine.save_records({0: finished}, other, folder)
    assert not list(folder.glob("tiny*"))


def test_records_are_saved_even_if_a_checkpoint_cannot_be_deleted(tmp_path, monkeypatch):
    experiment, resume = tiny(), tmp_path / "resume"
    done = engine.train(experiment, plans(experiment, 0, 1), 1, "cpu", resume)
    shutil.rmtree(resume / "tiny-fedavg-0")
    (resume / "tiny-fedavg-0").write_text("a file")
    with pytest.warns(UserWarning, match="checkpoint .*tiny-fedavg-0 of a finished run stays: "):
        engine.save_records(done, tmp_path, resume)
    for seed in (0, 1):
        small.assert_same(records.load_record(tmp_path / str(seed)), done[seed])
    assert [folder.name for folder in resume.glob("tiny*")] == ["tiny-fedavg-0"]
