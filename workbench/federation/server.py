"""The server: the engine's training loop, with an executor that sends client rounds to nodes."""

import fcntl
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from stamp_core.client.runtime import RoundId
from stamp_core.config.decode import invalid, to_plain
from stamp_core.config.params import parse_seeds
from stamp_core.data.plan import Plan
from stamp_core.engine.executor import Executor, SerialExecutor
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.engine.train import save_records, train
from stamp_core.engine.trees import Store, Stored, Tree, flatten, tree_digest
from stamp_core.engine.worker import Worker
from stamp_core.results.records import Record, tree_bytes
from workbench.federation.messages import pack, tree_to_result, unpack
from workbench.federation.node import identity
from workbench.federation.shares import own_experiment, own_plan, read_share

REMOTE = {Worker.train_client, Worker.evaluate_client}  # all other work is done at the server
POLL = 1.0  # seconds between two looks at which nodes are there


class Names(Store):
    """Names of states that are on the nodes, who verify them whenever they read one."""

    def __init__(self) -> None:
        super().__init__(Path())

    def put(self, tree: Tree, flush: bool = True) -> Stored:
        """The name of a tree; nothing is written."""
        return Stored(tree_digest(*flatten(tree)), tree_bytes(tree))

    def verify(self, digest: str) -> None:
        """Do nothing."""


class FederationExecutor:
    """Sends client rounds to the nodes; clients of one that does not answer drop out."""

    def __init__(
        self, grid: Grid, worker: Worker, headers: Mapping[int, Tree], timeout: float
    ) -> None:
        self.grid, self.worker, self.headers, self.timeout = grid, worker, headers, timeout
        self.workers = 1  # for what is done at the server
        self.nodes: dict[int, list[int]] = {}  # the clients of each node that is there
        self.lock = threading.Lock()  # seeds take turns
        self.refusals: list[str] = []

    def map(self, work: Callable[..., Any], each: Iterable[tuple[Any, ...]]) -> list[Any]:
        """The results for each of the arguments, in order; of client rounds those finished."""
        calls = list(each)
        if not calls or work not in REMOTE:
            with self.worker.lock:
                return SerialExecutor(self.worker).map(work, calls)
        with self.lock:
            results = self.ask(work.__name__, calls)
        if not results:
            raise RuntimeError("no node has answered; finished rounds are kept: start again later")
        clients = [round_id.client for round_id, *_ in calls]
        if work is Worker.train_client:
            return [tree_to_result(results[client]) for client in clients if client in results]
        tasks = self.worker.plans[calls[0][0].seed].tasks
        unknown = {"scores": torch.full((len(self.worker.runtime.scorings), 1, tasks), torch.nan)}
        return [results.get(client, unknown)["scores"] for client in clients]

    def ask(self, name: str, calls: Sequence[tuple[Any, ...]]) -> dict[int, Tree]:
        by_client = {call[0].client: call_tree(name, *call) for call in calls}
        seed, messages = calls[0][0].seed, {}
        for node, clients in self.find_nodes().items():
            own = [by_client[client] for client in clients if client in by_client]
            if own:
                what = f"the message to the node of clients {clients}"
                messages[node] = pack({"header": self.headers[seed], "calls": own}, what)
        results: dict[int, Tree] = {}
        for node, tree in self.exchange(messages, "train").items():
            found = tree.get("results", {})
            results |= {c: found[str(c)] for c in self.nodes[node] if str(c) in found}
        return results

    def find_nodes(self) -> dict[int, list[int]]:
        """The clients of each node that is there; who has come is asked once which it has."""
        there = set(self.grid.get_node_ids())
        self.nodes = {node: clients for node, clients in self.nodes.items() if node in there}
        if not (new := there - self.nodes.keys()):
            return self.nodes
        header = next(iter(self.headers.values()))
        question = pack({"header": header}, "the question for a node's clients")
        for node, tree in sorted(self.exchange(dict.fromkeys(new, question), "query").items()):
            clients = tree.get("clients", [])
            if both := set().union(*self.nodes.values()).intersection(clients):
                self.refuse(node, f"clients {sorted(both)} are on another node too")
                clients = []
            self.nodes[node] = clients
        return self.nodes

    def exchange(self, contents: Mapping[int, RecordDict], kind: str) -> dict[int, Tree]:
        """The replies by node; names nodes that do not answer or refuse, raises their errors."""
        if not contents:
            return {}
        given = contents.items()
        messages = [Message(content, node, kind, ttl=self.timeout) for node, content in given]
        replies, reasons = {}, set[str]()
        for reply in self.grid.send_and_receive(messages, timeout=self.timeout):
            if reply.has_error():
                reasons.add(reply.error.reason)
            else:
                replies[reply.metadata.src_node_id] = unpack(reply.content)
        silent = ["; ".join(reasons) or "no answer"]
        for node in contents:
            tree = replies.get(node, {"refused": silent})
            if "error" in tree:
                raise RuntimeError(f"node {node}: {tree['error']}")
            for reason in tree.get("refused", ()):
                self.refuse(node, reason)
        return replies

    def refuse(self, node: int, reason: str) -> None:
        self.refusals.append(f"node {node} is left out: {reason}")
        print(self.refusals[-1], flush=True)

    def wait_for(self, clients: Iterable[int], seconds: float) -> None:
        end = time.monotonic() + seconds
        while missing := {*clients}.difference(*self.find_nodes().values()):
            if time.monotonic() > end:
                text = f"no node has clients {sorted(missing)}"
                raise RuntimeError("; ".join([text, *self.refusals]))
            time.sleep(POLL)

    def close(self) -> None:
        """Do nothing: the nodes are not this program's."""


def call_tree(
    name: str, round_id: RoundId, state: Stored, message: Tree, personal: bool = False
) -> Tree:
    """A call of a worker's method as plain values and tensors."""
    address, stored = list(astuple(round_id)), list(astuple(state))
    call = {"name": name, "round_id": address, "state": stored}
    return {**call, "message": message, "personal": personal}


def federated(experiment: Experiment) -> Experiment:
    """The experiment without the record of remembered images, which would leave a node."""
    diagnostics = replace(experiment.setting.diagnostics, memory=0)
    return replace(experiment, setting=replace(experiment.setting, diagnostics=diagnostics))


def train_federation(
    grid: Grid,
    experiment: Experiment,
    seeds: Iterable[int],
    data: Path,
    resume: Path,
    wait: float = 600,
    timeout: float = 3600,
) -> dict[int, Record]:
    """The records of an experiment that nodes train; `wait` and `timeout` are in seconds."""

    def start(
        experiment: Experiment, plans: Mapping[int, Plan], _: int, device: str, resume: Path | None
    ) -> tuple[Worker, Executor]:
        torch.set_num_threads(1)
        worker = Worker(experiment, plans, device)
        worker.stores = {seed: Names() for seed in plans}
        headers = {
            seed: header(experiment, plan, device, shares, token) for seed, plan in plans.items()
        }
        executor = FederationExecutor(grid, worker, headers, timeout)
        executor.wait_for(range(experiment.setting.split.clients), wait)
        return worker, executor

    if experiment.setting.training.secure_sums:
        right = "false in a federation, whose nodes send single uploads"
        raise invalid("training.secure_sums", True, right)
    plans = {seed: own_plan(Plan.load(data / f"plan-{seed}.json"), ()) for seed in seeds}
    shares = json.loads((data / "nodes.json").read_text())
    mine = own_experiment(federated(experiment), read_share(data).images)
    with only_server(resume) as token:
        return train(mine, plans, 1, "cpu", resume, start)


def header(experiment: Experiment, plan: Plan, device: str, shares: Tree, token: str) -> Tree:
    """What every message brings: by it a node works, or refuses to."""
    run = f"{token} {experiment.name} {plan.seed}"
    return {
        "experiment": experiment.resolved(),
        "plan": to_plain(plan),
        "identity": identity(experiment, plan, device),
        "shares": shares,  # the clients by digest
        "key": hashlib.sha256(run.encode()).hexdigest()[:16],  # names the states on the nodes
    }


@contextmanager
def only_server(resume: Path) -> Iterator[str]:
    """A token that names a training on the nodes; a second server in the folder is refused."""
    resume.mkdir(parents=True, exist_ok=True)
    with (resume / "federation").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another server trains in {resume}") from None
        file.seek(0)
        token = file.read()
        if not token:
            token = secrets.token_hex(8)
            file.write(token)
            file.flush()
        yield token


def main(grid: Grid, context: Context) -> None:
    """Train what the run's configuration says, and save the records."""
    config = {key: str(value) for key, value in context.run_config.items()}
    experiment = load_experiment(config["setting"], config["method"])
    resume, seeds = Path(config["resume"]), parse_seeds(config["seeds"])
    limits = float(config["wait"]), float(config["timeout"])
    records = train_federation(grid, experiment, seeds, Path(config["data"]), resume, *limits)
    save_records(records, Path(config["out"]), resume)


app = ServerApp()
app.main()(main)
