"""The yardstick: FedAvg as a bare PyTorch loop, taking the same steps on the same pictures."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.workspace import Visit, Workspace


def round_(work: Workspace, module: nn.Module, visits: list[Visit], data: list[Tensor]) -> None:
    """One round of FedAvg on `module`: torch.optim.SGD, state dictionaries, their plain mean."""
    training = work.setting.training
    start = {name: value.clone() for name, value in module.state_dict().items()}
    total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
    samples = sum(map(len, data))
    for visit, indices in zip(visits, data, strict=True):
        module.load_state_dict(start)
        optimiser = torch.optim.SGD(module.parameters(), lr=training.rate)
        order = visit.generator("order")
        for _ in range(training.epochs):
            shuffled = indices[torch.randperm(len(indices), generator=order)]
            for batch in shuffled.split(training.batch):
                optimiser.zero_grad()
                pictures = (work.x_train[batch].float() / 255 - work.images.mean.view(-1, 1, 1)) / (
                    work.images.std.view(-1, 1, 1)
                )
                F.cross_entropy(module(pictures), work.y_train[batch]).backward()
                optimiser.step()
        for name, value in module.state_dict().items():
            total[name] += value * (len(indices) / samples)
    module.load_state_dict({name: value.float() for name, value in total.items()})
