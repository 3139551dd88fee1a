"""What an honest-but-curious server learns from uploads: gradient inversion, and its scores."""
