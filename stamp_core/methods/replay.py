"""Control: experience replay; clients mix exemplars of past tasks into their batches."""

from typing import ClassVar

from stamp_core.methods.base.rehearsal import Rehearsal


class Replay(Rehearsal):
    """Experience replay on every client (Chaudhry et al., 2019: "tiny episodic memories")."""

    group: ClassVar = "control"
    masks: ClassVar = True
