"""What an upload is made of: the client's own batches, the weights of its images, its noise."""

from typing import Any

import pytest
import torch
from small import BATCH_NORM, tiny

from stamp_core.client.runtime import RoundId
from stamp_core.config.decode import ParameterError
from stamp_core.engine.experiment import Experiment
from stamp_core.engine.train import Run
from workbench.studies.attacks.capture import Upload, capture, start_run, train_until

MEMORY: Any = {"memory": {"exemplars_per_class": 3}, "ratio": 0.5}
MATCHED: Any = {**MEMORY, "temporal": {"every": 1, "past": "gradient", "lr": 1.5}}
EXPERIMENTS = {
    "fedavg": tiny("fedavg"),
    "replay": tiny("replay", **MEMORY),
    "stamp": tiny("stamp", **MATCHED),
}


def reached(experiment: Experiment, experience: int = 1) -> Run:
    run = start_run(experiment, seed=0)
    train_until(run, experience, 0)
    return run


def uploaded(run: Run, images: int | None, first: int = 0, **options: Any) -> Upload:
    chosen = slice(first, images and first + images)
    round_id = RoundId(0, 0, *divmod(run.state["next"], run.training.rounds))
    message = run.method.broadcast(run.state["server"], 0)
    return capture(run.worker, round_id, run.state["clients"][0], message, chosen, **options)


@pytest.mark.parametrize("method", EXPERIMENTS)
def test_the_upload_on_all_images_is_that_of_the_client_round(method):
    run = reached(EXPERIMENTS[method])
    upload = uploaded(run, None)
    message = run.method.broadcast(run.state["server"], 0)
    state = run.state["clients"][0]
    reply = run.worker.train_client(RoundId(0, 0, 1, 0), state, message).reply
    assert torch.equal(upload.update, message["parameters"] - reply.message["parameters"])
    assert len(upload.steps) == reply.sgd_steps


def test_before_there_is_a_memory_all_methods_send_the_same():
    first, *others = (uploaded(reached(each, 0), 32).update for each in EXPERIMENTS.values())
    assert all(torch.equal(first, other) for other in others)


def test_exemplars_are_those_of_the_memory_and_return_in_every_step():
    run = reached(EXPERIMENTS["replay"])
    upload = uploaded(run, 64)
    memory = run.worker.runtime.normalise(run.state["clients"][0]["memory"]["images"])
    exemplars = upload.images[upload.images.exemplar]
    assert len(upload.steps) == 4 and [len(step) for step in upload.steps] == 4 * [16 + 6]
    assert len(exemplars.labels) == len(memory) == 6  # 2 classes of 3, all of them in each batch
    equal = (exemplars.values[:, None] == memory[None]).flatten(2).all(2)
    assert (equal.sum(0) == 1).all() and (equal.sum(1) == 1).all()
    assert upload.images.labels.unique().numel() == 4  # two of the task, two of the memory


def test_noise_has_its_deviation_and_none_leaves_the_upload_as_it_is():
    run = reached(EXPERIMENTS["replay"])
    plain = uploaded(run, 16).update
    assert torch.equal(plain, uploaded(run, 16, noise=0.0).update)
    noise = uploaded(run, 16, noise=0.1).update - plain
    assert float(noise.std()) == pytest.approx(0.1 * float(plain.norm()), rel=0.1)
    assert torch.equal(noise, uploaded(run, 16, noise=0.1).update - plain)


@pytest.mark.parametrize(
    ("experiment", "key"),
    [
        (tiny(training={"momentum": 0.9}), "training.momentum is 0.9"),
        (tiny(training={"weight_decay": 0.1}), "training.weight_decay is 0.1"),
        (tiny("stamp", prototype=0.1, **MATCHED), "prototype is 0.1"),
        (tiny(network=BATCH_NORM), "network.norm is 'batch'"),
    ],
)
def test_what_is_not_simulated_is_refused(experiment, key):
    with pytest.raises(ParameterError, match=key):
        uploaded(start_run(experiment, 0), 16)
