"""Tables from run records, as data frames and as pages in Markdown: results, ablation, coresets,
heterogeneity, related work, gradient matching, and the paper's tables compared with our runs."""

from .ablation import ablation_findings, ablation_table, write_ablation
from .coresets import (
    coreset_accuracies,
    coreset_costs,
    coreset_differences,
    coreset_findings,
    coreset_frame,
    write_coresets,
)
from .heterogeneity import (
    alpha_accuracies,
    alpha_differences,
    alpha_findings,
    alpha_frame,
    write_heterogeneity,
)
from .matching import matching_table
from .paper import compare_costs_with_paper, compare_with_paper, write_paper
from .paper_details import architectures, modified_networks, training_details
from .related import masks_table, protection_table, related_findings, returning_table, write_related
from .results import cost_table, differences, findings, results_table, write_results
from .text import show

__all__ = ["ablation_findings", "ablation_table", "write_ablation"]
__all__ += ["coreset_accuracies", "coreset_costs", "coreset_differences", "coreset_findings"]
__all__ += ["alpha_accuracies", "alpha_differences", "coreset_frame", "write_coresets"]
__all__ += ["alpha_findings", "alpha_frame", "matching_table", "write_heterogeneity"]
__all__ += ["compare_costs_with_paper", "compare_with_paper", "write_paper"]
__all__ += ["architectures", "modified_networks", "training_details"]
__all__ += ["masks_table", "protection_table", "related_findings", "returning_table"]
__all__ += ["write_related"]
__all__ += ["cost_table", "differences", "findings", "results_table", "show", "write_results"]
