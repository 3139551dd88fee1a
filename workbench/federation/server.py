"""The server: the engine's training loop, with an executor that sends client rounds to nodes."""

import fcntl
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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
from stamp_core.methods.base.method import DivergedError, Log, Reply, State
from stamp_core.results.records import Record, tree_bytes
from workbench.federation.messages import pack, unpack
from workbench.federation.node import identity
from workbench.federation.replies import LONGEST, read_result, read_scores, require
from workbench.federation.shares import own_experiment, own_plan, read_share

Aggregate = Callable[[State, list[Reply], Log], State]

# What nodes do, and how the replies are read; all other work is done at the server.
REMOTE: dict[Any, Any] = {Worker.train_client: read_result, Worker.evaluate_client: read_scores}
FAILURES = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
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


@dataclass
class FederationExecutor:
    """Sends client rounds to the nodes; clients of one that does not answer well drop out."""

    grid: Grid
    worker: Worker
    headers: Mapping[int, Tree]
    shares: Mapping[str, list[int]]  # the clients by digest
    timeout: float
    minimum: int  # good results, or all those asked for, without which a round ends the training
    workers = 1  # for what is done at the server
    lock: threading.Lock = field(default_factory=threading.Lock)  # seeds take turns
    nodes: dict[int, list[int]] = field(default_factory=dict)  # the clients of each that is there
    sources: dict[int, int] = field(default_factory=dict)  # the node that has answered for a client
    refusals: list[str] = field(default_factory=list)
    events: dict[int, list[str]] = field(default_factory=dict)  # of each seed's round

    def map(self, work: Callable[..., Any], each: Iterable[tuple[Any, ...]]) -> list[Any]:
        """The results for each of the arguments, in order; of client rounds those finished."""
        calls = list(each)
        if not calls or work not in REMOTE:
            with self.worker.lock:
                return SerialExecutor(self.worker).map(work, calls)
        with self.lock:
            before = len(self.refusals)
            results = self.ask(work, calls)
            refusals = self.refusals[before:]
        if len(results) < (least := max(1, min(self.minimum, len(calls)))):
            why = "; ".join(refusals) or "no node is there"
            text = f"{len(results)} of {len(calls)} clients have answered, {least} must: {why}"
            raise RuntimeError(f"{text}; finished rounds are kept: start again later")
        seed, clients = calls[0][0].seed, [round_id.client for round_id, *_ in calls]
        if work is Worker.train_client:
            found = [results[client] for client in clients if client in results]
            self.events[seed] = found[0].reply.log.events
        else:
            shape = len(self.worker.runtime.scorings), 1, self.worker.plans[seed].tasks
            unknown = torch.full(shape, torch.nan)
            found = [results.get(client, unknown) for client in clients]
        self.events[seed] += refusals  # in the round's history
        return found

    def ask(self, work: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> dict[int, Any]:
        """The good results by client."""
        by_client = {call[0].client: call for call in calls}
        seed, messages = calls[0][0].seed, {}
        asked = {n: [u for u in own if u in by_client] for n, own in self.find_nodes().items()}
        for node, clients in asked.items():
            if clients:
                own = [call_tree(work.__name__, *by_client[client]) for client in clients]
                what = f"the message to the node of clients {clients}"
                messages[node] = pack({"header": self.headers[seed], "calls": own}, what)
        results: dict[int, Any] = {}
        for node, tree in self.exchange(messages, "train").items():
            for client in asked[node]:
                with self.refusing(node, f"client {client}: "):
                    found, (round_id, _, sent, *_) = tree.get("results", {}), by_client[client]
                    require(isinstance(found, dict), "results", found, "a block by client")
                    if str(client) in found:
                        given = found[str(client)], self.worker, round_id, sent
                        results[client] = REMOTE[work](*given)
                        self.sources[client] = node
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
            self.nodes[node] = []
            with self.refusing(node):
                own = sorted(self.shares.get(tree["share"], [])) if tree else []
                clients = [client for client in own if client in tree["clients"]]
                said = sorted(tree.get("clients", []))
                require(said == clients, "clients", said, f"of its share's, {own}")
                both = sorted(set().union(*self.nodes.values()).intersection(clients))
                require(not both, "clients", clients, f"others: {both} are on another node too")
                self.nodes[node] = clients
        return self.nodes

    def exchange(self, contents: Mapping[int, RecordDict], kind: str) -> dict[int, Tree]:
        """The replies by node; names nodes that do not answer or refuse."""
        if not contents:
            return {}
        given = contents.items()
        messages = [Message(content, node, kind, ttl=self.timeout) for node, content in given]
        replies, silent, reasons = dict[int, Tree](), set(contents), set[str]()
        for reply in self.grid.send_and_receive(messages, timeout=self.timeout):
            node = reply.metadata.src_node_id
            if reply.has_error():
                reasons.add(reply.error.reason)
            elif node in silent:
                silent.remove(node)
                replies[node] = {}
                with self.refusing(node):
                    tree = unpack(reply.content)
                    if refused := tree.pop("refused", ()):
                        self.refuse(node, "; ".join(map(str, refused)))
                    replies[node] = tree
        for node in sorted(silent):
            self.refuse(node, "; ".join(reasons) or "no answer")
        return replies

    @contextmanager
    def refusing(
        self, node: int, what: str = "", events: list[str] | None = None
    ) -> Iterator[None]:
        """A context that reads what a node has sent; an error leaves it out."""
        try:
            yield
        except Exception as error:  # whatever the bytes of a stranger make a reader raise
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            text = self.refuse(node, f"{what}{kind}{error}")
            if events is not None:
                events.append(text)

    def refuse(self, node: int, reason: str) -> str:
        """Say in one line that a node is left out, and why."""
        text = "".join(each if each.isprintable() else " " for each in reason)[:LONGEST]
        self.refusals.append(f"node {node} is left out: {text}")
        print(self.refusals[-1], flush=True)
        return self.refusals[-1]

    def aggregate(
        self, aggregate: Aggregate, server: State, replies: list[Reply], log: Log
    ) -> State:
        """The server's next state, without replies from which alone no finite one follows."""

        def attempt(given: list[Reply], log: Log) -> State:
            state = aggregate(server, given, log)
            if not all(np.isfinite(array).all() for array in flatten(state)[1].values()):
                raise DivergedError("the server's state is no longer finite")
            return state

        try:
            return attempt(replies, log)
        except FAILURES:
            good = list[Reply]()
            for reply in replies:
                node, what = self.sources[reply.client], f"client {reply.client}: "
                with self.refusing(node, what, log.events):
                    attempt([reply], Log())
                    good.append(reply)
            if not max(1, self.minimum) <= len(good) < len(replies):
                raise
        return attempt(good, log)

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
    minimum: int = 1,
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
        executor = FederationExecutor(grid, worker, headers, shares, timeout, minimum)
        vars(worker.method)["aggregate"] = partial(executor.aggregate, worker.method.aggregate)
        executor.wait_for(range(experiment.setting.split.clients), wait)
        return worker, executor

    if experiment.setting.training.secure_sums:
        right = "false in a federation, whose nodes send single uploads"
        raise invalid("training.secure_sums", True, right)
    counts = json.loads((data / "counts.json").read_text())
    plans = {
        seed: own_plan(Plan.load(data / f"plan-{seed}.json"), (), counts[str(seed)])
        for seed in seeds
    }
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
        # Of the digest, by which a node proves to have a share, the others know the digest only.
        "shares": {tree_digest(share, {}): clients for share, clients in shares.items()},
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
    where = Path(config["data"]), resume
    records = train_federation(grid, experiment, seeds, *where, *limits, int(config["minimum"]))
    save_records(records, Path(config["out"]), resume)


app = ServerApp()
app.main()(main)
