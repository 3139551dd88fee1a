"""pFedDIL (Li et al., 2024), reconstructed: a client has several models, and they vote."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime
from stamp_core.client.scoring import accuracies, indices_of_tests, score
from stamp_core.config.decode import invalid, require_at_least
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Method, State
from stamp_core.models.flat import FlatModel

LEAST, TINY = 0.01, 1e-6  # of a feature's variance: a share of the features' mean, and in itself
SHARE = 1e-8  # added to each model's, so that they have a sum


@dataclass(frozen=True)
class PFedDILParams(FedAvgParams):
    """How many models a client has, when it starts a new one, and what holds it near the others.

    No code was published, and no rate or threshold could be read.
    """

    models: int = 3  # d, of a client at most
    threshold: float = 0.5  # a model is near if it takes more than this share of a task for its own
    migration: float = 1.0  # weight of the squared distances to the models; published: none, so 1
    # The weights before the first round of a task: those of the model that is chosen (the initial
    # ones if it is new), or the received ones. In all later rounds they are the received ones.
    start: Literal["own", "received"] = "own"

    def __post_init__(self) -> None:
        """Refuse negative weights and a client without a model."""
        super().__post_init__()
        require_at_least(self, 1, "models")
        require_at_least(self, 0, "threshold", "migration")


class PFedDIL(Method):
    """FedAvg of the models in training; each client continues one of its models or starts one.

    A reconstruction from the abstract and third-party notes. A model comes with an auxiliary
    classifier of its features, which tells whether an image belongs to the model's tasks. When a
    task comes, the mean answers on its images say how near the models are. The nearest one is
    trained, or a new one if none is near, and is held near all models in these proportions. A model
    is stored as its client has trained it: averaged are all clients' models in training. The
    personal models vote on each image, weighted by their auxiliary classifiers; the global model is
    the average.
    """

    Params: ClassVar = PFedDILParams
    models: tuple[str, ...] = ("global", "personal", "local")
    fedavg_equivalent: ClassVar[dict[str, Any]] = {
        "models": 1,
        "migration": 0.0,
        "start": "received",
    }
    group = "personalised"

    def __init__(self, params: PFedDILParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        if (lr := runtime.training.lr) * params.migration >= 1:
            right = f"below {1 / lr:g}, so that training.lr x 2 migration is below 2"
            raise invalid("migration", params.migration, right)

    def init_client(self, client: int, server: State) -> State:
        """No model; `current` is the place of the one in training."""
        return {"models": [], "current": 0, "experience": -1}

    # --- the choice of a model

    def receive(self, client_round: ClientRound) -> None:
        """Load the received model, or what the training of a new task starts from."""
        super().receive(client_round)
        client_round.scratch["own"] = client_round.state
        indices = self.train_indices(client_round)
        if client_round.state["experience"] != client_round.experience and len(indices):
            client_round.scratch["own"] = self.choose(client_round, indices)
            self.load_start(client_round)

    def choose(self, client_round: ClientRound, indices: Tensor) -> State:
        """The state in which a model is chosen for a new task."""
        state, models = client_round.state, client_round.state["models"]
        near = torch.ones(len(models))
        if self.params.models > 1:  # else there is nothing to choose
            near = torch.tensor([self.mean_share(model, indices) for model in models])
        current = nearest_model(near, self.params.threshold, self.params.models)
        self.note(client_round, near, current)
        chosen = {**state, "current": current}
        if self.params.migration and models:
            chosen["target"] = weighted_sum(models, proportions(near))
        return chosen

    def load_start(self, client_round: ClientRound) -> None:
        """Load the weights that the training of a new task starts from."""
        own, live = client_round.scratch["own"], self.model
        if self.params.start == "received":
            super().receive(client_round)
        elif own["current"] < len(own["models"]):
            model = own["models"][own["current"]]
            live.load(model["parameters"], model["buffers"])
        else:
            initial = FlatModel(self.runtime.network(client_round.seed))
            live.load(initial.parameters, initial.buffers)

    def note(self, client_round: ClientRound, near: Tensor, current: int) -> None:
        """Record how many models there are, how near the nearest is, and whether it is the one.

        The last is known where the task returns: was the chosen model trained on it before?
        """
        models, numbers = client_round.state["models"], client_round.log.numbers
        numbers["models"] = max(len(models), current + 1)
        if models:
            numbers["nearest model"] = float(near.max())
        if any(str(client_round.task) in model["tasks"] for model in models):
            known = current < len(models) and str(client_round.task) in models[current]["tasks"]
            numbers["returning task recognised"] = float(known)
        if len(models) > 1:
            vectors = torch.stack([model["parameters"] for model in models])
            numbers["distance of models"] = float(torch.pdist(vectors).mean())

    # --- training

    def correct_gradient(self, client_round: ClientRound) -> None:
        """Add the gradient of c sum_i rho_i |w - w_i|^2, which is 2 c (w - sum_i rho_i w_i)."""
        own = client_round.scratch["own"]
        if "target" in own:
            if "target" not in client_round.scratch:
                client_round.scratch["target"] = own["target"].to(self.runtime.device)
            away = self.model.parameters - client_round.scratch["target"]
            self.model.gradients.add_(away, alpha=2 * self.params.migration)

    def update_state(self, client_round: ClientRound) -> State:
        """The state with the trained model, whose auxiliary classifier has seen the task."""
        state, own = super().update_state(client_round), client_round.scratch["own"]
        if not len(client_round.indices):
            return state
        models, current = list(own["models"]), own["current"]
        tasks = models[current]["tasks"] if current < len(models) else {}
        vectors = {"parameters": self.model.parameters, "buffers": self.model.buffers}
        model: State = {name: vector.cpu().clone() for name, vector in vectors.items()}
        known = moments(self.features(model, self.runtime.dataset.x_train[client_round.indices]))
        model["tasks"] = {**tasks, str(client_round.task): known}
        models[current : current + 1] = [model]
        chosen = {name: own[name] for name in ("current", "target") if name in own}
        new = {**state, **chosen, "models": models, "experience": client_round.experience}
        ended = ("target",) if client_round.last else ()
        return {name: value for name, value in new.items() if name not in ended}

    # --- auxiliary classifiers

    def features(self, model: State, images: Tensor) -> Tensor:
        """Features of images by a model, which stays in the live model.  # [n, F]"""
        self.model.load(model["parameters"], model["buffers"])
        return self.runtime.outputs(images, self.classifier.encode)

    def mean_share(self, model: State, indices: Tensor) -> float:
        """The mean answer of a model's auxiliary classifier on training images."""
        features = self.features(model, self.runtime.dataset.x_train[indices])
        return float(log_share(model["tasks"], features).exp().mean())

    # --- evaluation

    def personal_scores(self, client_round: ClientRound) -> Tensor:
        """Scores of its models' vote, or of the received one without any.  # [scorings, 1, T]"""
        runtime, models, address = self.runtime, client_round.state["models"], client_round.round_id
        plan, client, experience = client_round.plan, address.client, address.experience
        if not models:
            super().receive(client_round)
            return score(runtime, plan, [client], experience)
        needed = indices_of_tests(runtime, plan, [client])
        votes = torch.empty(len(runtime.dataset.y_test), runtime.classes)
        votes[needed] = self.vote(models, runtime.dataset.x_test[needed])
        return accuracies(runtime, plan, [client], experience, votes)

    def vote(self, models: list[State], images: Tensor) -> Tensor:
        """The mean of the models' probabilities, by the auxiliary classifiers.  # [n, classes]"""
        shares, probabilities = list[Tensor](), list[Tensor]()
        for model in models:
            features = self.features(model, images)
            logits = self.classifier.head(features.to(self.runtime.device)).detach().cpu()
            probabilities.append(logits.softmax(1))
            shares.append(log_share(model["tasks"], features))
        weights = torch.stack(shares).softmax(0)  # finite where all shares vanish
        return (weights[:, :, None] * torch.stack(probabilities)).sum(0)


def nearest_model(near: Tensor, threshold: float, limit: int) -> int:
    """The place of the nearest model, or the next free one if it is not near enough."""
    if len(near) and (float(near.max()) > threshold or len(near) == limit):
        return int(near.argmax())
    return len(near)


def moments(features: Tensor) -> Tensor:
    """Mean and variance of each feature of a task's images.  # [2, F]"""
    variances, means = torch.var_mean(features, 0, correction=0)
    return torch.stack([means, variances])


def log_share(tasks: Mapping[str, Tensor], features: Tensor) -> Tensor:
    """The auxiliary classifier: how surely images belong to a model's tasks, at most 0.  # [n]

    It has no examples of other tasks. Its answer is exp(-max(0, mean_f (h_f - m_f)^2 / v_f - 1))
    with the mean m and the variance v of the features of the nearest of the model's tasks.
    """
    distances = []
    for mean, variance in tasks.values():
        least = max(LEAST * float(variance.mean()), TINY)
        distances.append(((features - mean).square() / variance.clamp(min=least)).mean(1))
    return (1 - torch.stack(distances).amin(0)).clamp(max=0)


def proportions(near: Tensor) -> Tensor:
    """rho: what each model has of the sum.  # [models]"""
    return (near + SHARE) / (near + SHARE).sum()


def weighted_sum(models: list[State], weights: Tensor) -> Tensor:
    """The weighted sum of the models' parameters.  # [P]"""
    return torch.mv(torch.stack([model["parameters"] for model in models]).T, weights)
