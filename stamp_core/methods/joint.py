"""Upper bound: joint training of one learner on the images of all clients and tasks."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from stamp_core.client.batches import Batch
from stamp_core.config.limits import PositiveInt
from stamp_core.config.schema import Training
from stamp_core.data.plan import Plan
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Method, State


@dataclass(frozen=True)
class JointParams(FedAvgParams):
    """The learner's own batch; None: the setting's.

    A federated step averages the batches of all clients. On one client's batch alone the learner
    can end in its own noise, below methods that it is to bound; so it can after a last batch of a
    few images, which a learner with a batch of its own leaves out.
    """

    batch_size: PositiveInt | None = None  # of the learner


class Joint(Method):
    """Plain SGD on the union of all data, for as many rounds and epochs as the other methods."""

    Params: ClassVar = JointParams
    models = ("global",)
    fedavg_equivalent: ClassVar = None
    group: ClassVar = "control"

    @classmethod
    def adapt(cls, training: Training, params: JointParams) -> Training:
        size = params.batch_size or training.batch_size
        return replace(super().adapt(training, params), batch_size=size)

    def participants(self, chosen: list[int], server: State) -> list[int]:
        return [0]

    def train_indices(self, plan: Plan, client: int, task: int) -> Tensor:
        """Every training image of any client and task, once."""
        pairs = itertools.product(range(len(plan.clients)), range(plan.tasks))
        parts = [plan.train_indices(self.runtime.dataset, *pair) for pair in pairs]
        union: Tensor = torch.cat(parts).unique()
        return union

    def batches(self, client_round: ClientRound, context: Any) -> Iterator[Batch]:
        """The epochs, of full batches only if their size is the learner's own."""
        batches = super().batches(client_round, context)
        size = self.params.batch_size
        if size is None or len(client_round.indices) < size:
            return batches
        return (batch for batch in batches if len(batch) == size)

    def shares_buffers(self) -> bool:
        """Whether buffers are sent: also local ones, as the learner is client and server in one."""
        return self.runtime.training.buffers != "frozen" and len(self.model.buffers) > 0
