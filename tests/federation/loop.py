"""A federation in this process: a grid that calls the program of nodes, which come and go."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import small
from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from stamp_core.engine.experiment import Experiment
from stamp_core.results.records import Record
from workbench.federation import node
from workbench.federation.server import federated, train_federation
from workbench.federation.shares import write_shares

NODES = ([0, 2], [1], [3])  # their clients


class LoopGrid(Grid):
    """Nodes in this process, each with its folder; those of `away` are not there."""

    def __init__(self, folder: Path, nodes: Sequence[Sequence[int]] = NODES) -> None:
        self.configs: dict[int, dict[str, Any]] = {
            100 + place: {
                "data": str(folder / f"node{place}"),
                "clients": " ".join(map(str, clients)),
            }
            for place, clients in enumerate(nodes, start=1)
        }
        TaskIdentity.run_id = TaskIdentity.task_id = 1  # as Flower does when it starts a server
        TaskIdentity.node_id = 1
        self.sent: list[Message] = []
        self.away: set[int] = set()
        self.before: Callable[[Message], None] = lambda message: None
        self.altered: Callable[[Message, Message], Message] = lambda message, reply: reply

    def get_node_ids(self) -> list[int]:
        return [node for node in self.configs if node not in self.away]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return [reply for message in reversed([*messages]) for reply in self.deliver(message)]

    def deliver(self, message: Message) -> list[Message]:
        """The reply of a node; an error if it leaves before it has answered."""
        self.sent.append(message)
        receiver = message.metadata.dst_node_id
        self.before(message)
        context = Context(0, receiver, self.configs[receiver], RecordDict(), {})
        reply = self.altered(message, node.app(message, context))
        if receiver in self.away:  # what it has done is on its disk
            reply = Message(Error(5, "the node is unavailable"), reply_to=message)
        return [reply]

    def trained(self) -> list[Message]:
        return [each for each in self.sent if each.metadata.message_type == "train"]

    def set_run(self, run: Any) -> None:
        """Do nothing."""

    run = create_message = push_messages = pull_messages = None  # type: ignore[assignment]


class Federation:
    def __init__(
        self,
        folder: Path,
        experiment: Experiment,
        *seeds: int,
        nodes: Sequence[Sequence[int]] = NODES,
    ) -> None:
        self.folder, self.experiment, self.seeds = folder, experiment, seeds or (0,)
        self.plans = small.plans(experiment, *self.seeds)
        write_shares(experiment.dataset(), self.plans, nodes, folder)
        self.grid = LoopGrid(folder, nodes)

    def train(self, resume: str = "resume", minimum: int = 1) -> dict[int, Record]:
        return train_federation(
            self.grid,
            self.experiment,
            self.seeds,
            self.folder / "server",
            self.folder / resume,
            wait=0,
            minimum=minimum,
        )

    def simulate(self) -> dict[int, Record]:
        experiment = federated(self.experiment)
        return {seed: small.run(experiment, plan) for seed, plan in self.plans.items()}
