"""FedCIL (Qi et al., 2023): generative replay by an AC-GAN that the server consolidates."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stamp_core.client.pool import Pool
from stamp_core.client.runtime import ClientRuntime, evaluation_batch_size
from stamp_core.config.decode import invalid, require_above, require_at_least, require_fraction
from stamp_core.core.seeding import generator
from stamp_core.methods.base.distillation import softened_divergence
from stamp_core.methods.base.method import (
    ClientRound,
    FedAvgParams,
    Group,
    Log,
    Message,
    Reply,
    State,
)
from stamp_core.methods.base.task_server import PREFIX, TaskServer, pack_bits, unpack_bits
from stamp_core.models.acgan import (
    BETAS,
    Generator,
    draw_balanced,
    draw_labels,
    generator_inputs,
    unchanged_statistics,
)
from stamp_core.models.adam import FlatAdam
from stamp_core.models.flat import FlatModel, FlatSGD
from stamp_core.models.generators import build_seeded

Batch = tuple[Tensor, Tensor]  # normalised images and their labels, on the device

NETWORKS = ("adversarial_head", "generator")  # sent and averaged besides the classifier
COLLAPSED = 0.01  # the mean deviation of a pixel over images, in deviations of training pixels
NOT_FINITE = "generator: not finite, its training in this round is discarded"
ALL_EQUAL = "generator: its images are all equal, its training in this round is discarded"
NOT_CONSOLIDATED = "consolidation: not finite or all images equal, the plain mean is kept"


@dataclass(frozen=True)
class FedCILParams(FedAvgParams):
    """The weights of the losses, and the size and training of the generator."""

    adversarial: float = 1.0  # of the losses on real or generated and of generated images' labels
    replay: float = 0.5  # share of replayed images in the loss of real ones, from the second task
    consistency: float = 1.0  # with the server's generator; paper: above 0, released code: 0
    consolidation: int = 100  # steps of the server on images of the clients' generators
    noise: int = 100  # Gaussian inputs of the generator, besides the one-hot label
    width: int = 384  # channels of the generator's first layer, halved by each further one
    generator_lr: float = 2e-4
    every: int = 1  # batches per adversarial step; the others train the classifier alone

    def __post_init__(self) -> None:
        """Refuse values out of range, and a use of a generator that is not trained."""
        super().__post_init__()
        require_at_least(self, 0, "adversarial", "consistency", "consolidation")
        require_fraction(self, "replay")
        require_at_least(self, 1, "noise", "width", "every")
        require_above(self, 0, "generator_lr")
        for name in ("replay", "consistency", "consolidation"):
            if getattr(self, name) and not self.adversarial:
                raise invalid(name, getattr(self, name), "0, as adversarial is 0")


class Teacher(NamedTuple):
    """The server's generator as received, and what its images are made from."""

    parameters: Tensor  # on the device
    draws: Pool  # labels [n], and noise for their images and those of real labels [n, 3, noise]


class FedCIL(TaskServer):
    """FedAvg of AC-GANs whose discriminator is the classifier with an adversarial head."""

    Params: ClassVar = FedCILParams
    fedavg_equivalent: ClassVar[dict[str, Any]] = {
        **{"adversarial": 0.0, "replay": 0.0},
        **{"consistency": 0.0, "consolidation": 0},
    }
    group: ClassVar[Group] = "continual"

    def __init__(self, params: FedCILParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        features = next(runtime.classifier.head.parameters()).shape[1]
        inputs = runtime.classes + params.noise
        self.make: dict[str, Callable[[], nn.Module]] = {
            "adversarial_head": partial(nn.Linear, features, 1),
            "generator": partial(Generator, runtime.shape, inputs, params.width),
        }
        # Images that are sampled together share statistics: their number is the same whatever the
        # size of micro-batches.
        self.chunk = evaluation_batch_size(runtime.shape, None)
        # Live networks, like the workspace's model: what is in them is loaded before each use.
        self.live = {name: FlatModel(self.network(name, 0).to(runtime.device)) for name in NETWORKS}
        self.sampler = FlatModel(self.network("generator", 0).to(runtime.device))
        # from -1 .. 1 to what the workspace makes of 0 .. 255
        self.gain = 127.5 * runtime.scale
        self.shift = self.gain - runtime.offset

    def network(self, name: str, seed: int) -> nn.Module:
        """The adversarial head or the generator with the initial weights of `seed`."""
        return build_seeded(self.make[name], seed, name)

    # --- images of a generator

    def normalised(self, images: Tensor) -> Tensor:
        """Images in (-1, 1) with the normalisation of training images."""
        return images * self.gain + self.shift

    def draw_inputs(
        self, classes: Tensor, count: int, draw: torch.Generator, shape: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Random labels of some classes, and noise, on the device.  # [count], [count, *, noise]"""
        labels = draw_labels(classes, count, draw)
        noise = torch.randn(count, *shape, self.params.noise, generator=draw)
        return labels.to(self.runtime.device), noise.to(self.runtime.device)

    @torch.no_grad()
    def sample(self, parameters: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """Images in (-1, 1) by a generator with these parameters.  # [n, C, H, W]"""
        self.sampler.load(parameters)
        parts = generator_inputs(labels, noise, self.runtime.classes).split(self.chunk)
        return torch.cat([self.sampler.module(part) for part in parts])

    def memory_samples(self, server: State, client: State, count: int) -> dict[str, Tensor]:
        """`count` images of each class learnt so far by the global generator, with their labels."""
        labels = server["classes"].nonzero().flatten().repeat_interleave(count)
        if not self.params.adversarial or not len(labels):
            return {}
        draw = generator(server["seed"], server["round"], "memory samples")
        noise = torch.randn(len(labels), self.params.noise, generator=draw)
        device = self.runtime.device
        images = self.sample(server["generator"], labels.to(device), noise.to(device))
        pixels = ((images + 1) * 127.5).round().to(torch.uint8).cpu()
        return {"images": pixels, "labels": labels}

    # --- the server

    def init_server(self, seed: int) -> State:
        """The initial weights of all networks, and nothing known about the clients."""
        server = super().init_server(seed)
        if not self.params.adversarial:
            return server
        networks = {name: FlatModel(self.network(name, seed)).parameters for name in NETWORKS}
        return {**server, **networks, "clients": {}, "moments": None}

    def broadcast(self, server: State, client: int) -> Message:
        """The global model, the adversarial head and the generator."""
        message = super().broadcast(server, client)
        return message | {name: server[name] for name in self.networks()}

    def networks(self) -> tuple[str, ...]:
        """The networks that are sent besides the classifier: none without adversarial training."""
        return NETWORKS if self.params.adversarial else ()

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The means of all networks, consolidated on images of the clients' generators."""
        state = super().aggregate(server, replies, log)
        replies = [reply for reply in replies if reply.samples]
        if not self.params.adversarial or not replies:
            return state
        weights = [float(reply.samples) for reply in replies]
        mean = {
            name: self.runtime.average([reply.message[name] for reply in replies], weights)
            for name in NETWORKS
        }
        state = {**state, **mean}
        if not self.params.consolidation:
            return state
        new = {str(r.client): self.report(r.message) for r in replies if "classes" in r.message}
        with log.clock("consolidation"):
            return self.consolidate({**state, "clients": server["clients"] | new}, replies, log)

    def report(self, message: Message) -> State:
        """What a client says once in an experience: its classes, and its last generator if any."""
        current, last = unpack_bits(message["classes"], self.runtime.classes), None
        if "last generator" in message:
            classes = unpack_bits(message["last classes"], self.runtime.classes)
            last = {"generator": message["last generator"], "classes": classes}
        return {"current": current, "last": last}

    def consolidate(self, server: State, replies: list[Reply], log: Log) -> State:
        """The server's state after training its networks on images of the clients' generators."""
        draw = generator(server["seed"], server["round"], "consolidation")
        images, labels = self.pool(server["clients"], replies, draw)
        self.load(server)
        self.model.load(server["parameters"], server["buffers"])
        size = self.runtime.training.batch_size
        count = self.params.consolidation * size
        own = Pool(partial(self.draw_inputs, server["classes"], count, draw))
        training = AcganTraining(self, own, server["moments"])
        chosen = draw_balanced(labels, count, draw).to(images.device)
        labels = labels.to(images.device)
        for batch in chosen.split(size):
            training.step([(images[batch], labels[batch])])
        networks = {"parameters": self.model, **self.live}
        finite = all(bool(each.parameters.isfinite().all()) for each in networks.values())
        if training.failure() or not finite:
            log.events.append(NOT_CONSOLIDATED)
            return server
        trained = {name: each.parameters.cpu().clone() for name, each in networks.items()}
        return {**server, **trained, "moments": training.adam.moments()}

    def pool(self, clients: State, replies: list[Reply], draw: torch.Generator) -> Batch:
        """Images of the clients' current and last generators, as many of each, and their labels."""
        sources: list[tuple[Tensor, Tensor]] = []
        for reply in replies:
            report = clients[str(reply.client)]
            sources.append((reply.message["generator"], report["current"]))
            if report["last"] is not None:
                sources.append((report["last"]["generator"], report["last"]["classes"]))
        batch, steps = self.runtime.training.batch_size, self.params.consolidation
        count = max(batch, math.ceil(steps * batch / len(sources)))
        draws = [
            (parameters, *self.draw_inputs(classes, count, draw)) for parameters, classes in sources
        ]
        images = torch.cat([self.sample(*each) for each in draws])
        return self.normalised(images), torch.cat([labels for _, labels, _ in draws]).cpu()

    def load(self, networks: Mapping[str, Any]) -> None:
        """Load the adversarial head and the generator into the live networks."""
        for name, network in self.live.items():
            network.load(networks[name])

    # --- a client

    def receive(self, client_round: ClientRound) -> None:
        """Load the received networks; the generator of the previous task is `scratch["last"]`."""
        super().receive(client_round)
        if self.params.adversarial:
            self.load(client_round.message)
            state = client_round.state
            last = state.get("next") if _is_first(client_round) else None
            client_round.scratch["last"] = last or state.get("last")

    def train(self, client_round: ClientRound) -> list[Tensor]:
        """Local training of classifier, adversarial head and generator."""
        if not self.params.adversarial:
            return super().train(client_round)
        training, losses = self.start(client_round), []
        pairs = zip(self.batches(client_round), self.replay(client_round), strict=False)
        for place, (batch, replayed) in enumerate(pairs):
            losses.append(training.step([batch, *replayed], place % self.params.every == 0))
        self.finish(client_round, training)
        return losses

    def start(self, client_round: ClientRound) -> "AcganTraining":
        """The training of a client round, with the server's generator if consistency is due."""
        last, current = client_round.scratch["last"], self.current_classes(client_round)
        known = current if last is None else current | last["classes"]
        client_round.scratch["known"] = known
        draw = client_round.round_id.generator("adversarial")
        count = self.runtime.training.epochs * len(client_round.indices)
        own = Pool(partial(self.draw_inputs, known, count, draw))
        training = AcganTraining(self, own, client_round.state.get("moments"))
        if self.params.consistency and client_round.round_id.round > 0:
            classes = self.past_classes(client_round) | current
            draws = Pool(partial(self.draw_inputs, classes, count, draw, (3,)))
            received = client_round.message["generator"].to(self.runtime.device)
            training.teacher = Teacher(received, draws)
        return training

    def replay(self, client_round: ClientRound) -> Iterator[list[Batch]]:
        """Batches of the previous task's generator without end; empty lists if there is none."""
        last, size = client_round.scratch["last"], self.runtime.training.batch_size
        while last is None or not self.params.replay:
            yield []
        steps = self.runtime.training.epochs * math.ceil(len(client_round.indices) / size)
        at_once = size * max(1, min(steps, self.chunk // size))  # in few passes: that is faster
        count = at_once * math.ceil(steps * size / at_once)
        draw = client_round.round_id.generator("replay")
        draws = Pool(partial(self.draw_inputs, last["classes"], count, draw))
        parameters = last["generator"].to(self.runtime.device)
        while True:
            labels, noise = draws.take(at_once)
            images = self.normalised(self.sample(parameters, labels, noise))
            yield from ([pair] for pair in zip(images.split(size), labels.split(size), strict=True))

    def finish(self, client_round: ClientRound, training: "AcganTraining") -> None:
        """Keep what was trained; a generator that failed is the received one again."""
        log, failure = client_round.log, training.failure()
        log.numbers.update(training.numbers())
        if failure:
            log.events.append(failure)
            self.live["generator"].load(client_round.message["generator"])
        moments = client_round.state.get("moments") if failure else training.adam.moments()
        client_round.scratch["moments"] = moments

    def update_state(self, client_round: ClientRound) -> State:
        """The state with Adam's moments and, for replay in later tasks, the trained generator.

        Where clients may miss the last round, they keep the one of every round.
        """
        state, scratch = super().update_state(client_round), client_round.scratch
        if not self.params.adversarial:
            return state
        last, trained = scratch["last"], None
        if len(client_round.indices):
            parameters = self.live["generator"].parameters.cpu().clone()
            trained = {"generator": parameters, "classes": scratch["known"]}
        if client_round.last:
            last, trained = trained or last, None
        training = self.runtime.training
        may_miss = training.participation < 1 or training.dropout > 0
        kept = {"last": last, "next": trained if may_miss else None}
        return {**state, **kept, "moments": scratch["moments"]}

    def upload(self, client_round: ClientRound) -> Message:
        """All networks and, once in an experience, the generator of the previous task."""
        message = super().upload(client_round)
        message |= {name: self.live[name].parameters.cpu().clone() for name in self.networks()}
        last = client_round.scratch.get("last")
        if last is None or not self.params.consolidation or not _is_first(client_round):
            return message
        classes = pack_bits(last["classes"])
        return {**message, "last generator": last["generator"].clone(), "last classes": classes}


class AcganTraining:
    """Training of the live networks: SGD for the discriminator, Adam for the generator."""

    def __init__(self, method: FedCIL, draws: Pool, moments: State | None) -> None:
        self.method, self.runtime, self.params = method, method.runtime, method.params
        self.draws = draws  # labels and noise of generated images
        self.teacher: Teacher | None = None
        self.head, self.generator = (method.live[name] for name in NETWORKS)
        self.sgd = FlatSGD(self.model, self.runtime.training)
        self.head_sgd = FlatSGD(self.head, self.runtime.training)
        self.adam = FlatAdam(self.generator, self.params.generator_lr, moments, BETAS)
        self.images, self.loss = torch.empty(0), torch.empty(0)  # of the last adversarial step
        # Whether the generator has given values that are not finite: from then on its images are
        # 0, and so are the weights of their losses. The host does not wait for it.
        self.stopped = torch.zeros((), dtype=torch.bool, device=self.runtime.device)

    def step(self, real: list[Batch], adversarial: bool = True) -> Tensor:
        """One step on real images and, if there are any, replayed ones; returns the loss."""
        generated = self.generate(len(real[0][1])) if adversarial else None
        self.model.gradients.zero_()
        self.head.gradients.zero_()
        usable = (~self.stopped).float()
        loss, logits = self.real_loss(real, None if generated is None else usable)
        if generated is not None:
            loss = loss + usable * self.generated_loss(generated, logits, real[0][1])
        loss.backward()
        self.sgd.step()
        if generated is not None:
            self.head_sgd.step()
            self.train_generator(generated)
        return loss.detach()

    def generate(self, count: int) -> Batch:
        """Images of the generator, with the labels asked for; of 0 if they are not finite."""
        labels, noise = self.draws.take(count)
        images = self.images_of(labels, noise)
        self.stopped = self.stopped | ~images.isfinite().all()
        return images.where(~self.stopped, 0.0), labels

    def images_of(self, labels: Tensor, noise: Tensor) -> Tensor:
        """Images of the live generator, with their graph.  # [n, C, H, W]"""
        inputs = generator_inputs(labels, noise, self.runtime.classes)
        return self.method.normalised(self.generator.module(inputs))

    def discriminate(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the classes, and scores above 0 for images that look real.  # [n, L], [n]"""
        self.runtime.train_mode(len(images))
        features = self.classifier.encode(images)
        return self.classifier.head(features), self.head.module(features).squeeze(1)

    def real_loss(self, real: list[Batch], usable: Tensor | None) -> tuple[Tensor, Tensor]:
        """The loss on real and replayed images, and the logits of the real ones.

        Scores count if the generator is usable (1, not 0), in an adversarial step (not None).
        """
        logits, scores = self.discriminate(torch.cat([images for images, _ in real]))
        sizes = [len(labels) for _, labels in real]
        losses = []
        for (_, labels), own, score in zip(
            real, logits.split(sizes), scores.split(sizes), strict=True
        ):
            loss = F.cross_entropy(own, labels)
            if usable is not None:
                loss = loss + self.params.adversarial * usable * F.softplus(-score).mean()
            losses.append(loss)
        mixed = losses[0]
        if len(losses) > 1:
            mixed = torch.lerp(mixed, losses[1], self.params.replay)
        return mixed, logits[: sizes[0]]

    def generated_loss(self, generated: Batch, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss on generated images, which leaves running statistics unchanged.

        `logits` are those of the real images, `labels` theirs.
        """
        with unchanged_statistics(self.classifier.norms):
            own, scores = self.discriminate(generated[0].detach())
            loss: Tensor = F.cross_entropy(own, generated[1]) + F.softplus(scores).mean()
            loss = self.params.adversarial * loss
            if self.teacher is not None:
                consistency = self.consistency_loss(self.teacher, logits, labels)
                loss = loss + self.params.consistency * consistency
        return loss

    def consistency_loss(self, teacher: Teacher, logits: Tensor, labels: Tensor) -> Tensor:
        """How far the outputs on the teacher's images are from their labels and other outputs.

        They are compared with `logits`, of real images with `labels`, and with the outputs on the
        generator's own images.
        """
        shared, noise = teacher.draws.take(len(labels))
        like_labels, like_shared, for_own = noise.unbind(1)
        asked, noise = torch.cat([labels, shared]), torch.cat([like_labels, like_shared])
        taught = self.method.sample(teacher.parameters, asked, noise)
        with torch.no_grad():
            own = self.images_of(shared, for_own)
        images = torch.cat([self.method.normalised(taught), own]).where(~self.stopped, 0.0)
        outputs, _ = self.discriminate(images)
        like_real, like_own, of_own = outputs.chunk(3)
        divergences = softened_divergence(logits, like_real) + softened_divergence(of_own, like_own)
        return divergences + F.cross_entropy(like_own, shared)

    def train_generator(self, generated: Batch) -> None:
        """One step of the generator: its images shall look real and have the labels asked for."""
        images, labels = generated
        self.generator.gradients.zero_()
        with unchanged_statistics(self.classifier.norms):
            logits, scores = self.discriminate(images)
        loss = F.softplus(-scores).mean() + F.cross_entropy(logits, labels)
        loss.backward(inputs=list(self.generator.module.parameters()))
        self.adam.step()
        self.images, self.loss = images.detach(), loss.detach()

    def numbers(self) -> dict[str, float]:
        """The generator's loss, and how much its images differ, in the last adversarial step."""
        if len(self.images) < 2:
            return {}
        deviation = self.images.std(0).mean()
        return {"generator loss": float(self.loss), "generator deviation": float(deviation)}

    def failure(self) -> str | None:
        """The event that the generator cannot be used, or None."""
        vectors = (self.generator.parameters, self.adam.first, self.adam.second)
        if self.stopped or not all(bool(vector.isfinite().all()) for vector in vectors):
            return NOT_FINITE
        if self.numbers().get("generator deviation", math.inf) < COLLAPSED:
            return ALL_EQUAL
        return None


def _is_first(client_round: ClientRound) -> bool:
    """Whether this is the client's first round of an experience."""
    return PREFIX + "past" in client_round.message
