"""A cache of past samples, chosen when a task comes by their importance, as in Re-Fed."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.client.by_class import first_per_class
from stamp_core.config.decode import invalid, require_above, require_at_least
from stamp_core.coresets.learner import head_gradient_factors, per_sample_gradients
from stamp_core.methods.base.exemplar_lists import ExemplarLists, empty_lists
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Group, Method, State
from stamp_core.models.networks import Classifier

GRADIENTS = 2**27  # values of per-sample gradients computed at a time: 512 MiB
LOST = "cache: all rounds of a task were missed, images of the task before it are lost"
NOT_FINITE = "cache: gradient norms are not finite, the steps before count"
OMITTED = "cache: a past class has no image in it"


@dataclass(frozen=True)
class CacheParams(FedAvgParams):
    """How many samples are cached, and the model along which their importance is measured."""

    cache: int = 2000  # M, samples of all past tasks together
    lam: float = 0.5  # λ: the proximal weight of the informative model is (1 - λ) / (2 λ)
    steps: int = 5  # s, gradient steps of the informative model
    pim_lr: float = 0.01  # its learning rate, for the mean gradient
    score: Literal["full", "head"] = "full"  # gradients with respect to all parameters, or the head
    balance: Literal["none", "class"] = "none"  # "class": as many samples of each past class

    def __post_init__(self) -> None:
        """Refuse parameters that measure nothing, and a proximal term that diverges."""
        super().__post_init__()
        require_at_least(self, 0, "cache")
        require_at_least(self, 1, "steps")
        require_above(self, 0, "lam", "pim_lr")
        if self.lam > 1:
            raise invalid("lam", self.lam, "above 0 and at most 1")
        if self.pim_lr * self.pull >= 2:
            least = f"above {self.pim_lr / (4 + self.pim_lr):.4g}, so that pim_lr"
            raise invalid("lam", self.lam, f"{least} x (1 - lam) / (2 lam) is below 2")

    @property
    def pull(self) -> float:
        """q(λ), the proximal weight that ties the informative model to the global one."""
        return (1 - self.lam) / (2 * self.lam)


class SampleCache(Method):
    """FedAvg whose clients train on the new task and a cache of past samples, shuffled together.

    When a task comes, the cache is chosen from the old cache and the task before. Their importance
    are their gradient norms along a personalised informative model.
    """

    Params: ClassVar = CacheParams
    fedavg_equivalent: ClassVar[dict[str, Any]] = {"cache": 0}
    group: ClassVar[Group] = "continual"
    captures = True

    def init_client(self, client: int, server: State) -> State:
        """An empty cache; `experience` is the one in which the client trained last."""
        return {"cache": empty_lists(self.runtime.dataset.x_train), "experience": -1}

    # --- training

    def train(self, client_round: ClientRound) -> list[Tensor]:
        """Local SGD, with a new cache in the client's first round of an experience."""
        client_round.scratch["cache"] = self.updated_cache(client_round)
        return super().train(client_round)

    def batches(self, client_round: ClientRound) -> Iterator[tuple[Tensor, Tensor]]:
        """The local epochs over the task and the cache; without a new image there are none."""
        indices, cache = client_round.indices, client_round.scratch["cache"]
        if not len(indices) or not len(cache["labels"]):
            return super().batches(client_round)
        samples = self.local_set(indices, client_round.task, cache)
        every = torch.arange(len(samples["labels"]))
        return self.runtime.epochs(
            client_round.round_id, samples["images"], samples["labels"], every
        )

    def local_set(self, indices: Tensor, task: int, cache: ExemplarLists) -> ExemplarLists:
        """The images of a task, and the cached ones of others: a later cycle repeats tasks."""
        data, others = self.runtime.dataset, cache["tasks"] != task
        new = {
            "images": data.x_train[indices],
            "labels": data.y_train[indices],
            "tasks": torch.full_like(indices, task),
        }
        return {name: torch.cat([new[name], cache[name][others]]) for name in new}

    def update_state(self, client_round: ClientRound) -> State:
        """The state with the cache of this experience."""
        state, cache = super().update_state(client_round), client_round.scratch["cache"]
        return {**state, "cache": cache, "experience": client_round.experience}

    def memory_samples(self, server: State, client: State, count: int) -> dict[str, Tensor]:
        """The first `count` cached images of each class, with their labels."""
        indices = first_per_class(client["cache"]["labels"], count)
        return {name: client["cache"][name][indices] for name in ("images", "labels")}

    # --- the cache

    def updated_cache(self, client_round: ClientRound) -> ExemplarLists:
        """The cache; a new one if the live model is the first that is received for a task."""
        last, experience = client_round.state["experience"], client_round.experience
        cache: ExemplarLists = client_round.state["cache"]
        if not self.params.cache or experience in (0, last):
            return cache
        # A client holds the images of a task until the next but one: those before are gone.
        client_round.log.events += [LOST] * (experience - 1 - max(last, 0))
        plan, previous = client_round.plan, (experience - 1) % client_round.plan.tasks
        indices = plan.train_indices(self.runtime.dataset, client_round.client, previous)
        samples = self.local_set(indices, previous, cache)
        with client_round.log.clock("cache"):
            chosen = self.choose(client_round, samples)
        return {name: values[chosen] for name, values in samples.items()}

    def choose(self, client_round: ClientRound, samples: ExemplarLists) -> Tensor:
        """Indices of the samples to be cached, by decreasing score.  # [min(M, N)]"""
        labels, log = samples["labels"], client_round.log
        if len(labels) <= self.params.cache:  # there is room for all: none is scored
            return torch.arange(len(labels))
        order = self.scores(client_round, samples).argsort(descending=True, stable=True)
        if self.params.balance == "class":
            order = order[rank_in_class(labels[order]).argsort(stable=True)]
        chosen = order[: self.params.cache]
        classes = len(labels[chosen].unique())
        log.numbers["cache classes"] = classes
        log.events += [OMITTED] * (len(labels.unique()) - classes)
        return chosen

    def scores(self, client_round: ClientRound, samples: ExemplarLists) -> Tensor:
        """What the samples are ordered by: their importance.  # [N]"""
        return self.importance(client_round, samples)

    def importance(self, client_round: ClientRound, samples: ExemplarLists) -> Tensor:
        """The sum over the steps p = 1 … s of the gradient norms divided by p.  # [N]

        The informative model is trained in the live model, which is restored. It starts from the
        received model. Each step is one along the mean gradient of all samples, in evaluation mode:
        statistics of batch normalisation do not change.
        """
        model, params = self.model, self.params
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
        return torch.cat([self.norms_of(*part) for part in self.parts(samples, size)]).cpu()

    def norms_of(self, images: Tensor, labels: Tensor) -> Tensor:
        """The gradient norms of a few normalised images.  # [n]"""
        network = self.classifier
        if self.params.score == "head":
            errors, features = head_gradient_factors(network, images, labels)
            return squared_norms(errors, features).sqrt()
        if all(isinstance(layer, nn.Linear) for layer in learnable_layers(network)):
            return linear_gradient_norms(network, images, labels)
        return per_sample_gradients(network, images, labels).square().sum(1).sqrt()

    def mean_gradient(self, samples: ExemplarLists) -> Tensor:
        """The live model's gradient of the mean cross-entropy in evaluation mode.  # [P]"""
        model = self.model
        module, count = model.module.eval(), len(samples["labels"])
        model.gradients.zero_()
        for images, labels in self.parts(samples, self.runtime.chunk):
            (F.cross_entropy(module(images), labels, reduction="sum") / count).backward()
        return model.gradients

    def parts(self, samples: ExemplarLists, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """ExemplarLists in their order without augmentation, at most `size` at a time."""
        for images, labels in zip(
            samples["images"].split(size), samples["labels"].split(size), strict=True
        ):
            yield self.runtime.normalise(images), labels.to(self.runtime.device)


def learnable_layers(network: nn.Module) -> list[nn.Module]:
    """The layers that have parameters of their own."""
    return [layer for layer in network.modules() if list(layer.parameters(recurse=False))]


def squared_norms(errors: Tensor, inputs: Tensor) -> Tensor:
    """The squared gradient norms of a linear layer's weight and bias for each image.  # [n]

    The gradient of an image is the outer product of its error at the layer's output and the
    layer's input, and for the bias the error.
    """
    return errors.square().sum(1) * (inputs.square().sum(1) + 1)


def linear_gradient_norms(network: Classifier, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient norm of each image where all learnable layers are linear.  # [n]

    One backward pass for all images: row n of the gradient of the summed loss with respect to a
    layer's output is the error of image n.
    """
    inputs, outputs = list[Tensor](), list[Tensor]()

    def record(layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        inputs.append(args[0].detach())
        outputs.append(output)

    with ExitStack() as hooks:
        for layer in learnable_layers(network):
            hooks.callback(layer.register_forward_hook(record).remove)
        loss = F.cross_entropy(network.eval()(images), labels, reduction="sum")
    errors = torch.autograd.grad(loss, outputs)
    squares = [squared_norms(*pair) for pair in zip(errors, inputs, strict=True)]
    return torch.stack(squares).sum(0).sqrt()


def rank_in_class(labels: Tensor) -> Tensor:
    """The place of each sample among those of its class, counted from 1.  # [N]"""
    own = labels.unique(return_inverse=True)[1]
    rank: Tensor = F.one_hot(own).cumsum(0).gather(1, own[:, None])[:, 0]
    return rank
