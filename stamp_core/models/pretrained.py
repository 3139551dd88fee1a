"""Weights from a file: torchvision's names or those of a run record; what they do not fit."""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from stamp_core import paths
from stamp_core.config import Network, ParameterError, wrong

HEADS = {"resnet18": "fc.", "swin_t": "head."}  # what torchvision's names of the head begin with
UNREAD = ("num_batches_tracked", "relative_position_index")  # counters and constants: no weights


@torch.no_grad()
def load(network: Network, encoder: nn.Module, head: nn.Module) -> None:
    """Put the weights in the file of `network`, if it has one, into an encoder and a head.

    A head over another number of classes stays as it is.
    """
    if network.pretrained is None:
        return
    found = read(network)
    ours = network.kind not in HEADS or any(name.startswith("encoder.") for name in found)
    first, last = ("encoder.", "head.") if ours else ("", HEADS[network.kind])
    wanted, heads = weights(encoder, first), weights(head, last)
    classes = {tuple(found[name].shape[:1]) for name in heads if name in found}
    if classes == {tuple(value.shape[:1]) for value in heads.values()}:
        wanted |= heads
    else:
        found = {name: value for name, value in found.items() if name not in heads}
    check(network, found, wanted)
    for name, value in wanted.items():
        value.copy_(found[name])


def weights(module: nn.Module, begins: str) -> dict[str, Tensor]:
    """A module's own parameters and buffers by the names they have in a file."""
    values = module.state_dict()
    return {begins + name: value for name, value in values.items() if not name.endswith(UNREAD)}


def check(network: Network, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not, name by name, what is wanted."""
    for name, value in wanted.items():
        if name not in found:
            raise misfit(network, f"lacks {name!r}, {in_words(value)}")
        there = found[name]
        if there.shape != value.shape or not there.is_floating_point():
            raise misfit(network, f"has {name!r} as {in_words(there)} instead of {in_words(value)}")
        if not there.isfinite().all():
            raise misfit(network, f"has {name!r} with values that are not finite")
    for name in found:
        if name not in wanted:
            raise misfit(network, f"has {name!r}, which is not in this network")


def read(network: Network) -> dict[str, Tensor]:
    """All weights in the file of `network` by name."""
    path = place(network)
    try:
        found = load_file(path) if path.suffix == ".safetensors" else unpickled(path)
    except Exception as error:  # a damaged pickle fails in whatever way it likes
        kind = "safetensors" if path.suffix == ".safetensors" else "torch"
        right = f"a whole {kind} file of tensors alone: {path} cannot be read as one"
        raise wrong("network.pretrained", network.pretrained, right) from error
    if not isinstance(found, Mapping):
        raise misfit(network, f"holds {type(found).__name__} instead of tensors by name")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise misfit(network, f"has {name!r} instead of tensors by name alone")
    return {name: value for name, value in found.items() if not name.endswith(UNREAD)}


def unpickled(path: Path) -> Any:
    """What is in a torch file, which can run no code."""
    return torch.load(path, map_location="cpu", weights_only=True)


def place(network: Network) -> Path:
    """Where the file of `network` lies."""
    path = paths.RAW / str(network.pretrained)
    if not path.is_file():
        raise wrong("network.pretrained", network.pretrained, f"a file: there is none at {path}")
    return path


def digest(network: Network) -> str | None:
    """The sha256 of the file of `network`: its content decides numbers; None if it has none."""
    if network.pretrained is None:
        return None
    path = place(network)
    return _sha256(path, path.stat().st_mtime_ns, path.stat().st_size)


@cache
def _sha256(path: Path, changed: int, size: int) -> str:
    """The sha256 of a file, computed once as long as it stays as it is."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def misfit(network: Network, what: str) -> ParameterError:
    """The error for a file that holds something other than the weights of `network`."""
    right = f"a file of weights of this {network.kind}: {place(network)} {what}"
    return wrong("network.pretrained", network.pretrained, right)


def in_words(value: Tensor) -> str:
    """Type and shape of a tensor."""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
