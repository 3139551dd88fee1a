"""Secure sums: which presets run on sums of uploads alone; matching on projections of updates."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import small
import torch
from small import BATCH_NORM, P, Quick, run, tiny, whole
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.config.decode import ParameterError
from stamp_core.config.params import read_params
from stamp_core.config.schema import Setting
from stamp_core.core import paths
from stamp_core.core.seeding import generator
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.engine.server import Aggregator
from stamp_core.matching.gram import Difference, sketch
from stamp_core.methods.base.method import Log, Reply, State
from stamp_core.models.sealed import Sealed
from stamp_core.results.records import Record
from workbench.methods.base.statistics_server import StatisticsServer

PAGE = (paths.ROOT / "docs" / "privacy.md").read_text("utf-8")
ROWS = re.findall(r"^\| (runs|needs|refused)[^|]*\|([^|]*)\|$", PAGE, re.M)
SAID = {preset: row for row, names in ROWS for preset in re.findall(r"`(\w+)`", names)}
SECURE = {"training": {"secure_sums": True}}
FEW = {"images_per_class": 6}


def setting(preset: str) -> Setting:
    """The setting `tiny`, or that with masks, with secure sums and few images."""
    masks = preset.endswith("scenes")
    given = load_experiment("tiny_scenes" if masks else "tiny", preset, read_params())
    found = given.setting
    if issubclass(given.kind, StatisticsServer):  # on no other network
        found = replace(found, network=replace(found.network, kind="identity"))
    split = found.split if masks else replace(found.split, images_per_class=6)
    training = replace(found.training, secure_sums=True)
    return replace(found, split=split, training=training, diagnostics=type(found.diagnostics)())


def compare_rounds(patch: pytest.MonkeyPatch) -> None:
    """In every round the server's state must be what single uploads give, bit for bit."""
    gather, aggregate, plain = Aggregator.gather, Aggregator.aggregate, list[list[Reply]]()

    def gathered(server: Aggregator, replies: list[Reply], log: Log) -> list[Reply]:
        plain.append(replies)
        return gather(server, replies, log)

    def aggregated(server: Aggregator, state: State, replies: list[Reply], *rest: Any) -> State:
        found = aggregate(server, state, replies, *rest)
        small.assert_equal_trees(found, server.method.aggregate(state, plain[-1], Log()))
        return found

    patch.setattr(Aggregator, "gather", gathered)
    patch.setattr(Aggregator, "aggregate", aggregated)


def outcome(preset: str) -> str:
    """What becomes of a preset: "runs", "needs" a projection, or is "refused"."""
    given = load_experiment("tiny", preset, read_params())
    try:
        run(Quick(setting(preset), preset, given.kind, given.params))
    except ParameterError as error:
        if str(error).startswith("spatial.projection is None"):
            return "needs"
        assert f"false for {preset}, " in str(error)
        return "refused"
    return "runs"


@pytest.mark.parametrize("preset", read_params()["methods"])
def test_the_page_says_which_presets_run_on_sums_alone(preset, monkeypatch):
    compare_rounds(monkeypatch)
    assert outcome(preset) == SAID.get(preset)


def test_a_secure_run_has_the_record_of_a_plain_one():
    """The history too: bytes, and the angles between single updates, which only the record has."""
    options: dict[str, Any] = {"network": BATCH_NORM, "split": FEW, "diagnostics": {"angles": True}}
    training = {"participation": 0.7, "momentum": 0.5}
    plain = run(tiny(**options, training=training))
    secure = run(tiny(**options, training={**training, **SECURE["training"]}))
    small.assert_same(secure, plain)
    assert all("spatial clients" in entry["angles"] for entry in secure.history)


def test_a_round_of_one_upload_leaves_the_server_as_it_is():
    """All four clients reply, but client 0 alone has images."""
    experiment = tiny(split=FEW, **SECURE)
    plan = small.plan(experiment)
    others = {(client, task): () for client, task in small.everywhere(plan) if client}
    record = run(experiment, small.with_train(plan, others))
    few = {"secure sums: fewer than two clients have trained": 1}
    assert [entry["events"] for entry in record.history] == [few] * small.ROUNDS
    assert_untrained(record)


def assert_untrained(record: Record) -> None:
    start = initial_states(tiny(split=FEW))[0]["parameters"].numpy()
    found = np.concatenate([value.ravel() for value in record.weights.values()])
    np.testing.assert_array_equal(found, start)


@pytest.mark.parametrize(("kind", "training"), [("fedavg", {"participation": 0.25}), ("joint", {})])
def test_a_round_for_which_one_client_is_selected_is_refused(kind, training):
    with pytest.raises(ParameterError, match=f"false for {kind}, as a round has one client"):
        run(tiny(kind, split=FEW, training={**training, **SECURE["training"]}))


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("feddbe", {"feddbe_kappa": 5.0, "refresh": "task"}),
        ("fedl2p", {"backbone": "frozen", "warm_rounds": 1}),
    ],
)
def test_a_warm_up_is_handed_sums_as_well(kind, params, monkeypatch):
    """The initial states are the plain ones, and every mean in them is one of sealed vectors."""
    averages, read = ClientRuntime.average, list[bool]()

    def average(runtime: ClientRuntime, vectors: list[Tensor], weights: list[float]) -> Tensor:
        read.extend(isinstance(vector, Sealed) for vector in vectors)
        return averages(runtime, vectors, weights)

    plain = initial_states(tiny(kind, split=FEW, **params))
    monkeypatch.setattr(ClientRuntime, "average", average)
    small.assert_equal_trees(initial_states(tiny(kind, split=FEW, **SECURE, **params)), plain)
    assert read and all(read)


def initial_states(experiment: Experiment) -> Any:
    worker = small.worker(experiment, small.plan(experiment))
    return list(worker.initial_states(0))


def matching(kind: str, secure: bool = False, **spatial: Any) -> Experiment:
    """FedOMG, or STAMP with all its parts, with other parameters of spatial matching."""
    given = {"split": FEW, "training": {"secure_sums": secure}}
    return whole(kind, **given, **{"spatial": {"length": "free", **spatial}})


@pytest.mark.parametrize("kind", ["fedomg", "stamp"])
def test_projections_of_full_length_give_exact_matching(kind):
    """Up to the order of sums, after a whole run; the records of matches are those of updates."""
    exact, projected = run(matching(kind)), run(matching(kind, projection=P))
    for name, value in exact.weights.items():
        np.testing.assert_allclose(projected.weights[name], value, rtol=0, atol=1e-5)
    for one, other in zip(exact.history, projected.history, strict=True):
        assert other["notes"] == pytest.approx(one["notes"], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("kind", ["fedomg", "stamp"])
def test_matching_on_projections_is_the_same_on_sums_alone(kind):
    """Bit for bit, and k float32 numbers more go up from each client of a round."""
    plain, secure = (run(matching(kind, secure, projection=16)) for secure in (False, True))
    small.assert_same(secure, plain)
    assert {entry["bytes"]["up"] for entry in secure.history} == {4 * (4 * P + 4 * 16)}


def test_the_clients_of_a_round_project_by_one_matrix():
    experiment = matching("fedomg", projection=16)
    worker = small.worker(experiment, small.plan(experiment))
    server, states, *_ = worker.initial_states(0)
    message = worker.method.broadcast(server, 0)
    for client in range(4):
        reply = worker.train_client(RoundId(0, client, 0, 0), states[client], message).reply
        update = Difference(server["parameters"], reply.message["parameters"])
        expected = sketch(update, 16, generator(0, 0, 0, "projection"))
        assert torch.equal(reply.message["projection"], expected)


def test_without_an_update_the_model_stays():
    training = {"lr": 0.0, "secure_sums": True}
    assert_untrained(run(tiny("fedomg", split=FEW, training=training, spatial={"projection": 16})))


@pytest.mark.parametrize(
    ("spatial", "message"),
    [
        ({"projection": 3}, r"spatial.projection is 3; it must be at least 4"),
        ({"blocks": "layers", "projection": 16}, "blocks"),
        ({"projection": 0}, "projection"),
    ],
)
def test_projections_of_too_few_numbers_and_of_layers_are_refused(spatial, message):
    with pytest.raises(ParameterError, match=message):
        run(matching("fedomg", **spatial))
