"""The records of a setting or a sweep in one small file: no weights, features or exemplars."""

import argparse
import lzma
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from stamp_core.core.atomic import atomic_write
from stamp_core.core.paths import ROOT
from stamp_core.results.records import load_record
from workbench.workflow.grid import data_folder
from workbench.workflow.profiles import OWN, read_profile


def pack(folders: Sequence[Path], path: Path) -> None:
    """Write the records in folders of runs to `path`; equal records give equal bytes."""
    with (
        TemporaryDirectory() as scratch,
        atomic_write(path) as part,
        tarfile.open(part, "w:xz", preset=9) as tar,
    ):
        for folder in sorted(record.parent for runs in folders for record in runs.glob("*/digest")):
            light = replace(load_record(folder), weights={}, features={}, memory={})
            name = f"{folder.parent.name}/{folder.name}"
            light.save(Path(scratch) / name)
            for file in sorted((Path(scratch) / name).iterdir()):
                member = tarfile.TarInfo(f"{name}/{file.name}")  # of no owner and no time
                member.size = file.stat().st_size
                with file.open("rb") as content:
                    tar.addfile(member, content)


def unpack(path: Path, runs: Path) -> tuple[int, int]:
    """Write the records in `path` below `runs`: how many were new, and how many there before."""
    new, kept = 0, 0
    with TemporaryDirectory() as scratch:
        try:
            with tarfile.open(path) as tar:
                for member in tar:  # Python 3.11.7 follows a chain of links out of the folder
                    if not (member.isreg() or member.isdir()):
                        raise ValueError(f"{member.name!r} must be a plain file or a folder")
                tar.extractall(scratch, filter="data")
        except (ValueError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
            raise ValueError(f"{path} must be a whole archive of records: {error}") from None
        for digest in sorted(Path(scratch).glob("*/*/digest")):
            folder = runs / digest.parent.relative_to(scratch)
            if folder.exists():  # whole, with weights
                kept += 1
                continue
            load_record(digest.parent).save(folder)  # the scratch folder may be on another disk
            new += 1
    return new, kept


def main(arguments: Sequence[str] | None = None) -> None:
    """Pack or unpack the records of a profile's setting or sweep."""
    parser = argparse.ArgumentParser(prog="python -m workbench.workflow.archive")
    parser.add_argument("command", choices=["pack", "unpack"])
    parser.add_argument("profile", choices=OWN)
    parser.add_argument("name", help="a setting or a sweep")
    chosen = parser.parse_args(arguments)
    path = ROOT / "figures" / chosen.profile / "records" / f"{chosen.name}.tar.xz"
    kind = "sweeps" if chosen.name in read_profile(chosen.profile).get("sweeps", {}) else "runs"
    runs = ROOT / data_folder(chosen.profile) / kind / chosen.name
    if chosen.command == "unpack":
        if not path.exists():
            parser.error(f"{path} is not there: records of {chosen.name} are not published")
        try:
            new, kept = unpack(path, runs)
        except ValueError as error:
            parser.error(str(error))
        print(f"{runs}: {new} records from {path.name}, {kept} were there")
        return
    folders = sorted(runs.glob("*"))
    if not folders:
        parser.error(f"{runs} has no records of {chosen.name}: train them first")
    pack(folders, path)
    print(f"{path}: records of {len(folders)} runs, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
