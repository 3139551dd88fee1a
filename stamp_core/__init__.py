"""STAMP Workbench: federated continual learning, reproducible from params.yaml to the figures."""

from stamp_core.loading import uncollected

with uncollected():
    from stamp_core.data import ImageSet, load
    from stamp_core.engine import keep, train
    from stamp_core.experiments import Experiment, experiment
    from stamp_core.grid import gather, plans, run_folder, save_plans
    from stamp_core.methods import Method
    from stamp_core.paths import RESUME, ROOT
    from stamp_core.records import Record
    from stamp_core.split import Plan

__all__ = [
    "RESUME",
    "ROOT",
    "Experiment",
    "ImageSet",
    "Method",
    "Plan",
    "Record",
    "experiment",
    "gather",
    "keep",
    "load",
    "plans",
    "run_folder",
    "save_plans",
    "train",
]
