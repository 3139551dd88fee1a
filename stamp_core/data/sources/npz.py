"""Images in .npz files, as numpy.savez writes them: one file, or one per domain.

x_train and x_test are uint8 [N, H, W], [N, H, W, C] or [N, C, H, W], where C is 1 or 3. Of four
axes, only the second or only the last may have such a length. y_train and y_test are whole numbers
[N]. Optional are `classes`, their names (else 0, 1, ...), domain_train and domain_test, whole
numbers [N], and `domains`, their names. Other arrays are not read.
"""

import io
import tokenize
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stamp_core.config.decode import require
from stamp_core.core import paths
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.images import (
    ImageArrays,
    ImageOptions,
    PathInside,
    array_error,
    convert_images,
    join_domains,
)
from stamp_core.data.store.cache import SUBSETS, Bytes, NamedArrays

PACKAGES = ("numpy", "pillow")
_NEEDED = ("x_train", "y_train", "x_test", "y_test")
_OPTIONAL = ("classes", "domain_train", "domain_test", "domains")
READ_ERRORS = (  # of altered archives, and of altered headers of their arrays
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError, SyntaxError),
    *(TypeError, EOFError, OSError, ValueError, RuntimeError),
)


@dataclass(frozen=True)
class Options(ImageOptions):
    """Parameters of the source."""

    file: PathInside | None = None  # in data/raw, or an absolute path
    domain_files: tuple[PathInside, ...] = ()  # instead of `file`: one per domain, named like it

    def __post_init__(self) -> None:
        """Validate that one of `file` and `domain_files` is set, and the names of domains."""
        named = bool(self.file or self.domain_files)
        require(self, "file", named, "the name of an .npz file, or domain_files set")
        either = not (self.file and self.domain_files)
        require(self, "file", either, "absent where domain_files is set")
        different = len({Path(name).stem for name in self.domain_files}) == len(self.domain_files)
        expected = "files of different names, as domains are named like them"
        require(self, "domain_files", different, expected)


def inputs(options: Options) -> list[Path]:
    """The paths of the files."""
    files = [paths.RAW / name for name in (options.domain_files or (str(options.file),))]
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; put the file there or name another")
    return files


def save_npz(dataset: ImageDataset, path: Path) -> None:
    """Write a data set without masks as this source reads it."""
    require(dataset, "masks", not dataset.masks, "false: an .npz file has no masks")
    arrays: Any = {name: np.asarray(getattr(dataset, name)) for name in (*_NEEDED, *_OPTIONAL)}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


def make(options: Options) -> ImageArrays:
    """The images of the file, or of all files as domains."""
    files = inputs(options)
    parts = [convert_images(read_npz(path), options) for path in files]
    if options.file:
        return parts[0]
    for path, part in zip(files, parts, strict=True):
        _check_domain(path, part, files[0], parts[0])
    return join_domains(parts, tuple(path.stem for path in files))


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


def _check_domain(path: Path, part: ImageArrays, first: Path, pattern: ImageArrays) -> None:
    """Validate that a domain has the classes and the shape of images of the first."""
    if part.domain_train is not None:
        raise ValueError(f"{path}: domain_train must be absent, as the file is one domain")
    if part.classes != pattern.classes:
        raise ValueError(f"{path}: classes must be those of {first}: {', '.join(pattern.classes)}")
    if part.x_train.shape[1:] != pattern.x_train.shape[1:]:
        own, other = (" x ".join(map(str, x.x_train.shape[1:])) for x in (part, pattern))
        found = f"x_train has {own} images, {first} {other}"
        raise ValueError(f"{path}: {found}; set size, grey or both")


def _read_arrays(path: Path) -> NamedArrays:
    """Those arrays of a file that this source uses."""
    file = None
    with suppress(*READ_ERRORS):
        file = zipfile.ZipFile(path)
    if file is None:
        raise ValueError(f"{path} is not an .npz file, or a truncated one; remove or replace it")
    with file:
        keys = [*_NEEDED, *(key for key in _OPTIONAL if f"{key}.npy" in file.namelist())]
        return {key: _read_array(path, key, file) for key in keys}


def _read_array(path: Path, key: str, file: zipfile.ZipFile) -> npt.NDArray[Any]:
    """One array of an opened file; its bytes are read first, whatever its header states."""
    try:
        member = file.getinfo(f"{key}.npy")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError("it is compressed in a way that numpy does not use")
        content = file.read(member)
        return _parse_array(content)
    except KeyError:
        raise ValueError(f"{path}: {key} is missing") from None
    except MemoryError as error:
        raise ValueError(f"{path}: {key} does not fit into memory: {error}") from None
    except READ_ERRORS as error:
        reason = f"is damaged: {error}; replace the file"
        if "pickle" in str(error):
            reason = "holds pickled objects; it must be a plain array"
        raise ValueError(f"{path}: {key} {reason}") from None


def _parse_array(content: bytes) -> npt.NDArray[Any]:
    """The array in the bytes of an .npy file; its header must state its length."""
    stream = io.BytesIO(content)
    first = np.lib.format.read_magic(stream) == (1, 0)
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    shape, transposed, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("pickled")
    if min(shape, default=0) < 0:
        raise ValueError(f"its shape is {shape}")
    values = np.frombuffer(content, dtype, offset=stream.tell())
    return values.reshape(shape, order="F" if transposed else "C")


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
    _check_labels(path, labels, names.tolist())
    return {names_key: tuple(names.tolist()), **{k: y.astype(np.int64) for k, y in labels.items()}}


def _check_labels(path: Path, labels: NamedArrays, names: list[str]) -> None:
    """Validate that every label has a name, and every name an image."""
    for key, y in labels.items():
        for place in np.flatnonzero((y < 0) | (y >= len(names)))[:1]:
            expected = f"in 0..{len(names) - 1}, as there are {len(names)}"
            raise ValueError(f"{path}: {key}[{place}] is {y[place]}; it must be {expected}")
    for key, y in labels.items():
        for label in np.setdiff1d(np.arange(len(names)), y)[:1]:
            raise ValueError(f"{path}: {key} has no image of {label} ({names[label]!r})")
