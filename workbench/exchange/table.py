"""A plan as a table: a line for each class or, where they are listed, each image of a task."""

import csv
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

from stamp_core.config.decode import ParameterError, invalid, require, unknown_name
from stamp_core.core.atomic import atomic_write
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.plan import Plan, Task

COLUMNS = ("client", "task", "domain", "class", "image")
Row = dict[str, int]  # the cells of a line that are not empty


def read_table(path: Path, dataset: ImageDataset) -> dict[str, object]:
    """The clients in a table, as plain values."""
    names, rows = _read_rows(path)
    tasks: dict[int, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for number, row in rows:
        _check_row(f"{path}, line {number}", row, dataset)
        tasks[row["client"]][row["task"]].append(row)
    clients = []
    for client in _numbered(f"{path}: client", tasks):
        where = f"{path}: client {client}, task"
        numbers = _numbered(where, tasks[client])
        own = (_to_task(f"{where} {t}", tasks[client][t], "image" in names) for t in numbers)
        clients.append(list(own))
    return {"clients": clients}


def write_table(plan: Plan, dataset: ImageDataset, path: Path) -> None:
    """Write a plan as a table; its columns are those that some line needs."""
    right = "1 in a table, which has no column for it; write a .json file"
    require(plan.split, "cycles", plan.split.cycles == 1, right)
    rows = [
        {"client": client, "task": t, **row}
        for client, tasks in enumerate(plan.clients)
        for t, task in enumerate(tasks)
        for row in _to_rows(task, dataset)
    ]
    names = [name for name in COLUMNS if any(name in row for row in rows)]
    with atomic_write(path) as part, part.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _read_rows(path: Path) -> tuple[list[str], list[tuple[int, Row]]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            names, *lines = list(csv.reader(file)) or [[]]
    except (OSError, ValueError, csv.Error) as error:
        raise ParameterError(f"{path} is damaged: {error}") from None
    for name in names:
        if name not in COLUMNS:
            raise unknown_name(f"{path}: column", name, COLUMNS)
        if names.count(name) > 1:
            raise ParameterError(f"{path}: column {name!r} must be there once")
    if not {"client", "task"} <= {*names} or not {"class", "image"} & {*names}:
        raise invalid(f"{path}: the first line", names, "client, task and class, image or both")
    return names, [(n, _to_row(f"{path}, line {n}", names, c)) for n, c in enumerate(lines, 2)]


def _to_row(where: str, names: list[str], cells: list[str]) -> Row:
    if len(cells) != len(names):
        raise invalid(f"{where}: the number of cells", len(cells), str(len(names)))
    for name, cell in zip(names, cells, strict=True):
        if not (cell.isascii() and cell.isdecimal()) and (cell or name in COLUMNS[:2]):
            raise invalid(f"{where}: {name}", cell, "a whole number from 0")
    return {name: int(cell) for name, cell in zip(names, cells, strict=True) if cell}


def _check_row(where: str, row: Row, dataset: ImageDataset) -> None:
    """Validate the image of a line by the data set, and give the line its image's class."""
    if "image" not in row and "class" not in row:
        raise ParameterError(f"{where} has neither class nor image")
    image, count = row.get("image", 0), len(dataset.y_train)
    if image >= count:
        raise invalid(f"{where}: image", image, f"below {count}, the number of training images")
    if "image" in row:
        label = int(dataset.y_train[image])
        if row.setdefault("class", label) != label:  # the images are in another order there
            raise invalid(f"{where}: class", row["class"], f"{label}, that of image {image}")


def _numbered(where: str, found: Collection[int]) -> range:
    """The numbers 0, 1, ... of clients or tasks; refused if one of them is missing."""
    for number in range(len(found)):
        if number not in found:
            raise ParameterError(f"{where} {number} is missing; the last one is {max(found)}")
    return range(len(found))


def _to_task(where: str, rows: list[Row], listed: bool) -> dict[str, object]:
    domain, *others = dict.fromkeys(row.get("domain") for row in rows)
    if others:
        raise invalid(f"{where}: domain", others[0], f"{domain}, as in its first line")
    images = [row["image"] for row in rows if "image" in row]
    classes = list(dict.fromkeys(row["class"] for row in rows))
    return {"classes": classes, "domain": domain, "train": images if listed else None}


def _to_rows(task: Task, dataset: ImageDataset) -> Iterator[Row]:
    """The lines of a task without client and task; a class without an image has one as well."""
    own = {} if task.domain is None else {"domain": task.domain}
    train = list(task.train or ())
    labels = dataset.y_train[train].tolist()
    for label in task.classes:
        images = [image for image, each in zip(train, labels, strict=True) if each == label]
        yield from ({**own, "class": label, "image": image} for image in images)
        if not images:
            yield {**own, "class": label}
