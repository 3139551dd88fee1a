"""What depends on the kind of device."""

import os

import pytest
import torch

from stamp_core.core import devices

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def flags() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    chosen = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return cudnn.deterministic, cudnn.benchmark, chosen, warns


@pytest.fixture(autouse=True)
def same_flags_afterwards(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    deterministic, benchmark, chosen, warns = flags()
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, benchmark
    torch.use_deterministic_algorithms(chosen, warn_only=warns)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_a_gpu_is_deterministic():
    devices.set_deterministic(GPU)
    assert flags() == (True, False, True, True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_nothing_changes_on_a_cpu():
    before = flags()
    devices.set_deterministic(CPU)
    assert flags() == before and "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize(("present", "device"), [(False, "cpu"), (True, "cuda")])
def test_the_device_is_the_gpu_if_there_is_one(present, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    assert devices.resolve_device("auto") == device
    assert devices.resolve_device("cpu") == "cpu"


@pytest.mark.parametrize(("free", "home"), [(4 * 288, "cuda"), (4 * 288 - 1, "cpu")])
def test_training_images_are_stored_on_a_gpu_with_room_for_four_times_as_many(
    free, home, monkeypatch
):
    """8 images of 36 bytes; the rest of the room is for models and batches."""
    images = torch.zeros(8, 1, 6, 6, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**12))
    assert devices.storage_device(images, GPU).type == home
