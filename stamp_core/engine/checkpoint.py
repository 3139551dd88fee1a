"""Trees of tensors and plain values on disk: written atomically, verified, never pickled."""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes
from torch import Tensor

Arrays = dict[str, np.ndarray]
PLAIN = (str, int, float, bool, type(None))


def save_checkpoint(path: Path, tree: Mapping[str, Any], identity: Mapping[str, str]) -> None:
    """Write `tree` to `path`; after any failure `path` holds the complete old or new tree."""
    arrays: Arrays = {}
    text = json.dumps(_flatten(tree, arrays, "state"))
    header = {"tree": text, "identity": json.dumps(dict(identity)), "digest": _digest(text, arrays)}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(to_bytes(arrays, header))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_checkpoint(path: Path, identity: Mapping[str, str]) -> dict[str, Any] | None:
    """The tree saved at `path` for this identity, or None; an unusable file is renamed."""
    for part in path.parent.glob(f"{path.stem}.*.part"):  # a process was killed while writing
        part.unlink(missing_ok=True)
    if not path.exists():
        return None
    try:
        tree, found = read_checkpoint(path)
    except (SafetensorError, ValueError, KeyError, OSError) as error:
        _set_aside(path, f"is damaged ({error})")
        return None
    other = [key for key in {**found, **identity} if found.get(key) != identity.get(key)]
    if other:
        _set_aside(path, f"belongs to other {', '.join(other)}")
        return None
    return tree


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The tree and the identity in a file; ValueError when its content is not what was written."""
    with safe_open(path, framework="numpy") as file:
        header = file.metadata() or {}
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if _digest(header["tree"], arrays) != header["digest"]:
        raise ValueError("its digest does not fit its content")
    return _unflatten(json.loads(header["tree"]), arrays), json.loads(header["identity"])


def _set_aside(path: Path, why: str) -> None:
    """Rename a file that must not be used, with a warning."""
    aside = path.with_suffix(f"{path.suffix}.aside")
    path.replace(aside)
    warnings.warn(f"checkpoint {path} {why}; kept as {aside.name}, starting afresh", stacklevel=3)


def _flatten(tree: object, arrays: Arrays, where: str) -> Any:
    """`tree` as JSON, its tensors moved to `arrays` under their paths in the tree."""
    if isinstance(tree, Tensor):
        name = f"{len(arrays)} {where}"  # unique by the number: keys with dots can give equal paths
        arrays[name] = np.asarray(tree.numpy(), order="C")
        return {"tensor": name}
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree) or "tensor" in tree:
            raise TypeError(f"{where}: keys must be text other than 'tensor', not {list(tree)}")
        return {key: _flatten(item, arrays, f"{where}.{key}") for key, item in tree.items()}
    if isinstance(tree, list):
        return [_flatten(item, arrays, f"{where}.{k}") for k, item in enumerate(tree)]
    if not isinstance(tree, PLAIN):
        raise TypeError(f"{where} is a {type(tree).__name__}; a state holds tensors, text, numbers")
    return tree


def _unflatten(tree: Any, arrays: Arrays) -> Any:
    """The inverse of `_flatten`."""
    if isinstance(tree, dict):
        if set(tree) == {"tensor"}:
            return torch.from_numpy(arrays[tree["tensor"]])
        return {key: _unflatten(item, arrays) for key, item in tree.items()}
    return [_unflatten(item, arrays) for item in tree] if isinstance(tree, list) else tree


def _digest(text: str, arrays: Arrays) -> str:
    """The sha256 over the whole content of a checkpoint."""
    total = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        total.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        total.update(np.ascontiguousarray(arrays[name]).data if arrays[name].size else b"")
    return total.hexdigest()
