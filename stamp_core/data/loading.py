"""Loading: a source makes the arrays of a data set once, then they are mapped from the cache."""

import hashlib
import inspect
import json
import shutil
import warnings
from collections.abc import Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stamp_core.config.decode import ParameterError, build, to_plain, unknown_name
from stamp_core.core import fingerprint, paths
from stamp_core.core.atomic import add_path_to_errors
from stamp_core.core.plugins import SOURCES, find_modules, load_module, more_elsewhere
from stamp_core.data import cache, decoding, sources
from stamp_core.data.cache import ARRAYS, SUBSETS, NamedArrays
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.images import ImageArrays, array_error


def load_dataset(spec: Mapping[str, Any], make: bool = True) -> ImageDataset:
    """The data set of a block `data`, mapped from the cache; made if missing, with `make` alone."""
    (source, options), name = find_source(spec), str(spec["source"])
    if hasattr(source, "listing"):
        source, options = decoding, source.listing(options)
    writes = hasattr(source, "write")  # its arrays itself, part by part
    key = source.key(options, make) if writes else _make_key(source, options)
    folder = paths.CACHE / f"{name}-{key[:12]}"
    if folder.exists():
        try:
            return _open(folder, name)
        except cache.READ_ERRORS as error:
            warnings.warn(f"{folder} is damaged and is made again: {error}", stacklevel=2)
            shutil.rmtree(folder, ignore_errors=True)
    if not make:
        raise FileNotFoundError(f"{name} must be in {paths.CACHE}: train with these data first")
    if writes:
        cache.create(folder, partial(source.write, options))
    else:
        arrays, names = _make_arrays(source.make(options), name)
        cache.create(folder, lambda draft: cache.complete(draft, arrays, names))
    return _open(folder, name)


def find_source(spec: Mapping[str, Any], where: str = "params.yaml: data") -> tuple[Any, Any]:
    """The source that `spec` names and its checked options; `where` is named in errors."""
    if "source" not in spec:
        raise ParameterError(f"{where}.source is missing")
    name = spec["source"]
    files = find_modules(SOURCES)
    known = {file: file for file in files if file not in sources.SETS.values()} | sources.SETS
    if not isinstance(name, str) or name not in known:
        raise unknown_name(f"{where}.source", name, known, more_elsewhere())
    source: Any = load_module(SOURCES, known[name])
    if name in sources.SETS:
        source = source.SETS[name]
    rest = {key: value for key, value in spec.items() if key != "source"}
    return source, build(source.Options, rest, where)


def _make_key(source: Any, options: object) -> str:
    """A hash of all that decides the arrays: options, code, packages, input files."""
    file = inspect.getfile(source if inspect.ismodule(source) else type(source))
    packages = {name: _version(name, file) for name in source.PACKAGES}
    parts = [to_plain(options), fingerprint.combined_fingerprint(file), packages]
    if hasattr(source, "inputs"):
        parts += [_file_key(path) for path in source.inputs(options)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _version(package: str, file: str) -> str:
    """The version of a package that a source needs."""
    try:
        return version(package)
    except PackageNotFoundError:
        what = f"the source {Path(file).stem} needs {package}"
        raise ImportError(f"{what}, which is not installed: pip install {package}") from None


def _file_key(path: Path) -> object:
    """The content of a file; of a large file, or of those in a folder: names, sizes and times."""
    if path.is_file() and not cache.is_large(path):
        with add_path_to_errors(path), path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted(each for each in path.rglob("*") if each.is_file()) or [path]
    stats = [(each.relative_to(path).as_posix(), each.stat()) for each in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _make_arrays(images: ImageArrays, name: str) -> tuple[NamedArrays, cache.Names]:
    """The arrays of a source, checked and completed, and the names of its classes and domains."""
    arrays = {key: getattr(images, key) for key in ARRAYS if hasattr(images, key)}
    for subset in SUBSETS:
        if arrays[f"domain_{subset}"] is None:
            arrays[f"domain_{subset}"] = np.zeros(len(arrays[f"x_{subset}"]), np.int64)
        _check_arrays(arrays, subset, images, name)
    if images.x_train.shape[1:] != images.x_test.shape[1:]:
        raise array_error(name, "x_test", images.x_test, f"like x_train {images.x_train.shape}")
    x = images.x_train[:, :-1] if images.masks else images.x_train
    arrays |= cache.channel_moments(cache.channel_sums(x), x[:, 0].size)
    names = [list(images.classes), list(images.domains)]
    return arrays, [*names, ["mask"]] if images.masks else names


def _check_arrays(arrays: NamedArrays, subset: str, images: ImageArrays, name: str) -> None:
    """Validate types, shapes and ranges of the arrays for training, or of those for testing."""
    x = arrays[f"x_{subset}"]
    if x.dtype != np.uint8 or x.ndim != 4 or not x.size:
        raise array_error(name, f"x_{subset}", x, "uint8 [N, C, H, W]")
    for key, names in ((f"y_{subset}", images.classes), (f"domain_{subset}", images.domains)):
        y = arrays[key]
        if y.dtype != np.int64 or y.shape != x.shape[:1]:
            raise array_error(name, key, y, f"int64 [{len(x)}]")
        if y.min() < 0 or y.max() >= len(names):
            raise ValueError(f"{name}: {key} must be in 0..{len(names) - 1}, as for its names")
    if images.masks and x[:, -1].max() > len(images.classes):
        right = f"0..{len(images.classes)}, the last one for pixels of no class"
        raise ValueError(f"{name}: the masks in x_{subset} must be in {right}")


def _open(folder: Path, name: str) -> ImageDataset:
    """The data set in `folder`; all processes that map its files share the memory."""
    arrays, meta = cache.read_arrays(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        parts: dict[str, Any] = {key: torch.from_numpy(array) for key, array in arrays.items()}
    parts |= {key: tuple(meta[key]) for key in ("classes", "domains")}
    return ImageDataset(name, digest=meta["digest"], masks="channels" in meta, **parts)
