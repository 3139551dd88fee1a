"""Foundations without knowledge of learning; they import nothing else of the project."""
