"""What a setting takes: steps, evaluations, time, memory and disk, without its data."""

import itertools
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import small
import torch

from stamp_core.client.workspace import Workspace
from stamp_core.config.decode import ParameterError
from stamp_core.config.params import PAPER, read_params
from stamp_core.core import paths
from stamp_core.data import split
from stamp_core.data.counts import Counts
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.sources import digits
from stamp_core.engine.experiment import Experiment
from stamp_core.methods.base.method import Method
from stamp_core.models.flat import FlatSGD
from stamp_core.pipeline import costs, estimate, stand_in, workload
from stamp_core.pipeline.costs import Round, Scale, Timing
from stamp_core.pipeline.estimate import MethodCost, Needs, StepCost

NEEDS = Needs(steps=10, hours=1.0, methods=(), memory=4 * 10**9, disk=3 * 10**9)
SETTINGS = tuple(read_params(PAPER)["grid"]["setting"])


def work(experiment: Experiment) -> Workspace:
    return Workspace(experiment.setting, experiment.dataset())


def stood_in(real: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> ImageDataset:
    """A stand-in with the counts of a real data set."""
    tables = []
    for y, domain in ((real.y_train, real.domain_train), (real.y_test, real.domain_test)):
        tables.append(np.zeros((len(real.domains), len(real.classes)), np.int64))
        np.add.at(tables[-1], (domain.numpy(), y.numpy()), 1)
    counts = Counts(tuple(real.x_train.shape[1:]), *tables, real.domains)
    monkeypatch.setattr(digits, "expected", lambda _: counts, raising=False)
    return stand_in.expected_dataset(small.DATA)


# ------------------------------------------------------------------ how much work it is


def test_steps_are_those_that_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = small.tiny("fedavg", split={"cycles": 2})
    taken, step = [0], FlatSGD.step

    def counted(self: FlatSGD) -> None:
        taken[0] += 1
        step(self)

    monkeypatch.setattr(FlatSGD, "step", counted)
    small.run(experiment)
    found = workload.count_steps(
        small.plan(experiment), experiment.dataset(), experiment.setting.training
    )
    assert found == taken[0] > 12 * 4  # rounds x clients


def test_evaluated_images_are_everybodys_once_and_each_clients_own_per_experience() -> None:
    experiment = small.tiny("fedavg")
    dataset = experiment.dataset()
    plan = small.plan(experiment)
    own = [{label for task in client for label in task.classes} for client in plan.clients]
    count = {label: int((dataset.y_test == label).sum()) for label in range(10)}
    everybody = sum(count[label] for label in set().union(*own))
    each = sum(count[label] for labels in own for label in labels)
    assert workload.count_evaluated(plan, dataset) == 3 * (everybody + each)


@pytest.mark.parametrize("more", [{}, {"order": "common", "alpha": 0.5}, {"images_per_class": 9}])
def test_a_stand_in_of_the_same_counts_gives_the_same_work(
    more: small.Some, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a Dirichlet draw shares the images: it depends on their numbers alone."""
    experiment = small.tiny("fedavg", split=more)
    real, plan = experiment.dataset(), small.plan(experiment)
    fake = stood_in(real, monkeypatch)
    other = split.make_plan(experiment.setting.split, fake, seed=0)
    assert np.array_equal(workload.count_images(plan, real), workload.count_images(other, fake))
    assert workload.count_evaluated(plan, real) == workload.count_evaluated(other, fake)
    own = [len(plan.train_indices(real, u, t)) for u, t in small.everywhere(plan)]
    assert workload.count_images(plan, real).ravel().tolist() == own


# ------------------------------------------------------------------ without the data


@pytest.mark.parametrize("name", SETTINGS)
def test_the_papers_settings_are_known_without_any_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "RAW", tmp_path / "raw")
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    found = stand_in.expected_dataset(read_params(PAPER)["settings"][name]["data"])
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
        stand_in.expected_dataset(data)


def test_sources_that_make_their_images_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "load_dataset", lambda spec: ("made", spec))
    assert stand_in.expected_dataset(small.DATA) == ("made", small.DATA)


def test_random_images_have_masks_of_classes_that_exist() -> None:
    experiment = small.tiny("fedavg", **small.SCENES)
    plan, dataset = small.plan(experiment), experiment.dataset()
    images = stand_in.cut_dataset(dataset, plan, 5)
    assert images.x_train[:, -1].unique().tolist() == [0, 1, 2, 3]
    assert images.x_train[:, 0].max() > 200 and images.shape == (1, 16, 16)


def test_what_is_timed_are_the_first_two_tasks_on_random_images() -> None:
    experiment = small.tiny("fedavg", split={"images_per_class": 9, "cycles": 2})
    plan, dataset = small.plan(experiment), experiment.dataset()
    cut, images = stand_in.cut_plan(plan), stand_in.cut_dataset(dataset, plan, 7)
    tasks = plan.clients[0][:2]
    assert [task.classes for task in cut.clients[0]] == [task.classes for task in tasks]
    for t, task in enumerate(tasks):
        labels = images.y_train[cut.train_indices(images, 0, t)]
        assert sorted(labels.tolist()) == sorted(7 * task.classes)
    assert images.x_train.shape[1:] == dataset.x_train.shape[1:] and images.x_train.max() > 200
    assert images.classes == dataset.classes and len(cut.clients) == 1 and cut.experiences == 2


# ------------------------------------------------------------------ what it costs


def test_steps_are_timed_and_leave_the_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "SECONDS", 0.1)
    here = work(small.tiny("fedavg"))
    before = here.model.parameters.clone()
    speed = estimate.time_steps(here)
    assert torch.equal(here.model.parameters, before)
    assert 0 < speed.seconds < 1 and speed.parameters == small.P
    assert 10**7 < speed.memory < 10**11


def test_slow_steps_are_timed_on_part_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """At one second an image, 10 seconds allow three batches of three images."""
    asked: list[int] = []

    def seconds(_: Workspace, count: int) -> float:
        asked.append(count)
        return float(count)

    used = itertools.chain([1000], itertools.repeat(1300))
    monkeypatch.setattr(estimate, "TRIAL", 2)
    monkeypatch.setattr(estimate, "_step_seconds", seconds)
    monkeypatch.setattr(estimate, "_memory", lambda _: next(used))
    found = estimate.time_steps(work(small.tiny("fedavg")))
    assert asked == [2, 2, 3, 3, 3, 3] and found.seconds == 16
    assert found.memory == 1000 + 1600


METHODS = (
    *("fedavg", "stamp", "replay", "gem", "agem", "local", "joint", "fedala", "feddbe", "fedas"),
    *("fedl2p", "fedssi", "refed", "affcl", "fedweit", "target", "lander", "glfc", "fedcil"),
    *("fedomg", "fedprox", "gradma", "fedavg_tuned", "gpm", "fsdgpm", "vrmcl"),
    *("pfeddil", "srfdil", "tagfed"),
)


@pytest.mark.parametrize("kind", METHODS)
def test_every_method_is_timed_by_its_own_rounds(kind: str) -> None:
    """Two experiences of two rounds; a remembered task is there in the second one."""
    frozen = {"backbone": "frozen", "warm_rounds": 1} if kind == "fedl2p" else {}
    experiment = small.whole(kind, **frozen)
    plan = small.plan(experiment)
    here, cut = costs.timed_workspace(
        experiment.setting, plan, experiment.dataset(), "cpu", seconds=0.001
    )
    timing = costs.time_method(experiment.kind(experiment.params, here), here, cut)
    assert [len(rounds) for rounds in timing.rounds] == [2, 2]
    assert timing.step[0] > 0 and (timing.fixed or timing.step[1] >= 16)
    assert timing.fixed == (kind == "fedl2p")
    steps = [len(each.steps) for rounds in timing.rounds for each in rounds]
    assert timing.fixed or steps == [1, 1, 3, 3]
    assert (timing.personal[0] > 0) == ("personal" in experiment.kind.models)


def test_a_step_with_a_memory_has_more_images() -> None:
    experiment = small.tiny("replay", ratio=0.5)
    here, cut = costs.timed_workspace(
        experiment.setting, small.plan(experiment), experiment.dataset(), "cpu", seconds=0.001
    )
    timing = costs.time_method(experiment.kind(experiment.params, here), here, cut)
    assert [images for _, images in timing.rounds[0][0].steps] == [16]
    assert [images for _, images in timing.rounds[1][0].steps] == 3 * [24]


@pytest.mark.parametrize(("seconds", "batch"), [(0.1, 16), (0.3, 8), (9.0, 4)])
def test_batches_are_halved_where_steps_are_slow(seconds: float, batch: int) -> None:
    experiment = small.tiny("fedavg")
    plan, dataset = small.plan(experiment), experiment.dataset()
    here, cut = costs.timed_workspace(experiment.setting, plan, dataset, "cpu", seconds)
    assert here.training.batch_size == batch
    assert len(cut.train_indices(here.dataset, 0, 0)) >= 3 * batch


class Endless(Method):
    """A method whose server never ends, as far as one can wait."""

    def aggregate(self, *of: object) -> dict[str, torch.Tensor]:
        """Normalise images again and again."""
        for _ in range(10**6):
            self.work.normalise(self.work.x_train)
        raise AssertionError("nothing stopped it")


def test_what_takes_too_long_is_left_out_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(costs, "BOUND", 1.0)
    fedavg, stamp = small.tiny("fedavg"), small.tiny("stamp")
    endless = replace(fedavg, method="endless", kind=Endless)
    here, cut = costs.timed_workspace(
        fedavg.setting, small.plan(fedavg), fedavg.dataset(), "cpu", seconds=0.001
    )
    start = time.process_time()
    _, found = costs.time_methods([stamp, endless, fedavg], here, cut)
    assert set(found) == {"stamp", "fedavg"} and time.process_time() - start < 5


# ------------------------------------------------------------------ from short rounds to a run

SCALE = Scale(
    step=4.0,
    image=0.25,
    share=10.0,
    steps=9000,
    evaluated=43_200,
    clients=3,
    experiences=5,
    rounds=20,
    workers=2,
)


def timing(step: costs.Step, *rest: float, images: int = 0, server: float = 0.0) -> Timing:
    """Rounds with equal steps and servers; `rest` is that of both experiences' two rounds."""
    first, second = (
        [Round([step], seconds, images, 1, server) for seconds in pair]
        for pair in (rest[:2], rest[2:])
    )
    return Timing([first, second], (1.0, 4))


FEDAVG = timing((1.0, 4), 0.0, 0.0, 0.0, 0.0)


def test_hours_of_fedavg_are_its_steps_and_evaluations() -> None:
    """9000 steps of 4 s and 43,200 images of a third of 0.25 s, by two processes."""
    assert SCALE.hours(FEDAVG) == pytest.approx((36_000 + 3600) / 2 / 3600)


@pytest.mark.parametrize(
    ("step", "relative"),
    [((1.0, 4), 1.0), ((1.3, 4), 1.3), ((2.0, 8), 2.0), ((1.75, 6), 1.75), ((2.5, 8), 2.5)],
)
def test_further_images_of_a_step_cost_their_share(step: costs.Step, relative: float) -> None:
    """A batch of 4 takes 1 s, all of it for its images."""
    changed = timing(step, 0.0, 0.0, 0.0, 0.0)
    expected = relative if step[1] == 4 else step[0] - (step[1] - 4) * 0.25 + (step[1] - 4) / 4
    assert SCALE.relative_step(changed) == pytest.approx(expected)
    more = SCALE.hours(changed) - SCALE.hours(FEDAVG)
    assert more == pytest.approx((expected - 1) * 36_000 / 2 / 3600)


@pytest.mark.parametrize(("ratio", "more"), [(1.0, 2.0), (0.5, 1.4), (0.0, 1.0)])
def test_exemplars_in_a_batch_become_more_with_each_task(ratio: float, more: float) -> None:
    """One in a batch of 4 after one task: 0, 1, 2, 3, 4 in five experiences, up to the ratio."""
    found = SCALE.relative_step(timing((1.25, 5), 0, 0, 0, 0), ratio)
    assert found == pytest.approx(1 + more / 4)


def test_what_each_round_adds_is_counted_with_the_past_tasks() -> None:
    """A client's experience: 1 + 3 s and 18 times 1 s; 2 s more a round for one past task."""
    first = 1 + 3 + 18 * 1
    later = 3 + 5 + 18 * 3
    rest = first + 2 * (later - first)  # two past tasks on average of five experiences
    more = SCALE.hours(timing((1.0, 4), 1, 3, 3, 5)) - SCALE.hours(FEDAVG)
    assert more == pytest.approx(15 * rest / 2 / 3600)


def test_passes_over_the_task_grow_with_its_images() -> None:
    """In each of 20 rounds 8 images of a tenth of the task: 72 more of 0.25 s."""
    more = SCALE.hours(timing((1.0, 4), 2, 2, 2, 2, images=8))
    rest = 20 * (2 + 72 * 0.25)
    assert more - SCALE.hours(FEDAVG) == pytest.approx(15 * rest / 2 / 3600)


def test_the_server_works_alone_for_all_clients() -> None:
    more = SCALE.hours(timing((1.0, 4), 0, 0, 0, 0, server=2.0))
    expected = 5 * 20 * 2.0 * 3 / 2  # experiences, rounds, three replies instead of two
    assert more - SCALE.hours(FEDAVG) == pytest.approx(expected / 3600)


def test_steps_of_a_method_of_its_own_are_as_many_in_every_round() -> None:
    """Three steps of 2 s where FedAvg's takes 1 s, in 20 rounds of 3 clients' 5 experiences."""
    own = Timing([[Round([], 6.0, 9, 3, 0.0)] * 2] * 2, (1.0, 4))
    assert own.fixed and SCALE.relative_step(own) == 2.0
    expected = 300 * 3 * 2.0 * 4.0 + 3600
    assert SCALE.hours(own) == pytest.approx(expected / 2 / 3600)


def test_a_personal_model_is_made_once_in_a_clients_experience() -> None:
    more = SCALE.hours(replace(FEDAVG, personal=(1.0, 4)))
    expected = 15 * (1.0 + 36 * 0.25) / 2 / 3600
    assert more - SCALE.hours(FEDAVG) == pytest.approx(expected)


def test_what_is_needed_is_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedAvg keeps two vectors a client; replay so many images of each class it has met."""
    chosen = [small.tiny("fedavg"), small.tiny("replay", memory={"exemplars_per_class": 7})]
    experiments = [*chosen, replace(chosen[0], method="slow_published")]
    dataset, plan = chosen[0].dataset(), small.plan(chosen[0])
    speed = StepCost(seconds=3.6, memory=10**9, parameters=small.P)
    monkeypatch.setattr(estimate, "time_steps", lambda _: speed)
    timed = {"fedavg": FEDAVG, "replay": timing((2.5, 4), 0, 0, 0, 0)}
    monkeypatch.setattr(estimate, "time_methods", lambda *_: (FEDAVG, timed))
    monkeypatch.setattr(estimate, "relative_costs", lambda: {"fedavg": 1.0, "slow": 7.0})
    monkeypatch.setattr(costs, "count_steps", lambda *_: 2000)
    monkeypatch.setattr(costs, "count_evaluated", lambda *_: 3 * 16 * 1000)
    found = estimate.compute_needs(experiments, plan, dataset, "cpu", workers=2)
    assert found.hours == pytest.approx(1.5)  # (2000 + 1000) steps of 3.6 s by two processes
    assert found.steps == 2000
    assert [each.name for each in found.methods] == ["fedavg", "replay", "slow_published"]
    assert [each.step for each in found.methods] == [1.0, 2.5, 7.0]
    assert [each.timed for each in found.methods] == [True, True, False]
    assert [each.hours for each in found.methods] == pytest.approx([1.5, 3.0, 10.5])
    held = 4 * 2 * 4 * small.P
    images = 7 * sum(len(plan.seen(u, 3)) for u in range(4)) * 64
    assert found.memory == 2 * 10**9 + max(held, images) and found.disk == 3 * max(held, images)


def test_the_table_has_a_line_per_method_and_marks_those_not_timed() -> None:
    methods = MethodCost("fedavg", 1.0, 194.13, True), MethodCost("slow", 4.5, 1234.5, False)
    text = estimate.format_methods(methods).splitlines()
    assert text[1] == "fedavg              1.00         194.1"
    assert text[2] == "slow                4.50       1,234.5 *"
    assert "1 of 2 methods were timed, each in 4 short rounds" in text[3]
    assert text[4] == "* not timed within 90 seconds: by its cost on glyphs"
    assert len(estimate.format_methods(methods[:1]).splitlines()) == 3


def test_a_setting_is_estimated_without_its_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CIFAR-100 in a small network, two methods; nothing is read or downloaded."""
    params = read_params(PAPER)
    setting = params["settings"]["cifar100_c20"]
    setting["network"] = {"kind": "mlp", "features": 8}
    params["grid"] |= {"setting": ["cifar100_c20"], "method": ["fedavg", "stamp"]}
    monkeypatch.setattr(estimate, "read_params", lambda _: params)
    monkeypatch.setattr(estimate, "SECONDS", 0.1)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    needs = estimate.estimate_setting("cifar100_c20")
    assert needs.steps == 10 * 5 * 79 * 25 * 5  # ceil(10,000 / 128) batches
    text = capsys.readouterr().out
    assert "cifar100: 50000 training and 10000 test images of 3 x 32 x 32, 100 classes" in text
    assert [each.timed for each in needs.methods] == [True, True]
    assert "2 methods, 5 seeds: about" in text


def test_other_methods_are_compared_with_fedavg_where_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(estimate, "ROOT", tmp_path)
    (tmp_path / "figures").mkdir()
    rows = {"fedavg": {"client_seconds": {"mean": 2.0}}, "stamp": {"client_seconds": {"mean": 5.0}}}
    (tmp_path / "figures/summary.json").write_text(json.dumps({"glyphs": rows}))
    assert estimate.relative_costs() == {"fedavg": 1.0, "stamp": 2.5}
    (tmp_path / "figures/summary.json").write_text("{}")
    assert estimate.relative_costs() == {"fedavg": 1.0}


def test_too_little_memory_or_disk_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = {"memory": 5 * 10**9, "disk": 5 * 10**9}
    monkeypatch.setattr(
        estimate.psutil, "virtual_memory", lambda: SimpleNamespace(available=free["memory"])
    )
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda _: SimpleNamespace(free=free["disk"]))
    estimate.refuse_shortage(NEEDS, "one")
    free["memory"] = 10**9
    message = "one needs about 4.0 GB of memory, 1.0 GB are free: lower one.network.micro"
    with pytest.raises(ParameterError, match=re.escape(message)):
        estimate.refuse_shortage(NEEDS, "one")
    free.update(memory=5 * 10**9, disk=10**9)
    with pytest.raises(OSError, match=re.escape("one needs about 3.0 GB in")):
        estimate.refuse_shortage(NEEDS, "one")
