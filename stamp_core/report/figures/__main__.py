"""`python -m stamp_core.report.figures` draws figures/architecture.png, which needs no record."""

from stamp_core.core.paths import ROOT
from stamp_core.report.figures import architecture, save

if __name__ == "__main__":
    save(architecture(), ROOT / "figures" / "architecture.png")
