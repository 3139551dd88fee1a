"""`dvc repro` with several stages at a time and warm kernels: small stages use cores better so.

The results are those of a plain `dvc repro`, which runs one stage after the other. Given a setting
of the paper, it runs that setting's stages in pipelines/paper/dvc.yaml, after an estimate.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from stamp_core.config.decode import ParameterError
from stamp_core.config.params import PAPER, expand_grid, read_params
from stamp_core.core.paths import ROOT
from stamp_core.pipeline.kernels import serve_kernels

# stages of dvc.yaml
SPLIT_STAGES = ("split", "split_more_seeds", "split_returning_classes")
TRAIN_STAGES = ("train", "train_more_seeds", "train_returning_classes", "sweep")
PAGE_STAGES = ("heterogeneity", "coresets", "ablation", "analyses", "compare", "tour")
PAPER_FILE = "pipelines/paper/dvc.yaml"


def reproduce() -> int:
    """Run what is out of date in dvc.yaml; the exit status is that of the worst stage."""
    if status := dvc("repro", "-k", "source", *SPLIT_STAGES):
        return status
    for stages in (TRAIN_STAGES, PAGE_STAGES):
        if status := run_stages(outdated(stages)):
            return status
    return dvc("repro", "-k")


def reproduce_paper(setting: str) -> int:
    """Run what is out of date of one of the paper's settings; the exit status."""
    params = read_params(PAPER)
    runs = [f"{s}-{m}-{r}" for s, m, r in expand_grid(f"grid.{setting}", params)]
    seeds = [f"{setting}-{seeds}" for seeds in params["grid"]["seeds"]]
    sweeps = [name for name, block in params["sweeps"].items() if setting in block["setting"]]
    if status := dvc("repro", "source", *paper_stages("split", seeds)):
        return status
    for stages in (
        [*paper_stages("train", runs), *paper_stages("sweep", sweeps)],
        [*paper_stages("compare", [setting]), f"{PAPER_FILE}:tables"],
    ):
        if status := run_stages(outdated(stages)):
            return status
    return 0


def paper_stages(stage: str, items: Sequence[str]) -> list[str]:
    """The names of a stage's items in the paper's pipeline."""
    return [f"{PAPER_FILE}:{stage}@{item}" for item in items]


def run_stages(stages: list[str]) -> int:
    """Run several stages at a time, the last first; 1 if one failed, whose traceback is named."""
    jobs, cores = default_jobs(), os.cpu_count() or 1
    workers = str(max(1, cores // max(1, min(jobs, len(stages)))))
    size = max(1, min(4, len(stages) // (8 * jobs)))  # DVC takes two seconds to start
    stages = stages[::-1]  # so that a long one does not run alone at the end
    chunks = [stages[i : i + size] for i in range(0, len(stages), size)]
    with serve_kernels() as kernels, ThreadPoolExecutor(jobs) as pool:
        environment = {"STAMP_WORKERS": workers, **kernels, "PYTHONUNBUFFERED": "1"}
        statuses = list(pool.map(lambda chunk: run_chunk(chunk, environment), chunks))
    if not any(statuses):
        return 0
    failed = outdated(stages)
    names = [stage.rpartition(":")[2].replace("@", "-") for stage in failed]
    print(f"failed: {', '.join(failed)}; the tracebacks are in", end=" ")
    print(", ".join(f"data/executed/{name}.ipynb" for name in names))
    return 1


def default_jobs() -> int:
    """The number of stages at a time: $JOBS, or one per core; one where they would share a GPU."""
    if os.environ.get("JOBS"):
        return max(1, int(os.environ["JOBS"]))
    return 1 if shutil.which("nvidia-smi") else os.cpu_count() or 1


def dvc(*arguments: str) -> int:
    """The exit status of a DVC command whose output is shown."""
    return subprocess.run(["dvc", *arguments], cwd=ROOT).returncode


def outdated(stages: Sequence[str]) -> list[str]:
    """Those of some stages that are out of date."""
    command = ["dvc", "status", "--json", *stages]
    status = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return list(json.loads(status.stdout))


def run_chunk(stages: Sequence[str], environment: dict[str, str]) -> int:
    """Run some stages one after the other, each line of output under its stage; the exit status."""
    process = subprocess.Popen(
        # Stages wait for DVC's lock, and `-s` leaves the shared upstream stages to the others.
        ["dvc", "--wait-for-lock", "repro", "-k", "-s", *stages],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout
    stage, start = "", 0.0
    for line in process.stdout:
        if found := re.match("Running stage '(.+)'", line):
            stage, start = found[1], time.perf_counter()
        elif line.startswith("Updating lock file"):
            print(f"{stage}  done after {time.perf_counter() - start:.0f} s")
            stage = ""
        elif stage or line.startswith("ERROR"):
            print(f"{stage}  {line}", end="", flush=True)
    return process.wait()


def main() -> int:
    """The exit status of the command line."""
    parser = argparse.ArgumentParser(description="Regenerate what is out of date.")
    parser.add_argument("setting", nargs="?", help="one of the paper's settings; default: dvc.yaml")
    parser.add_argument("--estimate", action="store_true", help="only say what the setting takes")
    arguments = parser.parse_args()
    if not arguments.setting:
        return reproduce()
    from stamp_core.pipeline.estimate import estimate_setting, refuse_shortage  # imports torch

    try:
        needs = estimate_setting(arguments.setting)
        refuse_shortage(needs, arguments.setting)
    except (ParameterError, OSError, MemoryError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0 if arguments.estimate else reproduce_paper(arguments.setting)


if __name__ == "__main__":
    sys.exit(main())
