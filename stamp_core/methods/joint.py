"""Upper bound: joint training of one learner on the images of all clients and tasks."""

from typing import ClassVar

import torch
from torch import Tensor

from stamp_core.methods.base.method import ClientRound, Method, State


class Joint(Method):
    """Plain SGD on the union of all data, for as many rounds and epochs as the other methods."""

    models = ("global",)
    neutral: ClassVar = None
    group: ClassVar = "control"

    def participants(self, chosen: list[int], server: State) -> list[int]:
        """The one learner, as client 0."""
        return [0]

    def train_indices(self, client_round: ClientRound) -> Tensor:
        """Every training image of any client and task, once."""
        plan = client_round.plan
        parts = [
            plan.train_indices(self.work.dataset, client, task)
            for client in range(len(plan.clients))
            for task in range(plan.tasks)
        ]
        union: Tensor = torch.cat(parts).unique()
        return union

    def shares_buffers(self) -> bool:
        """Whether buffers are sent: also local ones, as the learner is client and server in one."""
        return self.work.training.buffers != "frozen" and len(self.work.model.buffers) > 0
