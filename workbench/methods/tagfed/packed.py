"""A network whose weights are divided among a client's tasks: owners, pruning, masks."""

from typing import NotRequired, TypedDict

import torch
from torch import Tensor, nn

from stamp_core.models.flat import FlatModel
from stamp_core.models.networks import Classifier
from workbench.adam import FlatAdam
from workbench.methods.base.task_server import pack_bits, unpack_bits

FREE = 0  # owner of a weight that belongs to no task; tasks are numbered from 1
COPIED = 255  # owner of a weight of which every task has a copy
PICKED = 0.01  # initial value of a mask
THRESHOLD = 0.005  # a weight is used where its mask is above it


class TaskRecord(TypedDict):
    """What one task has besides the weights that it owns."""

    rest: Tensor  # its copies
    buffers: Tensor
    picked: Tensor  # bits [P]: which of the earlier weights it uses


class PackedState(TypedDict):
    owners: Tensor  # uint8 [P]
    weights: Tensor  # [P], as tasks first left them
    augmented: Tensor  # [P], as they left them after their returns
    tasks: dict[str, TaskRecord]  # by number, from 1
    keys: list[str]  # of the tasks, in this order
    task: int  # the current one; 0 before the first
    new: int  # the experience in which the client met a new task last
    experiences: list[int]  # in which it has trained
    buffers: NotRequired[Tensor]  # of the latest training, where they are local


def initial_owners(network: Classifier) -> Tensor:
    """Owners before any task: the encoder's weights are free, all else is copied.  # uint8 [P]"""
    owners = []
    for name, value in network.named_parameters():
        weight = name.startswith("encoder.") and value.ndim > 1
        owners.append(torch.full((value.numel(),), FREE if weight else COPIED, dtype=torch.uint8))
    return torch.cat(owners)


def trained(state: PackedState) -> Tensor:
    """Which weights the current task trains: all before the first one.  # bool [P]"""
    owners = state["owners"]
    owned: Tensor = (owners == state["task"]) | (owners == COPIED)
    return owned


def earlier(state: PackedState, task: int) -> Tensor:
    """Which weights belong to tasks before this one.  # bool [P]"""
    owners = state["owners"]
    owned: Tensor = (owners < task) & (owners != FREE)
    return owned


def picked(state: PackedState, task: int) -> Tensor:
    """Which weights of earlier tasks a task uses.  # bool [P]"""
    bits = state["tasks"][str(task)]["picked"]
    return earlier(state, task) & unpack_bits(bits, len(state["owners"]))


def sub_model(state: PackedState, task: int) -> tuple[Tensor, Tensor]:
    """Parameters and buffers of a task's part of the network.  # [P], [B]"""
    owners = state["owners"]
    record = state["tasks"][str(task)]
    used = torch.where(picked(state, task), state["weights"], 0.0)
    parameters = torch.where(owners == task, state["augmented"], used)
    parameters[owners == COPIED] = record["rest"]
    return parameters, record["buffers"]


def with_values(state: PackedState, values: Tensor, buffers: Tensor) -> PackedState:
    """The state with other values of what is trained; later tasks keep what they were built on."""
    augmented = state["augmented"].clone()
    augmented[trained(state)] = values
    state = {**state, "augmented": augmented}
    if not state["task"]:
        return {**state, "weights": augmented}
    if state["new"] == max(state["experiences"], default=-1):
        owned = state["owners"] == state["task"]
        state["weights"] = torch.where(owned, augmented, state["weights"])
    name = str(state["task"])
    rest = augmented[state["owners"] == COPIED]
    record: TaskRecord = {**state["tasks"][name], "rest": rest, "buffers": buffers}
    return {**state, "tasks": {**state["tasks"], name: record}}


def with_task(state: PackedState, key: str, experience: int, buffers: Tensor) -> PackedState:
    """The state with a new task, which owns all free weights and starts from the task before."""
    task = len(state["keys"]) + 1
    owners = state["owners"]
    every = pack_bits(torch.ones(len(owners), dtype=torch.bool))
    rest = state["weights"][owners == COPIED]
    initial: TaskRecord = {"rest": rest, "buffers": buffers.clone(), "picked": every}
    before = state["tasks"].get(str(state["task"]), initial)
    record: TaskRecord = {**before, "picked": every}
    return {
        **state,
        "owners": owners.masked_fill(owners == FREE, task),
        "tasks": {**state["tasks"], str(task): record},
        "keys": [*state["keys"], key],
        "task": task,
        "new": experience,
    }


def free_share(keep: float, task: int, progress: float) -> float:
    """The share of a task's weights that is free after a part of its pruning, by a cubic curve."""
    left = 1 - keep * (task - 1)
    final = max(0.0, 1 - keep / left) if left > 0 else 0.0
    return final * (1 - (1 - progress) ** 3)


def pruned(state: PackedState, share: float, sizes: list[int]) -> PackedState:
    """The state in which this share of each tensor's newest or free weights is free."""
    task = len(state["keys"])
    owners = state["owners"].clone()
    parts = zip(state["weights"].split(sizes), owners.split(sizes), strict=True)
    for values, own in parts if task and share else ():
        indices = ((own == task) | (own == FREE)).nonzero().flatten()
        magnitudes = values[indices].abs().masked_fill(own[indices] == FREE, -1.0)
        smallest = magnitudes.argsort(stable=True)[: round(share * len(indices))]
        own[indices[smallest]] = FREE
    return {**state, "owners": owners}


class TaskWeights:
    """The current task's weights in a live vector: its own are trained, earlier ones only picked.

    An earlier weight w is used where its mask m is above a threshold. The gradient passes straight
    through: dL/dm = w dL/dw'. All other weights are 0.
    """

    def __init__(self, state: PackedState, lr: float | None, device: torch.device) -> None:
        """With a learning rate the mask is trained, if there are earlier weights."""
        task = state["task"]
        before = earlier(state, task)
        self.trained = trained(state).to(device)
        self.earlier = torch.where(before, state["weights"], 0.0).to(device)
        mask = PICKED * picked(state, task).float()
        self.mask = FlatModel(nn.ParameterList([mask.to(device)]))
        self.adam = FlatAdam(self.mask, lr) if lr is not None and before.any() else None

    def compose(self, parameters: Tensor) -> None:
        """Overwrite all weights of a vector that are not trained."""
        used = self.earlier * (self.mask.parameters > THRESHOLD)
        torch.where(self.trained, parameters, used, out=parameters)

    def train_mask(self, gradients: Tensor) -> None:
        if self.adam is not None:
            torch.mul(self.earlier, gradients, out=self.mask.gradients)
            self.adam.step()

    def picked(self) -> Tensor:
        """Which weights the mask uses.  # bool [P]"""
        return self.mask.parameters > THRESHOLD
