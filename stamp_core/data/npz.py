"""Any pictures in .npz files, as numpy.savez writes them: one file, or one a domain.

x_train and x_test are uint8 [N, H, W], [N, H, W, C] or [N, C, H, W], where C is 1 or 3 and the
other of the two places is neither; y_train and y_test are whole numbers [N]. Where wanted:
`classes`, their names (else 0, 1, ...), domain_train and domain_test, whole numbers [N], and
`domains`, their names. Other arrays are not read.
"""

import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.npyio import NpzFile

from stamp_core import downloads, paths
from stamp_core.config import wrong
from stamp_core.data import Arrays, Bytes, Pictures

PACKAGES = ("numpy", "pillow")
NEEDED = ("x_train", "y_train", "x_test", "y_test")
OPTIONAL = ("classes", "domain_train", "domain_test", "domains")
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError)


@dataclass(frozen=True)
class Options(downloads.Options):
    """What can be chosen."""

    file: str | None = None  # in data/raw, or an absolute path
    domain_files: tuple[str, ...] = ()  # instead: each is a domain, named like its file

    def __post_init__(self) -> None:
        """Refuse no file, both ways at once, and a name for two domains."""
        super().__post_init__()
        if self.file and self.domain_files:
            raise wrong("file", self.file, "absent where domain_files is set")
        if not self.file and not self.domain_files:
            raise wrong("file", self.file, "the name of an .npz file, or domain_files set")
        if len({Path(name).stem for name in self.domain_files}) < len(self.domain_files):
            right = "files with names of their own, as domains are named like them"
            raise wrong("domain_files", list(self.domain_files), right)


def inputs(options: Options) -> list[Path]:
    """The files that the pictures come from: other contents are other pictures."""
    found = [paths.RAW / name for name in (options.domain_files or (str(options.file),))]
    for path in found:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; put the file there or name another")
    return found


def make(options: Options) -> Pictures:
    """The pictures of the file, or of all files as domains."""
    found = inputs(options)
    made = [downloads.fit(read(path), options) for path in found]
    if options.file:
        return made[0]
    for path, part in zip(found, made, strict=True):
        _refuse_other_kinds(path, part, found[0], made[0])
    return downloads.join(made, tuple(path.stem for path in found))


def read(path: Path) -> Pictures:
    """The pictures in one file, in the size and the colours that they have there."""
    arrays = _arrays(path)
    x_train, x_test = (_pictures(path, key, arrays[key]) for key in ("x_train", "x_test"))
    if x_train.shape[1:] != x_test.shape[1:]:
        raise _misfit(path, "x_test", arrays["x_test"], f"like x_train, {_kind(arrays['x_train'])}")
    counts = {"train": len(x_train), "test": len(x_test)}
    labels = _labels(path, arrays, "y", "classes", counts)
    if arrays.keys() & {"domain_train", "domain_test", "domains"}:
        labels |= _labels(path, arrays, "domain", "domains", counts)
    return Pictures(x_train=x_train, x_test=x_test, **labels)


def _refuse_other_kinds(path: Path, part: Pictures, first: Path, pattern: Pictures) -> None:
    """Refuse a domain that does not fit to the first."""
    if part.domain_train is not None:
        raise ValueError(f"{path}: domain_train must be absent, as the file is one domain")
    if part.classes != pattern.classes:
        raise ValueError(f"{path}: classes must be those of {first}: {', '.join(pattern.classes)}")
    if part.x_train.shape[1:] != pattern.x_train.shape[1:]:
        own, other = (" x ".join(map(str, x.x_train.shape[1:])) for x in (part, pattern))
        raise ValueError(
            f"{path}: x_train has {own} pictures, {first} {other}; set size, grey or both"
        )


def _arrays(path: Path) -> Arrays:
    """The arrays of a file that are known here."""
    with _opened(path) as found:
        wanted = [*NEEDED, *(key for key in OPTIONAL if key in found)]
        return {key: _array(path, key, found) for key in wanted}


def _opened(path: Path) -> NpzFile:
    """An .npz file, its arrays not yet read."""
    with suppress(*DAMAGE):
        found = np.load(path, allow_pickle=False)
        if isinstance(found, NpzFile):
            return found
    raise ValueError(f"{path} is no .npz file, or a truncated one")


def _array(path: Path, key: str, found: Mapping[str, Any]) -> npt.NDArray[Any]:
    """One array of an opened file."""
    try:
        return np.asarray(found[key])
    except KeyError:
        raise ValueError(f"{path}: {key} is missing") from None
    except DAMAGE as error:
        reason = "holds pickled objects; it must be a plain array"
        if "pickle" not in str(error):
            reason = f"is damaged: {error}"
        raise ValueError(f"{path}: {key} {reason}") from None


def _pictures(path: Path, key: str, x: npt.NDArray[Any]) -> Bytes:
    """An array of pictures as [N, C, H, W]."""
    if x.dtype != np.uint8:
        raise _misfit(path, key, x, "uint8, 0 to 255")
    if not x.size:
        raise _misfit(path, key, x, "at least one picture")
    if x.ndim == 3:
        return x[:, None]
    first, last = (x.ndim == 4 and x.shape[axis] in (1, 3) for axis in (1, -1))
    if first == last:
        right = "[N, H, W], or [N, H, W, C] or [N, C, H, W] with 1 or 3 in the place of C alone"
        raise _misfit(path, key, x, right)
    return x.transpose(0, 3, 1, 2) if last else x


def _labels(
    path: Path, arrays: Arrays, kind: str, names: str, counts: Mapping[str, int]
) -> dict[str, Any]:
    """The labels of both parts, each `kind`_train and `kind`_test, and what names them."""
    found = {}
    for part, count in counts.items():
        key = f"{kind}_{part}"
        if key not in arrays:
            raise ValueError(f"{path}: {key} is missing")
        if arrays[key].dtype.kind not in "iu" or arrays[key].shape != (count,):
            raise _misfit(path, key, arrays[key], f"whole numbers [{count}], one a picture")
        found[key] = arrays[key]
    called = _names(path, names, arrays, found)
    for key, y in found.items():
        _refuse_strays(path, key, y, called)
    for key, y in found.items():
        _refuse_gaps(path, key, y, called)
    return {names: called, **{key: y.astype(np.int64) for key, y in found.items()}}


def _names(path: Path, key: str, arrays: Arrays, labels: Arrays) -> tuple[str, ...]:
    """The names in an array, or as many numbers as there are different labels."""
    if key not in arrays:
        return tuple(map(str, range(len(np.unique(np.concatenate([*labels.values()]))))))
    names = arrays[key]
    if names.dtype.kind != "U" or names.ndim != 1 or len(np.unique(names)) < len(names):
        raise _misfit(path, key, names, "different texts [C]")
    return tuple(names.tolist())


def _refuse_strays(path: Path, key: str, y: npt.NDArray[Any], names: tuple[str, ...]) -> None:
    """Refuse labels without a name."""
    (strays,) = np.nonzero((y < 0) | (y >= len(names)))
    if len(strays):
        right = f"it must be in 0..{len(names) - 1}, as there are {len(names)}"
        raise ValueError(f"{path}: {key} holds {y[strays[0]]} at place {strays[0]}; {right}")


def _refuse_gaps(path: Path, key: str, y: npt.NDArray[Any], names: tuple[str, ...]) -> None:
    """Refuse names without a picture."""
    gaps = np.setdiff1d(np.arange(len(names)), y)
    if len(gaps):
        raise ValueError(f"{path}: {key} has no picture of {gaps[0]} ({names[gaps[0]]!r})")


def _misfit(path: Path, key: str, array: npt.NDArray[Any], right: str) -> ValueError:
    """The error for an array with the wrong type or shape."""
    return ValueError(f"{path}: {key} is {_kind(array)}; it must be {right}")


def _kind(array: npt.NDArray[Any]) -> str:
    """Type and shape of an array in words."""
    return f"{array.dtype} {list(array.shape)}"
