"""Control: local training. Every client keeps its own model and sends nothing."""

from typing import ClassVar

from stamp_core.methods.base.method import ClientRound, Log, Message, Method, NoParams, Reply, State


class Local(Method):
    """Each client fine-tunes its own model on its sequence of tasks."""

    Params: ClassVar = NoParams
    models = ("personal",)
    neutral: ClassVar = None
    group: ClassVar = "control"

    def init_client(self, client: int, server: State) -> State:
        """The initial weights, the same for all clients."""
        return {name: server[name].clone() for name in ("parameters", "buffers")}

    def broadcast(self, server: State, client: int) -> Message:
        """Nothing."""
        return {}

    def receive(self, client_round: ClientRound) -> None:
        """Load the client's own model."""
        self.work.model.load(client_round.state["parameters"], client_round.state["buffers"])

    def update_state(self, client_round: ClientRound) -> State:
        """The client's own model after training."""
        vectors = {"parameters": self.work.model.parameters, "buffers": self.work.model.buffers}
        return {name: vector.cpu().clone() for name, vector in vectors.items()}

    def upload(self, client_round: ClientRound) -> Message:
        """Nothing."""
        return {}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The unchanged server."""
        return server
