"""Pictures with labels. A source is a file in this folder; a user's own needs no other change."""

import hashlib
import importlib
import json
import pkgutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stamp_core import fingerprint, paths
from stamp_core.config import ParameterError, build, plain, unknown

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]


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


DAMAGE = (OSError, EOFError, ValueError, LookupError, TypeError)  # of files that were altered
ARRAYS = [field.name for field in fields(ImageSet) if field.type is Tensor]


def options(spec: Mapping[str, Any], where: str = "params.yaml: data") -> object:
    """The checked `Options` of the source that `spec` names."""
    return _chosen(spec, where)[1]


def load(spec: Mapping[str, Any]) -> ImageSet:
    """The data set of `spec`: made and kept on disk the first time, memory-mapped ever after."""
    module, chosen = _chosen(spec)
    name = str(spec["source"])
    folder = paths.CACHE / f"{name}-{_key(module, chosen)[:12]}"
    if not folder.exists():
        _store(_arrays(module, chosen, name), folder)
    try:
        return _open(folder, name)
    except DAMAGE as damage:
        warnings.warn(f"{folder} is damaged and is made again: {damage}", stacklevel=2)
    _remove(folder)
    _store(_arrays(module, chosen, name), folder)
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


def _key(module: ModuleType, chosen: object) -> str:
    """A hash of all that decides the pictures: options, code and the packages they come from."""
    packages = {name: version(name) for name in module.PACKAGES}
    parts = [plain(chosen), fingerprint.combined(str(module.__file__)), packages]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _arrays(module: ModuleType, chosen: object, name: str) -> tuple[Arrays, list[list[str]]]:
    """The arrays of a source, checked and completed, and its names of classes and domains."""
    made = module.make(chosen)
    arrays = {key: getattr(made, key) for key in ARRAYS if hasattr(made, key)}
    for part in ("train", "test"):
        if arrays[f"domain_{part}"] is None:
            arrays[f"domain_{part}"] = np.zeros(len(arrays[f"x_{part}"]), np.int64)
    _check(arrays, made, name)
    arrays["mean"], arrays["std"] = _moments(arrays["x_train"])
    return arrays, [list(made.classes), list(made.domains)]


def _check(arrays: Arrays, made: Pictures, name: str) -> None:
    """Refuse arrays that do not fit together, naming source and array."""
    for part in ("train", "test"):
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


def _moments(x: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Mean and standard deviation of each channel in 0..1, from exact integer sums."""
    count = x[:, 0].size
    total = x.sum((0, 2, 3), dtype=np.int64)  # [C]
    channels = [np.square(x[:, c], dtype=np.uint16).sum(dtype=np.int64) for c in range(x.shape[1])]
    mean = total / count
    std = np.sqrt(np.stack(channels) / count - mean**2)
    return (mean / 255).astype(np.float32), np.where(std > 0, std / 255, 1).astype(np.float32)


def _digest(arrays: Arrays, names: list[list[str]]) -> str:
    """The sha256 over all arrays and names."""
    found = hashlib.sha256(json.dumps(names).encode())
    for key in ARRAYS:
        found.update(f"{key} {arrays[key].dtype.str} {arrays[key].shape}".encode())
        found.update(np.ascontiguousarray(arrays[key]).ravel().data)
    return found.hexdigest()


def _store(made: tuple[Arrays, list[list[str]]], folder: Path) -> None:
    """Put the arrays into `folder` in one step, so that nobody ever sees a part of them."""
    arrays, names = made
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as scratch:
        fresh = Path(scratch, "fresh")
        fresh.mkdir()
        for key in ARRAYS:
            np.save(fresh / f"{key}.npy", _stored(arrays[key]))
        meta = {"classes": names[0], "domains": names[1], "digest": _digest(arrays, names)}
        (fresh / "meta.json").write_text(json.dumps(meta))
        try:
            fresh.rename(folder)
        except OSError:  # another process was first; it made the same bytes
            if not folder.exists():
                raise


def _stored(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Pictures with their channels last, which convolutions on the CPU are a fifth faster with."""
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)) if array.ndim == 4 else array


def _remove(folder: Path) -> None:
    """Take a damaged folder away in one step; another process may have done so already."""
    with TemporaryDirectory(dir=folder.parent) as scratch, suppress(FileNotFoundError):
        folder.rename(Path(scratch, "damaged"))


def _open(folder: Path, name: str) -> ImageSet:
    """The data set in `folder`, its pages shared by all processes that map them."""
    meta = json.loads((folder / "meta.json").read_text())
    arrays = {key: np.load(folder / f"{key}.npy", mmap_mode="c") for key in ARRAYS}
    arrays = {key: a.transpose(0, 3, 1, 2) if a.ndim == 4 else a for key, a in arrays.items()}
    if _digest(arrays, [meta["classes"], meta["domains"]]) != meta["digest"]:
        raise ValueError("its arrays are not those that were written")
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    classes, domains = tuple(meta["classes"]), tuple(meta["domains"])
    return ImageSet(name, classes=classes, domains=domains, digest=meta["digest"], **tensors)
