"""Tables and figures, from run records only. May import core, config, results and, for drawings of
the method itself, data, models and matching."""
