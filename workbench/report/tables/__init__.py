"""Tables from run records, as data frames and as pages in Markdown: results, ablation, sweeps
(sensitivity, coresets, heterogeneity, rounds, related work), and the paper's beside our runs."""

from ..frames import run_frame
from .ablation import ablation_table, write_ablation
from .page import show
from .paper import (
    architectures,
    compare_costs_with_paper,
    compare_with_paper,
    modified_networks,
    training_details,
    write_paper,
)
from .privacy import noise_differences, write_privacy
from .results import (
    cost_table,
    differences,
    matching_table,
    measured_table,
    results_table,
    write_results,
)
from .sweeps import (
    CORESETS,
    HETEROGENEITY,
    MASKS,
    OVERLAP,
    PROTECTION,
    RETURNING,
    ROUNDS,
    coreset_costs,
    write_coresets,
    write_overlap,
    write_related,
    write_sensitivity,
)
