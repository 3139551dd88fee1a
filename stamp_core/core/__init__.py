"""Foundations without knowledge of learning: paths, files replaced whole, seeding, devices,
processes, loading, torchvision, fingerprints of code. Imports nothing of the project."""
