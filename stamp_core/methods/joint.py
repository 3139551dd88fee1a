"""Upper bound: one learner that holds the pictures of all clients and tasks at once."""

from typing import ClassVar

import torch
from torch import Tensor

from stamp_core.methods import Group, Method, Turn


class Joint(Method):
    """Plain SGD on the union of all data, for as many rounds and epochs as the others have."""

    models = ("global",)
    neutral: ClassVar = None
    group: ClassVar[Group] = "control"

    def participants(self, chosen: list[int]) -> list[int]:
        """One learner stands for everybody."""
        return [0]

    def examples(self, turn: Turn) -> Tensor:
        """Every training picture that any client meets in any task, once."""
        plan = turn.plan
        cells = [
            plan.train_indices(self.work.images, client, task)
            for client in range(len(plan.clients))
            for task in range(plan.tasks)
        ]
        every: Tensor = torch.cat(cells).unique()
        return every

    def shares_buffers(self) -> bool:
        """Whether the server takes up batch normalisation's buffers: there is one learner."""
        return self.work.setting.training.buffers != "frozen" and len(self.work.model.buffers) > 0
