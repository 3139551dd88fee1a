"""params.yaml as frozen, validated dataclasses: every slip is refused in one line that names it."""

import copy
import difflib
import itertools
import math
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from stamp_core.paths import PARAMS

T = TypeVar("T")
SECTIONS = (
    *("grid", "ablation", "sweeps", "budgets", "alphas"),
    *("tiny", "tiny_sweeps", "tiny_budgets", "tiny_alphas"),
    *("paper", "paper_alphas", "settings", "methods"),
)
GRIDS = ("grid", "ablation", "tiny")
PAPER = "paper"  # a grid whose pictures and hours most machines have not: trained when asked for
AXES = ("setting", "method", "seeds")  # of a grid


class ParameterError(ValueError):
    """A parameter that cannot be right: the message names key, value and what would be right."""


@dataclass(frozen=True)
class Split:
    """Who learns which classes when. A field with a default is a switch that is off."""

    kind: Literal["classes", "domains"]
    clients: int
    tasks: int
    classes_per_task: int | None = None  # kind "classes" only
    cycles: int = 1  # how often the sequence is gone through
    order: Literal["independent", "common", "given", "mixed", "disjoint"] = "independent"
    common_clients: int = 0  # order "mixed": so many clients follow one common order
    alpha: float | None = None  # Dirichlet concentration over clients inside each task
    min_samples: int = 1  # with alpha: the least pictures of a client in a task
    images_per_class: int | None = None  # each client's own random draw; None: all of them

    def __post_init__(self) -> None:
        """Refuse what no plan can fulfil."""
        at_least(self, 1, "clients", "tasks", "cycles")
        at_least(self, 0, "min_samples", "common_clients")
        if self.kind == "classes" and self.classes_per_task is None:
            raise wrong("classes_per_task", None, "a number of classes, as kind is 'classes'")
        if self.kind == "domains" and self.classes_per_task is not None:
            raise wrong("classes_per_task", self.classes_per_task, "absent, as kind is 'domains'")
        for name in ("classes_per_task", "images_per_class"):
            if getattr(self, name) is not None:
                at_least(self, 1, name)
        if self.common_clients > self.clients:
            raise wrong("common_clients", self.common_clients, f"at most clients = {self.clients}")
        if self.common_clients and self.order != "mixed":
            raise wrong("common_clients", self.common_clients, "0 unless order is 'mixed'")
        if self.min_samples != 1 and self.alpha is None:
            raise wrong("min_samples", self.min_samples, "absent unless alpha is set")
        if self.alpha is not None:
            above(self, 0, "alpha")
            if self.order not in ("common", "given"):
                right = "'common' or 'given' where alpha is set: clients share tasks"
                raise wrong("order", self.order, right)
            if self.images_per_class is not None:
                raise wrong("images_per_class", self.images_per_class, "absent where alpha is set")


@dataclass(frozen=True)
class Network:
    """An encoder and a linear head over all classes of the data."""

    kind: Literal["mlp", "cnn", "lenet", "resnet18", "swin_t"]
    features: int = 64  # width of the last hidden layer (mlp, cnn)
    channels: tuple[int, ...] = (16, 32)  # cnn: one 5 x 5 convolution with pooling each
    norm: Literal["none", "batch", "group"] = "none"
    stem: Literal["published", "small"] = "published"  # resnet18: 7 x 7 / 2 and pooling, or 3 x 3
    pretrained: str | None = None  # a file of weights, in the folder of downloads or absolute
    precision: Literal["float32", "bfloat16"] = "float32"  # of the encoder's layers, not of weights
    at_once: int | None = None  # pictures that pass the encoder at a time; None: the whole batch

    def __post_init__(self) -> None:
        """Refuse empty layers, and what a kind has not."""
        at_least(self, 1, "features")
        if self.at_once is not None:
            at_least(self, 1, "at_once")
        if not self.channels or min(self.channels) < 1:
            raise wrong("channels", list(self.channels), "at least one number above 0")
        if self.kind in ("mlp", "lenet", "swin_t") and self.norm != "none":
            raise wrong("norm", self.norm, f"'none', as kind is {self.kind!r}")
        if self.kind == "resnet18" and self.norm == "none":
            raise wrong("norm", self.norm, "'batch' or 'group', as kind is 'resnet18'")
        if self.kind != "resnet18" and self.stem != "published":
            raise wrong("stem", self.stem, f"absent, as kind is {self.kind!r}")


@dataclass(frozen=True)
class Training:
    """How each client learns in a round; the same for all methods of a table."""

    rounds: int  # per task
    epochs: int
    batch: int
    rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    participation: float = 1.0  # share of clients asked in a round
    dropout: float = 0.0  # probability that an asked client does not answer
    buffers: Literal["shared", "local", "frozen"] = "shared"  # of batch normalisation
    shift: int = 0  # augmentation: random translation in pixels
    flip: bool = False  # augmentation: random mirroring

    def __post_init__(self) -> None:
        """Refuse impossible numbers."""
        at_least(self, 1, "rounds", "batch")
        at_least(self, 0, "epochs", "rate", "weight_decay", "shift")
        fraction(self, "momentum", "dropout")
        if not 0 < self.participation <= 1:
            raise wrong("participation", self.participation, "above 0 and at most 1")


@dataclass(frozen=True)
class Observe:
    """What is looked at besides accuracies; it costs time and changes no result."""

    angles: bool = False  # between the gradients of a client's tasks, after each step
    displacements: bool = False  # the same between ways of whole epochs
    features: int = 0  # test pictures of each class whose features are kept after each step
    memory: int = 0  # pictures of each class that the record shows of the first client's memory

    def __post_init__(self) -> None:
        """Refuse a negative number of pictures."""
        at_least(self, 0, "features", "memory")


@dataclass(frozen=True)
class Setting:
    """One experiment without its method: data, plan, network and training."""

    name: str
    data: Mapping[str, Any]  # source and its own options, checked by stamp_core.data
    split: Split
    network: Network
    training: Training
    observe: Observe = field(default_factory=Observe)


def wrong(key: str, value: object, right: str) -> ParameterError:
    """The error for a value that cannot be: `key` is `value`; it must be `right`."""
    return ParameterError(f"{key} is {value!r}; it must be {right}")


def at_least(holder: object, bound: float, *names: str) -> None:
    """Refuse fields of `holder` below `bound` (or not a number)."""
    for name in names:
        if not getattr(holder, name) >= bound:
            raise wrong(name, getattr(holder, name), f"at least {bound}")


def above(holder: object, bound: float, *names: str) -> None:
    """Refuse fields of `holder` not above `bound`."""
    for name in names:
        if not getattr(holder, name) > bound:
            raise wrong(name, getattr(holder, name), f"above {bound}")


def fraction(holder: object, *names: str) -> None:
    """Refuse fields of `holder` outside [0, 1)."""
    for name in names:
        if not 0 <= getattr(holder, name) < 1:
            raise wrong(name, getattr(holder, name), "at least 0 and below 1")


def unknown(key: str, name: object, known: Iterable[str]) -> ParameterError:
    """The error for a name nobody knows, with the nearest known one where it is a slip."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ParameterError(f"{key} {name!r} is unknown; {hint}known: {', '.join(names)}")


def build(cls: type[T], values: object, where: str) -> T:
    """An instance of the dataclass `cls` from a mapping read at `where` in params.yaml."""
    if not isinstance(values, Mapping):
        raise wrong(where, values, "a block of keys")
    assert is_dataclass(cls)
    known = {each.name: each for each in fields(cls)}
    for key in values:
        if key not in known:
            raise unknown(f"{where}:", key, known)
    for name, each in known.items():
        if name not in values and each.default is each.default_factory is MISSING:
            raise ParameterError(f"{where}.{name} is missing")
    hints = get_type_hints(cls)
    checked = {key: convert(value, hints[key], f"{where}.{key}") for key, value in values.items()}
    try:
        return cls(**checked)
    except ParameterError as error:
        raise ParameterError(f"{where}.{error}") from None


def convert(value: object, hint: Any, where: str) -> object:
    """`value` as the type `hint` asks for; text is never read as a number, nor yes as a bool."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        if value not in options:
            raise unknown(where, value, map(str, options))
        return value
    if get_origin(hint) in (Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        return convert(value, next(o for o in options if o is not type(None)), where)
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise wrong(where, value, "a list")
        return tuple(convert(item, options[0], where) for item in value)
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value, where)
    if get_origin(hint) is Mapping:
        if not isinstance(value, Mapping):
            raise wrong(where, value, "a block of keys")
        return value
    if hint is float and type(value) is int:
        return float(value)
    if not isinstance(value, hint) or (type(value) is bool and hint is not bool):
        raise wrong(where, value, _in_words(hint, value))
    if hint is float and not math.isfinite(value):
        raise wrong(where, value, "a finite number")
    return value


def _in_words(hint: type, value: object) -> str:
    """What a field of type `hint` wants, with the number that the text was meant to be."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
    try:
        number = float(value) if isinstance(value, str) and hint in (int, float) else math.nan
    except ValueError:
        return words
    if not math.isfinite(number) or (hint is int and not number.is_integer()):
        return words
    text = re.sub("^(-?[0-9]+)e", "\\1.0e", repr(hint(number)))  # to YAML 1.1, 1e-05 is text
    return f"{words}, written without quotes as {text}"


def read(path: Path = PARAMS) -> dict[str, Any]:
    """params.yaml as plain values, read by the parser that DVC uses (YAML 1.2)."""
    try:
        values = copy.deepcopy(_parsed(path.read_bytes()))
    except FileNotFoundError:
        raise ParameterError(f"{path} does not exist; it holds every parameter") from None
    except YAMLError as error:
        raise ParameterError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ParameterError(f"{path} is empty; it must hold {', '.join(SECTIONS)}")
    for key in values:
        if key not in SECTIONS:
            raise unknown("params.yaml:", key, SECTIONS)
    for key in SECTIONS:
        if not isinstance(values.get(key), dict):
            raise wrong(f"params.yaml: {key}", values.get(key), "a block of keys")
    return values


@lru_cache(maxsize=1)  # a figure asks for the place of every method that it shows
def _parsed(content: bytes) -> Any:
    return YAML(typ="safe").load(content)


def section(params: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    """The block `kind.name` of params.yaml."""
    known = params.get(kind) or {}
    if name not in known:
        raise unknown(f"params.yaml: {kind}", name, known)
    if not isinstance(known[name], Mapping | None):
        raise wrong(f"params.yaml: {kind}.{name}", known[name], "a block of keys")
    return dict(known[name] or {})


def setting(name: str, params: Mapping[str, Any] | None = None) -> Setting:
    """The setting `name` of params.yaml, checked."""
    block, where = section(params or read(), "settings", name), f"params.yaml: settings.{name}"
    if "name" in block:
        raise wrong(f"{where}.name", block["name"], "absent: a setting's key is its name")
    return build(Setting, {"name": name, **block}, where)


def seeds(text: str) -> list[int]:
    """The seeds that `text` stands for: '3' is [3], '0to2' is [0, 1, 2]."""
    found = re.fullmatch(r"(\d+)(?:to(\d+))?", str(text))
    if not found or int(found[2] or found[1]) < int(found[1]):
        raise wrong("seeds", text, "a number such as '3' or a rising range such as '0to2'")
    return list(range(int(found[1]), int(found[2] or found[1]) + 1))


def cells(name: str, params: Mapping[str, Any] | None = None) -> Iterator[tuple[str, str, str]]:
    """Setting, method and range of seeds of every cell of a grid, those it has `beside` first."""
    params = params or read()
    name, _, only = name.partition(".")  # "paper.cifar100_c2": one setting of a grid
    if name not in (*GRIDS, PAPER):
        raise unknown("grid", name, (*GRIDS, PAPER))
    grid = {"beside": [], **params[name]}  # which another grid trains
    for key in grid:
        if key not in (*AXES, "beside"):
            raise unknown(f"params.yaml: {name}:", key, (*AXES, "beside"))
    for axis in (*AXES, "beside"):
        if not isinstance(grid.get(axis), list):
            raise wrong(f"params.yaml: {name}.{axis}", grid.get(axis), "a list")
    if only and only not in grid["setting"]:
        raise unknown(f"params.yaml: {name}.setting", only, grid["setting"])
    settings, methods = [only] if only else grid["setting"], [*grid["beside"], *grid["method"]]
    yield from itertools.product(settings, methods, map(str, grid["seeds"]))


def plain(value: object) -> Any:
    """`value` with dataclasses and tuples turned into what JSON can hold."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
