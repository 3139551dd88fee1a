"""SR-FDIL (Li et al., 2024), reconstructed: a cache by local importance and global correlation."""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NotRequired, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid, require_above, require_at_least
from stamp_core.core.seeding import generator
from stamp_core.data.plan import Plan
from stamp_core.methods.base.ledger import is_first
from stamp_core.methods.base.method import ClientRound, InitialStates, Log, Message, Reply, State
from stamp_core.models.flat import FlatModel
from workbench.adam import FlatAdam
from workbench.methods.base.exemplar_lists import ExemplarLists, empty_lists
from workbench.methods.base.generators import build_seeded
from workbench.methods.base.sample_cache import CacheContext, CacheParams, CacheState, SampleCache

NETWORKS = ("generator", "discriminator")  # of features, sent and averaged
NOISE = 32  # Gaussian inputs of the generator
HIDDEN = 64  # units of both networks
SLOPE = 0.2  # of LeakyReLU for negative values
BATCH = 32  # features in a step of both networks
BETAS = (0.5, 0.999)  # of Adam
DEVIATION = 1e-6  # added to the features' deviations


@dataclass(frozen=True)
class SRFDILParams(CacheParams):
    """How samples are scored and clients drawn; no value could be read in the paper."""

    balance: Literal["none", "class"] = "class"
    correlation: float = 0.5  # share of the global correlation in the score; 0: Re-Fed
    gan_steps: int = 20  # of both networks in each round
    gan_lr: float = 2e-4
    selected: float = 1.0  # share of the clients that the server draws for a round; 1: all
    old: float = 0.5  # share of the importance of the cache in the chance to be drawn

    def __post_init__(self) -> None:
        """Validate shares; networks must be trained."""
        super().__post_init__()
        require_at_least(self, 1, "gan_steps")
        require_above(self, 0, "gan_lr", "selected")
        require_at_least(self, 0, "correlation", "old")
        for name in ("correlation", "selected", "old"):
            if getattr(self, name) > 1:
                raise invalid(name, getattr(self, name), "at most 1")


class SRFDILState(CacheState):
    """What a client remembers."""

    importance: NotRequired[Tensor]  # [2] if clients are drawn: mean of cached, of new samples


class SRFDILServer(TypedDict):
    """What the server remembers besides the networks, if it draws clients."""

    importance: Tensor  # [U, 2], as reported; NaN before a client's first report
    seed: int
    round: int  # of all experiences together
    drawn: list[int]  # clients of the next round


@dataclass
class SRFDILContext(CacheContext):
    """What a client round prepares for its batches and its end."""

    importance: Tensor | None  # [2]


class SRFDIL(SampleCache):
    """FedAvg with a cache of the samples that matter to the client and look like all clients' ones.

    A reconstruction from the abstract and one sentence of a later paper. The cache and the local
    importance are Re-Fed's. Every client trains a generator of features and a discriminator on its
    cache, both conditioned on the class, and the server averages them: the averaged discriminator
    says how far a sample is correlated with the data of all clients. Inside a class the samples are
    ordered by the weighted mean of their two ranks. With `selected` below 1 the server draws the
    clients of the next round by the mean importance of their cached and of their new samples.
    """

    Params: ClassVar = SRFDILParams

    def __init__(self, params: SRFDILParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        self.adversarial = params.correlation > 0 and params.cache > 0
        if self.adversarial:
            live = {name: self.network(name, seed=0).to(runtime.device) for name in NETWORKS}
            self.extra_networks = {name: FlatModel(network) for name, network in live.items()}

    def network(self, name: str, seed: int) -> nn.Module:
        """The generator or the discriminator with the initial weights of `seed`."""
        features = next(self.classifier.head.parameters()).shape[1]
        build = build_generator if name == "generator" else build_discriminator
        return build_seeded(partial(build, features, self.runtime.classes), seed, name)

    # --- the server

    def initial_weights(self, name: str, seed: int) -> Tensor:
        """The initial weights of the generator or the discriminator."""
        return FlatModel(self.network(name, seed)).parameters

    def initial_states(self, plan: Plan) -> InitialStates:
        """The first states; where clients are drawn, no importance is known."""
        states = super().initial_states(plan)
        if self.params.selected == 1:
            return states
        unknown = torch.full((len(plan.clients), 2), math.nan)
        drawn = self.draw_clients(unknown, plan.seed, 0)
        own: SRFDILServer = {"importance": unknown, "seed": plan.seed, "round": 0, "drawn": drawn}
        return states._replace(server={**states.server, **own})

    def participants(self, chosen: list[int], server: State) -> list[int]:
        """Those of the chosen clients that the server has drawn."""
        return [client for client in chosen if client in server.get("drawn", chosen)]

    def draw_clients(self, importance: Tensor, seed: int, round_: int) -> list[int]:
        """The clients of the next round, drawn without replacement."""
        shares = client_shares(importance, self.params.old)
        count = math.ceil(self.params.selected * len(shares) - 1e-9)
        draw = generator(seed, round_, "selection")
        return sorted(torch.multinomial(shares, count, generator=draw).tolist())

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The means of all networks, weighted by samples, and the clients of the next round."""
        state = super().aggregate(server, replies, log)
        if self.params.selected == 1:
            return state
        known: SRFDILServer = state
        importance = known["importance"].clone()
        for reply in replies:
            importance[reply.client] = reply.message["importance"]
        largest = client_shares(importance, self.params.old).max()
        log.numbers["chance, largest share"] = float(largest)
        next_round = known["round"] + 1
        drawn = self.draw_clients(importance, known["seed"], next_round)
        return {**state, "importance": importance, "round": next_round, "drawn": drawn}

    # --- a client

    def start(self, client_round: ClientRound) -> SRFDILContext:
        """Load what was received; train the networks of features on the cache."""
        self.receive(client_round)
        cache = self.updated_cache(client_round)
        drawn = self.params.selected < 1
        importance = self.joint_importance(client_round, cache) if drawn else None
        if self.adversarial and len(cache["labels"]):
            with client_round.log.clock("networks of features"):
                self.fit_networks(client_round, cache)
        return SRFDILContext(cache, importance)

    def joint_importance(self, client_round: ClientRound, cache: ExemplarLists) -> Tensor:
        """Mean importance of cached and of new samples, once in an experience.  # [2]"""
        state: SRFDILState = client_round.state
        if not is_first(client_round):
            return state["importance"]
        samples = self.local_set(client_round.indices, client_round.task, cache)
        if not len(samples["labels"]):
            return torch.zeros(2)
        new = len(client_round.indices)
        importance = self.importance(client_round, samples)
        parts = importance[new:], importance[:new]
        return torch.stack([part.sum() / max(1, len(part)) for part in parts])

    def update_state(self, client_round: ClientRound, context: SRFDILContext) -> State:
        """The state with the cache and, where clients are drawn, the mean importance."""
        state = super().update_state(client_round, context)
        return state if context.importance is None else {**state, "importance": context.importance}

    def upload(self, client_round: ClientRound, context: SRFDILContext) -> Message:
        """The model, both networks of features and, where clients are drawn, the importance."""
        message = super().upload(client_round, context)
        if context.importance is not None:
            message["importance"] = context.importance.clone()
        return message

    # --- scores of samples

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
        """Features of these samples, standardised among them, and one-hot labels, on the device.

        They are those of the live model's encoder in evaluation mode.  # [N, F], [N, classes]
        """
        features = self.runtime.outputs(samples["images"], self.classifier.encode)
        deviations, means = torch.std_mean(features, 0, correction=0)
        standardised = (features - means) / (deviations + DEVIATION)
        classes = F.one_hot(samples["labels"], self.runtime.classes).to(features.dtype)
        return standardised.to(self.runtime.device), classes.to(self.runtime.device)

    def discriminate(self, features: Tensor, classes: Tensor) -> Tensor:
        """The live discriminator's logits for features of classes.  # [N]"""
        inputs = torch.cat([features, classes], 1)
        logits: Tensor = self.extra_networks["discriminator"].module(inputs)
        return logits.squeeze(1)

    def fit_networks(self, client_round: ClientRound, cache: ExemplarLists) -> None:
        """Steps of both networks on features of the cache; the classifier is not changed."""
        features, classes = self.features(cache)
        draw = client_round.round_id.generator("features")
        places = list[Tensor]()
        noise = list[Tensor]()
        for _ in range(self.params.gan_steps):
            places.append(torch.randint(len(classes), (BATCH,), generator=draw))
            noise.append(torch.randn(BATCH, NOISE, generator=draw))
        drawn = (torch.stack(each).to(self.runtime.device) for each in (places, noise))
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


def client_shares(importance: Tensor, old: float) -> Tensor:
    """Each client's chance, from the mean importance of its cached and its new samples.  # [U]

    The weighted mean of its two shares in the sums over clients; where a sum is 0, as of empty
    caches, the other share. Of a client that has not reported yet the mean is taken, or equal ones.
    """
    known = torch.where(importance.isnan(), importance.nanmean(0), importance)  # [U, 2]
    known = known.double().nan_to_num(1.0)
    weights = torch.tensor([old, 1 - old], dtype=torch.float64) * (known.sum(0) > 0)
    if not weights.any():
        known, weights = torch.ones_like(known), torch.ones(2, dtype=torch.float64)
    shares = known / known.sum(0).clamp(min=torch.finfo(torch.float64).tiny)
    chances = (shares * weights).sum(1) / weights.sum()
    return chances.clamp(min=1e-12)  # so that as many can be drawn as are wanted
