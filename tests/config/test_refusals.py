"""Every invalid value is refused before anything runs, in one line that names its file and key.

A row is (place, value, message): the value is put at that place of valid parameters, or taken away
where it is ABSENT. `LIMITS` holds the rows of numbers with a limit in a shorter form.
"""

import itertools
from copy import deepcopy
from typing import Any

import pytest
import yaml

from stamp_core.config.decode import ParameterError
from stamp_core.config.params import expand_grid, parse_seeds
from stamp_core.engine.experiment import check_params
from stamp_core.methods.base.registry import get_method, method_names
from workbench.workflow.sweeps import sweep_experiments

VALID: dict[str, Any] = {
    "file": "params.yaml",
    "grid": {"setting": ["one"], "method": ["fedavg", "often", "rare"], "seeds": ["0to2", 5]},
    "ablation": {"baselines": ["often"], "method": ["rare"]},
    "sweeps": {
        "kappa": {
            "label": "radius",
            "setting": ["one"],
            "method": ["near"],
            "seeds": "0to1",
            "keys": ["methods.near.spatial.kappa", "methods.near.temporal.kappa"],
            "values": [0.0, 0.5],
        }
    },
    "settings": {
        "one": {
            "data": {"source": "digits"},
            "split": {"kind": "classes", "clients": 4, "tasks": 3, "classes_per_task": 2},
            "network": {"kind": "cnn", "channels": [4]},
            "training": {"rounds": 2, "epochs": 1, "batch_size": 16, "lr": 0.1},
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
SPLIT: dict[str, Any] = VALID["settings"]["one"]["split"]
TRAINING: dict[str, Any] = VALID["settings"]["one"]["training"]
SHARED = {**SPLIT, "order": "common"}
DOMAINS = {"kind": "domains", "clients": 4, "tasks": 1}
ABSENT = type("Absent", (), {"__repr__": lambda _: "absent"})()
NAN = float("nan")

# Options that sources need besides the invalid one.
GLYPHS = {"source": "glyphs", "classes": 5, "train_per_class": 6, "test_per_class": 4}
FOLDER = {"source": "folder", "root": "set", "size": 6}
OFFICE = {"source": "office31", "test_share": 0.5}
IMAGENET = {"source": "imagenet1k"}
NPZ = {"source": "npz", "file": "a.npz"}
DIGIT10 = {"source": "digit10"}
TORCHVISION = ("cifar10", "cifar100", "mnist", "emnist_digits", "usps", "svhn")

WRONG: dict[str, list[float]] = {  # for each limit, values just beyond it
    "at least 0": [-1],
    "at least 1": [0],
    "at least 2": [1],
    "above 0": [0],
    "at most 1": [1.1],
    "above 0 and at most 1": [0, 1.1],
    "above 0 and below 1": [0, 1, -1],
    "at least 0 and below 1": [-0.1, 1],
    "between 0 and 1": [-0.1, 1.5],
    "between 0 and 2": [-0.1, 2.1],
    "between 2 and 100": [1, 101],
    "between 3 and 100": [2, 101],
    "between 8 and 64": [7, 65],
    "between 16 and 64": [15, 65],
}
AVERAGING = " ".join(n for n in method_names() if hasattr(get_method(n).Params, "server_lr"))
REHEARSING = " ".join(n for n in method_names() if hasattr(get_method(n).Params, "anchor"))
INVERTING = "lander target"
LIMITS: list[tuple[str, str, str]] = [  # blocks, their fields, the limit
    ("split", "clients tasks cycles classes_per_task images_per_class", "at least 1"),
    ("split", "classes_per_client", "at least 1"),
    ("split", "common_clients min_samples joining", "at least 0"),
    ("split", "old_share", "at least 0 and below 1"),
    ("network", "features micro_batch_size", "at least 1"),
    ("training", "rounds batch_size clients_per_round", "at least 1"),
    ("training", "epochs lr weight_decay shift", "at least 0"),
    ("training", "momentum dropout", "at least 0 and below 1"),
    ("training", "participation", "above 0 and at most 1"),
    ("diagnostics", "features memory", "at least 0"),
    ("privacy", "clip", "above 0"),
    ("privacy", "noise_multiplier", "at least 0"),
    (AVERAGING, "server_lr", "above 0"),
    (REHEARSING, "ratio anchor weight", "at least 0"),
    ("replay.memory", "exemplars_per_class", "at least 0"),
    ("replay.memory", "mixstyle_alpha", "above 0"),
    ("stamp.spatial", "kappa", "at least 0"),
    ("stamp.spatial.softmax", "rounds", "at least 0"),
    ("stamp.spatial.softmax", "schedule", "at least 1"),
    ("stamp.spatial.softmax", "lr decay", "above 0"),
    ("stamp.spatial.softmax", "momentum", "at least 0 and below 1"),
    ("stamp.temporal", "kappa", "at least 0"),
    ("stamp.temporal", "tasks images every", "at least 1"),
    ("stamp.temporal", "lr", "above 0"),
    ("stamp", "prototype", "at least 0"),
    ("affcl", "k_loss_flow k_lastflow k_kd_last k_kd_feature k_kd_output flow_lr", "at least 0"),
    ("affcl", "flow_hidden flow_every", "at least 1"),
    ("affcl", "flow_layers", "at least 2"),
    ("affcl", "min_variance", "above 0"),
    ("affcl", "theta", "between 0 and 1"),
    ("agem", "reference", "at least 1"),
    ("fbl", "relation", "at least 0"),
    ("fbl", "leak", "at least 0 and below 1"),
    ("fedala", "lr_product", "at least 0"),
    ("fedala", "share threshold", "above 0"),
    ("fedala", "tensors max_epochs", "at least 1"),
    ("fedas", "align_lr", "above 0"),
    ("fedas", "align_batch_size", "at least 1"),
    ("fedavg_tuned", "ft_epochs", "at least 0"),
    ("fedcil", "adversarial consistency consolidation", "at least 0"),
    ("fedcil", "replay", "at least 0 and below 1"),
    ("fedcil", "noise width every", "at least 1"),
    ("fedcil", "generator_lr", "above 0"),
    ("feddbe", "feddbe_kappa momentum", "at least 0"),
    ("feddbe", "momentum", "at most 1"),
    ("fedl2p", "outer_steps ft_epochs lr meta_lr hyper_lr neumann_steps neumann_lr", "at least 0"),
    ("fedl2p", "inner_steps warm_rounds", "at least 1"),
    ("fedl2p", "clamp held_out", "above 0"),
    ("fedprox", "mu", "at least 0"),
    ("fedssi", "lam epsilon", "above 0"),
    ("fedssi", "fedssi_alpha", "at least 0"),
    ("fedweit", "sparsity", "at least 0 and below 1"),
    ("fedweit", "lambda1 lambda2 weight_decay adaptive", "at least 0"),
    ("fsdgpm", "inner_steps eta1 eta2 epsilon increment", "at least 0"),
    ("fsdgpm", "images", "at least 1"),
    ("fsdgpm", "clip", "above 0"),
    ("gem", "margin ridge", "at least 0"),
    ("glfc", "scale new_weight", "above 0"),
    ("glfc", "old_weight exemplars threshold", "at least 0"),
    ("glfc", "perturb_lr proxy_init perturb_steps recon_steps", "at least 0"),
    ("gpm", "epsilon increment", "at least 0"),
    ("gpm", "images", "at least 1"),
    ("gradma", "worker_rho server_rho remembered", "at least 0"),
    ("gradma", "beta1 beta2", "at least 0 and below 1"),
    (INVERTING, "kd statistics_weight adversarial_weight student_weight_decay", "at least 0"),
    (INVERTING, "warmup", "at least 0"),
    (INVERTING, "temperature label_weight generator_lr student_lr", "above 0"),
    (INVERTING, "images latent generator_width generator_steps student_steps", "at least 1"),
    (INVERTING, "replay_batch_size", "at least 1"),
    (INVERTING, "synthesis_batch_size", "at least 2"),
    ("lander", "ce anchor_weight radius", "at least 0"),
    ("lander", "anchor_features", "at least 1"),
    ("target", "latent_lr", "above 0"),
    ("pfeddil", "models", "at least 1"),
    ("pfeddil", "threshold migration", "at least 0"),
    ("refed srfdil", "cache", "at least 0"),
    ("refed srfdil", "steps", "at least 1"),
    ("refed srfdil", "lam pim_lr", "above 0"),
    ("srfdil", "gan_steps", "at least 1"),
    ("srfdil", "gan_lr", "above 0"),
    ("srfdil", "correlation", "at least 0"),
    ("srfdil", "correlation", "at most 1"),
    ("tagfed", "keep temperature tail_lr", "above 0"),
    ("tagfed", "mask_lr kd tail_epochs", "at least 0"),
    ("tagfed", "keep kd", "at most 1"),
    ("vrmcl", "clip", "above 0"),
    ("vrmcl", "inner_steps inner_lr", "at least 0"),
    ("vrmcl", "r", "at least 0 and below 1"),
]
DATA_LIMITS: list[tuple[dict[str, Any], str, str]] = [  # options of a source, fields, the limit
    ({"source": "digits"}, "test_share", "above 0 and below 1"),
    (GLYPHS, "classes", "between 2 and 100"),
    (GLYPHS, "size", "between 8 and 64"),
    (GLYPHS, "style", "between 0 and 2"),
    (GLYPHS, "seed", "at least 0"),
    (GLYPHS, "train_per_class test_per_class", "at least 1"),
    ({"source": "scenes"}, "classes", "between 3 and 100"),
    ({"source": "scenes"}, "size", "between 16 and 64"),
    ({"source": "scenes"}, "seed", "at least 0"),
    ({"source": "scenes"}, "train_per_class test_per_class", "at least 1"),
    (FOLDER, "size", "at least 1"),
    (FOLDER, "test_share", "above 0 and below 1"),
    (OFFICE, "size", "at least 1"),
    (OFFICE, "test_share", "above 0 and below 1"),
    (IMAGENET, "size per_class_train per_class_test", "at least 1"),
    (NPZ, "size", "at least 1"),
    (DIGIT10, "per_class", "at least 1"),
    *(({"source": name}, "size", "at least 1") for name in TORCHVISION),
]
RULE_LIMITS: list[tuple[str, str, str]] = [  # selection rule, its options, the limit
    ("bcsr", "batch_size outer_steps inner_steps", "at least 1"),
    ("bcsr", "proxy_lr weights_lr smoothing", "above 0"),
    ("bcsr", "beta past_weight", "at least 0"),
    ("csrel", "reference_epochs selection_steps train_steps batch_size", "at least 1"),
    ("csrel", "reference_lr train_lr", "above 0"),
    ("ocs", "batch_size batch_candidates", "at least 1"),
    ("ocs", "tau", "at least 0"),
    ("sre2l", "squeeze_epochs squeeze_lr statistics_weight roll", "at least 0"),
    ("sre2l", "batch_size iterations group_size", "at least 1"),
    ("sre2l", "lr", "above 0"),
]

S = "params/settings.yaml: one"
M = "params/methods.yaml:"
SWEEP = "params.yaml: sweeps.kappa"
OFTEN = "methods.often"
KEYS = "it must be a list of keys under settings.one. or methods.near."
Row = tuple[str, object, str]
NAMES: list[Row] = [
    (
        f"{SETTING}.training.momentm",
        0.1,
        f"{S}.training: 'momentm' is unknown; did you mean 'momentum'? known: batch_size, buffers, "
        "clients_per_round, deterministic, dropout, epochs, flip, lr, lr_end, momentum, "
        "participation, rounds, schedule, secure_sums, shift, weight_decay",
    ),
    (f"{SETTING}.trainig", {}, f"{S}: 'trainig' is unknown; did you mean 'training'? known: data,"),
    (f"{SETTING}.network.colour", "red", f"{S}.network: 'colour' is unknown; known: channels, "),
    (f"{SETTING}.split.7", 1, f"{S}.split: '7' is unknown; known: alpha, "),
    (f"{SETTING}.network.kind", "cnnn", f"{S}.network.kind 'cnnn' is unknown; did you mean 'cnn'?"),
    (f"{SETTING}.network.kind", ["cnn"], f"{S}.network.kind ['cnn'] is unknown; did you mean"),
    (f"{SETTING}.training.buffers", None, f"{S}.training.buffers None is unknown; known: frozen"),
    (
        f"{SETTING}.data.source",
        "digit",
        f"{S}.data.source 'digit' is unknown; did you mean 'digits",
    ),
    (f"{SETTING}.data.source", ["digits"], f"{S}.data.source ['digits'] is unknown; did you"),
    (f"{SETTING}.data", {**FOLDER, "gray": True}, f"{S}.data: 'gray' is unknown; did you mean 'gr"),
    ("methods.rare.memory.selecton", "uniform", f"{M} rare.memory: 'selecton' is unknown; did you"),
    (f"{OFTEN}.memory.selection", "herdin", f"{M} often.memory.selection 'herdin' is unknown; did"),
    (f"{OFTEN}.memory.selection", "memory", f"{M} often.memory.selection 'memory' is unkn"),
    (f"{OFTEN}.memory.selection", ["herding"], f"{M} often.memory.selection is ['herding'];"),
    (
        f"{OFTEN}.memory",
        {"selection": "herding", "options": {"tau": 1}},
        f"{M} often.memory.options: 'tau' is unknown; known: ",
    ),
    ("methods.rare.extends", "oftn", f"{M} 'oftn' is unknown; did you mean 'often'? known: fedavg"),
    (f"{OFTEN}.kind", "repaly", f"{M} kind 'repaly' is unknown; did you mean 'replay'? known: "),
    ("grid.method", ["fedagv", "rare"], f"{M} 'fedagv' is unknown; did you mean 'fedavg'? known:"),
    ("grid.method", [["fedavg"]], "params.yaml: grid.method is [['fedavg']]; it must be "),
    ("grid.setting", ["two"], "params/settings.yaml: 'two' is unknown; known: one"),
    ("grid.setting", "one", "params.yaml: grid.setting is 'one'; it must be a list of names"),
    ("grid.seeds", 3, "params.yaml: grid.seeds is 3; it must be a list of names"),
    ("grid.seed", ["0"], "params.yaml: grid: 'seed' is unknown; did you mean 'seeds'? known: meth"),
    ("ablation.baseline", [], "params.yaml: ablation: 'baseline' is unknown; did you mean 'basel"),
    ("ablation.baselines", ["fedagv"], "params.yaml: ablation.baselines is 'fedagv'; it must be i"),
    ("ablation.baselines", "fedavg", "params.yaml: ablation.baselines is 'fedavg'; it must "),
    # presets that extend themselves, at once and through another
    ("methods.again", {"extends": "again"}, f"{M} again.extends is 'again'; it must be a preset"),
    (f"{OFTEN}.extends", "rare", f"{M} often.extends is 'often'; it must be a preset that do"),
    # what is missing
    (f"{SETTING}.training.lr", ABSENT, f"{S}.training.lr is missing"),
    (f"{SETTING}.training", ABSENT, f"{S}.training is missing"),
    (f"{SETTING}.data.source", ABSENT, f"{S}.data.source is missing"),
    ("grid.method", ABSENT, "params.yaml: grid.method is None; it must be a list of names"),
    # settings and presets outside the grid
    ("settings.other", {"data": {"source": "digits"}}, "params/settings.yaml: other.split is miss"),
    ("methods.other", {"kind": "replay", "ratio": -1}, f"{M} other.ratio is -1.0; it must be at"),
]
QUOTED = "written without quotes as"
TYPES: list[Row] = [
    *(
        (f"{SETTING}.{name}", value, f"{S}.{name} is {value!r}; it must be {right}")
        for name, value, right in (
            # to YAML 1.1, 1e-3 is text: it wants a point and a sign
            ("training.lr", yaml.safe_load("1e-3"), f"a number, {QUOTED} 0.001"),
            # Python writes 1e-05, which YAML 1.1 would read as text again
            ("training.lr", "1e-5", f"a number, {QUOTED} 1.0e-05"),
            *(("training.lr", value, "a number") for value in ("fast", "nan", True, None, [0.1])),
            *(("training.lr", value, "a finite number") for value in (NAN, float("inf"))),
            ("training.batch_size", "32", f"a whole number, {QUOTED} 32"),
            ("training.batch_size", "2.5", "a whole number"),
            ("training.batch_size", 16.0, "a whole number"),
            ("split.clients", True, "a whole number"),
            ("training.flip", "yes", "true or false"),
            ("training.flip", 1, "true or false"),
            ("network.channels", 16, "a list"),
            ("network", "cnn", "a block of keys"),
            ("data", "digits", "a block of keys"),
        )
    ),
    (f"{SETTING}.network.channels", [16, "32"], f"{S}.network.channels[1] is '32'; it must be a w"),
    (SETTING, "digits", f"{S} is 'digits'; it must be a block of keys"),
    ("methods.fedavg", 1.0, f"{M} fedavg is 1.0; it must be a block of keys"),
    (f"{OFTEN}.memory", 5, f"{M} often.memory is 5; it must be a block of keys"),
]
COMBINATIONS: list[Row] = [
    (f"{SETTING}.name", "two", f"{S}.name is 'two'; it must be absent: a setting's key is its na"),
    (
        f"{SETTING}.split.classes_per_task",
        ABSENT,
        f"{S}.split.classes_per_task is None; it must be a number of classes, as kind is 'classes'",
    ),
    (
        f"{SETTING}.split",
        {**DOMAINS, "classes_per_task": 2},
        f"{S}.split.classes_per_task is 2; it must be absent, as kind is 'domains'",
    ),
    (f"{SETTING}.split.common_clients", 1, f"{S}.split.common_clients is 1; it must be 0 unless "),
    (f"{SETTING}.split.common_clients", 5, f"{S}.split.common_clients is 5; it must be at most cl"),
    (f"{SETTING}.split.min_samples", 2, f"{S}.split.min_samples is 2; it must be absent unless "),
    (f"{SETTING}.split.alpha", 0.5, f"{S}.split.order is 'independent'; it must be 'common' or 'g"),
    (f"{SETTING}.split", {**SHARED, "alpha": 0}, f"{S}.split.alpha is 0.0; it must be above 0"),
    (
        f"{SETTING}.split",
        {**SHARED, "alpha": 1, "images_per_class": 5},
        f"{S}.split.images_per_class is 5; it must be absent where alpha is set",
    ),
    (f"{SETTING}.split.sizes", "equal", f"{S}.split.sizes is 'equal'; it must be absent unless al"),
    *(
        (
            f"{SETTING}.split",
            {**SHARED, "alpha": 1, name: value},
            f"{S}.split.{name} is {value}; it must be absent where alpha is set",
        )
        for name, value in (("joining", 1), ("old_share", 0.5), ("classes_per_client", 1))
    ),
    (f"{SETTING}.split.joining", 4, f"{S}.split.joining is 4; it must be so few that a client is"),
    (
        f"{SETTING}.split.classes_per_client",
        3,
        f"{S}.split.classes_per_client is 3; it must be at most classes_per_task = 2",
    ),
    (
        f"{SETTING}.training",
        {**TRAINING, "participation": 0.5, "clients_per_round": 2},
        f"{S}.training.participation is 0.5; it must be absent, as clients_per_round is set",
    ),
    (f"{SETTING}.training.lr_end", 0.1, f"{S}.training.lr_end is 0.1; it must be absent, as sched"),
    *(
        (
            f"{SETTING}.training",
            {**TRAINING, "lr": 0.1, "schedule": "cosine", "lr_end": value},
            f"{S}.training.lr_end is {value}; it must be above 0 and at most lr = 0.1, as schedule",
        )
        for value in (None, 0.0, 0.2)
    ),
    (f"{SETTING}.network.channels", [], f"{S}.network.channels is []; it must be at least one num"),
    (f"{SETTING}.network.channels", [4, 0], f"{S}.network.channels is [4, 0]; it must be at least"),
    *(
        (
            f"{SETTING}.network",
            {"kind": kind, "norm": "batch"},
            f"{S}.network.norm is 'batch'; it m",
        )
        for kind in ("mlp", "lenet", "swin_t", "fcn")
    ),
    (f"{SETTING}.network", {"kind": "resnet18"}, f"{S}.network.norm is 'none'; it must be 'batch'"),
    (f"{SETTING}.network.stem", "small", f"{S}.network.stem is 'small'; it must be absent, as ki"),
    # methods
    (
        "methods.replay.memory",
        {"selection": "sre2l"},
        f"{M} replay.weight is None; it must be a number: sre2l makes soft labels",
    ),
    ("methods.stamp.weight", 1.0, f"{M} stamp.weight is 1.0; it must be None, as ratio is 0: no b"),
    ("methods.stamp.balanced", True, f"{M} stamp.balanced is True; it must be False, as ratio is"),
    ("methods.replay.anchor", 0.5, f"{M} replay.weight is None; it must be a number, as anchor is"),
    *(
        (f"methods.stamp.spatial.{name}", "current", f"{M} stamp.spatial.{name} is 'current'; it m")
        for name in ("reference", "normalise", "length")
    ),
    (
        "methods.stamp.temporal.every",
        4,
        f"{M} stamp.temporal.past is 'trajectory'; it must be 'gra",
    ),
    (
        "methods.steps.ratio",
        0.0,
        f"{M} steps.ratio is 0.0; it must be above 0, as temporal.every i",
    ),
    (
        "methods.steps.weight",
        1.0,
        f"{M} steps.weight is 1.0; it must be null, as temporal.every is",
    ),
    (
        "methods.steps.temporal.source",
        "all data",
        f"{M} steps.temporal.source is 'all data'; it mu",
    ),
    (
        "methods.steps.memory.exemplars_per_class",
        0,
        f"{M} steps.memory.exemplars_per_class is 0; i",
    ),
    ("methods.stamp.alternate", True, f"{M} stamp.prototype is 0.0; it must be above 0, as alte"),
    ("methods.fbl.weight", 1, f"{M} fbl.weight is 1.0; it must be absent: `weights` has its place"),
    ("methods.fedala.share", 1.1, f"{M} fedala.share is 1.1; it must be above 0 and at most 1"),
    ("methods.fedcil.adversarial", 0, f"{M} fedcil.replay is 0.5; it must be 0, as adversarial is"),
    (
        "methods.fedcil",
        {"adversarial": 0, "replay": 0, "consistency": 0},
        f"{M} fedcil.consolidation is 100; it must be 0, as adversarial is 0",
    ),
    ("methods.fedl2p.held_out", 1, f"{M} fedl2p.held_out is 1.0; it must be at least 0 and below"),
    ("methods.fedssi.lam", 1, f"{M} fedssi.lam is 1.0; it must be at least 0 and below 1"),
    ("methods.glfc.loss", "cross_entropy", f"{M} glfc.loss is 'cross_entropy'; it must be 'binary"),
    ("methods.refed.lam", 1.1, f"{M} refed.lam is 1.1; it must be above 0 and at most 1"),
    (
        "methods.refed",
        {"lam": 0.02, "pim_lr": 0.1},
        f"{M} refed.lam is 0.02; it must be above 0.02439, so that pim_lr x (1 - lam) / (2 lam)",
    ),
    ("methods.tagfed.server_lr", 2, f"{M} tagfed.server_lr is 2.0; it must be 1 unless exchange"),
    ("methods.target.images", 5120, f"{M} target.warmup is 20; it must be below 20, the rounds th"),
    (
        f"{OFTEN}.memory",
        {"selection": "ocs", "options": {"batch_candidates": 21}},
        f"{M} often.memory.options.batch_candidates is 21; it must be at most batch_size, 20",
    ),
]
INSIDE = "it must be a path without '..', or an absolute one"
OPTIONS: list[tuple[dict[str, Any], str]] = [  # of sources, and the message after "one.data"
    ({**FOLDER, "domains": ["a"]}, ".test_share is None; it must be above 0 and below 1"),
    ({**FOLDER, "domains": ["a", "a"], "test_share": 0.5}, ".domains is ['a', 'a']; it must be at"),
    ({**OFFICE, "domains": []}, ".domains is []; it must be at least one folder, each named once"),
    *(
        ({**spec, "root": root}, f".root is {root!r}; {INSIDE}")
        for spec in (FOLDER, IMAGENET, OFFICE)
        for root in ("..", "set/../../other")
    ),
    *(
        ({**spec, "domains": [name]}, f".domains is {name!r}; it must be the name of a folder ins")
        for spec in ({**FOLDER, "test_share": 0.5}, OFFICE)
        for name in ("", ".", "a/../../b", "/etc")
    ),
    ({**GLYPHS, "style": NAN}, ".style is nan"),
    (
        {**GLYPHS, "face_domains": True, "train_per_class": 99},
        ".test_per_class is 4; it must be at least 16, one per face, as face_domains is true",
    ),
    ({**GLYPHS, "face_domains": True}, ".train_per_class is 6; it must be at least 16, one per f"),
    ({**IMAGENET, "test": "train"}, ".per_class_train is None; it must be a number, as test is"),
    ({"source": "npz"}, ".file is None; it must be the name of an .npz file, or domain_files set"),
    ({**NPZ, "file": ""}, ".file is ''; it must be the name of an .npz file, or domain_files set"),
    ({**NPZ, "file": "../a.npz"}, f".file is '../a.npz'; {INSIDE}"),
    ({**NPZ, "domain_files": ["b.npz"]}, ".file is 'a.npz'; it must be absent where domain_files"),
    ({"source": "npz", "domain_files": ["x/../b.npz"]}, f".domain_files is 'x/../b.npz'; {INSIDE}"),
    ({"source": "npz", "domain_files": ["a/x.npz", "b/x.npz"]}, ".domain_files is ['a/x.npz', 'b/"),
    ({**DIGIT10, "sets": ["mnist", "uspa"]}, ".sets: 'uspa' is unknown; did you mean 'usps'?"),
    ({**DIGIT10, "sets": []}, ".sets is []; it must be at least one set, and none twice"),
    ({**DIGIT10, "sets": ["usps", "usps"]}, ".sets is ['usps', 'usps']; it must be at least one"),
]
SWEEPS: list[tuple[str, object, str]] = [  # a field, its value, and the message
    ("keys", ["methods.near.spatial.kapa"], f"{M} near.spatial: 'kapa' is unknown; did you mean"),
    ("keys", ["methods.near.spatal.kappa"], f"{M} near: 'spatal' is unknown; did you mean 'spat"),
    (
        "keys",
        ["methods.near.spatial.kappa", "methods.far.spatial.kappa"],
        f".keys is ['methods.near.spatial.kappa', 'methods.far.spatial.kappa']; {KEYS}",
    ),
    ("keys", ["settings.other.training.lr"], f".keys is ['settings.other.training.lr']; {KEYS}"),
    ("keys", [], ".keys is []; it must be a list that is not empty"),
    ("keys", "methods.near.server_lr", ".keys is 'methods.near.server_lr'; it must be a list"),
    ("values", [], ".values is []; it must be a list that is not empty"),
    ("values", 0.5, ".values is 0.5; it must be a list"),
    ("values", [-1], f" with -1: {M} near.spatial.kappa is -1.0; it must be at least 0"),
    ("values", ["../x"], ".values is '../x'; it must be a number, a word or true, false or null"),
    ("values", [[1]], ".values is [1]; it must be a number, a word or true, false or null"),
    ("seeds", "2to1", ".seeds is '2to1'; it must be a number such as '3' or a rising range such "),
    ("setting", "one", ".setting is 'one'; it must be a list"),
    ("setting", [], ".setting is []; it must be a list that is not empty"),
    ("method", [], ".method is []; it must be a list that is not empty"),
    ("colour", "red", ": 'colour' is unknown; known: figure, keys, label, "),
    ("figure", "coreset", ".figure 'coreset' is unknown; did you mean 'coresets'?"),
]


def limit_rows() -> list[tuple[str, object, tuple[str, ...]]]:
    """A row for each value beyond a limit; a message may show it as a whole number or not."""
    rows: list[tuple[str, object, str, float, str]] = []
    for blocks, fields, limit in LIMITS:
        for block, name, wrong in itertools.product(blocks.split(), fields.split(), WRONG[limit]):
            if block in ("split", "network", "training", "diagnostics", "privacy"):
                rows.append(
                    (f"{SETTING}.{block}.{name}", wrong, f"{S}.{block}.{name}", wrong, limit)
                )
            else:
                rows.append((f"methods.{block}.{name}", wrong, f"{M} {block}.{name}", wrong, limit))
    for spec, fields, limit in DATA_LIMITS:
        for name, wrong in itertools.product(fields.split(), WRONG[limit]):
            options = {**spec, name: wrong}
            rows.append((f"{SETTING}.data", options, f"{S}.data.{name}", wrong, limit))
    for rule, fields, limit in RULE_LIMITS:
        for name, wrong in itertools.product(fields.split(), WRONG[limit]):
            memory = {"selection": rule, "options": {name: wrong}}
            key = f"{M} often.memory.options.{name}"
            rows.append((f"{OFTEN}.memory", memory, key, wrong, limit))
    return [
        (place, value, tuple(f"{key} is {n}; it must be {limit}" for n in (wrong, float(wrong))))
        for place, value, key, wrong, limit in rows
    ]


def changed(place: str, value: object) -> dict[str, Any]:
    """The valid parameters with one of them changed or taken away."""
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


def test_valid_parameters_are_accepted() -> None:
    """1 setting x 3 methods x 2 ranges of seeds."""
    assert check(deepcopy(VALID)) == 6


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (SETTING + ".training", {**TRAINING, "lr": 0, "epochs": 0, "momentum": 0.99}),
        (SETTING + ".training", {**TRAINING, "participation": 1e-9, "dropout": 0}),
        (SETTING + ".split", {**SPLIT, "order": "mixed", "common_clients": 4}),
        (SETTING + ".split", {**SHARED, "alpha": 1e-9, "min_samples": 0}),
        (SETTING + ".data", {**FOLDER, "domains": ["photo/real"], "test_share": 0.5}),
        (SETTING + ".data", {**NPZ, "file": None, "domain_files": ["/data/../a.npz", "b.npz"]}),
        *((SETTING + ".data", {**s, "root": "/old/../set"}) for s in (FOLDER, IMAGENET, OFFICE)),
        ("methods.target", {"images": 2560, "adversarial_weight": 0}),  # as published, no student
        ("methods.replay", {"memory": {"selection": "sre2l"}, "weight": 0.5}),
        ("methods.replay", {"memory": {"selection": "sre2l"}, "ratio": 0}),  # not mixed in
    ],
)
def test_the_last_value_within_a_limit_is_accepted(place: str, value: object) -> None:
    check(changed(place, value))


ROWS = [
    *NAMES,
    *TYPES,
    *COMBINATIONS,
    *limit_rows(),
    *((f"{SETTING}.data", options, f"{S}.data{message}") for options, message in OPTIONS),
    *(
        (f"sweeps.kappa.{name}", value, (message, f"{SWEEP}{message}"))
        for name, value, message in SWEEPS
    ),
]


@pytest.mark.parametrize(("place", "value", "message"), ROWS, ids=lambda v: str(v)[:60])
def test_an_invalid_value_is_named_with_its_file_and_key(
    place: str, value: object, message: str | tuple[str, ...]
) -> None:
    with pytest.raises(ParameterError) as error:
        check(changed(place, value))
    text = str(error.value).removeprefix(f"{SWEEP} with 0.0: ")
    assert text.startswith(message) and "\n" not in text


@pytest.mark.parametrize("value", ["", "2to0", "-1", "1.5", "0-2", "to3", "0to", "0to1to2", None])
def test_seeds_that_are_none(value: Any) -> None:
    with pytest.raises(ParameterError, match=f"seeds is {value!r}; it must be a number such as"):
        parse_seeds(value)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("ablations", "page 'ablations' is unknown; did you mean 'ablation'"),
        ("grid.on", "params.yaml: grid.setting 'on' is unknown; did you mean 'one'"),
    ],
)
def test_an_unknown_page_is_refused(page: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        list(expand_grid(page, deepcopy(VALID)))
