"""The reference in plain torch: for methods whose networks are too heavy to be written in NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from reference import FedAvgReference, Numbers, Reply, State, Visit
from torch import Tensor

CLOSE = {"rtol": 1e-5, "atol": 2e-6}  # both in float32


class TorchReference(FedAvgReference):
    """FedAvg whose vectors are tensors and whose gradients are those of autograd."""

    def start(self) -> None:
        self.x = torch.from_numpy(self.x).float()
        self.y = torch.from_numpy(self.y)
        self.theta = torch.from_numpy(self.theta).float()
        self.rounds = 0  # so far
        self.seen = torch.zeros(self.classes, dtype=torch.bool)  # classes that anybody reported
        self.past = self.seen  # those of the experiences before
        self.told = set[int]()  # clients that have been told them

    def parts(self, theta: Any) -> Any:
        """W1, b1, W2 and b2 of a vector."""
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        return [part.view(s) for part, s in zip(theta.split(sizes), self.shapes, strict=True)]

    def features(self, theta: Any, x: Any) -> Any:
        w1, b1 = self.parts(theta)[:2]
        return (x @ w1.T + b1).relu()

    def head(self, theta: Any, features: Any) -> Any:
        w2, b2 = self.parts(theta)[2:4]
        return features @ w2.T + b2

    def logits(self, theta: Any, x: Any) -> Any:
        return self.head(theta, self.features(theta, x))

    def mean(self, values: Any, replies: list[Reply]) -> Any:
        weights = torch.tensor([reply.samples for reply in replies], dtype=torch.float64)
        return (torch.stack(values).double().T @ weights / weights.sum()).float()

    def own_classes(self, visit: Visit) -> Tensor:
        """The classes of a client's images.  # bool [L]"""
        own = torch.zeros(self.classes, dtype=torch.bool)
        own[self.y[visit.indices]] = True
        return own

    def sgd(self, visit: Visit, theta: Any, state: State) -> Any:
        """Local SGD on `step_loss`."""
        descent = Descent(self.training, lr=self.lr)
        for batch in self.batches(visit):
            theta = descent.step(theta, lambda v: self.step_loss(visit, v, batch, state))  # noqa: B023
        return theta

    def step_loss(self, visit: Visit, theta: Tensor, batch: Numbers, state: State) -> Tensor:
        return F.cross_entropy(self.logits(theta, self.x[batch]), self.y[batch])

    def run(self) -> Any:
        """The global model after all rounds; what is known of classes changes with experiences."""
        for experience in range(self.plan.experiences):
            for round_ in range(self.training.rounds):
                self.lr = self.rate(round_)
                visits = list(self.visits(experience, round_))
                replies = [self.local(visit, self.clients[visit.client]) for visit in visits]
                for visit in visits:
                    self.seen = self.seen | self.own_classes(visit)
                self.told |= {visit.client for visit in visits}
                self.rounds = experience * self.training.rounds + round_ + 1
                if trained := [reply for reply in replies if reply.samples]:
                    self.aggregate(trained)
            self.past, self.told = self.seen, set()
            self.after_experience()
        return self.theta

    def after_experience(self) -> None:
        """Called after an experience."""


class Descent:
    def __init__(self, training: Any, **changes: float) -> None:
        self.lr = changes.get("lr", training.lr)
        self.momentum = changes.get("momentum", training.momentum)
        self.decay = changes.get("weight_decay", training.weight_decay)
        self.velocity: Tensor | None = None

    def step(self, vector: Tensor, loss: Any) -> Tensor:
        """The vector after a step down the gradient of `loss` at it."""
        leaf = vector.detach().requires_grad_()
        self.gradient = torch.autograd.grad(loss(leaf), leaf)[0]
        return self.move(leaf.detach(), self.gradient)

    def move(self, vector: Tensor, gradient: Tensor) -> Tensor:
        gradient = gradient + self.decay * vector
        if self.velocity is not None:
            gradient = self.momentum * self.velocity + gradient
        self.velocity = gradient
        return vector - self.lr * gradient


class Adam:
    def __init__(self, lr: float, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.lr, self.betas, self.steps = lr, betas, 0
        self.first = self.second = torch.zeros(())

    def move(self, vector: Tensor, gradient: Tensor) -> Tensor:
        (one, two), self.steps = self.betas, self.steps + 1
        self.first = one * self.first + (1 - one) * gradient
        self.second = two * self.second + (1 - two) * gradient**2
        root = (self.second / (1 - two**self.steps)).sqrt() + 1e-8
        return vector - self.lr / (1 - one**self.steps) * self.first / root


def taker(
    classes: Tensor, size: tuple[int, ...], draw: torch.Generator
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """How labels of some classes and noise are taken, which are drawn `size[0]` at once."""
    chosen = classes.nonzero().flatten()
    labels, noise = torch.empty(0, dtype=torch.int64), torch.empty(0, *size[1:])

    def take(count: int) -> tuple[Tensor, Tensor]:
        nonlocal labels, noise
        while len(labels) < count:
            more = chosen[torch.randint(len(chosen), (size[0],), generator=draw)]
            labels, noise = (
                torch.cat([labels, more]),
                torch.cat([noise, torch.randn(*size, generator=draw)]),
            )
        taken = labels[:count], noise[:count]
        labels, noise = labels[count:], noise[count:]
        return taken

    return take


def soft_cross_entropy(student: Tensor, teacher: Tensor, t: float) -> Tensor:
    return -((teacher / t).softmax(1) * (student / t).log_softmax(1)).sum(1).mean()


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) of each row."""
    p = teacher.softmax(1)
    return (p * (p.log() - student.log_softmax(1))).sum(1)
