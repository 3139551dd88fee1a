"""Every value of an experiment, and where it comes from: a file and its block, or a default."""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from stamp_core.config.decode import to_plain
from stamp_core.config.params import (
    CHOSEN,
    FILES,
    Params,
    lineage,
    merge_blocks,
    parameter_file,
    read_params,
    read_setting,
    read_yaml,
    set_value,
)
from stamp_core.core.paths import PARAMS
from stamp_core.data.dataset import ImageDataset
from stamp_core.data.plan import Plan
from stamp_core.engine.experiment import load_experiment
from stamp_core.methods.base.registry import with_all_methods
from workbench.workflow.profiles import PROFILES, read_profile

Leaves = Iterator[tuple[tuple[str, ...], Any]]


def shown(setting: str, method: str, profile: str) -> list[str]:
    """A line for each value of an experiment: its key, the value, and where that stands."""
    params = read_profile(profile)
    resolved = load_experiment(setting, method, params).resolved()
    own = dict(leaves({"setting": to_plain(read_setting(setting, params))}))
    blocks = {
        "setting": reduce(merge_blocks, setting_places(setting, params)),
        "method": reduce(merge_blocks, preset_places(setting, method, profile)),
    }
    places = dict(leaves(blocks))
    rows = []
    for path, value in leaves(resolved):
        changed = path in own and own[path] != value  # as joint has a batch size of its own
        place = f"the method {method}" if changed else places.get(path, "default")
        rows.append((".".join(path), str(value), place))
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    key_width, value_width = (max(len(row[column]) for row in rows) for column in range(2))
    return [f"{key:{key_width}}  {value:{value_width}}  {place}" for key, value, place in rows]


def shown_setting(name: str) -> list[str]:
    """A line for each value of a setting and its place, then who learns what with seed 0."""
    params = read_params()
    places = dict(leaves(reduce(merge_blocks, setting_places(name, params))))
    values = leaves(to_plain(read_setting(name, params)))
    rows = [(".".join(path), str(value), places.get(path, "default")) for path, value in values]
    experiment = load_experiment(name, "fedavg", params)
    plan = experiment.plans("0")[0]
    return [*_aligned(rows[1:]), "", *_schedule(plan, experiment.dataset())]


def _schedule(plan: Plan, dataset: ImageDataset) -> list[str]:
    """A line a client: the classes of each of its tasks, and how many images it trains on."""
    lines = [f"classes by client and task, with images for training; seed {plan.seed}"]
    for client, tasks in enumerate(plan.clients):
        cells = list[str]()
        for number, task in enumerate(tasks):
            images = len(plan.train_indices(dataset, client, number))
            cells.append(f"{' '.join(map(str, task.classes))} ({images})")
        lines.append(f"{client:3}:  {'  |  '.join(cells)}")
    return lines


def setting_places(setting: str, params: Params) -> Iterator[dict[str, Any]]:
    """The blocks that make up a setting, with the place of each value instead of the value."""
    for name, block in lineage(params, "settings", setting).items():
        yield marked(block, f"{FILES['settings']}: {name}")


def preset_places(setting: str, method: str, profile: str) -> Iterator[dict[str, Any]]:
    """The same of a preset; what the profile has chosen follows each of its blocks."""
    file = PROFILES[profile]
    chosen = read_yaml(parameter_file(PARAMS.parent, file)).get(CHOSEN, {})
    for name, block in lineage(with_all_methods(read_params()), "methods", method).items():
        yield marked(block, f"{FILES['methods']}: {name}")
        for values, place in ((chosen, name), (chosen.get(setting, {}), f"{setting}.{name}")):
            tree = dict[str, Any]()
            for key in values.get(name, {}):
                set_value(tree, key.split("."), f"{file}: {CHOSEN}.{place}")
            yield tree


def marked(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A tree with the same keys, whose leaves are `place`."""
    return {k: marked(v, place) if isinstance(v, Mapping) else place for k, v in block.items()}


def leaves(tree: Mapping[str, Any], before: tuple[str, ...] = ()) -> Leaves:
    """The path of each value of a tree, and the value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*before, key))
        else:
            yield (*before, key), value
