"""Images in .npz files, as numpy.savez writes them: one file, or one per domain.

x_train and x_test are uint8 [N, H, W], [N, H, W, C] or [N, C, H, W], where C is 1 or 3. Of four
axes, only the second or only the last may have such a length. y_train and y_test are whole numbers
[N]. Optional are `classes`, their names (else 0, 1, ...), domain_train and domain_test, whole
numbers [N], and `domains`, their names. Other arrays are not read.
"""

import math
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from stamp_core.config.decode import invalid, require_inside
from stamp_core.core import paths
from stamp_core.data.dataset import ImageArrays, array_error
from stamp_core.data.store.cache import Bytes, NamedArrays
from stamp_core.data.store.downloads import ImageOptions, convert_images, join_domains

PACKAGES = ("numpy", "pillow")
_NEEDED = ("x_train", "y_train", "x_test", "y_test")
_OPTIONAL = ("classes", "domain_train", "domain_test", "domains")
_RATIO = 1032  # a compressed byte holds at most that many; the length in a directory can be forged
_READ_ERRORS = (  # of altered archives, and of altered headers of their arrays
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError, SyntaxError),
    *(TypeError, EOFError, OSError, ValueError, RuntimeError),
)


@dataclass(frozen=True)
class Options(ImageOptions):
    """Parameters of the source."""

    file: str | None = None  # in data/raw, or an absolute path
    domain_files: tuple[str, ...] = ()  # instead of `file`: one per domain, named like it

    def __post_init__(self) -> None:
        """Refuse neither or both of `file` and `domain_files`, and domains of the same name."""
        super().__post_init__()
        require_inside(self, "file", "domain_files")
        if self.file and self.domain_files:
            raise invalid("file", self.file, "absent where domain_files is set")
        if not self.file and not self.domain_files:
            raise invalid("file", self.file, "the name of an .npz file, or domain_files set")
        if len({Path(name).stem for name in self.domain_files}) < len(self.domain_files):
            expected = "files of different names, as domains are named like them"
            raise invalid("domain_files", list(self.domain_files), expected)


def inputs(options: Options) -> list[Path]:
    """The paths of the files."""
    files = [paths.RAW / name for name in (options.domain_files or (str(options.file),))]
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; put the file there or name another")
    return files


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
    counts = {"train": len(x_train), "test": len(x_test)}
    labels = _read_labels(path, arrays, "y", "classes", counts)
    if arrays.keys() & {"domain_train", "domain_test", "domains"}:
        labels |= _read_labels(path, arrays, "domain", "domains", counts)
    return ImageArrays(x_train=x_train, x_test=x_test, **labels)


def _check_domain(path: Path, part: ImageArrays, first: Path, pattern: ImageArrays) -> None:
    """Refuse a domain whose classes or image shape differ from those of the first."""
    if part.domain_train is not None:
        raise ValueError(f"{path}: domain_train must be absent, as the file is one domain")
    if part.classes != pattern.classes:
        raise ValueError(f"{path}: classes must be those of {first}: {', '.join(pattern.classes)}")
    if part.x_train.shape[1:] != pattern.x_train.shape[1:]:
        own, other = (" x ".join(map(str, x.x_train.shape[1:])) for x in (part, pattern))
        fix = "set size, grey or both"
        raise ValueError(f"{path}: x_train has {own} images, {first} {other}; {fix}")


def _read_arrays(path: Path) -> NamedArrays:
    """Those arrays of a file that this source uses."""
    file = None
    with suppress(*_READ_ERRORS):
        file = zipfile.ZipFile(path)
    if file is None:
        raise ValueError(f"{path} is not an .npz file, or a truncated one; remove or replace it")
    with file:
        keys = [*_NEEDED, *(key for key in _OPTIONAL if f"{key}.npy" in file.namelist())]
        return {key: _read_array(path, key, file) for key in keys}


def _read_array(path: Path, key: str, file: zipfile.ZipFile) -> npt.NDArray[Any]:
    """One array of an opened file."""
    try:
        member = file.getinfo(f"{key}.npy")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError("it is compressed in a way that numpy does not use")
        with file.open(member) as content:
            _check_length(content, member.file_size, _RATIO * path.stat().st_size)
        with file.open(member) as content:
            return np.asarray(np.lib.format.read_array(content, allow_pickle=False))
    except KeyError:
        raise ValueError(f"{path}: {key} is missing") from None
    except MemoryError as error:
        raise ValueError(f"{path}: {key} does not fit into memory: {error}") from None
    except _READ_ERRORS as error:
        reason = f"is damaged: {error}; replace the file"
        if "pickle" in str(error):
            reason = "holds pickled objects; it must be a plain array"
        raise ValueError(f"{path}: {key} {reason}") from None


def _check_length(content: IO[bytes], length: int, most: int) -> None:
    """Refuse a header that states another length: numpy would allocate it, or read a part.

    Of a part zip does not verify the checksum.
    """
    if np.lib.format.read_magic(content) == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(content)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(content)
    stated = content.tell() + math.prod(shape) * dtype.itemsize
    if not dtype.hasobject and (stated != length or stated > most):
        held = f"{length}" if length <= most else f"at most {most}"
        raise ValueError(f"its header states {stated} bytes; the file holds {held}")


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


def _read_labels(
    path: Path, arrays: NamedArrays, kind: str, names_key: str, counts: Mapping[str, int]
) -> dict[str, Any]:
    """The checked arrays `kind`_train and `kind`_test, and the names of their values."""
    labels = {}
    for subset, count in counts.items():
        key = f"{kind}_{subset}"
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
    """Refuse labels without a name, and names without an image."""
    for key, y in labels.items():
        for place in np.flatnonzero((y < 0) | (y >= len(names)))[:1]:
            expected = f"in 0..{len(names) - 1}, as there are {len(names)}"
            raise ValueError(f"{path}: {key}[{place}] is {y[place]}; it must be {expected}")
    for key, y in labels.items():
        for label in np.setdiff1d(np.arange(len(names)), y)[:1]:
            raise ValueError(f"{path}: {key} has no image of {label} ({names[label]!r})")
