"""`dvc repro` with several trainings at a time: small ones use cores better side by side.

The results are those of a plain `dvc repro`, which runs one stage after the other.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from stamp_core.paths import ROOT


def main() -> int:
    """Run what is out of date; the exit status is that of the worst stage."""
    jobs, cores = default_jobs(), os.cpu_count() or 1
    if upstream := dvc("repro", "-k", "source", "split"):
        return upstream
    stages = outdated()
    workers = str(max(1, cores // max(1, min(jobs, len(stages)))))
    environment = {"STAMP_WORKERS": workers, **os.environ}
    with ThreadPoolExecutor(jobs) as pool:
        ended = list(pool.map(lambda stage: train(stage, environment), stages))
    if failed := [stage for stage, status in zip(stages, ended, strict=True) if status]:
        notebooks = [f"data/executed/{stage.replace('@', '-')}.ipynb" for stage in failed]
        print(f"failed: {', '.join(failed)}; the tracebacks are in {', '.join(notebooks)}")
        return 1
    return dvc("repro", "-k")


def default_jobs() -> int:
    """Trainings at a time: $JOBS, or one per core; one where they would share a GPU."""
    if os.environ.get("JOBS"):
        return max(1, int(os.environ["JOBS"]))
    return 1 if shutil.which("nvidia-smi") else os.cpu_count() or 1


def dvc(*arguments: str) -> int:
    """The exit status of a DVC command that people watch."""
    return subprocess.run(["dvc", *arguments], cwd=ROOT).returncode


def outdated() -> list[str]:
    """The stages that train and are out of date."""
    command = ["dvc", "status", "--json", "train", "ablate", "sweep", "budget"]
    status = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return list(json.loads(status.stdout))


def train(stage: str, environment: dict[str, str]) -> int:
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
