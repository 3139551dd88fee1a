"""What the forked processes of a copy of the project do: each function is one call of a user."""

import dataclasses
import hashlib
import io
import json
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np

from stamp_core import load_experiment, read_params, train
from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import ParameterError
from stamp_core.config.params import parse_seeds
from stamp_core.data.loading import load_dataset
from stamp_core.results.records import Record, load_record
from workbench import import_pfllib, load_plans, run_folder
from workbench.workflow import archive
from workbench.workflow.command import main
from workbench.workflow.grid import load_records, save_plans, train_and_save
from workbench.workflow.leaderboard import find_records, verify_all
from workbench.workflow.profiles import QUICK, read_profile
from workbench.workflow.source import write_source
from workbench.workflow.sweeps import sweep_experiments

VOLATILE = ("seconds", "memory")  # of a history: they differ between two unbroken runs


def record_digest(record: Record) -> str:
    """The sha256 of a record without seconds, memory and environment."""
    about = dict(record.about)
    about["setup"] = {k: v for k, v in about["setup"].items() if k not in VOLATILE}
    history = [{k: v for k, v in row.items() if k not in VOLATILE} for row in record.history]
    total = hashlib.sha256(json.dumps([about, history], sort_keys=True).encode())
    for name in ("scores", "weights", "features", "memory"):
        for key, array in sorted({**getattr(record, name)}.items()):
            rows = np.ascontiguousarray(array)
            total.update(f"{name} {key} {rows.dtype} {rows.shape}".encode() + rows.tobytes())
    total.update(np.ascontiguousarray(record.tests).tobytes())
    return total.hexdigest()


def train_small(method: str = "stamp", seeds: str = "0to1", workers: int = 1) -> dict[str, str]:
    """Digests of plans and records: those on disk are kept, others trained or resumed."""
    experiment = load_experiment("tiny", method)
    plans = load_plans(experiment.setting, experiment.dataset(), seeds, QUICK)
    save_plans(plans, experiment.setting, QUICK)
    records = load_records(experiment, seeds, QUICK, outdated=False)
    records = records or train_and_save(experiment, seeds, QUICK, workers, "cpu")
    folder, digests = run_folder(experiment, seeds, QUICK), {}
    for seed, record in zip(parse_seeds(seeds), records, strict=True):
        digests[f"plan {seed}"] = plans[seed].hash
        digests[f"record {seed}"] = record_digest(record)
        digests[f"record {seed} on disk"] = record_digest(load_record(folder / str(seed)))
    return digests


def record_digests(root: str) -> dict[str, str]:
    """The digests of all records below a folder, by their paths."""
    folders = sorted(path.parent for path in Path(root).rglob("run.json"))
    return {str(f.relative_to(root)): record_digest(load_record(f)) for f in folders}


def fingerprint_all() -> None:
    """Read all code once: the forks of this process need not do it again."""
    params = read_params()
    for method in params["methods"]:
        load_experiment(next(iter(params["settings"])), method, params).code()


def first_stage() -> str:
    """What the first stage of the pipeline has declared right: a digest of all parameters."""
    write_source()
    params = read_profile()
    setting, method = next(iter(params["settings"])), next(iter(params["methods"]))
    pairs = [(each, method) for each in params["settings"]]
    pairs += [(setting, each) for each in params["methods"]]
    resolved: list[Any] = [load_experiment(*pair, params).resolved() for pair in pairs]
    for name in params["sweeps"]:
        resolved += [[e.resolved(), e.sweep] for e in sweep_experiments(name, params)]
    blocks = {k: v for k, v in params.items() if k not in ("settings", "methods")}
    text = json.dumps([resolved, blocks], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def train_changed(setting: str, method: str) -> str:
    """Train a setting with a method after the first stage has declared their parameters right."""
    experiment = load_experiment(setting, method)
    dataset = experiment.dataset()
    training = dataclasses.replace(experiment.setting.training, rounds=1)
    changed = dataclasses.replace(experiment.setting, training=training)
    experiment = dataclasses.replace(experiment, setting=changed)
    plans = load_plans(experiment.setting, dataset, "0", QUICK)
    return record_digest(train(experiment, plans, device="cpu")[0])


def dataset_digest(**spec: Any) -> str:
    """The digest of a data set."""
    return load_dataset(spec).digest


def load_pretrained(file: str) -> None:
    """Build the network of the setting `tiny` with weights from a file."""
    setting = load_experiment("tiny", "fedavg").setting
    network = dataclasses.replace(setting.network, pretrained=file)
    ClientRuntime(dataclasses.replace(setting, network=network), load_dataset(setting.data))


def unpack_records(path: str, runs: str) -> tuple[int, int]:
    """How many records an archive holds."""
    return archive.unpack(Path(path), Path(runs))


def import_client(folder: str) -> None:
    """The plan of a folder of PFLlib with images of the setting `tiny`."""
    import_pfllib(folder, load_experiment("tiny", "fedavg").dataset(), 1)


def board(folder: str) -> list[list[object]]:
    """What the leaderboard computes of the records below a folder."""
    table, _ = verify_all(find_records([Path(folder)]))
    return [list(row) for row in table.iloc[:, :5].itertuples(index=False)] if len(table) else []


def command(words: list[str]) -> None:
    """One call of the command `stamp`; its refusal is an error."""
    with redirect_stderr(io.StringIO()) as said:
        status = main(words)
    if status:
        raise ParameterError(said.getvalue().strip())
