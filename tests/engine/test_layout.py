"""Channels last in flat vectors: files by name do not show it, checkpoints are not mistaken."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import small
import torch

from stamp_core.core import paths
from stamp_core.data.dataset import ImageDataset


class Coloured(small.Quick):
    def dataset(self) -> ImageDataset:
        return small.coloured(super().dataset())


def coloured() -> Coloured:
    split = {"clients": 2, "tasks": 2, "images_per_class": 6}
    made = small.tiny(split=split, training={"rounds": 1}, network=small.CONVOLUTIONS)
    return Coloured(made.setting, made.method, made.kind, made.params)


def test_a_checkpoint_of_the_other_layout_is_not_resumed(tmp_path):
    experiment = coloured()
    expected = small.run(experiment)
    with small.channels_last():
        small.run(experiment, resume=tmp_path)
        server = small.saved(experiment, tmp_path)["server"]["parameters"]
    with pytest.warns(UserWarning, match="belongs to other layout; kept as"):
        small.assert_same(small.run(experiment, resume=tmp_path), expected)
    other = small.saved(experiment, tmp_path)["server"]["parameters"]
    assert server.shape == other.shape and not torch.allclose(server, other, atol=1e-3)


def test_the_weights_of_a_record_do_not_depend_on_the_layout(tmp_path, monkeypatch):
    """A record of channels last is loaded by name where channels are first, and back."""
    monkeypatch.setattr(paths, "RAW", tmp_path)
    experiment = coloured()
    with small.channels_last():
        record = small.run(experiment)
    record.save(tmp_path / "record")
    assert record.about["identity"]["layout"] == "torch.channels_last"
    network = replace(experiment.setting.network, pretrained="record/weights.safetensors")
    setting = replace(experiment.setting, network=network)
    pretrained = Coloured(setting, experiment.method, experiment.kind, experiment.params)
    for context in (nullcontext, small.channels_last):
        with context():
            named = small.worker(pretrained, small.plan(pretrained)).runtime.network(7).state_dict()
        for name, value in record.weights.items():
            assert named[name].numpy().tobytes() == value.tobytes(), name
