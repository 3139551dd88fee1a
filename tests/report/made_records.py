"""Run records with accuracies chosen by hand, so that every number of a table can be worked out."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from stamp_core.results.records import SCORINGS, Record

FINALS = [(0.4, 0.6), (0.5, 0.7), (0.3, 0.8)]  # accuracy 0.5, 0.6, 0.55; forgetting 0.4, 0.3, 0.5
ROUND: dict[str, Any] = {
    **{"round": 0, "loss": 1.0, "participants": 2, "completed": 2, "images": 1000},
    "seconds": {"clients": 0.5, "server": 0.5},
    "bytes": {"up": 1000, "down": 4000},
    "memory": {"process": 20_000_000, "gpu": 7},
    **{"disk": 500, "angles": {}, "notes": {}, "events": {}},
}
MATCHED = {"kind": "stamp", "spatial": {"kappa": 0.5}, "temporal": {"kappa": 0.5, "past": "x"}}


def fake_record(
    method: str = "fedavg",
    seed: int = 0,
    final: tuple[float, ...] = FINALS[0],
    first: tuple[float, ...] = (0.8, 0.1),
    *,
    setting: str = "toy",
    local: float = np.nan,
    personal_only: bool = False,
    personal: float = np.nan,
    cycles: int = 1,
    rounds: Sequence[dict[str, Any]] = ({}, {}),
    params: dict[str, Any] | None = None,
    split: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    classes: int = 10,
    **about: Any,
) -> Record:
    """A run of two tasks and two clients whose accuracies after each task are `first` and `final`.

    `rounds` are changes of ROUND, `params` of the method; `local` is the local models' accuracy
    and `personal` what the personal models are better than the global one.
    """
    a = np.repeat(np.array([first, final] * cycles)[:, None], 2, axis=1)  # [S, U, T]
    undefined = np.full((len(SCORINGS), *a.shape), np.nan)
    scores = np.stack([a, a + 0.1, a + 0.2, a + 0.3])  # as in SCORINGS
    models = {"global": scores, "personal": scores + personal}
    if personal_only:
        models = {"global": undefined, "personal": scores}
    models |= {"local": np.full_like(scores, local), "initial": np.zeros((len(SCORINGS), 2, 2))}
    everything = {
        "setting": {
            "name": setting,
            "data": {"classes": classes},
            "split": {"cycles": cycles, **(split or {})},
            "training": training or {},
        },
        "method": {"name": method, "kind": method, **(params or {})},
        **{"seed": seed, "group": "federated"},
        "setup": {"down": 300, "up": 200},
        **about,
    }
    tests = np.array([[10, 20], [30, 20]])  # [U, T]
    return Record(everything, [{**ROUND, **each} for each in rounds], models, tests, {})


def three_seeds(
    method: str = "fedavg", finals: Sequence[tuple[float, float]] = FINALS, **changes: Any
) -> list[Record]:
    return [fake_record(method, seed, final, **changes) for seed, final in enumerate(finals)]


def shifted(by: float) -> list[tuple[float, float]]:
    """FINALS with `by` more accuracy, and as much less forgetting, for every seed."""
    return [(first + by, last + by) for first, last in FINALS]


def swept(sweep: str, value: object, method: str, means: Sequence[float], **changes: Any) -> Any:
    return [
        fake_record(method, seed, (mean, mean), sweep=[sweep, str(value)], **changes)
        for seed, mean in enumerate(means)
    ]


def compared() -> list[Record]:
    """Two settings; methods with global, personal and both models, and with a reconstruction."""
    numbers = {"gradient count": 4.0, "worst_product_reference": 0.5, "length": 1.0, "cosine": 0.9}
    rounds = [
        {
            "notes": {
                f"spatial {name}": value
                for name, value in {**numbers, "support": 3, "worst_product": w, "gap": g}.items()
            },
            "events": {"spatial matching: a gradient was dropped": 2, "memory: something": 5},
            "angles": {"update length": w},
            "seconds": {"clients": w, "server": 0.5},
        }
        for w, g in ((1.0, 1e-9), (2.0, 0.02))
    ]
    return [
        *three_seeds("replay", shifted(0.1), group="control"),
        *three_seeds(local=0.9),
        *three_seeds("fedala", shifted(0.05), group="personalised", local=0.9, personal=0.2),
        *three_seeds("local", shifted(-0.2), group="control", personal_only=True),
        *three_seeds("stamp", [(0.5, 0.7), (0.7, 0.7), (0.4, 0.9)], rounds=rounds),
        *three_seeds("srfdil", [(0.3, 0.8), (0.6, 0.8)], group="continual"),
        *three_seeds(setting="other"),
        fake_record("fedprox", 7, setting="other"),
    ]


def noisy() -> list[Record]:
    """Methods at two values of noise; only the first setting has STAMP."""
    return [
        *swept("noise", "0.0", "replay", [0.5, 0.6, 0.7], setting="local"),
        *swept("noise", "0.1", "replay", [0.3, 0.4, 0.5], setting="local"),
        *swept("noise", "0.0", "stamp", [0.6, 0.7, 0.8], setting="local"),
        *swept("noise", "0.1", "stamp", [0.2, 0.4, 0.6], setting="local"),
        *swept("noise", "0.0", "replay", [0.5, 0.6, 0.7], setting="central"),
        *swept("noise", "0.1", "replay", [0.4, 0.5, 0.6], setting="central"),
    ]


def projected() -> tuple[list[Record], list[Record]]:
    """A method at two sizes of projections, and exact; another seed and method are left out."""
    some = [
        *swept("projection", 8, "stamp", [0.4, 0.5]),
        *swept("projection", 16, "stamp", [0.5, 0.7]),
    ]
    exact = [fake_record("stamp", seed, (mean, mean)) for seed, mean in enumerate((0.6, 0.8, 0.1))]
    return some, [*exact, fake_record("replay")]


def inverted() -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Means of an upload and of a window, a contrast, and what more rounds add."""
    numbers = ("psnr", "psnr_gain", "ssim", "ssim_gain", "identified", "identified_gain")
    ends = [f"{name}{end}" for name in numbers for end in ("", "_low", "_high")]
    window = {"method": "replay", "rounds": 2, "kind": "new", "n": 3}
    windows = pd.DataFrame([window | dict.fromkeys(ends, 10.0)])
    cases = windows.assign(name="a", labels=0.5)
    contrast = {"one": "b", "other": "a", "kind": "new", "mean": 1.0, "low": 0.5, "high": 1.5}
    scores = [{**contrast, "score": name} for name in ("psnr", "ssim", "identified", "labels")]
    limits = {"mean": 2.0, "low": 1.0, "high": 3.0}
    gains = [{"method": "replay", "kind": "new", "rounds": r, **limits} for r in (2, 8)]
    return cases, pd.DataFrame(scores), windows, pd.DataFrame(gains)


SPENT = {("local", "0.0"): np.inf, ("local", "0.1"): 123456.0}


def ablated() -> list[Record]:
    """Controls, parts of the paper and choices, whose updates grow with the seed; two settings."""

    def variant(method: str, finals: Any = FINALS, length: float = 1.0, **changes: Any) -> Any:
        records = three_seeds(method, finals, **changes)
        for record in records:
            angles = {"update length": length * (1 + record.run[2])}
            record.history[:] = [{**row, "angles": angles} for row in record.history]
        return records

    few = {"selection": "uniform", "exemplars_per_class": 5}
    many = {"selection": "herding", "exemplars_per_class": 20}
    off = {"kind": "stamp", "spatial": None, "temporal": None}
    noisy = [(0.3, 0.8), (0.6, 0.8), (0.2, 0.7)]
    return [
        *variant("stamp", params=MATCHED),
        *variant("replay", shifted(0.1), 2.0, params={"memory": few, "ratio": 1.0}),
        *variant("fedavg", shifted(-0.2), 0.5),
        *variant("fedavg_step", noisy, params={"server_lr": 1.5}),
        *variant("stamp_without_coreset", noisy, params=MATCHED),
        *variant("stamp_other", shifted(-0.1), params=MATCHED),
        *variant("half", params={"prototype": 0.01, "memory": many, "ratio": 0.0, **off}),
        *variant("mean", params={**off, "temporal": {"kappa": 0.0, "past": "y"}}),
        *variant("stamp", setting="other", params=MATCHED),
        *variant("temporal_only", setting="other", params=MATCHED),
    ]


def selected(
    rule: str | None, exemplars: int, means: Sequence[float], setting: str = "toy", **events: int
) -> list[Record]:
    """Two tasks of two rounds; ten clients select in the last round of each, 0.02 s in all."""
    seconds = {"clients": 0.5, "server": 0.0}
    selecting = seconds | ({"coreset": 0.02} if rule else {})
    rounds = [
        {"seconds": each, "completed": 10, "disk": 1000 * exemplars, "events": {}}
        for each in [seconds, selecting] * 2
    ]
    rounds[-1]["events"] = events
    memory = {"selection": rule, "exemplars_per_class": exemplars}
    options: dict[str, Any] = {"setting": setting, "params": {"memory": memory} if rule else {}}
    method = f"keep_{rule}" if rule else "fedavg"
    records: list[Record] = swept("exemplars", exemplars, method, means, rounds=rounds, **options)
    return records


def selections() -> list[Record]:
    """OCS is 10 points above random with 2 exemplars, 0 ± 5 with 5; herding 20 below with 5."""
    return [
        *selected(None, 0, (0.3, 0.3, 0.3)),
        *selected("uniform", 10**6, (0.9, 0.9, 0.9), odd=4),
        *selected("uniform", 5, (0.5, 0.6, 0.7)),
        *selected("uniform", 2, (0.5, 0.6, 0.7)),
        *selected("ocs", 2, (0.6, 0.7, 0.8), odd=1),
        *selected("ocs", 5, (0.45, 0.6, 0.75), odd=2),
        *selected("herding", 2, (0.5, 0.6, 0.7)),
        *selected("herding", 5, (0.3, 0.4, 0.5)),
        *selected("uniform", 2, (0.5,), "other"),
        *selected("mine", 2, (0.5,), "other"),
    ]


def heterogeneous() -> list[Record]:
    """Two methods at three values of α, the largest first; another setting has another base."""
    means = {
        ("fedavg", 100.0): (0.7, 0.8, 0.9),
        ("fedavg", 0.1): (0.5, 0.6, 0.7),
        ("fedavg", 1.0): (0.6, 0.6, 0.6),
        ("feddbe", 100.0): (0.2, 0.3, 0.4),
        ("feddbe", 0.1): (0.3, 0.4, 0.5),
    }
    records = []
    for (method, alpha), each in means.items():
        records += swept("a", alpha, method, each, split={"alpha": alpha})
    other: dict[str, Any] = {"setting": "other", "split": {"alpha": 1.0}}
    records += swept("a", 1.0, "replay", (0.0, 0.1), **other)
    return records + swept("a", 1.0, "local", (0.1, 0.1), personal_only=True, **other)


def longer() -> list[Record]:
    """Three methods with ten rounds and with two; STAMP stays near replay, joint does not."""
    means = {
        ("replay", 10): (0.6, 0.7, 0.8),
        ("replay", 2): (0.4, 0.5, 0.6),
        ("stamp", 10): (0.63, 0.73, 0.83),
        ("stamp", 2): (0.4, 0.5, 0.6),
        ("joint", 10): (0.9, 0.9, 0.9),
        ("joint", 2): (0.41, 0.51, 0.61),
    }
    return [
        record
        for (method, rounds), each in means.items()
        for record in swept("rounds", rounds, method, each, training={"rounds": rounds})
    ]


def overlapping() -> list[Record]:
    """Two settings, of which one has half of its classes in common; seeds 0 and 1 choose."""
    records = []
    for setting, size, classes in (("all", 2, 4), ("half", 3, 12)):
        split = {"classes_per_task": size, "tasks": 2}
        about: dict[str, Any] = {"setting": setting, "split": split, "classes": classes}
        for method, best in (("replay", 1.0), ("stamp", 2.0)):
            for value in (1.0, 2.0):
                gain = 0.1 * (value == best) + 0.05 * (method == "stamp") * (setting == "all")
                for seed in (0, 1, 10, 11, 12):
                    mean = 0.5 + seed / 100 + gain - 0.4 * (seed >= 10) * (value == best)
                    sweep = ["overlap", str(value)]
                    records.append(fake_record(method, seed, (mean, mean), sweep=sweep, **about))
    return records


def related() -> dict[str, list[Record]]:
    """Protected subspaces, returning tasks, and masks with a fifth scoring, that of pixels."""
    protection = []
    for value, seeds in {
        "step": ((None, 0.2, 0.4), (0.1, 0.1, 0.1)),
        "update": ((0.0, 0.0, 0.0), (None, None, None)),
    }.items():
        for seed, drifts in enumerate(seeds):
            notes = [{"notes": {} if drift is None else {"drift": drift}} for drift in drifts]
            options: dict[str, Any] = {"rounds": notes, "sweep": ["projection", value]}
            protection.append(fake_record("gpm_drift", seed, (0.5, 0.5 + seed / 5), **options))
    returning = []
    for method, gain, personal in (("fedavg", 0.1, np.nan), ("pfeddil", 0.2, 0.1)):
        for cycles in (1, 2):
            means = [0.3 + gain * (cycles - 1) + seed / 10 for seed in range(3)]
            options = {"cycles": cycles, "personal": personal}
            returning += swept("cycles", cycles, method, means, **options)
    masks = swept("masks", "common", "fedavg", (0.1, 0.2, 0.3))
    masks += swept("masks", "common", "fbl", (0.4, 0.5, 0.6))
    for record in masks:
        for name, scores in record.scores.items():
            record.scores[name] = np.concatenate([scores, scores[:1] + 0.4])
    return {"protection": protection, "returning": returning, "masks": masks}


def printed_runs() -> list[Record]:
    """Runs of the paper's settings: bytes and disk grow with the seed.

    Of two clients one completes the second round; personal models are 20 points below the others.
    """
    records = []
    for method, setting in (
        ("fedavg", "cifar100_c2"),
        ("fedcil_published", "cifar100_c2"),
        ("gem", "cifar100_c2"),
        ("local", "imagenet1k_c20"),
        ("fedssi", "cifar10_alpha"),
    ):
        for seed in range(3):
            rounds = [
                {
                    **{"participants": 2, "completed": (2, 1)[k]},
                    "bytes": {"up": (30e6, 15e6)[k], "down": (40e6, 80e6)[k] * (1 + seed)},
                    "disk": 7e6 * (1 + seed),
                }
                for k in range(2)
            ]
            models = {"personal": -0.2, "personal_only": method == "local"}
            options: dict[str, Any] = {"setting": setting, "rounds": rounds, **models}
            records.append(fake_record(method, seed, FINALS[seed], **options))
    return records


def candidates(methods: Sequence[str]) -> list[Record]:
    """Candidates on two settings and two seeds; the second is the best, the third diverges once."""
    records = []
    for setting in ("digits", "glyphs"):
        for method in methods:
            kind = "explored" if method == "gpm" else "tuning"
            for value, mean in {"a 1": 0.2, "a 2": 0.4, "b 3": np.nan}.items():
                records += swept(kind, value, method, (mean, mean + 0.1), setting=setting)
    return records


def with_features(classes: int = 3, experiences: int = 2, spread: float = 0.1) -> Record:
    record = fake_record()
    labels = np.repeat(np.arange(classes), 4)
    noise = np.random.default_rng(0).normal(size=(experiences, len(labels), classes))
    vectors = np.eye(classes)[labels] + spread * noise
    record.features.update(features=vectors.astype(np.float32), labels=labels)
    return record


def sensitive() -> list[Record]:
    """Three sweeps of stamp."""
    records = []
    for sweep, value, mean in (
        *(("kappa", "10", 0.3), ("kappa", "2", 0.5), ("other", "x", 0.5)),
        *(("server_lr", "0.5", 0.4), ("server_lr", "1.0", 0.41)),
    ):
        records += swept(sweep, value, "stamp", (mean - 0.1, mean, mean + 0.1))
    return records
