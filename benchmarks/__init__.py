"""Measurements, not tests: each against a reference in the same process, as a ratio of medians."""

import statistics
import time
from collections.abc import Callable, Iterable

import torch

Row = tuple[str, str]


def seconds(runtime: Callable[..., object], *arguments: object) -> float:
    """The duration of a call, on a GPU as well."""
    start = time.perf_counter()
    runtime(*arguments)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def spread(ratios: list[float]) -> str:
    """Median, minimum and maximum of ratios as text."""
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    return f"{middle:.2f} (from {low:.2f} to {high:.2f}, n = {len(ratios)})"


def section(title: str, note: str, rows: Iterable[Row]) -> list[str]:
    """The lines of one section of benchmarks/results.md, measured in one thread."""
    torch.set_num_threads(1)
    table = [f"| {name} | {result} |" for name, result in rows]
    return ["", title, "", note, "", "| what | result |", "|---|---|", *table]
