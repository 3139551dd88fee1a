"""A federation has the results of the simulation, bit for bit; what it does when something fails.

`make test-federation` runs these tests; without Flower they are not collected.
"""

import json
from typing import Any

import numpy as np
import pytest
import small
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from loop import NODES, Federation, LoopGrid
from small import whole

from stamp_core.config.decode import ParameterError
from stamp_core.engine.trees import Store, Tree
from stamp_core.engine.worker import Worker
from stamp_core.methods.base.registry import method_names
from stamp_core.results.records import SCORINGS
from workbench.federation import messages, node, server
from workbench.federation.messages import pack, unpack
from workbench.federation.shares import read_share, write_shares

KINDS = ["fedavg", "stamp", "fedas", "fedl2p"]
ROUNDS = [(experience, round_) for experience in range(3) for round_ in range(2)]


def address(message: Message) -> tuple[int, int]:
    _, _, experience, round_, _ = unpack(message.content)["calls"][0]["round_id"]
    return experience, round_


@pytest.mark.parametrize("kind", KINDS)
def test_a_federation_has_the_results_of_the_simulation(kind, tmp_path):
    """Of two seeds; each node is asked once, and a round is one message to each."""
    federation = Federation(tmp_path, whole(kind), 0, 1)
    found = federation.train()
    for seed, expected in federation.simulate().items():
        small.assert_same(found[seed], expected)
    kinds = [message.metadata.message_type for message in federation.grid.sent]
    assert kinds.count("query") == len(NODES)
    evaluations = 3 if "personal" in whole(kind).kind.models else 0
    assert kinds.count("train") == 2 * len(NODES) * (len(ROUNDS) + evaluations)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_server_goes_on_where_it_was(kind, tmp_path):
    federation = Federation(tmp_path, whole(kind))
    with small.stopped_after(3):
        federation.train()
    (states,) = (tmp_path / "resume").glob("*/states")
    assert len(list(states.iterdir())) == 1  # the results: no state of a client
    federation.grid = LoopGrid(tmp_path)
    found = federation.train()
    rounds = {address(message) for message in federation.grid.trained()}
    assert (0, 0) not in rounds and (2, 1) in rounds
    small.assert_same(found[0], federation.simulate()[0])


@pytest.mark.parametrize("kind", sorted({*method_names()} - {*KINDS, "joint"}))
def test_every_other_method_runs_unchanged(kind, tmp_path):
    """In two experiences of a round; FedDBE without its warm-up, and `joint` not at all (below)."""
    params = {"trained": True} if kind == "feddbe" else small.PARTS.get(kind, {})
    federation = Federation(
        tmp_path, small.tiny(kind, split={"tasks": 2}, training={"rounds": 1}, **params)
    )
    small.assert_same(federation.train()[0], federation.simulate()[0])


def test_local_buffers_are_evaluated_on_nodes_without_class_means(tmp_path):
    experiment = small.tiny(network=small.BATCH_NORM, training={"buffers": "local"})
    federation = Federation(tmp_path, experiment)
    found, expected = federation.train()[0], federation.simulate()[0]
    small.assert_same_weights(found, expected)
    (place,) = [k for k, name in enumerate(SCORINGS) if name == "nearest mean"]
    others = [k for k in range(len(SCORINGS)) if k != place]
    mine, theirs = found.scores["global"], expected.scores["global"]
    np.testing.assert_array_equal(mine[others], theirs[others])
    assert np.isnan(mine[place]).all() and not np.isnan(theirs[place]).all()


def test_no_image_leaves_a_node(tmp_path, monkeypatch):
    """STAMP's memories hold images; all that nodes send are numbers in floating point."""
    replies: list[Tree] = []
    monkeypatch.setattr(
        server, "unpack", lambda content: replies.append(unpack(content)) or replies[-1]
    )
    federation = Federation(tmp_path, whole("stamp", diagnostics={"memory": 3, "angles": True}))
    record = federation.train()[0]
    sent = [tensor for reply in replies for _, tensor in small.tensors(reply)]
    assert len(sent) > 20 and {tensor.dtype for tensor in sent} == {torch.float32}
    assert not record.memory
    kept = list((tmp_path / "node1").glob("states/*/0/*"))
    memory = [dict(small.tensors(Store(file.parent).get(file.stem))) for file in kept]
    assert any(t.dtype == torch.uint8 and t.numel() for own in memory for t in own.values())


def test_a_share_has_the_images_of_its_clients_only(tmp_path):
    experiment = whole("fedavg", split={"images_per_class": 5})
    plan, dataset = small.plan(experiment), experiment.dataset()
    write_shares(dataset, {0: plan}, NODES, tmp_path)
    share = read_share(tmp_path / "node2")
    own = torch.cat([plan.train_indices(dataset, 1, task) for task in range(3)]).unique()
    assert share.clients == (1,) and (share.images.y_train >= 0).nonzero().flatten().equal(own)
    assert share.images.x_train[own].equal(dataset.x_train[own])
    assert int(share.images.x_train.sum()) == int(dataset.x_train[own].sum())


def test_equal_tensors_are_sent_once_and_come_back_as_they_were():
    vector = torch.randn(5)
    tree = {"a": vector, "b": [vector, vector[1:], torch.tensor(-0.0)], "c": {"nan": 1e-300}}
    content = pack(tree, "a test")
    assert len(content.array_records["arrays"]) == 3
    small.assert_equal_trees(unpack(content), tree)


def test_a_node_that_leaves_has_dropped_out_and_comes_back_as_it_was(tmp_path, monkeypatch):
    """It leaves with a round's work done that nobody has heard of, and misses the next one."""
    federation = Federation(tmp_path, whole("fedas"))
    grid = federation.grid

    def come_and_go(message: Message) -> None:
        if message.metadata.message_type != "train":
            return
        if message.metadata.dst_node_id == 102 and address(message) == (1, 0):
            grid.away.add(102)
        if message.metadata.dst_node_id == 103 and address(message) == (1, 1):
            grid.away.clear()

    grid.before = come_and_go
    found = federation.train()[0]
    assert [row["completed"] for row in found.history] == [4, 4, 3, 3, 4, 4]
    asked = [each.metadata.dst_node_id for each in grid.sent if each not in grid.trained()]
    assert sorted(asked) == [101, 102, 102, 103]
    events = [row["events"] for row in found.history]
    assert events[2] == {"node 102 is left out: the node is unavailable": 1}
    events[2].clear()
    small.lose(monkeypatch, 1, [(1, 0), (1, 1)])
    small.assert_same(found, federation.simulate()[0])


def test_who_is_away_at_an_evaluation_has_no_score(tmp_path):
    federation = Federation(tmp_path, whole("fedas"))
    grid = federation.grid

    def leave(message: Message) -> None:
        if message.metadata.message_type == "train" and address(message) == (2, 1):
            grid.away.add(103)

    grid.before = leave
    scores = federation.train()[0].scores["personal"]
    assert np.isnan(scores[:, 2, 3]).all() and not np.isnan(scores[0, 2, :3, 0]).any()


def test_a_round_that_nobody_answers_ends_the_run_which_goes_on_later(tmp_path):
    federation = Federation(tmp_path, whole("fedavg"))

    def leave(message: Message) -> None:
        if message.metadata.message_type == "train" and address(message) == (1, 0):
            federation.grid.away.update(federation.grid.configs)

    federation.grid.before = leave
    with pytest.raises(
        RuntimeError, match=r"0 of 4 clients have answered, 1 must: .*; finished rounds are kept"
    ):
        federation.train()
    federation.grid = LoopGrid(tmp_path)
    small.assert_same(federation.train()[0], federation.simulate()[0])
    assert min(map(address, federation.grid.trained())) == (1, 0)


def test_a_node_with_other_images_is_refused(tmp_path):
    federation = Federation(tmp_path, whole("fedavg"))
    file = tmp_path / "node2" / "share.safetensors"
    other = Federation(
        tmp_path / "other", whole("fedavg", source={**small.DATA, "test_share": 0.5})
    )
    file.write_bytes((other.folder / "node2" / "share.safetensors").read_bytes())
    with pytest.raises(RuntimeError, match=r"clients \[1\]; node 102 .* its share .* is none of"):
        federation.train()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(RuntimeError, match=r"node 102 .*: the digest of share.* does not fit"):
        federation.train()


def test_a_node_that_says_it_has_the_clients_of_another_is_refused(tmp_path):
    federation = Federation(tmp_path, whole("fedavg"))
    federation.grid.configs[102]["clients"] = "1 3"
    with pytest.raises(RuntimeError, match=r"has no images of clients \[3\]"):
        federation.train()
    federation.grid.configs[102] = {**federation.grid.configs[101], "clients": "0"}
    with pytest.raises(RuntimeError, match=r"clients \[1\].*\[0\] are on another node too"):
        federation.train()


@pytest.mark.parametrize("key", ["code", "torch", "federation"])
def test_a_node_with_other_code_is_refused(key, tmp_path, monkeypatch):
    federation, known = Federation(tmp_path, whole("fedavg")), node.identity
    monkeypatch.setattr(node, "identity", lambda *of: {**known(*of), key: "edited"})
    with pytest.raises(RuntimeError, match=f"its {key} is edited, the server's "):
        federation.train()
    assert not federation.grid.trained()


@pytest.mark.parametrize("altered", [False, True])
def test_a_state_that_is_missing_or_altered_is_refused(altered, tmp_path, monkeypatch, capsys):
    """Its client drops out; the other one of the node goes on."""
    federation = Federation(tmp_path, whole("fedas"))
    with small.stopped_after(3):
        federation.train()
    for file in (tmp_path / "node1").glob("states/*/0/*"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        if not altered:
            file.unlink()
    found = federation.train()[0]
    assert [row["completed"] for row in found.history] == [4, 4, 4, 3, 3, 3]
    assert "of client 0 is missing or altered" in capsys.readouterr().out


def test_a_message_that_is_too_long_is_refused_before_it_is_sent(tmp_path, monkeypatch):
    federation = Federation(tmp_path, whole("fedavg"))
    monkeypatch.setattr(messages, "MOST", 4 * small.P)
    with pytest.raises(
        ValueError, match=r"message to the node of clients \[0, 2\] has \d{5} bytes"
    ):
        federation.train()
    assert not federation.grid.trained()
    with pytest.raises(ValueError, match=r"a message has at most 2147483647 \(2 GiB\)"):
        monkeypatch.undo()
        pack({"x": torch.empty(2**31, dtype=torch.uint8)}, "this")


def test_a_second_server_is_refused_in_the_same_folder_and_apart_in_another(tmp_path):
    """While the first trains; the nodes keep the states of both."""
    federation, second = Federation(tmp_path, whole("fedas")), dict[int, Any]()

    def interfere(message: Message) -> None:
        if message.metadata.message_type == "train" and address(message) == (1, 1):
            federation.grid.before = lambda message: None
            with pytest.raises(RuntimeError, match=r"another server trains in .*resume"):
                federation.train()
            second.update(federation.train(resume="another"))

    federation.grid.before = interfere
    first, expected = federation.train()[0], federation.simulate()[0]
    small.assert_same(first, expected)
    small.assert_same(second[0], expected)


@pytest.mark.parametrize("kind, params", [("joint", {}), ("feddbe", small.PARTS["feddbe"])])
def test_methods_that_need_the_images_of_all_clients_say_so(kind, params, tmp_path):
    federation = Federation(tmp_path, small.tiny(kind, **params))
    with pytest.raises((ValueError, RuntimeError), match=r"images of client \d are on another"):
        federation.train()


def test_an_error_on_a_node_ends_the_run(tmp_path):
    federation = Federation(tmp_path, small.tiny(training={"lr": 1e38}))
    with pytest.raises(
        RuntimeError, match=r"node 10. is left out: DivergedError: client ., .* no longer finite"
    ):
        federation.train()


def answered(federation: Federation, content: RecordDict) -> Tree:
    """What node 101 replies."""
    message = Message(content, 101, "train")
    context = Context(0, 101, federation.grid.configs[101], RecordDict(), {})
    tree: Tree = unpack(node.app(message, context).content)
    return tree


def test_a_node_does_only_what_it_may_be_asked_for(tmp_path):
    """No other method of a worker, no folder outside its own, no client of another node."""
    federation = Federation(tmp_path, whole("fedavg"))
    federation.train()
    tree = unpack(federation.grid.trained()[0].content)
    good = unpack(federation.grid.trained()[-1].content)["header"]

    def refusal(header: Tree = good, **changes: Any) -> str:
        calls = [{**tree["calls"][0], **changes}]
        (text,) = answered(federation, pack({"header": header, "calls": calls}, "a test"))[
            "refused"
        ]
        return str(text)

    assert "'diagnose' is not in train_client, evaluate_client" in refusal(name="diagnose")
    assert hasattr(Worker, "diagnose")
    assert "client 3 of seed 0 is not here" in refusal(round_id=[0, 3, 0, 0, False])
    assert "no name of a state" in refusal(state=["../../share", 0])
    assert "the run has the key '../elsewhere'" in refusal({**good, "key": "../elsewhere"})


def test_secure_sums_are_refused_before_a_node_is_asked(tmp_path):
    """Nodes send single uploads, whatever the server's methods read of them."""
    federation = Federation(tmp_path, whole("fedavg", training={"secure_sums": True}))
    with pytest.raises(
        ParameterError, match="secure_sums is True; it must be false in a federation"
    ):
        federation.train()
    assert not federation.grid.sent


def test_pickled_objects_are_refused(tmp_path):
    federation = Federation(tmp_path, whole("fedavg"))
    federation.train()
    content = federation.grid.trained()[0].content
    file = tmp_path / "pickled.npy"
    np.save(file, np.array([{"an": "object"}], dtype=object), allow_pickle=True)
    array = Array("object", (1,), "numpy.ndarray", file.read_bytes())
    names = json.loads(str(content.config_records["texts"]["names"])).values()
    content["arrays"] = ArrayRecord(dict.fromkeys(names, array))
    assert "Object arrays cannot be loaded" in answered(federation, content)["refused"][0]
