"""What a setting takes: steps, evaluations, time, memory and disk, without its data."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import small

from stamp_core.config.decode import ParameterError
from stamp_core.core import paths
from stamp_core.data import split
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.images import Counts
from stamp_core.data.sources import digits
from stamp_core.engine.experiment import load_experiment
from stamp_core.models.networks import build_network
from workbench.workflow import estimate, synthetic, training
from workbench.workflow.command import SEEDS
from workbench.workflow.estimate import Needs, StepCost
from workbench.workflow.profiles import DEFAULT, OWN, PAPER, QUICK, expand_grid, read_profile

ESTIMATED = [
    (profile, setting)
    for profile in (DEFAULT, QUICK, PAPER, *OWN)
    for setting in read_profile(profile)["grid"]["setting"]
]


def published(real: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> ImageDataset:
    tables = []
    for y, domain in ((real.y_train, real.domain_train), (real.y_test, real.domain_test)):
        tables.append(np.zeros((len(real.domains), len(real.classes)), np.int64))
        np.add.at(tables[-1], (domain.numpy(), y.numpy()), 1)
    counts = Counts(tuple(real.x_train.shape[1:]), *tables, real.domains)
    monkeypatch.setattr(digits, "expected", lambda _: counts, raising=False)
    return synthetic.published_dataset(small.DATA)


@pytest.mark.parametrize("more", [{}, {"order": "common", "alpha": 0.5}, {"images_per_class": 9}])
def test_published_counts_give_the_work_of_the_data(more, monkeypatch):
    """Also where a Dirichlet draw shares the images: it depends on their numbers alone.

    Tested are everybody's images once and each client's own, in each of three experiences.
    """
    experiment = small.tiny("fedavg", split=more)
    real = experiment.dataset()
    plan = small.plan(experiment)
    trained = [len(plan.train_indices(real, u, t)) for u, t in small.everywhere(plan)]
    tests = [
        {i for t in range(3) for i in plan.test_indices(real, u, t).tolist()} for u in range(4)
    ]
    tested = 3 * sum(map(len, [set().union(*tests), *tests]))
    fake = published(real, monkeypatch)
    for dataset in (real, fake):
        same = split.make_plan(experiment.setting.split, dataset, seed=0)
        assert estimate.count_images(same, dataset).ravel().tolist() == trained
        assert estimate.count_tests(same, dataset) == tested


@pytest.mark.parametrize(
    "data", [{"source": "npz", "file": "mine.npz"}, {"source": "folder", "root": "mine", "size": 8}]
)
def test_data_without_published_counts_have_to_be_there(data):
    text = f"the source {data['source']!r} has no published counts, so its data must be there"
    with pytest.raises(FileNotFoundError, match=f"mine.* does not exist.*{re.escape(text)}"):
        synthetic.published_dataset(data)


SECONDS = {
    "glyphs": {"fedavg": 2.0, "stamp": 50.0, "spatial_only": 3.0},
    "cifar100_c2_small": {"fedavg": 1.0, "stamp": 2.0},
    "cifar100_c20_small": {"fedavg": 4.0, "stamp": 12.0},
}


@pytest.fixture
def seconds(monkeypatch, tmp_path):
    """Measurements: on photographs STAMP took twice and three times as long as FedAvg."""
    monkeypatch.setattr(training, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/seconds.json").write_text(json.dumps(SECONDS))


@pytest.mark.usefixtures("seconds")
def test_steps_are_those_of_the_clients_that_are_selected():
    """Of 2, 3 and 4 clients that are there, 1 is in each of two rounds, with 20 images: 2 steps."""
    split = {"joining": 1, "images_per_class": 10}
    fedavg = small.tiny("fedavg", split=split, training={"clients_per_round": 1})
    plan, cost = small.plan(fedavg), StepCost(1.0, 1, 1)
    training = fedavg.setting.training
    found = estimate.compute_needs([fedavg], plan, fedavg.dataset(), cost, 1, training)
    assert found.steps == 3 * 2 * 2
    assert found.steps == sum(each["sgd_steps"] for each in small.run(fedavg).history)


@pytest.mark.usefixtures("seconds")
def test_what_is_needed_is_counted_by_hand():
    """Steps are those of a run. FedAvg keeps two vectors a client, the others exemplars."""
    kinds = ("fedavg", "stamp", "replay")
    experiments = [small.tiny(kind, split={"cycles": 2}) for kind in kinds]
    dataset = experiments[0].dataset()
    plan = small.plan(experiments[0])
    cost = StepCost(seconds=3.6, memory=10**9, parameters=small.P)
    training = experiments[0].setting.training
    found = estimate.compute_needs(experiments, plan, dataset, cost, 2, training)
    assert found.steps == sum(each["sgd_steps"] for each in small.run(experiments[0]).history)
    evaluated = estimate.count_tests(plan, dataset) / 16 / 3
    hours = pytest.approx((found.steps + evaluated) * 3.6 / 2 / 3600)  # by two processes
    assert found.hours == hours and found.methods["fedavg"] == hours
    assert found.methods["stamp"] == 2.5 * found.hours and found.methods["replay"] is None
    kept = [e.params.memory.exemplars_per_class for e in experiments[1:]]
    images = max(kept) * sum(len(plan.seen(u, 3)) for u in range(4)) * 64
    held = max(4 * 2 * 4 * small.P, images)
    assert found.largest == "fedavg" and held > images  # two of its models
    assert found.memory == 2 * 10**9 + held and found.disk == 3 * held


@pytest.mark.usefixtures("seconds")
def test_a_setting_is_estimated_without_its_data(monkeypatch, capsys):
    """CIFAR-100 in a small network; nothing is read or downloaded."""
    params = read_profile(PAPER)
    small_network = {"kind": "mlp", "features": 8, "norm": "none", "stem": "published"}
    params["settings"]["cifar100_c20"]["network"] = small_network
    methods = ["fedavg", "stamp_published", "spatial_only", "glfc"]
    params["methods"]["stamp_published"] = {"extends": "stamp"}
    params["grid"] |= {"setting": ["cifar100_c20"], "method": methods}
    monkeypatch.setattr(estimate, "read_profile", lambda _: params)
    needs = estimate.estimate_setting("cifar100_c20")
    assert needs.steps == 10 * 5 * 79 * 25 * 5  # ceil(10,000 / 128) batches
    text = capsys.readouterr().out
    few = estimate.in_digits
    assert f"\n20 runs: about {few(5 * 5 * needs.hours)} hours\n" in text


def test_named_methods_are_estimated_in_any_setting():
    """With their seeds, or those of `stamp run`; without names those of the grid."""
    params = read_profile(PAPER)
    chosen = estimate.chosen_runs("digits", params, ["fedavg", "stamp"], "0to2")
    assert chosen == [("fedavg", "0to2"), ("stamp", "0to2")]
    assert estimate.chosen_runs("digits", params, ["fedavg"]) == [("fedavg", SEEDS)]
    grid = [(method, seeds) for _, method, seeds in expand_grid("grid.cifar100_c2", params)]
    assert estimate.chosen_runs("cifar100_c2", params) == grid
    named = [(method, "0to2") for method in dict.fromkeys(method for method, _ in grid)]
    assert estimate.chosen_runs("cifar100_c2", params, seeds="0to2") == named


def test_a_client_keeps_no_more_exemplars_than_it_has_images():
    """Of `keep_all` with a million per class: each image of the client's tasks once."""
    every = small.tiny("replay", memory=small.kept(10**6))
    plan, dataset = small.plan(every), every.dataset()
    own = sum(len(plan.train_indices(dataset, *place)) for place in small.everywhere(plan))
    assert estimate.state_bytes(every, plan, dataset, StepCost(1.0, 1, 1)) == own * 64


@pytest.mark.parametrize(("profile", "setting"), ESTIMATED)
def test_every_setting_of_every_command_fits_a_machine_of_24_gb(
    profile, setting, tmp_path, monkeypatch
):
    """What clients keep, without their data; a step of two processes has a share of 2 GB each."""
    monkeypatch.setattr(paths, "RAW", tmp_path)  # where there are no images
    params = read_profile(profile)
    names = dict.fromkeys(method for _, method, _ in expand_grid(f"grid.{setting}", params))
    experiments = [load_experiment(setting, method, params) for method in names]
    chosen = experiments[0].setting
    dataset = synthetic.published_dataset(chosen.data)
    plan = split.make_plan(chosen.split, dataset, seed=0)
    classes = len(dataset.classes) + dataset.masks
    network = build_network(replace(chosen.network, pretrained=None), dataset.shape, classes, 0)
    cost = StepCost(1.0, 2 * 10**9, sum(p.numel() for p in network.parameters()))
    needs = estimate.compute_needs(experiments, plan, dataset, cost, 2, chosen.training)
    assert needs.memory < 24 * 10**9, needs.largest


def test_too_little_memory_or_disk_is_refused_before_anything_runs():
    needs = Needs(steps=10, hours=1.0, methods={}, memory=1, disk=1, largest="keep_all")
    estimate.require_resources(needs, "one")
    message = r"one needs about 4,?000.0 GB of memory, .* smaller images in params/.* keep_all"
    with pytest.raises(ParameterError, match=message):
        estimate.require_resources(replace(needs, memory=4 * 10**12), "one")
    with pytest.raises(OSError, match=r"one needs about 3000000000\.0 GB in .* for keep_all"):
        estimate.require_resources(replace(needs, disk=3 * 10**18), "one")
