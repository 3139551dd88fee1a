"""Parameter files: what they are read as, the runs of a grid, and presets of methods."""

import itertools
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ruamel.yaml import YAML

from stamp_core.config.decode import ParameterError
from stamp_core.config.params import parse_seeds, read_params, read_setting, read_yaml
from stamp_core.config.schema import Diagnostics
from stamp_core.core.paths import ROOT
from stamp_core.engine.experiment import load_experiment
from stamp_core.methods.base.registry import get_method, method_names, read_preset, resolve_preset
from tests.pipeline import parameters
from workbench.workflow.checks import check_params
from workbench.workflow.profiles import (
    CIFAR100,
    PAGES,
    PROFILES,
    STUDIES,
    check_names,
    expand_grid,
    read_profile,
)


@pytest.fixture
def root(tmp_path):
    shutil.copy(ROOT / "params.yaml", tmp_path)
    shutil.copytree(ROOT / "params", tmp_path / "params")
    return tmp_path


@pytest.mark.parametrize("profile", PROFILES)
def test_the_profiles_of_the_project_are_valid(profile):
    params = read_profile(profile)
    check_names(params)
    experiments = list(expand_grid("grid", params))
    assert check_params(params) == len(experiments) and (experiments or params["sweeps"])


def test_every_profile_is_read_alike_by_all_yaml_parsers():
    """PyYAML (papermill, notebooks) reads YAML 1.1, ruamel (DVC, this project) YAML 1.2."""
    for path in [ROOT / "params.yaml", *sorted((ROOT / "params").glob("*.yaml"))]:
        values = repr(read_yaml(path))
        assert repr(yaml.safe_load(path.read_text())) == values
        assert repr(YAML(typ="safe", pure=True).load(path)) == values  # without the C parser


def test_a_file_that_a_folder_lacks_is_the_packaged_one(root):
    (root / "params.yaml").unlink()
    (root / "params/methods.yaml").write_text(yaml.safe_dump({"mine": {"kind": "fedavg"}}))
    packaged, own = read_profile(), read_profile(root=root)
    assert own["grid"] == packaged["grid"] and own["settings"] == packaged["settings"]
    assert own["methods"] == {"mine": {"kind": "fedavg"}}


def test_the_file_is_read_as_it_is_now(root):
    first = read_profile(root=root)
    first["methods"]["fedavg"]["server_lr"] = 2.0  # a caller's own copy
    assert read_profile(root=root) == read_profile() != first
    file = root / "params/methods.yaml"
    file.write_text(file.read_text().replace("server_lr: 1.0", "server_lr: 3.0", 1))
    assert read_profile(root=root)["methods"]["fedavg"]["server_lr"] == 3.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "{path} must hold a block of keys, not None"),
        (b"grid:\n  - a\n b: 1", "{path} must be YAML: "),
        (b"rate: \xff", "{path} must be YAML: "),
        (b"sweps: {}", "params.yaml: 'sweps' is unknown; did you mean 'sweeps'? known: ablation, "),
        (b"settings: {}", "params.yaml: settings belongs into params/settings.yaml"),
        (b"grid: {}\nsweeps: {}", "params.yaml: ablation is None; it must be a block of keys"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(root, text, message):
    path = root / "params.yaml"
    path.write_bytes(text)
    with pytest.raises(ParameterError) as error:
        read_profile(root=root)
    assert str(error.value).startswith(message.format(path=path)) and "\n" not in str(error.value)


def test_of_many_names_an_error_lists_the_nearest_or_three():
    def refused(name: str) -> str:
        with pytest.raises(ParameterError) as error:
            read_preset(name, read_params())
        return str(error.value)

    names = sorted({*read_params()["methods"], *method_names()})
    assert refused("stmp").endswith("'stmp' is unknown; did you mean 'stamp'?")
    listed = f"known: {names[0]}, {names[1]}, {names[2]} and {len(names) - 3} more"
    assert refused("#" * 9).endswith(f"'{'#' * 9}' is unknown; {listed}")


@pytest.mark.parametrize("name", ["a; touch x #", "ä", "", "../a", "a-b"])
@pytest.mark.parametrize("section", ["settings", "methods", "sweeps"])
def test_a_name_that_a_shell_or_a_folder_could_take_for_more_is_refused(root, section, name):
    file = "params.yaml" if section == "sweeps" else f"params/{section}.yaml"
    values = read_yaml(root / file)
    block = values[section] if section == "sweeps" else values
    block[name] = next(iter(block.values()))
    (root / file).write_text(yaml.safe_dump(values))
    where = "params.yaml: sweeps." if section == "sweeps" else f"{file}:"
    with pytest.raises(ParameterError) as error:
        read_profile(root=root)
    assert str(error.value) == f"{where} {name!r} must be of letters, digits and underscores"


GRIDS = ["grid", "more_seeds", "more_settings", "more_rivals", "more_parts", "tour"]


@pytest.mark.parametrize("name", ["a; touch x #", "a\ntouch x\n", "`x`", "", "../a", None, 1.5])
@pytest.mark.parametrize("axis", ["setting", "method", "seeds"])
@pytest.mark.parametrize("grid", GRIDS)
def test_no_word_of_a_command_is_more_than_a_name(grid, axis, name):
    params = {**read_profile(STUDIES), **read_profile(CIFAR100), **read_profile()}
    params[grid][axis] = [*params[grid][axis], name]
    with pytest.raises(ParameterError, match=rf"^params\.yaml: {grid}\.{axis}"):
        check_names(params)


def write_chosen(root: Path, chosen: dict[str, Any]) -> None:
    values = read_yaml(root / "params/quick.yaml")
    (root / "params/quick.yaml").write_text(yaml.safe_dump({**values, "chosen": chosen}))


def test_a_profile_has_values_of_presets_of_its_own(root):
    """As those that extend them have; a block that a preset has not is made."""
    write_chosen(root, {"stamp": {"memory.exemplars_per_class": 7}, "joint": {"server_lr": 2.0}})
    params, others = read_profile("quick", root), read_profile(root=root)
    assert read_preset("temporal_only", params)["memory"] == {
        **read_preset("temporal_only", others)["memory"],
        "exemplars_per_class": 7,
    }
    assert read_preset("joint", params) == {"kind": "joint", "server_lr": 2.0}
    assert "chosen" not in params and params["methods"]["replay"] == others["methods"]["replay"]


def test_a_value_may_hold_in_one_setting(root):
    """It goes before what holds everywhere, and presets that extend this one have it as well."""
    own = {"tiny": {"replay": {"memory.exemplars_per_class": 3}}}
    write_chosen(root, {"replay": {"server_lr": 1.25}, **own})
    params = read_profile("quick", root)
    there, elsewhere = (
        load_experiment(setting, "replay_step", params).params for setting in ("tiny", "tiny_alpha")
    )
    assert there.memory.exemplars_per_class == 3
    assert elsewhere == replace(there, memory=replace(there.memory, exemplars_per_class=5))
    values = {"memory.exemplars_per_class": 4}
    changed = load_experiment("tiny", "replay", params, values).params
    assert changed.memory.exemplars_per_class == 4 and changed.server_lr == 1.25


def test_a_setting_overrides_the_one_it_extends():
    params = read_params()
    tiny, alpha = (read_setting(name, params) for name in ("tiny", "tiny_alpha"))
    split = replace(tiny.split, order="common", alpha=1.0)
    assert alpha == replace(tiny, name="tiny_alpha", split=split, diagnostics=Diagnostics())
    values = {"setting.training.lr": 0.05}
    changed = load_experiment("tiny_alpha", "fedavg", params, values).setting
    assert changed == replace(alpha, training=replace(alpha.training, lr=0.05))


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("3", [3]), (3, [3]), ("0to2", [0, 1, 2]), ("4to4", [4]), ("9to10", [9, 10])],
)
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds


def test_a_page_is_every_combination_with_seeds_as_text():
    grid = {"setting": ["a", "b"], "method": ["m", "n", "v"], "seeds": ["0to1", 2]}
    variants = {"baselines": ["n"], "method": ["v"]}
    tour = {**grid, "method": ["m"]}
    params = {"file": "f", "grid": grid, "ablation": variants, "tour": tour}
    for page, methods in zip(PAGES, ("mnv", "mn", "nv", "m"), strict=True):
        runs = list(itertools.product("ab", methods, ("0to1", "2")))
        assert list(expand_grid(page, params)) == runs
    assert list(expand_grid("tour.b", params)) == [("b", "m", "0to1"), ("b", "m", "2")]


def test_more_seeds_and_settings_follow_the_grid_on_every_page():
    """Where no block has a variant, baselines show no part of STAMP: not on the ablation's page."""
    params = {
        "file": "f",
        "grid": {"setting": ["a", "b"], "method": ["m", "n"], "seeds": ["0"]},
        "more_parts": {"setting": ["a"], "method": ["v"], "seeds": ["0"]},
        "more_seeds": {"setting": ["a"], "method": ["n", "v"], "seeds": ["1"]},
        "more_settings": {"setting": ["c"], "method": ["n"], "seeds": ["0"]},
        "ablation": {"baselines": ["n"], "method": ["v"]},
    }
    runs = {page: [" ".join(run) for run in expand_grid(page, params)] for page in PAGES[:3]}
    baselines = ["a m 0", "a n 0", "b m 0", "b n 0"]
    assert runs["grid"] == [*baselines, "a v 0", "a n 1", "a v 1", "c n 0"]
    assert runs["comparison"] == [*baselines, "a n 1", "c n 0"]
    assert runs["ablation"] == ["a n 0", "a v 0", "a n 1", "a v 1"]
    assert list(expand_grid("comparison.c", params)) == [("c", "n", "0")]


def test_a_preset_overrides_the_one_it_extends():
    """At any depth and over several presets; what none of them sets has its default."""
    methods = {
        **parameters.PARAMS["methods"],
        "nearer": {"extends": "sam", "spatial": {"softmax": {"rounds": 9}}},
        "again": {"extends": "sam", "temporal": {"kappa": 0.125}},
    }
    params = {"methods": deepcopy(methods)}
    assert read_preset("nearer", params) == {
        "kind": "stamp",
        "memory": {"exemplars_per_class": 3},
        "spatial": {"kappa": 0.25, "softmax": {"rounds": 9, "lr": 2.0}},
        "temporal": None,
    }
    _, again = resolve_preset("again", params)
    assert (again.temporal.kappa, again.temporal.lr) == (0.125, 1.0)
    assert params["methods"] == methods


def test_a_preset_without_a_kind_is_the_method_of_its_name_also_when_extended():
    methods = {"replay": {"ratio": 0.5}, "more": {"extends": "replay", "server_lr": 2.0}}
    kind, params = resolve_preset("more", {"methods": methods})
    assert kind is get_method("replay") and (params.ratio, params.server_lr) == (0.5, 2.0)
