"""Files that are damaged: bytes flipped, cut, emptied, forged, or replaced by a folder."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.faults import Kind, Outcome
from benchmarks.faults.project import Place, remove


def flip(path: Path, draw: random.Random) -> None:
    """Invert some bits in up to eight bytes."""
    content = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 8) if content else 0):
        content[draw.randrange(len(content))] ^= draw.randint(1, 255)
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    """Keep the beginning alone."""
    path.write_bytes(path.read_bytes()[: draw.randrange(max(1, path.stat().st_size))])


def empty(path: Path, draw: random.Random) -> None:
    """Keep nothing."""
    path.write_bytes(b"")


def to_folder(path: Path, draw: random.Random) -> None:
    """Put a folder with a file in it where the file was."""
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("a file")


def forge(path: Path, draw: random.Random) -> None:
    """Write a sound file of the same form with another value; bytes are flipped in other files."""
    if path.suffix == ".safetensors":
        arrays = load_file(path)
        if arrays:
            name = draw.choice(sorted(arrays))
            arrays[name] = np.ones((2, *arrays[name].shape), arrays[name].dtype)
            return save_file(arrays, path)
    if path.suffix == ".json":
        values = json.loads(path.read_text())
        if alter(values, draw):
            path.write_text(json.dumps(values, indent=1) + "\n")
            return None
    return flip(path, draw)


def alter(tree: Any, draw: random.Random) -> bool:
    """Change one number of a tree of plain values; whether there was one."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in draw.sample(found := list(pairs), len(found)):
        if isinstance(value, dict | list) and alter(value, draw):
            return True
        if type(value) in (int, float):
            tree[key] = value + 1
            return True
    return False


HOW: dict[str, Callable[[Path, random.Random], Any]] = {
    "flipped": flip,
    "cut": cut,
    "emptied": empty,
    "a folder": to_folder,
    "forged": forge,
}


def broken(path: Path, draw: random.Random, number: int) -> str:
    """Damage a file in the way of a number; what was done, in words."""
    how = list(HOW)[number % len(HOW)]
    path.chmod(0o644)
    HOW[how](path, draw)
    return how


def names_of(path: Path, root: Path) -> list[str]:
    """What a message may call a file: its path, or that of the run it belongs to."""
    return [
        str(path),
        *(str(each) for each in path.relative_to(root).parents if len(each.parts) > 2),
    ]


# --- of a small training

SMALL = {  # pattern below data, suffixes, and whether the training has ended
    "run.json of a record": ("quick/runs", lambda path: path.suffix == ".json", True),
    "arrays of a record": ("quick/runs", lambda path: path.suffix != ".json", True),
    "checkpoint": ("resume", lambda path: True, False),
    "plan": ("quick/splits", lambda path: True, True),
    "plan before a checkpoint": ("quick/splits", lambda path: True, False),
    "image cache": ("cache", lambda path: path.name[0] != ".", True),
}


def prepared(place: Place, method: str, ended: bool) -> None:
    """Put the files of an ended or of a broken training into the agent's copy."""
    kept = place.folder / f"{method}-{'ended' if ended else 'broken'}"
    agent = place.agent
    agent.forget()
    if not kept.exists():
        half = place.shared.operations[method] * 2 // 3
        agent.call("train_small", method=method, die_at=None if ended else half)
        shutil.copytree(agent.root / "data", kept)
    remove(agent.root / "data")
    shutil.copytree(kept, agent.root / "data")


def damage_small(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """Damage to one file that a small training keeps; then the training is called again."""
    kind, method = list(SMALL)[number % len(SMALL)], draw.choice(["stamp", "replay"])
    folder, wanted, ended = SMALL[kind]
    prepared(place, method, ended)
    root = place.agent.root / "data" / folder
    files = sorted(path for path in root.rglob("*") if path.is_file() and wanted(path))
    if not files:
        return [Outcome(kind, "lost", f"no file of this kind in data/{folder}")]
    path = draw.choice(files)
    how = broken(path, draw, number // len(SMALL))
    answer = place.agent.call("train_small", method=method)
    what = f"{kind}: {how} ({path.name})"
    return [answer.judged(what, place.shared.small[method], *names_of(path, place.agent.root))]


# --- of parameters


def damage_parameters(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """Damage to a parameter file: the first stage refuses it, unless it is another sound one."""
    agent = place.agent
    agent.forget()
    path = draw.choice(agent.parameter_files())
    ways = ["cut", "emptied", "a folder", "flipped"]
    if path.name in ("quick.yaml", "tuning.yaml"):  # not read by the first stage
        path = agent.root / "params.yaml"
    how = ways[number % len(ways)]
    HOW[how](path, draw)
    answer = agent.call("first_stage")
    if path.is_dir():
        remove(path)
    what, name = f"{path.name}: {how}", path.relative_to(agent.root)
    return [answer.judged(what, answer.value, str(name), str(path))]


# --- of the complete pipeline

WHOLE = {
    "dvc.lock": "dvc.lock",
    "executed notebook": "data/executed/*.ipynb",
    "plan": "data/splits/*/*",
    "record": "data/runs/*/*/*/*",
    "record of a sweep": "data/sweeps/*/*/*/*",
    "object of DVC's cache": ".dvc/cache/files/md5/*/*",
    "fingerprint": "data/source/code/*",
}


def damage_pipeline(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """Damage to one file of a pipeline that has ended; then DVC is called again."""
    kind = list(WHOLE)[number % len(WHOLE)]
    pipeline = place.pipeline(draw, finished=True)
    path = draw.choice(sorted(each for each in pipeline.root.glob(WHOLE[kind]) if each.is_file()))
    how = broken(path, draw, number // len(WHOLE) + number)
    if kind.startswith("object"):  # it is needed where its output is missing
        for each in ("data/runs", "data/splits", "data/executed"):
            remove(pipeline.root / each)
    status, output = pipeline.run()
    name = path.relative_to(pipeline.root)
    said = (str(name), str(path), *map(str, name.parents[:2]))
    outcome = pipeline.judged(f"{kind}: {how} ({path.name})", status, output, place, *said)
    remove(pipeline.root)
    return [outcome]


KINDS = {
    "damage small": Kind(
        "run.json and arrays of a record, checkpoint, plan, image cache of a small training: bytes "
        "flipped, cut, emptied, a folder in its place, a sound file with another value",
        damage_small,
        90,
    ),
    "damage parameters": Kind(
        "a parameter file cut, emptied, a folder in its place, bytes flipped; survived: another "
        "sound parameter file came out",
        damage_parameters,
        24,
    ),
    "damage pipeline": Kind(
        "dvc.lock, executed notebooks, plans, records, records of sweeps, objects of DVC's cache, "
        "fingerprints of the finished pipeline; then `dvc repro`",
        damage_pipeline,
        14,
        whole=True,
    ),
}
