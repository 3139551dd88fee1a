"""A cache of past samples, chosen when a task comes by their importance, as in Re-Fed."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.client.batches import Batch, StepContext
from stamp_core.config.decode import invalid
from stamp_core.config.limits import NonNegativeInt, Positive, PositiveInt, Share
from stamp_core.core.arithmetic import sqrt
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Group, Method, State
from stamp_core.models.networks import Classifier
from workbench.methods.base.exemplar_lists import ExemplarLists, empty_lists
from workbench.per_sample import head_gradient_factors, per_sample_gradients

GRADIENTS = 2**27  # values of per-sample gradients computed at a time: 512 MiB
LOST = "cache: all rounds of a task were missed, images of the task before it are lost"
NOT_FINITE = "cache: gradient norms are not finite, the steps before count"
OMITTED = "cache: a past class has no image in it"


@dataclass(frozen=True)
class CacheParams(FedAvgParams):
    """How many samples are cached, and the model along which their importance is measured."""

    cache: NonNegativeInt = 2000  # M, samples of all past tasks together
    lam: Share = 0.5  # λ: the proximal weight of the informative model is (1 - λ) / (2 λ)
    steps: PositiveInt = 5  # s, gradient steps of the informative model
    pim_lr: Positive = 0.01  # its learning rate, for the mean gradient
    score: Literal["full", "head"] = "full"  # gradients with respect to all parameters, or the head
    balance: Literal["none", "class"] = "none"  # "class": as many samples of each past class

    def __post_init__(self) -> None:
        if self.pim_lr * self.pull >= 2:
            least = f"above {self.pim_lr / (4 + self.pim_lr):.4g}, so that pim_lr"
            raise invalid("lam", self.lam, f"{least} x (1 - lam) / (2 lam) is below 2")

    @property
    def pull(self) -> float:
        """q(λ), the proximal weight that ties the informative model to the global one."""
        return (1 - self.lam) / (2 * self.lam)


@dataclass
class CacheContext(StepContext):
    cache: ExemplarLists  # of this experience


class SampleCache(Method):
    """FedAvg whose clients train on the new task and a cache of past samples, shuffled together.

    When a task comes, the cache is chosen from the old cache and the task before. Their importance
    are their gradient norms along a personalised informative model.
    """

    Params: ClassVar = CacheParams
    fedavg_equivalent: ClassVar = {"cache": 0}
    group: ClassVar[Group] = "continual"

    def init_client(self, client: int, server: State) -> State:
        return {"cache": empty_lists(self.runtime.dataset.x_train), "experiences": []}

    def start(self, client_round: ClientRound) -> Any:
        return CacheContext(self.updated_cache(client_round))

    def batches(self, client_round: ClientRound, context: CacheContext) -> Iterator[Batch]:
        if not len(client_round.indices) or not len(context.cache["labels"]):
            return super().batches(client_round, context)
        samples = self.local_set(client_round.indices, client_round.task, context.cache)
        every = torch.arange(len(samples["labels"]))
        return self.runtime.epochs(client_round, samples["images"], samples["labels"], every)

    def local_set(self, indices: Tensor, task: int, cache: ExemplarLists) -> ExemplarLists:
        """The images of a task, and the cached ones of others: a later cycle repeats tasks."""
        data = self.runtime.dataset
        others = cache["tasks"] != task
        new = {
            "images": data.x_train[indices],
            "labels": data.y_train[indices],
            "tasks": torch.full_like(indices, task),
        }
        return {name: torch.cat([new[name], cache[name][others]]) for name in new}

    def update_state(self, client_round: ClientRound, context: Any) -> State:
        state = super().update_state(client_round, context)
        return {**state, "cache": context.cache, "experiences": client_round.recorded}

    def remembered(self, server: State, client: State) -> Any:
        return client["cache"]

    def updated_cache(self, client_round: ClientRound) -> ExemplarLists:
        """The cache; a new one if the live model is the first that is received for a task."""
        cache: ExemplarLists = client_round.state["cache"]
        experience = client_round.experience
        if not self.params.cache or not experience or not client_round.first:
            return cache
        # A client holds the images of a task until the next but one: those before are gone.
        latest = max(client_round.state["experiences"], default=0)
        client_round.log.events += [LOST] * (experience - 1 - latest)
        previous = (experience - 1) % client_round.plan.tasks
        indices = self.train_indices(client_round.plan, client_round.client, previous)
        samples = self.local_set(indices, previous, cache)
        with client_round.log.clock("cache"):
            chosen = self.choose(client_round, samples)
        return {name: values[chosen] for name, values in samples.items()}

    def choose(self, client_round: ClientRound, samples: ExemplarLists) -> Tensor:
        """Indices of the samples to be cached, by decreasing score.  # [min(M, N)]"""
        labels = samples["labels"]
        if len(labels) <= self.params.cache:  # there is room for all: none is scored
            return torch.arange(len(labels))
        order = self.scores(client_round, samples).argsort(descending=True, stable=True)
        if self.params.balance == "class":
            order = order[rank_in_class(labels[order]).argsort(stable=True)]
        chosen = order[: self.params.cache]
        classes = len(labels[chosen].unique())
        client_round.log.numbers["cache classes"] = classes
        client_round.log.events += [OMITTED] * (len(labels.unique()) - classes)
        return chosen

    def scores(self, client_round: ClientRound, samples: ExemplarLists) -> Tensor:
        """What the samples are ordered by: their importance.  # [N]

        It is the sum over the steps p = 1 … s of the gradient norms divided by p.
        The informative model is trained in the live model, which is restored. It starts from the
        received model. Each step is one along the mean gradient of all samples, in evaluation mode:
        statistics of batch normalisation do not change.
        """
        model = self.model
        params = self.params
        received = model.parameters.clone()
        importance = torch.zeros(len(samples["labels"]))
        for step in range(1, params.steps + 1):
            norms = self.gradient_norms(samples)
            if not norms.isfinite().all():
                client_round.log.events.append(NOT_FINITE)
                break
            importance += norms / step
            if step < params.steps:
                pull = params.pull * (model.parameters - received)
                model.parameters.sub_(params.pim_lr * (self.mean_gradient(samples) + pull))
        model.load(received)
        return importance

    def gradient_norms(self, samples: ExemplarLists) -> Tensor:
        """The norm of the gradient of each sample's cross-entropy in the live model.  # [N]"""
        size = self.runtime.chunk
        if self.params.score == "full":
            size = max(1, min(size, GRADIENTS // len(self.model.parameters)))
        squares = [self.squared_norms(*part) for part in self.parts(samples, size)]
        return sqrt(torch.cat(squares)).cpu()

    def squared_norms(self, images: Tensor, labels: Tensor) -> Tensor:
        network = self.classifier
        if self.params.score == "head":
            return layer_squares(*head_gradient_factors(network, images, labels))
        layers = [each for each in network.modules() if list(each.parameters(recurse=False))]
        if all(isinstance(layer, nn.Linear) for layer in layers):
            return linear_squares(network, layers, images, labels)
        return per_sample_gradients(network, images, labels).square().sum(1)

    def mean_gradient(self, samples: ExemplarLists) -> Tensor:
        """The live model's gradient of the mean cross-entropy in evaluation mode.  # [P]"""
        module = self.model.module.eval()
        self.model.gradients.zero_()
        for images, labels in self.parts(samples, self.runtime.chunk):
            loss = F.cross_entropy(module(images), labels, reduction="sum")
            (loss / len(samples["labels"])).backward()
        return self.model.gradients

    def parts(self, samples: ExemplarLists, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalised samples and labels in order without augmentation, `size` at a time."""
        images = samples["images"].split(size)
        labels = samples["labels"].split(size)
        for part, of_part in zip(images, labels, strict=True):
            yield self.runtime.normalise(part), of_part.to(self.runtime.device)


def layer_squares(errors: Tensor, inputs: Tensor) -> Tensor:
    """Squared gradient norms [n]: the gradient is error x input, and for the bias the error."""
    return errors.square().sum(1) * (inputs.square().sum(1) + 1)


def linear_squares(
    network: Classifier, layers: list[nn.Module], images: Tensor, labels: Tensor
) -> Tensor:
    """Squared gradient norms where all layers are linear, by one backward pass.  # [n]"""
    passes = list[tuple[Tensor, Tensor]]()  # input and output of each layer
    with ExitStack() as hooks:
        for layer in layers:
            hook = layer.register_forward_hook(lambda _, args, out: passes.append((args[0], out)))
            hooks.callback(hook.remove)
        loss = F.cross_entropy(network.eval()(images), labels, reduction="sum")
    inputs, outputs = zip(*passes, strict=True)
    errors = torch.autograd.grad(loss, outputs)
    return torch.stack(list(map(layer_squares, errors, inputs))).sum(0).detach()


def rank_in_class(labels: Tensor) -> Tensor:
    """The rank of each sample in its class, counted from 1.  # [N]"""
    own = labels.unique(return_inverse=True)[1]
    rank: Tensor = F.one_hot(own).cumsum(0).gather(1, own[:, None])[:, 0]
    return rank
