"""Experiments and their training: experiment (setting and method, resolved), executor (where
clients run), train (experiences, rounds, clients), checkpoint. May import everything up to
methods."""
