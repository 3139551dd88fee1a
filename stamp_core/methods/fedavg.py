"""Federated averaging, whose parameters are the two learning rates of all methods that train."""

from typing import ClassVar

from stamp_core.methods.base.method import Method


class FedAvg(Method):
    """FedAvg is the base class without changes."""

    masks: ClassVar = True
