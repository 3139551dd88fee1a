"""SGD steps as graphs: where a device has them, a step is captured once and then replayed."""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stamp_core.client.batches import Batch, StepContext, tensor_fields
from stamp_core.core.devices import GRAPHS, Graphs
from stamp_core.models.networks import Classifier

WARM_UP = 3  # steps before a capture, in which libraries choose their kernels

Step = Callable[[Batch, StepContext], Tensor]  # takes an SGD step; its loss


@dataclass(frozen=True)
class CapturedStep:
    """A captured step, with the tensors that it reads and writes."""

    replay: Callable[[], None]
    batch: dict[str, Tensor]  # at fixed addresses
    context: dict[str, Tensor]
    loss: Tensor
    images: int  # encoded for a gradient, which a replay does not count itself


class StepGraphs:
    """Takes SGD steps on the live model: after WARM_UP alike, as replays of a captured one."""

    def __init__(self, graphs: Graphs, network: Classifier) -> None:
        self.graphs: Graphs | None = graphs
        self.network = network
        self.seen = Counter[object]()
        self.captured = dict[object, CapturedStep]()

    def take(self, step: Step, batch: Batch, context: StepContext) -> Tensor:
        if self.graphs is None:
            return step(batch, context)
        read = [tensor_fields(batch), tensor_fields(context)]
        shapes = [(k, t.shape, t.stride(), t.dtype) for each in read for k, t in each.items()]
        key = (step, batch.exemplars, *shapes)
        if key not in self.captured:
            self.seen[key] += 1
            if self.seen[key] <= WARM_UP:
                return self.graphs.warm_up(partial(step, batch, context))
            try:
                self.captured[key] = self.capture(step, batch, context)
            except RuntimeError as error:  # nothing has been changed
                warnings.warn(f"SGD steps are not captured as graphs: {error}", stacklevel=2)
                self.graphs = None
                return step(batch, context)
        return self.replay(self.captured[key], *read)

    def capture(self, step: Step, batch: Batch, context: StepContext) -> CapturedStep:
        assert self.graphs is not None
        of_batch: dict[str, Any] = _copies(batch)
        of_context: dict[str, Any] = _copies(context)
        nothing = dict.fromkeys(each.name for each in fields(context))
        inputs = replace(batch, **of_batch), replace(context, **{**nothing, **of_context})
        before = self.network.images_backpropagated
        try:
            replay, loss = self.graphs.capture(partial(step, *inputs))
            counted = self.network.images_backpropagated - before
            return CapturedStep(replay, of_batch, of_context, loss, counted)
        finally:
            self.network.images_backpropagated = before

    def replay(
        self, captured: CapturedStep, batch: dict[str, Tensor], context: dict[str, Tensor]
    ) -> Tensor:
        for fixed, values in ((captured.batch, batch), (captured.context, context)):
            for name, tensor in fixed.items():
                tensor.copy_(values[name])
        captured.replay()
        self.network.images_backpropagated += captured.images
        return captured.loss.clone()


def new_step_graphs(device: torch.device, network: Classifier) -> StepGraphs | None:
    """Graphs of the network's steps; None for a device that has no graphs."""
    return StepGraphs(GRAPHS[device.type](), network) if device.type in GRAPHS else None


def _copies(values: Batch | StepContext) -> dict[str, Tensor]:
    """Copies of the tensors of a batch or context, at addresses of their own."""
    return {name: value.clone() for name, value in tensor_fields(values).items()}
