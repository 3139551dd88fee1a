"""A rule's own network: gradients of single pictures, steps, and a live model left alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.config import Network
from stamp_core.learner import CHUNK, Learner, gradients, head_gradients, head_parts
from stamp_core.models import Classifier, build

NETWORKS = {
    "mlp": Network("mlp", features=6),
    "cnn": Network("cnn", features=6, channels=(3,)),
    "batch norm": Network("cnn", features=6, channels=(3,), norm="batch"),
    "group norm": Network("cnn", features=6, channels=(4,), norm="group"),
}
CLASSES = 5


def network(name: str) -> Classifier:
    """A network whose batch normalisation has gathered something."""
    made = build(NETWORKS[name], (1, 8, 8), CLASSES, seed=3)
    made.train()(torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(1)))
    return made


def examples(count: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    pictures = torch.randn(count, 1, 8, 8, generator=draw)
    return pictures, torch.randint(CLASSES, (count,), generator=draw)


def learner(name: str = "mlp") -> Learner:
    """Fresh weights of seed 3, learnt ones of seed 4."""
    learnt = build(NETWORKS[name], (1, 8, 8), CLASSES, seed=4)
    parameters = torch.cat([p.detach().flatten() for p in learnt.parameters()])
    buffers = torch.cat([torch.empty(0), *(b.flatten() + 0.5 for b in learnt.buffers() if b.dim())])
    made = build(NETWORKS[name], (1, 8, 8), CLASSES, seed=3)
    return Learner(made, lambda pictures: pictures.float() / 255, parameters, buffers)


def one_by_one(module: Classifier, pictures: Tensor, labels: Tensor) -> Tensor:
    """A backward pass a picture, in evaluation mode.  # [N, P]"""
    found = []
    for picture, label in zip(pictures, labels, strict=True):
        loss = F.cross_entropy(module.eval()(picture[None]), label[None])
        each = torch.autograd.grad(loss, list(module.parameters()))
        found.append(torch.cat([part.flatten() for part in each]))
    return torch.stack(found)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("count", [1, 7, CHUNK + 3])
def test_gradients_of_single_pictures_are_those_of_a_backward_pass_each(
    name: str, count: int
) -> None:
    module, (pictures, labels) = network(name), examples(count)
    found = gradients(module, pictures, labels)
    torch.testing.assert_close(found, one_by_one(module, pictures, labels), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_closed_form_of_the_head_agrees_with_the_gradients_of_all(name: str) -> None:
    """The head comes last in the order of parameters."""
    module, (pictures, labels) = network(name), examples(30)
    found = head_gradients(module, pictures, labels)
    every = gradients(module, pictures, labels)
    assert found.shape == (30, CLASSES * 6 + CLASSES) and found.abs().max() > 0.1
    torch.testing.assert_close(found, every[:, -found.shape[1] :], rtol=0, atol=1e-5)


def test_inner_products_of_head_gradients_need_no_long_vectors() -> None:
    module, (pictures, labels) = network("mlp"), examples(12)
    errors, features = head_parts(module, pictures, labels)
    rows = head_gradients(module, pictures, labels)
    product = (errors @ errors.T) * (1 + features @ features.T)
    torch.testing.assert_close(product, rows @ rows.T, rtol=1e-5, atol=1e-5)


def test_their_mean_is_the_gradient_of_the_mean_loss() -> None:
    module, (pictures, labels) = network("batch norm"), examples(9)
    F.cross_entropy(module.eval()(pictures), labels).backward()
    mean = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    found = gradients(module, pictures, labels).mean(0)
    torch.testing.assert_close(found, mean, rtol=0, atol=1e-6)


def test_looking_changes_neither_weights_nor_gathered_statistics() -> None:
    module, (pictures, labels) = network("batch norm").train(), examples(9)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    gradients(module, pictures, labels)
    head_gradients(module.train(), pictures, labels)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters()) and not module.training


def test_a_learner_has_learnt_weights_and_fresh_ones() -> None:
    mine = learner("batch norm")
    fresh = build(NETWORKS["batch norm"], (1, 8, 8), CLASSES, seed=3)
    wanted = torch.cat([p.detach().flatten() for p in fresh.parameters()])
    assert not torch.equal(mine.model.parameters, wanted)
    learnt = mine.model.parameters.clone(), mine.model.buffers.clone()
    assert learnt[1].tolist() == 3 * [0.5] + 3 * [1.5]
    for _ in range(2):
        mine.restart()
        assert torch.equal(mine.model.parameters, wanted)
        assert mine.model.buffers.tolist() == 3 * [0.0] + 3 * [1.0]
        mine.descend(*examples(6), [torch.arange(6)], rate=0.1)
        assert not torch.equal(mine.model.parameters, wanted) and mine.model.buffers[0] != 0
    mine.restore()
    assert torch.equal(mine.model.parameters, learnt[0])
    assert torch.equal(mine.model.buffers, learnt[1])


def test_descend_takes_the_steps_of_sgd_in_the_order_of_the_batches() -> None:
    mine, (pictures, labels) = learner(), examples(10)
    other = learner()
    batches = [torch.tensor([3, 1, 3]), torch.tensor([9]), torch.arange(10)]
    mine.descend(pictures, labels, batches, rate=0.3)
    steps = torch.optim.SGD(other.network.parameters(), lr=0.3)
    for places in batches:
        steps.zero_grad()
        F.cross_entropy(other.network(pictures[places]), labels[places]).backward()
        steps.step()
    torch.testing.assert_close(mine.model.parameters, other.model.parameters)
    assert not mine.network.training


def test_a_batch_of_one_is_normalised_by_what_was_gathered() -> None:
    mine = learner("batch norm")
    before = mine.model.buffers.clone()
    mine.descend(*examples(4), [torch.tensor([2])], rate=0.1)
    assert torch.equal(mine.model.buffers, before) and mine.model.parameters.isfinite().all()
    mine.descend(*examples(4), [torch.tensor([2, 3])], rate=0.1)
    assert not torch.equal(mine.model.buffers, before)


def test_losses_are_those_of_each_picture_in_evaluation_mode() -> None:
    mine, (pictures, labels) = learner("batch norm"), examples(5)
    before = mine.model.buffers.clone()
    found = mine.losses(pictures, labels)
    alone = [
        F.cross_entropy(mine.network(pictures[i : i + 1]), labels[i : i + 1]) for i in range(5)
    ]
    torch.testing.assert_close(found, torch.stack(alone))
    assert torch.equal(mine.model.buffers, before) and not found.requires_grad
