"""Where tensors are: all that differs between a CPU and a GPU, asked in one place."""

import os
import platform
from collections.abc import Callable

import torch
from torch import Tensor

_GPU = "cuda"
SHARE = 4  # what is stored on the GPU takes at most 1/4 of its free memory


def resolve_device(device: str) -> str:
    """The device by name; "auto" is the GPU if there is one."""
    if device == "auto":
        return _GPU if torch.cuda.is_available() else "cpu"
    return device


def device_name(device: torch.device) -> str:
    """The name of a GPU, or the machine's architecture."""
    return torch.cuda.get_device_name(device) if device.type == _GPU else platform.machine()


def free_memory(device: torch.device) -> int | None:
    """The free bytes of a GPU; None where tensors are in the memory of the process."""
    return torch.cuda.mem_get_info(device)[0] if device.type == _GPU else None


def has_room(size: int, device: torch.device) -> bool:
    """Whether so many bytes may be stored on a device."""
    free = free_memory(device)
    return free is None or SHARE * size <= free


def storage_device(images: Tensor, device: torch.device) -> torch.device:
    """Where images or vectors are stored: on the GPU if there is room, else where they are."""
    return device if has_room(images.nbytes, device) else images.device


def has_own_memory(device: torch.device) -> bool:
    """Whether a device has memory beside the process's, whose peak is counted."""
    return device.type == _GPU


def reset_device_peak(device: torch.device) -> None:
    """Let `device_peak` count from now on."""
    torch.cuda.reset_peak_memory_stats(device)


def device_peak(device: torch.device) -> int:
    """The most bytes that were in use on a GPU at a time."""
    return torch.cuda.max_memory_allocated(device)


def weights_format(device: torch.device) -> torch.memory_format:
    """How a network's weights are in memory, also in flat vectors: on a GPU channels come last.

    There cuDNN would transpose them at every call. On a CPU a small network gains 2 % of a step:
    too little for results with other last digits.
    """
    return torch.channels_last if device.type == _GPU else torch.contiguous_format


def cache_size(device: torch.device) -> int:
    """The number of bytes to work on at a time: on a CPU what its cache holds."""
    return 2**22 if device.type == "cpu" else 2**25


def set_deterministic(device: torch.device) -> None:
    """Make runs on a GPU bit-identical; an operation that cannot be so warns, and goes on."""
    if device.type != _GPU:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    # no one reads such memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class Graphs:
    """Graphs of a GPU's operations, replayed one at a time: they share one pool of memory."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.side = torch.cuda.Stream()

    def warm_up(self, step: Callable[[], Tensor]) -> Tensor:
        """The result of `step`, run on the side stream, where a capture can follow."""
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            result = step()
        torch.cuda.current_stream().wait_stream(self.side)
        return result

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What replays `step` and where each replay leaves the result; no value changes yet."""
        graph = torch.cuda.CUDAGraph()
        capturing = torch.cuda.graph(graph, pool=self.pool, stream=self.side)
        with torch.cuda.stream(self.side), capturing:  # one that fails does not leave the stream
            result = step()
        return graph.replay, result


GRAPHS: dict[str, Callable[[], Graphs]] = {_GPU: Graphs}  # by type of device
