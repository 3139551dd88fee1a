"""Local training on one device: `make bench DEVICE=cuda` writes benchmarks/results-cuda.md."""

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import Row, bare, seconds, section, spread
from benchmarks.run import transfers
from stamp_core.client.runtime import ClientRuntime, RoundId
from stamp_core.config.schema import Network, Setting, Split
from stamp_core.core.devices import (
    device_name,
    device_peak,
    has_own_memory,
    reset_device_peak,
    resolve_device,
)
from stamp_core.core.paths import ROOT
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.plan import Plan
from stamp_core.data.split import make_plan
from stamp_core.engine.experiment import load_experiment
from stamp_core.engine.worker import peak_memory
from stamp_core.methods.base.method import Reply, State

SETTING = "cifar100_c2"  # whose training and presets are timed
CLASSES = 100
HEAD = (
    "| network | images/s, eager | images/s, graphs | graphs / eager "
    "| engine / bare loop | share of the peak | memory, eager |"
)


@dataclass(frozen=True)
class Case:
    """A network, and how many batches of which images a client round has."""

    name: str
    network: Network
    side: int  # of an image
    batch_size: int
    batches: int


@dataclass(frozen=True)
class Sizes:
    """How much is measured; the first case is that of STAMP too."""

    cases: tuple[Case, ...]
    images: int  # of a client round of STAMP, two classes
    epochs: int  # of a client round of STAMP
    past: tuple[int, ...]  # numbers of past tasks in STAMP's memory
    matrix: int  # side of the matrices whose product shows the peak
    repeats: int
    counted: tuple[str, ...]  # methods whose copies are counted


RESNET = Network("resnet18", norm="batch", stem="small")
FULL = Sizes(
    cases=(
        Case("ResNet-18, 32 x 32", RESNET, 32, 128, 40),
        Case("Swin-T, 224 x 224", Network("swin_t"), 224, 128, 10),
    ),
    images=1000,
    epochs=5,
    past=(5, 20, 50),
    matrix=8192,
    repeats=5,
    counted=("fedavg", "replay", "stamp"),
)


class Client:
    """One client of a method on random images of a device, in its first round of a task."""

    def __init__(
        self,
        case: Case,
        device: str,
        images: int,
        classes: int = CLASSES,
        method: str = "fedavg",
        **training: Any,
    ) -> None:
        experiment = load_experiment(SETTING, method)
        options = {"epochs": 1, "batch_size": case.batch_size, **training}
        self.setting = Setting(
            "bench",
            {},
            Split("classes", clients=1, tasks=1, classes_per_task=classes),
            case.network,
            replace(experiment.setting.training, **options),
        )
        dataset = random_images(case.side, images, classes)
        self.plan: Plan = make_plan(self.setting.split, dataset, seed=0)
        self.runtime = ClientRuntime(self.setting, dataset, device)
        self.method = experiment.kind(experiment.params, self.runtime)
        self.server = self.method.init_server(0)
        self.state = self.method.init_client(0, self.server)

    def round(self) -> Reply:
        """One client round, always the same."""
        message = self.method.broadcast(self.server, 0)
        address = RoundId(0, 0, 0, 0)
        return self.method.train_client(
            self.method.client_round(address, self.plan, self.state, message)
        )

    def without_graphs(self) -> "Client":
        """This client, whose steps run as they are."""
        self.runtime.graphs = None
        return self


def random_images(side: int, count: int, classes: int) -> ImageDataset:
    """Random images of all classes for training, one of each for testing."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=draw)
    y, half = torch.arange(count) % classes, torch.full((3,), 0.5)
    test = {"x_test": x[:classes], "y_test": y[:classes]}
    domains = {"domain_train": torch.zeros_like(y), "domain_test": torch.zeros_like(y[:classes])}
    names = tuple(map(str, range(classes)))
    return ImageDataset(
        "random",
        x,
        y,
        **test,
        classes=names,
        domains=("",),
        **domains,
        digest="",
        mean=half,
        std=half,
    )


# --- SGD steps


def speeds(case: Case, device: str, sizes: Sizes) -> Row:
    """Images per second of FedAvg's local training in both ways, and ratios in alternation."""
    images = case.batches * case.batch_size
    eager = Client(case, device, images).without_graphs()
    peak = peak_of_round(eager)  # with nothing else on the device
    client = Client(case, device, images)
    runtime = client.runtime
    module = runtime.network(0).to(runtime.device, memory_format=runtime.format)
    indices = client.plan.train_indices(runtime.dataset, 0, 0).to(runtime.device)
    address = RoundId(0, 0, 0, 0)
    loop = partial(bare.fedavg_round, runtime, module, [address], [indices])
    ways = eager.round, client.round, loop
    times = [tuple(map(seconds, ways)) for _ in range(sizes.repeats + 1)][1:]
    slow, fast, _ = map(statistics.median, zip(*times, strict=True))
    graphs = runtime.graphs is not None
    operations = step_operations(module, case, runtime.device) * case.batches / fast
    share = operations / peak_operations(runtime.device, sizes.matrix)
    cells = [
        f"{images / slow:,.0f}",
        f"{images / fast:,.0f}" if graphs else "none here",
        spread([one / other for other, one, _ in times]) if graphs else "",
        spread([one / other for _, one, other in times]),
        f"{share:.2f}",
        f"{peak / 1e9:.2f} GB",
    ]
    return case.name, " | ".join(cells)


def peak_of_round(client: Client) -> int:
    """The peak memory of a client round on the device, or of this process."""
    device = client.runtime.device
    if has_own_memory(device):
        reset_device_peak(device)
    client.round()
    return device_peak(device) if has_own_memory(device) else peak_memory()


def step_operations(module: torch.nn.Module, case: Case, device: torch.device) -> int:
    """The floating-point operations of an SGD step's matrix products and convolutions."""
    images = torch.zeros(case.batch_size, 3, case.side, case.side, device=device)
    labels = torch.zeros(case.batch_size, dtype=torch.int64, device=device)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(module(images), labels).backward()
    module.zero_grad()
    total: int = counter.get_total_flops()
    return total


def peak_operations(device: torch.device, side: int) -> float:
    """The floating-point operations per second of a product of large matrices in bfloat16."""
    matrix = torch.ones(side, side, dtype=torch.bfloat16, device=device)
    times = [seconds(torch.mm, matrix, matrix) for _ in range(10)]
    return 2 * side**3 / min(times)


# --- STAMP, determinism


def remembering(client: Client, past: int) -> Client:
    """STAMP's client with exemplars of so many past tasks of two classes."""
    params = client.method.params.memory
    count = 2 * params.exemplars_per_class
    tasks = torch.arange(1, past + 1).repeat_interleave(count)
    memory = client.state["memory"]
    client.state = {
        **client.state,
        "memory": {
            **memory,
            "images": client.runtime.dataset.x_train[:count].repeat(past, 1, 1, 1),
            "labels": client.runtime.dataset.y_train[:count].repeat(past),
            "tasks": tasks,
            "soft": memory["soft"].new_empty(len(tasks), 0),
        },
    }
    return client


def stamp_rounds(device: str, sizes: Sizes) -> Iterator[Row]:
    """Seconds of a client round with past tasks, and how often it takes that of FedAvg."""
    images, options = sizes.images, {"classes": 2, "epochs": sizes.epochs}
    fedavg = Client(sizes.cases[0], device, images, **options)
    fedavg.round()
    for past in sizes.past:
        stamp = remembering(Client(sizes.cases[0], device, images, method="stamp", **options), past)
        stamp.round()
        pairs = [(seconds(stamp.round), seconds(fedavg.round)) for _ in range(sizes.repeats)]
        time = statistics.median(one for one, _ in pairs)
        ratio = spread([one / other for one, other in pairs])
        yield f"STAMP, {past} past tasks", f"{time:.2f} s a client round, {ratio} of FedAvg's"


def determinism(device: str, sizes: Sizes) -> Iterator[Row]:
    """Whether runs are bit-identical."""
    case = sizes.cases[0]
    images = case.batches * case.batch_size
    one, other = (Client(case, device, images) for _ in range(2))
    eager = Client(case, device, images).without_graphs()
    found = [trained(client) for client in (one, other, eager)]
    yield "two runs are bit-identical", str(torch.equal(found[0], found[1]))
    if one.runtime.graphs is not None:
        yield "graphs and eager are bit-identical", str(torch.equal(found[0], found[2]))


def trained(client: Client) -> Tensor:
    """The model after a client round."""
    message: State = dict(client.round().message)
    parameters: Tensor = message["parameters"]
    return parameters


# --- the page


def page(device: str, sizes: Sizes) -> list[str]:
    """The lines of the page."""
    name = f"{device_name(torch.device(device))}, torch {torch.__version__}"
    note = (
        f"Measured on {name}. FedAvg's local training on random images on the device; a ratio is "
        "the median over paired repeats in one run. The bare loop is torch.optim.SGD on the same "
        "batches, channels last. The peak is the speed of a matrix product in bfloat16 here."
    )
    rows = [speeds(case, device, sizes) for case in sizes.cases]
    lines = section(f"# Local training on {device}", note, rows)[1:]
    heads = {"| what | result |": HEAD, "|---|---|": "|---" * 7 + "|"}
    lines = [heads.get(line, line) for line in lines]
    note = f"On {sizes.cases[0].name}, {sizes.images} images, {sizes.epochs} epochs."
    lines += section("## STAMP", note, stamp_rounds(device, sizes))
    lines += section("## Determinism", f"On {sizes.cases[0].name}.", determinism(device, sizes))
    return lines + transfers(*sizes.counted)


def main(device: str) -> None:
    """Measure everything and write the page; refuse a device that is not here."""
    if device != "cpu" and torch.device(device).type != resolve_device("auto"):
        sys.exit(f"DEVICE={device}: no GPU here; torch {torch.__version__} sees the CPU alone")
    text = "\n".join(page(device, FULL)) + "\n"
    Path(ROOT / "benchmarks" / f"results-{device}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
