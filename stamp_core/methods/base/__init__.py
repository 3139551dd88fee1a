"""Method (FedAvg with all hooks), what several methods share (rehearsal, server matching,
projection), and the registry of methods and presets."""
