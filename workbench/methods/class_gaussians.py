"""CCVR (Luo et al., 2021): the server trains the head on draws from Gaussians of the classes."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.config.limits import Positive, PositiveInt
from stamp_core.core.arithmetic import sqrt
from stamp_core.core.seeding import generator
from stamp_core.methods.base.method import ClientRound, DivergedError, Message, State
from stamp_core.models.flat import FlatSGD
from workbench.methods.base.statistics_server import StatisticsServer, product


@dataclass(frozen=True)
class ClassGaussiansParams:
    """What is known of a class, and how the server trains the head."""

    # a matrix of each class, its diagonal alone, or one matrix for all classes
    covariance: Literal["full", "diagonal", "shared"] = "full"
    samples: PositiveInt = 500  # drawn of each class
    epochs: PositiveInt = 5  # of SGD on the draws, from a head of zeros
    server_head_lr: Positive = 0.01  # of that SGD; all else of it is the setting's


class ClassGaussians(StatisticsServer):
    """Classes are Gaussians with the exact moments of all images of all clients and tasks."""

    Params: ClassVar = ClassGaussiansParams

    def scatter(self, away: Tensor) -> Tensor:
        """The sum of the squares of rows, or of their outer products.  # [n, D] -> [D(, D)]"""
        return away.square().sum(0) if self.params.covariance == "diagonal" else product(away, away)

    def places(self, classes: Tensor) -> Tensor:
        """Which scatter is that of each class; ascending, as classes are.  # [k]"""
        return torch.zeros_like(classes) if self.params.covariance == "shared" else classes

    def init_server(self, seed: int) -> State:
        shape = self.runtime.classes, self.classifier.features
        means = torch.zeros(*shape, dtype=torch.float64)
        count = 1 if self.params.covariance == "shared" else len(means)
        scatter = means.new_zeros(count, *self.scatter(means[:0]).shape)
        return {**super().init_server(seed), "means": means, "scatter": scatter}

    def statistics(self, x: Tensor, y: Tensor, client_round: ClientRound) -> Message:
        """Of k classes counts, means [k, D] and scatter, which is covariance times count - 1."""
        classes = y.any(0).nonzero().flatten()
        counts = y.sum(0)[classes]
        means = (y.T @ x)[classes] / counts[:, None]
        pairs = zip(classes, means, strict=True)
        scatter = torch.stack([self.scatter(x[y[:, label] > 0] - mean) for label, mean in pairs])
        scatter = scatter.sum(0, True) if self.params.covariance == "shared" else scatter
        return {"classes": classes, "counts": counts, "means": means, "scatter": scatter}

    def merged(self, server: State, sent: list[Any]) -> State:
        """By the law of total covariance: to the scatter in two parts that of their means adds."""
        counts, means, scatter = (server[name].clone() for name in ("counts", "means", "scatter"))
        for message in sent:
            places = self.places(message["classes"])
            scatter[places.unique()] += message["scatter"]
            parts = (message[name] for name in ("classes", "counts", "means"))
            for place, label, more, mean in zip(places, *parts, strict=True):
                share, away = more / (counts[label] + more), mean - means[label]
                scatter[place] += self.scatter(away[None]) * counts[label] * share
                means[label] += share * away
                counts[label] += more
        return {"counts": counts, "means": means, "scatter": scatter}

    def head(self, server: State) -> tuple[Tensor, Tensor]:
        """The head after SGD on the draws, which depends on statistics and seed alone."""
        features, labels = (each.to(self.runtime.device) for each in self.draws(server))
        model, training, lr = self.model, self.runtime.training, self.params.server_head_lr
        model.parameters.zero_()
        sgd = FlatSGD(model, training, torch.tensor(lr).to(self.runtime.device))
        order = generator(server["seed"], "order of draws")
        for _ in range(self.params.epochs):
            for part in torch.randperm(len(labels), generator=order).split(training.batch_size):
                self.runtime.start_step(len(part))
                F.cross_entropy(model.module(features[part]), labels[part]).backward()
                sgd.step()
        if not model.parameters.isfinite().all():
            raise DivergedError(f"the head is no longer finite; lower server_head_lr (now {lr:g})")
        weight, bias = (tensor.detach().cpu().clone() for tensor in model.tensors)
        return weight, bias

    def draws(self, server: State) -> tuple[Tensor, Tensor]:
        """Draws from the Gaussians of all classes received, and their labels.  # [N, D], [N]"""
        labels, features = server["counts"].nonzero().flatten(), list[Tensor]()
        places, counts = self.places(labels), server["counts"][labels]
        for place in places.unique():
            root = self.root(server["scatter"][place], (counts - 1)[places == place].sum())
            for label in labels[places == place].tolist():
                draw = generator(server["seed"], label, "draws")
                noise = torch.randn(self.params.samples, len(root), generator=draw).double()
                noise = noise * root if root.dim() == 1 else product(noise.T, root.T)
                features.append((server["means"][label] + noise).float())
        return torch.cat(features), labels.repeat_interleave(self.params.samples)

    def root(self, scatter: Tensor, freedom: Tensor) -> Tensor:
        """Deviations, or the Cholesky factor of a covariance matrix.  # [D(, D)]"""
        covariance = scatter / freedom.clamp(min=1)
        if self.params.covariance == "diagonal":
            return sqrt(covariance)
        added = 1e-6 * covariance.diagonal().mean() + 1e-12  # few images leave some directions none
        factor: Tensor = torch.linalg.cholesky(covariance + added * torch.eye(len(covariance)))
        return factor
