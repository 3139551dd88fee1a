"""A campaign of faults: what is lost when processes die, disks fill and files are damaged.

A case is one fault, or a chain of faults, in a copy of the project; it is drawn from the seed, its
kind and its number, so that it can be repeated alone. After a fault the next call must end with the
bytes of an unbroken run, or be refused in one line that names file and cure.
"""

import random
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from benchmarks.faults.project import Place

Verdict = Literal["survived", "refused", "lost", "silently wrong", "executed"]
VERDICTS: tuple[Verdict, ...] = ("survived", "refused", "lost", "silently wrong", "executed")
FAILURES = VERDICTS[2:]

# Words of a refusal that say what to do: what is right, or which command or action helps.
CURE = re.compile(
    r"must|is missing|needed|known: |did you mean|it is now|delete|remove|replace|make them|"
    r"made again|run (`|with)|put (the|there)|starting afresh|set aside|kept as|draw|again|"
    r"belongs into|raise |lower |set size|free "
)
# What Python raises for a mistake in code, not for a fault that was foreseen.
RAW = {
    *("AttributeError", "IndexError", "JSONDecodeError", "KeyError", "NameError", "TypeError"),
    *("SafetensorError", "UnicodeDecodeError", "UnboundLocalError", "ZeroDivisionError"),
    *("AssertionError", "BadZipFile", "EOFError", "RecursionError", "BrokenPipeError"),
}


@dataclass(frozen=True)
class Outcome:
    """What became of one fault."""

    what: str  # the fault
    verdict: Verdict
    detail: str = ""


Case = Callable[["Place", random.Random, int], list[Outcome]]


@dataclass(frozen=True)
class Kind:
    """A kind of fault: `case` tries the one of a number; `count` cases make the campaign."""

    note: str
    case: Case
    count: int
    whole: bool = False  # needs the results of an unbroken pipeline


def refusal(kind: str, message: str, *names: str) -> str:
    """What an error lacks to be a refusal in one line that names file (or key) and cure; or ""."""
    if kind in RAW:
        return f"a bare {kind}"
    if "\n" in message.strip():
        return "more than one line"
    if not any(name and name in message for name in names):
        return f"names none of {', '.join(names)}"
    return "" if CURE.search(message) else "names no cure"


def judge_error(what: str, kind: str, message: str, *names: str) -> Outcome:
    """The outcome of a fault after which the next call ends with an error."""
    lacking = refusal(kind, message, *names)
    text = f"{kind}: {' '.join(message.split())}"[:300]
    return (
        Outcome(what, "lost", f"{lacking}: {text}") if lacking else Outcome(what, "refused", text)
    )


def run_case(
    kinds: dict[str, Kind], name: str, place: "Place", seed: int, number: int
) -> list[Outcome]:
    """The outcomes of one case; a campaign goes on when a case itself breaks, which is a loss."""
    draw = random.Random(f"{seed} {name} {number}")
    try:
        return kinds[name].case(place, draw, number)
    except (AssertionError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__} at {where.name}: {' '.join(str(error).split())}"[:300]
        return [Outcome("the case itself", "lost", text)]
