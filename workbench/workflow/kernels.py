"""Notebook kernels forked from one process that has imported everything: two seconds less a stage.

`serve_kernels` listens in the process that runs the stages. Jupyter asks `WarmProvisioner` for each
kernel of a stage, as the environment of the stages says; it is an entry point in pyproject.toml.
"""

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from stamp_core.core.processes import follow_parent

ADDRESS = "STAMP_KERNELS"  # the environment variable with the address of the server
INLINE = "module://matplotlib_inline.backend_inline"
IMPORTED = ["ipykernel.kernelapp", "ipykernel.ipkernel"]
IMPORTED += ["seaborn", "stamp_core.api", "workbench.report.figures", "workbench.report.tables"]


@contextmanager
def serve_kernels() -> Iterator[dict[str, str]]:
    """The environment in which Jupyter starts warm kernels; at the end they are killed."""
    context = multiprocessing.get_context("forkserver")
    started: list[ForkServerProcess] = []
    context.set_forkserver_preload(IMPORTED)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ensure_running()  # inherits that: Ctrl-C would end it while it imports
    signal.signal(signal.SIGINT, before)
    with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/socket") as listener:
        arguments = (listener, context, started)
        threading.Thread(target=_accept, args=arguments, daemon=True).start()
        try:
            yield {
                **os.environ,
                ADDRESS: str(listener.address),
                "JUPYTER_DEFAULT_PROVISIONER_NAME": "stamp-warm",
            }
        finally:
            for process in started:
                process.kill()


def _accept(
    listener: Listener, context: ForkServerContext, started: list[ForkServerProcess]
) -> None:
    """Answer every request with a kernel, until the listener is closed."""
    while True:
        try:
            connection = listener.accept()
        except OSError:
            return
        arguments = (connection, context, started)
        threading.Thread(target=_watch, args=arguments, daemon=True).start()


def _watch(
    connection: Connection, context: ForkServerContext, started: list[ForkServerProcess]
) -> None:
    """Start the kernel that is asked for, report its end, and kill it if the asker ends first."""
    process = context.Process(target=_run_kernel, args=connection.recv())
    with connection, suppress(OSError, EOFError):  # nobody asks any more, or the server was killed
        process.start()
        started.append(process)
        connection.send(process.pid)
        wait([process.sentinel, connection])
        if connection.poll():  # the asker has gone
            process.kill()
        process.join()
        connection.send(process.exitcode)


def _run_kernel(command: list[str], environment: dict[str, str], folder: str) -> None:
    """Be a kernel, in a process group of its own, as Jupyter's are; end with the server."""
    import matplotlib
    import pandas
    from ipykernel.kernelapp import IPKernelApp

    # What a kernel decides at these imports, in which the server was no kernel yet.
    matplotlib.rcParams["backend"] = INLINE
    pandas.set_option("display.max_columns", 20)
    follow_parent()
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # At ERROR a kernel that is told to end says that it was interrupted; papermill reports errors.
    options = ["--log-level=CRITICAL", f"--IPKernelApp.parent_handle={os.getppid()}"]
    IPKernelApp.launch_instance(argv=[*command[command.index("-f") :], *options])


class WarmKernel:
    """A kernel of the server, with what Jupyter uses of `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, command: list[str], environment: dict[str, str], folder: str) -> None:
        self.connection = Client(os.environ[ADDRESS])
        self.connection.send((command, environment, folder))
        self.pid: int = self.connection.recv()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status; None while the kernel runs."""
        if self.returncode is None and self.connection.poll():
            try:
                self.returncode = self.connection.recv()
            except EOFError:  # the server has ended, and its kernels with it
                self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self) -> int:
        """The exit status, once the kernel has ended."""
        while (status := self.poll()) is None:
            time.sleep(0.01)
        return status

    def send_signal(self, signum: int) -> None:
        """Send a signal to the kernel alone."""
        os.kill(self.pid, signum)

    def kill(self) -> None:
        """End the kernel at once."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask the kernel to end."""
        self.send_signal(signal.SIGTERM)


class WarmProvisioner(LocalProvisioner):
    """Provides kernels of the server, and Jupyter's own where there is none."""

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """The connection of a new kernel."""
        if ADDRESS not in os.environ:
            return await super().launch_kernel(cmd, **kwargs)
        kernel = WarmKernel(cmd, kwargs["env"], str(kwargs.get("cwd") or Path.cwd()))
        self.process = kernel  # type: ignore[assignment]
        self.pid = self.pgid = kernel.pid
        return self.connection_info
