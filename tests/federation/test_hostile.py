"""A federation of five of which one node lies: it is as if that node never answered."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import small
import torch
from flwr.app import Error, Message
from loop import Federation, LoopGrid

from stamp_core.engine.trees import Tree, flatten, read_tree
from stamp_core.results.records import Record
from workbench.federation.messages import pack, unpack

LIAR = 105  # with client 4
Lie = Callable[[Tree], Any]


def put(*path: str, value: Any = None, of: Callable[[Any], Any] | None = None) -> Lie:
    """A lie that puts a value, or what follows `of` that there, at a place of a client's result."""

    def lie(result: Tree) -> None:
        *outer, last = path
        for key in outer:
            result = result[key]
        result[last] = of(result[last]) if of else value

    return lie


def vector(of: Callable[[torch.Tensor], Any]) -> Lie:
    return put("reply", "message", "parameters", of=of)


LIES: dict[str, list[Lie]] = {
    "message.parameters": [
        vector(lambda v: v * torch.nan),
        vector(lambda v: v / 0),
        vector(lambda v: v[1:]),
        vector(lambda v: v[None]),
        vector(torch.Tensor.double),
        vector(torch.Tensor.int),
        vector(lambda v: "text"),
    ],
    "message": [
        put("reply", "message", value={}),
        put("reply", "message", "more", value=torch.ones(1)),
    ],
    "client": [put("reply", "client", value=0)],
    "samples": [put("reply", "samples", value=value) for value in (-(10**6), 0.5, 10**18, 0, True)],
    "loss": [put("reply", "loss", value=value) for value in (np.nan, 1e308)],
    "log": [put("reply", "log", value={})],
    "log.events": [put("reply", "log", "events", value=["a\nb"])],
    "log.seconds": [put("reply", "log", "seconds", value={"work": "long"})],
    "state.digest": [put("state", "digest", value="../../run")],
    "scores": [
        put("scores", value=torch.zeros(2)),
        put("scores", value=torch.full((4, 1, 2), 2.0)),
    ],
    "recursion": [lambda result: "[" * 10**5],
    "results": [lambda result: json.dumps({"results": 5})],
}


def tell(federation: Federation, lie: Lie | None) -> None:
    """Have the last node lie in every round; without a lie it never answers."""

    def altered(message: Message, reply: Message) -> Message:
        if message.metadata.dst_node_id != LIAR or message.metadata.message_type != "train":
            return reply
        if lie is None:
            return Message(Error(5, "gone"), reply_to=message)
        tree = unpack(reply.content)
        if "reply" not in tree["results"]["4"]:  # of an evaluation
            return reply
        text = lie(tree["results"]["4"])
        content = pack(tree, "a lie")
        if text:
            content.config_records["texts"]["tree"] = text
        return Message(content, reply_to=message)

    federation.grid.altered = altered


def five(folder: Any, kind: str = "fedavg", **options: Any) -> Federation:
    experiment = small.whole(kind, split={"clients": 5, "tasks": 2}, **options)
    return Federation(folder, experiment, nodes=[[client] for client in range(5)])


def told(record: Record) -> list[str]:
    """The events of all rounds, which are taken out of the history."""
    events = [event for row in record.history for event in row["events"]]
    for row in record.history:
        row["events"] = {}
    return events


@pytest.fixture(scope="module")
def honest_four(tmp_path_factory: pytest.TempPathFactory) -> Record:
    federation = five(tmp_path_factory.mktemp("four"))
    tell(federation, None)
    record = federation.train()[0]
    assert set(told(record)) == {f"node {LIAR} is left out: gone"}
    return record


@pytest.mark.parametrize(
    "key, lie",
    [(key, lie) for key, lies in LIES.items() for lie in lies],
    ids=lambda v: "lie" if callable(v) else str(v)[:30],  # the same in every process
)
def test_a_bad_reply_is_as_none(key, lie, tmp_path, honest_four):
    federation = five(tmp_path)
    tell(federation, lie)
    record = federation.train()[0]
    events = told(record)
    assert len(events) == 4 and all(f"node {LIAR} is left out" in each for each in events)
    assert all(key in each and "\n" not in each for each in events)
    small.assert_same(record, honest_four)


def test_a_poisoned_federation_resumes_with_honest_nodes(tmp_path):
    records = []
    for name, lie in (("silent", None), ("poisoned", LIES["message.parameters"][0])):
        federation = five(tmp_path / name)
        tell(federation, lie)
        with small.stopped_after(3):
            federation.train()
        (file,) = (federation.folder / "resume").glob("*/run.safetensors")
        arrays = flatten(read_tree(file)[0]["server"])[1].values()
        assert all(np.isfinite(array).all() for array in arrays)
        federation.grid = LoopGrid(federation.folder, [[client] for client in range(5)])
        records.append(federation.train()[0])
        assert len(told(records[-1])) == 3
    small.assert_same(*records)


def test_what_only_the_method_can_read_costs_the_reply_that_it_cannot_read(tmp_path):
    records = []
    for name, lie in (
        ("silent", None),
        ("lie", put("reply", "message", "trace", value=torch.ones(1, 2))),
    ):
        federation = five(tmp_path / name, "fedas")
        tell(federation, lie)
        records.append(federation.train()[0])
    assert [f"node {LIAR} is left out: client 4: " in each for each in told(records[1])] == [
        True
    ] * 4
    small.assert_same_weights(*records)


def test_fewer_good_replies_than_the_minimum_end_the_training(tmp_path):
    federation = five(tmp_path)
    tell(federation, LIES["samples"][0])
    with pytest.raises(
        RuntimeError, match=r"4 of 5 .* 5 must: node 105 .*samples is -1000000; .* kept"
    ):
        federation.train(minimum=5)


@pytest.mark.parametrize("clients", [[0, 1, 2, 3, 4], [4], "all"])
def test_a_node_has_the_clients_of_the_share_whose_digest_it_knows(clients, tmp_path):
    """The first node claims the others', as what all nodes know of the last one's share."""
    federation = five(tmp_path)

    def claim(message: Message, reply: Message) -> Message:
        if message.metadata.dst_node_id != 101:
            return reply
        header = unpack(message.content)["header"]
        (known,) = (key for key, own in header["shares"].items() if own == [4])
        tree = {
            "clients": clients,
            "share": known if clients == [4] else unpack(reply.content)["share"],
        }
        return Message(pack(tree, "a claim"), reply_to=message)

    federation.grid.altered = claim
    with pytest.raises(RuntimeError, match=r"^no node has clients \[0\]; node 101 is left out:"):
        federation.train()
