"""Parameters of a small project, for tests of the pipeline."""

from copy import deepcopy
from typing import Any

import small

SWEEP: dict[str, Any] = {
    "label": "radius",
    "setting": ["tiny"],
    "method": ["near"],
    "seeds": "0to1",
    "keys": ["methods.near.spatial.kappa", "methods.near.temporal.kappa"],
    "values": [0.0, 0.5],
}
TINY: dict[str, Any] = {
    "data": small.DATA,
    "split": {**small.SPLIT, "tasks": 2, "images_per_class": 5},
    "network": small.NETWORK,
    "training": {**small.TRAINING, "rounds": 1},
}
SHARED = {**deepcopy(TINY), "split": {**small.SPLIT, "tasks": 2, "order": "common", "alpha": 1.0}}
PARAMS: dict[str, Any] = {
    "file": "params.yaml",
    "grid": {"setting": ["tiny"], "method": ["fedavg", "near", "sam", "keep_all"], "seeds": ["0"]},
    "ablation": {"baselines": ["near"], "method": ["sam"]},
    "sweeps": {
        "kappa": SWEEP,
        "exemplars": {
            "figure": "coresets",
            "label": "exemplars",
            "setting": ["tiny", "other"],
            "method": ["kept", "herded"],
            "seeds": "0",
            "keys": ["methods.{method}.memory.exemplars_per_class"],
            "values": [1, 2],
        },
        "alpha": {
            "figure": "heterogeneity",
            "label": "Dirichlet",
            "setting": ["shared"],
            "method": ["fedavg"],
            "seeds": "0",
            "keys": ["settings.{setting}.split.alpha"],
            "values": [0.5, 1.0],
        },
    },
    "settings": {"tiny": TINY, "other": deepcopy(TINY), "shared": SHARED},
    "methods": {
        "fedavg": {"server_lr": 1.0},
        "kept": {"kind": "replay", "memory": {"selection": "uniform", "exemplars_per_class": 9}},
        "herded": {"extends": "kept", "memory": {"selection": "herding"}},
        "keep_all": {"extends": "kept", "memory": {"exemplars_per_class": 1000000}},
        "near": {
            "kind": "stamp",
            "memory": {"exemplars_per_class": 3},
            "spatial": {"kappa": 0.25, "softmax": {"rounds": 7, "lr": 2.0}},
            "temporal": {"kappa": 0.25},
        },
        "sam": {"extends": "near", "temporal": None},
    },
}
