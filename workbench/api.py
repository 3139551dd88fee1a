"""The names that notebooks and scripts import from `workbench`."""

from stamp_core.core.processes import without_garbage_collection

with without_garbage_collection():
    from workbench.exchange import export_plan, import_plan
    from workbench.exchange.partitions import find_images, import_flwr, import_pfllib
    from workbench.workflow.grid import (
        grid_seeds,
        load_grid,
        load_plans,
        pictured,
        run_folder,
        save_metrics,
        save_plans,
        train_and_save,
    )
    from workbench.workflow.loggers import CsvLogger, DvcliveLogger, TensorBoardLogger
    from workbench.workflow.profiles import expand_grid, read_profile
    from workbench.workflow.training import train_grid

__all__ = [
    "CsvLogger",
    "DvcliveLogger",
    "TensorBoardLogger",
    "expand_grid",
    "export_plan",
    "find_images",
    "grid_seeds",
    "import_flwr",
    "import_pfllib",
    "import_plan",
    "load_grid",
    "load_plans",
    "pictured",
    "read_profile",
    "run_folder",
    "save_metrics",
    "save_plans",
    "train_and_save",
    "train_grid",
]
