"""STSA (Guan et al., 2025): ridge regression on random features, from clients' exact statistics."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid
from stamp_core.config.limits import NonNegativeInt, Positive
from stamp_core.core.arithmetic import sqrt
from stamp_core.core.seeding import generator
from stamp_core.methods.base.method import ClientRound, Message, State
from stamp_core.models.flat import FlatModel
from stamp_core.models.networks import build_network
from workbench.methods.base.statistics_server import StatisticsServer, product


@dataclass(frozen=True)
class STSAParams:
    """The features of the regression, its penalty, and what is sent of its Gram matrix."""

    # M random features max(0, x R), R of normal numbers from the run's seed; 0: the features x
    expansion: NonNegativeInt = 1250
    ridge: Positive = 1e6  # added to the diagonal of the Gram matrix
    cosine: bool = False  # the head's rows have length 1, as released
    # STSA-E: sums of so many random subsets of each class are sent, from which the server
    # estimates the Gram matrix; 0: the matrix itself
    estimate: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if self.estimate == 1:
            raise invalid("estimate", 1, "0, or at least 2: one sum says nothing of a variance")


class STSA(StatisticsServer):
    """(G + ridge I) W = P with G = sum phi phi^T, P = sum phi y^T over all images; no bias."""

    Params: ClassVar = STSAParams

    def __init__(self, params: STSAParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.inputs = self.classifier.features
        self.width = params.expansion or self.inputs
        if params.expansion:  # the live model has them too, as a hidden layer that nobody trains
            network = replace(runtime.setting.network, kind="mlp", features=self.width)
            self.classifier = build_network(network, runtime.shape, runtime.classes, seed=0)
            self.model = FlatModel(self.classifier.to(runtime.device))
            runtime.classifier, runtime.model = self.classifier, self.model
            runtime.encoder_size = self.width * (self.inputs + 1)

    def matrix(self, seed: int) -> Tensor:
        """R, which the server and every client draw.  # [D, M]"""
        return torch.randn(self.inputs, self.width, generator=generator(seed, "expansion"))

    def init_server(self, seed: int) -> State:
        server = super().init_server(seed)
        if self.params.expansion:
            server["parameters"][: self.inputs * self.width] = self.matrix(seed).T.flatten()
        gram = torch.zeros(self.width, self.width, dtype=torch.float64)
        products = gram.new_zeros(self.width, self.runtime.classes)
        return {**server, "gram": gram, "products": products}

    def statistics(self, x: Tensor, y: Tensor, client_round: ClientRound) -> Message:
        if self.params.expansion:
            x = product(x.T, self.matrix(client_round.seed).to(x)).relu()
        if not self.params.estimate:
            return {"gram": product(x, x), "products": product(x, y), "counts": y.sum(0)}
        order = torch.randperm(len(x), generator=client_round.generator("subsets")).to(x.device)
        x, y, classes = x[order], y[order], y.any(0).nonzero().flatten()
        subsets = [x[y[:, c] > 0].tensor_split(self.params.estimate) for c in classes]  # [k][K]
        sums = torch.stack([torch.stack([part.sum(0) for part in each]) for each in subsets])
        sizes = torch.tensor([[len(part) for part in each] for each in subsets]).double()
        return {"classes": classes, "sums": sums, "sizes": sizes}

    def merged(self, server: State, sent: list[Any]) -> State:
        sent = list(map(self.estimated, sent)) if self.params.estimate else sent
        return super().merged(server, sent)

    def estimated(self, message: Message) -> Message:
        """What sums of subsets say of the sums over all images."""
        sums, sizes = message["sums"], message["sizes"]
        rows = torch.cat(list(map(estimated_rows, sums, sizes)))
        y = F.one_hot(message["classes"], self.runtime.classes).double()  # [k, L]
        gram, products = product(rows, rows), product(sums.sum(1), y)
        return {"gram": gram, "products": products, "counts": sizes.sum(1) @ y}

    def head(self, server: State) -> tuple[Tensor, Tensor]:
        gram = server["gram"] + self.params.ridge * torch.eye(self.width, dtype=torch.float64)
        weight = torch.cholesky_solve(server["products"], torch.linalg.cholesky(gram)).T
        return F.normalize(weight) if self.params.cosine else weight, weight.new_zeros(len(weight))


def estimated_rows(sums: Tensor, sizes: Tensor) -> Tensor:
    """Rows whose Gram matrix is in the mean over divisions that of a class.  # [K + 1, M]

    Published: (N - 1) / (K - 1) sum_k s_k s_k^T / n_k - (N - K) / ((K - 1) N) p p^T from the sums
    s_k of K subsets of n_k of N images, p = sum_k s_k. With the means m_k and m it equals
    p p^T / N + (N - 1) / (K - 1) sum_k n_k (m_k - m) (m_k - m)^T: no eigenvalue is negative.
    Empty subsets do not count.
    """
    images, total = sizes.sum(), sums.sum(0)
    away = sums / sizes.clamp(min=1)[:, None] - total / images
    scale = (images - 1) / (sizes.count_nonzero() - 1).clamp(min=1)
    return torch.cat([total[None] / sqrt(images), away * sqrt(scale * sizes)[:, None]])
