"""Which SGD steps may be captured as graphs, and what stays as it was where there are none."""

from collections.abc import Callable

import pytest
import torch
from small import BATCH_NORM, plan, run, tiny, worker
from torch import Tensor

from stamp_core.client.graphs import WARM_UP, StepGraphs
from stamp_core.core import devices
from stamp_core.methods.base.method import ClientRound, Method
from stamp_core.methods.base.registry import get_method, method_names
from stamp_core.methods.fedavg import FedAvg
from stamp_core.methods.replay import Replay
from stamp_core.models.networks import Classifier

CPU = torch.device("cpu")
CAPTURING = {
    "fedala", "fedas", "fedavg", "fedavg_tuned", "fedl2p", "fedomg", "fedprox", "fedssi", "joint",
    "local", "refed", "replay", "srfdil", "stamp",
}  # fmt: skip


class FakeGraphs:
    """Graphs whose capture calls the step, and whose replay does nothing."""

    def __init__(self) -> None:
        self.warm, self.captures, self.replays = 0, 0, 0

    def warm_up(self, step: Callable[[], Tensor]) -> Tensor:
        self.warm += 1
        return step()

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.captures += 1

        def replay() -> None:
            self.replays += 1

        return replay, step()


class NoGraphs(FakeGraphs):
    """Graphs that refuse everything."""

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        step()
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture
def network() -> Classifier:
    experiment = tiny("fedavg", network=BATCH_NORM)
    return worker(experiment, plan(experiment)).work.classifier


def summed(inputs: object) -> Tensor:
    """A step that counts one image and returns the sum of its images."""
    Classifier.differentiated += 1
    total: Tensor = inputs["images"].sum()  # type: ignore[index]
    return total


def test_methods_whose_steps_depend_on_the_client_are_not_captured() -> None:
    assert {kind for kind in method_names() if get_method(kind).captures} == CAPTURING
    for alternate in (False, True):  # whose second optimiser is made in the client round
        experiment = tiny("stamp", prototype=0.1, alternate=alternate)
        assert worker(experiment, plan(experiment)).method.captures != alternate


@pytest.mark.parametrize("base", [Method, FedAvg, Replay])
def test_a_class_that_changes_a_step_has_to_say_that_it_can_be_captured(base: type[Method]) -> None:
    def correct_gradient(self: Method, client_round: ClientRound) -> None: ...

    changed = type("Changed", (base,), {"correct_gradient": correct_gradient})
    assert not changed.captures
    assert not type("Child", (changed,), {}).captures
    assert type("Said", (changed,), {"captures": True, "train": Method.train}).captures
    assert type("Same", (base,), {"upload": Method.upload}).captures


def test_a_part_of_the_loss_counts_as_a_part_of_the_step() -> None:
    assert not type("Other", (Replay,), {"weighted_loss": Replay.weighted_loss}).captures


def test_a_shape_is_captured_once_after_its_first_steps(
    network: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeGraphs()
    monkeypatch.setitem(devices.GRAPHS, "cpu", lambda: fake)
    graphs, before = StepGraphs(CPU, network), Classifier.differentiated
    batches = {size: {"images": torch.ones(size, 2)} for size in (3, 4)}
    for _ in range(WARM_UP + 2):
        for size, batch in batches.items():
            assert graphs.take("step", summed, batch) == 2 * size
    assert (fake.warm, fake.captures, fake.replays) == (2 * WARM_UP, 2, 4)
    assert Classifier.differentiated - before == 2 * (WARM_UP + 2)
    graphs.take("another step", summed, batches[3])
    assert fake.warm == 2 * WARM_UP + 1


def test_what_a_replay_reads_is_copied_to_where_it_was_captured(
    network: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(devices.GRAPHS, "cpu", FakeGraphs)
    graphs = StepGraphs(CPU, network)
    for value in range(WARM_UP + 3):
        graphs.take("step", summed, {"images": torch.full((2, 2), float(value))})
    ((captured,),) = [graphs.captured.values()]
    assert (captured.inputs["images"] == WARM_UP + 2).all()


def test_micro_batches_are_not_captured(
    network: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(devices.GRAPHS, "cpu", FakeGraphs)
    network.micro_batch_size = 3
    graphs = StepGraphs(CPU, network)
    assert graphs.usable(3) and not graphs.usable(4)
    for _ in range(WARM_UP + 1):
        graphs.take("step", summed, {"images": torch.ones(4, 2)})
    assert not graphs.captured


def test_a_refused_capture_is_said_and_the_step_is_taken(
    network: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(devices.GRAPHS, "cpu", NoGraphs)
    graphs, batch = StepGraphs(CPU, network), {"images": torch.ones(2, 2)}
    for _ in range(WARM_UP):
        graphs.take("step", summed, batch)
    before = Classifier.differentiated
    with pytest.warns(UserWarning, match="not captured as graphs: operation not permitted"):
        assert graphs.take("step", summed, batch) == 4
    assert Classifier.differentiated == before + 1
    assert not graphs.usable(2) and graphs.take("step", summed, batch) == 4


def test_the_cpu_has_no_graphs_and_the_record_says_so(network: Classifier) -> None:
    graphs = StepGraphs(CPU, network)
    assert not graphs.usable(1) and graphs.take("s", summed, {"images": torch.ones(1)}) == 1
    assert run(tiny("fedavg")).about["environment"]["steps"] == "eager"
