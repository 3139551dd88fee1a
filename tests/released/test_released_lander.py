"""LANDER (tmtuan1307): `data_generation`, then `incremental_train` of methods/lander.py.

Left out there, besides what is in `test_released_target.py`: the model of the best round, learnt
normalisation of synthetic images, restarts of the student's momentum.
"""

import pytest
import torch
from executed import Execution, draws
from test_released_target import federation, weights

from workbench.methods import lander

LANDER = Execution("lander", "LANDER", "44d7acc", 1e-12)
SGD = {"momentum": 0.9, "weight_decay": 5e-4, "lr": 0.04, "schedule": "cosine", "lr_end": 1e-3}
MAP = 10 * 32 + 32  # parameters of the map of features


@pytest.mark.usefixtures("double")
def test_a_synthesis_and_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    # so close to each other that a batch of the second round is within the radius
    anchors = (0.1 * draws(6, 10, LANDER.params.anchor_features)).half()
    own = {"anchors": anchors, "map": weights(7, MAP)}
    synthesised, first, last = federation(LANDER, SGD, lander, monkeypatch, **own)
    LANDER.check(
        {
            "images": synthesised["replay"]["images"][::12],
            "parameters": last["parameters"],
            "map": last["map"],
            "buffers": torch.stack([first["buffers"], last["buffers"]]),
        }
    )
