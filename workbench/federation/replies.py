"""What a node may reply, checked before any of it is used; an error names the key in one line."""

import math
import re
import reprlib
from collections.abc import Callable
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from torch import Tensor

from stamp_core.client.runtime import RoundId
from stamp_core.data.plan import Plan
from stamp_core.engine.trees import Stored
from stamp_core.engine.worker import ClientResult, Worker
from stamp_core.methods.base.method import Message, Method
from workbench.federation.messages import tree_to_result

LARGEST = 1e100  # of a number: sums of such numbers are finite
LONGEST = 300  # characters of a text

# What a field of a type holds, and how an error says it.
VALID: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (lambda v: type(v) is int and 0 <= v < 2**53, "a whole number that is not negative"),
    float: (lambda v: type(v) in (int, float) and not abs(v) > LARGEST, "a finite number"),
    str: (lambda v: isinstance(v, str) and v.isprintable() and len(v) <= LONGEST, "a short line"),
    Tensor: (lambda v: isinstance(v, Tensor) and bool(v.isfinite().all()), "finite values"),
}


def require(valid: bool, key: str, value: object, right: str) -> None:
    """Refuse a reply in which `key` is `value`, unless that is `valid`."""
    if not valid:
        raise ValueError(f"{key} is {in_short(value)}; it must be {right}")


def in_short(value: object) -> str:
    """A value in an error: of a tensor its type and shape."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}".removeprefix("torch.")
    return reprlib.repr(value)


def conform(value: Any, hint: Any, key: str) -> None:
    """Refuse a value of another type than that of a field; numbers may be NaN, tensors not."""
    of = get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        same = isinstance(value, dict) and value.keys() == hints.keys()
        require(same, key, value, f"a block of {', '.join(hints)}")
        for name, each in hints.items():
            conform(value[name], each, f"{key}.{name}")
    elif get_origin(hint) in (dict, list):
        require(isinstance(value, get_origin(hint)), key, value, f"a {get_origin(hint).__name__}")
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            conform(str(name), str, f"a key of {key}")
            conform(item, of[-1], f"{key}.{name}")
    elif get_origin(hint) is UnionType:
        if value is not None:
            conform(value, of[0], key)
    elif hint is not Any:
        valid, right = VALID.get(hint, (lambda v: False, "absent"))
        require(valid(value), key, value, right)


def read_result(tree: Any, worker: Worker, round_id: RoundId, sent: Message) -> ClientResult:
    """The result of a client round in a reply; `sent` is the message that the client had."""
    reply, state, scores = tree["reply"], tree["state"], tree["scores"]
    conform({**tree, "state": None, "scores": None}, ClientResult, "result")
    conform(state, Stored, "state")
    name = state["digest"]
    require(re.fullmatch("[0-9a-f]{64}", name) is not None, "state.digest", name, "a sha256")
    require(reply["client"] == round_id.client, "client", reply["client"], f"{round_id.client}")
    least, most = sample_limits(worker.plans[round_id.seed], round_id, worker)
    samples, steps = reply["samples"], reply["sgd_steps"]
    require(least <= samples <= most, "samples", samples, f"{least} to {most}, by the plan")
    require(not (steps and math.isnan(reply["loss"])), "loss", reply["loss"], "a finite number")
    for spent in (tree["seconds"], *reply["log"]["seconds"].values()):
        require(spent >= 0, "seconds", spent, "at least 0")
    check_message(reply["message"], sent, worker.method, samples)
    if scores is not None:
        read_scores(tree, worker, round_id, sent)
    return tree_to_result(tree)


def read_scores(tree: Any, worker: Worker, round_id: RoundId, sent: Message) -> Tensor:
    """The scores in a reply: shares, or NaN where they are undefined.  # [scorings, 1, T]"""
    scores: Tensor = tree["scores"]
    shape = [len(worker.runtime.scorings), 1, worker.plans[round_id.seed].tasks]
    valid = isinstance(scores, Tensor) and scores.is_floating_point()
    require(valid and list(scores.shape) == shape, "scores", scores, f"floats {shape}")
    require(not ((scores < 0) | (scores > 1)).any(), "scores", scores, "between 0 and 1")
    return scores


def sample_limits(plan: Plan, round_id: RoundId, worker: Worker) -> tuple[int, int]:
    """The fewest and the most images that a client may say it has trained on."""
    every = len(worker.runtime.dataset.y_train)  # of tasks whose images the plan does not list
    tasks = plan.clients[round_id.client]
    counts = [every * bool(t.classes) if t.train is None else len(t.train) for t in tasks]
    own = tasks[round_id.experience % plan.tasks]
    return int(bool(own.classes and own.train)), sum(counts)


def check_message(message: Message, sent: Message, method: Method, samples: int) -> None:
    """Refuse an upload whose vectors of the model are not of the form of those that were sent.

    Clients of a method without a global model may send parts of them.
    """
    whole = "global" in method.models
    names = (*method.shared_vectors(), *method.averaged_vectors(), *method.extra_networks)
    own = [name for name in dict.fromkeys(names) if name in sent]
    for name in own if whole and samples else ():
        require(name in message, f"message.{name}", None, in_short(sent[name]))
    for name in message.keys() - own if type(method).upload is Method.upload else ():
        require(False, f"message.{name}", message[name], "left out")
    for name in message.keys() & sent.keys():
        found, right = message[name], sent[name]
        same = found.dtype == right.dtype and found.ndim == right.ndim
        if whole and name in own:
            same = same and found.shape == right.shape
        require(same, f"message.{name}", found, in_short(right))
