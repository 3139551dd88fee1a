"""Gradient matching on Gram matrices, with the exact solver over the simplex."""
