"""Measurements, not tests: each in one run, against a yardstick, as a ratio of medians."""
