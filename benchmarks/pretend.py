"""A pretend device: the rules of a GPU on tensors of the CPU, and counts of what crosses.

An operation on the device unwraps its operands, runs on the CPU and wraps its results: they are
bit-identical to those of the CPU. What CUDA refuses is refused here, while a graph is captured too.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from benchmarks.tape import Tape
from stamp_core.core.devices import GRAPHS

NAME = "pretend"
DEVICE = f"{NAME}:0"
_aten = torch.ops.aten
_INDEXING = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
_JOINING = (_aten.cat, _aten.stack)  # alone in refusing scalars of the CPU too
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass
class Counts:
    """What has crossed between host and device."""

    up: int = 0  # copies from host to device
    down: int = 0  # copies from device to host
    reads: int = 0  # values, and sizes that depend on values: the host waits for the device


class PretendTensor(Tensor):
    """A tensor that is on the device by name and holds its values, `host`, on the CPU."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, real: Tensor) -> "PretendTensor":
        """A tensor on the device with the layout of one on the CPU."""
        layout = {"strides": real.stride(), "storage_offset": real.storage_offset()}
        made = Tensor._make_wrapper_subclass(
            cls, real.shape, **layout, dtype=real.dtype, device=DEVICE
        )
        made.host = real
        return made

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse operations where nobody counts."""
        raise RuntimeError(f"{operation} on {DEVICE} outside of `pretending`")

    @property
    def data(self) -> Tensor:
        """The same values without a graph."""
        return PretendTensor(self.host)

    @data.setter
    def data(self, other: "PretendTensor") -> None:
        """Take the values of another tensor."""
        Tensor.data.__set__(self, other)
        self.host = other.host

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the values are on the device."""
        raise TypeError(f"can't convert a tensor on {DEVICE} to numpy: copy it to the CPU first")

    __array__ = numpy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: no other process has the device."""
        raise TypeError(f"a tensor on {DEVICE} cannot be pickled: copy it to the CPU first")

    def __deepcopy__(self, memo: dict[int, Any]) -> "PretendTensor":
        """A copy on the device."""
        copied = PretendTensor(self.host.clone()).requires_grad_(self.requires_grad)
        copied._is_param = isinstance(self, nn.Parameter)
        return memo.setdefault(id(self), copied)

    def __repr__(self) -> str:
        """The values and the device."""
        return f"{self.host!r} on {DEVICE}"


class _Pretending(TorchDispatchMode):
    """Runs every operation on the device, checks its rules, counts, and records a graph."""

    tape: ClassVar[Tape | None] = None  # of the graph that is being captured

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The result of an operation, on the device if an operand or `device` is."""
        kwargs = kwargs or {}
        flat, structure = tree_flatten((args, kwargs))
        tensors = [each for each in flat if isinstance(each, Tensor)]
        wrappers = {id(each.host): each for each in tensors if isinstance(each, PretendTensor)}
        on_device = _makes_on_device(operation, args, kwargs, bool(wrappers))
        if not wrappers and not on_device:
            if self.tape:  # CUDA would run it once, unnoticed
                raise RuntimeError(f"{operation}: a graph of {DEVICE} has no operation of the CPU")
            return operation(*args, **kwargs)
        before = astuple(self.counts)
        if operation.overloadpacket in (_aten._to_copy, _aten.copy_):
            source = isinstance(args[operation.overloadpacket is _aten.copy_], PretendTensor)
            self.counts.up += on_device and not source
            self.counts.down += source and not on_device
        else:
            self.check(operation, args, flat, tensors)
        if self.tape and before != astuple(self.counts):
            raise RuntimeError(f"{operation}: not permitted while a graph of {DEVICE} is captured")
        real = [each.host if isinstance(each, PretendTensor) else each for each in flat]
        real_args, real_kwargs = tree_unflatten(real, structure)
        if kwargs.get("device") is not None:
            real_kwargs["device"] = torch.device("cpu")
        if self.tape:
            result = self.tape.run(operation, real_args, real_kwargs)
        else:
            result = operation(*real_args, **real_kwargs)
        if not on_device:
            return result
        return tree_map_only(Tensor, lambda t: _wrapper(t, wrappers), result)

    def check(self, operation: Any, args: Any, flat: list[Any], tensors: list[Tensor]) -> None:
        """Refuse what CUDA refuses; count the host's indices and what it waits for."""
        packet = operation.overloadpacket
        drawn = torch.Tag.nondeterministic_seeded in operation.tags
        if drawn or any(isinstance(each, torch.Generator) for each in flat):
            raise RuntimeError(f"{operation}: a generator of the CPU cannot draw on {DEVICE}")
        host = [each for each in tensors if not isinstance(each, PretendTensor)]
        if packet in _INDEXING:
            indices = [each for each in args[1] if each is not None]
            if isinstance(args[0], PretendTensor):
                theirs = [each for each in indices if not isinstance(each, PretendTensor)]
                self.counts.up += len(theirs)
                host = [each for each in host if not any(each is other for other in theirs)]
            if any(isinstance(i, PretendTensor) and i.dtype == torch.bool for i in indices):
                self.counts.reads += 1
        elif _WAITING & set(operation.tags):
            self.counts.reads += 1
        if any(each.dim() or packet in _JOINING for each in host):
            raise RuntimeError(
                f"{operation}: expected all tensors to be on the same device, "
                f"but found at least two devices, {DEVICE} and cpu"
            )


def _makes_on_device(operation: Any, args: Any, kwargs: Any, ours: bool) -> bool:
    """Whether the result of an operation is on the device; `ours`: an operand is."""
    if operation.overloadpacket is _aten.copy_:
        return isinstance(args[0], PretendTensor)
    device = kwargs.get("device")
    return ours if device is None else torch.device(device).type == NAME


def _wrapper(real: Tensor, wrappers: Mapping[int, PretendTensor]) -> PretendTensor:
    """The wrapper of a tensor: the one that an operation in place was given, or a new one."""
    return wrappers[id(real)] if id(real) in wrappers else PretendTensor(real)


@cache
def register() -> None:
    """Make the device known to torch, once per process.

    Before the first backward pass, which starts a thread for each device that there is.
    """
    _setup_privateuseone_for_python_backend(NAME)


class PretendGraphs:
    """The graphs of the device."""

    replayed: ClassVar[int] = 0  # graphs in this process

    def warm_up(self, step: Callable[[], Tensor]) -> Tensor:
        """The result of `step`."""
        return step()

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What replays `step`, and the tensor in which each replay leaves the result."""
        tape = _Pretending.tape = Tape()
        try:
            result = step()
        finally:
            _Pretending.tape = None
            tape.restore()

        def replay() -> None:
            PretendGraphs.replayed += 1
            tape.replay()

        return replay, result


@contextmanager
def pretending(graphs: bool = False) -> Iterator[Counts]:
    """A context in which the device exists, with or without graphs; gives its counts."""
    register()
    with _Pretending() as mode:
        if graphs:
            GRAPHS[NAME] = PretendGraphs
        try:
            yield mode.counts
        finally:
            GRAPHS.pop(NAME, None)
