"""Figures from images, plans and run records: one function per figure, which returns a Figure.

`images` draws data and plans, `runs`, `sweeps` and `analyses` what was recorded, `matching` and
`architecture` the method itself; `style` holds what all share.

Every figure says its n and what its bars mean. Clients count from 0, as in the records, tasks from
1, as in "after 3 tasks". Figures stay open: a notebook shows those of a cell at its end, so end the
cell with `;` or it shows them twice.
"""

from stamp_core.core.loading import without_garbage_collection

with without_garbage_collection():
    from stamp_core.report.figures.analyses import angles, features
    from stamp_core.report.figures.architecture import architecture
    from stamp_core.report.figures.images import (
        exemplars,
        images,
        scenes,
        schedule,
        shares,
        synthetic,
    )
    from stamp_core.report.figures.matching import explore, plane, products, solvers
    from stamp_core.report.figures.runs import (
        ablation,
        accuracy,
        accuracy_all,
        cost,
        forgetting,
        gap,
        matrices,
        nearest_mean,
        training,
    )
    from stamp_core.report.figures.style import save
    from stamp_core.report.figures.sweeps import (
        coreset_times,
        coresets,
        heterogeneity,
        protection,
        returning,
        sensitivity,
    )

__all__ = ["ablation", "accuracy", "accuracy_all", "angles", "architecture", "coreset_times"]
__all__ += ["coresets", "cost", "exemplars", "explore", "features", "forgetting", "gap"]
__all__ += ["heterogeneity", "images", "matrices", "nearest_mean", "plane", "products"]
__all__ += ["protection", "returning", "save", "scenes", "schedule", "sensitivity", "shares"]
__all__ += ["solvers", "synthetic", "training"]
