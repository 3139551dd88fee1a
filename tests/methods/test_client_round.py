"""What a client round passes on: extra networks, the model that is scored, images, what is due."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import small
import torch
from small import P, kept, plan, run, tiny
from torch import Tensor, nn

from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.core.seeding import generator
from stamp_core.methods.base.method import ClientRound, FedAvgParams, LocalModel, Log, Method
from stamp_core.models.flat import FlatModel

EXTRA = 3 * 2 + 2  # numbers of the extra network
FEW = {"images_per_class": 12}


@dataclass
class ExtraContext(StepContext):
    moves: Tensor


class Extra(Method):
    """FedAvg with a second network that every step moves, and another local model."""

    def __init__(self, params: FedAvgParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.extra_networks = {"extra": FlatModel(nn.Linear(3, 2))}

    def initial_weights(self, name: str, seed: int) -> Tensor:
        return torch.randn(EXTRA, generator=generator(seed, name))

    def start(self, client_round: ClientRound) -> ExtraContext:
        return ExtraContext(torch.tensor(1.0 + client_round.client))

    def correct_gradient(self, batch: Batch, context: ExtraContext) -> None:
        self.extra_networks["extra"].parameters.add_(context.moves)

    def local_model(self, context: ExtraContext) -> LocalModel:
        """A model that takes every image for one of class 1."""
        parameters = torch.zeros(P)
        parameters[P - 10 + 1] = 1
        return LocalModel(parameters, self.model.buffers.clone())


class Unregistered(small.Quick):
    def files(self) -> list[Path]:
        return [Path(__file__)]


def extra() -> Unregistered:
    made = tiny(split=FEW)
    return Unregistered(made.setting, "fedavg", Extra, made.params)


def test_extra_networks_are_sent_trained_averaged_and_counted_in_bytes():
    """Each client moves it by its own number in each of its steps; 24 images are two steps, and 7
    one."""
    experiment = extra()
    whole = plan(experiment)
    plan_ = small.with_train(whole, {(0, 0): whole.clients[0][0].train[:7]})
    worker = small.worker(experiment, plan_)
    server, states, *_ = worker.initial_states(0)
    start = server["extra"].clone()
    replies = []
    for client in range(4):
        sent = worker.method.broadcast(server, client)
        assert sent.keys() == {"parameters", "extra"} and torch.equal(sent["extra"], start)
        replies.append(worker.train_client(RoundId(0, client, 0, 0), states[client], sent).reply)
        moved = (1 if client == 0 else 2) * (1 + client)
        torch.testing.assert_close(replies[-1].message["extra"], start + moved)
    after = worker.method.aggregate(server, replies, Log())
    mean = (7 * 1 + 24 * 4 + 24 * 6 + 24 * 8) / (7 + 3 * 24)
    torch.testing.assert_close(after["extra"], start + mean)
    assert torch.equal(server["extra"], start)
    for entry in run(experiment).history:
        assert entry["bytes"] == {"down": 16 * (P + EXTRA), "up": 16 * (P + EXTRA)}


def test_the_local_model_of_the_reply_is_scored_and_not_the_live_one():
    experiment = extra()
    record, fedavg = run(experiment), run(tiny(split=FEW))
    small.assert_same_weights(record, fedavg)
    np.testing.assert_array_equal(record.scores["global"], fedavg.scores["global"])
    plan_, dataset = plan(experiment), experiment.dataset()
    for client, task in small.everywhere(plan_):
        labels = dataset.y_test[plan_.test_indices(dataset, client, task)]
        share = float((labels == 1).double().mean())
        assert record.accuracy("local")[task, client, task] == pytest.approx(share)


# 24 images a client and task are batches of 16 and 8; a task leaves 8 exemplars, of earlier tasks
# in experience e there are 8 e.
@pytest.mark.parametrize(
    ("kind", "params", "counts"),
    [
        ("fedavg", {}, [24, 24, 24]),
        ("fedavg_tuned", {}, [24, 24, 24]),  # evaluation is not training
        ("replay", {"ratio": 0.5}, [24, 24 + 8 + 4, 24 + 8 + 4]),
        ("replay", {"ratio": 0.0, "memory": kept(4, selection="herding")}, [24] * 3),  # features
        ("replay", {"ratio": 4.0}, [24, 24 + 8 + 8, 24 + 16 + 16]),
        ("gem", {}, [24, 24 + 2 * 8, 24 + 2 * 16]),
        ("agem", {"reference": 5}, [24, 24 + 2 * 5, 24 + 2 * 5]),
        ("gradma", {}, [3 * 24] * 3),  # at two other points
        ("gradma", {"worker": False}, [24] * 3),
        ("stamp", {"temporal": {}}, [24, 24 + 8, 24 + 16]),  # an epoch on each past task
        ("stamp", {"temporal": {"past": "gradient", "images": 3}}, [24, 24 + 3, 24 + 6]),
        ("stamp", {"prototype": 0.1}, [24] * 3),
        ("stamp", {"prototype": 0.1, "alternate": True}, [2 * 24] * 3),  # two steps a batch
    ],
    ids=str,
)
def test_the_history_counts_the_images_that_are_encoded_for_a_gradient(kind, params, counts):
    if "memory" in {*vars(tiny(kind).params)}:
        params = {"memory": kept(4), **params}
    record = run(tiny(kind, split=FEW, **params))
    expected = [4 * counts[entry["experience"]] for entry in record.history]
    assert [entry["images"] for entry in record.history] == expected
