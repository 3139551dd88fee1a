"""Where tensors are: all that differs between a CPU and a GPU, asked in one place."""

import os
import platform

import torch

_GPU = "cuda"


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


def reset_device_peak(device: torch.device) -> None:
    """Let `device_peak` count from now on."""
    if device.type == _GPU:
        torch.cuda.reset_peak_memory_stats(device)


def device_peak(device: torch.device) -> int:
    """The most bytes that were in use on a GPU at a time; 0 for a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == _GPU else 0


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == _GPU:
        torch.cuda.synchronize(device)


def weights_format(device: torch.device) -> torch.memory_format:
    """How a network's weights are in memory, also in flat vectors: on a GPU channels come last.

    There cuDNN would transpose them at every call. On a CPU a small network gains 2 % of a step:
    too little for results with other last digits.
    """
    return torch.channels_last if device.type == _GPU else torch.contiguous_format


def cache_size(device: torch.device) -> int:
    """The number of bytes to work on at a time: on a CPU what its cache holds."""
    return 2**22 if device.type == "cpu" else 2**25


def set_deterministic(device: torch.device, deterministic: bool) -> None:
    """Choose between the same bits in every run on a GPU and the fastest kernels; no-op on a CPU.

    An operation without a deterministic kernel warns: a long training should not end there.
    """
    if device.type != _GPU:
        return
    if deterministic:  # read when cuBLAS is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    # no one reads such memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
