"""All kinds of faults, their cases tried side by side, and the page about them."""

import queue
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from benchmarks.faults import (
    FAILURES,
    VERDICTS,
    Kind,
    Outcome,
    damage,
    disk,
    forged,
    hostile,
    kills,
    pipeline,
    run_case,
    slips,
)
from benchmarks.faults.project import Place

KINDS: dict[str, Kind] = {
    **kills.KINDS,
    **pipeline.KINDS,
    **disk.KINDS,
    **damage.KINDS,
    **slips.KINDS,
    **hostile.KINDS,
    **forged.KINDS,
}
Found = tuple[str, int, Outcome]  # kind, case
SHOWN = 120  # failures with a line of their own


def cases(chosen: str | None, number: int | None, share: float) -> list[tuple[str, int]]:
    """All cases to try, long ones last."""
    kinds = [chosen] if chosen else sorted(KINDS, key=lambda name: KINDS[name].whole)
    found = []
    for name in kinds:
        numbers = range(max(1, round(KINDS[name].count * share))) if number is None else [number]
        found += [(name, each) for each in numbers]
    return found


def campaign(
    wanted: list[tuple[str, int]], seed: int, jobs: int, folder: Path, seconds: float
) -> list[Found]:
    """The outcomes of the cases, some side by side, each in a place of its own.

    After so many seconds no further case begins.
    """
    end = time.monotonic() + seconds
    first = Place(folder / "0")
    if any(KINDS[name].whole for name, _ in wanted):
        first.measure_pipeline()
    places = [first, *(Place(folder / str(k), first.shared) for k in range(1, jobs))]
    waiting: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    for each in wanted:
        waiting.put(each)
    found: list[Found] = []

    def runtime(place: Place) -> None:
        while not waiting.empty() and time.monotonic() < end:
            try:
                name, number = waiting.get_nowait()
            except queue.Empty:
                return
            start = time.monotonic()
            outcomes = run_case(KINDS, name, place, seed, number)
            # The page names no folder of the machine that made it.
            short = [replace(o, detail=o.detail.replace(f"{folder}/", ".../")) for o in outcomes]
            found.extend((name, number, outcome) for outcome in short)
            words = Counter(outcome.verdict for outcome in outcomes)
            text = ", ".join(f"{count} {word}" for word, count in words.items())
            print(f"{name} {number}: {text}  {time.monotonic() - start:.1f} s", flush=True)

    threads = [threading.Thread(target=runtime, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place in places[1:]:
        place.close()
    first.close()
    return sorted(found, key=lambda each: (list(KINDS).index(each[0]), each[1]))


def report(found: list[Found], seed: int, minutes: float) -> str:
    """The page: a table by kind, what each kind does, and how to repeat what failed."""
    failures = [each for each in found if each[2].verdict in FAILURES]
    lines = [
        "# Faults",
        "",
        f"`make faults` writes this page: {len(found)} faults with seed {seed} in {minutes:.0f} "
        "minutes, in copies of the project with the quick profile. After each fault the next call "
        "must end with the bytes of an unbroken run (*survived*; what is measured, as seconds and "
        "memory, is left out), or with a refusal in one line that names file or key and cure "
        "(*refused*). All else is *lost*, *silently wrong*, or *executed*: something that input "
        "names was run, or written outside its folder.",
        "",
        f"| kind | tried | {' | '.join(VERDICTS)} |",
        f"|---|{'---|' * (1 + len(VERDICTS))}",
    ]
    for name in [*KINDS, "all"]:
        own = [outcome for kind, _, outcome in found if name in (kind, "all")]
        counts = Counter(outcome.verdict for outcome in own)
        numbers = " | ".join(str(counts[verdict]) for verdict in VERDICTS)
        lines.append(f"| {name} | {len(own)} | {numbers} |")
    lines += ["", "## Kinds", ""]
    for name, kind in KINDS.items():
        parts = Counter(o.what.partition(":")[0] for n, _, o in found if n == name)
        text = ", ".join(f"{part} {count}" for part, count in sorted(parts.items()))
        lines.append(f"- **{name}**: {kind.note}. Of these: {text or 'none'}.")
    lines += ["", "## Failures", ""]
    for name, number, outcome in failures[:SHOWN]:
        detail = outcome.detail.replace("\n", " ").replace("|", "/")
        lines.append(f"- {name}: {outcome.what}: **{outcome.verdict}**. {detail}".rstrip())
        again = f'python -m benchmarks.faults --seed {seed} --kind "{name}" --case {number}'
        lines.append(f"  Repeat: `{again}`")
    if not failures:
        lines.append("None.")
    if len(failures) > SHOWN:
        lines.append(f"- and {len(failures) - SHOWN} more")
    return "\n".join(lines) + "\n"
