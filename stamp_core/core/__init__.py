"""Foundations without knowledge of learning: paths, files replaced whole, seeding, devices,
progress, loading, torchvision, fingerprints of code. Imports nothing of the project."""
