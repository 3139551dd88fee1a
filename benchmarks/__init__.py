"""Measurements, not tests: each in one run, against a yardstick, as a ratio of medians."""

import statistics


def spread(ratios: list[float]) -> str:
    """Median, least and most of some ratios."""
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    return f"{middle:.2f} (from {low:.2f} to {high:.2f}, n = {len(ratios)})"
