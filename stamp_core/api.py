"""The names that notebooks and scripts import from `stamp_core`."""

from stamp_core.core.loading import without_garbage_collection

with without_garbage_collection():
    from stamp_core.config.params import expand_grid, read_params, read_setting
    from stamp_core.core.paths import RESUME, ROOT
    from stamp_core.data.dataset import ImageDataset
    from stamp_core.data.exchange import export_plan, import_plan
    from stamp_core.data.exchange.partitions import find_images, import_flwr, import_pfllib
    from stamp_core.data.loading import load_dataset
    from stamp_core.data.plan import Plan
    from stamp_core.data.sources.npz import save_npz
    from stamp_core.engine.experiment import Experiment, load_experiment
    from stamp_core.engine.train import save_records, train
    from stamp_core.methods.base.method import Method
    from stamp_core.pipeline.grid import (
        load_grid,
        load_plans,
        run_folder,
        save_metrics,
        save_plans,
        train_and_save,
    )
    from stamp_core.results.loggers import CsvLogger, DvcliveLogger, TensorBoardLogger
    from stamp_core.results.records import Record, load_record

__all__ = [
    "RESUME",
    "ROOT",
    "CsvLogger",
    "DvcliveLogger",
    "Experiment",
    "ImageDataset",
    "Method",
    "Plan",
    "Record",
    "TensorBoardLogger",
    "expand_grid",
    "export_plan",
    "find_images",
    "import_flwr",
    "import_pfllib",
    "import_plan",
    "load_dataset",
    "load_experiment",
    "load_grid",
    "load_plans",
    "load_record",
    "read_params",
    "read_setting",
    "run_folder",
    "save_metrics",
    "save_npz",
    "save_plans",
    "save_records",
    "train",
    "train_and_save",
]
