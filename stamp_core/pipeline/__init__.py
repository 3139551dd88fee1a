"""What DVC and make call: grids and sweeps of experiments, estimates, fingerprints, notebooks,
parallel reproduction. May import everything."""
