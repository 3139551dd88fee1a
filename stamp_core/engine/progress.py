"""Progress of a training: a bar in an interactive session, one line per experience in logs."""

import threading
import time

from tqdm.auto import tqdm

from stamp_core.core.processes import progress_form


class Progress:
    """Counts the rounds of all seeds of a training with a name; thread-safe."""

    def __init__(self, name: str, rounds: int, done: int) -> None:
        self.lock = threading.Lock()
        self.name = name
        self.form = progress_form()
        bar = self.form == "bar"
        self.bar = tqdm(desc=name, total=rounds, initial=done, unit="round") if bar else None
        self.left = rounds - done
        self.counted = 0
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
            self.counted += 1
            if self.bar is not None:
                self.bar.update()

    def experience(self, seed: int, place: str, accuracy: float) -> None:
        """Show a seed's accuracy after an experience; its `place` in the sequence is like "3/5"."""
        with self.lock:
            self.accuracies[seed] = accuracy
            if self.bar is not None:
                mean = sum(self.accuracies.values()) / len(self.accuracies)
                self.bar.set_postfix_str(f"accuracy {mean:.1%}")
            elif self.form == "lines":
                line = f"{self.name}  seed {seed}  experience {place}  accuracy {accuracy:6.1%}"
                print(f"{line}  {self.times()}", flush=True)

    def times(self) -> str:
        """The seconds since the start, and about how many are left for all seeds."""
        spent = time.perf_counter() - self.started
        left = spent / max(1, self.counted) * (self.left - self.counted)
        return f"{spent:.1f} s, about {left:.0f} s left" if left else f"{spent:.1f} s"
