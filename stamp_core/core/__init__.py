"""Foundations without knowledge of learning: paths, seeding, devices, progress, loading,
torchvision, fingerprints of code. Imports nothing of the project."""
