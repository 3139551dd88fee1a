"""The page of measurements on a device: whole on any device, refused where it is not here."""

import torch

from benchmarks import device
from benchmarks.device import Case, Client, remembering
from stamp_core.config.schema import Network

CNN = Network("cnn", channels=(4,), features=8, norm="batch")
CASES = (Case("CNN", CNN, 8, 4, 3), Case("MLP", Network("mlp", features=8), 8, 4, 3))


def test_the_memory_of_past_tasks_is_matched():
    client = Client(CASES[0], "cpu", 20, classes=2, method="stamp")
    assert not client.round().log.numbers  # nothing is remembered, nothing matched
    assert any("temporal" in name for name in remembering(client, 3).round().log.numbers)
    assert client.state["memory"]["tasks"].unique().tolist() == [1, 2, 3]


def test_the_operations_of_a_step_by_hand():
    """An MLP 192-8-100 on 4 images: a product forward; for the head two backward, else one."""
    module = Client(CASES[1], "cpu", 100).runtime.network(0)
    products = 2 * 4 * (192 * 8) * 2 + 2 * 4 * (8 * 100) * 3
    assert device.step_operations(module, CASES[1], torch.device("cpu")) == products
