"""Adam on flat vectors: that of torch, also when it continues from kept moments."""

import pytest
import torch

from stamp_core.core.seeding import generator
from stamp_core.models.flat import FlatModel
from workbench.adam import FlatAdam


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.999)], ids=str)
def test_adam_is_that_of_torch_and_continues_from_kept_moments(betas):
    net = FlatModel(torch.nn.Linear(5, 3))
    weights = net.parameters.clone().requires_grad_()
    expected, moments = torch.optim.Adam([weights], 0.01, betas=betas), None
    for round_ in range(3):
        adam = FlatAdam(net, 0.01, moments, betas)
        for step in range(4):
            gradient = torch.randn(18, generator=generator("gradient", round_, step))
            net.gradients.copy_(gradient)
            weights.grad = gradient
            adam.step()
            expected.step()
        moments = adam.moments()
    torch.testing.assert_close(net.parameters, weights.detach(), rtol=0, atol=1e-6)
    assert moments is not None and moments["steps"] == 12


def test_adam_leaves_the_moments_that_it_continues_from():
    model = FlatModel(torch.nn.Linear(2, 2))
    model.gradients.fill_(1)
    stored = FlatAdam(model, 0.1).moments()
    FlatAdam(model, 0.1, stored).step()
    assert not stored["first"].any() and not stored["second"].any() and stored["steps"] == 0
