"""FedAvg, FedProx, fine-tuned FedAvg and joint training against naive references in NumPy."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import reference
import small
import torch
from reference import CONFIGURATIONS, GROWING, Array, FedAvgReference, Numbers, State, Visit
from small import BATCH_NORM, plan, run, tiny

from stamp_core.config.decode import ParameterError
from stamp_core.config.params import read_params
from stamp_core.engine.experiment import load_experiment
from stamp_core.models import networks as models


class FedProxReference(FedAvgReference):
    """The loss has mu / 2 |θ - received|^2."""

    def step_gradient(
        self, visit: Visit, theta: Array, x: Array, y: Numbers, state: State
    ) -> Array:
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
    params = read_params()
    other = deepcopy(params)
    params["methods"][method] = {**params["methods"].get(method, {}), **values}
    other["settings"]["tiny"]["training"] |= values
    own, same = (load_experiment("tiny", method, each) for each in (params, other))
    assert load_experiment("tiny", "fedavg", params).setting.training != own.setting.training
    small.assert_same_weights(record := run(own), run(same))
    if "batch_size" in values:
        assert record.history[0]["images"] == 3 * values["batch_size"]


@pytest.mark.parametrize(("size", "steps", "images"), [(40, 33, 1320), (2000, 1, 1347)])
def test_joint_training_leaves_out_a_batch_that_is_not_full(size, steps, images):
    """Of 1347 images with a batch of its own, unless that is larger than all of them."""
    params = read_params()
    params["methods"]["joint"] = {"batch_size": size}
    for entry in run(load_experiment("tiny", "joint", params)).history:
        assert (entry["sgd_steps"], entry["images"]) == (steps, images)


class TunedReference(FedAvgReference):
    """FedAvg, whose clients' personal models are the global one after more local SGD."""

    def batches(self, visit: Visit, of: str = "", indices: Numbers | None = None) -> list[Numbers]:
        if visit.round >= 0:
            return super().batches(visit, of, indices)
        draw = self.draw(replace(visit, round=self.training.rounds - 1), "personal")
        size = self.training.batch_size
        found = []
        for _ in range(self.params.ft_epochs if len(visit.indices) else 0):
            order = torch.randperm(len(visit.indices), generator=draw).numpy()
            shuffled = visit.indices[order]
            found += [shuffled[start : start + size] for start in range(0, len(order), size)]
        return found

    def personal(self, client: int) -> Array:
        experience = self.plan.experiences - 1
        task = experience % self.plan.tasks
        visit = Visit(client, experience, -1, task, True, self.indices(client, task))
        return self.sgd(visit, self.theta, {})


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("ft_epochs", [0, 2])
def test_personal_models_are_the_global_one_after_fine_tuning(ft_epochs, configuration):
    """In their accuracies; everything else is FedAvg bit for bit."""
    record, naive = reference.compare(
        "fedavg_tuned", configuration, TunedReference, ft_epochs=ft_epochs
    )
    assert isinstance(naive, TunedReference)
    accuracy = record.accuracy("personal")[-1]
    for client, task in small.everywhere(naive.plan):
        theta = naive.personal(client)
        found = naive.accuracy(theta, client, task, list(range(10)))
        assert accuracy[client, task] == pytest.approx(found, abs=1e-6)
    assert np.array_equal(accuracy, record.accuracy()[-1]) == (ft_epochs == 0)
    fedavg = run(tiny(**CONFIGURATIONS[configuration]), naive.plan)
    assert small.counted(record.history) == small.counted(fedavg.history)


def test_fine_tuning_gathers_running_statistics_and_leaves_the_message_unchanged():
    """One epoch is one batch: the running mean becomes 0.9 of the received + 0.1 of the batch's.

    The convolution's weights are those received, as the statistics are gathered before the step.
    """
    experiment = tiny("fedavg_tuned", network=BATCH_NORM, training={"batch_size": 1000})
    worker = small.worker(experiment, plan(experiment))
    arrived = small.arrived(worker, plan(experiment), 0)
    client_round = replace(arrived, message={**arrived.message, "buffers": torch.full((8,), 2.0)})
    before = deepcopy(client_round.message)
    worker.method.load_personal_model(client_round)
    small.assert_equal_trees(client_round.message, before)
    net = models.build_network(experiment.setting.network, (1, 8, 8), 10, seed=0)
    images = worker.runtime.dataset.x_train[client_round.indices]
    maps = net.encoder[0](small.normalised(experiment, images)).detach()
    expected = 0.9 * 2.0 + 0.1 * maps.mean((0, 2, 3))
    torch.testing.assert_close(worker.runtime.model.buffers[:4], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("mu", "lr"), [(20.0, 0.1), (5.0, 0.5)])
def test_a_proximal_term_that_increases_the_distance_is_refused(mu, lr):
    message = rf"mu is {mu}; it must be below 2 / training.lr = {2 / lr:g}"
    with pytest.raises(ParameterError, match=message):
        small.worker(tiny("fedprox", training={"lr": lr}, mu=mu))
    small.worker(tiny("fedprox", training={"lr": lr}, mu=0.99 * 2 / lr))  # just below the bound
    small.worker(tiny("fedprox", training={"lr": 0.0}, mu=1e6))
