"""Losses over some of the classes and distillation, against their formulas in NumPy."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import Array, softmax
from torch import Tensor

from stamp_core.core.seeding import generator
from workbench.methods.base.distillation import (
    agreeing_divergence,
    masked_cross_entropy,
    soft_cross_entropy,
    softened_divergence,
)

MASK = torch.tensor([True, False, True, True, False])


def logits(purpose: str) -> Tensor:
    return 2 * torch.randn(6, 5, generator=generator(purpose), dtype=torch.float64)


def cross_entropy(t: Array, s: Array) -> Array:
    found: Array = -(softmax(t) * np.log(softmax(s))).sum(1)
    return found


def divergence(s: Array, t: Array) -> Array:
    """KL(teacher || student) of each image."""
    return cross_entropy(t, s) - cross_entropy(t, t)


def where_equal(s: Array, t: Array) -> Array:
    return s.argmax(1) == t.argmax(1)


@pytest.mark.parametrize(
    ("loss", "formula"),
    [
        (lambda s, t: soft_cross_entropy(s, t, 0.5), lambda s, t: cross_entropy(2 * t, 2 * s)),
        (lambda s, t: soft_cross_entropy(s, t, 2), lambda s, t: cross_entropy(t / 2, s / 2)),
        (lambda s, t: softened_divergence(s, t, 20), lambda s, t: 400 * divergence(s / 20, t / 20)),
        (agreeing_divergence, lambda s, t: divergence(s, t) * where_equal(s, t)),
    ],
    ids=["soft, T = 1/2", "soft, T = 2", "softened", "agreeing"],
)
def test_distillation_is_its_formula_and_least_at_equality(loss, formula):
    """The mean over images, of which only some predict the teacher's class."""
    s, t = logits("s"), logits("t")
    t[:3] = s[:3] + 0.1 * t[:3]
    assert 3 <= where_equal(s.numpy(), t.numpy()).sum() < 6
    for student in (s, t):
        expected = np.mean(formula(student.numpy(), t.numpy()))
        np.testing.assert_allclose(loss(student, t).item(), expected, rtol=1e-9, atol=1e-9)
    equal = t.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(equal, t), equal)
    assert gradient.abs().max() < 1e-9


def test_cross_entropy_within_a_mask():
    """That over columns 0, 2 and 3; the other columns have no gradient."""
    z, labels = logits("z").requires_grad_(), torch.tensor([0, 2, 3, 0, 2, 3])
    loss = masked_cross_entropy(z, labels, MASK)
    places = torch.tensor([0, 1, 2, 0, 1, 2])
    torch.testing.assert_close(loss, F.cross_entropy(z[:, MASK], places))
    loss.backward()
    assert z.grad is not None and not z.grad[:, ~MASK].any() and z.grad[:, MASK].all()
    assert torch.equal(masked_cross_entropy(z, labels, None), F.cross_entropy(z, labels))
