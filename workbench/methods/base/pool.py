"""Rows that are made many at a time, so that a device gets them at once, and taken in parts."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Pool:
    """Rows of some tensors, made by `make` whenever too few are left."""

    def __init__(self, make: Callable[[], Sequence[Tensor]]) -> None:
        self.make = make
        self.rows: Sequence[Tensor] = ()

    def take(self, count: int) -> Sequence[Tensor]:
        """The next rows of each tensor."""
        while not self.rows or len(self.rows[0]) < count:
            new = self.make()
            pairs = zip(self.rows or [part[:0] for part in new], new, strict=True)
            self.rows = [torch.cat(pair) for pair in pairs]
        taken, self.rows = zip(*((each[:count], each[count:]) for each in self.rows), strict=True)
        return taken
