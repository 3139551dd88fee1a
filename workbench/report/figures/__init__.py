"""Figures from images, plans and run records: one function per figure, which returns a Figure.

`images` draws data and plans, `runs`, `paired`, `sweeps` and `analyses` what was recorded,
`privacy` what noise costs and what uploads give away; `style` holds what all share.

Every figure says its n and what its bars mean. Clients count from 0, as in the records, tasks from
1, as in "after 3 tasks". Figures stay open: a notebook shows those of a cell at its end, so end the
cell with `;` or it shows them twice.
"""

from stamp_core.core.processes import without_garbage_collection

with without_garbage_collection():
    from .analyses import angles, features
    from .images import exemplars, images, scenes, schedule, shares, synthetic
    from .paired import ablation, differences
    from .privacy import noise, projection, reconstructions, rounds_together
    from .runs import (
        accuracy,
        accuracy_all,
        cost,
        forgetting,
        gap,
        matrices,
        nearest_mean,
        training,
    )
    from .style import save
    from .sweeps import coresets, heterogeneity, overlap, protection, returning, rounds, sensitivity
