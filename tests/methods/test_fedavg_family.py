"""FedAvg, FedProx, fine-tuned FedAvg and joint training against naive references in NumPy."""

from copy import deepcopy

import numpy as np
import pytest
import reference
import small
import torch
from reference import CONFIGURATIONS, GROWING, Array, FedAvgReference, Numbers, State
from small import BATCH_NORM, plan, run, tiny

from stamp_core.engine.experiment import load_experiment
from stamp_core.models import networks as models


class FedProxReference(FedAvgReference):
    """The loss has mu / 2 |θ - received|^2."""

    def step_gradient(self, theta: Array, x: Array, y: Numbers, state: State) -> Array:
        return self.gradient(theta, x, y) + self.params.mu * (theta - self.theta)


class JointReference(FedAvgReference):
    """One learner, as client 0, on all images of all clients and tasks."""

    def chosen(self, clients: list[int]) -> list[int]:
        return [0]

    def indices(self, client: int, task: int) -> Numbers:
        pairs = [(u, t) for u in range(len(self.plan.clients)) for t in range(self.plan.tasks)]
        found = [self.plan.train_indices(self.data, *pair).numpy() for pair in pairs]
        return np.unique(np.concatenate(found))


@pytest.mark.parametrize("configuration", GROWING)
@pytest.mark.parametrize(
    ("kind", "naive", "params"),
    [
        ("fedavg", FedAvgReference, {"server_lr": 1.5}),
        ("fedprox", FedProxReference, {"mu": 0.7}),
        ("joint", JointReference, {}),
    ],
)
def test_whole_runs_are_those_of_the_reference(kind, naive, params, configuration):
    reference.compare(kind, configuration, naive, **params)


@pytest.mark.parametrize(
    ("method", "values"),
    [("joint", {"batch_size": 449, "lr": 0.2}), ("fedweit", {"lr": 0.02})],
    ids=["joint", "fedweit"],
)
def test_training_with_its_own_batch_and_step_is_that_of_a_setting_with_them(method, values):
    """The batch is a third of all images, so that every batch is full."""
    of_setting = {f"setting.training.{key}": value for key, value in values.items()}
    own, same = (load_experiment("tiny", method, None, each) for each in (values, of_setting))
    assert load_experiment("tiny", "fedavg").setting.training != own.setting.training
    small.assert_same_weights(record := run(own), run(same))
    if "batch_size" in values:
        assert record.history[0]["images"] == 3 * values["batch_size"]


@pytest.mark.parametrize(("size", "steps", "images"), [(40, 33, 1320), (2000, 1, 1347)])
def test_joint_training_leaves_out_a_batch_that_is_not_full(size, steps, images):
    """Of 1347 images with a batch of its own, unless that is larger than all of them."""
    experiment = load_experiment("tiny", "joint", overrides={"batch_size": size})
    for entry in run(experiment).history:
        assert (entry["sgd_steps"], entry["images"]) == (steps, images)


class TunedReference(FedAvgReference):
    """FedAvg, whose clients' personal models are the global one after more local SGD."""

    def personal(self, client: int, x: Array) -> Array:
        """The logits of a client's personal model."""
        visit, epochs = reference.last_visit(self, client), self.params.ft_epochs
        draw, size = self.draw(visit, "personal"), self.training.batch_size
        batches = self.passes(visit.indices, draw, size, epochs)
        return self.logits(self.descend(self.theta, batches, self.gradient), x)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("ft_epochs", [0, 2])
def test_personal_models_are_the_global_one_after_fine_tuning(ft_epochs, configuration):
    """In their accuracies; everything else is FedAvg bit for bit."""
    record, naive, _ = reference.compare(
        "fedavg_tuned", configuration, TunedReference, ft_epochs=ft_epochs
    )
    reference.assert_personal_scores(record, naive, naive.personal)
    accuracy = record.accuracy("personal")[-1]
    assert np.array_equal(accuracy, record.accuracy()[-1]) == (ft_epochs == 0)
    fedavg = run(tiny(**CONFIGURATIONS[configuration]), naive.plan)
    assert small.counted(record.history) == small.counted(fedavg.history)


def test_fine_tuning_gathers_running_statistics_and_leaves_the_message_unchanged():
    """One epoch is one batch: the running mean becomes 0.9 of the received + 0.1 of the batch's.

    The convolution's weights are those received, as the statistics are gathered before the step.
    """
    experiment = tiny("fedavg_tuned", network=BATCH_NORM, training={"batch_size": 1000})
    worker = small.worker(experiment, plan(experiment))
    client_round = small.arrived(worker, plan(experiment), 0)
    client_round.message["buffers"] = torch.full((8,), 2.0)
    before = deepcopy(client_round.message)
    worker.method.load_personal_model(client_round)
    small.assert_equal_trees(client_round.message, before)
    net = models.build_network(experiment.setting.network, (1, 8, 8), 10, seed=0)
    images = worker.runtime.dataset.x_train[client_round.indices]
    maps = net.encoder[0](small.normalised(experiment, images)).detach()
    expected = 0.9 * 2.0 + 0.1 * maps.mean((0, 2, 3))
    torch.testing.assert_close(worker.runtime.model.buffers[:4], expected, rtol=0, atol=1e-5)
