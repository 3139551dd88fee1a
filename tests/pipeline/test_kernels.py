"""Warm kernels: they have the imports already, end with whoever asked, and show figures."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import nbformat
import pytest
from nbclient import NotebookClient

from stamp_core.pipeline import kernels
from stamp_core.pipeline.kernels import WarmKernel

SERVER = """
import time
from stamp_core.pipeline import kernels

with kernels.serve_kernels() as environment:
    print(environment[kernels.ADDRESS], flush=True)
    time.sleep(60)
"""


def start(code: str) -> tuple[subprocess.Popen[str], str]:
    """A script and the first line that it prints."""
    script = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert script.stdout
    return script, script.stdout.readline().strip()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own, and an environment in which Jupyter uses it."""
    script, address = start(SERVER)
    monkeypatch.setenv(kernels.ADDRESS, address)
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "stamp-warm")
    yield script
    script.kill()
    script.communicate()


def execute(*cells: str) -> list[str]:
    """The output of every cell of a notebook: its text, or the type of an image."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    return [output.get("text") or min(output["data"]) for output in outputs]


def running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return state.stdout.strip()[:1] not in ("", "Z")


def ends(pid: int) -> bool:
    """Whether a process ends within ten seconds."""
    end = time.monotonic() + 10
    while running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not running(pid)


@pytest.mark.usefixtures("server")
def test_a_warm_kernel_has_torch_before_its_first_import_and_shows_figures() -> None:
    loaded = "import sys; print({'torch', 'seaborn', 'stamp_core.engine.train'} <= {*sys.modules})"
    figure = "import matplotlib.pyplot as plt; plt.plot([1]);"
    assert execute(loaded, figure) == ["True\n", "image/png"]
    assert execute("print('a' in globals()); a = 1") == ["False\n"]  # a process of its own


@pytest.mark.usefixtures("server")
def test_a_kernel_that_fails_reports_its_status() -> None:
    assert WarmKernel(["-f", "none.json"], {}, "/no/such/folder").wait() == 1


@pytest.mark.usefixtures("server")
def test_a_kernel_ends_when_its_asker_is_killed() -> None:
    code = "from stamp_core.pipeline.kernels import WarmKernel as Kernel; import os, time; "
    code += "k = Kernel(['-f', 'none.json'], {**os.environ}, '/tmp'); print(k.pid, flush=True); "
    asker, pid = start(code + "time.sleep(60)")
    assert running(int(pid))
    asker.kill()
    asker.communicate()
    assert ends(int(pid))


def test_a_kernel_ends_when_the_server_is_killed(server: subprocess.Popen[str]) -> None:
    kernel = WarmKernel(["-f", "none.json"], {**os.environ}, "/tmp")
    assert running(kernel.pid)
    server.kill()
    assert ends(kernel.pid)
    assert kernel.wait() == -signal.SIGKILL
