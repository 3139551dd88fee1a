"""The campaign: `make faults` writes benchmarks/faults.md; exit status 1 if anything was lost.

`python -m benchmarks.faults --seed 0 --kind slips --case 17` repeats one case.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.faults import FAILURES
from benchmarks.faults.campaign import KINDS, campaign, cases, report
from benchmarks.faults.pipeline import end_remaining
from stamp_core.core.paths import ROOT


def main() -> int:
    """Run the campaign, or one case; 1 if anything was lost, silently wrong or executed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, help="one kind alone; the page is not written")
    parser.add_argument("--case", type=int, help="one case of the kind")
    parser.add_argument("--share", type=float, default=1.0, help="of the number of cases of a kind")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no case begins")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
    start = time.monotonic()
    wanted = cases(arguments.kind, arguments.case, arguments.share)
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        jobs = min(2, os.cpu_count() or 1, len(wanted))
        try:
            place, seconds = Path(folder).resolve(), 60 * arguments.minutes
            found = campaign(wanted, arguments.seed, jobs, place, seconds)
        finally:
            end_remaining(Path(folder).resolve())
    page = report(found, arguments.seed, (time.monotonic() - start) / 60)
    if arguments.kind:
        print(page.partition("## Failures")[2])
    else:
        (ROOT / "benchmarks/faults.md").write_text(page)
    return int(any(outcome.verdict in FAILURES for *_, outcome in found))


if __name__ == "__main__":
    sys.exit(main())
