"""`dvc repro` with several stages at a time: small ones use cores better side by side.

The results are those of a plain `dvc repro`, which runs one stage after the other.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from stamp_core.paths import ROOT

TRAIN = ("train", "ablate", "alpha", "sweep", "budget")  # stages of dvc.yaml, the dearest last
SHOW = ("heterogeneity", "coresets", "ablation", "analyses", "compare")


def main() -> int:
    """Run what is out of date; the exit status is that of the worst stage."""
    if upstream := dvc("repro", "-k", "source", "split"):
        return upstream
    for stages in (TRAIN, SHOW):
        if failed := side_by_side(outdated(stages)):
            notebooks = [f"data/executed/{stage.replace('@', '-')}.ipynb" for stage in failed]
            print(f"failed: {', '.join(failed)}; the tracebacks are in {', '.join(notebooks)}")
            return 1
    return dvc("repro", "-k")


def side_by_side(stages: list[str]) -> list[str]:
    """Run stages several at a time, the last first; those that failed."""
    jobs, cores = default_jobs(), os.cpu_count() or 1
    workers = str(max(1, cores // max(1, min(jobs, len(stages)))))
    environment = {"STAMP_WORKERS": workers, **os.environ}
    stages = stages[::-1]  # so that a dear one does not run alone at the end
    with ThreadPoolExecutor(jobs) as pool:
        ended = list(pool.map(lambda stage: run(stage, environment), stages))
    return [stage for stage, status in zip(stages, ended, strict=True) if status]


def default_jobs() -> int:
    """Stages at a time: $JOBS, or one per core; one where they would share a GPU."""
    if os.environ.get("JOBS"):
        return max(1, int(os.environ["JOBS"]))
    return 1 if shutil.which("nvidia-smi") else os.cpu_count() or 1


def dvc(*arguments: str) -> int:
    """The exit status of a DVC command that people watch."""
    return subprocess.run(["dvc", *arguments], cwd=ROOT).returncode


def outdated(stages: Sequence[str]) -> list[str]:
    """Those of some stages that are out of date."""
    command = ["dvc", "status", "--json", *stages]
    status = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return list(json.loads(status.stdout))


def run(stage: str, environment: dict[str, str]) -> int:
    """Run one stage alone, its output line by line under its name; the exit status."""
    began = time.perf_counter()
    process = subprocess.Popen(
        # Stages wait for DVC's lock, and `-s` leaves the shared upstream stages to the others.
        ["dvc", "--wait-for-lock", "repro", "-q", "-s", stage],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout
    for line in process.stdout:
        print(f"{stage}  {line}", end="", flush=True)
    status = process.wait()
    print(f"{stage}  {'failed' if status else 'done'} after {time.perf_counter() - began:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
