"""Parameter files: every slip is refused before anything runs, in one line that names it."""

import itertools
import shutil
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from ruamel.yaml import YAML

from stamp_core.config.decode import ParameterError, build, to_plain
from stamp_core.config.params import (
    PAGES,
    PROFILES,
    check_names,
    expand_grid,
    parse_seeds,
    read_params,
    read_setting,
    read_yaml,
)
from stamp_core.config.schema import Network, Setting, Split, Training
from stamp_core.core.paths import ROOT
from stamp_core.coresets.selection import base as coresets
from stamp_core.engine.experiment import check_params

GOOD: dict[str, Any] = {
    "file": "params.yaml",
    "grid": {"setting": ["one"], "method": ["fedavg", "often", "rare"], "seeds": ["0to2", 5]},
    "ablation": {"baselines": ["often"], "method": ["rare"]},
    "sweeps": {},
    "settings": {
        "one": {
            "data": {"source": "digits"},
            "split": {"kind": "classes", "clients": 4, "tasks": 3, "classes_per_task": 2},
            "network": {"kind": "cnn", "channels": [4]},
            "training": {"rounds": 2, "epochs": 1, "batch_size": 16, "lr": 0.1},
        }
    },
    "methods": {
        "fedavg": None,
        "often": {"kind": "replay", "memory": {"exemplars_per_class": 5, "selection": "uniform"}},
        "rare": {"extends": "often", "memory": {"exemplars_per_class": 1}},
    },
}
ONE = "settings.one."  # where most slips are made


class Absent:
    """What is taken out; always of one name, as names of tests must be."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()
DOMAINS = {"kind": "domains", "clients": 4, "tasks": 1}

# Where the slip is made, what is written there, and the message.
S, M = "params/settings.yaml: one", "params/methods.yaml:"
SLIPS: list[tuple[str, object, str]] = [
    # names
    (
        ONE + "training.momentm",
        0.1,
        f"{S}.training: 'momentm' is unknown; did you mean 'momentum'? known: batch_size, buffers, "
        "deterministic, dropout, epochs, flip, lr, momentum, participation, rounds, shift, "
        "weight_decay",
    ),
    (
        ONE + "trainig",
        {},
        f"{S}: 'trainig' is unknown; did you mean 'training'? "
        "known: data, diagnostics, name, network, split, training",
    ),
    (
        ONE + "network.colour",
        "red",
        f"{S}.network: 'colour' is unknown; known: channels, features, kind, micro_batch_size, "
        "norm, precision, pretrained, stem",
    ),
    (
        ONE + "split.7",
        1,
        f"{S}.split: '7' is unknown; known: alpha, classes_per_task, clients, "
        "common_clients, cycles, images_per_class, kind, min_samples, order, tasks",
    ),
    (
        ONE + "network.kind",
        "cnnn",
        f"{S}.network.kind 'cnnn' is unknown; did you mean 'cnn'? "
        "known: cnn, fcn, lenet, mlp, resnet18, swin_t",
    ),
    (
        ONE + "network.kind",
        ["cnn"],
        f"{S}.network.kind ['cnn'] is unknown; did you mean 'cnn'? "
        "known: cnn, fcn, lenet, mlp, resnet18, swin_t",
    ),
    (
        ONE + "training.buffers",
        None,
        f"{S}.training.buffers None is unknown; known: frozen, local, shared",
    ),
    (
        ONE + "data.source",
        "digit",
        f"{S}.data.source 'digit' is unknown; did you mean 'digits'? known: {{sources}}",
    ),
    (
        ONE + "data.source",
        ["digits"],
        f"{S}.data.source ['digits'] is unknown; did you mean 'digits'? known: {{sources}}",
    ),
    (
        ONE + "data.test_shar",
        0.5,
        f"{S}.data: 'test_shar' is unknown; did you mean 'test_share'? known: test_share",
    ),
    (
        ONE + "diagnostics",
        {"feature": 10},
        f"{S}.diagnostics: 'feature' is unknown; did you mean 'features'? "
        "known: angles, displacements, features, memory",
    ),
    (
        "methods.often.rati",
        5,
        f"{M} often: 'rati' is unknown; did you mean 'ratio'? "
        "known: anchor, balanced, memory, ratio, server_lr, weight",
    ),
    (
        "methods.often.memory.exemplars",
        5,
        f"{M} often.memory: 'exemplars' is unknown; did you mean 'exemplars_per_class'? known: ",
    ),
    (
        "methods.often.memory.selection",
        "herdin",
        f"{M} often.memory.selection 'herdin' is unknown; did you mean 'herding'? known: {{rules}}",
    ),
    (
        "methods.often.memory.selection",
        ["herding"],
        f"{M} often.memory.selection is ['herding']; it must be text",
    ),
    (
        "methods.rare.memory.selecton",
        "uniform",
        f"{M} rare.memory: 'selecton' is unknown; did you mean 'selection'? known: ",
    ),
    (
        "methods.rare.extends",
        "oftn",
        f"{M} 'oftn' is unknown; did you mean 'often'? known: fedavg, often, rare",
    ),
    ("methods.often.extends", "rare", f"{M} often.extends is 'often'; it must be "),
    (
        "methods.often.kind",
        "repaly",
        f"{M} kind 'repaly' is unknown; did you mean 'replay'? known: {{methods}}",
    ),
    (
        "grid.method",
        ["fedagv", "rare", "often"],
        f"{M} 'fedagv' is unknown; did you mean 'fedavg'? known: fedavg, often, rare",
    ),
    ("grid.method", [["fedavg"]], "params.yaml: grid.method is [['fedavg']]; it must be "),
    ("grid.setting", ["two"], "params/settings.yaml: 'two' is unknown; known: one"),
    ("grid.setting", [{"one": 1}], "params.yaml: grid.setting is [{'one': 1}]; it must be "),
    ("grid.seeds", 3, "params.yaml: grid.seeds is 3; it must be a list of names"),
    (
        "grid.seed",
        ["0"],
        "params.yaml: grid: 'seed' is unknown; did you mean 'seeds'? known: method, seeds, setting",
    ),
    (
        "ablation.baseline",
        ["fedavg"],
        "params.yaml: ablation: 'baseline' is unknown; did you mean 'baselines'? "
        "known: baselines, method",
    ),
    (
        "ablation.baselines",
        ["fedagv"],
        "params.yaml: ablation.baselines is 'fedagv'; it must be in grid.method",
    ),
    ("ablation.baselines", "fedavg", "params.yaml: ablation.baselines is 'fedavg'; it must "),
    (
        ONE + "network.micro_batch_size",
        0,
        f"{S}.network.micro_batch_size is 0; it must be at least 1",
    ),
    (
        ONE + "network.precision",
        "float16",
        f"{S}.network.precision 'float16' is unknown; did you mean 'bfloat16'? "
        "known: bfloat16, float32",
    ),
    # keys of earlier versions
    (ONE + "training.rate", 0.1, f"{S}.training: 'rate' is unknown; it is now 'lr'; known: "),
    (ONE + "training.batch", 1, f"{S}.training: 'batch' is unknown; it is now 'batch_size'; "),
    (ONE + "observe", {}, f"{S}: 'observe' is unknown; it is now 'diagnostics'; known: "),
    (
        ONE + "network.at_once",
        4,
        f"{S}.network: 'at_once' is unknown; it is now 'micro_batch_size'; known: ",
    ),
    ("methods.often.step", 1, f"{M} often: 'step' is unknown; it is now 'server_lr'; known: "),
    (
        "methods.often.memory.rule",
        "uniform",
        f"{M} often.memory: 'rule' is unknown; it is now 'selection'; known: ",
    ),
    (
        "methods.often.memory.per_class",
        1,
        f"{M} often.memory: 'per_class' is unknown; it is now 'exemplars_per_class'; known: ",
    ),
    ("methods.rare.like", "often", f"{M} rare: 'like' is unknown; it is now 'extends'"),
    (
        "ablation.beside",
        [],
        "params.yaml: ablation: 'beside' is unknown; it is now 'baselines'; known: ",
    ),
    # what is missing
    (ONE + "training.lr", ABSENT, f"{S}.training.lr is missing"),
    (ONE + "training", ABSENT, f"{S}.training is missing"),
    (ONE + "data.source", ABSENT, f"{S}.data.source is missing"),
    ("grid.method", ABSENT, "params.yaml: grid.method is None; it must be a list of names"),
    # types
    (
        ONE + "training.lr",
        yaml.safe_load("1e-3"),  # the text '1e-3': YAML 1.1 wants a point and a sign
        f"{S}.training.lr is '1e-3'; it must be a number, written without quotes as 0.001",
    ),
    (
        ONE + "training.lr",
        "1e-5",  # Python writes 1e-05, which YAML 1.1 would read as text again
        f"{S}.training.lr is '1e-5'; it must be a number, written without quotes as 1.0e-05",
    ),
    (
        ONE + "training.batch_size",
        "1234567",
        f"{S}.training.batch_size is '1234567'; "
        "it must be a whole number, written without quotes as 1234567",
    ),
    (ONE + "training.lr", "fast", f"{S}.training.lr is 'fast'; it must be a number"),
    (ONE + "training.lr", "nan", f"{S}.training.lr is 'nan'; it must be a number"),
    (ONE + "training.lr", float("nan"), f"{S}.training.lr is nan; it must be a finite number"),
    (ONE + "training.lr", float("inf"), f"{S}.training.lr is inf; it must be a finite number"),
    (ONE + "training.lr", True, f"{S}.training.lr is True; it must be a number"),
    (ONE + "training.lr", None, f"{S}.training.lr is None; it must be a number"),
    (ONE + "training.lr", [0.1], f"{S}.training.lr is [0.1]; it must be a number"),
    (ONE + "training.batch_size", "2.5", f"{S}.training.batch_size is '2.5'; it must be a whole "),
    (ONE + "training.batch_size", 16.0, f"{S}.training.batch_size is 16.0; it must be a whole num"),
    (ONE + "split.clients", True, f"{S}.split.clients is True; it must be a whole number"),
    (ONE + "training.flip", "yes", f"{S}.training.flip is 'yes'; it must be true or false"),
    (ONE + "training.flip", 1, f"{S}.training.flip is 1; it must be true or false"),
    (ONE + "network.channels", 16, f"{S}.network.channels is 16; it must be a list"),
    (
        ONE + "network.channels",
        [16, "32"],
        f"{S}.network.channels is '32'; it must be a whole number, written without quotes as 32",
    ),
    (ONE + "network", "cnn", f"{S}.network is 'cnn'; it must be a block of keys"),
    (ONE + "data", "digits", f"{S}.data is 'digits'; it must be a block of keys"),
    ("settings.one", "digits", f"{S} is 'digits'; it must be a block of keys"),
    ("methods.fedavg", 1.0, f"{M} fedavg is 1.0; it must be a block of keys"),
    (
        "methods.often.memory.exemplars_per_class",
        "5",
        f"{M} often.memory.exemplars_per_class is '5'; "
        "it must be a whole number, written without quotes as 5",
    ),
    ("methods.often.memory", 5, f"{M} often.memory is 5; it must be a block of keys"),
    ("grid.setting", "one", "params.yaml: grid.setting is 'one'; it must be a list of names"),
    # impossible values
    (ONE + "name", "two", f"{S}.name is 'two'; it must be absent: a setting's key is its name"),
    (ONE + "split.clients", 0, f"{S}.split.clients is 0; it must be at least 1"),
    (ONE + "training.lr", -0.1, f"{S}.training.lr is -0.1; it must be at least 0"),
    (
        ONE + "split.classes_per_task",
        ABSENT,
        f"{S}.split.classes_per_task is None; it must be a number of classes, as kind is 'classes'",
    ),
    (
        ONE + "split",
        {**DOMAINS, "classes_per_task": 2},
        f"{S}.split.classes_per_task is 2; it must be absent, as kind is 'domains'",
    ),
    (
        ONE + "split.common_clients",
        1,
        f"{S}.split.common_clients is 1; it must be 0 unless order is 'mixed'",
    ),
    (
        ONE + "split.common_clients",
        5,
        f"{S}.split.common_clients is 5; it must be at most clients = 4",
    ),
    (
        ONE + "split.alpha",
        0.5,
        f"{S}.split.order is 'independent'; "
        "it must be 'common' or 'given' where alpha is set: clients share tasks",
    ),
    (
        ONE + "split",
        {**DOMAINS, "order": "common", "alpha": 1, "images_per_class": 5},
        f"{S}.split.images_per_class is 5; it must be absent where alpha is set",
    ),
    (ONE + "network.channels", [], f"{S}.network.channels is []; it must be at least one num"),
    (ONE + "data.test_share", 1, f"{S}.data.test_share is 1.0; it must be above 0 and below 1"),
    (
        "methods.often.memory.exemplars_per_class",
        -1,
        f"{M} often.memory.exemplars_per_class is -1; it must be at least 0",
    ),
    (ONE + "diagnostics", {"features": -1}, f"{S}.diagnostics.features is -1; it must be at least"),
    ("methods.often.server_lr", 0, f"{M} often.server_lr is 0.0; it must be above 0"),
]


def changed(where: str, value: object) -> dict[str, Any]:
    """The good parameters with one of them changed or taken away."""
    params = deepcopy(GOOD)
    *path, last = where.split(".")
    block = params
    for key in path:
        block = block[key]
    if value is ABSENT:
        del block[last]
    else:
        block[last] = value
    return params


def names(folder: str) -> str:
    """What the files of a folder of the package are called."""
    files = (ROOT / "stamp_core" / folder).glob("[!_]*.py")
    return ", ".join(sorted(file.stem for file in files))


def leaves(tree: object, where: str = "") -> list[tuple[str, type, object]]:
    """Every value with its path and type."""
    if isinstance(tree, Mapping):
        return [leaf for key in tree for leaf in leaves(tree[key], f"{where}.{key}")]
    if isinstance(tree, list):
        return [leaf for k, item in enumerate(tree) for leaf in leaves(item, f"{where}.{k}")]
    return [(where, type(tree), tree)]


def test_without_a_slip_nothing_is_refused() -> None:
    """1 setting x 3 methods x 2 ranges of seeds."""
    assert check_params(deepcopy(GOOD)) == 6


@pytest.mark.parametrize(("where", "value", "message"), SLIPS, ids=lambda v: str(v)[:40])
def test_a_slip_is_named_with_its_file_and_key(where: str, value: object, message: str) -> None:
    message = message.replace("{methods}", names("methods"))
    message = message.replace("{sources}", names("data/sources"))
    message = message.replace("{rules}", ", ".join(coresets.selection_rules()))
    with pytest.raises(ParameterError) as error:
        check_params(changed(where, value))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_settings_and_methods_outside_the_grid_are_checked() -> None:
    params = deepcopy(GOOD)
    params["settings"]["other"] = {**GOOD["settings"]["one"], "split": {"kind": "sets"}}
    with pytest.raises(ParameterError, match=r"^params/settings.yaml: other.split.clients is miss"):
        check_params(params)
    params = deepcopy(GOOD)
    params["methods"]["other"] = {"kind": "replay", "ratio": -1}
    with pytest.raises(ParameterError, match=r"^params/methods.yaml: other.ratio is -1.0; it must"):
        check_params(params)


SPLIT = {"kind": "classes", "clients": 4, "tasks": 3, "classes_per_task": 2}
NETWORK = {"kind": "cnn"}
ALPHA = {**SPLIT, "order": "common", "alpha": 1.0}
TRAINING = {"rounds": 2, "epochs": 1, "batch_size": 16, "lr": 0.1}


@pytest.mark.parametrize(
    ("cls", "base", "name", "wrong", "right", "words"),
    [
        (Split, SPLIT, "clients", 0, 1, "at least 1"),
        (Split, SPLIT, "tasks", 0, 1, "at least 1"),
        (Split, SPLIT, "cycles", 0, 1, "at least 1"),
        (Split, SPLIT, "classes_per_task", 0, 1, "at least 1"),
        (Split, SPLIT, "images_per_class", 0, 1, "at least 1"),
        (Split, ALPHA, "min_samples", -1, 0, "at least 0"),
        (Split, SPLIT, "min_samples", 2, 1, "absent unless alpha is set"),
        (Split, SPLIT, "common_clients", -1, 0, "at least 0"),
        (Split, {**SPLIT, "order": "mixed"}, "common_clients", 5, 4, "at most clients = 4"),
        (Split, {**SPLIT, "order": "common"}, "alpha", 0.0, 1e-9, "above 0"),
        (Split, {**SPLIT, "order": "common"}, "alpha", float("nan"), 1.0, "above 0"),
        (Network, NETWORK, "features", 0, 1, "at least 1"),
        (Network, {"kind": "mlp"}, "norm", "batch", "none", "'none', as kind is 'mlp'"),
        (
            Network,
            {"kind": "resnet18"},
            "norm",
            "none",
            "group",
            "'batch' or 'group', as kind is 'resnet18'",
        ),
        (Network, NETWORK, "channels", (4, 0), (4, 1), "at least one number above 0"),
        (Training, TRAINING, "rounds", 0, 1, "at least 1"),
        (Training, TRAINING, "batch_size", 0, 1, "at least 1"),
        (Training, TRAINING, "epochs", -1, 0, "at least 0"),
        (Training, TRAINING, "lr", -1e-9, 0.0, "at least 0"),
        (Training, TRAINING, "lr", float("nan"), 1.0, "at least 0"),
        (Training, TRAINING, "weight_decay", -1e-9, 0.0, "at least 0"),
        (Training, TRAINING, "shift", -1, 0, "at least 0"),
        (Training, TRAINING, "momentum", -0.1, 0.0, "at least 0 and below 1"),
        (Training, TRAINING, "momentum", 1.0, 0.99, "at least 0 and below 1"),
        (Training, TRAINING, "dropout", -0.1, 0.0, "at least 0 and below 1"),
        (Training, TRAINING, "dropout", 1.0, 0.99, "at least 0 and below 1"),
        (Training, TRAINING, "participation", 0.0, 1e-9, "above 0 and at most 1"),
        (Training, TRAINING, "participation", 1.1, 1.0, "above 0 and at most 1"),
    ],
)
def test_bounds(
    cls: type[Any], base: dict[str, Any], name: str, wrong: object, right: object, words: str
) -> None:
    """The last value that is right is taken, one beyond it is refused."""
    assert getattr(cls(**{**base, name: right}), name) == right
    shown = list(wrong) if isinstance(wrong, tuple) else wrong
    with pytest.raises(ParameterError) as error:
        cls(**{**base, name: wrong})
    assert str(error.value) == f"{name} is {shown!r}; it must be {words}"


def test_whole_numbers_and_lists_become_what_the_fields_are() -> None:
    setting = read_setting("one", changed(ONE + "training.lr", 1))
    assert repr(setting.training.lr) == "1.0"
    assert setting.network.channels == (4,) and setting.name == "one"


def test_a_field_may_have_a_factory_for_its_default() -> None:
    @dataclass(frozen=True)
    class Own:
        weights: tuple[float, ...] = field(default_factory=lambda: (1.0,))

    assert build(Own, {}, "here").weights == (1.0,)


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("3", [3]), (3, [3]), ("0to2", [0, 1, 2]), ("4to4", [4]), ("9to10", [9, 10])],
)
def test_seeds(text: Any, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "2to0", "-1", "1.5", "0-2", "to3", "0to", "0to1to2", None])
def test_seeds_that_are_none(text: Any) -> None:
    with pytest.raises(ParameterError) as error:
        parse_seeds(text)
    assert str(error.value) == (
        f"seeds is {text!r}; it must be a number such as '3' or a rising range such as '0to2'"
    )


def test_a_page_is_every_combination_with_seeds_as_text() -> None:
    grid = {"setting": ["a", "b"], "method": ["m", "n", "v"], "seeds": ["0to1", 2]}
    variants = {"baselines": ["n"], "method": ["v"]}
    params = {"file": "f", "grid": grid, "ablation": variants, "tour": {**grid, "method": ["m"]}}
    pages = {page: list(expand_grid(page, params)) for page in PAGES}
    assert pages["grid"] == list(itertools.product("ab", "mnv", ("0to1", "2")))
    assert pages["comparison"] == list(itertools.product("ab", "mn", ("0to1", "2")))
    assert pages["ablation"] == list(itertools.product("ab", "nv", ("0to1", "2")))
    assert pages["tour"] == list(itertools.product("ab", "m", ("0to1", "2")))
    assert list(expand_grid("tour.b", params)) == [("b", "m", "0to1"), ("b", "m", "2")]


def test_further_grids_follow_the_first_one_on_every_page() -> None:
    """Baselines alone show no part of STAMP: setting c is not on the page of the ablation."""
    grid = {"setting": ["a"], "method": ["m", "n", "v"], "seeds": ["0"]}
    more = {"setting": ["a"], "method": ["n", "v"], "seeds": ["1"]}
    returning = {"setting": ["c"], "method": ["n"], "seeds": ["0"]}
    blocks = {"grid": grid, "more_seeds": more, "returning_classes": returning}
    ablation = {"baselines": ["n"], "method": ["v"]}
    params = {"file": "f", **blocks, "ablation": ablation}
    pages = {page: list(expand_grid(page, params)) for page in ("grid", "comparison", "ablation")}
    assert pages["comparison"] == [
        ("a", "m", "0"),
        ("a", "n", "0"),
        ("a", "n", "1"),
        ("c", "n", "0"),
    ]
    assert pages["ablation"] == [("a", m, seed) for seed in "01" for m in "nv"]
    assert pages["grid"] == sorted(
        {*pages["comparison"], *pages["ablation"]}, key=lambda run: (run[0], run[2], run[1])
    )
    assert list(expand_grid("comparison.c", params)) == [("c", "n", "0")]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("ablations", "page 'ablations' is unknown; did you mean 'ablation'"),
        ("grid.on", "params.yaml: grid.setting 'on' is unknown; did you mean 'one'"),
    ],
)
def test_an_unknown_page_is_refused(page: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        list(expand_grid(page, deepcopy(GOOD)))


def test_plain_is_what_json_holds() -> None:
    setting = read_setting("one", deepcopy(GOOD))
    expected = {
        "name": "one",
        "data": {"source": "digits"},
        "split": {**SPLIT, "cycles": 1, "order": "independent", "common_clients": 0}
        | {"alpha": None, "min_samples": 1, "images_per_class": None},
        "network": {"kind": "cnn", "features": 64, "channels": [4], "norm": "none"}
        | {
            "stem": "published",
            "pretrained": None,
            "precision": "float32",
            "micro_batch_size": None,
        },
        "training": {**TRAINING, "momentum": 0.0, "weight_decay": 0.0, "participation": 1.0}
        | {"dropout": 0.0, "buffers": "shared", "shift": 0, "flip": False, "deterministic": True},
        "diagnostics": {"angles": False, "displacements": False, "features": 0, "memory": 0},
    }
    assert leaves(to_plain(setting)) == leaves(expected)
    assert build(Setting, to_plain(setting), "again") == setting
    assert to_plain([(1, {2: (3,)})]) == [[1, {"2": [3]}]]


# --- the files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the project's parameter files."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    shutil.copytree(ROOT / "params", tmp_path / "params")
    return tmp_path


@pytest.mark.parametrize("profile", PROFILES)
def test_the_profiles_of_the_project_are_valid(profile: str) -> None:
    params = read_params(profile)
    assert check_params(params) == len(list(expand_grid("grid", params))) > 0


def test_every_profile_is_read_alike_by_all_yaml_parsers() -> None:
    """PyYAML (papermill, notebooks) reads YAML 1.1, ruamel (DVC, this project) YAML 1.2."""
    for path in [ROOT / "params.yaml", *sorted((ROOT / "params").glob("*.yaml"))]:
        values = leaves(read_yaml(path))
        assert leaves(yaml.safe_load(path.read_text())) == values
        assert leaves(YAML(typ="safe", pure=True).load(path)) == values  # without the C parser
    assert leaves(yaml.safe_load("[1e-3, yes]")) != leaves([1e-3, "yes"])  # it can fail


def test_the_file_is_read_as_it_is_now(root: Path) -> None:
    first = read_params(root=root)
    first["methods"]["fedavg"]["server_lr"] = 2.0  # a caller's own copy
    assert read_params(root=root) == read_params() != first
    file = root / "params/methods.yaml"
    file.write_text(file.read_text().replace("server_lr: 1.0", "server_lr: 3.0", 1))
    assert read_params(root=root)["methods"]["fedavg"]["server_lr"] == 3.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "{path} does not exist; every parameter file is needed"),
        ("", "{path} must hold a block of keys, not None"),
        ("- a", "{path} must hold a block of keys, not ['a']"),
        (
            "grid: {}\nsweps: {}",
            "params.yaml: 'sweps' is unknown; did you mean 'sweeps'? "
            "known: ablation, grid, more_seeds, returning_classes, sweeps, tour",
        ),
        ("settings: {}", "params.yaml: settings belongs into params/settings.yaml"),
        ("budgets: {}", "params.yaml: 'budgets' is unknown; it is now 'sweeps'; known: "),
        ("grid: {}\nsweeps: {}", "params.yaml: ablation is None; it must be a block of keys"),
    ],
)
def test_a_profile_without_its_blocks_is_refused(
    root: Path, text: str | None, message: str
) -> None:
    path = root / "params.yaml"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ParameterError) as error:
        read_params(root=root)
    assert str(error.value).startswith(message.format(path=path))


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(ParameterError, match="profile 'quik' is unknown; did you mean 'quick'"):
        read_params("quik")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"grid:\n  - a\n b: 1", "line 3"),
        (b"rate: 0.1\nrate: 0.2", "duplicate key"),
        (b"rate: \xff", "unacceptable character #x00ff"),
    ],
)
def test_a_file_that_is_not_yaml_is_refused_in_one_line(
    root: Path, text: bytes, named: str
) -> None:
    path = root / "params.yaml"
    path.write_bytes(text)
    with pytest.raises(ParameterError) as error:
        read_params(root=root)
    message = str(error.value)
    assert message.startswith(f"{path} must be YAML: ") and "\n" not in message
    assert named in message


@pytest.mark.parametrize(
    "name", ["a; touch x #", "$(touch x)", "`x`", "a b", "ä", "", "../a", "a-b"]
)
@pytest.mark.parametrize("section", ["settings", "methods", "sweeps"])
def test_a_name_that_a_shell_or_a_folder_could_take_for_more_is_refused(
    root: Path, section: str, name: str
) -> None:
    file = "params.yaml" if section == "sweeps" else f"params/{section}.yaml"
    values = YAML(typ="safe").load(root / file)
    block = values[section] if section == "sweeps" else values
    block[name] = deepcopy(next(iter(block.values())))
    (root / file).write_text(yaml.safe_dump(values))
    where = "params.yaml: sweeps." if section == "sweeps" else f"{file}:"
    with pytest.raises(ParameterError) as error:
        read_params(root=root)
    assert str(error.value) == f"{where} {name!r} must be of letters, digits and underscores"


@pytest.mark.parametrize("name", ["a; touch x #", "a\ntouch x\n", "`x`", "", "../a", None, 1.5])
@pytest.mark.parametrize("axis", ["setting", "method", "seeds"])
@pytest.mark.parametrize("grid", ["grid", "more_seeds", "tour"])
def test_no_word_of_a_command_is_more_than_a_name(
    root: Path, grid: str, axis: str, name: object
) -> None:
    values = YAML(typ="safe").load(root / "params.yaml")
    values[grid][axis] = [*values[grid][axis], name]
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(
        ParameterError, match=r"seeds is|must be of letters|must be a list of names"
    ):
        check_names(read_params(root=root))


def test_the_names_of_the_projects_grids_are_words() -> None:
    for profile in ("default", "quick", "paper"):
        check_names(read_params(profile))
