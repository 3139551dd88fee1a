"""Pretrained weights from a file, with torchvision's names or those of a run record."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from stamp_core.config.decode import ParameterError, invalid
from stamp_core.config.schema import Network
from stamp_core.core import paths
from stamp_core.core.fingerprint import file_digest

_HEADS = {"resnet18": "fc.", "swin_t": "head."}  # prefixes of torchvision's names of the head
_IGNORED = ("num_batches_tracked", "relative_position_index")  # counters and constants


@torch.no_grad()
def load_weights(network: Network, encoder: nn.Module, head: nn.Module) -> None:
    """Load the file of `network`, if any; a head with another number of classes is not loaded."""
    if network.pretrained is None:
        return
    stored = _read_file(network)
    ours = network.kind not in _HEADS or any(name.startswith("encoder.") for name in stored)
    encoder_prefix, head_prefix = ("encoder.", "head.") if ours else ("", _HEADS[network.kind])
    wanted, own_head = _named_tensors(encoder, encoder_prefix), _named_tensors(head, head_prefix)
    classes = {tuple(stored[name].shape[:1]) for name in own_head if name in stored}
    if classes == {tuple(value.shape[:1]) for value in own_head.values()}:
        wanted |= own_head
    else:
        stored = {name: value for name, value in stored.items() if name not in own_head}
    _check(network, stored, wanted)
    for name, value in wanted.items():
        value.copy_(stored[name])


def _named_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """A module's parameters and buffers by their names in a file."""
    values = module.state_dict()
    return {prefix + name: value for name, value in values.items() if not name.endswith(_IGNORED)}


def _check(network: Network, stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Refuse a file whose names, shapes or values are not those of the network."""
    for name, value in wanted.items():
        if name not in stored:
            raise _misfit(network, f"lacks {name!r}, {_type_and_shape(value)}")
        found = stored[name]
        if found.shape != value.shape or not found.is_floating_point():
            types = f"{_type_and_shape(found)} instead of {_type_and_shape(value)}"
            raise _misfit(network, f"has {name!r} as {types}")
        if not found.isfinite().all():
            raise _misfit(network, f"has {name!r} with values that are not finite")
    for name in stored:
        if name not in wanted:
            raise _misfit(network, f"has {name!r}, which is not in this network")


def _read_file(network: Network) -> dict[str, Tensor]:
    """All weights in the file of `network` by name."""
    path = _weights_path(network)
    kind = "safetensors" if path.suffix == ".safetensors" else "torch"
    try:
        if kind == "safetensors":
            stored = load_file(path)
        else:  # weights_only: a pickle runs no code
            stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise anything
        right = f"a whole {kind} file of tensors alone: {path} cannot be read as one"
        raise invalid("network.pretrained", network.pretrained, right) from error
    pairs = stored.items() if isinstance(stored, Mapping) else [(stored, None)]
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in pairs):
        raise _misfit(network, "holds more than tensors by name")
    return {name: value for name, value in stored.items() if not name.endswith(_IGNORED)}


def _weights_path(network: Network) -> Path:
    """The path of the file of `network`."""
    path = paths.RAW / str(network.pretrained)
    if not path.is_file():
        raise invalid("network.pretrained", network.pretrained, f"a file: there is none at {path}")
    return path


def weights_digest(network: Network) -> str | None:
    """The sha256 of the file of `network`, on which numbers depend; None if it has none."""
    if network.pretrained is None:
        return None
    return file_digest(_weights_path(network))


def _misfit(network: Network, problem: str) -> ParameterError:
    """The error for a file that holds something other than the weights of `network`."""
    right = f"a file of weights of this {network.kind}: {_weights_path(network)} {problem}"
    return invalid("network.pretrained", network.pretrained, right)


def _type_and_shape(value: Tensor) -> str:
    """Type and shape of a tensor as text."""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
