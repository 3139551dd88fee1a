"""Vectors as secure aggregation has them: the server can add them up once, and do nothing else."""

from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv matmul rmatmul neg abs lt le gt ge eq ne "
    "getitem setitem len iter contains bool float int index"
)


class SingleUploadError(TypeError):
    """The server's code has asked for one client's upload, or for a sum that shows it."""


class Sealed:
    """A client's vector that takes part in one sum: two would show each of two uploads."""

    def __init__(self, vector: Tensor, client: int) -> None:
        self._vector: Tensor | None = vector
        self.client = client
        self.shape, self.dtype, self.nbytes = vector.shape, vector.dtype, vector.nbytes

    @property
    def device(self) -> torch.device:
        return self._unspent().device

    def to(self, device: torch.device | str) -> "Sealed":
        self._vector = self._unspent().to(device)
        return self

    def take(self) -> Tensor:
        """The vector itself, once; `weighted_sum` alone calls this."""
        vector, self._vector = self._unspent(), None
        return vector

    def _unspent(self) -> Tensor:
        if self._vector is None:
            raise SingleUploadError(f"a second sum with the upload of client {self.client}")
        return self._vector

    def _refuse(self, use: str, *_: object) -> Any:
        raise SingleUploadError(f"{use} of a single upload")

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], *_: object) -> Any:
        raise SingleUploadError(f"{getattr(function, '__name__', function)} of single uploads")

    def __getattr__(self, name: str) -> Any:
        self._refuse(name)


for _operator in OPERATORS.split():  # Python does not look these up by `__getattr__`
    setattr(Sealed, f"__{_operator}__", partialmethod(Sealed._refuse, _operator))


def weighted_sum(vectors: Sequence[Tensor | Sealed], weights: Sequence[float]) -> Tensor:
    """sum_i weights[i] vectors[i] in float64, added up in the given order where the first one is.

    A vector with weight 0 takes no part. Of sealed vectors, those of two clients at least must.
    """
    pairs = [pair for pair in zip(vectors, weights, strict=True) if pair[1]]
    clients = {vector.client for vector, _ in pairs if isinstance(vector, Sealed)}
    if len(clients) == 1:
        raise SingleUploadError(f"a sum of the upload of client {clients.pop()} alone")
    shape, device = vectors[0].shape, vectors[0].device
    total = torch.full(shape, -0.0, dtype=torch.float64, device=device)  # -0.0 + x is x
    for vector, weight in pairs:
        opened = vector.take() if isinstance(vector, Sealed) else vector
        total.add_(opened.to(device), alpha=weight)
    return total
