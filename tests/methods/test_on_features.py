"""Features of an encoder: every method trains on them or is refused by name."""

from dataclasses import replace

import numpy as np
import pytest
import small
from small import tiny, whole

from stamp_core.config.decode import ParameterError
from stamp_core.data.dataset import ImageDataset
from stamp_core.methods.base import registry
from workbench.studies.attacks.capture import start_run

MADE = {  # what images are for, by method; all else trains
    "fedcil": "method is 'FedCIL'; it must be one that makes no images, as the data are features",
    "glfc": "proxy is 'dlg'; it must be 'none'",
    "lander": "method is 'Lander'; it must be one that makes no images, as the data are features",
    "target": "method is 'Target'; it must be one that makes no images, as the data are features",
}
ALIGNED = {"fedas": "align is True; it must be false, as an encoder without weights has nothing"}
FROZEN = {
    kind: f"network.kind is 'last_block'; it must be 'identity': {kind} trains no encoder"
    for kind in ("class_gaussians", "nearest_class_mean", "stsa")
}
VECTORS, MAPS = {"kind": "identity"}, {"kind": "last_block", "channels": [4]}


@pytest.fixture(params=[1, 2], ids=["vectors", "maps"])
def network(request, monkeypatch):
    """The one for digits as 64 features of 1 x 1, or as 16 of 2 x 2."""
    digits, side = small.dataset('{"source": "digits"}'), request.param

    def features(experiment: object) -> ImageDataset:
        shape = (-1, 64 // side**2, side, side)
        x = {name: getattr(digits, name).reshape(shape) for name in ("x_train", "x_test")}
        moments = {name: getattr(digits, name).repeat(shape[1]) for name in ("mean", "std")}
        return replace(digits, **x, **moments)

    monkeypatch.setattr(small.Quick, "dataset", features)
    return VECTORS if side == 1 else MAPS


@pytest.mark.parametrize("kind", registry.method_names())
def test_every_method_trains_on_features_or_is_refused_by_name(kind, network):
    refused = MADE | (ALIGNED if network == VECTORS else FROZEN)
    split = {"images_per_class": 10, "clients": 2, "tasks": 2}
    experiment = whole(kind, network=network, split=split, training={"rounds": 1, "lr": 0.01})
    if kind in refused:
        with pytest.raises(ParameterError) as error:
            small.run(experiment)
        assert str(error.value).startswith(refused[kind])
        return
    record = small.run(experiment)
    assert all(np.isfinite(value).all() for value in record.weights.values())
    assert any(entry["loss"] for entry in record.history) or kind in FROZEN


@pytest.mark.parametrize("kind", ["fedas", "glfc"])
def test_without_the_part_that_cannot_work_a_method_trains_on_features(kind, network):
    params = dict(registry.get_method(kind).fedavg_equivalent or {})
    options = {"network": network, "split": {"images_per_class": 10}, "training": {"lr": 0.01}}
    small.assert_same_weights(
        small.run(tiny(kind, **options, **params)), small.run(tiny(**options))
    )


def test_synthetic_exemplars_and_attacks_are_refused(network):
    memory = {"selection": "sre2l", "exemplars_per_class": 2}
    with pytest.raises(ParameterError, match=r"memory\.selection is 'sre2l'; it must be one that"):
        small.run(tiny("replay", network=network, memory=memory, weight=0.5))
    with pytest.raises(ParameterError, match=r"data is .*; it must be images"):
        start_run(tiny("stamp", network=network), seed=0)


@pytest.mark.parametrize("change", [{"shift": 2}, {"flip": True}])
def test_augmentation_is_refused_where_it_does_nothing(change, network):
    experiment = tiny(network=network, training={**change, "lr": 0.01})
    if network == MAPS:
        small.run(experiment)
        return
    (name, value), right = *change.items(), "absent: it does nothing to 1 x 1 features"
    with pytest.raises(ParameterError, match=f"training.{name} is {value}; it must be {right}"):
        small.run(experiment)
