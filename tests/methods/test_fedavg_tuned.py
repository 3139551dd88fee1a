"""The control `fedavg_tuned`: FedAvg's global model, and personal models by plain fine-tuning."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import BATCH_NORM, plan, run, tiny
from stamp_core.client.workspace import RoundId

from stamp_core.models import networks as models

HARD: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01, "dropout": 0.3}


def test_all_but_the_personal_model_is_fedavg_bit_for_bit() -> None:
    record, expected = run(tiny("fedavg_tuned", training=HARD)), run(tiny(training=HARD))
    small.assert_same_weights(record, expected)
    assert small.counted(record.history) == small.counted(expected.history)
    for model in ("initial", "global", "local"):
        np.testing.assert_array_equal(record.scores[model], expected.scores[model], model)
    assert not np.array_equal(record.accuracy("personal"), record.accuracy("global"))


@pytest.mark.parametrize("training", [{}, HARD], ids=["plain", "hard"])
def test_the_personal_model_is_the_global_one_after_sgd_by_hand(
    training: dict[str, Any], tmp_path: Path
) -> None:
    """Two epochs of torch.optim.SGD on the current task, from the last global model: its
    accuracies are the recorded ones."""
    experiment = tiny("fedavg_tuned", training=training, ft_epochs=2)
    plan_, dataset, t = plan(experiment), experiment.dataset(), experiment.setting.training
    record = run(experiment, plan_, resume=tmp_path)
    sent = small.saved(experiment, tmp_path)["server"]["parameters"]
    task = plan_.tasks - 1
    for client in range(len(plan_.clients)):
        net, own = small.network(experiment, sent), plan_.train_indices(dataset, client, task)
        sgd = torch.optim.SGD(net.parameters(), t.lr, t.momentum, 0, t.weight_decay)
        draw = RoundId(0, client, task, t.rounds - 1).generator("personal")
        for _ in range(2):
            for batch in own[torch.randperm(len(own), generator=draw)].split(t.batch_size):
                sgd.zero_grad()
                logits = net(small.normalised(experiment, dataset.x_train[batch]))
                F.cross_entropy(logits, dataset.y_train[batch]).backward()
                sgd.step()
        for each in range(plan_.tasks):
            test = plan_.test_indices(dataset, client, each)
            predicted = net(small.normalised(experiment, dataset.x_test[test])).argmax(1)
            expected = float((predicted == dataset.y_test[test]).double().mean())
            assert record.accuracy("personal")[task, client, each] == pytest.approx(expected)


def test_with_no_epochs_the_personal_model_is_the_global_one() -> None:
    record = run(tiny("fedavg_tuned", ft_epochs=0))
    for scoring in ("all", "seen", "task"):
        personal, global_ = (record.accuracy(model, scoring) for model in ("personal", "global"))
        np.testing.assert_array_equal(personal, global_, scoring)


def test_fine_tuning_gathers_running_statistics_and_leaves_the_message_unchanged() -> None:
    """One epoch is one batch: the running mean becomes 0.9 of the received + 0.1 of the batch's.

    The convolution's weights are those received, as the statistics are gathered before the step.
    """
    experiment = tiny("fedavg_tuned", network=BATCH_NORM, training={"batch_size": 1000})
    plan_ = plan(experiment)
    worker = small.worker(experiment, plan_)
    client_round = small.arrived(worker, plan_, 0)
    client_round.message = {**client_round.message, "buffers": torch.full((8,), 2.0)}
    before = small.copied(client_round.message)
    worker.method.load_personal_model(client_round)
    small.assert_equal_trees(client_round.message, before)
    net = models.build_network(experiment.setting.network, (1, 8, 8), 10, seed=0)
    own = plan_.train_indices(worker.work.dataset, 0, 0)
    maps = net.encoder[0](small.normalised(experiment, worker.work.dataset.x_train[own])).detach()
    expected = 0.9 * 2.0 + 0.1 * maps.mean((0, 2, 3))
    torch.testing.assert_close(worker.work.model.buffers[:4], expected, rtol=0, atol=1e-5)


def test_a_client_without_images_has_the_global_model() -> None:
    experiment = tiny("fedavg_tuned")
    whole = plan(experiment)
    empty = small.with_train(whole, {(2, task): () for task in range(whole.tasks)})
    record = run(experiment, empty)
    personal, global_ = (record.accuracy(model) for model in ("personal", "global"))
    np.testing.assert_array_equal(personal[:, 2], global_[:, 2])
    assert not np.array_equal(personal, global_)
