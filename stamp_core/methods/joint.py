"""Upper bound: joint training of one learner on the images of all clients and tasks."""

import itertools
from typing import ClassVar

import torch
from torch import Tensor

from stamp_core.data.split import Plan
from stamp_core.methods.base.method import Method, State


class Joint(Method):
    """Plain SGD on the union of all data, for as many rounds and epochs as the other methods."""

    models = ("global",)
    fedavg_equivalent: ClassVar = None
    group: ClassVar = "control"

    def participants(self, chosen: list[int], server: State) -> list[int]:
        """The one learner, as client 0."""
        return [0]

    def train_indices(self, plan: Plan, client: int, task: int) -> Tensor:
        """Every training image of any client and task, once."""
        pairs = itertools.product(range(len(plan.clients)), range(plan.tasks))
        parts = [plan.train_indices(self.runtime.dataset, *pair) for pair in pairs]
        union: Tensor = torch.cat(parts).unique()
        return union

    def shares_buffers(self) -> bool:
        """Whether buffers are sent: also local ones, as the learner is client and server in one."""
        return self.runtime.training.buffers != "frozen" and len(self.model.buffers) > 0
