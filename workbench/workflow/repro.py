"""`dvc repro` with several stages at a time: small stages use cores better so.

The results are those of a plain `dvc repro`, which runs one stage after the other. Other profiles
have pipelines of their own, in folders of pipelines/ with their names.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from threading import Event

from stamp_core.config.decode import ParameterError
from stamp_core.config.params import (
    CIFAR100,
    DEFAULT,
    GRIDS,
    OWN,
    PAPER,
    PRIVACY,
    PROTOCOLS,
    STUDIES,
    Params,
    check_names,
    expand_grid,
    read_params,
    read_setting,
)
from stamp_core.core.paths import ROOT

# stages of dvc.yaml
SPLIT_STAGES = ("split",)
TRAIN_STAGES = ("train", "sweep")
PAGE_STAGES = ("coresets", "ablation", "analyses", "compare", "tour")
PIPELINES = {name: f"pipelines/{name}/dvc.yaml" for name in (PAPER, *OWN)}  # of profiles
COMPARED = (PAPER, CIFAR100, PROTOCOLS)  # profiles with a page for each setting
# of a profile, beside its grid and sweeps: what runs with them, and the last pages
MORE = {PRIVACY: tuple(f"attack@{client}" for client in range(6))}
LAST = {
    PAPER: ("tables",),
    CIFAR100: ("heterogeneity", "normalisation", "coresets", "ablation", "analyses"),
    PRIVACY: ("privacy",),
    STUDIES: ("drawn", "studies"),
}
OPERATIONS = (
    "workbench.workflow"  # a package beside this one, without which everything runs as well
)


class Driver:
    """Calls DVC."""

    def run(self, profile: str, setting: str | None, tour: bool) -> int:
        """Run what is out of date, of everything, of another profile's settings or of the tour."""
        if tour:
            return self.reproduce_tour()
        if profile == DEFAULT:
            return self.reproduce()
        every = (name for name, _, _ in expand_grid("grid", read_params(profile)))
        settings = [setting] if setting else list(dict.fromkeys(every))
        return self.reproduce_settings(profile, settings)

    def environment(self) -> AbstractContextManager[dict[str, str]]:
        """The environment of the stages."""
        return nullcontext({**os.environ})

    @cached_property
    def jobs(self) -> int:
        """The number of stages at a time: $JOBS, or one per core, or one where there is a GPU."""
        if os.environ.get("JOBS"):
            return max(1, int(os.environ["JOBS"]))
        return 1 if shutil.which("nvidia-smi") else os.cpu_count() or 1

    def reproduce(self) -> int:
        """Run what is out of date in dvc.yaml; the exit status is that of the worst stage."""
        # After a failure DVC makes what does not depend on it, and tries again what failed.
        return self.run_groups((SPLIT_STAGES, TRAIN_STAGES, PAGE_STAGES), "-k")

    def reproduce_tour(self) -> int:
        """Run what is out of date of the first table and figures; the exit status."""
        every = list(expand_grid("tour", read_params(DEFAULT)))
        splits = [f"split@{setting}-{seeds}" for setting, _, seeds in every]
        trained = [f"train@{'-'.join(run)}" for run in every]
        return self.run_groups([list(dict.fromkeys(splits)), trained, ["tour"]])

    def reproduce_settings(self, profile: str, settings: Sequence[str]) -> int:
        """Run what is out of date of some settings of a profile; the exit status."""
        params, file = read_params(profile), PIPELINES[profile]
        for setting in settings:
            next(expand_grid(f"grid.{setting}", params))  # refuses a name that no grid has
        splits, trained = list[str](), list[str]()
        for grid, suffix in zip(GRIDS, ("", "_more_seeds"), strict=True):
            for setting, method, seeds in grid_runs(grid, settings, params):
                splits.append(f"{file}:split{suffix}@{setting}-{seeds}")
                trained.append(f"{file}:train{suffix}@{setting}-{method}-{seeds}")
        sweeps = params["sweeps"].items()
        every = {*settings} >= {*params["grid"]["setting"]}  # sweeps may have settings of their own
        named = [name for name, block in sweeps if every or {*settings} & {*block["setting"]}]
        trained += [f"{file}:sweep@{name}" for name in named]
        trained += [f"{file}:{stage}" for stage in MORE.get(profile, ())]
        compared = settings if profile in COMPARED else ()
        pages = [f"{file}:compare@{setting}" for setting in compared]
        pages += [f"{file}:{stage}" for stage in LAST.get(profile, ())]
        self.provide_images(settings, params)
        return self.run_groups([list(dict.fromkeys(splits)), trained, pages])

    def provide_images(self, settings: Sequence[str], params: Params) -> None:
        """Make the images of settings: several stages at once would each download them."""
        from stamp_core.data.loading import load_dataset  # imports torch

        for setting in settings:
            load_dataset(read_setting(setting, params).data)

    def run_groups(self, groups: Sequence[Sequence[str]], *rest: str) -> int:
        """Run groups of stages, each after the one before it unless that failed; the exit status.

        With options `rest` of `dvc repro` what is then left in dvc.yaml is run, too.
        """
        if status := dvc("repro", "source"):
            return status
        with ThreadPoolExecutor(self.jobs) as pool, self.environment() as environment:
            for stages in groups:
                if status := self.run_stages(outdated(stages), pool, environment):
                    break
            return max(status, dvc("repro", *rest, environment=environment)) if rest else status

    def run_stages(self, stages: list[str], pool: ThreadPoolExecutor, where: dict[str, str]) -> int:
        """Run several stages at a time, the last first; 1 if one failed, whose traceback is named.

        `where` is the environment of the stages. Whoever interrupts has to leave its context.
        """
        cores = os.cpu_count() or 1
        workers = str(max(1, cores // max(1, min(self.jobs, len(stages)))))
        size = max(1, min(4, len(stages) // (8 * self.jobs)))  # DVC takes half a second to start
        stages = stages[::-1]  # so that a long one does not run alone at the end
        stop = Event()
        chunks = [stages[i : i + size] for i in range(0, len(stages), size)]
        environment = {"STAMP_WORKERS": workers, **where, "PYTHONUNBUFFERED": "1"}
        futures = [pool.submit(self.run_chunk, chunk, environment, stop) for chunk in chunks]
        try:
            statuses = [future.result() for future in futures]
        except KeyboardInterrupt:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        if not any(statuses):
            return 0
        failed = outdated(stages)
        names = [re.sub("pipelines/(.+)/dvc.yaml:", r"\1-", s).replace("@", "-") for s in failed]
        print(f"failed: {', '.join(failed)}; the tracebacks are in", end=" ")
        print(", ".join(f"data/executed/{name}.ipynb" for name in names))
        return 1

    def run_chunk(self, stages: Sequence[str], environment: dict[str, str], stop: Event) -> int:
        """Run stages one after the other, each line of output under its stage; the exit status.

        After `stop` no further one begins: DVC is ended there, where it writes no lock file.
        """
        process = subprocess.Popen(
            # Stages wait for DVC's lock, and `-s` leaves the shared upstream stages to the others.
            ["dvc", "--wait-for-lock", "repro", "-k", "-s", *stages],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # else Ctrl-C would reach it at any moment
            close_fds=False,  # it inherits the driver's lock
        )
        assert process.stdout
        stage = ""
        start = 0.0
        for line in process.stdout:
            if found := re.match("Running stage '(.+)'", line):
                if stop.is_set():
                    os.killpg(process.pid, signal.SIGKILL)
                    break
                stage = found[1]
                start = time.perf_counter()
            elif line.startswith("Updating lock file"):
                print(f"{stage}  done after {time.perf_counter() - start:.0f} s")
                stage = ""
            elif stage or line.startswith("ERROR"):
                print(f"{stage}  {line}", end="", flush=True)
        return process.wait()


def grid_runs(grid: str, settings: Sequence[str], params: Params) -> Iterator[tuple[str, str, str]]:
    """Setting, method and range of seeds of the experiments of one grid, of some settings."""
    alone = {name: block for name, block in params.items() if name not in GRIDS or name == grid}
    for setting in settings if grid in params else ():
        if setting in params[grid]["setting"]:
            yield from expand_grid(f"grid.{setting}", alone)


def find_driver() -> Driver:
    """The driver of workbench.workflow where it is installed, else the plain one."""
    if importlib.util.find_spec(OPERATIONS) is None:
        return Driver()
    driver: Driver = importlib.import_module(f"{OPERATIONS}.driver").OperationsDriver()
    return driver


def dvc(*arguments: str, environment: dict[str, str] | None = None) -> int:
    """The exit status of a DVC command whose output is shown."""
    command = ["dvc", *arguments]  # which inherits the driver's lock
    return subprocess.run(command, cwd=ROOT, env=environment, close_fds=False).returncode


def outdated(stages: Sequence[str]) -> list[str]:
    """The stages among these that are out of date."""
    if not stages:  # DVC would take none for all
        return []
    return list(json.loads(dvc_answer("status", "--json", *stages)))


def dvc_answer(*arguments: str) -> str:
    """The output of a DVC command; RuntimeError with its own message if it fails."""
    command = ["dvc", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        message = " ".join(errors) or done.stderr.strip()
        cure = "what it names below .dvc/cache can be deleted: DVC makes it again"
        raise RuntimeError(f"`{' '.join(command[:2])}` failed: {message}; {cure}")
    return done.stdout


def main() -> int:
    """The exit status of the command line."""
    parser = argparse.ArgumentParser(description="Regenerate what is out of date.")
    parser.add_argument("profile", nargs="?", default=DEFAULT, choices=[DEFAULT, *PIPELINES])
    parser.add_argument("setting", nargs="?", help="one of the profile's settings; default: all")
    parser.add_argument("--tour", action="store_true", help="only the first table and figures")
    arguments = parser.parse_args()
    if arguments.profile == PAPER and not arguments.setting:
        parser.error(f"name a setting: {', '.join(read_params(PAPER)['grid']['setting'])}")
    try:
        check_names(read_params(arguments.profile))
        return find_driver().run(arguments.profile, arguments.setting, arguments.tour)
    except (ParameterError, OSError, RuntimeError, MemoryError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: finished stages and rounds are kept, the next call goes on")
        return 130


if __name__ == "__main__":
    sys.exit(main())
