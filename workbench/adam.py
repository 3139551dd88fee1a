"""Adam, on one tensor or on a model's flat vector."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stamp_core.core.arithmetic import sqrt
from stamp_core.models.flat import FlatModel

EPSILON = 1e-8  # added to the root of the mean square


class Adam:
    """Adam (Kingma and Ba, 2015) on one tensor, in place; without kept moments it starts anew.

    torch.optim would import a compiler for its first step, in every worker process, and takes as
    long for a step as a small network's gradient.
    """

    def __init__(
        self, x: Tensor, betas: tuple[float, float], moments: Mapping[str, Any] | None = None
    ) -> None:
        self.x = x
        self.betas = betas
        zeros = torch.zeros_like(x)
        moments = moments or {"first": zeros, "second": zeros, "steps": 0}
        self.first = moments["first"].to(x.device, copy=True)
        self.second = moments["second"].to(x.device, copy=True)
        self.steps: int = moments["steps"]

    def descend(self, gradient: Tensor, lr: float) -> None:
        beta1, beta2 = self.betas
        self.steps += 1
        self.first.lerp_(gradient, 1 - beta1)
        self.second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = sqrt(self.second).div_(math.sqrt(1 - beta2**self.steps)).add_(EPSILON)
        self.x.addcdiv_(self.first, root, value=-lr / (1 - beta1**self.steps))

    def moments(self) -> dict[str, Any]:
        first, second = self.first.cpu().clone(), self.second.cpu().clone()
        return {"first": first, "second": second, "steps": self.steps}


class FlatAdam(Adam):
    """Adam on the flat vectors."""

    def __init__(
        self,
        model: FlatModel,
        lr: float,
        moments: Mapping[str, Any] | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        super().__init__(model.parameters, betas, moments)
        self.model = model
        self.lr = lr

    def step(self) -> None:
        self.descend(self.model.gradients, self.lr)
