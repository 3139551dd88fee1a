"""Shares: the part of a data set that one machine of a federation has.

    python -m workbench.federation.shares digits 0to2 shares '0 1 2' '3 4 5' '6 7 8 9'

writes shares/server and, for nodes with these clients, shares/node1 to node3. A node's share has
the training and test images of its clients in the plans of all seeds. The server's has all test
images, and the training images (up to 100 of a class) for scores by the nearest class mean.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stamp_core.client.by_class import first_per_class
from stamp_core.client.runtime import MEAN_IMAGES
from stamp_core.config.params import read_setting
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.loading import load_dataset
from stamp_core.data.plan import Plan
from stamp_core.engine.experiment import Experiment
from stamp_core.engine.trees import Tree, read_tree, write_tree
from workbench.workflow.grid import load_plans

FILE = "share.safetensors"
ABSENT = -1  # the label of an image that this machine does not have
KNOWN = ("name", "digest", "mean", "std")  # of the whole data set, on all machines


class OwnPlan(Plan):
    """A plan on a machine that has the training images of some clients only."""

    own: frozenset[int] = frozenset()
    counts: Sequence[Sequence[int]] = ()  # [U][T], training images, where the server knows them

    def train_indices(self, dataset: ImageDataset, client: int, task: int) -> Tensor:
        """The indices of a client's images; refused for a client of another machine."""
        if client not in self.own:
            raise ValueError(
                f"the images of client {client} are on another machine: a method that trains "
                "before the first round, or on all clients' images, cannot run in a federation"
            )
        return super().train_indices(dataset, client, task)


@dataclass(frozen=True)
class OwnExperiment(Experiment):
    """An experiment on a machine that has some of its images."""

    images: ImageDataset = field(kw_only=True)

    def dataset(self) -> ImageDataset:
        return self.images


@dataclass(frozen=True)
class Share:
    """A share as a data set of full length, in which images of others are black and unlabelled."""

    images: ImageDataset
    clients: tuple[int, ...]
    digest: str


def own_plan(plan: Plan, clients: Iterable[int], counts: Sequence[Sequence[int]] = ()) -> OwnPlan:
    """The plan for a machine with these clients; its hash is that of `plan`."""
    own = OwnPlan(**values_of(plan))
    vars(own).update(own=frozenset(clients), counts=counts)  # no fields, or the hash would change
    return own


def own_experiment(experiment: Experiment, images: ImageDataset) -> OwnExperiment:
    """The experiment for a machine with these images."""
    return OwnExperiment(**values_of(experiment), images=images)


def values_of(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass by name."""
    return {each.name: getattr(instance, each.name) for each in fields(instance)}


def write_shares(
    dataset: ImageDataset, plans: Mapping[int, Plan], nodes: Sequence[Sequence[int]], folder: Path
) -> None:
    """Write the shares of the server and of the nodes, given the clients of each node."""
    reference = first_per_class(dataset.y_train, MEAN_IMAGES)
    tests = torch.arange(len(dataset.y_test))
    share = take_share(dataset, reference, tests, ())
    share["train"] |= {"count": len(reference), "places": torch.arange(len(reference))}
    write_share(folder / "server", share)
    counts = {}
    for seed, plan in plans.items():
        plan.save(folder / "server" / f"plan-{seed}.json")
        every = range(plan.tasks)
        counts[seed] = [
            [len(plan.train_indices(dataset, u, t)) for t in every]
            for u in range(len(plan.clients))
        ]
    (folder / "server" / "counts.json").write_text(json.dumps(counts))
    digests = {}
    for number, clients in enumerate(nodes, start=1):
        own = [(p, u, t) for p in plans.values() for u in clients for t in range(p.tasks)]
        train = torch.cat([p.train_indices(dataset, u, t) for p, u, t in own])
        test = torch.cat([p.test_indices(dataset, u, t) for p, u, t in own])
        share = take_share(dataset, train.unique(), test.unique(), clients)
        digests[write_share(folder / f"node{number}", share)] = list(clients)
    (folder / "server" / "nodes.json").write_text(json.dumps(digests, indent=1))


def take_share(dataset: ImageDataset, train: Tensor, test: Tensor, clients: Sequence[int]) -> Tree:
    """Some images of a data set, with what all machines know of it."""
    names = {"classes": list(dataset.classes), "domains": list(dataset.domains)}
    known = {name: getattr(dataset, name) for name in KNOWN}
    share: Tree = {**known, **names, "clients": list(clients)}
    for subset, places in (("train", train), ("test", test)):
        arrays = {part: getattr(dataset, f"{part}_{subset}") for part in ("x", "y", "domain")}
        chosen = {part: array[places] for part, array in arrays.items()}
        share[subset] = {"count": len(arrays["y"]), "places": places, **chosen}
    return share


def write_share(folder: Path, share: Tree) -> str:
    """Write a share; returns its digest."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tree(folder / FILE, share, {})
    return read_tree(folder / FILE)[1]["digest"]


def read_share(folder: Path) -> Share:
    """The share in a folder, verified."""
    tree, header = read_tree(folder / FILE)
    values: Tree = {name: tree[name] for name in KNOWN}
    values |= {name: tuple(tree[name]) for name in ("classes", "domains")}
    for subset in ("train", "test"):
        part = tree[subset]
        count, (_, channels, height, width) = part["count"], part["x"].shape
        x = torch.zeros(count, height, width, channels, dtype=torch.uint8)  # as in the cache
        whole = {"x": x.permute(0, 3, 1, 2), "y": torch.full((count,), ABSENT)}
        whole["domain"] = torch.zeros(count, dtype=torch.int64)
        for name, array in whole.items():
            array[part["places"]] = part[name]
            values[f"{name}_{subset}"] = array
    return Share(ImageDataset(**values), tuple(tree["clients"]), header["digest"])


def main(setting: str, seeds: str, folder: str, *nodes: str) -> None:
    """Write the shares of a setting; each of `nodes` lists the clients of a node."""
    checked = read_setting(setting)
    dataset, clients = load_dataset(checked.data), [list(map(int, node.split())) for node in nodes]
    found, expected = Counter(c for own in clients for c in own), range(checked.split.clients)
    if found != Counter(expected):
        raise SystemExit(
            f"{setting} has clients 0 to {expected[-1]}, each on one node; not {nodes}"
        )
    write_shares(dataset, load_plans(checked, dataset, seeds), clients, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
