"""Experiments, their training round by round, where clients run, checkpoints."""
