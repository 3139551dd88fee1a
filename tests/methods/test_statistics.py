"""Methods of statistics beside naive ones in NumPy, for every order and division of the images."""

from itertools import permutations

import numpy as np
import pytest
import reference
import small
import torch
from reference import GROWING, Array, FedAvgReference, Numbers, Reply, State, Visit, softmax
from small import tiny

from stamp_core.config.decode import ParameterError
from stamp_core.core.seeding import generator
from stamp_core.data.plan import Plan
from stamp_core.methods.base.method import DivergedError
from workbench.methods.stsa import estimated_rows

KINDS = [
    ("stsa", {"expansion": 0, "ridge": 20.0, "estimate": 4}),  # the others are exact
    ("stsa", {"expansion": 0, "ridge": 2.0}),
    ("stsa", {"expansion": 40, "ridge": 50.0, "cosine": True}),
    ("class_gaussians", {"covariance": "full", "samples": 30, "epochs": 1}),
    ("class_gaussians", {"covariance": "diagonal", "samples": 30}),
    ("class_gaussians", {"covariance": "shared", "samples": 30, "server_head_lr": 0.05}),
    ("nearest_class_mean", {}),
    ("nearest_class_mean", {"metric": "cosine"}),
]


class StatisticsReference(FedAvgReference):
    """The images of each client's tasks, once; the head is computed from all of them at the end."""

    def start(self) -> None:
        self.sent: list[tuple[Visit, Numbers]] = []

    def local(self, visit: Visit, state: State) -> Reply:
        if visit.task not in state.setdefault("tasks", []) and len(visit.indices):
            state["tasks"].append(visit.task)
            self.sent.append((visit, visit.indices))
        return Reply(visit.client, self.theta, len(visit.indices))

    def run(self) -> Array:
        super().run()
        x, y = self.images()
        fixed, weight, bias = self.head(x, y)
        bias[~np.isin(np.arange(self.classes), y)] = -1e30
        return np.concatenate([fixed.ravel(), weight.ravel(), bias])

    def images(self) -> tuple[Array, Numbers]:
        indices = np.concatenate([own for _, own in self.sent])
        return self.x[indices], self.y[indices]


class STSAReference(StatisticsReference):
    def matrix(self) -> Array:
        shape = self.x.shape[1], self.params.expansion
        draw = generator(self.plan.seed, "expansion")
        return torch.randn(*shape, generator=draw).double().numpy()

    def phi(self, x: Array) -> Array:
        return np.maximum(x @ self.matrix(), 0) if self.params.expansion else x

    def head(self, x: Array, y: Numbers) -> tuple[Array, Array, Array]:
        phi = self.phi(x)
        gram = self.estimate() if self.params.estimate else phi.T @ phi
        penalty = self.params.ridge * np.eye(phi.shape[1])
        weight = np.linalg.solve(gram + penalty, phi.T @ np.eye(self.classes)[y]).T
        if self.params.cosine:
            weight /= np.linalg.norm(weight, axis=1, keepdims=True) + 1e-300
        fixed = [self.matrix().T.ravel(), np.zeros(self.params.expansion)]
        return np.concatenate(fixed), weight, np.zeros(self.classes)

    def estimate(self) -> Array:
        """The published formula for each class of each client, with the subsets that were drawn."""
        gram = np.zeros((self.phi(self.x[:1]).shape[1],) * 2)
        for visit, own in self.sent:
            order = own[torch.randperm(len(own), generator=self.draw(visit, "subsets")).numpy()]
            for label in np.unique(self.y[own]):
                of_class = order[self.y[order] == label]
                subsets = [s for s in np.array_split(of_class, self.params.estimate) if len(s)]
                gram += published(self.phi(self.x), subsets)
        return gram


def published(phi: Array, subsets: list[Numbers]) -> Array:
    """The paper's estimate of a class's Gram matrix; of subsets of one image each it is exact."""
    sums, images = [phi[own].sum(0) for own in subsets], sum(map(len, subsets))
    squares = [np.outer(s, s) / len(own) for s, own in zip(sums, subsets, strict=True)]
    if len(subsets) == images:
        return np.asarray(sum(squares))
    scale = (images - 1) / (len(subsets) - 1)
    less = (images - len(subsets)) / ((len(subsets) - 1) * images)
    return np.asarray(scale * sum(squares) - less * np.outer(sum(sums), sum(sums)))


class NearestClassMeanReference(StatisticsReference):
    def head(self, x: Array, y: Numbers) -> tuple[Array, Array, Array]:
        weight = np.zeros((self.classes, x.shape[1]))
        weight[np.unique(y)] = moments(x, y, "full")[0]
        if self.params.metric == "cosine":
            weight /= np.linalg.norm(weight, axis=1, keepdims=True) + 1e-300
            return np.empty(0), weight, np.zeros(self.classes)
        return np.empty(0), weight, -np.sum(weight**2, 1) / 2


class ClassGaussiansReference(StatisticsReference):
    def head(self, x: Array, y: Numbers) -> tuple[Array, Array, Array]:
        """Softmax regression on the draws, from zeros."""
        draws, labels = self.draws(x, y)
        order = generator(self.plan.seed, "order of draws")
        theta = np.zeros((self.classes, x.shape[1] + 1))
        velocity, training = np.zeros_like(theta), self.training
        draws = np.hstack([draws, np.ones((len(draws), 1))])
        for _ in range(self.params.epochs):
            for part in torch.randperm(len(labels), generator=order).split(training.batch_size):
                own = part.numpy()
                slopes = softmax(draws[own] @ theta.T) - np.eye(self.classes)[labels[own]]
                slope = slopes.T @ draws[own] / len(own) + training.weight_decay * theta
                velocity = training.momentum * velocity + slope
                theta = theta - self.params.server_head_lr * velocity
        return np.empty(0), theta[:, :-1], theta[:, -1].copy()

    def draws(self, x: Array, y: Numbers) -> tuple[Array, Numbers]:
        means, covariances = moments(x, y, self.params.covariance)
        labels, found = np.unique(y), list[Array]()
        for label, mean, covariance in zip(labels.tolist(), means, covariances, strict=True):
            draw = generator(self.plan.seed, label, "draws")
            noise = torch.randn(self.params.samples, len(mean), generator=draw).double().numpy()
            diagonal = self.params.covariance == "diagonal"
            jitter = 1e-300 if diagonal else 1e-6 * np.diag(covariance).mean() + 1e-12
            root = np.linalg.cholesky(covariance + jitter * np.eye(len(mean)))
            found.append(mean + noise @ root.T)
        return np.concatenate(found), labels.repeat(self.params.samples)


def moments(x: Array, y: Numbers, covariance: str) -> tuple[Array, Array]:
    """Means and covariances of the classes present; "shared": one for all."""
    groups = [x[y == label] for label in np.unique(y)]
    means = np.stack([own.mean(0) for own in groups])
    scatter = np.stack([(o - m).T @ (o - m) for o, m in zip(groups, means, strict=True)])
    freedom = np.array([len(own) - 1 for own in groups])
    if covariance == "shared":
        scatter, freedom = scatter.sum(0) + 0 * scatter, freedom.sum() + 0 * freedom
    covariances = scatter / np.maximum(1, freedom)[:, None, None]
    return means, covariances * np.eye(x.shape[1]) if covariance == "diagonal" else covariances


REFERENCES: dict[str, type[StatisticsReference]] = {
    "stsa": STSAReference,
    "class_gaussians": ClassGaussiansReference,
    "nearest_class_mean": NearestClassMeanReference,
}


def with_one_image(plan: Plan) -> Plan:
    """Client 0 has one image of its first task."""
    return small.with_train(plan, {(0, 0): plan.clients[0][0].train[:1]})


@pytest.mark.parametrize("configuration", GROWING)
@pytest.mark.parametrize(("kind", "params"), KINDS)
def test_a_whole_run_is_the_reference(kind, params, configuration, tmp_path):
    """Also with absent and later clients; a task is sent once, though it comes in two cycles.

    Statistics are those of all images in one place, however clients and tasks divide them: ridge
    regression is the joint one, and moments are those of the pooled images.
    """
    given = kind, configuration, REFERENCES[kind], tmp_path, with_one_image
    record, naive, _ = reference.compare(*given, **params)
    assert all(entry["bytes"]["down"] == entry["sgd_steps"] == 0 for entry in record.history)
    uploads = sum(entry["bytes"]["up"] > 0 for entry in record.history)
    assert uploads == len({(visit.experience, visit.round) for visit, _ in naive.sent})
    experiment = tiny(kind, **GROWING[configuration], **params)
    server = small.saved(experiment, tmp_path)["server"]
    worker = small.worker(experiment, naive.plan)
    naive.x = worker.runtime.normalise(naive.data.x_train).flatten(1).double().numpy()
    x, y = naive.images()
    counts = np.bincount(y, minlength=10)
    assert server["counts"].tolist() == counts.tolist()
    assert (server["parameters"][-10:][counts == 0] == -1e30).all()  # biases
    if kind == "class_gaussians":
        means, covariances = moments(x, y, params["covariance"])
        close(server["means"][counts > 0], means)
        close(found_covariances(server, params["covariance"]), covariances)
        return
    weight, bias = worker.method.head(server)
    _, expected, offset = naive.head(x, y)
    close(weight, expected)
    close(bias, offset)


def found_covariances(server: State, covariance: str) -> Array:
    present = server["counts"].numpy() > 0
    scatter, freedom = server["scatter"].numpy(), server["counts"].numpy()[present] - 1
    if covariance == "shared":
        return np.stack([scatter[0] / freedom.sum()] * len(freedom))
    if covariance == "diagonal":
        scatter = scatter[:, None] * np.eye(scatter.shape[1])
    return np.asarray(scatter[present] / np.maximum(1, freedom)[:, None, None])


def close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


@pytest.mark.parametrize("sizes", [(2, 2, 1), (3, 2), (1,) * 5, (2, 3, 0)])
def test_the_estimate_of_a_gram_matrix_is_unbiased(sizes):
    """Its mean over all 120 orders of five images, of which the first ones are the first subset."""
    x = torch.randn(5, 3, generator=generator("images"), dtype=torch.float64)
    total = torch.zeros(3, 3, dtype=torch.float64)
    for order in permutations(range(5)):
        parts = x[list(order)].split(sizes)
        sums = torch.stack([part.sum(0) for part in parts])
        rows = estimated_rows(sums, torch.tensor(sizes).double())
        total += rows.T @ rows / 120
        ends = np.cumsum(sizes)
        subsets = [np.array(order[e - n : e]) for e, n in zip(ends, sizes, strict=True) if n]
        close(rows.T @ rows, published(x.numpy(), subsets))
    close(total, (x.T @ x).numpy())


def test_values_that_cannot_work_are_refused():
    with pytest.raises(ParameterError, match="estimate is 1; it must be 0, or at least 2"):
        tiny("stsa", estimate=1)
    with pytest.raises(DivergedError, match=r"lower server_head_lr \(now 1e\+38\)"):
        small.run(tiny("class_gaussians", server_head_lr=1e38))
