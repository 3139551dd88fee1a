"""pFedDIL (Li et al., 2024), reconstructed: a client has several models, and they vote."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypedDict

import torch
from torch import Tensor

from stamp_core.client.batches import Batch, StepContext
from stamp_core.client.runtime import ClientRuntime
from stamp_core.client.scoring import accuracies, indices_of_tests
from stamp_core.config.decode import invalid
from stamp_core.config.limits import NonNegative, PositiveInt
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Method, State
from stamp_core.models.flat import FlatModel

LEAST = 0.01  # of a feature's variance, as a share of the mean of all features' variances
TINY = 1e-6  # of a feature's variance
SHARE = 1e-8  # added to each model's, so that they have a sum


@dataclass(frozen=True)
class PFedDILParams(FedAvgParams):
    """How many models a client has, when it starts one, and their pull; no code was published."""

    models: PositiveInt = 3  # d, of a client at most
    # a model is near if it takes more than this share of a task for its own
    threshold: NonNegative = 0.5
    # weight of the squared distances to the models; published: none, so 1
    migration: NonNegative = 1.0
    # The weights before the first round of a task: those of the model that is chosen (the initial
    # ones if it is new), or the received ones. In all later rounds they are the received ones.
    start: Literal["own", "received"] = "own"


class PersonalModel(TypedDict):
    """One of a client's models, with its auxiliary classifier."""

    parameters: Tensor  # [P]
    buffers: Tensor
    tasks: dict[str, Tensor]  # [2, F] each, the moments of the features of its tasks


@dataclass
class PFedDILContext(StepContext):
    current: int
    target: Tensor | None  # [P], the models' sum in their proportions


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
    fedavg_equivalent: ClassVar = {"models": 1, "migration": 0.0, "start": "received"}
    group = "personalised"

    def __init__(self, params: PFedDILParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        if (lr := runtime.training.lr) * params.migration >= 1:
            right = f"below {1 / lr:g}, so that training.lr x 2 migration is below 2"
            raise invalid("migration", params.migration, right)

    def init_client(self, client: int, server: State) -> State:
        return {"models": [], "current": 0, "experiences": []}  # "current": in training

    def start(self, client_round: ClientRound) -> PFedDILContext:
        state = client_round.state
        models: list[PersonalModel] = state["models"]
        current = state["current"]
        target = state.get("target")
        starts = client_round.first and len(client_round.indices) > 0
        if starts:
            near = self.mean_shares(models, client_round.indices)
            current = nearest_model(near, self.params.threshold, self.params.models)
            self.log_choice(client_round, near, current)
            if self.params.migration and models:
                target = weighted_sum(models, proportions(near))
        if starts and self.params.start == "own":
            self.load_own(client_round, current)
        else:
            self.receive(client_round)
        return PFedDILContext(current, None if target is None else target.to(self.runtime.device))

    def mean_shares(self, models: list[PersonalModel], indices: Tensor) -> Tensor:
        """The mean answer of each auxiliary classifier on training images.  # [models]"""
        if self.params.models == 1:  # nothing to choose
            return torch.ones(len(models))
        images = self.runtime.dataset.x_train[indices]
        features = ((model["tasks"], self.features(model, images)) for model in models)
        return torch.tensor([float(log_share(*each).exp().mean()) for each in features])

    def load_own(self, client_round: ClientRound, current: int) -> None:
        models: list[PersonalModel] = client_round.state["models"]
        if current < len(models):
            self.model.load(models[current]["parameters"], models[current]["buffers"])
        else:
            initial = FlatModel(self.runtime.network(client_round.seed))
            self.model.load(initial.parameters, initial.buffers)

    def log_choice(self, client_round: ClientRound, near: Tensor, current: int) -> None:
        """Log how many models there are, how near the nearest is, and whether it knows the task."""
        models: list[PersonalModel] = client_round.state["models"]
        numbers = client_round.log.numbers
        numbers["models"] = max(len(models), current + 1)
        if models:
            numbers["nearest model"] = float(near.max())
        trained = [str(client_round.task) in model["tasks"] for model in models]
        if any(trained):
            numbers["returning task recognised"] = float(current < len(models) and trained[current])
        if len(models) > 1:
            vectors = torch.stack([model["parameters"] for model in models])
            numbers["distance of models"] = float(torch.pdist(vectors).mean())

    def correct_gradient(self, batch: Batch, context: PFedDILContext) -> None:
        """Add the gradient of c sum_i rho_i |w - w_i|^2, which is 2 c (w - sum_i rho_i w_i)."""
        if context.target is not None:
            away = self.model.parameters - context.target
            self.model.gradients.add_(away, alpha=2 * self.params.migration)

    def update_state(self, client_round: ClientRound, context: PFedDILContext) -> State:
        state = super().update_state(client_round, context)
        if not len(client_round.indices):
            return state
        models: list[PersonalModel] = list(state["models"])
        current = context.current
        tasks = models[current]["tasks"] if current < len(models) else {}
        images = self.runtime.dataset.x_train[client_round.indices]
        known = moments(self.runtime.outputs(images, self.classifier.encode))
        model: PersonalModel = {
            "parameters": self.model.parameters.cpu().clone(),
            "buffers": self.model.buffers.cpu().clone(),
            "tasks": {**tasks, str(client_round.task): known},
        }
        models[current : current + 1] = [model]
        experiences = client_round.recorded
        new = {**state, "models": models, "current": current, "experiences": experiences}
        new.pop("target", None)
        if context.target is not None and not client_round.last:
            new["target"] = context.target.cpu()
        return new

    def features(self, model: PersonalModel, images: Tensor) -> Tensor:
        """Features of images by a model, which stays in the live model.  # [n, F]"""
        self.model.load(model["parameters"], model["buffers"])
        return self.runtime.outputs(images, self.classifier.encode)

    def personal_scores(self, client_round: ClientRound) -> Tensor:
        """Scores of its models' vote, or of the received one without any.  # [scorings, 1, T]"""
        if not client_round.state["models"]:
            return super().personal_scores(client_round)
        runtime = self.runtime
        address = client_round.plan, [client_round.client]
        needed = indices_of_tests(runtime, *address)
        votes = torch.empty(len(runtime.dataset.y_test), runtime.classes)
        votes[needed] = self.vote(client_round.state["models"], runtime.dataset.x_test[needed])
        return accuracies(runtime, *address, client_round.experience, votes)

    def vote(self, models: list[PersonalModel], images: Tensor) -> Tensor:
        """The mean of the models' probabilities, by the auxiliary classifiers.  # [n, classes]"""
        shares = list[Tensor]()
        probabilities = list[Tensor]()
        for model in models:
            features = self.features(model, images)
            logits = self.classifier.head(features.to(self.runtime.device)).detach().cpu()
            probabilities.append(logits.softmax(1))
            shares.append(log_share(model["tasks"], features))
        weights = torch.stack(shares).softmax(0)  # finite where all shares vanish
        return (weights[:, :, None] * torch.stack(probabilities)).sum(0)


def nearest_model(near: Tensor, threshold: float, limit: int) -> int:
    """The index of the nearest model, or the next free one if it is not near enough."""
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


def weighted_sum(models: list[PersonalModel], weights: Tensor) -> Tensor:
    """The weighted sum of the models' parameters.  # [P]"""
    return torch.mv(torch.stack([model["parameters"] for model in models]).T, weights)
