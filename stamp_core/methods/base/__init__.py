"""Method, which is FedAvg with all hooks, what several methods share, and presets."""
