"""Warm kernels: they have the imports already, end with whoever asked, and show figures.

All tests share one server, which the last one kills.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from processes import gone, wait_until

from workbench.workflow import kernels
from workbench.workflow.kernels import WarmKernel

SERVER = """
import time
from workbench.workflow import kernels

with kernels.serve_kernels() as environment:
    print(environment[kernels.ADDRESS], flush=True)
    time.sleep(120)
"""


def start(code: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A script and the first line that it prints."""
    command = [sys.executable, "-c", code, *arguments]
    script = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert script.stdout
    return script, script.stdout.readline().strip()


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own, and an environment in which Jupyter uses it."""
    script, address = start(SERVER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(kernels.ADDRESS, address)
        patch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "stamp-warm")
        yield script
    script.kill()
    script.communicate()


def execute(*cells: str) -> list[str]:
    """The output of every cell of a notebook: its text, or the type of an image."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    return [output.get("text") or min(output["data"]) for output in outputs]


def test_ctrl_c_does_not_end_the_process_that_kernels_are_forked_from(
    server: subprocess.Popen[str],
) -> None:
    """It belongs to the terminal's process group, and still imports: this is the first test."""
    children = psutil.Process(server.pid).children()
    (forker,) = (child for child in children if "forkserver" in str(child.cmdline()))
    forker.send_signal(signal.SIGINT)
    assert WarmKernel(["-f", "none.json"], {}, "/no/such/folder").wait() == 1
    assert not gone(forker)


@pytest.mark.usefixtures("server")
def test_a_warm_kernel_has_torch_before_its_first_import_and_shows_figures() -> None:
    loaded = "import sys; print({'torch', 'seaborn', 'stamp_core.engine.train'} <= {*sys.modules})"
    figure = "import matplotlib.pyplot as plt; plt.plot([1]);"
    assert execute(loaded, figure) == ["True\n", "image/png"]
    assert execute("print('a' in globals()); a = 1") == ["False\n"]  # a process of its own


ASKER = """
import os, sys, time
from workbench.workflow.kernels import WarmKernel

kernel = WarmKernel(["-f", sys.argv[1]], {**os.environ}, "/")
print(kernel.pid, flush=True)
time.sleep(120)
"""


def started(pid: int, file: Path) -> psutil.Process:
    """A kernel, once it has written its connection file."""
    wait_until(file.exists, "the connection file")
    process = psutil.Process(pid)
    assert not gone(process)
    return process


@pytest.mark.usefixtures("server")
def test_a_kernel_ends_when_its_asker_is_killed(tmp_path: Path) -> None:
    asker, pid = start(ASKER, str(tmp_path / "kernel.json"))
    kernel = started(int(pid), tmp_path / "kernel.json")
    asker.kill()
    asker.communicate()
    wait_until(lambda: gone(kernel), "the end of the kernel")


def test_a_kernel_ends_when_the_server_is_killed(
    server: subprocess.Popen[str], tmp_path: Path
) -> None:
    kernel = WarmKernel(["-f", str(tmp_path / "kernel.json")], {**os.environ}, "/")
    process = started(kernel.pid, tmp_path / "kernel.json")
    server.kill()
    wait_until(lambda: gone(process), "the end of the kernel")
    assert kernel.wait() == -signal.SIGKILL
