"""Gradients of single images: their values, their order, and what they leave unchanged."""

import pytest
import small
import torch
import torch.nn.functional as F
from rule_tasks import BATCH_NORM, NETWORKS, generator, normal
from torch import Tensor

from stamp_core.config.schema import Network
from stamp_core.models.flat import FlatModel
from stamp_core.models.networks import Classifier, build_network
from workbench.per_sample import CHUNK, head_gradient_factors, per_sample_gradients

CLASSES = 5


def build(network: Network, seed: int = 3) -> Classifier:
    built = build_network(network, (1, 8, 8), CLASSES, seed)
    built.train()(torch.rand(20, 1, 8, 8, generator=generator(1)))
    return built


def examples(count: int) -> tuple[Tensor, Tensor]:
    return normal(count, 1, 8, 8), torch.randint(CLASSES, (count,), generator=generator(2))


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("count", [1, 7, CHUNK + 3])
def test_per_sample_gradients_are_those_of_single_backward_passes(network, count):
    module, (images, labels) = build(network), examples(count)
    expected = []
    for image, label in zip(images, labels, strict=True):
        loss = F.cross_entropy(module.eval()(image[None]), label[None])
        expected.append(small.flat(torch.autograd.grad(loss, list(module.parameters()))))
    before = module.images_backpropagated
    gradients = per_sample_gradients(module, images, labels)
    torch.testing.assert_close(gradients, torch.stack(expected), rtol=0, atol=1e-5)
    assert module.images_backpropagated - before == count  # vmap passes many images as one


def test_per_sample_gradients_have_the_order_of_the_flat_vector():
    """Also where weights are channels last."""
    network = build_network(Network("cnn", features=6, channels=(4, 3)), (2, 16, 16), CLASSES, 0)
    model = FlatModel(network.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    images, labels = normal(6, 2, 16, 16), examples(6)[1]
    F.cross_entropy(model.module.eval()(images), labels).backward()
    mean = per_sample_gradients(network, images, labels).mean(0)
    torch.testing.assert_close(mean, model.gradients, rtol=1e-4, atol=1e-6)


def test_gradients_change_neither_weights_nor_running_statistics():
    module, samples = build(BATCH_NORM).train(), examples(9)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    per_sample_gradients(module, *samples)
    head_gradient_factors(module.train(), *samples)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters()) and not module.training
