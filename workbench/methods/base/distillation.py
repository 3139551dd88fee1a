"""Losses over some of the classes: cross-entropy on labels, and distillation from a teacher."""

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    """The mean cross-entropy among the classes in `mask` (None: all), which have all labels."""
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return F.cross_entropy(logits, labels)


def soft_cross_entropy(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """The mean cross-entropy of softened distributions, -sum softmax(t / T) log softmax(s / T).

    Both are [N, K]: select the columns of the classes first, so that both are normalised over
    the same ones. It is not multiplied by T^2.
    """
    target = (teacher / temperature).softmax(1)
    return F.cross_entropy(student / temperature, target)


def softened_divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """The mean divergence of softened distributions, T^2 KL(teacher || student).  # of [N, K]"""
    pair = (student / temperature).log_softmax(1), (teacher / temperature).log_softmax(1)
    return temperature**2 * F.kl_div(*pair, reduction="batchmean", log_target=True)


def agreeing_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean of KL(teacher || student), counted as 0 where they predict other classes."""
    pair = student.log_softmax(1), teacher.log_softmax(1)
    divergence = F.kl_div(*pair, reduction="none", log_target=True).sum(1)
    return (divergence * (student.argmax(1) == teacher.argmax(1))).mean()
