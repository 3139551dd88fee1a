"""The reference in plain torch: for methods whose networks are too heavy to be written in NumPy."""

from collections.abc import Callable
from typing import Any

import torch
from reference import FedAvgReference, Reply, Visit
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

    def mean(self, values: Any, replies: list[Reply]) -> Any:
        weights = torch.tensor([reply.samples for reply in replies], dtype=torch.float64)
        return (torch.stack(values).double().T @ weights / weights.sum()).float()

    def own_classes(self, visit: Visit) -> Tensor:
        """The classes of a client's images.  # bool [L]"""
        own = torch.zeros(self.classes, dtype=torch.bool)
        own[self.y[visit.indices]] = True
        return own

    def after_round(self, visits: list[Visit]) -> None:
        for visit in visits:
            self.seen = self.seen | self.own_classes(visit)
            self.told.add(visit.client)
        self.rounds += 1

    def after_experience(self) -> None:
        self.past, self.told = self.seen, set()


class Descent:
    def __init__(self, training: Any, **changes: float) -> None:
        self.lr = changes.get("lr", training.lr)
        self.momentum = changes.get("momentum", training.momentum)
        self.decay = changes.get("weight_decay", training.weight_decay)
        self.velocity: Tensor | None = None

    def step(self, vector: Tensor, loss: Any) -> Tensor:
        """The vector after a step down the gradient of `loss` at it."""
        leaf = vector.detach().requires_grad_()
        return self.move(leaf.detach(), torch.autograd.grad(loss(leaf), leaf)[0])

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
            labels = torch.cat([labels, more])
            noise = torch.cat([noise, torch.randn(*size, generator=draw)])
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
