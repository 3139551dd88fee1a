"""FedCIL (Qi et al., 2023): generative replay by an AC-GAN that the server consolidates."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor

from stamp_core.client.batches import Batch, append_exemplars
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import invalid
from stamp_core.config.limits import Fraction, NonNegative, NonNegativeInt, Positive, PositiveInt
from stamp_core.core.seeding import generator
from stamp_core.methods.base.method import ClientRound, FedAvgParams, Log, Message, Reply, State
from workbench.methods.base.generators import Pool, draw_inputs
from workbench.methods.base.task_server import TaskContext, TaskServer, pack_bits, unpack_bits
from workbench.methods.fedcil.acgan import Acgan
from workbench.methods.fedcil.training import AcganTraining, Teacher

REPORT = ("classes", "last generator", "last classes")  # parts of a message, see `upload`
NOT_CONSOLIDATED = "consolidation: not finite or all images equal, the plain mean is kept"


@dataclass(frozen=True)
class FedCILParams(FedAvgParams):
    """The weights of the losses, and the size and training of the generator."""

    # of the losses on real or generated and of generated images' labels
    adversarial: NonNegative = 1.0
    # share of replayed images in the loss of real ones, from the second task
    replay: Fraction = 0.5
    # with the server's generator; paper: above 0, released code: 0
    consistency: NonNegative = 1.0
    consolidation: NonNegativeInt = 100  # steps of the server on images of the clients' generators
    noise: PositiveInt = 100  # Gaussian inputs of the generator, besides the one-hot label
    width: PositiveInt = 384  # channels of the generator's first layer, halved by each further one
    generator_lr: Positive = 2e-4  # of Adam
    every: PositiveInt = 1  # batches per adversarial step; the others train the classifier alone

    def __post_init__(self) -> None:
        for name in ("replay", "consistency", "consolidation"):
            if getattr(self, name) and not self.adversarial:
                raise invalid(name, getattr(self, name), "0, as adversarial is 0")


class TaskGenerator(TypedDict):
    """A generator at the end of a task."""

    generator: Tensor  # its parameters
    classes: Tensor  # bool [L], of which it makes images


@dataclass
class FedCILContext(TaskContext):
    last: TaskGenerator | None  # of the previous task
    known: Tensor  # bool [L], the classes that the generator learns
    training: AcganTraining
    moments: dict[str, Any] | None  # of Adam


class FedCIL(TaskServer):
    """FedAvg of AC-GANs whose discriminator is the classifier with an adversarial head."""

    Params: ClassVar = FedCILParams
    fedavg_equivalent: ClassVar = {
        "adversarial": 0.0,
        "replay": 0.0,
        "consistency": 0.0,
        "consolidation": 0,
    }
    group = "continual"
    images: ClassVar = True

    def __init__(self, params: FedCILParams, runtime: ClientRuntime) -> None:
        super().__init__(params, runtime)
        if params.adversarial:
            self.acgan = Acgan(runtime, params)
            self.extra_networks = self.acgan.networks

    def pool(
        self, classes: Tensor, count: int, draw: torch.Generator, shape: tuple[int, ...] = ()
    ) -> Pool:
        """Random labels of some classes, and noise, `count` at once.  # [n], [n, *shape, noise]"""
        size = count, *shape, self.params.noise
        return Pool(partial(draw_inputs, classes, size, draw, self.runtime.device))

    def init_server(self, seed: int) -> State:
        server: State = super().init_server(seed)
        server["clients"] = {}  # what each sent last besides its networks, once in an experience
        server["moments"] = None  # of Adam
        return server

    def initial_weights(self, name: str, seed: int) -> Tensor:
        return self.acgan.network(name, seed).parameters.cpu()

    def aggregate(self, server: State, replies: list[Reply], log: Log) -> State:
        state: State = {**super().aggregate(server, replies, log)}
        replies = [reply for reply in replies if reply.samples]
        if not self.params.consolidation or not replies:
            return state
        reports = {**server["clients"]}
        for reply in replies:
            if "classes" in reply.message:
                sent = reply.message.items()
                reports[str(reply.client)] = {name: v for name, v in sent if name in REPORT}
        with log.clock("consolidation"):
            state["clients"] = reports
            return self.consolidate(state, replies, log)

    def consolidate(self, server: State, replies: list[Reply], log: Log) -> State:
        draw = generator(server["seed"], server["round"], "consolidation")
        images, labels = self.clients_images(server["clients"], replies, draw)
        networks = {"parameters": self.model, **self.extra_networks}
        self.model.load(server["parameters"], server["buffers"])
        self.acgan.head.load(server["adversarial_head"])
        self.acgan.generator.load(server["generator"])
        size = self.runtime.training.batch_size
        count = self.params.consolidation * size
        draws = self.pool(server["classes"], count, draw)
        moments = server["moments"]
        training = AcganTraining(self.runtime, self.params, self.acgan, draws, moments)
        chosen = draw_balanced(labels, count, draw).to(images.device)
        labels = labels.to(images.device)
        for batch in chosen.split(size):
            training.step(Batch(images[batch], labels[batch]))
        finite = all(bool(each.parameters.isfinite().all()) for each in networks.values())
        if training.failure() or not finite:
            log.events.append(NOT_CONSOLIDATED)
            return server
        trained = {name: each.parameters.cpu().clone() for name, each in networks.items()}
        return {**server, **trained, "moments": training.adam.moments()}

    def clients_images(
        self, clients: dict[str, Message], replies: list[Reply], draw: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Images of the clients' current and last generators, as many of each, and their labels."""
        sources = list[tuple[Tensor, Tensor]]()
        for reply in replies:
            report = clients[str(reply.client)]
            sources.append((reply.message["generator"], report["classes"]))
            if "last generator" in report:
                sources.append((report["last generator"], report["last classes"]))
        size = self.runtime.training.batch_size
        count = max(size, math.ceil(self.params.consolidation * size / len(sources)))
        images = list[Tensor]()
        labels = list[Tensor]()
        for parameters, bits in sources:
            classes = unpack_bits(bits, self.runtime.classes)
            own, noise = self.pool(classes, count, draw).take(count)
            images.append(self.acgan.sample(parameters, own, noise))
            labels.append(own.cpu())
        return self.acgan.normalised(torch.cat(images)), torch.cat(labels)

    def memory_samples(self, server: State, client: State, count: int) -> Message:
        """`count` images of each class learnt so far by the global generator, with their labels."""
        labels = server["classes"].nonzero().flatten().repeat_interleave(count)
        if not self.params.adversarial or not len(labels):
            return {}
        draw = generator(server["seed"], server["round"], "memory samples")
        noise = torch.randn(len(labels), self.params.noise, generator=draw)
        device = self.runtime.device
        images = self.acgan.sample(server["generator"], labels.to(device), noise.to(device))
        pixels = ((images + 1) * 127.5).round().to(torch.uint8).cpu()
        return {"images": pixels, "labels": labels}

    def start(self, client_round: ClientRound) -> Any:
        if not self.params.adversarial:
            return super().start(client_round)
        announced = self.announced(client_round)
        state = client_round.state
        last = state.get("next") if self.is_announced(client_round) else None
        last = last or state.get("last")
        current = self.current_classes(client_round)
        known = current if last is None else current | last["classes"]
        count = self.runtime.training.epochs * len(client_round.indices)
        draw = client_round.generator("adversarial")
        draws = self.pool(known, count, draw)
        teacher = None
        if self.params.consistency and client_round.round > 0:
            classes = self.past_classes(announced) | current
            received = client_round.message["generator"].to(self.runtime.device)
            teacher = Teacher(received, self.pool(classes, count, draw, (3,)))
        moments = state.get("moments")
        options = draws, moments, teacher, self.params.every
        training = AcganTraining(self.runtime, self.params, self.acgan, *options)
        return FedCILContext(announced, last, known, training, moments)

    def batches(self, client_round: ClientRound, context: Any) -> Iterator[Batch]:
        new = super().batches(client_round, context)
        if not self.params.replay or context.last is None:
            return new
        return map(append_exemplars, new, self.replayed(client_round, context.last))

    def replayed(self, client_round: ClientRound, last: TaskGenerator) -> Iterator[Batch]:
        size = self.runtime.training.batch_size
        steps = self.runtime.training.epochs * math.ceil(len(client_round.indices) / size)
        pool_size = size * max(1, min(steps, self.acgan.chunk // size))  # in few passes: faster
        count = pool_size * math.ceil(steps * size / pool_size)
        draws = self.pool(last["classes"], count, client_round.generator("replay"))
        parameters = last["generator"].to(self.runtime.device)
        while True:
            labels, noise = draws.take(pool_size)
            images = self.acgan.normalised(self.acgan.sample(parameters, labels, noise))
            yield from map(Batch, images.split(size), labels.split(size))

    def finish(self, client_round: ClientRound, context: Any) -> None:
        if not self.params.adversarial:
            return
        training: AcganTraining = context.training
        client_round.log.numbers.update(training.numbers())
        if failure := training.failure():
            client_round.log.events.append(failure)
            self.acgan.generator.load(client_round.message["generator"])
        else:
            context.moments = training.adam.moments()

    def step(self, batch: Batch, context: Any) -> Tensor:
        if not self.params.adversarial:
            return super().step(batch, context)
        training: AcganTraining = context.training
        return training.step(batch)

    def update_state(self, client_round: ClientRound, context: Any) -> State:
        state = super().update_state(client_round, context)
        if not self.params.adversarial:
            return state
        trained: TaskGenerator | None = None
        if len(client_round.indices):
            parameters = self.acgan.generator.parameters.cpu().clone()
            trained = {"generator": parameters, "classes": context.known}
        kept = trained or context.last if client_round.last else context.last
        follows = trained if not client_round.last and self.may_miss_rounds() else None
        return {**state, "last": kept, "next": follows, "moments": context.moments}

    def upload(self, client_round: ClientRound, context: Any) -> Message:
        message = super().upload(client_round, context)
        if self.params.consolidation and context.last and self.is_announced(client_round):
            message["last generator"] = context.last["generator"].clone()
            message["last classes"] = pack_bits(context.last["classes"])
        return message


def draw_balanced(labels: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """Indices of images whose labels are drawn uniformly from those present.  # [count]"""
    order = labels.argsort(stable=True)
    sizes = labels.unique(return_counts=True)[1]
    classes = torch.randint(len(sizes), (count,), generator=draw)
    ranks = torch.randint(2**62, (count,), generator=draw) % sizes[classes]
    return order[(sizes.cumsum(0) - sizes)[classes] + ranks]
