"""Progress of a training: a bar in an interactive session, one line per experience in logs."""

import os
import sys
import threading
import time

from tqdm.auto import tqdm


def is_interactive() -> bool:
    """Whether this is JupyterLab or a terminal, and no DVC stage; STAMP_PROGRESS overrides it."""
    if "STAMP_PROGRESS" in os.environ:
        return os.environ["STAMP_PROGRESS"] == "bar"
    return "DVC_STAGE" not in os.environ and ("ipykernel" in sys.modules or sys.stdout.isatty())


class Progress:
    """Counts the rounds of all seeds; thread-safe."""

    def __init__(self, rounds: int, done: int) -> None:
        self.lock = threading.Lock()
        self.bar = tqdm(total=rounds, initial=done, unit="round") if is_interactive() else None
        self.started, self.accuracies = time.perf_counter(), dict[int, float]()

    def __enter__(self) -> "Progress":
        """The progress itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()

    def round(self) -> None:
        """Count one more round."""
        with self.lock:
            if self.bar is not None:
                self.bar.update()

    def experience(self, seed: int, place: str, accuracy: float) -> None:
        """Show a seed's accuracy after an experience; its `place` in the sequence is like "3/5"."""
        with self.lock:
            if self.bar is None:
                seconds = time.perf_counter() - self.started
                line = f"seed {seed}  experience {place}  accuracy {accuracy:6.1%}"
                print(f"{line}  {seconds:.1f} s", flush=True)
            else:
                self.accuracies[seed] = accuracy
                mean = sum(self.accuracies.values()) / len(self.accuracies)
                self.bar.set_postfix_str(f"accuracy {mean:.1%}")
