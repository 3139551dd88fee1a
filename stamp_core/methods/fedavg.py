"""Federated averaging; its only parameter is the server's learning rate."""

from typing import ClassVar

from stamp_core.methods.base.method import Method


class FedAvg(Method):
    """FedAvg is the base class without changes."""

    masks: ClassVar = True
