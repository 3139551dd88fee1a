"""Images with masks: what they need, how masks move and are hidden, and scores by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import small
import torch
import torch.nn.functional as F
from small import plan, run, tiny
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.client.scoring import count_pixels, intersection_over_union, mask_scores
from stamp_core.config.decode import ParameterError
from stamp_core.engine.experiment import Experiment

SOURCE, FCN = small.SCENES["source"], small.SCENES["network"]
HERE = RoundId(seed=0, client=1, experience=0, round=0)


def scenes(kind: str = "fedavg", split: dict[str, Any] | None = None, **options: Any) -> Experiment:
    split = {**small.SCENES["split"], **(split or {})}
    return tiny(kind, **{**small.SCENES, **options, "split": split})


def runtime_of(**training: Any) -> ClientRuntime:
    experiment = scenes(training=training)
    return ClientRuntime(experiment.setting, experiment.dataset())


def test_counts_and_their_ratio_by_hand():
    """Two images of 2 x 2 pixels, classes 0 and 1, 2 is the background, 3 never comes.

    First: predicted 0 0 | 1 2, true 0 1 | 1 2. Second: predicted 0 2 | 2 2, true 0 0 | 0 2.
    Right, predicted, true: class 0 has 1 2 1 and 1 1 3, class 1 has 1 1 2 and 0 0 0, class 2 has
    1 1 1 and 1 3 1. Summed: 2 / (3 + 4 - 2) = 2/5, 1 / (1 + 2 - 1) = 1/2, 2 / (4 + 2 - 2) = 1/2,
    while the mean of class 0 over images is (1/2 + 1/3) / 2 = 5/12.
    """
    predicted = torch.tensor([[[0, 0], [1, 2]], [[0, 2], [2, 2]]])
    masks = torch.tensor([[[0, 1], [1, 2]], [[0, 0], [0, 2]]])
    counts = count_pixels(predicted, masks, 4)
    assert counts[0].tolist() == [[1, 1, 1, 0], [2, 1, 1, 0], [1, 2, 1, 0]]
    assert counts[1].tolist() == [[1, 0, 1, 0], [1, 0, 3, 0], [3, 0, 1, 0]]
    shares = intersection_over_union(counts.sum(0))
    assert shares[:3].tolist() == pytest.approx([2 / 5, 1 / 2, 1 / 2]) and shares[3].isnan()


def test_scores_by_hand(monkeypatch):
    """A network that says class 0 wherever the mask is no background.

    Over all classes the IoU of class 0 is its share of those pixels, that of the others 0; where
    the classes of a task alone are predicted, each class has its own share. Pixels of the
    background are right, of the others those of class 0.
    """
    runtime = runtime_of()
    experiment = scenes()
    whole = plan(experiment)

    def outputs(images: Tensor, layer: Any = None) -> Tensor:
        drawn = (images[:, -1:] != 3).float()
        return torch.cat([4 * drawn, 2 * drawn, 2 * drawn, 1 - drawn], 1)

    monkeypatch.setattr(runtime, "outputs", outputs)
    scores = mask_scores(runtime, whole, [0, 1], experience=1)
    masks, labels = runtime.dataset.x_test[:, -1], runtime.dataset.y_test
    assert scores.shape == (5, 2, 3) and scores[3].isnan().all()
    share = [float((masks == c).sum() / (masks != 3).sum()) for c in range(3)]
    for client, tasks in enumerate(whole.clients):
        classes = [task.classes[0] for task in tasks]
        for task, c in enumerate(classes):
            of_all, of_seen, of_task, nearest, pixels = scores[:, client, task].tolist()
            assert of_all == pytest.approx(share[c] if c == 0 else 0) and np.isnan(nearest)
            assert of_task == pytest.approx(share[c])
            own = masks[labels == c]
            assert pixels == pytest.approx(float(((own == 3) | (own == 0)).float().mean()))
            if task == 2:
                assert np.isnan(of_seen)
            else:  # two equal logits: the lower class
                best = 0 if 0 in classes[:2] else min(classes[:2])
                assert of_seen == pytest.approx(share[c] if c == best else 0)


def test_masks_move_with_their_images():
    """Images whose colour is their mask stay so, whatever the augmentation."""
    runtime = runtime_of(shift=3, flip=True)
    marks = torch.randint(4, (20, 1, 16, 16), generator=torch.Generator().manual_seed(0))
    images = marks.byte().expand(-1, 2, -1, -1)
    moved = False
    for batch in runtime.epochs(HERE, images, torch.zeros(20).long(), torch.arange(3, 20)):
        bytes_ = (batch.images * runtime.dataset.std + runtime.dataset.mean) * 255
        torch.testing.assert_close(bytes_[:, 0], batch.targets.float(), rtol=0, atol=1e-4)
        moved |= not any(torch.equal(batch.targets[0], each[0].long()) for each in marks)
        assert batch.targets.dtype == torch.int64
    assert moved


def test_no_network_sees_a_mask():
    runtime = runtime_of()
    images = runtime.dataset.x_train[:5].clone()
    before = runtime.outputs(images)
    images[:, -1] = 0
    assert torch.equal(runtime.outputs(images), before) and before.shape == (5, 4, 16, 16)
    assert runtime.dataset.mean.shape == (1,)
    grey = runtime.dataset.x_train[:, 0].double() / 255
    assert float(runtime.dataset.mean) == pytest.approx(float(grey.mean()))


def test_a_step_is_one_on_the_mean_cross_entropy_of_pixels():
    """At the end of a round of one batch: theta - 0.1 times the gradient over all pixels."""
    experiment = scenes(training={"rounds": 1, "batch_size": 100}, split={"clients": 1})
    whole = plan(experiment)
    worker = small.worker(experiment, whole)
    client_round = small.arrived(worker, whole, 0)
    indices = whole.train_indices(worker.runtime.dataset, 0, 0)
    images = worker.runtime.dataset.x_train[indices]
    net = worker.runtime.network(0)
    logits = net(worker.runtime.normalise(images)).permute(0, 2, 3, 1)
    loss = F.cross_entropy(logits.flatten(0, 2), images[:, -1].long().flatten())
    expected = client_round.message["parameters"] - 0.1 * small.slope(net, loss)
    reply = worker.train_client(client_round, {}, client_round.message).reply
    torch.testing.assert_close(reply.message["parameters"], expected, rtol=0, atol=1e-6)


def test_methods_for_masks_are_fedavg_with_equivalent_parameters():
    expected = run(scenes())
    for kind in ("replay", "stamp"):
        parts = small.registry.get_method(kind).fedavg_equivalent
        small.assert_same_weights(run(scenes(kind, **dict(parts or {}))), expected)
    assert expected.scores["global"].shape == (5, 3, 2, 3)
    assert np.isfinite(expected.accuracy(scoring="pixels")).all()
    assert np.isfinite(expected.accuracy()).all()


@pytest.mark.parametrize("past", ["trajectory", "gradient"])
def test_methods_with_a_memory_learn_from_its_masks(past):
    """Exemplars with masks of another class change the second task of replay and of STAMP."""
    parts: dict[str, dict[str, Any]] = {
        "replay": {"memory": small.kept(3)},
        "stamp": {"memory": {"exemplars_per_class": 3}, "temporal": {"past": past}},
    }
    for kind, params in parts.items():
        experiment = scenes(kind, **params)
        whole = plan(experiment)
        worker = small.worker(experiment, whole)
        arrived = small.arrived(worker, whole, 1)
        memory = arrived.state["memory"]
        assert memory["images"].shape == (3, 2, 16, 16)
        assert (memory["images"][:, -1] == whole.clients[0][0].classes[0]).any((1, 2)).all()
        replies = []
        for value in (0, 3):
            images = memory["images"].clone()
            images[:, -1] = value
            state = {**arrived.state, "memory": {**memory, "images": images}}
            replies.append(worker.train_client(arrived, state, arrived.message).reply)
        assert not torch.equal(*(reply.message["parameters"] for reply in replies))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": small.NETWORK}, "network.kind is 'mlp'; it must be 'fcn', as the data have m"),
        ({"source": small.DATA}, "network.kind is 'fcn'; it must be another: no masks are there"),
        ({"split": {"classes_per_task": 2, "tasks": 1}}, "split: kind, classes_per_task, cycles "),
        ({"diagnostics": {"features": 3}}, "diagnostics.features is 3; it must be 0, as the data"),
        ({"kind": "fedprox"}, "method is 'FedProx'; it must be one that learns masks, as"),
        ({"kind": "replay", "memory": small.kept(3, selection="ocs")}, "memory.selection is 'ocs'"),
        ({"kind": "stamp", "prototype": 0.1}, "prototype is 0.1; it must be 0, as the data have"),
        ({"network": {**FCN, "channels": [4]}}, "network.channels is [4]; it must be two numbers"),
        ({"source": {**SOURCE, "size": 18}}, "network.kind is 'fcn'; it must be another for (1, 1"),
    ],
    ids=str,
)
def test_what_does_not_fit_masks_is_refused(options, message):
    experiment = scenes(**options)
    with pytest.raises(ParameterError) as error:
        small.worker(experiment, plan(experiment))
    assert str(error.value).startswith(message)


def test_masks_with_unknown_classes_are_refused(monkeypatch):
    from workbench.sources import scenes as source

    made = source.make(source.Options(3, 12, 4, 16))
    made.x_test[0, 1, 0, 0] = 4
    monkeypatch.setattr(source, "make", lambda _: replace(made))
    with pytest.raises(ValueError, match=r"the masks in x_test must be in 0..3, the last one for"):
        small.data.load_dataset({**SOURCE, "train_per_class": 13})
