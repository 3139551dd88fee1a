"""What is checked of a profile before anything runs: all settings, presets, plans and networks."""

from stamp_core.client.runtime import ClientRuntime
from stamp_core.config.decode import ParameterError, invalid
from stamp_core.config.params import FILES, Params, parse_seeds, read_setting
from stamp_core.data.loading import load_dataset
from stamp_core.data.split import make_plan
from stamp_core.engine.experiment import load_experiment
from stamp_core.methods.base.registry import resolve_preset
from workbench.workflow.profiles import OWN_PAGES, expand_grid


def check_params(params: Params) -> int:
    """Check a profile with all settings and presets; returns the number of its experiments."""
    for setting in params["settings"]:
        load_experiment(setting, next(iter(params["methods"])), params)
    for method in params["methods"]:
        resolve_preset(method, params)
    experiments = list(expand_grid("grid", params))
    for page in (page for page in OWN_PAGES if page in params):
        for _, method, _ in expand_grid(page, params):
            resolve_preset(method, params)  # a misspelt one is refused with its nearest name
    for setting, method, seeds in experiments:
        load_experiment(setting, method, params)
        parse_seeds(seeds)
    trained = {method for _, method, _ in experiments}
    for key, methods in params["ablation"].items():
        if missing := sorted(set(methods) - trained):
            raise invalid(f"{params['file']}: ablation.{key}", missing[0], "in grid.method")
    tour = set(expand_grid("tour", params)) if "tour" in params else set()
    if untrained := sorted(tour - set(experiments)):
        raise invalid(f"{params['file']}: tour", untrained[0], "in grid, which trains it")
    return len(experiments)


def check_setting(name: str, params: Params) -> None:
    """Refuse a setting whose plan or network cannot be made for its images."""
    setting = read_setting(name, params)
    dataset = load_dataset(setting.data)
    try:
        make_plan(setting.split, dataset, seed=0)
        ClientRuntime(setting, dataset)
    except ParameterError as error:
        raise ParameterError(f"{FILES['settings']}: {name}: {error}") from None
