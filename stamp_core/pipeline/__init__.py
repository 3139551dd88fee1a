"""What DVC and make call: grids and sweeps of experiments, fingerprints, notebooks, reproduction.

May import everything.
"""
