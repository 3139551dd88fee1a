"""A gradient corrected by projection, with the share of corrected steps in the run record."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime
from stamp_core.methods.base.method import Log
from stamp_core.models.flat import flatten_like
from stamp_core.models.networks import set_train_mode
from workbench.methods.base.quadratic import Projection


def exemplar_gradient(runtime: ClientRuntime, images: Tensor, labels: Tensor) -> Tensor:
    """The live model's gradient on normalised exemplars; the live one is unchanged.  # [P]

    Batch normalisation uses its running statistics, which past tasks must not change.
    """
    set_train_mode(runtime.classifier, update_norms=False)  # eval() in every step would take longer
    loss = F.cross_entropy(runtime.classifier(images), labels.to(runtime.device))
    tensors = runtime.model.tensors
    return flatten_like(torch.autograd.grad(loss, tensors), tensors)


@dataclass
class Corrections:
    """What projection has done in the steps of a client round."""

    corrected: list[bool] = field(default_factory=list)  # of each step
    failures: list[str] = field(default_factory=list)  # why vectors were not corrected

    def apply(self, gradients: Tensor, projection: Projection) -> None:
        """Correct the live gradient in place."""
        self.corrected.append(projection.added is not None)
        self.failures += projection.troubles
        if projection.added is not None:
            gradients.add_(projection.added)

    def log(self, log: Log, name: str) -> None:
        """Log the share of the steps that were corrected."""
        if self.corrected:
            share = sum(self.corrected) / len(self.corrected)
            log_projection(log, name, share, self.failures)


def log_projection(log: Log, name: str, corrected: float, troubles: Iterable[str]) -> None:
    """Log a share of corrected vectors, and why others, or blocks of them, were not corrected."""
    log.numbers[f"{name} corrected"] = corrected
    log.events += [f"{name}: {trouble}, not corrected" for trouble in troubles]
