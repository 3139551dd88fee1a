"""Tables from run records, as data frames and as pages in Markdown: results, ablation, sweeps
(coresets, heterogeneity, related work, tuning), and the paper's tables compared with our runs."""

from ..frames import coreset_frame, run_frame
from .ablation import ablation_findings, ablation_table, write_ablation
from .page import show
from .paper import (
    architectures,
    compare_costs_with_paper,
    compare_with_paper,
    modified_networks,
    training_details,
    write_paper,
)
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
    protection_table,
    related_findings,
    returning_table,
    write_coresets,
    write_heterogeneity,
    write_related,
    write_tuning,
)

__all__ = ["ablation_findings", "ablation_table", "write_ablation"]
__all__ += ["coreset_accuracies", "coreset_costs", "coreset_differences", "coreset_findings"]
__all__ += ["alpha_accuracies", "alpha_differences", "coreset_frame", "write_coresets"]
__all__ += ["alpha_findings", "matching_table", "run_frame", "write_heterogeneity"]
__all__ += ["compare_costs_with_paper", "compare_with_paper", "write_paper"]
__all__ += ["architectures", "modified_networks", "training_details"]
__all__ += ["masks_table", "protection_table", "related_findings", "returning_table"]
__all__ += ["write_related", "write_tuning"]
__all__ += ["cost_table", "differences", "findings", "results_table", "show", "write_results"]
