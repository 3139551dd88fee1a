"""What a graph of the pretend device holds: operations with their tensors, to be run again."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Call(NamedTuple):
    """An operation as it was recorded."""

    operation: Any
    args: Any
    kwargs: Any
    made: list[tuple[int, Tensor]]  # results with memory of their own, by their places


class Tape:
    """Operations in their order, on tensors of the CPU. Their addresses never change.

    As in CUDA, recording changes no values: those of all tensors that were there before come back.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.made: set[int] = set()  # addresses of memory that was taken while recording

    def run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation, which is recorded."""
        operands = {address(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for place in operands.keys() - self.made - self.before.keys():
            storage = operands[place].untyped_storage()
            self.before[place] = storage, storage.clone()
        result = operation(*args, **kwargs)
        made = [
            (place, each)
            for place, each in enumerate(tree_leaves(result))
            if isinstance(each, Tensor) and address(each) not in operands
        ]
        self.made |= {address(each) for _, each in made}
        self.calls.append(Call(operation, args, kwargs, made))
        return result

    def restore(self) -> None:
        """Undo all changes of tensors that were there before."""
        for storage, copy in self.before.values():
            storage.copy_(copy)

    @torch.no_grad()
    def replay(self) -> None:
        """Run all operations again, on the same memory."""
        for call in self.calls:
            results = tree_leaves(call.operation(*call.args, **call.kwargs))
            for place, each in call.made:
                each.copy_(results[place])


def address(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; views share it."""
    return tensor.untyped_storage().data_ptr()
