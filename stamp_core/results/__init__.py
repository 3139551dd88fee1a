"""Results of a run: records on disk, and metrics computed from accuracy matrices."""
