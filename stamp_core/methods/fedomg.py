"""FedOMG (Nguyen et al., 2025): the server matches the clients' updates instead of averaging."""

from dataclasses import dataclass, field
from typing import ClassVar

from stamp_core.methods.base.method import FedAvgParams
from stamp_core.methods.base.server_matching import ServerMatching, SpatialParams


@dataclass(frozen=True)
class FedOMGParams(FedAvgParams):
    """How the server matches; null: not at all."""

    spatial: SpatialParams | None = field(default_factory=SpatialParams)


class FedOMG(ServerMatching):
    """FedAvg whose server moves along the matched update of all clients."""

    Params: ClassVar = FedOMGParams
    fedavg_equivalent: ClassVar = {"spatial": None}
