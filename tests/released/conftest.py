"""Arithmetic in float64, as released code was executed."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A context in which float32 is float64."""
    single = torch.float32
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    yield
    torch.set_default_dtype(single)
