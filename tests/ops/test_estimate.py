"""What a setting takes: steps, evaluations, time, memory and disk, without its data."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import small

from stamp_core.config.decode import ParameterError
from stamp_core.config.params import PAPER, read_params
from stamp_core.core import paths
from stamp_core.data import split
from stamp_core.data.counts import Counts
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.sources import digits
from stamp_core.models.flat import FlatSGD
from stamp_ops import estimate, synthetic
from stamp_ops.estimate import Needs, StepCost

SETTINGS = tuple(read_params(PAPER)["grid"]["setting"])


def published(real: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> ImageDataset:
    """The data set that is known by the counts of a real one."""
    tables = []
    for y, domain in ((real.y_train, real.domain_train), (real.y_test, real.domain_test)):
        tables.append(np.zeros((len(real.domains), len(real.classes)), np.int64))
        np.add.at(tables[-1], (domain.numpy(), y.numpy()), 1)
    counts = Counts(tuple(real.x_train.shape[1:]), *tables, real.domains)
    monkeypatch.setattr(digits, "expected", lambda _: counts, raising=False)
    return synthetic.published_dataset(small.DATA)


# ------------------------------------------------------------------ how much work it is


def needs(*kinds: str, seconds: float = 3.6, workers: int = 2, **changes: small.Some) -> Needs:
    """What small experiments need, with FedAvg's step of so many seconds."""
    experiments = [small.tiny(kind, **changes) for kind in kinds]
    cost = StepCost(seconds, memory=10**9, parameters=small.P)
    dataset = experiments[0].dataset()
    return estimate.compute_needs(
        experiments, small.plan(experiments[0]), dataset, cost, workers=workers
    )


def test_steps_are_those_that_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[None] = []
    step = FlatSGD.step

    def counted(self: FlatSGD) -> None:
        taken.append(None)
        step(self)

    monkeypatch.setattr(FlatSGD, "step", counted)
    small.run(small.tiny("fedavg", split={"cycles": 2}))
    found = needs("fedavg", split={"cycles": 2}).steps
    assert found == len(taken) > 12 * 4  # rounds x clients


def test_evaluated_images_are_everybodys_once_and_each_clients_own_per_experience() -> None:
    experiment = small.tiny("fedavg")
    dataset = experiment.dataset()
    plan = small.plan(experiment)
    own = [{label for task in client for label in task.classes} for client in plan.clients]
    count = {label: int((dataset.y_test == label).sum()) for label in range(10)}
    everybody = sum(count[label] for label in set().union(*own))
    each = sum(count[label] for labels in own for label in labels)
    assert estimate.count_tests(plan, dataset) == 3 * (everybody + each)


@pytest.mark.parametrize("more", [{}, {"order": "common", "alpha": 0.5}, {"images_per_class": 9}])
def test_published_counts_give_the_work_of_the_data(
    more: small.Some, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a Dirichlet draw shares the images: it depends on their numbers alone."""
    experiment = small.tiny("fedavg", split=more)
    real = experiment.dataset()
    plan = small.plan(experiment)
    fake = published(real, monkeypatch)
    other = split.make_plan(experiment.setting.split, fake, seed=0)
    assert np.array_equal(estimate.count_images(plan, real), estimate.count_images(other, fake))
    assert estimate.count_tests(plan, real) == estimate.count_tests(other, fake)
    own = [len(plan.train_indices(real, u, t)) for u, t in small.everywhere(plan)]
    assert estimate.count_images(plan, real).ravel().tolist() == own


# ------------------------------------------------------------------ without the data


@pytest.mark.parametrize("name", SETTINGS)
def test_the_papers_settings_are_known_without_any_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "RAW", tmp_path / "raw")
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    found = synthetic.published_dataset(read_params(PAPER)["settings"][name]["data"])
    assert found.x_train.untyped_storage().nbytes() == found.x_test.untyped_storage().nbytes() == 1
    assert len(found.x_train) == len(found.y_train) == len(found.domain_train) > 1000
    assert len(found.y_train.unique()) == len(found.classes)
    assert len(found.domain_test.unique()) == len(found.domains)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "data", [{"source": "npz", "file": "mine.npz"}, {"source": "folder", "root": "mine", "size": 8}]
)
def test_data_without_published_counts_have_to_be_there(data: small.Some) -> None:
    text = f"the source {data['source']!r} has no published counts, so its data must be there"
    with pytest.raises(FileNotFoundError, match=f"mine.* does not exist.*{re.escape(text)}"):
        synthetic.published_dataset(data)


@pytest.mark.parametrize("changes", [{}, small.SCENES], ids=["images", "masks"])
def test_a_short_training_times_steps_of_any_task(
    changes: small.Some, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With time for half a batch of 16, time is doubled, and each image takes 10 bytes more."""
    fedavg = small.tiny("fedavg", **changes)
    briefly = estimate._train_briefly
    batches: list[int] = []

    def recorded(*of: object) -> StepCost:
        batches.append(of[-1])  # type: ignore[arg-type]
        assert briefly(*of).seconds > 0  # type: ignore[arg-type]
        return StepCost(estimate.SECONDS / estimate.STEPS / 2, 1000 + 10 * batches[-1], small.P)

    monkeypatch.setattr(estimate, "_train_briefly", recorded)
    found = estimate.time_step(fedavg, fedavg.dataset(), "cpu")
    assert batches == [4, 8] and fedavg.setting.training.batch_size == 16
    assert found.seconds == pytest.approx(estimate.SECONDS / estimate.STEPS)
    assert found.memory == 1000 + 160


def test_synthetic_images_have_the_shape_and_masks_of_classes_that_exist() -> None:
    dataset = small.tiny("fedavg", **small.SCENES).dataset()
    images = synthetic.synthetic_data(dataset, 2, 9)
    assert images.x_train[:, -1].unique().tolist() == [0, 1, 2, 3]
    assert images.x_train[:, 0].max() > 200 and images.shape == dataset.shape
    assert images.y_train.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0]


# ------------------------------------------------------------------ what it costs


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Committed results in which two methods took 2 and 5 seconds."""
    monkeypatch.setattr(estimate, "ROOT", tmp_path)
    (tmp_path / "figures").mkdir()
    rows = {name: {"client_seconds": {"mean": s}} for name, s in (("fedavg", 2.0), ("stamp", 5.0))}
    (tmp_path / "figures/summary.json").write_text(json.dumps({"glyphs": rows}))


@pytest.mark.usefixtures("seconds")
def test_what_is_needed_is_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedAvg keeps two vectors a client; replay so many images of each class it has met."""
    monkeypatch.setattr(estimate, "count_images", lambda *_: np.full((4, 3), 16 * 50))
    monkeypatch.setattr(estimate, "count_tests", lambda *_: 3 * 16 * 1000)
    found = needs("fedavg", "stamp", "replay")
    per_task = small.TRAINING["epochs"] * small.TRAINING["rounds"] * 50
    assert found.steps == 12 * per_task
    hours = (12 * per_task + 1000) * 3.6 / 2 / 3600  # by two processes
    assert found.hours == pytest.approx(hours)
    assert found.methods == {"fedavg": hours, "stamp": pytest.approx(2.5 * hours), "replay": None}
    stamp = small.tiny("stamp")
    plan = small.plan(stamp)
    exemplars = stamp.params.memory.exemplars_per_class
    images = exemplars * sum(len(plan.seen(u, 3)) for u in range(4)) * 64
    held = max(4 * 2 * 4 * small.P, images)
    assert found.memory == 2 * 10**9 + held and found.disk == 3 * held


def test_the_table_has_a_line_per_method_and_names_those_without_a_ratio() -> None:
    text = estimate.format_methods({"fedavg": 194.13, "slow": 1234.5, "new": None}).splitlines()
    assert text[1] == "fedavg         194.1" and text[2] == "slow         1,234.5"
    assert text[3] == "new                ?"
    assert text[5] == "?: no seconds of new on glyphs (figures/summary.json)"
    assert len(estimate.format_methods({"fedavg": 1.0}).splitlines()) == 3


@pytest.mark.usefixtures("seconds")
def test_a_setting_is_estimated_without_its_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CIFAR-100 in a small network; nothing is read or downloaded."""
    params = read_params(PAPER)
    params["settings"]["cifar100_c20"]["network"] = {"kind": "mlp", "features": 8}
    methods = ["fedavg", "stamp_published", "sam"]
    params["methods"]["stamp_published"] = {"extends": "stamp"}
    params["grid"] |= {"setting": ["cifar100_c20"], "method": methods}
    monkeypatch.setattr(estimate, "read_params", lambda _: params)
    needs = estimate.estimate_setting("cifar100_c20")
    assert needs.steps == 10 * 5 * 79 * 25 * 5  # ceil(10,000 / 128) batches
    assert needs.methods["stamp_published"] == pytest.approx(2.5 * needs.hours)
    text = capsys.readouterr().out
    assert "cifar100: 50000 training and 10000 test images of 3 x 32 x 32, 100 classes" in text
    assert "2 methods, 5 seeds: about" in text and "no seconds of sam" in text


def test_too_little_memory_or_disk_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = Needs(steps=10, hours=1.0, methods={}, memory=4 * 10**9, disk=3 * 10**9)
    free = {"memory": 5 * 10**9, "disk": 5 * 10**9}
    monkeypatch.setattr(
        estimate.psutil, "virtual_memory", lambda: SimpleNamespace(available=free["memory"])
    )
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda _: SimpleNamespace(free=free["disk"]))
    estimate.require_resources(needed, "one")
    free["memory"] = 10**9
    message = "one needs about 4.0 GB of memory, 1.0 GB are free: lower one.network.micro"
    with pytest.raises(ParameterError, match=re.escape(message)):
        estimate.require_resources(needed, "one")
    free.update(memory=5 * 10**9, disk=10**9)
    with pytest.raises(OSError, match=re.escape("one needs about 3.0 GB in")):
        estimate.require_resources(needed, "one")
