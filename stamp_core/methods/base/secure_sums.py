"""Secure aggregation as a contract: a method's server is handed sums of uploads only."""

from dataclasses import replace
from typing import cast

from stamp_core.methods.base.method import Log, Message, Method, Reply
from stamp_core.models.sealed import Sealed


def seal_replies(method: Method, replies: list[Reply], log: Log) -> list[Reply]:
    """What the server is handed: with `training.secure_sums` replies with sealed vectors.

    One client alone has no sum that hides it: then no reply is handed over, and the round leaves
    the server as it is.
    """
    if not method.runtime.training.secure_sums:
        return replies
    if sum(reply.samples > 0 for reply in replies) < 2:
        log.events.append("secure sums: fewer than two clients have trained")
        return []
    return [replace(reply, message=_sealed(reply, method.in_clear)) for reply in replies]


def _sealed(reply: Reply, in_clear: tuple[str, ...]) -> Message:
    """The message with sealed vectors; to a server that only averages they are tensors."""
    vectors = reply.message.items()
    sealed = {n: v if n in in_clear else Sealed(v, reply.client) for n, v in vectors}
    return cast(Message, sealed)
