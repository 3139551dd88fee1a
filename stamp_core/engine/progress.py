"""Progress of a training: a bar or lines for whoever watches, every number for loggers."""

import math
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

LOGGING = threading.Lock()  # of loggers: seeds that are trained side by side take turns


class Logger(Protocol):
    """What a training tells while it runs; workbench/workflow/loggers.py has some.

    Calls come one at a time, in the process that called `train`. A training that resumes begins
    with the rounds that were trained before, so that a logger is always told all of them. An error
    of a logger ends the training of that seed; what has been trained is kept.
    """

    def on_round(self, seed: int, round: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a round, counted from 0 over all experiences."""

    def on_experience(self, seed: int, experience: int, values: Mapping[str, float]) -> None:
        """Take the accuracies after an experience: of the tasks learnt so far, and of each task."""


class Progress:
    """Counts the rounds of all seeds of a training with a name; thread-safe."""

    def __init__(self, form: str, name: str, left: int, bar: Any) -> None:
        self.lock = threading.Lock()
        self.form, self.bar = form, bar  # as progress_form and progress_bar have them
        self.name = name
        self.left = left
        self.counted = 0
        self.started = time.perf_counter()
        self.accuracies = dict[int, float]()

    def round(self) -> None:
        with self.lock:
            self.counted += 1
            if self.bar is not None:
                self.bar.update()

    def experience(self, seed: int, experience: int, count: int, accuracy: float) -> None:
        with self.lock:
            self.accuracies[seed] = accuracy
            if self.bar is not None:
                mean = sum(self.accuracies.values()) / len(self.accuracies)
                self.bar.set_postfix_str(f"accuracy {mean:.1%}")
            elif self.form == "lines":
                line = f"{self.name}  seed {seed}  experience {experience + 1}/{count}"
                print(f"{line}  accuracy {accuracy:6.1%}  {self.times()}", flush=True)

    def times(self) -> str:
        spent = time.perf_counter() - self.started
        left = spent / max(1, self.counted) * (self.left - self.counted)
        return f"{spent:.1f} s, about {left:.0f} s left" if left else f"{spent:.1f} s"


def scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an entry of the history by name, `seconds/clients` in a block; None is NaN."""
    found: dict[str, float] = {}
    for name, value in entry.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{key}": number for key, number in scalars(value).items()}
        else:
            found[name] = math.nan if value is None else value
    return found
