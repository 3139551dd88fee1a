"""Trees of tensors and plain values on disk: written atomically, verified, never pickled."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes
from torch import Tensor

from stamp_core.core.atomic import atomic_write
from stamp_core.results.records import tree_bytes

Tree = dict[str, Any]
Arrays = dict[str, np.ndarray]
PLAIN = (str, int, float, bool, type(None))
UNUSABLE = (SafetensorError, ValueError, KeyError, TypeError, OSError)  # errors of reading a file


@dataclass(frozen=True)
class Stored:
    """A tree in a store: the digest of its content, which names its file, and its size."""

    digest: str
    bytes: int  # of its tensors


class Store:
    """A folder of trees, in which equal trees are one file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, tree: Tree, flush: bool = True) -> Stored:
        """Write a tree, unless an equal one is there."""
        text, arrays = flatten(tree)
        digest = tree_digest(text, arrays)
        if not self.path(digest).exists():
            _write(self.path(digest), arrays, {"tree": text, "digest": digest}, flush)
        return Stored(digest, tree_bytes(tree))

    def get(self, digest: str) -> Tree:
        path = self.path(digest)
        tree, header = read_tree(path)
        if header["digest"] != digest:
            raise ValueError(f"{path.name} holds another tree")
        return tree

    def verify(self, digest: str) -> None:
        self.get(digest)

    def path(self, digest: str) -> Path:
        return self.folder / f"{digest}.safetensors"

    def keep_only(self, digests: set[str]) -> None:
        for path in self.folder.glob("*"):
            if path.stem not in digests:
                path.unlink()


def write_tree(path: Path, tree: Tree, identity: Mapping[str, str], flush: bool = True) -> None:
    """Write a tree; after any failure `path` holds the complete old or new one."""
    text, arrays = flatten(tree)
    header = {
        "tree": text,
        "identity": json.dumps(dict(identity)),
        "digest": tree_digest(text, arrays),
    }
    _write(path, arrays, header, flush)


def read_tree(path: Path) -> tuple[Tree, dict[str, str]]:
    """The tree in a file and the file's header; ValueError if it is not what was written."""
    with safe_open(path, framework="numpy") as file:
        header = file.metadata() or {}
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if tree_digest(header["tree"], arrays) != header["digest"]:
        raise ValueError(f"the digest of {path.name} does not fit its content")
    return unflatten(header["tree"], arrays), header


def _write(path: Path, arrays: Arrays, header: dict[str, str], flush: bool) -> None:
    with atomic_write(path, flush) as scratch:
        scratch.write_bytes(to_bytes(arrays, header))


def flatten(tree: Tree) -> tuple[str, Arrays]:
    """A tree as JSON and its tensors."""
    arrays: Arrays = {}
    return json.dumps(_to_json(tree, arrays, "state")), arrays


def unflatten(text: str, arrays: Arrays) -> Any:
    """The inverse of `flatten`."""
    return _from_json(json.loads(text), arrays)


def tree_digest(text: str, arrays: Arrays) -> str:
    """The sha256 over the whole content of a tree that was taken apart."""
    total = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        total.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        total.update(np.ascontiguousarray(arrays[name]).data if arrays[name].size else b"")
    return total.hexdigest()


def _to_json(tree: object, arrays: Arrays, where: str) -> Any:
    """`tree` as JSON, its tensors moved to `arrays` under their paths in the tree."""
    if isinstance(tree, Tensor):
        name = f"{len(arrays)} {where}"  # unique by the number: keys with dots can give equal paths
        arrays[name] = np.asarray(tree.numpy(), order="C")
        return {"tensor": name}
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree) or "tensor" in tree:
            raise TypeError(f"{where}: keys must be text other than 'tensor', not {list(tree)}")
        return {key: _to_json(item, arrays, f"{where}.{key}") for key, item in tree.items()}
    if isinstance(tree, list):
        return [_to_json(item, arrays, f"{where}.{k}") for k, item in enumerate(tree)]
    if not isinstance(tree, PLAIN):
        raise TypeError(f"{where} is a {type(tree).__name__}; a state holds tensors, text, numbers")
    return tree


def _from_json(tree: Any, arrays: Arrays) -> Any:
    """The inverse of `_to_json`."""
    if isinstance(tree, dict):
        if set(tree) == {"tensor"}:
            return torch.from_numpy(arrays[tree["tensor"]])
        return {key: _from_json(item, arrays) for key, item in tree.items()}
    return [_from_json(item, arrays) for item in tree] if isinstance(tree, list) else tree
