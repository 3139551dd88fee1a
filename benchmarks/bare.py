"""The reference: FedAvg as a plain PyTorch loop with the same SGD steps on the same images."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.client.runtime import ClientRuntime, RoundId


def fedavg_round(
    runtime: ClientRuntime, module: nn.Module, round_ids: list[RoundId], data: list[Tensor]
) -> None:
    """One round of FedAvg on `module`: torch.optim.SGD, state dictionaries, their mean.

    The module, the images and the indices are on the device.
    """
    training, moments = runtime.training, (runtime.dataset.mean, runtime.dataset.std)
    mean, std = (value.view(-1, 1, 1).to(runtime.device) for value in moments)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
    samples = sum(map(len, data))
    for round_id, indices in zip(round_ids, data, strict=True):
        module.load_state_dict(start)
        optimiser = torch.optim.SGD(module.parameters(), lr=training.lr)
        order = round_id.generator("order")
        for _ in range(training.epochs):
            places = torch.randperm(len(indices), generator=order)
            shuffled = indices[places.to(runtime.device)]
            for batch in shuffled.split(training.batch_size):
                optimiser.zero_grad()
                images = (runtime.x_train[batch].float() / 255 - mean) / std
                F.cross_entropy(module(images), runtime.y_train[batch]).backward()
                optimiser.step()
        for name, value in module.state_dict().items():
            total[name] += value * (len(indices) / samples)
    module.load_state_dict({name: value.float() for name, value in total.items()})
