"""A federation on this machine with TLS, compared with the simulation: `make federation`."""

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from stamp_core.core.paths import ROOT
from stamp_core.data.split import make_plan
from stamp_core.engine.experiment import Experiment, load_experiment
from stamp_core.engine.train import train
from stamp_core.results.records import Record, load_record
from workbench.federation.keys import make_certificate, make_node_key
from workbench.federation.server import federated
from workbench.federation.shares import write_shares
from workbench.workflow.verify import same_results

PROGRAMS = Path(sys.executable).parent
QUIET = {  # Flower must not call anyone
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
SEED, NODES = 0, 3
PATIENCE = 120  # seconds until the SuperLink must answer


class LocalFederation(ExitStack):
    """A SuperLink and SuperNodes in a folder; leaving the context ends them, the last one first."""

    def __init__(self, folder: Path, experiment: Experiment) -> None:
        super().__init__()
        self.folder, self.experiment = folder, experiment
        setting, images = experiment.setting, experiment.dataset()
        self.plans = {SEED: make_plan(setting.split, images, SEED)}
        self.clients = [list(range(k, setting.split.clients, NODES)) for k in range(NODES)]
        write_shares(images, self.plans, self.clients, folder)
        self.address = f"127.0.0.1:{free_port()}"
        paths = {"FLWR_HOME": str(folder / "flower"), "PYTHONPATH": str(ROOT)}
        path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, **QUIET, **paths, "PATH": path}

    def start_superlink(self) -> subprocess.Popen[bytes]:
        make_certificate(self.folder, "127.0.0.1")
        certificate, key = self.folder / "server.pem", self.folder / "server.key"
        options: list[str | Path] = ["--ssl-ca-certfile", certificate]
        options += ["--ssl-certfile", certificate, "--ssl-keyfile", key]
        options += ["--port", self.address.partition(":")[2]]
        process = self.start("superlink", "flower-superlink", "--enable-supernode-auth", *options)
        (self.folder / "flower").mkdir(exist_ok=True)
        known = f'address = "{self.address}"\nroot-certificates = "{certificate}"\n'
        (self.folder / "flower" / "config.toml").write_text(f"[superlink.local]\n{known}")
        end = time.monotonic() + PATIENCE
        while self.flwr("list", "local").returncode:
            if time.monotonic() > end:
                log = (self.folder / "superlink.log").read_text(errors="replace")
                raise TimeoutError(f"no answer from the SuperLink in {PATIENCE} s: {log[-1000:]}")
            time.sleep(0.5)
        return process

    def start_node(self, number: int, certificate: str = "server.pem") -> subprocess.Popen[bytes]:
        """Start the SuperNode of a number from 1; its key is made and registered the first time."""
        data, key = self.folder / f"node{number}", self.folder / f"node{number}.key"
        if not key.exists():
            self.flwr("supernode", "register", make_node_key(key), "local")
        clients = " ".join(map(str, self.clients[number - 1]))
        options: list[str | Path] = ["--root-certificates", self.folder / certificate]
        options += ["--superlink", self.address]
        options += ["--auth-supernode-private-key", key, "--port", str(free_port())]
        options += ["--node-config", f'data="{data}" clients="{clients}"']
        return self.start(f"node{number}", "flower-supernode", *options)

    def start(self, name: str, program: str, *options: str | Path) -> subprocess.Popen[bytes]:
        log = self.enter_context((self.folder / f"{name}.log").open("ab"))
        command = [PROGRAMS / program, *options]
        process = subprocess.Popen(command, env=self.environment, cwd=ROOT, stdout=log, stderr=log)
        self.callback(process.wait)
        self.callback(process.terminate)
        return process

    def flwr(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        whole = [PROGRAMS / "flwr", *command]
        environment = self.environment
        return subprocess.run(whole, env=environment, cwd=ROOT, capture_output=True, text=True)

    def run(self) -> subprocess.CompletedProcess[str]:
        where = {"data": "server", "resume": "resume", "out": "records"}
        config = [f'{key}="{self.folder / name}"' for key, name in where.items()]
        setting, method = self.experiment.setting.name, self.experiment.method
        config += [f'setting="{setting}" method="{method}" seeds="{SEED}"']
        app = Path(__file__).parent / "app"
        return self.flwr("run", app, "local", "--stream", "--run-config", " ".join(config))

    def record(self) -> Record:
        return load_record(self.folder / "records" / str(SEED))

    def simulate(self) -> Record:
        return train(federated(self.experiment), self.plans, 1, "cpu")[SEED]


def free_port() -> int:
    """A port of the loopback that nobody uses."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def main(setting: str = "tiny", method: str = "stamp") -> None:
    """Train in a federation and in one process; refuse results that are not the same."""
    experiment = load_experiment(setting, method)
    with TemporaryDirectory() as folder, LocalFederation(Path(folder), experiment) as federation:
        federation.start_superlink()
        for number in range(1, len(federation.clients) + 1):
            federation.start_node(number)
        start, done = time.perf_counter(), federation.run()
        print(done.stdout, done.stderr)
        record, seconds = federation.record(), time.perf_counter() - start
    print(f"{setting}, {method}: {len(record.history)} rounds on {NODES} nodes in {seconds:.0f} s")
    if not same_results(record, federation.simulate()):
        raise SystemExit("these are not the results of the simulation")
    print("weights and accuracies are those of the simulation, bit for bit")


if __name__ == "__main__":
    main(*sys.argv[1:])
