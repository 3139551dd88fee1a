"""The attacks on clients as files, a folder for each client: a killed campaign goes on."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from stamp_core.core.atomic import atomic_folder
from workbench.studies.attacks.outcomes import Pixels
from workbench.studies.attacks.study import Case, Study


class Attacks(NamedTuple):
    """What was found on all clients; the images are those of the first one."""

    cases: pd.DataFrame  # the rows of `study`
    returning: pd.DataFrame  # those of `returning`
    images: dict[Case, tuple[Pixels, Pixels]]  # true and found


def save_attacks(folder: Path, found: Study, returning: pd.DataFrame) -> None:
    """Write what was found on one client."""
    cases = dict.fromkeys(found.rows.case)  # the order of the file
    arrays: dict[str, Any] = {
        f"{name} {k}": pixels
        for k, case in enumerate(cases)
        for name, pixels in zip(("true", "found"), found.images[case], strict=True)
    }
    with atomic_folder(folder) as scratch:
        found.rows.drop(columns=["case", "name"]).to_csv(scratch / "cases.csv", index=False)
        returning.to_csv(scratch / "returning.csv", index=False)
        np.savez_compressed(scratch / "images.npz", **arrays)


def load_attacks(folder: Path) -> Attacks:
    """What was found on all clients that have a folder, by their numbers."""
    clients = sorted((each for each in folder.iterdir() if each.name.isdigit()), key=_number)
    if not clients:
        raise FileNotFoundError(f"{folder} has no client's attacks; `make privacy` makes them")
    cases, returning = (
        pd.concat([pd.read_csv(each / f"{name}.csv") for each in clients], ignore_index=True)
        for name in ("cases", "returning")
    )
    cases["case"] = [read_case(row) for _, row in cases.iterrows()]
    cases["name"] = [case.name for case in cases.case]
    first = cases[cases.client == _number(clients[0])]
    with np.load(clients[0] / "images.npz") as arrays:
        images = {
            case: (arrays[f"true {k}"], arrays[f"found {k}"])
            for k, case in enumerate(dict.fromkeys(first.case))
        }
    return Attacks(cases, returning, images)


def read_case(row: pd.Series) -> Case:
    """The case of a row."""
    steps = None if pd.isna(row.steps) else int(row.steps)
    return Case(row.method, row.experience, row.batch_size, steps, row.weights, row.noise)


def _number(folder: Path) -> int:
    """The client of a folder."""
    return int(folder.name)
