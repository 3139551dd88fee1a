"""The weights of one network divided among tasks: owners, pruning, and masks of earlier weights."""

import torch
from torch import Tensor, nn

from stamp_core.models.adam import FlatAdam
from stamp_core.models.flat import FlatModel
from stamp_core.models.networks import Classifier

FREE, COPIED = 0, 255  # owners besides tasks from 1: none; every task, in a copy of its own
PICKED, THRESHOLD = 0.01, 0.005  # a mask's values at first; above the threshold a weight is used


def initial_owners(network: Classifier) -> Tensor:
    """Owners before any task: the encoder's weights are free, all else is copied.  # uint8 [P]"""
    owners = []
    for name, value in network.named_parameters():
        weight = name.startswith("encoder.") and value.ndim > 1
        owners.append(torch.full((value.numel(),), FREE if weight else COPIED, dtype=torch.uint8))
    return torch.cat(owners)


def final_free_share(keep: float, task: int) -> float:
    """Which share of what was free becomes free again, where each task keeps a share of all."""
    left = 1 - keep * (task - 1)
    return max(0.0, 1 - keep / left) if left > 0 else 0.0


def free_share(step: int, steps: int, final: float) -> float:
    """The share that is free after some of the steps: it rises fast at first, by a cubic curve."""
    return final * (1 - (1 - step / steps) ** 3)


def prune(parameters: Tensor, owners: Tensor, task: int, share: float, sizes: list[int]) -> Tensor:
    """The owners when the smallest weights of a task have become free.  # uint8 [P]

    In each tensor, until the share of the weights that are free or the task's is free.
    """
    owners = owners.clone()
    for values, own in zip(parameters.split(sizes), owners.split(sizes), strict=True):
        places = ((own == task) | (own == FREE)).nonzero().flatten()
        magnitudes = values[places].abs().masked_fill(own[places] == FREE, -1.0)
        smallest = magnitudes.argsort(stable=True)[: round(share * len(places))]
        own[places[smallest]] = FREE
    return owners


class TaskWeights:
    """A task's weights in a live vector: its own are trained, earlier ones only picked by a mask.

    An earlier weight w is used where its mask m is above a threshold. The gradient passes straight
    through: dL/dm = w dL/dw'. All other weights are 0.
    """

    def __init__(self, trained: Tensor, earlier: Tensor, picked: Tensor, lr: float | None) -> None:
        """Which are trained (bool), the earlier weights (0 elsewhere), and which of them are used.

        With a learning rate the mask is trained.  # [P] each
        """
        self.trained, self.earlier = trained, earlier
        self.mask = FlatModel(nn.ParameterList([PICKED * picked.float()]))
        self.adam = FlatAdam(self.mask, lr) if lr is not None else None

    def compose(self, parameters: Tensor) -> None:
        """Overwrite all weights of a vector that are not trained."""
        used = self.earlier * (self.mask.parameters > THRESHOLD)
        torch.where(self.trained, parameters, used, out=parameters)

    def correct(self, gradients: Tensor) -> None:
        """One step of the mask, if it is trained; the gradients of other tasks' weights are 0."""
        if self.adam is not None:
            torch.mul(self.earlier, gradients, out=self.mask.gradients)
            self.adam.step()
        gradients.mul_(self.trained)

    def picked(self) -> Tensor:
        """Which weights the mask uses.  # bool [P]"""
        return self.mask.parameters > THRESHOLD
