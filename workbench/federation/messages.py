"""Messages between server and nodes: trees as JSON and named arrays, never pickled."""

import json
from dataclasses import replace
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from stamp_core.engine.trees import Stored, Tree, flatten, unflatten
from stamp_core.engine.worker import ClientResult
from stamp_core.methods.base.method import Log, Reply

MOST = 2**31 - 1  # bytes that Flower accepts


def pack(tree: Tree, what: str) -> RecordDict:
    """A tree as Flower's records, in which equal tensors are one array; `what` is for errors."""
    text, arrays = flatten(tree)
    places: dict[object, str] = {}
    names, sent = {}, {}
    for name, array in arrays.items():
        place = (array.__array_interface__["data"][0], array.shape, array.dtype.str)
        names[name] = places.setdefault(place, str(len(places)))
        sent[names[name]] = array
    size = len(text) + sum(array.nbytes for array in sent.values())
    if size > MOST:
        raise ValueError(f"{what} has {size} bytes; a message has at most {MOST} (2 GiB)")
    texts = ConfigRecord({"tree": text, "names": json.dumps(names)})
    record = ArrayRecord({name: Array(array) for name, array in sent.items()})
    return RecordDict({"texts": texts, "arrays": record})


def unpack(content: RecordDict) -> Any:
    """The inverse of `pack`; numpy reads the arrays and refuses pickled objects."""
    texts = content.config_records["texts"]
    arrays = {name: array.numpy() for name, array in content.array_records["arrays"].items()}
    names = json.loads(str(texts["names"]))
    return unflatten(str(texts["tree"]), {name: arrays[sent] for name, sent in names.items()})


def result_to_tree(result: ClientResult) -> Tree:
    """The result of a client round as a tree; its state is named only."""
    assert isinstance(result.state, Stored)
    reply = {**vars(result.reply), "state": {}, "log": vars(result.reply.log)}
    return {**vars(result), "reply": reply, "state": vars(result.state)}


def tree_to_result(tree: Tree) -> ClientResult:
    """The inverse of `result_to_tree`."""
    reply = Reply(**{**tree["reply"], "state": {}, "log": Log(**tree["reply"]["log"])})
    reply = replace(reply, local=None)  # it stays on the node
    return ClientResult(**{**tree, "reply": reply, "state": Stored(**tree["state"])})
