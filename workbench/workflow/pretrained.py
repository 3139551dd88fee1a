"""`make pretrained`: features, the last block and the base network of its settings, made once."""

import argparse
from pathlib import Path

from safetensors.numpy import save_file

from stamp_core.config.params import read_params, read_setting
from stamp_core.core import paths
from stamp_core.core.atomic import atomic_write
from stamp_core.data.loading import find_source, load_dataset
from stamp_core.engine.experiment import load_experiment
from workbench.efficientnet import save_last_block
from workbench.workflow.profiles import PRETRAINED, read_profile
from workbench.workflow.training import Job, require_trained, train_missing

BASE = "cifar100_base"  # the setting whose network others start from


def prepare(names: list[str]) -> None:
    """What settings start from: the last block's weights, the base network, encoded images."""
    params = read_params()
    for setting in (read_setting(name, params) for name in names):
        if setting.network.kind == "last_block":
            print(save_last_block(find_source(setting.data)[1].encoder))
        if setting.network.pretrained == f"{BASE}.safetensors":
            print(train_base())
        print(f"{setting.name}: {load_dataset(setting.data)}", flush=True)


def train_base() -> Path:
    """Train the base network in one place, if there is no current record, and write its file."""
    job = Job(load_experiment(BASE, "joint"), "0", PRETRAINED)
    found, failures = train_missing([job], 1)
    require_trained(found, failures)
    ((record,),) = found.values()
    path = paths.RAW / f"{BASE}.safetensors"
    with atomic_write(path) as scratch:
        save_file(record.weights, scratch)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prepare what settings start from.")
    known = read_profile(PRETRAINED)["grid"]["setting"]
    parser.add_argument("settings", nargs="*", default=known, help="default: those of the grid")
    prepare(parser.parse_args().settings)
