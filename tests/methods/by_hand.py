"""Softmax regression on the digits, written out in numpy, for methods checked by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stamp_core.engine.executor import Worker
from stamp_core.methods.base.method import ClientRound, Reply
from stamp_core.models import networks

Array = NDArray[np.float64]
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}
FULL_BATCH = {"rounds": 1, "batch_size": 1000}  # one SGD step in a client round


def use_softmax_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the network softmax regression: weights [10, 64], then biases [10]."""
    monkeypatch.setitem(networks.ENCODERS, "mlp", lambda network, shape: (nn.Flatten(), 64))


def inputs(worker: Worker, images: Tensor) -> Array:
    """uint8 images as the network gets them.  # [n, 64]"""
    x = images.numpy().reshape(-1, 64) / 255
    return (x - float(worker.work.dataset.mean)) / float(worker.work.dataset.std)


def softmax_gradient(theta: Array, x: Array, labels: Tensor) -> Array:
    """The gradient of the mean cross-entropy of n images.  # [650]

    With z = W x + b and G = (softmax(z) - onehot) / n it is dL/dW = G^T X, dL/db = sum_n G.
    """
    z = np.exp(x @ theta[:640].reshape(10, 64).T + theta[640:])
    g = (z / z.sum(1, keepdims=True) - np.eye(10)[labels.numpy()]) / len(labels)
    return np.concatenate([(g.T @ x).ravel(), g.sum(0)])


def task_data(client_round: ClientRound, worker: Worker) -> tuple[Array, Tensor]:
    """All inputs and labels of a client round's task."""
    dataset = worker.work.dataset
    indices = client_round.plan.train_indices(dataset, client_round.client, client_round.task)
    return inputs(worker, dataset.x_train[indices]), dataset.y_train[indices]


def memory_data(client_round: ClientRound, worker: Worker, task: int) -> tuple[Array, Tensor]:
    """Inputs and labels of the exemplars of a task."""
    memory = client_round.state["memory"]
    own = memory["tasks"] == task
    return inputs(worker, memory["images"][own]), memory["labels"][own]


def two_number_reply(client: int, samples: int, *values: float) -> Reply:
    """A reply with weights and buffers of two numbers each."""
    vector = torch.tensor(values, dtype=torch.float32)
    return Reply(client, {}, {"parameters": vector, "buffers": vector * 2}, samples, 1, 0.0)
