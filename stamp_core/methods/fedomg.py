"""FedOMG (Nguyen et al., 2025): the server matches the clients' updates instead of averaging."""

from dataclasses import dataclass, field
from typing import ClassVar

from stamp_core.client.batches import StepContext
from stamp_core.methods.base.method import (
    ClientRound,
    FedAvgParams,
    Log,
    Message,
    Method,
    Reply,
    State,
)
from stamp_core.methods.base.server_matching import (
    PROJECTION,
    SpatialParams,
    match_server,
    with_projection,
)


@dataclass(frozen=True)
class FedOMGParams(FedAvgParams):
    """How the server matches; null: not at all."""

    spatial: SpatialParams | None = field(default_factory=SpatialParams)


class FedOMG(Method):
    """FedAvg whose server moves along the matched update of all clients."""

    Params: ClassVar = FedOMGParams
    fedavg_equivalent: ClassVar = {"spatial": None}
    in_clear: ClassVar = (PROJECTION,)

    def upload(self, client_round: ClientRound, context: StepContext) -> Message:
        """The trained model, with the projection of its update where those are matched."""
        return with_projection(self, client_round, super().upload(client_round, context))

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The server's model moved along the matched update; buffers are averaged."""
        averaged = super().aggregate(server, replies, log)
        return match_server(self, averaged, server, replies, log)

    def averaged_vectors(self) -> tuple[str, ...]:
        """The buffers alone where the parameters are matched."""
        return super().averaged_vectors() if self.params.spatial is None else self.shared_buffers()
