"""The same bits on every x86-64 CPU: the instructions that numerical libraries may choose.

By themselves NumPy, OpenBLAS, MKL, oneDNN and ATen choose them by the kind of CPU, and the last
digits of a sum follow. The pins must be in the environment before these libraries are imported, so
the package imports this module first, which needs none of them. Processes that it starts inherit
them; for others `env $(python stamp_core/core/arithmetic.py) ...` sets them.

With STAMP_ARITHMETIC=machine the libraries choose: results hold for one kind of CPU.
"""

import hashlib
import os
import warnings
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CHOICE = "STAMP_ARITHMETIC"
PINNED, MACHINE = "pinned", "machine"
PINS = {
    "ATEN_CPU_CAPABILITY": "avx2",  # softmax, losses, elementwise operations
    "MKL_CBWR": "COMPATIBLE",  # linear layers, decompositions; AVX2 is ignored on AMD
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # convolutions
    "OPENBLAS_CORETYPE": "Haswell",  # NumPy's and SciPy's linear algebra
    "NPY_DISABLE_CPU_FEATURES": "X86_V4,AVX512_ICL,AVX512_SPR",  # NumPy's exponentials
}
DIGESTS = {  # of the probe with these pins: Intel with AVX-512, AMD without; torch 2.13, NumPy 2.4
    "NumPy": "ac0fd8e8196d35de",
    "OpenBLAS": "460f006af3121ef0",
    "ATen": "d25dad233d47994a",
    "MKL": "6408975ed5296a1f",
    "oneDNN": "a524ae1835fab180",
}


def pin() -> None:
    """Set the pins for this process and those that it starts, unless the machine is to choose."""
    if os.environ.get(CHOICE) != MACHINE:
        os.environ.update(PINS)


@cache
def arithmetic() -> str:
    """Which arithmetic this process has, by its bits: part of the identity of its results."""
    if (chosen := os.environ.get(CHOICE, PINNED)) not in (PINNED, MACHINE):
        raise ValueError(f"{CHOICE} is {chosen!r}: it must be {PINNED!r} or {MACHINE!r}")
    if chosen == MACHINE:
        return MACHINE
    others = [name for name, digest in probe().items() if digest != DIGESTS[name]]
    if others:
        warnings.warn(
            f"{', '.join(others)} has other last digits here than in published results: import "
            "stamp_core before numpy and torch (`make lab` does), or say with "
            f"{CHOICE}={MACHINE} that it is meant; new records name the arithmetic {MACHINE!r}",
            stacklevel=2,
        )
    return MACHINE if others else PINNED


def probe() -> dict[str, str]:
    """The digest of some results of each library, whose last digits follow the instructions."""
    return {name: hashlib.sha256(bits).hexdigest()[:16] for name, bits in _results()}


def _results() -> Iterator[tuple[str, bytes]]:
    import numpy as np
    import torch
    import torch.nn.functional as F

    def numbers(*shape: int) -> Any:
        draws = np.random.Generator(np.random.PCG64(len(shape))).integers(-(2**23), 2**23, shape)
        return torch.from_numpy((draws / 2**23).astype(np.float32))

    x, images, kernels = numbers(64, 40), numbers(4, 3, 14, 14), numbers(8, 3, 5, 5)
    double = x.double().numpy()
    square = double.T @ double
    yield "NumPy", np.exp(double).tobytes() + np.exp(x.numpy()).tobytes()
    yield "OpenBLAS", square.tobytes() + np.linalg.eigvalsh(square).tobytes()
    yield "ATen", F.log_softmax(x, 1).numpy().tobytes()
    yield "MKL", (x @ x.T).numpy().tobytes() + (x.double() @ x.T.double()).numpy().tobytes()
    yield "oneDNN", F.conv2d(images, kernels).numpy().tobytes() + F.gelu(x).numpy().tobytes()


def sqrt(values: "Tensor") -> "Tensor":
    """The square root, as IEEE roots and quotients; MKL's own differs between kinds of CPU."""
    return values.rsqrt().reciprocal()


def distances(one: "Tensor", other: "Tensor") -> "Tensor":
    """The Euclidean distance of each row to each other row, with IEEE roots.  # [n, m]"""
    import torch

    return torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist")


if __name__ == "__main__" and os.environ.get(CHOICE) != MACHINE:
    print(*(f"{name}={value}" for name, value in PINS.items()))
