"""The command `stamp`: one experiment, names, parameters, whether a record is right."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from stamp_core.config.params import read_params
from stamp_core.core.paths import DATA
from stamp_core.core.processes import without_garbage_collection
from workbench.workflow.profiles import DEFAULT

SEEDS = "0to1"  # of a run, where none are named

ERRORS = (OSError, ValueError, ArithmeticError, MemoryError)


def run(arguments: argparse.Namespace) -> None:
    """Train methods on the same seeds, and compare them."""
    with without_garbage_collection():
        from workbench.workflow.run import run_and_compare

    run_and_compare(arguments)


def print_names(section: str, chosen: str | None = None) -> None:
    """The names of a section with what sets each apart, a line each; or all of one setting."""
    if chosen is not None:
        from workbench.workflow.show import shown_setting

        print("\n".join(shown_setting(chosen)))
        return
    from stamp_core.methods.base.registry import with_all_methods

    for name, block in with_all_methods(read_params())[section].items():
        own = block or {}
        kind = own.get("kind") or own.get("extends") or own.get("data", {}).get("source")
        print(f"{name:28} {kind or ''}".rstrip())


def explain(arguments: argparse.Namespace) -> None:
    """Print what a parameter means, everywhere it is defined."""
    from workbench.workflow.explain import explanations  # imports every method

    for line in explanations(arguments.key, read_params()):
        print(line)


def show(arguments: argparse.Namespace) -> None:
    """Print every value of an experiment, and where it comes from."""
    from workbench.workflow.show import shown

    for line in shown(arguments.setting, arguments.method, arguments.profile):
        print(line)


def verify(arguments: argparse.Namespace) -> None:
    """Print a line for each check of each record; ValueError if one does not hold."""
    from workbench.workflow.verify import MALFORMED, Check, one_line, verify_record

    failed = []
    for folder in arguments.folder:
        try:
            checks = verify_record(folder, arguments.plan, arguments.train)
        except MALFORMED as error:
            checks = [Check("record", False, one_line(error))]
        for check in checks:
            print(f"{folder}  {check.name:10}  {'ok' if check.holds else 'NO'}  {check.found}")
            failed += [] if check.holds else [f"{folder}: {check.name} {check.found}"]
    if failed:
        raise ValueError(f"not verified: {'; '.join(failed)}")


def leaderboard(arguments: argparse.Namespace) -> None:
    """Write the page of all records that verify, and name the others; ValueError if none does."""
    from workbench.workflow.leaderboard import find_records, verify_all, write_leaderboard

    table, refused = verify_all(find_records(arguments.folder))
    for folder, why in refused.items():
        print(f"not verified, left out: {folder}: {why}", file=sys.stderr)
    if table.empty:
        raise ValueError(f"none of {len(refused)} records verifies with the code that is here")
    print(f"{write_leaderboard(table, arguments.page)}: {len(table)} records")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser("stamp", description="Federated continual learning.")
    commands = whole.add_subparsers(required=True, metavar="command")
    one = commands.add_parser("run", help="train methods on a setting, and compare them")
    one.add_argument("setting")
    one.add_argument("method", nargs="+", help="the first is compared with each of the others")
    pairs = one.add_argument("--set", action="extend", nargs="+", metavar="KEY=VALUE")
    pairs.help, pairs.default = "other values, of the setting and of the first method", []
    one.add_argument("--seeds", default=SEEDS, help=f"a range such as 0to5 (default: {SEEDS})")
    one.add_argument("--plan", metavar="FILE", help="who learns what when: a .json or .csv file")
    one.add_argument("--workers", type=int, default=1, help="processes; 0: one per core")
    one.add_argument("--device", default="auto", help="cpu, cuda or auto, a GPU where there is one")
    out = one.add_argument("--out", type=Path, default=DATA / "own", metavar="FOLDER")
    out.help = "where records are kept; a seed that has a current one is not trained again"
    one.add_argument("--table", type=Path, metavar="FILE", help="a .md, .csv or .tex file as well")
    one.add_argument("--profile", default=DEFAULT, help="with its chosen values, as cifar100")
    one.add_argument("--log", choices=("tensorboard", "wandb"), help="curves while it trains")
    one.set_defaults(call=run)
    for section in ("methods", "settings"):
        names = commands.add_parser(section, help=f"the names of {section}")
        if section == "settings":
            names.add_argument("--show", metavar="SETTING", help="its values, and who learns what")
        names.set_defaults(section=section, show=None)
        names.set_defaults(call=lambda arguments: print_names(arguments.section, arguments.show))
    check = commands.add_parser("verify", help="compute again what a record says of itself")
    check.add_argument(
        "folder", nargs="+", type=Path, help="as data/runs/digits/stamp-200to205/200"
    )
    drawn = "the plan, where it was not drawn here"
    check.add_argument("--plan", type=Path, metavar="FILE", help=drawn)
    check.add_argument("--train", action="store_true", help="train it again, and compare bits")
    check.set_defaults(call=verify)
    board = commands.add_parser("leaderboard", help="a page of all records that verify")
    board.add_argument("folder", nargs="+", type=Path, help="records are looked for below it")
    board.add_argument("--page", type=Path, default=Path("leaderboard.md"), help="what is written")
    board.set_defaults(call=leaderboard)
    meaning = commands.add_parser("explain", help="what a parameter means, e.g. spatial.kappa")
    meaning.add_argument("key")
    meaning.set_defaults(call=explain)
    values = commands.add_parser("show", help="every value of an experiment, and its place")
    values.add_argument("setting")
    values.add_argument("method")
    values.add_argument("--profile", default=DEFAULT, help="a file of params/, as cifar100")
    values.set_defaults(call=show)
    return whole


def main(words: Sequence[str] | None = None) -> int:
    """The exit status of the command."""
    arguments = parser().parse_args(words)
    try:
        arguments.call(arguments)
    except ERRORS as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
