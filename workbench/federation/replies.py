"""What a node may reply, checked before any of it is used; an error names the key in one line."""

import re
import reprlib
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from torch import Tensor

from stamp_core.client.runtime import RoundId
from stamp_core.data.plan import Plan
from stamp_core.engine.trees import Stored
from stamp_core.engine.worker import ClientResult, Worker
from stamp_core.methods.base.method import Message, Method
from workbench.federation.messages import tree_to_result
from workbench.federation.shares import OwnPlan

LARGEST = 1e100  # of a number: sums of such numbers are finite
LONGEST = 300  # characters of a line

# What a field of a type may hold, and how an error says it. Other types are not read.
VALID: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (lambda v: type(v) is int and 0 <= v < 2**53, "a whole number from 0 to 2**53"),
    float: (lambda v: type(v) in (int, float) and not abs(v) > LARGEST, "a finite number"),
    str: (lambda v: isinstance(v, str) and v.isprintable() and len(v) <= LONGEST, "a short line"),
    Tensor: (lambda v: isinstance(v, Tensor) and bool(v.isfinite().all()), "of finite values"),
}


def require(valid: bool, key: str, value: object, right: str) -> None:
    """Refuse a reply in which `key` is `value`, unless that is `valid`."""
    if not valid:
        short = describe(value) if isinstance(value, Tensor) else reprlib.repr(value)
        raise ValueError(f"{key} is {short}; it must be {right}")


def describe(tensor: Tensor) -> str:
    """The type and the shape of a tensor."""
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")


def conform(value: Any, hint: Any, key: str) -> None:
    """Refuse a value of another type than that of a field; numbers may be NaN, tensors not."""
    kind = get_origin(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        same = isinstance(value, dict) and value.keys() == hints.keys()
        require(same, key, value, f"a block of {', '.join(hints)}")
        for name, each in hints.items():
            conform(value[name], each, f"{key}.{name}")
    elif kind in (dict, list):
        require(isinstance(value, kind), key, value, f"a {kind.__name__}")
        for place in value if kind is dict else range(len(value)):
            conform(value[place], get_args(hint)[-1], f"{key}.{place}")
    elif hint in VALID:
        require(VALID[hint][0](value), key, value, VALID[hint][1])


def read_result(tree: Any, worker: Worker, round_id: RoundId, sent: Message) -> ClientResult:
    """The result of a client round in a reply; `sent` is the message that the client had."""
    conform(tree, ClientResult, "result")
    conform(tree["state"], Stored, "state")
    reply, digest = tree["reply"], tree["state"]["digest"]
    require(bool(re.fullmatch("[0-9a-f]{64}", digest)), "state.digest", digest, "a sha256")
    require(reply["client"] == round_id.client, "client", reply["client"], str(round_id.client))
    check_samples(reply["samples"], worker.plans[round_id.seed], round_id)
    require(not reply["sgd_steps"] or reply["loss"] > -LARGEST, "loss", reply["loss"], "finite")
    for seconds in (tree["seconds"], *reply["log"]["seconds"].values()):
        require(seconds >= 0, "seconds", seconds, "at least 0")
    check_message(reply["message"], sent, worker.method, reply["samples"])
    if tree["scores"] is not None:
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


def check_samples(samples: int, plan: Plan, round_id: RoundId) -> None:
    """Refuse another number than the plan's, or more exemplars than it gives images."""
    assert isinstance(plan, OwnPlan)
    counts = plan.counts[round_id.client]
    own = counts[round_id.experience % len(counts)]
    most = own or sum(counts)  # without images of the task some methods train on exemplars
    right = f"{own}" if own else f"at most {most}"
    require(own <= samples <= most, "samples", samples, f"{right}, by the plan")


def check_message(message: Message, sent: Message, method: Method, samples: int) -> None:
    """Refuse an upload whose vectors of the model are not of the form of those that were sent.

    Clients of a method without a global model may send parts of them.
    """
    whole = "global" in method.models
    own = {*method.shared_vectors(), *method.averaged_vectors(), *method.extra_networks}
    if whole and samples:
        missing = sorted(own & sent.keys() - message.keys())
        require(not missing, "message", sorted(message), f"with {missing}")
    if type(method).upload is Method.upload:
        require(message.keys() <= own, "message", sorted(message), f"of {sorted(own)}")
    for name in message.keys() & sent.keys():
        found, right = message[name], sent[name]
        same = found.dtype == right.dtype and found.ndim == right.ndim
        same &= found.shape == right.shape or not (whole and name in own)
        require(same, f"message.{name}", found, describe(right))
