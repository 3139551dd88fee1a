"""A node: trains the clients it has, keeps their states on its own disk, sends no image.

Its configuration says `data`, the folder with its share, and `clients`; `device` is optional. Every
message brings the experiment, the plan and the digests by which the node refuses what does not fit.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from stamp_core.client.runtime import RoundId
from stamp_core.config.decode import build
from stamp_core.config.schema import Setting
from stamp_core.core.fingerprint import code_digest
from stamp_core.data.plan import Plan
from stamp_core.engine.executor import SerialExecutor
from stamp_core.engine.experiment import Experiment
from stamp_core.engine.trees import UNUSABLE, Store, Stored, Tree, flatten, tree_digest
from stamp_core.engine.worker import Worker
from stamp_core.methods.base.method import State
from stamp_core.methods.base.registry import get_method
from workbench.federation.messages import pack, result_to_tree, unpack
from workbench.federation.shares import own_experiment, own_plan, read_share

MAY_DIFFER = "device"  # part of an identity: then results differ in their last digits


class RefusedError(RuntimeError):
    """What a node does not do, because something is not what the plan says."""


class Node:
    """What answers one message: a worker with the clients of this machine."""

    def __init__(self, header: Tree, config: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self.clients = [int(client) for client in str(config["clients"]).split()]
        folder, device = Path(str(config["data"])), str(config.get("device", "cpu"))
        share = read_share(folder)
        if set(header["shares"].get(tree_digest(share.digest, {}), ())) != set(share.clients):
            raise RefusedError(f"its share {share.digest[:12]} is none of the plan's")
        if others := sorted({*self.clients} - {*share.clients}):
            raise RefusedError(f"its share has no images of clients {others}")
        if not re.fullmatch("[0-9a-f]{16}", header["key"]):
            raise RefusedError(f"the run has the key {header['key']!r}")
        plan = build(Plan, header["plan"], "the plan in a message")
        self.plan, self.share = own_plan(plan, self.clients), share.digest
        if self.plan.data_digest != share.images.digest:
            raise RefusedError(f"its images are of the data set {share.images.digest[:12]}")
        experiment = own_experiment(read_experiment(header["experiment"]), share.images)
        require_identity(identity(experiment, self.plan, device), header["identity"])
        self.worker = Worker(experiment, {self.plan.seed: self.plan}, device)
        self.here = SerialExecutor(self.worker)
        self.states = folder / "states" / header["key"]

    def answer(self, tree: Tree) -> Tree:
        """The results of calls by client, and what is refused; without calls, the clients."""
        if "calls" not in tree:
            return {"clients": self.clients, "share": self.share}
        results: Tree = {}
        refused: list[str] = []
        for call in tree["calls"]:
            try:
                if call["name"] not in CALLS:
                    raise RefusedError(f"{call['name']!r} is not in {', '.join(CALLS)}")
                results[str(call["round_id"][1])] = CALLS[call["name"]](self, call)
            except RefusedError as error:
                refused.append(str(error))
        return {"results": results, "refused": refused}

    def train_client(self, call: Tree) -> Tree:
        """The result of a client round; the new state is kept beside the one it started from."""
        round_id, state = self.arguments(call)
        store = self.store(round_id.client)
        store.keep_only({call["state"][0]})
        (result,) = self.here.map(Worker.train_client, [(round_id, state, call["message"])])
        assert not isinstance(result.state, Stored)
        reply = replace(result.reply, state={})
        return result_to_tree(replace(result, state=store.put(result.state), reply=reply))

    def evaluate_client(self, call: Tree) -> Tree:
        """Scores, without class means, of a client's personal model or of the global one."""
        round_id, state = self.arguments(call)
        given = (round_id, state, call["message"], call["personal"], False)
        return {"scores": self.here.map(Worker.evaluate_client, [given])[0]}

    def arguments(self, call: Tree) -> tuple[RoundId, State]:
        """The address of a call and the state of its client, verified by its digest."""
        round_id, digest = RoundId(*call["round_id"]), call["state"][0]
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise RefusedError(f"{digest!r} is no name of a state")
        if round_id.client not in self.clients or round_id.seed != self.plan.seed:
            raise RefusedError(f"client {round_id.client} of seed {round_id.seed} is not here")
        try:
            return round_id, self.store(round_id.client).get(digest)
        except UNUSABLE:
            states = self.worker.method.initial_states(self.plan).clients
            initial = next(islice(states, round_id.client, None))
        if tree_digest(*flatten(initial)) != digest:
            text = f"the state {digest[:12]} of client {round_id.client} is missing or altered"
            raise RefusedError(text)
        return round_id, initial

    def store(self, client: int) -> Store:
        return Store(self.states / str(client))


# What a message may ask for.
CALLS: dict[str, Callable[[Node, Tree], Tree]] = {
    "train_client": Node.train_client,
    "evaluate_client": Node.evaluate_client,
}


def read_experiment(resolved: Tree) -> Experiment:
    """The experiment of resolved parameters."""
    setting = build(Setting, resolved["setting"], "the setting in a message")
    values = dict(resolved["method"])
    name, kind = values.pop("name"), get_method(values.pop("kind"))
    return Experiment(setting, name, kind, build(kind.Params, values, "the method in a message"))


def identity(experiment: Experiment, plan: Plan, device: str) -> dict[str, str]:
    """What determines the results, and the code of this package."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    code = "".join(code_digest(path) for path in files)
    federation = hashlib.sha256(code.encode()).hexdigest()
    return {**experiment.identity(plan, device), "federation": federation}


def require_identity(mine: Mapping[str, str], servers: Mapping[str, str]) -> None:
    """Refuse a server whose parameters, plan, code or torch are others."""
    for key in sorted({*mine, *servers} - {MAY_DIFFER}):
        here, there = mine.get(key, "absent"), servers.get(key, "absent")
        if here != there:
            raise RefusedError(f"its {key} is {here[:12]}, the server's {there[:12]}")


def answer(message: Message, context: Context) -> Message:
    """The reply to any message; after an error the node's clients are left out."""
    try:
        tree = unpack(message.content)
        content = pack(
            Node(tree["header"], context.node_config).answer(tree), "the reply of a node"
        )
    except Exception as error:
        content = pack({"refused": [f"{type(error).__name__}: {error}"]}, "an error")
    return Message(content, reply_to=message)


app = ClientApp()
app.query()(answer)
app.train()(answer)
