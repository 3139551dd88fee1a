"""Figures from pictures, plans and run records: one function a figure, each returns a Figure.

`plans`, `runs`, `coresets`, `heterogeneity` and `analyses` draw what was recorded; `matches` and
`drawings` the method itself, from no record; `widgets` makes a figure follow controls; `look` is
what all share.

Intervals are 95 % Student t intervals of the mean over seeds; every figure says its n. Clients
count from 0, as in the records; tasks count from 1, as in "after 3 tasks". The figures are left
open: a notebook shows those of a cell at its end, so end the cell with `;`, or it shows them twice.
"""

from stamp_core.loading import uncollected

with uncollected():
    from stamp_core.figures.analyses import ablation, angles, features, sensitivity
    from stamp_core.figures.coresets import coreset_times, coresets, kept
    from stamp_core.figures.drawings import architecture
    from stamp_core.figures.heterogeneity import heterogeneity
    from stamp_core.figures.look import save, style
    from stamp_core.figures.matches import plane, products, solvers
    from stamp_core.figures.plans import pictures, schedule, shares
    from stamp_core.figures.runs import accuracy, cost, forgetting, gap, matrices, training
    from stamp_core.figures.widgets import explore

__all__ = [
    "ablation",
    "accuracy",
    "angles",
    "architecture",
    "coreset_times",
    "coresets",
    "cost",
    "explore",
    "features",
    "forgetting",
    "gap",
    "heterogeneity",
    "kept",
    "matrices",
    "pictures",
    "plane",
    "products",
    "save",
    "schedule",
    "sensitivity",
    "shares",
    "solvers",
    "style",
    "training",
]
