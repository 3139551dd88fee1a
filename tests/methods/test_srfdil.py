"""SR-FDIL: whole runs against NumPy and plain torch, with the networks of features."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
import small
import torch
from reference import CONFIGURATIONS, Array, Numbers, Reply, State, Visit
from small import BATCH_NORM, BN_B, flat, run, tiny
from test_refed import FEW, ReFedReference
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from stamp_core.core.seeding import address


class SRFDILReference(ReFedReference):
    """Re-Fed's cache by ranks of importance and of an averaged discriminator of features."""

    def start(self) -> None:
        """The networks with their initial weights, in float64."""
        super().start()
        torch.manual_seed(address(self.plan.seed, "generator"))
        self.generator = nn.Sequential(nn.Linear(42, 64), nn.ReLU(), nn.Linear(64, 32)).double()
        torch.manual_seed(address(self.plan.seed, "discriminator"))
        last = nn.Linear(64, 1)
        self.judge = nn.Sequential(nn.Linear(42, 64), nn.LeakyReLU(0.2), last).double()
        for parameter in last.parameters():
            nn.init.zeros_(parameter)
        nets = {"generator": self.generator, "discriminator": self.judge}
        self.nets = {name: (net, flat(list(net.parameters()))) for name, net in nets.items()}

    def local(self, visit: Visit, state: State) -> Reply:
        """The cache is chosen and the networks are trained at the received model."""
        for net, received in self.nets.values():
            vector_to_parameters(received.clone(), net.parameters())
        reply = super().local(visit, state)
        if len(state["cache"]):
            self.fit(visit, state["cache"])
        sent = {name: flat(list(net.parameters())) for name, (net, _) in self.nets.items()}
        return replace(reply, sent=sent)

    def inputs(self, rows: Numbers) -> tuple[Tensor, Tensor]:
        """Features of the received model, standardised among these images, and their classes."""
        h = self.features(self.theta, self.x[rows])
        h = (h - h.mean(0)) / (h.std(0) + 1e-6)
        return torch.tensor(h), torch.eye(self.classes, dtype=torch.float64)[self.y[rows]]

    def fit(self, visit: Visit, cache: Numbers) -> None:
        """Steps of torch's Adam: real features against generated ones, then the generator's."""
        h, y = self.inputs(cache)
        nets = (self.judge, self.generator)
        judge, maker = (
            torch.optim.Adam(net.parameters(), self.params.gan_lr, (0.5, 0.999)) for net in nets
        )
        draw = self.draw(visit, "features")
        for _ in range(self.params.gan_steps):
            places = torch.randint(len(cache), (32,), generator=draw)
            noise = torch.randn(32, 32, generator=draw).double()
            fake = self.generator(torch.cat([y[places], noise], 1))
            real = self.judge(torch.cat([h[places], y[places]], 1)).sigmoid()
            made = self.judge(torch.cat([fake.detach(), y[places]], 1)).sigmoid()
            judge.zero_grad()
            (-real.log().mean() - (1 - made).log().mean()).backward()
            judge.step()
            maker.zero_grad()
            fooled = self.judge(torch.cat([fake, y[places]], 1)).sigmoid()
            (-fooled.log().mean()).backward()
            maker.step()

    def scores(self, visit: Visit, offered: Numbers, state: State) -> Array:
        """Weighted means of both ranks: the share of the others of the class that are exceeded."""
        with torch.no_grad():
            logits = self.judge(torch.cat(self.inputs(offered), 1)).squeeze(1).numpy()
        labels = self.y[offered]
        ranks = []
        for values in (super().scores(visit, offered, state), logits):
            same = labels[:, None] == labels
            below = (same & (values[:, None] > values)).sum(1)
            share = below / np.maximum(same.sum(1) - 1, 1)
            ranks.append(torch.tensor(share).float())
        mixed = torch.lerp(*ranks, self.params.correlation)  # float32: sums of ranks often tie
        return np.asarray(mixed)

    def aggregate(self, replies: list[Reply]) -> None:
        super().aggregate(replies)
        for name, (net, _) in self.nets.items():
            mean = self.mean([reply.sent[name].numpy() for reply in replies], replies)
            self.nets[name] = net, torch.tensor(mean)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(
    "params",
    [
        # with longer steps of the GANs rounding grows until ranks differ on some kinds of CPU
        {"cache": 12, "gan_steps": 6, "gan_lr": 0.002, "correlation": 0.3, "balance": "none"},
        {"cache": 16, "steps": 2, "gan_steps": 5, "gan_lr": 0.002},
    ],
    ids=str,
)
def test_whole_runs_are_those_of_the_reference(params, configuration):
    reference.compare("srfdil", configuration, SRFDILReference, **params)


@pytest.mark.parametrize("balance", ["none", "class"])
def test_without_correlation_it_is_refed_bit_for_bit(balance):
    options: dict[str, Any] = {"split": FEW, "cache": 10, "steps": 2, "balance": balance}
    small.assert_same(
        run(tiny("srfdil", correlation=0.0, **options)), run(tiny("refed", **options))
    )


@pytest.mark.parametrize("policy", ["shared", "local", "frozen"])
def test_the_networks_leave_statistics_and_local_training_alone(policy):
    """In the first two tasks the cache does not depend on them: it is Re-Fed's."""
    options: dict[str, Any] = {
        **{"network": BATCH_NORM, "training": {"buffers": policy}, "balance": "class"},
        **{"split": {**FEW, "tasks": 2}, "cache": 50, "steps": 1},
    }
    record = run(tiny("srfdil", **options))
    small.assert_same_weights(record, run(tiny("refed", **options)))
    assert record.history[-1]["disk"] == 40 * (64 + 16) + 4 * BN_B * (policy == "local")
