"""The gradient of each image's loss, by all parameters or by the head's."""

from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from stamp_core.models.flat import in_flat_order
from stamp_core.models.networks import Classifier

CHUNK = 64  # gradients computed at a time


def per_sample_gradients(network: Classifier, images: Tensor, labels: Tensor) -> Tensor:
    """Each image's gradient, in evaluation mode and float32, in flat order.  # [N, P]"""
    network.images_backpropagated += len(images)
    network = copy(network.eval())  # shares its layers, but counts the images of vmap as one
    values = {name: value.detach() for name, value in network.named_parameters()}
    buffers = dict(network.named_buffers())

    def loss(values: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(network, {**values, **buffers}, (image[None],))
        return F.cross_entropy(logits, label[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0), chunk_size=CHUNK)(values, images, labels)
    pairs = ((gradients[name], value) for name, value in values.items())
    return torch.cat([in_flat_order(*pair).flatten(1) for pair in pairs], dim=1)


@torch.no_grad()
def head_gradient_factors(
    network: Classifier, images: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Errors (softmax minus one-hot) and features of each image.  # [N, classes], [N, D]

    The gradient of cross-entropy with respect to the head's weight is the outer product error x
    feature, with respect to its bias the error. So the inner product of two images' head gradients
    is the product of their errors' inner product and 1 + that of their features.
    """
    features: Tensor = network.eval().encode(images)
    logits: Tensor = network.head(features)
    errors = logits.softmax(1) - F.one_hot(labels, logits.shape[1])
    return errors, features
