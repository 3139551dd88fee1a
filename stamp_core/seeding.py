"""Randomness has an address: every draw comes from a generator made from where and why it is."""

import hashlib

import torch


def address(*parts: int | str) -> int:
    """A 63-bit number that stands for (seed, client, task, round, purpose ...)."""
    text = "/".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A fresh generator for one address; always on the CPU, so a GPU sees the same draws."""
    return torch.Generator().manual_seed(address(*parts))
