"""What DVC, make and the command `stamp` run: grids of experiments, sweeps, pages, clusters."""
