"""Rounds, bytes, accuracies and failures as promised; a stopped run ends as an unbroken one."""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import (
    ALWAYS,
    BATCH_NORM,
    BN_B,
    BN_P,
    ROUNDS,
    P,
    kept,
    plan,
    plans,
    run,
    saved,
    tiny,
    whole,
    with_train,
)

from stamp_core.client.runtime import RoundId
from stamp_core.data.split import Plan
from stamp_core.engine import executor
from stamp_core.engine import train as engine
from stamp_core.engine.checkpoint import locked
from stamp_core.methods.base import registry
from stamp_core.methods.base.method import DivergedError
from stamp_core.models import networks as models
from stamp_core.results import metrics, records
from stamp_core.results.records import SCORINGS, Record

EVERY = registry.method_names()
ANGLES = {"spatial update", "spatial clients", "update length", "client length"}
SECONDS = {"clients", "waiting", "server", "evaluation", "checkpoint"}


@pytest.fixture
def round_ids(monkeypatch: pytest.MonkeyPatch) -> list[RoundId]:
    """The client rounds that take place in this process."""
    seen: list[RoundId] = []
    train_client = executor.Worker.train_client

    def recorded(worker: executor.Worker, **arguments: Any) -> executor.ClientResult:
        seen.append(arguments["round_id"])
        return train_client(worker, **arguments)

    monkeypatch.setattr(executor.Worker, "train_client", recorded)
    return seen


# ------------------------------------------------------------------ rounds and bytes


@pytest.mark.parametrize(
    ("network", "each"), [(small.NETWORK, 4 * P), (BATCH_NORM, 4 * (BN_P + BN_B))]
)
def test_a_participant_costs_the_model_each_way(network: dict[str, Any], each: int) -> None:
    """4 bytes per parameter and shared buffer; a client that drops out has received only."""
    training = {"participation": 0.75, "dropout": 0.5}
    record = run(tiny(network=network, split={"images_per_class": 5}, training=training))
    for row in record.history:
        assert row["participants"] == 3
        assert row["bytes"] == {"down": 3 * each, "up": row["completed"] * each}
    assert {row["completed"] for row in record.history} > {3}  # some did drop out


def test_the_history_has_an_entry_per_round_with_all_phases() -> None:
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


def test_the_loss_is_the_mean_over_all_images() -> None:
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
def test_the_share_of_clients_is_rounded_up(
    clients: int, participation: float, selected: int
) -> None:
    """Also where the product in floating point lies above it: 0.28 x 25 = 7.000000000000001."""
    experiment = tiny(split={"clients": clients}, training={"participation": participation})
    worker = small.worker(experiment, plan(experiment))
    training = engine.Run(
        experiment, plan(experiment), worker, executor.SerialExecutor(worker), None
    )
    assert [len(each) for each in training.select_clients(0, 0)] == [selected, selected]


def test_every_client_is_selected_and_rounds_differ(round_ids: list[RoundId]) -> None:
    run(tiny(split={"cycles": 4, "images_per_class": 1}, training={"participation": 0.5}))
    rounds = [
        frozenset(v.client for v in round_ids[k : k + 2]) for k in range(0, len(round_ids), 2)
    ]
    assert len(rounds) == 24 and all(len(each) == 2 for each in rounds)
    assert len(set(rounds)) > 3 and frozenset.union(*rounds) == {0, 1, 2, 3}


@cache
def untrained() -> Record:
    """A run at learning rate 0."""
    return run(tiny(training={"lr": 0}))


@pytest.mark.parametrize("kind", sorted(set(EVERY) - {"joint"}))
def test_when_all_drop_out_nothing_changes_and_the_run_ends(kind: str) -> None:
    """Every accuracy is that of the untrained model, after every experience."""
    record, start = run(whole(kind, training={"dropout": ALWAYS})), untrained()
    for name, value in record.weights.items():
        assert value.tobytes() == start.weights[name].tobytes(), name
    for row in record.history:
        assert (row["completed"], row["sgd_steps"], row["loss"], row["bytes"]["up"]) == (
            0,
            0,
            None,
            0,
        )
    model = registry.get_method(kind).models[0]
    for experience in range(3):
        np.testing.assert_array_equal(
            record.accuracy(model)[experience], record.scores["initial"][0]
        )
    assert np.isnan(record.scores["local"]).all()


# ------------------------------------------------------------------ accuracies


def test_accuracies_are_undefined_exactly_where_there_is_none(round_ids: list[RoundId]) -> None:
    """A local model exists if its client completed the last round of the experience; seen-class
    accuracy of a task exists once the client has met all its classes, here of no other task. Class
    means are those of the global model alone."""
    experiment = tiny(training={"participation": 0.5, "dropout": 0.2})
    record = run(experiment)
    took_part = {(v.experience, v.client) for v in round_ids if v.round == 1}
    assert 0 < len(took_part) < 12
    defined = dict.fromkeys(SCORINGS, 0)
    for s, u, t in np.ndindex(3, 4, 3):
        for scoring in SCORINGS:
            there = scoring != "seen" or t <= s
            assert np.isfinite(record.accuracy("global", scoring)[s, u, t]) == there
            there &= (s, u) in took_part and scoring != "nearest mean"
            assert np.isfinite(record.accuracy("local", scoring)[s, u, t]) == there
            defined[scoring] += there
    assert defined["all"] == defined["task"] == 3 * len(took_part) > defined["seen"] > 0
    assert defined["nearest mean"] == 0
    assert np.isnan(record.scores["personal"]).all()
    assert np.isfinite(record.scores["initial"][[0, 2, 3]]).all()


def test_fewer_classes_to_choose_from_never_make_it_harder() -> None:
    """all <= seen <= task, image by image; with two classes a fair coin has one half."""
    record = run(tiny())
    every, seen, task = (record.accuracy("global", each) for each in ("all", "seen", "task"))
    met = np.isfinite(seen)
    assert (every[met] <= seen[met]).all() and (seen[met] <= task[met]).all()
    assert (every <= task).all() and (every < task).any()
    assert (record.accuracy("local")[range(3), :, range(3)] > 0.8).all()  # a task just learnt


def test_the_summary_of_a_finished_run_is_finite() -> None:
    record = run(tiny(split={"cycles": 2}))
    last = metrics.last_cycle(record.accuracy(), 3)
    summary = metrics.run_metrics(
        last, record.tests, record.scores["initial"][0], record.accuracy("local")
    )
    assert all(np.isfinite(value) for value in summary.values()), summary
    assert 0.1 < summary["accuracy"] <= 1


def test_a_dirichlet_split_with_hardly_an_image_runs() -> None:
    split = {"order": "common", "alpha": 0.1, "min_samples": 1}
    experiment = tiny(split=split)
    parts = plan(experiment, seed=1)
    sizes = [
        len(parts.train_indices(experiment.dataset(), u, t)) for u, t in small.everywhere(parts)
    ]
    assert min(sizes) < 10 < max(sizes)
    record = run(experiment, parts)
    assert np.isfinite(record.accuracy()).all() and record.accuracy()[-1].mean() > 0.15


def test_faces_as_domains_run() -> None:
    """Every task has all classes: arg-max scorings agree, and what was learnt serves other faces.

    Each task has 2 images of a class: a memory of 3 is full in the second and then shared out.
    """
    source = {
        "source": "glyphs",
        "classes": 4,
        "train_per_class": 32,
        "test_per_class": 16,
        "size": 16,
        "face_domains": True,
    }
    split = {"kind": "domains", "classes_per_task": None, "clients": 3}
    training = {"lr": 0.05, "epochs": 4}
    memory = kept(3)
    record = run(tiny("replay", source=source, split=split, training=training, memory=memory))
    every, seen, task = (record.accuracy("global", each) for each in ("all", "seen", "task"))
    np.testing.assert_array_equal(every, seen)
    np.testing.assert_array_equal(every, task)
    assert [row["disk"] for row in record.history[1::2]] == [
        4 * count * (3 * 256 + 16) + 4 * 8 for count in (2, 3, 3)
    ]
    met_again = [row["events"].get("memory: a class was met again") for row in record.history]
    assert met_again == [None, None, None, 12, None, 12]  # 4 classes at 3 clients, in last rounds
    assert every[-1].mean() > 0.3


# ------------------------------------------------------------------ failures


def test_divergence_is_named_and_other_seeds_end(tmp_path: Path) -> None:
    """Seed 0 has its first images in client 1's experience 1; seed 1 has none: no divergence."""
    experiment = tiny(training={"lr": 1e38})
    whole = plans(experiment, 0, 1)
    calm = dict.fromkeys(small.everywhere(whole[0]), ())
    late = {each: () for each in calm if each[1] == 0 or each == (0, 1)}
    plans_ = {0: with_train(whole[0], late), 1: with_train(whole[1], calm)}
    where = r"client 1, experience 1, round 0: .* tiny\.training\.lr \(now 1e\+38\)"
    with pytest.raises(DivergedError, match=where) as caught:
        engine.train(experiment, plans_, 1, "cpu", tmp_path)
    assert caught.value.__notes__ == ["seed 0; seeds that failed: [0] of 2"]
    assert (saved(experiment, tmp_path, 0)["next"], saved(experiment, tmp_path, 1)["next"]) == (
        2,
        ROUNDS,
    )


def test_a_full_disk_costs_the_checkpoint_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    experiment = tiny("replay", memory=kept(5))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.warns(UserWarning, match="no checkpoint at .*No space left.*training goes on"):
            record = run(experiment, resume=tmp_path)
    small.assert_same(record, run(experiment))


# ------------------------------------------------------------------ stopped and resumed


class Stop(Exception):
    """Ends a training between two rounds."""


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Called with n, it makes every training stop after n rounds, and gives the list to which
    each round trained adds its number."""
    train_round, finished = engine.Run.train_round, engine.Progress.round

    def stop_after(count: int) -> list[int]:
        done: list[int] = []

        def noted(one: engine.Run, *where: int) -> None:
            done.append(one.state["next"])
            train_round(one, *where)

        def stop(progress: engine.Progress) -> None:
            finished(progress)
            if len(done) == count:
                raise Stop

        monkeypatch.setattr(engine.Run, "train_round", noted)
        monkeypatch.setattr(engine.Progress, "round", stop)
        return done

    return stop_after


RANDOM = {"participation": 0.75, "dropout": 0.3, "momentum": 0.5, "shift": 1}


@pytest.mark.parametrize("kind", EVERY)
def test_a_run_stopped_after_every_round_ends_like_an_unbroken_one(
    kind: str, tmp_path: Path, trained: Callable[[int], list[int]]
) -> None:
    """Stopped after each of its 6 rounds, so that every round starts from a file; its record comes
    back from its own files."""
    training, split = {**RANDOM, "buffers": "local"}, {"images_per_class": 10}
    experiment = whole(kind, network=BATCH_NORM, split=split, training=training)
    unbroken = run(experiment)
    for k in range(ROUNDS):
        done = trained(1)
        with pytest.raises(Stop):
            run(experiment, resume=tmp_path)
        assert done == [k]
    done = trained(1)
    record = run(experiment, resume=tmp_path)
    small.assert_same(record, unbroken)
    assert done == []
    engine.save_records({0: record}, tmp_path, tmp_path)
    back: Record = records.load_record(tmp_path / "0")
    small.assert_same(back, record)
    assert (back.about, back.history) == (record.about, record.history)
    assert back.run == ("tiny", kind, 0)
    np.testing.assert_array_equal(back.tests, record.tests)


@pytest.mark.parametrize("k", range(1, ROUNDS))
def test_a_run_stopped_once_ends_like_an_unbroken_one(
    k: int, tmp_path: Path, trained: Callable[[int], list[int]]
) -> None:
    experiment = tiny("replay", training=RANDOM, memory=kept(5))
    done = trained(k)
    with pytest.raises(Stop):
        run(experiment, resume=tmp_path)
    assert done == list(range(k))
    done = trained(-1)
    record = run(experiment, resume=tmp_path)
    assert done == list(range(k, ROUNDS))
    small.assert_same(record, run(experiment))


def other_parameters(experiment: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Plan]:
    """The same experiment with another learning rate."""
    return tiny(training={"lr": 0.05}), plan(experiment)


def other_plan(experiment: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Plan]:
    """The same experiment with another plan under the same seed."""
    return experiment, replace(plan(experiment, seed=1), seed=0)


def other_code(experiment: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Plan]:
    """The same experiment after somebody has edited the code."""
    monkeypatch.setattr(type(experiment), "code", lambda self: "edited")
    return experiment, plan(experiment)


@pytest.mark.parametrize("change", [other_parameters, other_plan, other_code])
def test_a_checkpoint_of_something_else_is_set_aside(
    change: Callable[..., Any],
    tmp_path: Path,
    trained: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained(3)
    with pytest.raises(Stop):
        run(tiny(), resume=tmp_path)
    (folder,) = tmp_path.glob("tiny*")
    kept = (folder / "run.safetensors").read_bytes()
    done = trained(-1)
    experiment, other = change(tiny(), monkeypatch)
    with pytest.warns(UserWarning, match=f"belongs to other {change.__name__[6:]}; kept as"):
        record = run(experiment, other, resume=tmp_path)
    assert done == list(range(ROUNDS))
    small.assert_same(record, run(experiment, other))
    assert (tmp_path / f"{folder.name}.aside" / "run.safetensors").read_bytes() == kept


def test_a_resumed_run_without_surprises_warns_of_nothing(
    tmp_path: Path, trained: Callable[[int], list[int]]
) -> None:
    trained(3)
    with pytest.raises(Stop):
        run(tiny("replay"), resume=tmp_path)
    trained(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(tiny("replay"), resume=tmp_path)


def test_the_checkpoints_of_kept_records_go(tmp_path: Path) -> None:
    """Those of other experiments and seeds stay."""
    experiment, resume = tiny(), tmp_path / "resume"
    done = engine.train(experiment, plans(experiment, 0, 1), 1, "cpu", resume)
    run(tiny("replay"), resume=resume)
    assert len(list(resume.glob("tiny*"))) == 3
    engine.save_records({0: done[0]}, tmp_path, resume)
    assert {folder.name for folder in resume.glob("tiny*")} == {"tiny-fedavg-1", "tiny-replay-0"}


def test_what_another_process_trains_is_trained_without_checkpoints(tmp_path: Path) -> None:
    """The checkpoint in use stays as it is, also when a record of the run is saved."""
    unbroken, (folder, other) = run(tiny()), (tmp_path / name for name in ("resume", "other"))
    finished = run(tiny(), resume=folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with locked(folder, "tiny-fedavg", 0):
        with pytest.warns(UserWarning, match="another process trains tiny-fedavg: "):
            record = run(tiny(), resume=folder)
        engine.save_records({0: record}, other, folder)
        engine.save_records({0: finished}, other, folder)
    small.assert_same(record, unbroken)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    engine.save_records({0: finished}, other, folder)
    assert not list(folder.glob("tiny*"))


def test_records_are_saved_even_if_a_checkpoint_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is a file, or may not be changed."""
    experiment, resume = tiny(), tmp_path / "resume"
    done = engine.train(experiment, plans(experiment, 0, 1), 1, "cpu", resume)
    shutil.rmtree(resume / "tiny-fedavg-0")
    (resume / "tiny-fedavg-0").write_text("a file")
    with pytest.warns(UserWarning, match="checkpoint .*tiny-fedavg-0 of a finished run stays: "):
        engine.save_records(done, tmp_path, resume)
    for seed in (0, 1):
        small.assert_same(records.load_record(tmp_path / str(seed)), done[seed])
    assert [folder.name for folder in resume.glob("tiny*")] == ["tiny-fedavg-0"]
