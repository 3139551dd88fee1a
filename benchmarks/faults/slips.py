"""Slips in parameter files, and names that a shell would execute."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from benchmarks.faults import Kind, Outcome, judge_error
from benchmarks.faults.project import REPRO, Answer, Place, judge_output, remove

TRAINED_AT_MOST = 5  # seconds of CPU in which a training with an accepted slip shows an error
MEMORY = 4 << 30  # bytes that such a training may take


def read(file: Path) -> Any:
    """A parameter file as plain values."""
    return YAML(typ="safe").load(file)


def write(tree: Any, file: Path) -> None:
    """Write a parameter file in block style."""
    yaml = YAML(typ="safe")
    yaml.default_flow_style = False
    yaml.dump(tree, file)


def values(trap: Path) -> list[Any]:
    """What a slip puts in place of a value."""
    text = f"$(touch {trap})"
    numbers = [0, -1, -0.5, 1e9, float("nan"), float("inf"), True, "1e-05", "0.1", 3, 0.5]
    return [*numbers, None, "", "yes", text, f"a; touch {trap} #", [], [1], ["a", []], {}, {"a": 1}]


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all keys and items of a tree."""
    if not isinstance(tree, dict | list):
        return []
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found = []
    for key, value in list(pairs):
        found += [(*path, key), *places(value, (*path, key))]
    return found


def slip(tree: Any, draw: random.Random, trap: Path) -> tuple[str, tuple[Any, ...]]:
    """Make one slip in a tree of parameters; its description and place."""
    path = draw.choice(places(tree))
    block = tree
    for part in path[:-1]:
        block = block[part]
    key, how = path[-1], draw.choice(["renamed", "removed", "value", "value", "value", "value"])
    where = ".".join(map(str, path))
    if how == "renamed" and isinstance(block, dict):
        letters = str(key)
        at = draw.randrange(len(letters))
        new = draw.choice([letters[:at] + letters[at + 1 :], f"{letters}s", letters.upper(), 7])
        block[new] = block.pop(key)
        return f"{where} renamed to {new!r}", path
    if how == "removed":
        del block[key]
        return f"{where} removed", path
    block[key] = copy.deepcopy(draw.choice(values(trap)))
    return f"{where} is {block[key]!r}"[:120], path


def slip_parameters(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """One slip: the first stage refuses it, or what it declares right can be trained."""
    agent = place.agent
    agent.forget()
    name = ("params.yaml", "params/settings.yaml", "params/methods.yaml")[number % 3]
    tree = read(agent.root / name)
    what, path = slip(tree, draw, place.traps / "slip")
    write(tree, agent.root / name)
    what = f"{name}: {what}"
    answer = agent.call("first_stage")
    if sprung := place.sprung():
        return [Outcome(what, "executed", ", ".join(sprung))]
    if answer.error:
        names = [str(part) for part in path if isinstance(part, str)]
        return [judge_error(what, *answer.error, name, *names)]
    if "renamed" in what and answer.value == place.shared.first_stage:
        return [Outcome(what, "silently wrong", "accepted, and changes nothing")]
    return [trained(place, what, name, path)]


def trained(place: Place, what: str, name: str, path: tuple[Any, ...]) -> Outcome:
    """The outcome of an accepted slip: one round of what it concerns, on the smallest setting."""
    first = str(path[0])
    setting, method = "tiny", "fedavg"
    if name.endswith("methods.yaml"):
        method = first
    elif name.endswith("settings.yaml") and first in ("tiny", "tiny_alpha", "digits"):
        setting = first
    answer: Answer = place.agent.call(
        "train_changed",
        setting=setting,
        method=method,
        cpu_limit=TRAINED_AT_MOST,
        memory_limit=MEMORY,
    )
    if sprung := place.sprung():
        return Outcome(what, "executed", ", ".join(sprung))
    if answer.error:
        return judge_error(f"{what} (accepted)", *answer.error, name, *map(str, path))
    return Outcome(what, "survived")  # ended, or still training at the limit


# --- names

Edit = Callable[[Any, str], Any]  # of a parameter file as a tree, to a name

NAMES = (
    "a; touch {} #",
    "$(touch {})",
    "`touch {}`",
    "a' ; touch {} ; '",
    'a" ; touch {} ; "',
    "a\ntouch {}\n",
    "../../x",
    "a b",
    "-p x",
    "a/b",
    "",
)


def rename(tree: Any, old: str, new: str) -> Any:
    """A tree in which a name is another one, as a key and as an item."""
    if isinstance(tree, dict):
        return {new if k == old else k: rename(v, old, new) for k, v in tree.items()}
    if isinstance(tree, list):
        return [rename(each, old, new) for each in tree]
    return new if tree == old else tree


def renamed(old: str) -> Edit:
    """What gives a name to what has another one."""
    return lambda tree, name: rename(tree, old, name)


def put(*path: str) -> Edit:
    """What puts a name in place of one value."""

    def edit(tree: Any, name: str) -> Any:
        block = tree
        for part in path[:-1]:
            block = block[part]
        block[path[-1]] = [name] if path[-1] == "seeds" else name
        return tree

    return edit


SETTINGS, METHODS, GRID = "params/settings.yaml", "params/methods.yaml", "params.yaml"
HOLDERS: dict[str, tuple[Edit, tuple[str, ...]]] = {  # who has a hostile name; the files to edit
    "setting": (renamed("tiny"), (SETTINGS, GRID, "params/paper.yaml")),
    "method": (renamed("spatial_only"), (METHODS, GRID)),
    "sweep": (renamed("kappa"), (GRID,)),
    "source": (put("digits", "data", "source"), (SETTINGS,)),  # which tiny extends
    "weights": (put("tiny", "network", "pretrained"), (SETTINGS,)),
    "seeds": (put("grid", "seeds"), (GRID,)),
    "kind": (put("spatial_only", "kind"), (METHODS,)),
}


def give_name(place: Place, root: Path, number: int) -> tuple[str, str]:
    """Give a hostile name to something in a copy of the project; the name, and what has it."""
    kind = list(HOLDERS)[number % len(HOLDERS)]
    name = NAMES[(number // len(HOLDERS) + number) % len(NAMES)].format(place.traps / "name")
    edit, files = HOLDERS[kind]
    for file in files:
        write(edit(read(root / file), name), root / file)
    return name, f"{kind}: {name.replace(str(place.traps), '...')!r}"


def name_first_stage(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """A hostile name: the first stage refuses it."""
    place.agent.forget()
    name, what = give_name(place, place.agent.root, number)
    answer = place.agent.call("first_stage")
    if sprung := place.sprung():
        return [Outcome(what, "executed", ", ".join(sprung))]
    if not answer.error:
        return [Outcome(what, "silently wrong", "declared right by the first stage")]
    kind, message = answer.error
    return [judge_error(what, kind, message.replace("\n", " "), repr(name), name or "''")]


UNREAD = "ERROR: unexpected error"  # what DVC says where it cannot read dvc.yaml with these names
# For stages alone the first one, which checks the parameters, does not run.
COMMANDS = {
    "dvc repro": REPRO,
    "dvc repro -s of the split": ("dvc", "repro", "-k", "-s", "-f", "split"),
    "dvc repro -s of trainings and sweeps": ("dvc", "repro", "-k", "-s", "-f", "train", "sweep"),
}


def name_pipeline(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """A hostile name that reaches DVC: it refuses or fails, and executes nothing of the name."""
    pipeline = place.pipeline(draw, finished=True)
    name, what = give_name(place, pipeline.root, number)
    command = list(COMMANDS)[number % len(COMMANDS)]
    outside = sorted(pipeline.root.parent.iterdir())
    status, output = pipeline.run(COMMANDS[command])
    if UNREAD in output:  # docs/pipeline.md: the first stage alone says what is wrong
        status, output = pipeline.run(("python", "-m", "workbench.workflow.source"))
    sprung, what = place.sprung(), f"{what}, `{command}`"
    new = [path.name for path in sorted(pipeline.root.parent.iterdir()) if path not in outside]
    new = [each for each in new if each != pipeline.log.name]
    remove(pipeline.root)
    if sprung or new:
        return [Outcome(what, "executed", ", ".join([*sprung, *new]))]
    if "-s" in COMMANDS[command]:  # such a stage need not use the name
        return [Outcome(what, "refused" if status else "survived")]
    if not status:
        return [Outcome(what, "silently wrong", "the pipeline ended well")]
    output = output.replace(name, "NAME") if name else output
    return [judge_output(what, status, output, "NAME", repr(name)[1:-1] or "''")]


KINDS = {
    "slips": Kind(
        "a key renamed or removed, another type, a list, a block, null, negative numbers, shell "
        "text in params.yaml, params/settings.yaml or params/methods.yaml; survived: valid, and a "
        "round of training ends (or still runs after 5 s)",
        slip_parameters,
        400,
    ),
    "names, first stage": Kind(
        "`a; touch x #`, `$(touch x)`, quotes, newlines, `../x` as setting, method, sweep, source, "
        "`pretrained`, seeds, `kind`: the first stage refuses them",
        name_first_stage,
        len(HOLDERS) * len(NAMES),
    ),
    "names, DVC": Kind(
        "the same with `dvc repro` and with stages alone, for which the first stage does not run",
        name_pipeline,
        len(HOLDERS) * len(COMMANDS),
        whole=True,
    ),
}
