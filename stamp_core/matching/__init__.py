"""Gradient matching and projection on Gram matrices, with the exact solver over the simplex.
May import core and config."""
