"""A SuperLink and three SuperNodes with TLS and keys, on the loopback: the slow test."""

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import psutil
import small
from processes import wait_until

from stamp_core import load_experiment
from stamp_core.engine.trees import read_tree
from workbench.federation.keys import make_certificate, make_node_key
from workbench.federation.local import PROGRAMS, QUIET, LocalFederation


def says(folder: Path, name: str, text: str) -> Callable[[], bool]:
    return lambda: text in (folder / f"{name}.log").read_text(errors="replace")


def kill_server(folder: Path, superlink: Popen[bytes]) -> None:
    file = folder / "resume" / "tiny-stamp-0" / "run.safetensors"
    wait_until(lambda: file.exists() and read_tree(file)[0]["next"], "a round", patience=600)
    programs = psutil.Process(superlink.pid).children(recursive=True)
    (server,) = (each for each in programs if any("serverapp" in part for part in each.cmdline()))
    server.kill()


def test_a_superlink_without_certificates_does_not_start(tmp_path):
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(tmp_path)}
    command, options = PROGRAMS / "flower-superlink", {"capture_output": True, "text": True}
    done = subprocess.run([command], env=environment, timeout=120, **options)
    assert done.returncode and "Certificates are required" in done.stdout + done.stderr


def test_real_processes_have_the_results_of_the_simulation(tmp_path):
    """Killed after one of six rounds; before it starts, two strangers are refused.

    One node does not trust the server's certificate, one has a key that is not registered.
    """
    experiment = load_experiment("tiny", "stamp")
    with LocalFederation(tmp_path, experiment) as federation:
        superlink = federation.start_superlink()
        (tmp_path / "other").mkdir()
        make_certificate(tmp_path / "other", "127.0.0.1")
        stranger = federation.start_node(3, "other/server.pem")
        wait_until(says(tmp_path, "node3", "CERTIFICATE_VERIFY_FAILED"), "a wrong certificate")
        stranger.kill()
        for number in (1, 2, 3):
            federation.start_node(number)
        make_node_key(tmp_path / "node4.key")
        federation.clients.append([0])
        federation.start_node(4)
        wait_until(says(tmp_path, "node4", "Failed to activate SuperNode"), "an unknown key")
        killer = threading.Thread(target=kill_server, args=(tmp_path, superlink))
        killer.start()
        assert not federation.run().returncode
        killer.join()
        assert not (tmp_path / "records").exists()
        done = federation.run()
        assert (tmp_path / "records").exists(), done.stdout + done.stderr
        small.assert_same(federation.record(), federation.simulate())
