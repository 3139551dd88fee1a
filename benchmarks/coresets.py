"""Per-sample gradients: of all parameters, of the head alone, and by a loop of backward passes."""

import statistics
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import Row, seconds, section, spread
from stamp_core.engine.experiment import load_experiment
from stamp_core.models.networks import Classifier, build_network
from workbench.per_sample import head_gradient_factors, per_sample_gradients

REPEATS = 7
IMAGES = 128
SETTINGS = ("digits", "glyphs")


def looped_gradients(network: Classifier, images: Tensor, labels: Tensor) -> Tensor:
    """One backward pass an image: the reference.  # [N, P]"""
    network.eval()
    gradients = []
    for image, label in zip(images, labels, strict=True):
        loss = F.cross_entropy(network(image[None]), label[None])
        own = torch.autograd.grad(loss, list(network.parameters()))
        gradients.append(torch.cat([part.flatten() for part in own]))
    return torch.stack(gradients)


def head_gradients(network: Classifier, images: Tensor, labels: Tensor) -> Tensor:
    """Gradients by the head's weight, then by its bias.  # [N, H]"""
    errors, features = head_gradient_factors(network, images, labels)
    weight = errors[:, :, None] * features[:, None]  # [N, classes, D]
    return torch.cat([weight.flatten(1), errors], dim=1)


def head_products(network: Classifier, images: Tensor, labels: Tensor) -> Tensor:
    """Inner products of head gradients without the gradients.  # [N, N]"""
    errors, features = head_gradient_factors(network, images, labels)
    return (errors @ errors.T) * (1 + features @ features.T)


def measurements() -> Iterator[Row]:
    """The cost relative to gradients of all parameters by vmap, and the head's difference."""
    functions = {
        "a loop": looped_gradients,
        "the head alone": head_gradients,
        "the head's products": head_products,
    }
    for name in SETTINGS:
        experiment = load_experiment(name, "fedavg")
        shape, classes = experiment.dataset().shape, len(experiment.dataset().classes)
        network = build_network(experiment.setting.network, shape, classes, seed=0)
        batch = network, torch.randn(IMAGES, *shape), torch.randint(classes, (IMAGES,))
        for label, function in functions.items():
            ratios = [
                seconds(function, *batch) / seconds(per_sample_gradients, *batch)
                for _ in range(REPEATS + 1)
            ]
            yield f"{label} / all parameters by vmap, {name}", spread(ratios[1:])
        times = [seconds(per_sample_gradients, *batch) for _ in range(REPEATS)]
        every, head = per_sample_gradients(*batch), head_gradients(*batch)
        error = float((every[:, -head.shape[1] :] - head).abs().max())
        result = f"{1000 * statistics.median(times):.1f} ms, {every.shape[1]:,} parameters"
        result += f"; head alone differs by {error:.0e}"
        yield f"gradients of {IMAGES} images by vmap, {name}", result


def table() -> list[str]:
    """The section of benchmarks/results.md."""
    note = "On the networks of the settings: for selection rules that compare gradients."
    return section("## Per-sample gradients", note, measurements())


if __name__ == "__main__":
    print("\n".join(table()))
