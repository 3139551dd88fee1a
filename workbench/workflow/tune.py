"""Choosing values: every method's candidates on choosing seeds, which no other table shows.

Every method has the same number of candidates. Where the best lies at an edge, its list may be
extended; the page says where it still does. The best by mean accuracy over settings and seeds is
the one to put into the parameters. Candidates with current records are not trained again.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from stamp_core.config.decode import build, invalid, unknown_name
from stamp_core.config.params import CHOSEN, at_setting, parse_seeds, read_yaml
from stamp_core.core.paths import ROOT
from stamp_core.engine.experiment import Experiment
from stamp_core.methods.base.registry import override
from stamp_core.results.records import Record
from workbench.report.frames import CHOOSING
from workbench.report.tables.tuning import ALL, KINDS, write_tuning
from workbench.workflow.profiles import CIFAR100, DEFAULT, PRETRAINED, read_profile
from workbench.workflow.sweeps import light_experiment
from workbench.workflow.training import Job, require_trained, train_missing

FOLDERS = {  # of the pages; a file without a profile of its name says whose settings it tunes
    DEFAULT: "figures",
    CIFAR100: "figures/cifar100",
    "alpha": "figures/cifar100/heterogeneity",
    "norm": "figures/cifar100/norm",
    PRETRAINED: "figures/pretrained",
    "base": "figures/pretrained/base",
    "fifty": "figures/pretrained/fifty",
    "last_block": "figures/pretrained/last_block",
}
FILES = {name: f"params/tuning_{name}.yaml" for name in FOLDERS} | {DEFAULT: "params/tuning.yaml"}
PROFILE = "tuning"  # of the records
DIVERGED = ("DivergedError", "SeedsDiverged")  # such a candidate counts as undefined


@dataclass(frozen=True)
class Tuning:
    """Settings and seeds to choose on, and the candidates of each method."""

    setting: tuple[str, ...]
    seeds: str
    candidates: Mapping[str, list[dict[str, Any]]]  # method -> values by key, e.g. spatial.kappa
    profile: str = DEFAULT  # which has the other values
    # The same beyond an edge at which the best one lies, and options of selection rules; then
    # what else was tried, from which nothing is chosen. Both have any number.
    extended: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    explored: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Validate that seeds are for choosing, and all methods have as many candidates."""
        if max(parse_seeds(self.seeds)) >= CHOOSING:
            raise invalid("seeds", self.seeds, f"below {CHOOSING}: the others are for reporting")
        counts = {name: len(values) for name, values in self.candidates.items()}
        if len(set(counts.values())) > 1:
            raise invalid("candidates", counts, "the same number for every method")
        for name, values in self.candidates.items():  # else a preset's own value would decide
            keys = dict.fromkeys(key for candidate in values for key in candidate)
            _require_keys(f"candidates.{name}", values, keys, "which another candidate has")

    def methods(self, kind: str) -> Mapping[str, list[dict[str, Any]]]:
        return dict(zip(KINDS, (self.candidates, self.extended, self.explored), strict=True))[kind]

    @property
    def known(self) -> set[tuple[str, str, str]]:
        """Kind, method and name of every candidate."""
        return {
            (kind, method, candidate_name(values))
            for kind in KINDS
            for method, every in self.methods(kind).items()
            for values in every
        }


def _require_keys(
    where: str, candidates: Iterable[Mapping[str, Any]], keys: Iterable[str], reason: str
) -> None:
    """Validate that each candidate names all keys."""
    for candidate in candidates:
        if missing := [key for key in keys if key not in candidate]:
            raise invalid(where, candidate, f"with {missing[0]}, {reason}")


def read_tuning(name: str = DEFAULT) -> Tuning:
    """The candidates of a file, checked."""
    return build(Tuning, read_yaml(ROOT / FILES[name]), FILES[name])


def candidate_experiments(
    tuning: Tuning, name: str = DEFAULT, setting: str | None = None
) -> Iterator[Experiment]:
    """An experiment, whose `sweep` names the candidate, for each setting or for one."""
    if setting and setting not in tuning.setting:
        raise unknown_name(f"{FILES[name]}: setting", setting, tuning.setting)
    params = read_profile(tuning.profile)
    settings = [setting] if setting else tuning.setting
    for own in settings:
        _check_chosen(tuning, FILES[name], own, params.get(CHOSEN, {}).get(own, {}))
    for kind in KINDS:
        methods = tuning.methods(kind)
        for method, values in ((m, each) for m in methods for each in methods[m]):
            for own in settings:
                changed = override(at_setting(params, own), method, values)
                yield light_experiment(own, method, changed, (kind, candidate_name(values)))


def _check_chosen(
    tuning: Tuning, file: str, setting: str, chosen: Mapping[str, Mapping[str, Any]]
) -> None:
    """Validate that no value that was chosen for the setting stands in for a candidate's own."""
    for method, values in chosen.items():
        candidates = [each for kind in KINDS for each in tuning.methods(kind).get(method, [])]
        keys = [key for key in values if any(key in each for each in candidates)]
        reason = f"of which {setting} has a chosen value, {values}"
        _require_keys(f"{file}: {method}", candidates, keys, reason)


def candidate_name(values: Mapping[str, Any]) -> str:
    """Keys and values as the page names them."""
    return ", ".join(f"{k} {'null' if value is None else value}" for k, value in values.items())


def candidate_records(experiments: Sequence[Experiment], seeds: str, workers: int) -> list[Record]:
    """The records of candidates, trained where needed; none of one that diverges."""
    jobs = [Job(experiment, seeds, PROFILE) for experiment in experiments]
    found, failures = train_missing(jobs, workers)
    others = {name: why for name, why in failures.items() if why.kind not in DIVERGED}
    require_trained(found, others)
    reasons = {name: why.message for name, why in failures.items()}
    diverged = {name: own[0].about.get("diverged", {}) for name, own in found.items()}
    reasons |= {name: each for name, seeds in diverged.items() for each in seeds.values()}
    for name, reason in reasons.items():
        print(f"{name} counts as undefined: {reason}", flush=True)
    return [record for name in found if name not in reasons for record in found[name]]


def candidates_shown(name: str, setting: str) -> set[tuple[str, str, str]]:
    """Kind, method and name of the candidates that the page has for a setting, or for all."""
    file = ROOT / FOLDERS[name] / "tuning.csv"
    if not file.exists():
        return set()
    rows = pd.read_csv(file)
    rows = rows[rows.setting == setting]
    return {*zip(rows.kind, rows.method, rows.candidate, strict=True)}


def _key(experiment: Experiment) -> tuple[str, str, str]:
    """Kind, method and name of a candidate."""
    kind, name = experiment.sweep or ("", "")
    return kind, experiment.method, name


def tune(
    workers: int,
    only: Sequence[str] = (),
    name: str = DEFAULT,
    setting: str | None = None,
    new: bool = False,
) -> None:
    """Train what is missing and write the pages; results of methods not in `only` stay.

    `new` are candidates without a row on the page.
    """
    tuning = read_tuning(name)
    methods = {method for _, method, _ in tuning.known}
    if unknown := set(only) - methods:
        raise unknown_name(f"{FILES[name]}: candidates", unknown.pop(), methods)
    known = candidates_shown(name, setting or ALL) if new else set()
    experiments = [
        experiment
        for experiment in candidate_experiments(tuning, name, setting)
        if (not only or experiment.method in only) and _key(experiment) not in known
    ]
    records = candidate_records(experiments, tuning.seeds, workers)
    tried = [(*_key(each), each.setting.name) for each in experiments]
    page = ROOT / FOLDERS[name], tuning.known, setting or ALL
    write_tuning(records, tried, parse_seeds(tuning.seeds), *page)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train candidates on choosing seeds.")
    parser.add_argument("methods", nargs="*", help="some of the profile's; default: all")
    parser.add_argument("--profile", default=DEFAULT, choices=FILES, help="params/tuning_*.yaml")
    parser.add_argument("--setting", help="one of the profile's: values for it alone")
    parser.add_argument("--new", action="store_true", help="candidates that its page has not")
    arguments = parser.parse_args()
    tune(0, arguments.methods, arguments.profile, arguments.setting, arguments.new)
