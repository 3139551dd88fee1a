"""Clipping and noise: against naive computations, with all executors, and with no effect at all."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import small
import torch
from small import BATCH_NORM, P, plan, run, tiny, whole
from torch import Tensor

from stamp_core.client.runtime import RoundId
from stamp_core.config.decode import ParameterError
from stamp_core.config.schema import Privacy
from stamp_core.core.seeding import generator
from stamp_core.engine.experiment import Experiment
from stamp_core.methods.base.method import ClientRound, Log, Message, Method, Reply
from stamp_core.methods.base.registry import get_method
from stamp_core.results.records import Record

HARD = {"participation": 0.7, "momentum": 0.9, "epochs": 2}
FEW = {"images_per_class": 10}


def private(experiment: Experiment, *values: Any) -> Experiment:
    setting = replace(experiment.setting, privacy=Privacy(*values))
    return replace(experiment, setting=setting)


def without_notes(record: Record) -> Record:
    return replace(record, history=[{**row, "notes": {}} for row in record.history])


@pytest.mark.parametrize("values", [(math.inf, 0.0, "local"), (1e9, 0.0, "central")])
@pytest.mark.parametrize("kind", ["fedavg", "stamp", "gradma", "local"])
def test_without_clipping_and_noise_nothing_changes(kind, values):
    experiment = whole(kind, training=HARD)
    plan_ = small.awkward(experiment)
    record = run(private(experiment, *values), plan_)
    small.assert_same(without_notes(record), without_notes(run(experiment, plan_)))


def test_a_setting_without_privacy_is_identified_as_before_there_was_privacy():
    experiment = tiny()
    sections = {"name", "data", "split", "network", "training", "diagnostics"}
    assert experiment.resolved()["setting"].keys() == sections
    resolved = private(experiment, 1.0, 0.5, "local").resolved()
    expected = {"clip": 1.0, "noise_multiplier": 0.5, "noise": "local"}
    assert resolved["setting"].pop("privacy") == expected and resolved == experiment.resolved()


def upload(experiment: Experiment, client: int = 0, round_: int = 0) -> tuple[Tensor, Reply]:
    """The received parameters, and the reply of a client's round of the first experience."""
    worker = small.worker(experiment, plan(experiment))
    server, states, *_ = worker.initial_states(0)
    message = worker.method.broadcast(server, client)
    result = worker.train_client(RoundId(0, client, 0, round_), states[client], message)
    return message["parameters"], result.reply


@pytest.mark.parametrize("share", [0.3, 0.999, 1.001])
def test_an_update_is_scaled_to_the_clip_or_left_as_it_is(share):
    start, free = upload(tiny())
    update = (free.message["parameters"] - start).double()
    norm = float(update.square().sum().sqrt())
    _, reply = upload(private(tiny(), share * norm, 0.0, "local"))
    clipped = reply.message["parameters"]
    assert reply.log.numbers["clipped uploads"] == float(share < 1)
    assert reply.log.numbers["norm before clipping"] == pytest.approx(norm, rel=1e-6)
    if share > 1:
        assert torch.equal(clipped, free.message["parameters"])
        return
    expected = start + share * update
    torch.testing.assert_close(clipped.double(), expected, rtol=0, atol=1e-6)
    assert float((clipped - start).norm()) <= share * norm * (1 + 1e-5)


def test_local_noise_is_added_after_clipping_with_a_draw_of_its_own_for_each_client_and_round():
    """Of the standard deviation noise multiplier x clip, for each of 2,410 parameters."""
    for client, round_ in ((0, 0), (1, 0), (0, 1)):
        _, clipped = upload(private(tiny(), 0.5, 0.0, "local"), client, round_)
        _, noisy = upload(private(tiny(), 0.5, 3.0, "local"), client, round_)
        drawn = torch.randn(P, generator=generator(0, client, 0, round_, "privacy noise"))
        noise = noisy.message["parameters"] - clipped.message["parameters"]
        torch.testing.assert_close(noise, 1.5 * drawn, rtol=0, atol=1e-5)
    assert float(noise.std()) == pytest.approx(1.5, rel=0.05)


def aggregated(experiment: Experiment, plan_: Any) -> list[tuple[dict[str, Any], Any]]:
    """What the server of a run was given in each round, and what it had before."""
    calls = []

    def spy(method: Method, server: Any, replies: list[Reply], log: Log) -> Any:
        calls.append((server, replies))
        return Method.aggregate(method, server, replies, log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment.kind, "aggregate", spy)
        run(experiment, plan_)
    return calls


def test_the_server_moves_by_the_noisy_mean_of_clipped_updates_with_equal_weights():
    """Clients have 1, 10, 0 and 20 images: those without images count as well."""
    clip, multiplier, server_lr = 0.5, 0.7, 1.5
    experiment = tiny(split=FEW, training={"rounds": 1}, server_lr=server_lr)
    plan_ = small.awkward(experiment)
    worker = small.worker(experiment, plan_)
    server, states, *_ = worker.initial_states(0)
    start = server["parameters"]
    total = torch.zeros(P, dtype=torch.float64)
    for client in range(4):
        message = worker.method.broadcast(server, client)
        reply = worker.train_client(RoundId(0, client, 0, 0, True), states[client], message).reply
        update = (reply.message["parameters"] - start).double()
        total += update * min(1.0, clip / max(float(update.norm()), 1e-9))
    drawn = torch.randn(P, generator=generator(0, 0, 0, "privacy noise"))
    expected = start + server_lr * (total + multiplier * clip * drawn) / 4
    calls = aggregated(private(experiment, clip, multiplier, "central"), plan_)
    after = calls[1][0]["parameters"]
    torch.testing.assert_close(after.double(), expected, rtol=0, atol=1e-6)


def test_the_server_gets_nothing_of_an_upload_but_the_noisy_mean():
    experiment = private(tiny(split=FEW, training=HARD), 0.5, 0.1, "central")
    calls = aggregated(experiment, small.awkward(experiment))
    assert len(calls) == small.ROUNDS
    for _, replies in calls:
        given = [reply.message["parameters"] for reply in replies]
        assert all(each is given[0] for each in given)
        assert all(reply.samples == 1 and len(reply.message) == 1 for reply in replies)


@pytest.mark.parametrize("noise", ["local", "central"])
def test_noise_is_the_same_in_worker_processes_and_after_an_interruption(noise, tmp_path):
    experiment = private(whole("replay", memory=small.kept(3), training=HARD), 0.5, 0.2, noise)
    expected = run(experiment)
    small.assert_same(run(experiment, workers=2), expected)
    with small.stopped_after(3):
        run(experiment, resume=tmp_path)
    small.assert_same(run(experiment, resume=tmp_path), expected)


def late(method: Method, client_round: ClientRound, context: Any) -> Message:
    """An upload that also reports something after the last round of an experience."""
    message = Method.upload(method, client_round, context)
    return {**message, "report": torch.zeros(1)} if client_round.last else message


def part(method: Method, client_round: ClientRound, context: Any) -> Message:
    return {"parameters": Method.upload(method, client_round, context)["parameters"][1:]}


ALONE = "it must be one that uploads parameters alone, as privacy is set, not also"


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"upload": late}, {}, f"method is 'FedAvg'; {ALONE} report"),
        ({"upload": part}, {}, "it must be one that uploads all parameters that it received"),
        ({}, {"network": BATCH_NORM}, f"{ALONE} buffers (training.buffers: local or frozen)"),
    ],
)
def test_an_upload_that_is_not_covered_is_refused(changes, options, message, monkeypatch):
    for name, changed in changes.items():
        monkeypatch.setattr(get_method("fedavg"), name, changed)
    with pytest.raises(ParameterError, match=re.escape(message)):
        run(private(tiny(**options), 1.0, 1.0, "central"))
