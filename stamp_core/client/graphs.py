"""SGD steps as graphs: where a device has them, a step is captured once and then replayed."""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from stamp_core.core.devices import new_graphs
from stamp_core.models.networks import Classifier

WARM_UP = 3  # steps before a capture, in which libraries choose their kernels

Inputs = Mapping[str, Tensor]
Step = Callable[[Inputs], Tensor]  # takes an SGD step on some inputs; its loss


class CapturedStep(NamedTuple):
    """A captured step, with the tensors that it reads and writes."""

    replay: Callable[[], None]
    inputs: Inputs  # at fixed addresses
    loss: Tensor
    images: int  # encoded for a gradient, which a replay does not count itself

    def take(self, inputs: Inputs) -> Tensor:
        """The loss of a step on other inputs of the same shapes."""
        for name, fixed in self.inputs.items():
            fixed.copy_(inputs[name])
        self.replay()
        Classifier.differentiated += self.images
        return self.loss.clone()


class StepGraphs:
    """Takes SGD steps on the live model: as they are, or as replays of captured ones.

    The live model's vectors have fixed addresses, so one graph for each step and shapes of inputs
    serves all clients. The first `WARM_UP` steps on such inputs run as they are. Both have the
    same results.
    """

    def __init__(self, device: torch.device, network: Classifier) -> None:
        self.network, self.graphs = network, new_graphs(device)
        self.seen, self.captured = Counter[object](), dict[object, CapturedStep]()

    def usable(self, images: int) -> bool:
        """Whether a step on so many images may be captured: micro-batches are computed again."""
        size = self.network.micro_batch_size
        return self.graphs is not None and (size is None or images <= size)

    def take(self, name: str, step: Step, inputs: Inputs) -> Tensor:
        """The loss of an SGD step on `inputs`, among them "images"; `name` says which step."""
        if self.graphs is None or not self.usable(len(inputs["images"])):
            return step(inputs)
        shapes = ((key, t.shape, t.stride(), t.dtype) for key, t in inputs.items())
        key = name, *shapes
        if key in self.captured:
            return self.captured[key].take(inputs)
        self.seen[key] += 1
        if self.seen[key] <= WARM_UP:
            return self.graphs.warm_up(partial(step, inputs))
        try:
            self.captured[key] = self.capture(step, inputs)
        except RuntimeError as error:  # nothing has been changed
            warnings.warn(f"SGD steps are not captured as graphs: {error}", stacklevel=2)
            self.graphs = None
            return step(inputs)
        return self.captured[key].take(inputs)

    def capture(self, step: Step, inputs: Inputs) -> CapturedStep:
        """A captured step, which has not been taken yet."""
        assert self.graphs is not None
        fixed = {name: values.clone() for name, values in inputs.items()}
        before = Classifier.differentiated
        try:
            replay, loss = self.graphs.capture(partial(step, fixed))
            return CapturedStep(replay, fixed, loss, Classifier.differentiated - before)
        finally:
            Classifier.differentiated = before
