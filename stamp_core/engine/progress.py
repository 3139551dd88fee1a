"""Progress of a training: a bar or lines for whoever watches, every number for loggers."""

import math
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from tqdm.auto import tqdm


class Logger(Protocol):
    """What a training tells while it runs; stamp_core/results/loggers.py has some.

    Calls come one at a time, in the process that called `train`. A training that resumes begins
    with the rounds that were trained before, so that a logger is always told all of them. An error
    of a logger ends the training of that seed; what has been trained is kept.
    """

    def on_round(self, seed: int, round: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a round, counted from 0 over all experiences."""

    def on_experience(self, seed: int, experience: int, values: Mapping[str, float]) -> None:
        """Take the accuracies after an experience: of the tasks learnt so far, and of each task."""


class Loggers:
    """Some loggers as one; seeds that are trained side by side take turns."""

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self.loggers = list(loggers)
        self.lock = threading.Lock()

    def on_round(self, seed: int, round: int, values: Mapping[str, float]) -> None:
        """Tell all of them the numbers of a round."""
        with self.lock:
            for each in self.loggers:
                each.on_round(seed, round, values)

    def on_experience(self, seed: int, experience: int, values: Mapping[str, float]) -> None:
        """Tell all of them the accuracies after an experience."""
        with self.lock:
            for each in self.loggers:
                each.on_experience(seed, experience, values)


class Progress:
    """Counts the rounds of all seeds; thread-safe."""

    def __init__(self, mode: str, title: str, rounds: int, done: int) -> None:
        self.mode = mode  # as progress_mode has it
        self.title = title  # of the experiment
        self.lock = threading.Lock()
        self.bar = None
        if mode == "bar":
            self.bar = tqdm(desc=title, total=rounds, initial=done, unit="round")
        self.started = time.perf_counter()
        self.trained, self.left = 0, rounds - done
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
            self.trained, self.left = self.trained + 1, self.left - 1
            if self.bar is not None:
                self.bar.update()

    def experience(self, seed: int, place: str, accuracy: float) -> None:
        """Show a seed's accuracy after an experience; its `place` in the sequence is like "3/5"."""
        with self.lock:
            if self.bar is not None:
                self.accuracies[seed] = accuracy
                mean = sum(self.accuracies.values()) / len(self.accuracies)
                self.bar.set_postfix_str(f"accuracy {mean:.1%}")
            elif self.mode == "lines":
                line = f"{self.title}  seed {seed}  experience {place}  accuracy {accuracy:6.1%}"
                print(f"{line}  {self.times()}", flush=True)

    def times(self) -> str:
        """The time since the start and, as long as rounds are left, what they may take."""
        passed = time.perf_counter() - self.started
        if not self.left or not self.trained:
            return format_seconds(passed)
        left = passed / self.trained * self.left
        return f"{format_seconds(passed)}, {format_seconds(left)} left"


def format_seconds(seconds: float) -> str:
    """A time as people say it: 0.4 s, 12 s, 7 min, 3.5 h."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an entry of the history by name, `seconds/clients` in a block; None is NaN."""
    found: dict[str, float] = {}
    for name, value in entry.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{key}": number for key, number in scalars(value).items()}
        else:
            found[name] = math.nan if value is None else value
    return found
