"""Folders as PFLlib's generators write them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stamp_core.core.vision import load_torchvision
from stamp_core.data.dataset import ImageDataset

transforms = load_torchvision().transforms


def normalised(images: torch.Tensor) -> np.ndarray:
    """Images [n, C, H, W] as PFLlib stores them: float32 in -1..1."""
    channels = images.shape[1]
    half = transforms.Normalize([0.5] * channels, [0.5] * channels)
    transform = transforms.Compose([transforms.ToTensor(), half])
    return torch.stack([transform(each.permute(1, 2, 0).numpy()) for each in images]).numpy()


def client(dataset: ImageDataset, train: Sequence[int], test: Sequence[int] = ()) -> dict[str, Any]:
    a, b = list(train), list(test)
    x = torch.cat([dataset.x_train[a], dataset.x_test[b]])
    return {"x": normalised(x), "y": torch.cat([dataset.y_train[a], dataset.y_test[b]]).numpy()}


def write_folder(folder: Path, clients: Sequence[Any]) -> Path:
    (folder / "train").mkdir(parents=True)
    for number, data in enumerate(clients):
        with (folder / "train" / f"{number}.npz").open("wb") as file:
            np.savez_compressed(file, data=data)
    config = {"num_clients": len(clients), "non_iid": True, "balance": False, "partition": "dir"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
