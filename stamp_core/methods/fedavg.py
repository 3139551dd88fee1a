"""Federated averaging; with `step` other than 1 a server that walks further (or less far)."""

from stamp_core.methods import Method


class FedAvg(Method):
    """The base class under its own name."""
