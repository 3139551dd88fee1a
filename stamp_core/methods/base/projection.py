"""A gradient corrected by projection, with the share of corrected steps in the run record."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.workspace import Workspace
from stamp_core.matching.projection import Projection
from stamp_core.methods.base.method import ClientRound, Log, Method
from stamp_core.models.flat import flatten_like
from stamp_core.models.networks import set_train_mode


def exemplar_gradient(work: Workspace, images: Tensor, labels: Tensor) -> Tensor:
    """The live model's gradient on normalised exemplars; the live one is unchanged.  # [P]

    Batch normalisation uses its running statistics, which past tasks must not change.
    """
    set_train_mode(work.classifier, update_norms=False)  # eval() in every step would take longer
    loss = F.cross_entropy(work.classifier(images), labels.to(work.device))
    tensors = work.model.tensors
    return flatten_like(torch.autograd.grad(loss, tensors), tensors)


def apply_projection(
    method: Method, client_round: ClientRound, projection: Projection, name: str
) -> None:
    """Correct the live gradient, and log the share of the round's steps that were corrected."""
    corrected = client_round.scratch.setdefault("corrected", [])
    corrected.append(projection.added is not None)
    share = sum(corrected) / len(corrected)
    log_projection(client_round.log, name, share, projection.troubles)
    if projection.added is not None:
        method.work.model.gradients.add_(projection.added)


def log_projection(log: Log, name: str, corrected: float, troubles: Iterable[str]) -> None:
    """Log a share of corrected vectors, and why others, or blocks of them, were not corrected."""
    log.numbers[f"{name} corrected"] = corrected
    log.events += [f"{name}: {trouble}, not corrected" for trouble in troubles]
