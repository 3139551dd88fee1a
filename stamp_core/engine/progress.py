"""Progress of a training: a bar in an interactive session, one line per experience in logs."""

import threading
import time

from tqdm.auto import tqdm

from stamp_core.core.processes import is_interactive


class Progress:
    """Counts the rounds of all seeds; thread-safe."""

    def __init__(self, rounds: int, done: int) -> None:
        self.lock = threading.Lock()
        self.bar = tqdm(total=rounds, initial=done, unit="round") if is_interactive() else None
        self.started = time.perf_counter()
        self.accuracies = dict[int, float]()

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
