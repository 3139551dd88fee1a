"""What pages show of attacks: means over clients, and differences on the same clients."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from workbench.report.metrics import summarise
from workbench.studies.attacks.scores import Pixels
from workbench.studies.attacks.study import MATCHED, METHODS, NOISE, SCORES, SIZES, Case

_Pair = tuple[Pixels, Pixels]  # true and found


def summary(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """For each group the mean of every score over clients (n of them) with its 95 % interval."""
    keys, values = [*by, "kind"], [name for name in SCORES if name in rows]
    found = []
    for key, group in rows.groupby(keys, sort=False, dropna=False):
        clients = group.groupby("client")[values].mean()
        row = dict(zip(keys, key, strict=True)) | {"n": len(clients)}
        for name in values:
            of = summarise(clients[name])
            row |= {name: of["mean"], f"{name}_low": of["low"], f"{name}_high": of["high"]}
        found.append(row)
    return pd.DataFrame(found)


def contrast(rows: pd.DataFrame, one: Case, other: Case) -> pd.DataFrame:
    """The mean of one - other with n and its 95 % interval, by kind and score, paired by client."""
    first, second = (
        rows[rows.name == case.name].set_index(["kind", "client"])[[*SCORES]]
        for case in (one, other)
    )
    differences = (first - second).dropna()
    return pd.DataFrame(
        {"kind": kind, "score": name, **summarise(group[name])}
        for kind, group in differences.groupby("kind")
        for name in SCORES
    )


def contrasts(rows: pd.DataFrame) -> pd.DataFrame:
    """The contrasts that pages show: what matching, unknown weights and noise change."""
    matched = [Case(MATCHED, 1, *size) for size in SIZES]
    pairs = [(case, replace(case, method="replay")) for case in matched]
    pairs += [(replace(case, weights="equal"), case) for case in matched[:3]]
    pairs += [(Case("fedavg", 0, *SIZES[0], noise=z), Case("fedavg", 0, *SIZES[0])) for z in NOISE]
    found = [
        contrast(rows, one, other).assign(one=one.name, other=other.name) for one, other in pairs
    ]
    return pd.concat(found, ignore_index=True)


def shown_cases(images: Mapping[str, _Pair]) -> dict[str, _Pair]:
    """The images of some cases by their names: of more and more of them, and under noise."""
    sizes = [(1, 1), (4, 1), (16, 1), (16, None)]
    cases = [Case("fedavg", 0, *size) for size in sizes]
    cases += [Case(method, 1, 16, 1) for method in METHODS[1:]]
    cases += [replace(cases[0], noise=z) for z in NOISE]
    return {case.name: images[case.name] for case in cases}


def gains_of_rounds(rows: pd.DataFrame) -> pd.DataFrame:
    """The PSNR that several rounds together add to one, paired by client, with n."""
    clients = rows.groupby(["method", "rounds", "kind", "client"]).psnr.mean()
    found = []
    for (method, rounds, kind), own in clients.groupby(["method", "rounds", "kind"], sort=False):
        more = own.droplevel(["method", "rounds", "kind"]) - clients[method, 1, kind]
        if rounds > 1:
            found.append({"method": method, "rounds": rounds, "kind": kind, **summarise(more)})
    return pd.DataFrame(found)
