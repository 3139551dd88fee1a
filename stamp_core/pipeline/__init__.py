"""Commands of DVC and make, on grids and sweeps of experiments. May import everything."""
