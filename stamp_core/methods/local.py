"""Control: local training. Every client keeps its own model and sends nothing."""

from typing import ClassVar

from stamp_core.client.batches import StepContext
from stamp_core.methods.base.method import ClientRound, Log, Message, Method, NoParams, Reply, State


class Local(Method):
    """Each client fine-tunes its own model on its sequence of tasks."""

    Params: ClassVar = NoParams
    models = ("personal",)
    fedavg_equivalent: ClassVar = None
    group: ClassVar = "control"

    def init_client(self, client: int, server: State) -> State:
        return {name: server[name].clone() for name in ("parameters", "buffers")}

    def broadcast(self, server: State, client: int) -> Message:
        return {}

    def receive(self, client_round: ClientRound) -> None:
        self.model.load(client_round.state["parameters"], client_round.state["buffers"])

    def update_state(self, client_round: ClientRound, context: StepContext) -> State:
        vectors = {"parameters": self.model.parameters, "buffers": self.model.buffers}
        return {name: vector.cpu().clone() for name, vector in vectors.items()}

    def upload(self, client_round: ClientRound, context: StepContext) -> Message:
        return {}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        return server
