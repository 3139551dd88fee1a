"""Which SGD steps may be captured as graphs, what they see, and what is done without graphs."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from small import BATCH_NORM, plan, run, tiny, worker
from torch import Tensor

from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.graphs import WARM_UP, StepGraphs, new_step_graphs
from stamp_core.methods.base.method import Log, Method
from stamp_core.methods.fedavg import FedAvg
from stamp_core.methods.replay import Replay
from stamp_core.models.networks import Classifier

CPU = torch.device("cpu")


class FakeGraphs:
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


@dataclass
class Context(StepContext):
    added: Tensor
    seen: list[int] = field(default_factory=list)
    log: Log = field(default_factory=Log)


@pytest.fixture
def network():
    experiment = tiny("fedavg", network=BATCH_NORM)
    return worker(experiment, plan(experiment)).runtime.classifier


@pytest.fixture
def graphs(network):
    return StepGraphs(FakeGraphs(), network)  # type: ignore[arg-type]


def batch(value: float, size: int = 2, exemplars: int = 0) -> Batch:
    return Batch(torch.full((size, 2), value), torch.zeros(size, dtype=torch.int64), exemplars)


def summing(network: Classifier) -> Callable[[Batch, Context], Tensor]:

    def step(batch: Batch, context: Context) -> Tensor:
        network.images_backpropagated += 1
        return batch.images.sum() + context.added

    return step


@pytest.mark.parametrize("base", [Method, FedAvg, Replay])
def test_a_class_that_changes_a_step_has_to_say_that_it_can_be_captured(base):
    changed = type("Changed", (base,), {"correct_gradient": Method.correct_gradient})
    assert not changed.graph_safe
    assert not type("Child", (changed,), {}).graph_safe
    assert type("Said", (changed,), {"graph_safe": True, "train": Method.train}).graph_safe
    assert type("Same", (base,), {"upload": Method.upload}).graph_safe
    assert not type("Loss", (Replay,), {"weighted_loss": Replay.weighted_loss}).graph_safe


def test_each_shape_and_number_of_exemplars_is_captured_once_after_its_first_steps(graphs, network):
    step, fake, context = summing(network), graphs.graphs, Context(torch.zeros(()))
    assert isinstance(fake, FakeGraphs)
    before = network.images_backpropagated
    for _ in range(WARM_UP + 2):
        for inputs in (batch(1, 3), batch(1, 4), batch(1, 4, exemplars=1)):
            assert graphs.take(step, inputs, context) == 2 * len(inputs)
    assert (fake.warm, fake.captures, fake.replays) == (3 * WARM_UP, 3, 6)
    assert network.images_backpropagated - before == 3 * (WARM_UP + 2)
    graphs.take(summing(network), batch(1, 3), context)  # another step
    assert fake.warm == 3 * WARM_UP + 1


def test_the_cpu_has_no_graphs_and_the_record_says_so(network):
    assert new_step_graphs(CPU, network) is None
    assert run(tiny("fedavg")).environment["steps"] == "eager"
