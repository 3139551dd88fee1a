"""What `make tour` ends with: its table, what STAMP gains, and where to go from there."""

from stamp_core.core.paths import ROOT
from workbench.workflow.grid import load_runs
from workbench.workflow.profiles import DEFAULT, expand_grid, read_profile
from workbench.workflow.run import aligned, difference, result_table

PAGE = "tour"
PAIR = ("stamp", "replay")
NEXT = "stamp run digits stamp replay --set spatial.kappa=0.9"


def summary() -> str:
    """The table of the tour's records, one difference, and the paths and commands after it."""
    runs = [*expand_grid(PAGE, read_profile())]
    found = {run[1]: load_runs([run], DEFAULT) for run in runs}
    pair = difference(*(found[name] for name in PAIR))
    setting = runs[0][0]
    return "\n".join(
        [
            f"\n{aligned(result_table(found))}\n",
            f"{' - '.join(PAIR)} on {setting}: {pair}",
            f"figure: {ROOT / 'figures' / PAGE / 'accuracy.png'}",
            f"next:   .venv/bin/{NEXT}",
            "        make lab, which opens the notebooks",
        ]
    )


if __name__ == "__main__":
    print(summary())
