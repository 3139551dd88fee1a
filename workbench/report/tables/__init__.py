"""Tables from run records, as data frames and as pages in Markdown: results, ablation, sweeps
(sensitivity, coresets, heterogeneity, normalisation, related work, tuning), and the paper's beside
our runs."""

from ..frames import coreset_frame, overlap_frame, run_frame
from .ablation import ablation_findings, ablation_table, write_ablation
from .budgets import budget_table
from .overlap import overlap_differences, overlap_findings, overlap_table, write_overlap
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
from .results import cost_table, differences, findings, matching_table, results_table, write_results
from .sweeps import (
    alpha_accuracies,
    alpha_differences,
    alpha_findings,
    coreset_accuracies,
    coreset_costs,
    coreset_differences,
    coreset_findings,
    masks_table,
    normalisation_findings,
    protection_table,
    related_findings,
    returning_table,
    write_coresets,
    write_heterogeneity,
    write_normalisation,
    write_related,
    write_sensitivity,
    write_tuning,
)
