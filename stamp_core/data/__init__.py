"""Pictures with labels. A source is a file in this folder; a user's own needs no other change.

It has a frozen dataclass `Options` and either `make(options)`, which returns `Pictures`, beside the
names in `PACKAGES` of the packages that decide them, and, if they come from files,
`inputs(options)`, the paths of these; or `listing(options)`, which returns a `Listing` of picture
files, of which there may be more than fit into memory.
"""

import hashlib
import importlib
import json
import pkgutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stamp_core import cache, decoding, fingerprint, paths
from stamp_core.cache import ARRAYS, PARTS, Arrays, Bytes, Names, Numbers
from stamp_core.config import ParameterError, build, plain, unknown
from stamp_core.decoding import Listing, Part

__all__ = [
    "ARRAYS",
    "Arrays",
    "Bytes",
    "ImageSet",
    "Listing",
    "Numbers",
    "Part",
    "Pictures",
    "load",
    "options",
]


@dataclass(frozen=True, eq=False)
class Pictures:
    """What `make(options)` of a source returns; without domains, all pictures are of one."""

    x_train: Bytes  # [N, C, H, W]
    y_train: Numbers  # [N]
    x_test: Bytes
    y_test: Numbers
    classes: tuple[str, ...]
    domains: tuple[str, ...] = ("all",)
    domain_train: Numbers | None = None  # [N], places in `domains`
    domain_test: Numbers | None = None


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A data set as every part of the project sees it; the tensors are shared, never written to."""

    name: str
    x_train: Tensor  # uint8 [N, C, H, W]
    y_train: Tensor  # int64 [N]
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    domain_train: Tensor  # int64 [N]
    domain_test: Tensor
    digest: str  # sha256 over all arrays and names
    mean: Tensor  # float32 [C], of the training pixels in 0..1
    std: Tensor  # a constant channel has 1, so that dividing by it is safe

    def __repr__(self) -> str:
        """How many pictures of what kind there are."""
        shape = " x ".join(map(str, self.x_train.shape[1:]))
        return (
            f"{self.name}: {len(self.y_train)} training and {len(self.y_test)} test pictures of "
            f"{shape}, {len(self.classes)} classes, domains {', '.join(self.domains)}"
        )


def options(spec: Mapping[str, Any], where: str = "params.yaml: data") -> object:
    """The checked `Options` of the source that `spec` names."""
    return _chosen(spec, where)[1]


def load(spec: Mapping[str, Any]) -> ImageSet:
    """The data set of `spec`: made and kept on disk the first time, memory-mapped ever after."""
    module, chosen = _chosen(spec)
    name = str(spec["source"])
    key, store = _way(module, chosen, name)
    folder = paths.CACHE / f"{name}-{key[:12]}"
    if not folder.exists():
        store(folder)
    try:
        return _open(folder, name)
    except cache.DAMAGE as damage:
        warnings.warn(f"{folder} is damaged and is made again: {damage}", stacklevel=2)
    cache.remove(folder)
    store(folder)
    return _open(folder, name)


def _chosen(spec: Mapping[str, Any], where: str = "params.yaml: data") -> tuple[ModuleType, object]:
    """The module of the source that `spec` names, and its checked options."""
    if "source" not in spec:
        raise ParameterError(f"{where}.source is missing")
    known = [module.name for module in pkgutil.iter_modules(__path__)]
    if spec["source"] not in known:
        raise unknown(f"{where}.source", spec["source"], known)
    module = importlib.import_module(f"{__name__}.{spec['source']}")
    rest = {key: value for key, value in spec.items() if key != "source"}
    return module, build(module.Options, rest, where)


def _way(module: ModuleType, chosen: object, name: str) -> tuple[str, Callable[[Path], None]]:
    """A hash of all that decides the pictures, and what writes them into a folder."""
    if hasattr(module, "listing"):
        listing: Listing = module.listing(chosen)
        return decoding.key(listing), partial(decoding.decode, listing)
    return _key(module, chosen), lambda folder: cache.store(*_arrays(module, chosen, name), folder)


def _key(module: ModuleType, chosen: object) -> str:
    """A hash of options, code, the packages and the files that the pictures come from."""
    packages = {name: version(name) for name in module.PACKAGES}
    parts = [plain(chosen), fingerprint.combined(str(module.__file__)), packages]
    if hasattr(module, "inputs"):
        parts += [_content(path) for path in module.inputs(chosen)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _content(path: Path) -> object:
    """What tells a file or a folder from a changed one."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return [[file.relative_to(path).as_posix(), *_stamp(file)] for file in files]
    if cache.large(path):
        return _stamp(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(path: Path) -> list[int]:
    """Size and time of change of a file."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _arrays(module: ModuleType, chosen: object, name: str) -> tuple[Arrays, Names]:
    """The arrays of a source, checked and completed, and its names of classes and domains."""
    made = module.make(chosen)
    arrays = {key: getattr(made, key) for key in ARRAYS if hasattr(made, key)}
    for part in PARTS:
        if arrays[f"domain_{part}"] is None:
            arrays[f"domain_{part}"] = np.zeros(len(arrays[f"x_{part}"]), np.int64)
    _check(arrays, made, name)
    x = arrays["x_train"]
    arrays |= cache.moments(cache.sums(x), x[:, 0].size)
    return arrays, [list(made.classes), list(made.domains)]


def _check(arrays: Arrays, made: Pictures, name: str) -> None:
    """Refuse arrays that do not fit together, naming source and array."""
    for part in PARTS:
        x = arrays[f"x_{part}"]
        if x.dtype != np.uint8 or x.ndim != 4 or not x.size:
            raise _misfit(name, f"x_{part}", x, "uint8 [N, C, H, W]")
        for key, names in ((f"y_{part}", made.classes), (f"domain_{part}", made.domains)):
            y = arrays[key]
            if y.dtype != np.int64 or y.shape != x.shape[:1]:
                raise _misfit(name, key, y, f"int64 [{len(x)}]")
            if y.min() < 0 or y.max() >= len(names):
                raise ValueError(f"{name}: {key} must be in 0..{len(names) - 1}, as for its names")
    if arrays["x_train"].shape[1:] != arrays["x_test"].shape[1:]:
        raise _misfit(name, "x_test", arrays["x_test"], f"like x_train {arrays['x_train'].shape}")


def _misfit(name: str, key: str, array: npt.NDArray[Any], right: str) -> ValueError:
    """The error for an array of a source with the wrong type or shape."""
    return ValueError(f"{name}: {key} is {array.dtype} {list(array.shape)}; it must be {right}")


def _open(folder: Path, name: str) -> ImageSet:
    """The data set in `folder`, its pages shared by all processes that map them."""
    arrays, meta = cache.read(folder)
    tensors = {key: _tensor(array) for key, array in arrays.items()}
    classes, domains = tuple(meta["classes"]), tuple(meta["domains"])
    return ImageSet(name, classes=classes, domains=domains, digest=meta["digest"], **tensors)


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    """A tensor on the same memory; torch warns of one that cannot be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)
