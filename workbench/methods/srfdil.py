"""SR-FDIL (Li et al., 2024), reconstructed: a cache by local importance and global correlation."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.limits import Positive, PositiveInt, UnitInterval
from stamp_core.methods.base.method import ClientRound
from stamp_core.models.flat import FlatModel
from workbench.adam import FlatAdam
from workbench.methods.base.exemplar_lists import ExemplarLists, empty_lists
from workbench.methods.base.generators import build_seeded
from workbench.methods.base.sample_cache import CacheContext, CacheParams, SampleCache

NETWORKS = ("generator", "discriminator")  # of features, sent and averaged
NOISE = 32  # Gaussian inputs of the generator
HIDDEN = 64  # units of both networks
SLOPE = 0.2  # of LeakyReLU for negative values
BATCH = 32  # features in a step of both networks
BETAS = (0.5, 0.999)  # of Adam
DEVIATION = 1e-6  # added to the features' deviations


@dataclass(frozen=True)
class SRFDILParams(CacheParams):
    """How samples are scored; no value could be read in the paper."""

    balance: Literal["none", "class"] = "class"
    correlation: UnitInterval = 0.5  # share of the global correlation in the score; 0: Re-Fed
    gan_steps: PositiveInt = 20  # of both networks in each round
    gan_lr: Positive = 2e-4  # of Adam


class SRFDIL(SampleCache):
    """FedAvg with a cache of the samples that matter to the client and look like all clients' ones.

    A reconstruction from the abstract and one sentence of a later paper. The cache and the local
    importance are Re-Fed's. Every client trains a generator of features and a discriminator on its
    cache, both conditioned on the class, and the server averages them: the averaged discriminator
    says how far a sample is correlated with the data of all clients. Inside a class the samples are
    ordered by the weighted mean of their two ranks.
    """

    Params: ClassVar = SRFDILParams

    def __init__(self, params: SRFDILParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.adversarial = params.correlation > 0 and params.cache > 0
        if self.adversarial:
            live = {name: self.network(name, seed=0).to(runtime.device) for name in NETWORKS}
            self.extra_networks = {name: FlatModel(network) for name, network in live.items()}

    def network(self, name: str, seed: int) -> nn.Module:
        build = build_generator if name == "generator" else build_discriminator
        sizes = self.classifier.features, self.runtime.classes
        return build_seeded(partial(build, *sizes), seed, name)

    def initial_weights(self, name: str, seed: int) -> Tensor:
        return FlatModel(self.network(name, seed)).parameters

    def start(self, client_round: ClientRound) -> CacheContext:
        cache = self.updated_cache(client_round)
        if self.adversarial and len(cache["labels"]):
            with client_round.log.clock("networks of features"):
                self.fit_networks(client_round, cache)
        return CacheContext(cache)

    def scores(self, client_round: ClientRound, samples: ExemplarLists) -> Tensor:
        """The weighted means of the ranks of importance and correlation in a class.  # [N]"""
        importance = super().scores(client_round, samples)
        if not self.adversarial:
            return importance
        local = ranks_in_class(importance, samples["labels"])
        of_all = ranks_in_class(self.correlations(samples), samples["labels"])
        return torch.lerp(local, of_all, self.params.correlation)

    @torch.no_grad()
    def correlations(self, samples: ExemplarLists) -> Tensor:
        """The live discriminator's logits: real above 0, generated below.  # [N]"""
        return self.discriminate(*self.features(samples)).cpu()

    def features(self, samples: ExemplarLists) -> tuple[Tensor, Tensor]:
        """Standardised features of samples, and one-hot labels.  # [N, F], [N, classes]"""
        features = self.runtime.outputs(samples["images"], self.classifier.encode)
        deviations, means = torch.std_mean(features, 0, correction=0)
        standardised = (features - means) / (deviations + DEVIATION)
        classes = F.one_hot(samples["labels"], self.runtime.classes).to(features.dtype)
        return standardised.to(self.runtime.device), classes.to(self.runtime.device)

    def discriminate(self, features: Tensor, classes: Tensor) -> Tensor:
        inputs = torch.cat([features, classes], 1)
        logits: Tensor = self.extra_networks["discriminator"].module(inputs)
        return logits.squeeze(1)

    def fit_networks(self, client_round: ClientRound, cache: ExemplarLists) -> None:
        features, classes = self.features(cache)
        draw = client_round.generator("features")
        indices, noise = list[Tensor](), list[Tensor]()
        for _ in range(self.params.gan_steps):
            indices.append(torch.randint(len(classes), (BATCH,), generator=draw))
            noise.append(torch.randn(BATCH, NOISE, generator=draw))
        drawn = (torch.stack(each).to(self.runtime.device) for each in (indices, noise))
        adams = {
            name: FlatAdam(network, self.params.gan_lr, betas=BETAS)
            for name, network in self.extra_networks.items()
        }
        for chosen, inputs in zip(*drawn, strict=True):
            asked = classes[chosen]
            generated = self.extra_networks["generator"].module(torch.cat([asked, inputs], 1))
            against = F.softplus(self.discriminate(generated.detach(), asked)).mean()
            of_real = F.softplus(-self.discriminate(features[chosen], asked)).mean()
            descend(adams["discriminator"], of_real + against)
            fooled = F.softplus(-self.discriminate(generated, asked)).mean()
            descend(adams["generator"], fooled)
        if client_round.last and len(client_round.indices):  # overfitted if it takes few
            none = empty_lists(self.runtime.dataset.x_train)
            fresh = self.local_set(client_round.indices, client_round.task, none)
            taken = (self.correlations(fresh) > 0).float().mean()
            client_round.log.numbers["new samples taken for real"] = float(taken)


def descend(adam: FlatAdam, loss: Tensor) -> None:
    """One step of the network that Adam optimises."""
    adam.model.gradients.zero_()
    loss.backward(inputs=adam.model.tensors)
    adam.step()


def build_generator(features: int, classes: int) -> nn.Module:
    """Features from a one-hot label and noise."""
    layers = nn.Linear(classes + NOISE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, features)
    return nn.Sequential(*layers)


def build_discriminator(features: int, classes: int) -> nn.Module:
    """A logit from features and a one-hot label; 0 for all before it is trained."""
    last = nn.Linear(HIDDEN, 1)
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(nn.Linear(features + classes, HIDDEN), nn.LeakyReLU(SLOPE), last)


def ranks_in_class(values: Tensor, labels: Tensor) -> Tensor:
    """The share of the other samples of its class that each one exceeds, from 0 to 1.  # [N]"""
    ranks = torch.zeros(len(values))
    for label in labels.unique():
        own = (labels == label).nonzero().flatten()
        below = torch.searchsorted(values[own].sort().values, values[own])
        ranks[own] = below / max(1, len(own) - 1)
    return ranks
