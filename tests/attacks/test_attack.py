"""The attack against an analytic one, its loss at the true images, and recovered labels."""

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from small import tiny
from test_capture import EXPERIMENTS, reached, uploaded

from stamp_core.engine.train import Run
from stamp_core.models.flat import split_like
from stamp_core.models.networks import build_network
from workbench.studies.attacks.capture import Upload, distinct
from workbench.studies.attacks.gradient_inversion import Attack, inversion_loss, total_variation
from workbench.studies.attacks.scores import (
    label_accuracy,
    pixels,
    psnr,
    recover_counts,
    round_to_sum,
)
from workbench.studies.attacks.study import (
    SCORES,
    Case,
    load_attacks,
    plan_attack,
    reconstruct,
    returning,
    save_attacks,
    study,
)
from workbench.studies.attacks.summaries import contrast, gains_of_rounds

CNN: Any = {"kind": "cnn", "channels": [4], "features": 16}


def loss_at_truth(run: Run, upload: Upload) -> float:
    """The loss of the attack at the images of the client, if the server knew everything."""
    classifier, images = run.worker.runtime.classifier, upload.images
    return inversion_loss(classifier, [upload], images.labels, images.values).item()


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("method", EXPERIMENTS)
def test_the_loss_is_0_at_the_true_images_and_at_no_others(method, steps):
    run = reached(EXPERIMENTS[method])
    upload = uploaded(run, 16 * steps)
    assert abs(loss_at_truth(run, upload)) < 1e-6
    upload.images.values[0] += 0.5
    assert loss_at_truth(run, upload) > 1e-5


def test_the_loss_of_several_uploads_with_shared_exemplars_is_0_at_the_true_images():
    run = reached(EXPERIMENTS["replay"])
    uploads = [uploaded(run, 16)]
    run.train_round(1, 0)
    uploads.append(uploaded(run, 16, first=16))
    images, places = distinct([each.images for each in uploads])
    assert len(images.labels) == 16 + 16 + 6  # six exemplars are in both
    joint = [
        replace(each, steps=[own[step] for step in each.steps])
        for each, own in zip(uploads, places, strict=True)
    ]
    classifier = run.worker.runtime.classifier
    assert abs(inversion_loss(classifier, joint, images.labels, images.values).item()) < 1e-6


def test_one_image_of_an_mlp_is_found_as_by_the_quotient_of_gradients():
    """The gradient of a unit's weights is the image times that of its bias."""
    run = reached(tiny(training={"batch_size": 1}), 0)
    runtime, upload = run.worker.runtime, uploaded(run, 1)
    weights, bias, *_ = split_like(upload.gradient, list(runtime.classifier.parameters()))
    unit = bias.abs().argmax()
    quotient = pixels(runtime, (weights[unit] / bias[unit]).view(1, 1, 8, 8))
    truth = pixels(runtime, upload.images.values)
    assert float(psnr(quotient, truth)) > 80
    case = Case("fedavg", 0, batch_size=1)
    taken, labels = plan_attack(upload, case)
    draw = torch.Generator().manual_seed(0)
    found = reconstruct(runtime, [taken], labels, Attack(variation=0.0), draw)
    assert float(psnr(found, quotient)) > 60


@pytest.mark.parametrize("network", [{"kind": "mlp", "features": 32}, CNN], ids=["mlp", "cnn"])
@pytest.mark.parametrize("labels", [[3, 1, 7, 9, 0, 4], [2, 2, 2, 5, 5, 8], 12 * [6]])
def test_labels_of_one_step_are_recovered(network, labels):
    experiment = tiny(network=network)
    dataset = experiment.dataset()
    first = [(dataset.y_train == label).nonzero()[k] for k, label in enumerate(labels)]
    images = dataset.x_train[torch.cat(first)].float() / 255
    built = build_network(experiment.setting.network, dataset.shape, 10, seed=0)
    head = built.head.weight, built.head.bias
    slopes = torch.autograd.grad(F.cross_entropy(built(images), torch.tensor(labels)), head)
    with torch.no_grad():
        counts = recover_counts(head, slopes, len(labels))
    assert counts.tolist() == [labels.count(label) for label in range(10)]


def test_the_accuracy_of_labels_by_hand():
    assert label_accuracy(torch.tensor([1, 2, 0]), torch.tensor([0, 0, 1])) == 2 / 3


def test_rounded_numbers_keep_their_sum_and_are_near():
    values = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = (40 * values / values.sum()).numpy()
    rounded = round_to_sum(values, 40)
    assert int(rounded.sum()) == 40 and abs(rounded.numpy() - values).max() < 1


def test_total_variation_by_hand():
    images = torch.tensor([[[[0.0, 1.0], [3.0, 3.0]]]])
    assert float(total_variation(images)) == (3 + 2) / 2 + (1 + 0) / 2


def test_a_study_scores_new_images_and_exemplars_apart_and_repeats_itself():
    cases = [Case("fedavg", 0, 4), Case("stamp_without_coreset", 1, 4), Case("replay", 1, 4, None)]
    one, other = (study("tiny", cases, [0, 1], Attack(iterations=3)) for _ in range(2))
    assert one.rows.equals(other.rows)
    kinds = one.rows.groupby("method").kind.agg(lambda kinds: sorted(set(kinds)))
    assert kinds.to_dict() == {
        "fedavg": ["new"],
        "stamp_without_coreset": ["exemplar", "new"],
        "replay": ["exemplar", "new"],
    }
    whole = one.rows[one.rows.steps.isna()]
    assert (whole.groupby("client").images.sum() == 8).all()  # one batch stands for all
    true, found = one.images[cases[1].name]
    assert true.shape == found.shape == (8, 1, 8, 8)


def test_attacks_on_two_clients_are_read_as_written(tmp_path):
    cases = [Case("fedavg", 0, 4), Case("replay", 1, 4, None, noise=0.01)]
    found = [study("tiny", cases, [client], Attack(iterations=1)) for client in (2, 1)]
    again = returning("tiny", ["replay"], [1], [0], Attack(iterations=1))
    for client, each in zip((2, 1), found, strict=True):
        save_attacks(tmp_path / str(client), each, again)
    read, again_read = load_attacks(tmp_path)
    assert read.rows.client.tolist() == [1] * 3 + [2] * 3
    assert read.rows.name.tolist() == [*found[1].rows.name, *found[0].rows.name]
    written = pd.concat([found[1].rows, found[0].rows]).psnr
    assert read.rows.psnr.tolist() == pytest.approx(written.tolist())
    assert len(again_read) == 2 * len(again)
    for case in cases:
        for one, other in zip(read.images[case.name], found[1].images[case.name], strict=True):
            assert (one == other).all()
    with pytest.raises(FileNotFoundError, match="make privacy"):
        load_attacks(tmp_path / "1")


def test_returning_exemplars_are_one_image_in_all_uploads():
    rows = returning("tiny", ["replay"], [1, 2], [0], Attack(iterations=2))
    sizes = rows.groupby(["rounds", "kind"]).images.agg(["min", "max", "size"])
    assert sizes.loc[1, "exemplar"].tolist() == [4, 4, 2]  # two windows of one round
    assert sizes.loc[2, "exemplar"].tolist() == [4, 4, 1]
    assert sizes.loc[2, "new"].tolist() == [8, 8, 1]


def test_more_rounds_are_compared_with_one_by_client():
    rows = pd.DataFrame(
        {"method": "replay", "rounds": rounds, "kind": "new", "client": client, "psnr": psnr}
        for rounds, client, psnr in [
            *((1, 0, 10.0), (1, 0, 12.0), (1, 1, 20.0), (1, 1, 20.0)),  # two windows
            *((2, 0, 13.0), (2, 1, 21.0)),
        ]
    )
    found = gains_of_rounds(rows.sample(frac=1, random_state=0))
    assert found["mean"].tolist() == [1.5] and found["n"].tolist() == [2]  # 2 and 1 more


def test_two_cases_are_compared_by_client():
    replay, stamp = Case("replay", 1), Case("stamp", 1)
    rows = pd.DataFrame(
        {"name": case.name, "kind": "new", "client": client, **dict.fromkeys(SCORES, score)}
        for case, scores in ((replay, (1.0, 5.0)), (stamp, (3.0, 8.0)))
        for client, score in enumerate(scores)
    )
    found = contrast(rows.sample(frac=1, random_state=0), stamp, replay)  # 2 and 3 more
    assert list(found.score) == [*SCORES] and (found["n"] == 2).all()
    assert (found["mean"] == 2.5).all() and found.low[0] == pytest.approx(2.5 - 12.7062 * 0.5)
