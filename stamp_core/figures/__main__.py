"""`python -m stamp_core.figures` draws figures/architecture.png, which depends on no record."""

from stamp_core.figures import architecture, save
from stamp_core.paths import ROOT

if __name__ == "__main__":
    save(architecture(), ROOT / "figures" / "architecture.png")
