"""Control: the nearest class mean; clients send sums and counts of their features, once a task."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.methods.base.method import ClientRound, Message, State
from workbench.methods.base.statistics_server import StatisticsServer


@dataclass(frozen=True)
class NearestClassMeanParams:
    """How near an image is to the mean of a class."""

    metric: Literal["euclidean", "cosine"] = "euclidean"  # between features and the mean


class NearestClassMean(StatisticsServer):
    """A linear head that predicts the class whose mean over all clients and tasks is nearest."""

    Params: ClassVar = NearestClassMeanParams
    group = "control"

    def init_server(self, seed: int) -> State:
        shape = self.runtime.classes, self.classifier.features
        return {**super().init_server(seed), "sums": torch.zeros(*shape, dtype=torch.float64)}

    def statistics(self, x: Tensor, y: Tensor, client_round: ClientRound) -> Message:
        return {"sums": y.T @ x, "counts": y.sum(0)}

    def head(self, server: State) -> tuple[Tensor, Tensor]:
        """As m x - |m|^2 / 2 orders the classes, or m x / |m|: |x| is the same for all."""
        means = server["sums"] / server["counts"].clamp(min=1)[:, None]
        if self.params.metric == "cosine":
            return F.normalize(means), means.new_zeros(len(means))
        return means, means.square().sum(1) / -2
