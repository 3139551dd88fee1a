"""The process of a copy of the project that has imported everything: each call is a fork of it.

It reads one request per line, answers with the id of the forked process, then with its exit status.
What the call returned or raised is in the file `result`, its output in the file `output`.
"""

import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import sklearn.datasets  # noqa: F401  (imported once, not in each fork)
import torch

from benchmarks.faults import calls
from stamp_core.coresets.selection import herding, uniform  # noqa: F401
from stamp_core.data.sources import digits, folder, npz  # noqa: F401
from stamp_core.methods import fedavg, replay, stamp  # noqa: F401

ALTERING = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")


def watch(root: str, act: Any) -> None:
    """Call `act(n)` before the n-th operation that alters files below `root`."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event == "open":
            path, mode, flags = arguments
            altering = bool(flags & (os.O_WRONLY | os.O_RDWR)) if flags else "w" in (mode or "")
        elif event in ALTERING:
            path, altering = arguments[0], True
        else:
            return
        if altering and str(
            Path(os.fsdecode(path) if not isinstance(path, int) else "").absolute()
        ).startswith(root):
            count += 1
            act(count)

    sys.addaudithook(hook)


def die_at(last: int) -> Any:
    """What kills this process before the operation of a number."""

    def act(number: int) -> None:
        if number == last:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def perform(request: dict[str, Any]) -> None:
    """Perform one call in this forked process; it never returns."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    result = os.open(request["result"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    if request.get("die_at"):
        watch(f"{Path.cwd()}/data", die_at(request["die_at"]))
    counted: list[int] = []
    if request.get("count"):
        watch(f"{Path.cwd()}/data", counted.append)
    limits = {
        "file_limit": resource.RLIMIT_FSIZE,
        "memory_limit": resource.RLIMIT_AS,
        "cpu_limit": resource.RLIMIT_CPU,
    }
    used = {key: which for key, which in limits.items() if request.get(key)}
    if "memory_limit" in used:  # beyond what a process that has imported everything has
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        request["memory_limit"] += pages * resource.getpagesize()
    hard = {key: resource.getrlimit(which)[1] for key, which in used.items()}
    for key, which in used.items():
        resource.setrlimit(which, (request[key], hard[key]))
    answer: dict[str, Any] = {}
    try:
        answer["value"] = getattr(calls, request["function"])(**request["arguments"])
    except BaseException as error:  # whatever a call raises is its answer
        answer["error"] = [type(error).__name__, str(error)]
        text = traceback.format_exc()
    for key, which in used.items():
        resource.setrlimit(which, (hard[key], hard[key]))
    if "error" in answer:
        os.write(2, text.encode())
    answer["operations"] = len(counted)
    os.write(result, json.dumps(answer).encode())
    os._exit(1 if "error" in answer else 0)


def main() -> None:
    """Answer requests until there are no more."""
    torch.set_num_threads(1)
    calls.fingerprint_all()
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            perform(json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
