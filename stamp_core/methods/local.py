"""Control: no federation. Every client keeps a model of its own and sends nothing."""

from typing import ClassVar

from stamp_core.methods import Group, Log, Message, Method, Nothing, Reply, State, Turn


class Local(Method):
    """Each client fine-tunes its own model along its own tasks."""

    Params: ClassVar = Nothing
    models = ("personal",)
    neutral: ClassVar = None
    group: ClassVar[Group] = "control"

    def new_client(self, client: int, server: State) -> State:
        """The initial weights, the same for everybody."""
        return {"parameters": server["parameters"].clone(), "buffers": server["buffers"].clone()}

    def broadcast(self, server: State, client: int) -> Message:
        """Nothing."""
        return {}

    def receive(self, turn: Turn) -> None:
        """Take up the own model where it was left."""
        self.work.model.load(turn.state["parameters"], turn.state["buffers"])

    def remember(self, turn: Turn) -> State:
        """The own model as training left it."""
        model = self.work.model
        return {
            "parameters": model.parameters.cpu().clone(),
            "buffers": model.buffers.cpu().clone(),
        }

    def upload(self, turn: Turn) -> Message:
        """Nothing."""
        return {}

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The server as it was."""
        return server
