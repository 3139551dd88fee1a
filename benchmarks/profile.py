"""Where the time of a training goes: `make profile METHOD=stamp SETTING=digits`."""

import cProfile
import pstats
import sys

from stamp_core import load_experiment, train

ROWS = 25  # functions that are printed


def main(setting: str, method: str) -> None:
    """Train one seed in this process; print its phases and its dearest functions."""
    experiment = load_experiment(setting, method)
    plans = experiment.plans("0")
    profile = cProfile.Profile()
    record = profile.runcall(train, experiment, plans, workers=1, device="cpu")[0]
    phases: dict[str, float] = {}
    for entry in record.history:
        for phase, seconds in entry["seconds"].items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    print("  ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases.items()))
    pstats.Stats(profile).sort_stats("tottime").print_stats(ROWS)


if __name__ == "__main__":
    main(*sys.argv[1:])
