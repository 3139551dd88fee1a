"""Images in an .npz file, as numpy.savez writes it.

x_train and x_test are uint8 [N, H, W], [N, H, W, C] or [N, C, H, W], where C is 1 or 3. Of four
axes, only the second or only the last may have such a length. y_train and y_test are whole numbers
[N]. Optional are `classes`, their names (else 0, 1, ...), domain_train and domain_test, whole
numbers [N], and `domains`, their names. Other arrays are not read.
"""

import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stamp_core.config.decode import require
from stamp_core.core import paths
from stamp_core.data.cache import SUBSETS, Bytes, NamedArrays
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.images import (
    ImageArrays,
    ImageOptions,
    PathInside,
    array_error,
    convert_images,
)

PACKAGES = ("numpy", "pillow")
_NEEDED = ("x_train", "y_train", "x_test", "y_test")
_OPTIONAL = ("classes", "domain_train", "domain_test", "domains")
READ_ERRORS = (  # of altered archives, and of altered headers of their arrays
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError, SyntaxError),
    *(TypeError, EOFError, OSError, ValueError, RuntimeError, MemoryError),
)


@dataclass(frozen=True)
class Options(ImageOptions):
    """Parameters of the source."""

    file: PathInside = ""  # in data/raw, or an absolute path

    def __post_init__(self) -> None:
        require(self, "file", bool(self.file), "the name of an .npz file")


def inputs(options: Options) -> list[Path]:
    """The path of the file."""
    path = paths.RAW / options.file
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; put the file there or name another")
    return [path]


def save_npz(dataset: ImageDataset, path: Path) -> None:
    """Write a data set without masks as this source reads it."""
    require(dataset, "masks", not dataset.masks, "false: an .npz file has no masks")
    arrays: Any = {name: np.asarray(getattr(dataset, name)) for name in (*_NEEDED, *_OPTIONAL)}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


def make(options: Options) -> ImageArrays:
    """The images of the file."""
    return convert_images(read_npz(*inputs(options)), options)


def read_npz(path: Path) -> ImageArrays:
    """The images in one file, with their own size and colours."""
    arrays = _read_arrays(path)
    x_train, x_test = (_to_nchw(path, key, arrays[key]) for key in ("x_train", "x_test"))
    if x_train.shape[1:] != x_test.shape[1:]:
        expected = f"like x_train, {x_train.dtype} {[*arrays['x_train'].shape]}"
        raise array_error(path, "x_test", arrays["x_test"], expected)
    labels = _read_labels(path, arrays, "y", "classes")
    if arrays.keys() & {"domain_train", "domain_test", "domains"}:
        labels |= _read_labels(path, arrays, "domain", "domains")
    return ImageArrays(x_train=x_train, x_test=x_test, **labels)


def _read_arrays(path: Path) -> NamedArrays:
    """Those arrays of a file that this source uses."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in (*_NEEDED, *_OPTIONAL) if key in file}
    except READ_ERRORS as error:
        reason = f"{path} is not a whole .npz file of plain arrays: {error}"
        raise ValueError(f"{reason}; remove or replace it") from None
    for key in _NEEDED:
        if key not in arrays:
            raise ValueError(f"{path}: {key} is missing")
    return arrays


def _to_nchw(path: Path, key: str, x: npt.NDArray[Any]) -> Bytes:
    """Images in any of the three layouts as [N, C, H, W]."""
    if x.dtype != np.uint8:
        raise array_error(path, key, x, "uint8, 0 to 255")
    if not x.size:
        raise array_error(path, key, x, "at least one image")
    if x.ndim == 3:
        return x[:, None]
    first, last = (x.ndim == 4 and x.shape[axis] in (1, 3) for axis in (1, -1))
    if first == last:
        expected = "[N, H, W], [N, H, W, C] or [N, C, H, W], where C alone is 1 or 3"
        raise array_error(path, key, x, expected)
    return x.transpose(0, 3, 1, 2) if last else x


def _read_labels(path: Path, arrays: NamedArrays, kind: str, names_key: str) -> dict[str, Any]:
    """The checked arrays `kind`_train and `kind`_test, and the names of their values."""
    labels = {}
    for subset in SUBSETS:
        key, count = f"{kind}_{subset}", len(arrays[f"x_{subset}"])
        if key not in arrays:
            raise ValueError(f"{path}: {key} is missing")
        if arrays[key].dtype.kind not in "iu" or arrays[key].shape != (count,):
            expected = f"whole numbers [{count}], one per image"
            raise array_error(path, key, arrays[key], expected)
        labels[key] = arrays[key]
    names = arrays.get(names_key)
    if names is None:
        names = np.arange(len(np.unique(np.concatenate([*labels.values()])))).astype(str)
    if names.dtype.kind != "U" or names.ndim != 1 or len(np.unique(names)) < len(names):
        raise array_error(path, names_key, names, "different texts [C]")
    known = np.arange(len(names))
    for key, y in labels.items():
        for label in np.setdiff1d(y, known)[:1]:
            right = f"each must be in 0..{len(names) - 1}, as there are {len(names)}"
            raise ValueError(f"{path}: {key} holds {label}; {right}")
    for key, y in labels.items():
        for label in np.setdiff1d(known, y)[:1]:
            raise ValueError(f"{path}: {key} has no image of {label} ({str(names[label])!r})")
    return {names_key: tuple(names.tolist()), **{k: y.astype(np.int64) for k, y in labels.items()}}
