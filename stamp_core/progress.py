"""Where a training is: a bar where a person watches, one line a step in logs."""

import os
import sys
import threading
import time
from types import TracebackType

from tqdm.auto import tqdm


def watched() -> bool:
    """Whether a person looks on: JupyterLab or a terminal, but not DVC, papermill logs or tests."""
    if "STAMP_PROGRESS" in os.environ:
        return os.environ["STAMP_PROGRESS"] == "bar"
    return "DVC_STAGE" not in os.environ and ("ipykernel" in sys.modules or sys.stdout.isatty())


class Progress:
    """Counts the rounds of all seeds; safe to call from several threads."""

    def __init__(self, rounds: int, done: int) -> None:
        self.lock = threading.Lock()
        self.bar = tqdm(total=rounds, initial=done, unit="round") if watched() else None
        self.started, self.accuracies = time.perf_counter(), dict[int, float]()

    def __enter__(self) -> "Progress":
        """The progress itself."""
        return self

    def round(self) -> None:
        """One more round is done."""
        with self.lock:
            if self.bar is not None:
                self.bar.update()

    def step(self, seed: int, step: str, accuracy: float) -> None:
        """A step of one seed's sequence is done: say how good the model is now."""
        with self.lock:
            if self.bar is None:
                seconds = time.perf_counter() - self.started
                line = f"seed {seed}  step {step}  accuracy {accuracy:6.1%}  {seconds:.1f} s"
                print(line, flush=True)
            else:
                self.accuracies[seed] = accuracy
                mean = sum(self.accuracies.values()) / len(self.accuracies)
                self.bar.set_postfix_str(f"accuracy {mean:.1%}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the bar where it ended."""
        if self.bar is not None:
            self.bar.close()
