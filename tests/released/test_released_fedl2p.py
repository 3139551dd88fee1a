"""FedL2P (royson/fedl2p): `fit` and `evaluate` of fedl2p_classification_client.py.

Two outer steps, then fine-tuning. `precompute_kld` and `precompute_feat_stats` have the variances
of n instead of n - 1. On both sides steps of the meta-networks are 50 times as long, and `clamp` is
a tenth.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import small
import torch
from executed import Execution, draws, train_on_images
from torch import Tensor

from stamp_core.client.runtime import RoundId
from stamp_core.data.plan import Plan, Task
from workbench.methods.fedl2p import FedL2P
from workbench.methods.fedl2p.meta_networks import layer_statistics

L2P = Execution("fedl2p", "fedl2p", "fe1944e", 5e-6)
PARAMS = replace(L2P.params, outer_steps=2, meta_lr=0.05, clamp=0.1)
IMAGES = 40
META_NETS = ((1, 100, 100, 1), (8, 100, 100, 8))  # of one normalisation, of four layers
RATES = 8  # one for each tensor


def meta() -> Tensor:
    """Weights and biases of both meta-networks, and the learning rates."""
    parts = list[Tensor]()
    for sizes, bias in zip(META_NETS, (0.0, 1.0), strict=True):
        for a, b in pairwise(sizes):
            parts += [draws(len(parts), a * b) / 40, draws(100 + len(parts), b) + bias]
    return torch.cat([*parts, draws(200, RATES).abs() / 100]).float()


def test_outer_steps_and_fine_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    split, training = {"clients": 1, "tasks": 1}, {"batch_size": 4}
    experiment = small.tiny("fedl2p", split, training, small.BATCH_NORM)
    drawn = train_on_images(monkeypatch, experiment, IMAGES)
    task = Task(tuple(range(10)), train=tuple(range(IMAGES)))
    plan = Plan(experiment.setting.split, 0, drawn.digest, ((task,),), 10)
    method = small.worker(replace(experiment, params=PARAMS), plan).method
    assert isinstance(method, FedL2P)
    mean, root = draws(1, 2, 4)
    buffers = torch.cat([mean, 1 + root.square()]).float()
    state = {"parameters": draws(2, small.BN_P).float() / 2.5, "buffers": buffers}
    round_id = RoundId(0, 0, 0, 0, last=True)
    reply = method.train_client(method.client_round(round_id, plan, state, {"meta": meta()}))
    tuned = method.client_round(round_id, plan, state, reply.message)
    method.receive(tuned)
    statistics = layer_statistics(method.runtime, method.norms, tuned.indices)
    method.load_personal_model(tuned)
    change = reply.message["meta"] - meta()
    found = {"meta": change[:-RATES:16], "rates": 100 * change[-RATES:], **statistics._asdict()}
    L2P.check({**found, "logits": method.runtime.outputs(drawn.x_train)})
