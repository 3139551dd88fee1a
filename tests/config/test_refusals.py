"""Every invalid value is refused before anything runs, in one line that names its file and key.

A row is (place, value, message): the value is put at that place of valid parameters, or taken away
where it is ABSENT.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import yaml
from small import DATA, SPLIT, TRAINING

from stamp_core.config.decode import ParameterError, build
from stamp_core.config.limits import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    OpenFraction,
    Positive,
    PositiveInt,
    Share,
    UnitInterval,
    at_least,
    between,
)
from stamp_core.config.params import parse_seeds
from tests.pipeline import parameters
from workbench.workflow.checks import check_params
from workbench.workflow.sweeps import sweep_experiments

VALID: dict[str, Any] = {
    "file": "params.yaml",
    "grid": {"setting": ["one"], "method": ["fedavg", "often", "rare"], "seeds": ["0to2", 5]},
    "ablation": {"baselines": ["often"], "method": ["rare"]},
    "sweeps": {"kappa": {**parameters.SWEEP, "setting": ["one"]}},
    "settings": {
        "one": {
            "data": DATA,
            "split": SPLIT,
            "network": {"kind": "cnn", "channels": [4]},
            "training": TRAINING,
            "privacy": {"clip": 1.0, "noise_multiplier": 0.5, "noise": "local"},
        }
    },
    "methods": {
        "fedavg": {},
        "local": None,
        "often": {"kind": "replay", "memory": {"exemplars_per_class": 5, "selection": "uniform"}},
        "rare": {"extends": "often", "memory": {"exemplars_per_class": 1}},
        "near": {"kind": "stamp", "spatial": {"kappa": 0.25}, "temporal": {"kappa": 0.25}},
        "steps": {"kind": "stamp", "ratio": 1.0, "temporal": {"every": 1, "past": "gradient"}},
    },
}
SETTING = "settings.one"
SHARED = {**SPLIT, "order": "common"}
DOMAINS = {"kind": "domains", "clients": 4, "tasks": 1}
ABSENT = type("Absent", (), {"__repr__": lambda _: "absent"})()
NAN = float("nan")

# Options that sources need besides the invalid one.
GLYPHS = {"source": "glyphs", "classes": 5, "train_per_class": 6, "test_per_class": 4}
FOLDER = {"source": "folder", "root": "set", "size": 6}
DIVIDED = {**FOLDER, "test_share": 0.5}
NPZ = {"source": "npz", "file": "a.npz"}
DIGIT10 = {"source": "digit10"}

S = "params/settings.yaml: one"
M = "params/methods.yaml:"
SWEEP = "params.yaml: sweeps.kappa"
KEYS = "it must be a list of keys under settings.one. or methods.near."
QUOTED = "written without quotes as"
INSIDE = "it must be a path without '..', or an absolute one"
Row = tuple[str, object, str]
PROFILE: list[Row] = [
    ("grid.method", ["fedagv", "rare"], f"{M} 'fedagv' is unknown; did you mean 'fedavg'? known:"),
    ("grid.method", ABSENT, "params.yaml: grid.method is None; it must be a list of names"),
    ("grid.seed", ["0"], "params.yaml: grid: 'seed' is unknown; did you mean 'seeds'? known: meth"),
    # settings and presets outside the grid
    ("settings.other", {"data": {"source": "digits"}}, "params/settings.yaml: other.split is miss"),
    # what extends something unknown or, at once or through another, itself
    ("methods.rare.extends", "oftn", f"{M} 'oftn' is unknown; did you mean 'often'? known: "),
    ("methods.rare.extends", ["often"], f"{M} ['often'] is unknown; "),
    ("methods.often.extends", "rare", f"{M} rare.extends is 'often'; it must be another, whi"),
    (f"{SETTING}.extends", "one", f"{S}.extends is 'one'; it must be another, which does not"),
]
NAMES: list[Row] = [
    ("training.momentm", 0.1, ".training: 'momentm' is unknown; did you mean 'momentum'? known: "),
    ("data.source", ABSENT, ".data.source is missing"),
    ("name", "two", ".name is 'two'; it must be absent: a setting's key is its na"),
]
TYPES: list[Row] = [
    (name, value, f".{name} is {value!r}; it must be {right}")
    for name, value, right in (
        # to YAML 1.1, 1e-3 is text: it wants a point and a sign
        ("training.lr", yaml.safe_load("1e-3"), f"a number, {QUOTED} 0.001"),
        # Python writes 1e-05, which YAML 1.1 would read as text again
        ("training.lr", "1e-5", f"a number, {QUOTED} 1.0e-05"),
        *(("training.lr", value, "a number") for value in ("fast", "nan", True, None, [0.1])),
        *(("training.lr", value, "a finite number") for value in (NAN, float("inf"))),
        ("training.batch_size", "32", f"a whole number, {QUOTED} 32"),
        ("training.flip", 1, "true or false"),
        ("network.channels", 16, "a list"),
    )
]
COMBINATIONS: list[Row] = [
    (
        "split.classes_per_task",
        ABSENT,
        ".split.classes_per_task is None; it must be a number of classes, as kind is 'classes'",
    ),
    (
        "split",
        {**DOMAINS, "classes_per_task": 2},
        ".split.classes_per_task is 2; it must be absent, as kind is 'domains'",
    ),
    ("split.common_clients", 1, ".split.common_clients is 1; it must be 0 unless "),
    ("split.common_clients", 5, ".split.common_clients is 5; it must be at most cl"),
    ("split.min_samples", 2, ".split.min_samples is 2; it must be absent unless "),
    ("split.alpha", 0.5, ".split.order is 'independent'; it must be 'common' or 'g"),
    (
        "split",
        {**SHARED, "alpha": 1, "images_per_class": 5},
        ".split.images_per_class is 5; it must be absent where alpha is set",
    ),
    ("split.joining", 4, ".split.joining is 4; it must be so few that a client is"),
    (
        "split.classes_per_client",
        3,
        ".split.classes_per_client is 3; it must be at most classes_per_task = 2",
    ),
    (
        "training",
        {**TRAINING, "participation": 0.5, "clients_per_round": 2},
        ".training.participation is 0.5; it must be absent, as clients_per_round is set",
    ),
    ("training.lr_end", 0.1, ".training.lr_end is 0.1; it must be absent, as sched"),
    *(
        (
            "training",
            {**TRAINING, "lr": 0.1, "schedule": "cosine", "lr_end": value},
            f".training.lr_end is {value}; it must be above 0 and at most lr = 0.1, as schedule",
        )
        for value in (None, 0.2)
    ),
    ("network.channels", [], ".network.channels is []; it must be at least one num"),
    ("network.channels", [4, 0], ".network.channels[1] is 0; it must be between 1"),
    ("network", {"kind": "mlp", "norm": "batch"}, ".network.norm is 'batch'; it must be 'none'"),
    ("network.stem", "small", ".network.stem is 'small'; it must be absent, as ki"),
]
METHODS: list[Row] = [
    ("rare.memory.selecton", "uniform", "rare.memory: 'selecton' is unknown; did you"),
    ("often.memory", {"options": {"tau": 1}}, "often.memory.options: 'tau' is unknown; known: "),
    (
        "replay.memory",
        {"selection": "sre2l"},
        "replay.weight is None; it must be a number: sre2l makes soft labels",
    ),
    ("stamp.weight", 1.0, "stamp.weight is 1.0; it must be None, as ratio is 0: no b"),
    ("stamp.spatial.length", "current", "stamp.spatial.length is 'current'; it m"),
    ("stamp.temporal.every", 4, "stamp.temporal.past is 'trajectory'; it must be 'gra"),
    ("steps.ratio", 0.0, "steps.ratio is 0.0; it must be above 0, as temporal.every i"),
    ("steps.weight", 1.0, "steps.weight is 1.0; it must be null, as temporal.every is"),
    ("steps.temporal.source", "all data", "steps.temporal.source is 'all data'; it mu"),
    ("steps.memory.exemplars_per_class", 0, "steps.memory.exemplars_per_class is 0; i"),
    ("stamp.alternate", True, "stamp.prototype is 0.0; it must be above 0, as alte"),
    ("fbl.weight", 1, "fbl.weight is 1.0; it must be absent: `weights` has its place"),
    ("fedcil.adversarial", 0, "fedcil.replay is 0.5; it must be 0, as adversarial is"),
    ("glfc.loss", "cross_entropy", "glfc.loss is 'cross_entropy'; it must be 'binary"),
    (
        "refed",
        {"lam": 0.02, "pim_lr": 0.1},
        "refed.lam is 0.02; it must be above 0.02439, so that pim_lr x (1 - lam) / (2 lam)",
    ),
    ("tagfed.server_lr", 2, "tagfed.server_lr is 2.0; it must be 1 unless exchange"),
    ("target.images", 5120, "target.warmup is 20; it must be below 20, the rounds th"),
    (
        "often.memory",
        {"selection": "ocs", "options": {"batch_candidates": 21}},
        "often.memory.options.batch_candidates is 21; it must be at most batch_size, 20",
    ),
]
OPTIONS: list[tuple[dict[str, Any], str]] = [  # of sources, and the message after "one.data"
    ({**FOLDER, "domains": ["a"]}, ".test_share is None; it must be above 0 and below 1"),
    ({**DIVIDED, "domains": ["a", "a"]}, ".domains is ['a', 'a']; it must be at least one folder"),
    ({**FOLDER, "root": "s/../../o"}, f".root is 's/../../o'; {INSIDE}"),
    ({**DIVIDED, "domains": ["/etc"]}, ".domains is '/etc'; it must be the name of a folder in"),
    (
        {**GLYPHS, "face_domains": True, "train_per_class": 99},
        ".test_per_class is 4; it must be at least 16, one per face, as face_domains is true",
    ),
    ({"source": "npz"}, ".file is ''; it must be the name of an .npz file"),
    ({"source": "npz", "file": "x/../b.npz"}, f".file is 'x/../b.npz'; {INSIDE}"),
    ({**DIGIT10, "sets": ["mnist", "uspa"]}, ".sets: 'uspa' is unknown; did you mean 'usps'?"),
    ({**DIGIT10, "sets": ["usps", "usps"]}, ".sets is ['usps', 'usps']; it must be at least one"),
]
SWEEPS: list[tuple[str, object, str]] = [  # a field, its value, and the message
    ("keys", ["methods.near.spatial.kapa"], f"{M} near.spatial: 'kapa' is unknown; did you mean"),
    ("keys", ["methods.far.kappa"], f".keys is ['methods.far.kappa']; {KEYS}"),
    ("values", ["../x"], ".values is '../x'; it must be a number, a word or true, false or null"),
    ("seeds", "2to1", ".seeds is '2to1'; it must be a number such as '3' or a rising range such "),
    ("figure", "coreset", ".figure 'coreset' is unknown; did you mean 'coresets'?"),
]


def changed(place: str, value: object) -> dict[str, Any]:
    params = deepcopy(VALID)
    *path, last = place.split(".")
    block = params
    for key in path:
        block = block.setdefault(key, {})
    if value is ABSENT:
        del block[last]
    else:
        block[last] = value
    return params


def check(params: dict[str, Any]) -> int:
    """Check a profile and its sweeps; returns the number of experiments of its grid."""
    experiments = check_params(params)
    for name in params["sweeps"]:
        sweep_experiments(name, params)
    return experiments


def test_valid_parameters_are_accepted():
    """1 setting x 3 methods x 2 ranges of seeds."""
    assert check(deepcopy(VALID)) == 6


@dataclass(frozen=True)
class Numbers:
    counts: tuple[PositiveInt, ...] = ()
    rounds: NonNegativeInt | None = None
    lr: Positive = 1.0
    weight: NonNegative = 0.0
    theta: UnitInterval = 0.0
    momentum: Fraction = 0.0
    held_out: OpenFraction = 0.5
    share: Share = 1.0
    layers: Annotated[int, at_least(2)] = 2
    size: Annotated[int, between(8, 64)] = 8


@pytest.mark.parametrize(
    ("name", "within", "beyond", "right"),
    [
        ("counts", ([1, 2],), ([0],), "at least 1"),
        ("rounds", (0, None), (-1,), "at least 0"),
        ("lr", (1e-9,), (0, -1.0), "above 0"),
        ("weight", (0, 1e9), (-1e-9,), "at least 0"),
        ("theta", (0, 1), (-0.1, 1.5), "between 0 and 1"),
        ("momentum", (0, 0.99), (-0.1, 1), "at least 0 and below 1"),
        ("held_out", (1e-9, 0.99), (0, 1), "above 0 and below 1"),
        ("share", (1e-9, 1), (0, 1.1), "above 0 and at most 1"),
        ("layers", (2,), (1,), "at least 2"),
        ("size", (8, 64), (7, 65), "between 8 and 64"),
    ],
)
def test_a_value_beyond_a_limit_is_refused(name, within, beyond, right):
    for value in within:
        build(Numbers, {name: value}, "here")
    for value in beyond:
        with pytest.raises(ParameterError, match=rf"here\.{name}.* is .*; it must be {right}$"):
            build(Numbers, {name: value}, "here")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (SETTING + ".split", {**SPLIT, "order": "mixed", "common_clients": 4}),
        (SETTING + ".data", {**FOLDER, "domains": ["photo/real"], "test_share": 0.5}),
        (SETTING + ".data", {**NPZ, "file": "/data/../a.npz"}),
        ("methods.target", {"images": 2560, "adversarial_weight": 0}),  # as published, no student
        ("methods.replay", {"memory": {"selection": "sre2l"}, "weight": 0.5}),
        ("methods.replay", {"memory": {"selection": "sre2l"}, "ratio": 0}),  # not mixed in
    ],
)
def test_a_combination_that_is_possible_is_accepted(place, value):
    check(changed(place, value))


ROWS: list[tuple[str, object, str | tuple[str, ...]]] = [
    *PROFILE,
    *((f"{SETTING}.{name}", v, f"{S}{text}") for name, v, text in NAMES + TYPES + COMBINATIONS),
    *((f"methods.{name}", value, f"{M} {message}") for name, value, message in METHODS),
    *((f"{SETTING}.data", options, f"{S}.data{message}") for options, message in OPTIONS),
    *(
        (f"sweeps.kappa.{name}", value, (message, f"{SWEEP}{message}"))
        for name, value, message in SWEEPS
    ),
]


@pytest.mark.parametrize(("place", "value", "message"), ROWS, ids=lambda v: str(v)[:60])
def test_an_invalid_value_is_named_with_its_file_and_key(place, value, message):
    with pytest.raises(ParameterError) as error:
        check(changed(place, value))
    text = str(error.value).removeprefix(f"{SWEEP} with 0.0: ")
    assert text.startswith(message) and "\n" not in text


@pytest.mark.parametrize("value", ["", "2to0", "-1", "1.5", "0-2", "to3", "0to1to2", None])
def test_seeds_that_are_none(value):
    with pytest.raises(ParameterError, match=f"seeds is {value!r}; it must be a number such as"):
        parse_seeds(value)
