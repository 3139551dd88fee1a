"""params.yaml: every slip is refused before anything runs, in one line that helps."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from ruamel.yaml import YAML

from stamp_core import config, coresets
from stamp_core.config import Network, ParameterError, Setting, Split, Training
from stamp_core.experiments import check, experiment
from stamp_core.paths import PARAMS

GOOD: dict[str, Any] = {
    "grid": {"setting": ["one"], "method": ["fedavg", "often"], "seeds": ["0to2", 5]},
    "ablation": {"setting": ["one"], "beside": ["often"], "method": ["rare"], "seeds": ["0to2"]},
    "sweeps": {
        "rate": {
            "label": "local rate",
            "setting": "one",
            "method": "often",
            "seeds": "0to2",
            "keys": ["settings.one.training.rate"],
            "values": [0.1, 0.2],
        }
    },
    "tiny": {"setting": ["one"], "method": ["fedavg"], "seeds": ["0"]},
    "tiny_sweeps": {},
    "budgets": {"setting": [], "method": [], "beside": [], "seeds": "0", "per_class": {}},
    "tiny_budgets": {"setting": [], "method": [], "beside": [], "seeds": "0", "per_class": {}},
    "alphas": {},
    "tiny_alphas": {},
    "paper": {"setting": ["one"], "method": ["fedavg", "rare"], "seeds": ["0to4"]},
    "paper_alphas": {},
    "settings": {
        "one": {
            "data": {"source": "digits"},
            "split": {"kind": "classes", "clients": 4, "tasks": 3, "classes_per_task": 2},
            "network": {"kind": "cnn", "channels": [4]},
            "training": {"rounds": 2, "epochs": 1, "batch": 16, "rate": 0.1},
        }
    },
    "methods": {
        "fedavg": None,
        "often": {"kind": "replay", "memory": {"per_class": 5, "rule": "uniform"}},
        "rare": {"like": "often", "memory": {"per_class": 1}},
    },
}
ONE = "settings.one."  # where most slips are made


class Absent:
    """What is taken out; always of one name, as names of tests must be."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()
DOMAINS = {"kind": "domains", "clients": 4, "tasks": 1}

# Where the slip is made, what is written there, and the whole message after "params.yaml: ".
SLIPS: list[tuple[str, object, str]] = [
    # names
    (
        ONE + "training.rat",
        0.1,
        "settings.one.training: 'rat' is unknown; did you mean 'rate'? known: batch, buffers, "
        "dropout, epochs, flip, momentum, participation, rate, rounds, shift, weight_decay",
    ),
    (
        ONE + "trainig",
        {},
        "settings.one: 'trainig' is unknown; did you mean 'training'? "
        "known: data, name, network, observe, split, training",
    ),
    (
        ONE + "network.colour",
        "red",
        "settings.one.network: 'colour' is unknown; known: at_once, channels, features, "
        "kind, norm, precision, pretrained, stem",
    ),
    (
        ONE + "split.7",
        1,
        "settings.one.split: '7' is unknown; known: alpha, classes_per_task, clients, "
        "common_clients, cycles, images_per_class, kind, min_samples, order, tasks",
    ),
    (
        ONE + "network.kind",
        "cnnn",
        "settings.one.network.kind 'cnnn' is unknown; did you mean 'cnn'? "
        "known: cnn, lenet, mlp, resnet18, swin_t",
    ),
    (
        ONE + "training.buffers",
        None,
        "settings.one.training.buffers None is unknown; known: frozen, local, shared",
    ),
    (
        ONE + "data.source",
        "digit",
        "settings.one.data.source 'digit' is unknown; did you mean 'digits'? known: {sources}",
    ),
    (
        ONE + "data.test_shar",
        0.5,
        "settings.one.data: 'test_shar' is unknown; did you mean 'test_share'? known: test_share",
    ),
    (
        ONE + "observe",
        {"feature": 10},
        "settings.one.observe: 'feature' is unknown; did you mean 'features'? "
        "known: angles, displacements, features, memory",
    ),
    (
        "methods.often.rati",
        5,
        "methods.often: 'rati' is unknown; did you mean 'ratio'? "
        "known: balanced, memory, ratio, step, temperature, weight",
    ),
    (
        "methods.often.memory.perclass",
        5,
        "methods.often.memory: 'perclass' is unknown; did you mean 'per_class'? "
        "known: alpha, merge, options, per_class, rule, space",
    ),
    (
        "methods.often.memory.rule",
        "herdin",
        "methods.often.memory.rule 'herdin' is unknown; did you mean 'herding'? known: {rules}",
    ),
    (
        "methods.rare.memory.rul",
        "uniform",
        "methods.rare.memory: 'rul' is unknown; did you mean 'rule'? "
        "known: alpha, merge, options, per_class, rule, space",
    ),
    (
        "methods.rare.like",
        "oftn",
        "methods 'oftn' is unknown; did you mean 'often'? known: fedavg, often, rare",
    ),
    (
        "methods.often.like",
        "rare",
        "methods.often.like is 'often'; it must be a row that is not like itself",
    ),
    (
        "methods.often.kind",
        "repaly",
        "methods: kind 'repaly' is unknown; did you mean 'replay'? known: {methods}",
    ),
    (
        "grid.method",
        ["fedagv"],
        "methods 'fedagv' is unknown; did you mean 'fedavg'? known: fedavg, often, rare",
    ),
    ("grid.setting", ["two"], "settings 'two' is unknown; known: one"),
    ("tiny.setting", ["on"], "settings 'on' is unknown; did you mean 'one'? known: one"),
    ("paper.setting", ["oe"], "settings 'oe' is unknown; did you mean 'one'? known: one"),
    ("paper.seeds", 3, "paper.seeds is 3; it must be a list"),
    (ONE + "network.at_once", 0, "settings.one.network.at_once is 0; it must be at least 1"),
    (
        ONE + "network.precision",
        "float16",
        "settings.one.network.precision 'float16' is unknown; did you mean 'bfloat16'? "
        "known: bfloat16, float32",
    ),
    (
        ONE + "split.order",
        "givn",
        "settings.one.split.order 'givn' is unknown; did you mean 'given'? "
        "known: common, disjoint, given, independent, mixed",
    ),
    (
        "grid.seed",
        ["0"],
        "grid: 'seed' is unknown; did you mean 'seeds'? known: beside, method, seeds, setting",
    ),
    (
        "ablation.besides",
        ["fedavg"],
        "ablation: 'besides' is unknown; did you mean 'beside'? "
        "known: beside, method, seeds, setting",
    ),
    (
        "ablation.beside",
        ["fedagv"],
        "methods 'fedagv' is unknown; did you mean 'fedavg'? known: fedavg, often, rare",
    ),
    (
        "ablation.method",
        ["rare", "often"],
        "ablation.method is ['often']; it must be beside: grid trains it already",
    ),
    ("ablation.beside", "fedavg", "ablation.beside is 'fedavg'; it must be a list"),
    (
        "ablation.seeds",
        ["3to4"],
        "ablation.seeds is ['3to4']; it must be in grid.seeds: it draws plans",
    ),
    # what is not there
    (ONE + "training.rate", ABSENT, "settings.one.training.rate is missing"),
    (ONE + "training", ABSENT, "settings.one.training is missing"),
    (ONE + "data.source", ABSENT, "settings.one.data.source is missing"),
    ("grid.method", ABSENT, "grid.method is None; it must be a list"),
    # types
    (
        ONE + "training.rate",
        yaml.safe_load("1e-3"),  # the text '1e-3': YAML 1.1 wants a point and a sign
        "settings.one.training.rate is '1e-3'; "
        "it must be a number, written without quotes as 0.001",
    ),
    (
        ONE + "training.rate",
        "1e-5",  # Python writes 1e-05, which YAML 1.1 would read as text again
        "settings.one.training.rate is '1e-5'; "
        "it must be a number, written without quotes as 1.0e-05",
    ),
    (
        ONE + "training.batch",
        "1234567",
        "settings.one.training.batch is '1234567'; "
        "it must be a whole number, written without quotes as 1234567",
    ),
    (
        ONE + "training.rate",
        "fast",
        "settings.one.training.rate is 'fast'; it must be a number",
    ),
    (ONE + "training.rate", "nan", "settings.one.training.rate is 'nan'; it must be a number"),
    (
        ONE + "training.rate",
        float("nan"),
        "settings.one.training.rate is nan; it must be a finite number",
    ),
    (
        ONE + "training.rate",
        float("inf"),
        "settings.one.training.rate is inf; it must be a finite number",
    ),
    (ONE + "training.rate", True, "settings.one.training.rate is True; it must be a number"),
    (ONE + "training.rate", None, "settings.one.training.rate is None; it must be a number"),
    (ONE + "training.rate", [0.1], "settings.one.training.rate is [0.1]; it must be a number"),
    (
        ONE + "training.batch",
        "2.5",
        "settings.one.training.batch is '2.5'; it must be a whole number",
    ),
    (
        ONE + "training.batch",
        16.0,
        "settings.one.training.batch is 16.0; it must be a whole number",
    ),
    (ONE + "split.clients", True, "settings.one.split.clients is True; it must be a whole number"),
    (ONE + "training.flip", "yes", "settings.one.training.flip is 'yes'; it must be true or false"),
    (ONE + "training.flip", 1, "settings.one.training.flip is 1; it must be true or false"),
    (ONE + "network.channels", 16, "settings.one.network.channels is 16; it must be a list"),
    (
        ONE + "network.channels",
        [16, "32"],
        "settings.one.network.channels is '32'; "
        "it must be a whole number, written without quotes as 32",
    ),
    (ONE + "network", "cnn", "settings.one.network is 'cnn'; it must be a block of keys"),
    (ONE + "data", "digits", "settings.one.data is 'digits'; it must be a block of keys"),
    ("settings.one", "digits", "settings.one is 'digits'; it must be a block of keys"),
    ("methods.fedavg", 1.0, "methods.fedavg is 1.0; it must be a block of keys"),
    (
        "methods.often.memory.per_class",
        "5",
        "methods.often.memory.per_class is '5'; "
        "it must be a whole number, written without quotes as 5",
    ),
    ("methods.often.memory", 5, "methods.often.memory is 5; it must be a block of keys"),
    ("grid.setting", "one", "grid.setting is 'one'; it must be a list"),
    # values that cannot be
    (
        ONE + "name",
        "two",
        "settings.one.name is 'two'; it must be absent: a setting's key is its name",
    ),
    (ONE + "split.clients", 0, "settings.one.split.clients is 0; it must be at least 1"),
    (ONE + "training.rate", -0.1, "settings.one.training.rate is -0.1; it must be at least 0"),
    (
        ONE + "split.classes_per_task",
        ABSENT,
        "settings.one.split.classes_per_task is None; "
        "it must be a number of classes, as kind is 'classes'",
    ),
    (
        ONE + "split",
        {**DOMAINS, "classes_per_task": 2},
        "settings.one.split.classes_per_task is 2; it must be absent, as kind is 'domains'",
    ),
    (
        ONE + "split.common_clients",
        1,
        "settings.one.split.common_clients is 1; it must be 0 unless order is 'mixed'",
    ),
    (
        ONE + "split.common_clients",
        5,
        "settings.one.split.common_clients is 5; it must be at most clients = 4",
    ),
    (
        ONE + "split.alpha",
        0.5,
        "settings.one.split.order is 'independent'; "
        "it must be 'common' or 'given' where alpha is set: clients share tasks",
    ),
    (
        ONE + "split",
        {**DOMAINS, "order": "common", "alpha": 1, "images_per_class": 5},
        "settings.one.split.images_per_class is 5; it must be absent where alpha is set",
    ),
    (
        ONE + "network.channels",
        [],
        "settings.one.network.channels is []; it must be at least one number above 0",
    ),
    (
        ONE + "data.test_share",
        1,
        "settings.one.data.test_share is 1.0; it must be above 0 and below 1",
    ),
    (
        "methods.often.memory.per_class",
        -1,
        "methods.often.memory.per_class is -1; it must be at least 0",
    ),
    (
        ONE + "observe",
        {"features": -1},
        "settings.one.observe.features is -1; it must be at least 0",
    ),
    ("methods.often.step", 0, "methods.often.step is 0.0; it must be above 0"),
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
    files = (PARAMS.parent / "stamp_core" / folder).glob("[!_]*.py")
    return ", ".join(sorted(file.stem for file in files))


def leaves(tree: object, where: str = "") -> list[tuple[str, type, object]]:
    """Every value with its path and type."""
    if isinstance(tree, Mapping):
        return [leaf for key in tree for leaf in leaves(tree[key], f"{where}.{key}")]
    if isinstance(tree, list):
        return [leaf for k, item in enumerate(tree) for leaf in leaves(item, f"{where}.{k}")]
    return [(where, type(tree), tree)]


def test_without_a_slip_nothing_is_refused() -> None:
    """1 x 2 x 2 cells of the grid, 1 x (1 + 1) x 1 of the ablation and 1 of the tiny one."""
    assert check(deepcopy(GOOD)) == 7


@pytest.mark.parametrize(("where", "value", "message"), SLIPS, ids=lambda v: str(v)[:40])
def test_a_slip_is_named(where: str, value: object, message: str) -> None:
    message = message.replace("{methods}", names("methods")).replace("{sources}", names("data"))
    message = message.replace("{rules}", ", ".join(coresets.rules()))
    with pytest.raises(ParameterError) as error:
        check(changed(where, value))
    assert str(error.value) == f"params.yaml: {message}"


def test_a_slip_is_found_in_settings_and_methods_outside_the_grid() -> None:
    params = deepcopy(GOOD)
    params["settings"]["other"] = {**GOOD["settings"]["one"], "split": {"kind": "sets"}}
    with pytest.raises(ParameterError, match=r"^params.yaml: settings.other.split.clients is miss"):
        check(params)
    params = deepcopy(GOOD)
    params["methods"]["other"] = {"kind": "replay", "ratio": -1}
    with pytest.raises(ParameterError, match=r"^params.yaml: methods.other.ratio is -1.0; it must"):
        check(params)


@pytest.mark.parametrize(
    ("method", "setting", "message"),
    [
        ("fedavgs", "one", "params.yaml: methods 'fedavgs' is unknown; did you mean 'fedavg'? "),
        ("fedavg", "ones", "params.yaml: settings 'ones' is unknown; did you mean 'one'? "),
    ],
)
def test_an_experiment_of_unknown_names_is_refused(method: str, setting: str, message: str) -> None:
    with pytest.raises(ParameterError) as error:
        experiment(setting, method, deepcopy(GOOD))
    assert str(error.value).startswith(message)


SPLIT = {"kind": "classes", "clients": 4, "tasks": 3, "classes_per_task": 2}
NETWORK = {"kind": "cnn"}
ALPHA = {**SPLIT, "order": "common", "alpha": 1.0}
TRAINING = {"rounds": 2, "epochs": 1, "batch": 16, "rate": 0.1}


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
        (Training, TRAINING, "batch", 0, 1, "at least 1"),
        (Training, TRAINING, "epochs", -1, 0, "at least 0"),
        (Training, TRAINING, "rate", -1e-9, 0.0, "at least 0"),
        (Training, TRAINING, "rate", float("nan"), 1.0, "at least 0"),
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
    setting = config.setting("one", changed(ONE + "training.rate", 1))
    assert repr(setting.training.rate) == "1.0"
    assert setting.network.channels == (4,) and setting.name == "one"


def test_a_field_may_have_a_factory_for_its_default() -> None:
    @dataclass(frozen=True)
    class Own:
        weights: tuple[float, ...] = field(default_factory=lambda: (1.0,))

    assert config.build(Own, {}, "here").weights == (1.0,)


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("3", [3]), (3, [3]), ("0to2", [0, 1, 2]), ("4to4", [4]), ("9to10", [9, 10])],
)
def test_seeds(text: Any, seeds: list[int]) -> None:
    assert config.seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "2to0", "-1", "1.5", "0-2", "to3", "0to", "0to1to2", None])
def test_seeds_that_are_none(text: Any) -> None:
    with pytest.raises(ParameterError) as error:
        config.seeds(text)
    assert str(error.value) == (
        f"seeds is {text!r}; it must be a number such as '3' or a rising range such as '0to2'"
    )


def test_cells_are_every_combination_with_seeds_as_text() -> None:
    grid = {"setting": ["a", "b"], "method": ["m"], "seeds": ["0to1", 2]}
    assert list(config.cells("tiny", {"tiny": grid})) == [
        ("a", "m", "0to1"),
        ("a", "m", "2"),
        ("b", "m", "0to1"),
        ("b", "m", "2"),
    ]


def test_methods_that_another_grid_trains_come_first() -> None:
    grid = {"setting": ["a"], "method": ["m"], "beside": ["n", "l"], "seeds": [0]}
    assert [method for _, method, _ in config.cells("ablation", {"ablation": grid})] == [*"nlm"]


def test_a_grid_that_nobody_knows() -> None:
    message = "grid 'ablations' is unknown; did you mean 'ablation'"
    with pytest.raises(ParameterError, match=message):
        list(config.cells("ablations", deepcopy(GOOD)))


def test_plain_is_what_json_holds() -> None:
    setting = config.setting("one", deepcopy(GOOD))
    expected = {
        "name": "one",
        "data": {"source": "digits"},
        "split": {**SPLIT, "cycles": 1, "order": "independent", "common_clients": 0}
        | {"alpha": None, "min_samples": 1, "images_per_class": None},
        "network": {"kind": "cnn", "features": 64, "channels": [4], "norm": "none"}
        | {"stem": "published", "pretrained": None, "precision": "float32", "at_once": None},
        "training": {**TRAINING, "momentum": 0.0, "weight_decay": 0.0, "participation": 1.0}
        | {"dropout": 0.0, "buffers": "shared", "shift": 0, "flip": False},
        "observe": {"angles": False, "displacements": False, "features": 0, "memory": 0},
    }
    assert leaves(config.plain(setting)) == leaves(expected)
    assert config.build(Setting, config.plain(setting), "again") == setting
    assert config.plain([(1, {2: (3,)})]) == [[1, {"2": [3]}]]


# --- the file


def test_the_parameters_of_the_project_pass() -> None:
    expected = 0
    for grid in (config.read()[name] for name in ("grid", "ablation", "tiny")):
        methods = len(grid["method"]) + len(grid.get("beside", []))
        expected += len(grid["setting"]) * methods * len(grid["seeds"])
    assert check() == expected


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("setting", "params.yaml: settings 'glypsh' is unknown; did you mean 'glyphs'? known: "),
        ("method", "params.yaml: methods 'glypsh' is unknown; known: "),
        ("seeds", "seeds is 'glypsh'; it must be a number such as '3' or a rising range such as "),
    ],
)
def test_a_slip_in_the_grid_of_the_project_is_named(axis: str, message: str) -> None:
    params = config.read()
    params["grid"][axis] = [*params["grid"][axis], "glypsh"]
    with pytest.raises(ParameterError) as error:
        check(params)
    assert str(error.value).startswith(message)


def test_all_yaml_parsers_read_the_same_parameters() -> None:
    """PyYAML (papermill, notebooks) reads YAML 1.1, ruamel (DVC, this project) YAML 1.2."""
    assert leaves(yaml.safe_load(PARAMS.read_text())) == leaves(config.read())
    in_python = YAML(typ="safe", pure=True).load(PARAMS)  # where the parser in C is not installed
    assert leaves(in_python) == leaves(config.read())
    assert leaves(yaml.safe_load("[1e-3, yes]")) != leaves([1e-3, "yes"])  # it can fail


def test_what_is_read_is_the_file_as_it_is_now(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(PARAMS.read_bytes())
    first = config.read(path)
    first["methods"]["fedavg"]["step"] = 2.0  # a caller's own copy
    assert config.read(path) == config.read(PARAMS) != first
    path.write_text(
        PARAMS.read_text().replace("  fedavg:\n    step: 1.0", "  fedavg:\n    step: 3.0")
    )
    assert config.read(path)["methods"]["fedavg"]["step"] == 3.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "{path} does not exist; it holds every parameter"),
        (
            "",
            "{path} is empty; "
            "it must hold grid, ablation, sweeps, budgets, alphas, tiny, tiny_sweeps, "
            "tiny_budgets, tiny_alphas, paper, paper_alphas, settings, methods",
        ),
        (
            "grid: {}\ntiny: {}\nsetings: {}",
            "params.yaml: 'setings' is unknown; did you mean 'settings'? "
            "known: ablation, alphas, budgets, grid, methods, paper, paper_alphas, settings, "
            "sweeps, tiny, tiny_alphas, tiny_budgets, tiny_sweeps",
        ),
        ("grid: {}\nsweeps: {}", "params.yaml: ablation is None; it must be a block of keys"),
    ],
)
def test_a_file_without_its_sections_is_refused(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "params.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ParameterError) as error:
        config.read(path)
    assert str(error.value) == message.format(path=path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"grid:\n  - a\n b: 1", "line 3"),
        (b"rate: 0.1\nrate: 0.2", "duplicate key"),
        (b"rate: \xff", "unacceptable character #x00ff"),
    ],
)
def test_a_file_that_is_not_yaml_is_refused_in_one_line(
    tmp_path: Path, text: bytes, named: str
) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(text)
    with pytest.raises(ParameterError) as error:
        config.read(path)
    message = str(error.value)
    assert message.startswith(f"{path} is not YAML: ") and "\n" not in message
    assert named in message
