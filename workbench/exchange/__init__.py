"""Plans in and out: files that other programs can write and read. Their form: docs/plans.md."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stamp_core.config.decode import ParameterError, build, convert, invalid, unknown_name
from stamp_core.config.limits import NonNegativeInt
from stamp_core.config.schema import Split
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.plan import Plan, Task, check_hash, read_json
from workbench.exchange.checks import check_owners, check_plan
from workbench.exchange.table import read_table, write_table

Read = Callable[[Path, ImageDataset], object]
Write = Callable[[Plan, ImageDataset, Path], None]
FORMS: Mapping[str, tuple[Read, Write]] = {
    ".json": (lambda path, dataset: read_json(path), lambda plan, dataset, path: plan.save(path)),
    ".csv": (read_table, write_table),
}


@dataclass(frozen=True)
class PlanFile:
    """What a plan's file may hold. One from elsewhere needs its clients only."""

    clients: tuple[tuple[Task, ...], ...]
    split: Split | None = None
    seed: NonNegativeInt | None = None
    data_digest: str | None = None
    classes: int | None = None
    hash: str | None = None


def import_plan(path: str | Path, dataset: ImageDataset, seed: int | None = None) -> Plan:
    """The plan in a .json or .csv file, checked; ParameterError in one line if it is wrong.

    `seed` is that of trainings with the plan; None means the file's, or 0 if it has none.
    """
    path = Path(path)
    read, _ = _form_of(path)
    if not path.is_file():  # a pipe would wait
        raise ParameterError(f"{path} must be a file")
    values = read(path, dataset)
    plan = _complete_plan(path, build(PlanFile, values, f"{path}: plan"), dataset)
    if plan.data_digest != dataset.digest:
        right = f"that of the data, {dataset.digest}"
        raise invalid(f"{path}: plan.data_digest", plan.data_digest, right)
    convert(seed, NonNegativeInt | None, "seed")
    check_plan(f"{path}: plan", plan, dataset)
    if plan.split.alpha is not None:  # the clients share a task's images among them
        parts = [[i for task in tasks for i in task.train or ()] for tasks in plan.clients]
        check_owners(f"{path}: plan", parts)
    return plan if seed is None else replace(plan, seed=seed)


def export_plan(plan: Plan, dataset: ImageDataset, path: str | Path) -> None:
    """Write a plan as `import_plan` reads it; the suffix of `path`, .json or .csv, says how."""
    _, write = _form_of(Path(path))
    write(plan, dataset, Path(path))


def listed_plan(
    where: str, clients: tuple[tuple[Task, ...], ...], dataset: ImageDataset, seed: int = 0
) -> Plan:
    """The plan of listed tasks, not checked; the first client has the number of tasks."""
    sizes = {"clients": len(clients), "tasks": len(clients[0]) if clients else 0}
    split = build(Split, {"kind": "file", **sizes}, f"{where}: plan")
    return Plan(split, seed, dataset.digest, clients, len(dataset.classes))


def _complete_plan(path: Path, values: PlanFile, dataset: ImageDataset) -> Plan:
    """The plan in a file, with what the file leaves out; refused if its hash is another."""
    clients = tuple(tuple(map(_sorted_task, tasks)) for tasks in values.clients)
    given = {name: getattr(values, name) for name in ("split", "seed", "data_digest", "classes")}
    given = {name: value for name, value in given.items() if value is not None}
    plan = replace(listed_plan(str(path), clients, dataset), **given)
    if values.hash is not None:
        check_hash(path, plan, values.hash)
    return plan


def _sorted_task(task: Task) -> Task:
    train = None if task.train is None else tuple(sorted(task.train))
    return replace(task, classes=tuple(sorted(task.classes)), train=train)


def _form_of(path: Path) -> tuple[Read, Write]:
    """What reads and writes a file, by its suffix."""
    if path.suffix not in FORMS:
        raise unknown_name(f"{path}: suffix", path.suffix, FORMS)
    return FORMS[path.suffix]
