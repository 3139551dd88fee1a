"""The live network at weights other than its own: gradients through steps that are not taken."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

from torch import Tensor
from torch.func import functional_call

from stamp_core.client.batches import Batch
from stamp_core.client.runtime import ClientRuntime


class LookAhead:
    """The live network as a function of its parameters."""

    def __init__(self, runtime: ClientRuntime) -> None:
        self.runtime = runtime
        self.names = [name for name, _ in runtime.classifier.named_parameters()]

    def __call__(
        self, tensors: Iterable[Tensor], images: Tensor, update_norms: bool = False
    ) -> Tensor:
        """Logits of a training step with these tensors as parameters.  # [N, classes]

        No tensor may be a leaf, for the reason that `Classifier.encode` gives. Running statistics
        of batch normalisation change only on request: most of these weights are never the model's.
        """
        runtime = self.runtime
        values = dict(zip(self.names, tensors, strict=True))
        runtime.train_mode(len(images))
        with nullcontext() if update_norms else constant_statistics(runtime):
            # no network here has two names for one tensor, which it would take time to look for
            network = runtime.classifier
            logits: Tensor = functional_call(network, values, (images,), tie_weights=False)
        return logits


@contextmanager
def constant_statistics(runtime: ClientRuntime) -> Iterator[None]:
    """A context in which a pass leaves the running statistics of batch normalisation unchanged."""
    momenta = [norm.momentum for norm in runtime.classifier.norms]
    for norm in runtime.classifier.norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(runtime.classifier.norms, momenta, strict=True):
            norm.momentum = momentum


def new_parts(batch: Batch, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """At most `count` parts of the new images, which are in random order, and their targets."""
    images = batch.images[: batch.new].chunk(count)
    targets = batch.targets[: batch.new].chunk(count)
    return zip(images, targets, strict=True)
