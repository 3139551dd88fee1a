"""The names that scripts and notebooks import from `stamp_core`."""

from stamp_core.core.processes import without_garbage_collection

with without_garbage_collection():
    from stamp_core.config.params import read_params, read_setting
    from stamp_core.core.paths import RESUME, ROOT
    from stamp_core.data.dataset import ImageDataset
    from stamp_core.data.loading import load_dataset
    from stamp_core.data.plan import Plan
    from stamp_core.data.sources.npz import save_npz
    from stamp_core.engine.experiment import Experiment, load_experiment
    from stamp_core.engine.train import save_records, train
    from stamp_core.methods.base.method import Method
    from stamp_core.results.records import Record, load_record

__all__ = [
    "RESUME",
    "ROOT",
    "Experiment",
    "ImageDataset",
    "Method",
    "Plan",
    "Record",
    "load_dataset",
    "load_experiment",
    "load_record",
    "read_params",
    "read_setting",
    "save_npz",
    "save_records",
    "train",
]
