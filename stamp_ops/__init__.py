"""Operations of the pipeline on a machine or a cluster: `stamp_core` works without them.

Estimates, warm kernels, lock files, stages and clients on clusters. `stamp_core` finds two things
here by name: the driver (`driver.py`) and executors (`<name>_executor.py`, $STAMP_EXECUTOR).
"""
