"""Random generators, each seeded by an address: (seed, client, task, round, purpose ...)."""

import hashlib

import torch


def address(*parts: int | str) -> int:
    """The 63-bit seed of an address."""
    text = "/".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A new generator for an address, always on the CPU: a GPU run has the same draws."""
    return torch.Generator().manual_seed(address(*parts))
