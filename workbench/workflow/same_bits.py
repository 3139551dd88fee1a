"""Whether this machine gives the published bits: `make verify` trains three runs again.

`python -m workbench.workflow.same_bits --write` is the stage of DVC that publishes them.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from stamp_core.core.arithmetic import PINNED, arithmetic
from stamp_core.core.atomic import atomic_write
from stamp_core.core.paths import ROOT
from stamp_core.engine.experiment import load_experiment
from stamp_core.engine.train import train

RUNS = (("digits", "stamp"), ("glyphs", "replay"), ("digits_norm", "replay"))  # the last: a CNN
SEED = 200
PUBLISHED = ROOT / "figures" / "bits.json"


def train_run(setting: str, method: str) -> dict[str, Any]:
    """The losses of a run's rounds, its accuracies after each experience, a digest of the model."""
    experiment = load_experiment(setting, method)
    record = train(experiment, experiment.plans(str(SEED)), 1, "cpu")[SEED]
    weights = b"".join(record.weights[name].tobytes() for name in sorted(record.weights))
    return {
        "losses": [row["loss"] for row in record.history],
        "accuracies": record.accuracy().ravel().tolist(),
        "weights": hashlib.sha256(weights).hexdigest(),
    }


def first_difference(found: dict[str, Any], published: dict[str, Any]) -> str:
    """The first number of a run that is another one than published, in words; "" if none is."""
    for name in ("losses", "accuracies"):
        pairs = zip(found[name], published[name], strict=True)
        for place, (ours, theirs) in enumerate(pairs, start=1):
            if ours != theirs:
                return f"number {place} of its {name} is {ours!r}, published is {theirs!r}"
    return "" if found["weights"] == published["weights"] else "the final weights are others"


def verify(published: dict[str, Any]) -> Iterator[str]:
    """Train the runs again, with a line for each; yields what differs."""
    for setting, method in RUNS:
        start = time.perf_counter()
        name = f"{setting}, {method}, seed {SEED}"
        difference = first_difference(train_run(setting, method), published[f"{setting}-{method}"])
        if difference:
            yield f"{name}: {difference}"
        else:
            print(
                f"{name}: equal to the last bit ({time.perf_counter() - start:.0f} s)", flush=True
            )


def main() -> int:
    """The exit status: 0 if all numbers are those that are published."""
    parser = argparse.ArgumentParser(description="Compare this machine's bits with published ones.")
    parser.add_argument("--write", action="store_true", help="publish this machine's bits")
    if parser.parse_args().write:
        runs = {"-".join(run): train_run(*run) for run in RUNS}
        with atomic_write(PUBLISHED) as part:
            part.write_text(json.dumps(runs, indent=1) + "\n")
        return 0
    if arithmetic() != PINNED:
        print("this process does not compute with the pinned arithmetic", file=sys.stderr)
    difference = next(verify(json.loads(PUBLISHED.read_text())), "")
    verdict = f"not the published bits: {difference}" if difference else "the published bits"
    print(f"This machine gives {verdict}.")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
