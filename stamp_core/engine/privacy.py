"""Updates are clipped; Gaussian noise is added to each of them, or to their sum."""

from dataclasses import replace

import torch
from torch import Tensor

from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import ParameterError, invalid
from stamp_core.config.schema import Privacy
from stamp_core.methods.base.method import ClientRound, Message, Method, Reply
from stamp_core.models.flat import flatten_like

PURPOSE = "privacy noise"  # of random generators


def protect_upload(
    method: Method, privacy: Privacy, client_round: ClientRound, reply: Reply
) -> Reply:
    """The reply with its update, if it has one, clipped and, where noise is local, with noise."""
    if not reply.message:
        return reply
    require_parameters_alone(method, client_round.message, reply.message)
    received, trained = client_round.message["parameters"], reply.message["parameters"]
    update = trained - received
    norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
    clipped = norm > privacy.clip
    if clipped:  # else the model stays as it is, to the last bit
        trained = update.mul_(privacy.clip / norm).add_(received)
    if privacy.noise == "local":
        draw = client_round.generator(PURPOSE)
        trained = add_noise(method.runtime, privacy, trained, 1, draw)
    reply.log.numbers |= {"clipped uploads": float(clipped), "norm before clipping": norm}
    return replace(reply, message={"parameters": trained})


def share_noisy_mean(
    runtime: ClientRuntime, privacy: Privacy, replies: list[Reply], draw: torch.Generator
) -> list[Reply]:
    """The replies with the noisy mean of their models in each of them, and with equal samples.

    The server gets nothing else of the uploads, so whatever it computes is as private. With equal
    weights one client moves the mean of n by at most clip / n, whatever the clients' numbers of
    images are. Weighted by images, the noise would have to fit the largest weight, and sampling
    would not amplify: there one client must be worth as much as another.
    """
    models = [reply.message["parameters"] for reply in replies]
    mean = runtime.average(models, [1.0] * len(models))
    noisy = add_noise(runtime, privacy, mean, len(models), draw)
    return [replace(reply, message={"parameters": noisy}, samples=1) for reply in replies]


def add_noise(
    runtime: ClientRuntime, privacy: Privacy, mean: Tensor, count: int, draw: torch.Generator
) -> Tensor:
    """The mean of `count` models with their sum's noise, drawn in the order of tensors.  # [P]"""
    if not privacy.noise_multiplier:
        return mean
    tensors = runtime.model.tensors
    drawn = torch.randn(len(mean), generator=draw).split([each.numel() for each in tensors])
    values = [part.view(each.shape) for part, each in zip(drawn, tensors, strict=True)]
    deviation = privacy.noise_multiplier * privacy.clip / count
    return flatten_like(values, tensors).mul_(deviation).add_(mean)


def refused(method: Method, right: str) -> ParameterError:
    """The error for a method that the mechanism does not cover."""
    return invalid("method", type(method).__name__, f"one that {right}")


def require_parameters_alone(method: Method, received: Message, sent: Message) -> None:
    """Refuse an upload with parts that are not clipped, or that is no update of the received."""
    if others := sorted(sent.keys() - {"parameters"}):
        hint = " (training.buffers: local or frozen)" if "buffers" in others else ""
        right = f"uploads parameters alone, as privacy is set, not also {', '.join(others)}{hint}"
        raise refused(method, right)
    if sent["parameters"].shape != received["parameters"].shape:
        raise refused(method, "uploads all parameters that it received, as privacy is set")
