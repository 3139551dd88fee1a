"""Gradient matching beside the passes over the rows that nothing can avoid, and its solvers.

`python -m benchmarks.matching` prints the table; `make bench` writes it to benchmarks/results.md.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import spread
from stamp_core.matching import Matching, gram, match, solve
from stamp_core.paths import ROOT

Row = tuple[str, str]
REPEATS = 7
LENGTH = 11_200_000  # the parameters of a ResNet-18
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KAPPAS = (0.05, 0.25, 0.5, 1.0, 2.0)
FAMILIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of noise [K, d] and something common
    "independent rows": lambda noise, common: noise,
    "a common part": lambda noise, common: noise + common,
    "cosine 0.99": lambda noise, common: noise + 10 * common,
    "log-normal lengths": lambda noise, common: (noise + common) * noise[:, :1].exp(),
    "rank 5": lambda noise, common: (noise[:, :5] + 1) @ common.view(5, -1),
    "two opposed groups": lambda noise, common: noise / 2 + common * noise[:, :1].sign(),
}


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes, on a GPU too."""
    began = time.perf_counter()
    work()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def passes(count: int) -> Iterator[Row]:
    """The whole match over one product of all rows with each other and one with coefficients."""
    rows = torch.randn(count, LENGTH, device=DEVICE)
    shares = torch.full((count,), 1 / count, device=DEVICE)
    kinds = {"one tensor": rows, "a list": list(rows)}
    ratios: dict[str, list[float]] = {name: [] for name in kinds}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    match(rows, Matching())  # its first time
    for _ in range(REPEATS):
        least = seconds(lambda: (rows @ rows.T, shares @ rows))
        for name, given in kinds.items():
            times[name].append(seconds(lambda given=given: match(given, Matching())))
            ratios[name].append(times[name][-1] / least)
    for name in kinds:
        took = 1000 * statistics.median(times[name])
        what = f"match / unavoidable passes, {count} rows of {LENGTH:,} as {name}"
        yield what, f"{spread(ratios[name])}  ({took:,.0f} ms)"


def problems(name: str, count: int) -> Iterator[Tensor]:
    """Inner products of a few sets of rows of a family."""
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        noise = torch.randn(count, 2000, generator=draw, dtype=torch.float64)
        common = torch.randn(2000, generator=draw, dtype=torch.float64)
        yield gram(FAMILIES[name](noise, common))


def solvers(count: int) -> Row:
    """Time and gap of the exact solver over all families and radii."""
    solve(next(problems("a common part", count)), Matching())  # its first time
    times, gaps = [], []
    for name in FAMILIES:
        for products in problems(name, count):
            for kappa in KAPPAS:
                matching = Matching(kappa=kappa)
                times.append(1000 * seconds(lambda p=products, m=matching: solve(p, m)))
                gaps.append(solve(products, matching).gap)
    times.sort()
    return f"exact solver, {count} rows", (
        f"{statistics.median(times):.2f} ms, worst {times[-1]:.1f} ms; gap at most {max(gaps):.0e}"
    )


def beside_the_public_code(name: str, count: int) -> Row:
    """Gap and time of both solvers on the same rows, kappa 0.5."""
    parts = []
    for solver in ("exact", "authors"):
        matching = Matching(solver=solver)
        times, gaps = [], []
        for products in problems(name, count):
            times.append(1000 * seconds(lambda p=products, m=matching: solve(p, m)))
            gaps.append(solve(products, matching).gap)
        parts.append(f"{statistics.median(gaps):.0e} in {statistics.median(times):.1f} ms")
    return f"gap exact / public code, {count} rows, {name}", " / ".join(parts)


def memory() -> Row:
    """Peak memory of a match beyond its rows, in vectors of their length, in a fresh process."""
    code = "from benchmarks.matching import extra; extra()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    return "memory of a match beyond its 10 rows", done.stdout.strip() or done.stderr[-300:]


def extra() -> None:
    """Print how far the peak rises in a match, the result included."""
    torch.set_num_threads(1)
    match(torch.randn(10, 500_000, device=DEVICE), Matching())
    rows = [torch.ones(LENGTH, device=DEVICE) for _ in range(10)]
    before = peak()
    match(rows, Matching())
    print(f"{(peak() - before) / (4 * LENGTH):.2f} rows")


def peak() -> int:
    """The most bytes ever held where the rows are."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()  # getrusage would begin at the parent's peak
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def rows() -> Iterator[Row]:
    """Everything measured here."""
    for count in (10, 50):
        yield from passes(count)
    yield memory()
    for count in (3, 5, 10, 50, 500):
        yield solvers(count)
    for name in FAMILIES:
        for count in (10, 50):
            yield beside_the_public_code(name, count)


def table() -> list[str]:
    """The section of benchmarks/results.md."""
    torch.set_num_threads(1)
    return [
        "",
        "## Gradient matching",
        "",
        f"On {DEVICE}, one thread. Gaps are relative to the squared length of the reference.",
        "",
        "| what | result |",
        "|---|---|",
        *(f"| {what} | {result} |" for what, result in rows()),
    ]


if __name__ == "__main__":
    print("\n".join(table()))
