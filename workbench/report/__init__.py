"""Tables and figures, from run records only: of the engine this imports core, config, results and
data."""
