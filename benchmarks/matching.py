"""Gradient matching: a match relative to its two unavoidable passes, and both solvers.

`python -m benchmarks.matching` prints the table; `make bench` writes it to benchmarks/results.md.
"""

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import Row, seconds, section, spread
from stamp_core.core.devices import resolve_device
from stamp_core.core.paths import ROOT
from stamp_core.matching.gram import Vectors, combine, gram
from stamp_core.matching.match import MatchingParams, match, match_gram

REPEATS = 7
LENGTH = 11_200_000  # the parameters of a ResNet-18
DEVICE = resolve_device("auto")
KAPPAS = (0.05, 0.25, 0.5, 1.0, 2.0)
FAMILIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of noise [K, d] and a vector [d]
    "independent": lambda noise, common: noise,
    "a common part": lambda noise, common: noise + common,
    "cosine 0.99": lambda noise, common: noise + 10 * common,
    "log-normal norms": lambda noise, common: (noise + common) * noise[:, :1].exp(),
    "rank 5": lambda noise, common: (noise[:, :5] + 1) @ common.view(5, -1),
    "two opposite groups": lambda noise, common: noise / 2 + common * noise[:, :1].sign(),
}


def match_ratios(count: int) -> Iterator[Row]:
    """A match relative to the Gram matrix and the sum d, without which there is none.

    Of independent gradients the Gram matrix certifies the match, of nearly opposite ones it cannot.
    The same products in float32, which no match could use, are the fastest passes possible.
    """
    independent = torch.randn(count, LENGTH, device=DEVICE)
    weights = torch.full((1, count), 1 / count, dtype=torch.float64)
    float32 = weights[0].to(independent)
    forms: dict[str, Vectors] = {"one tensor": independent, "a list": list(independent)}
    if count <= 10:  # of more, copies would not fit into the memory of a small machine
        opposite = independent.clone()
        opposite[0] = 1e-6 * opposite[0] - opposite[1]
        forms["nearly opposite"] = opposite
    ratios: dict[str, list[float]] = {name: [] for name in (*forms, "passes in float32")}
    match(independent, MatchingParams())  # warm-up
    for _ in range(REPEATS):
        minimum = seconds(lambda: (gram(independent), combine(independent, weights)))
        plain = seconds(lambda: (independent @ independent.T, float32 @ independent))
        ratios["passes in float32"].append(plain / minimum)
        for name, form in forms.items():
            ratios[name].append(seconds(match, form, MatchingParams()) / minimum)
    label = f"{count} gradients of {LENGTH:,}"
    for name in forms:
        yield f"match / (Gram matrix + sum), {label}, {name}", spread(ratios[name])
    yield f"passes in float32 / (Gram matrix + sum), {label}", spread(ratios["passes in float32"])


def problems(name: str, count: int) -> Iterator[Tensor]:
    """Gram matrices of five draws of a family."""
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        noise = torch.randn(count, 2000, generator=draw, dtype=torch.float64)
        common = torch.randn(2000, generator=draw, dtype=torch.float64)
        yield gram(FAMILIES[name](noise, common))


def solve_times(matching: MatchingParams, name: str, count: int) -> Iterator[tuple[float, float]]:
    """Milliseconds and duality gap of each problem of a family."""
    for products in problems(name, count):
        yield 1000 * seconds(match_gram, products, matching), match_gram(products, matching).gap


def exact_solver(count: int) -> Row:
    """Time and gap of the exact solver over all families and radii."""
    match_gram(next(problems("a common part", count)), MatchingParams())  # warm-up
    pairs = [
        pair
        for name in FAMILIES
        for kappa in KAPPAS
        for pair in solve_times(MatchingParams(kappa=kappa), name, count)
    ]
    times, gaps = zip(*pairs, strict=True)
    worst = f"worst {max(times):.1f} ms; gap at most {max(gaps):.0e}"
    return f"exact solver, {count} gradients", f"{statistics.median(times):.2f} ms, {worst}"


def both_solvers(name: str, count: int) -> Row:
    """Gap and time of both solvers on the same gradients, kappa 0.5."""
    parts = []
    for solver in ("exact", "softmax_sgd"):
        times, gaps = zip(*solve_times(MatchingParams(solver=solver), name, count), strict=True)
        parts.append(f"{statistics.median(gaps):.0e} in {statistics.median(times):.1f} ms")
    return f"gap exact / public code, {count} gradients, {name}", " / ".join(parts)


def memory() -> Row:
    """Peak memory of a match beyond its gradients, in a fresh process."""
    code = "from benchmarks.matching import print_extra_memory; print_extra_memory()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    return "memory of a match beyond its 10 gradients", done.stdout.strip() or done.stderr[-300:]


def print_extra_memory() -> None:
    """Print the rise of peak memory in a match, its result included, in gradients."""
    torch.set_num_threads(1)
    match(torch.randn(10, 500_000, device=DEVICE), MatchingParams())
    gradients = [torch.ones(LENGTH, device=DEVICE) for _ in range(10)]
    before = peak_bytes()
    match(gradients, MatchingParams())
    print(f"{(peak_bytes() - before) / (4 * LENGTH):.2f} gradients")


def peak_bytes() -> int:
    """Peak memory of the device with the gradients."""
    if DEVICE != "cpu":
        return torch.cuda.max_memory_allocated(torch.device(DEVICE))
    status = Path("/proc/self/status").read_text()  # getrusage would begin at the parent's peak
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def measurements() -> Iterator[Row]:
    """All rows of the table."""
    for count in (10, 50):
        yield from match_ratios(count)
    yield memory()
    for count in (3, 5, 10, 50, 500):
        yield exact_solver(count)
    for name in FAMILIES:
        for count in (10, 50):
            yield both_solvers(name, count)


def table() -> list[str]:
    """The section of benchmarks/results.md."""
    note = f"On {DEVICE}, one thread. Gaps are relative to the squared norm of the reference."
    return section("## Gradient matching", note, measurements())


if __name__ == "__main__":
    print("\n".join(table()))
