"""Files from elsewhere: archives that lead out, pickles of PFLlib, forged records, huge counts."""

import io
import pickle
import random
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults import Kind, Outcome
from benchmarks.faults.damage import prepared
from benchmarks.faults.hostile import MEMORY, Trap, judged
from benchmarks.faults.project import Place, remove
from stamp_core.results.records import load_record

Member = tuple[str, bytes, str]  # name, type and target of a member of an archive
LONG, LETTERS = ["d" * 247] * 16, "abcdefghijklmnop"
OUT = "/".join(LETTERS) + "/" + "l" * 254  # short in its letters, longer than realpath() follows
CHAIN: list[Member] = [
    *(("/".join(LONG[: k + 1]), tarfile.DIRTYPE, "") for k in range(16)),
    *(("/".join([*LONG[:k], LETTERS[k]]), tarfile.SYMTYPE, LONG[0]) for k in range(16)),
    (OUT, tarfile.SYMTYPE, "../" * 16),
    ("escape", tarfile.SYMTYPE, OUT + "/.." * 9 + "{trap}"),
    ("escape/made", tarfile.REGTYPE, ""),
]
ARCHIVES: dict[str, list[Member]] = {
    "a chain of links": CHAIN,
    "a link to a folder": [("a", tarfile.SYMTYPE, "{trap}"), ("a/made", tarfile.REGTYPE, "")],
    "a hard link": [("a", tarfile.LNKTYPE, "/etc/hostname")],
    "an absolute path": [("{trap}/made", tarfile.REGTYPE, "")],
    "a path upwards": [("../" * 9 + "{trap}/made", tarfile.REGTYPE, "")],
    "a pipe": [("a", tarfile.FIFOTYPE, "")],
}


def hostile_archive(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """An archive of records whose members lead out of its folder: refused by name."""
    name, members = list(ARCHIVES.items())[number % len(ARCHIVES)]
    path = place.folder / "hostile.tar"
    with tarfile.open(path, "w") as tar:
        for each in members:
            member = tarfile.TarInfo(each[0].format(trap=place.traps))
            member.type, member.mode = each[1], 0o755
            member.linkname = each[2].format(trap=place.traps)
            tar.addfile(member, io.BytesIO())
    answer = place.agent.call("unpack_records", path=str(path), runs=str(place.folder / "unpacked"))
    return [judged(place, f"archive: {name}", answer, [0, 0], str(path))]


def pickled(x: Any) -> bytes:
    """A client's images and labels as NumPy pickles them."""
    return pickle.dumps(np.array({"x": x, "y": np.zeros(4, np.int64)}, object), 4)


PICKLES: dict[str, Callable[[Path], bytes]] = {
    "runs": lambda trap: pickle.dumps(Trap(trap)),
    "runs beside arrays": lambda trap: pickled(np.array([Trap(trap)], object)),
    "a pointer": lambda trap: pickle.dumps(np.array(1.5)).replace(b"f8", b"O8"),
    "objects over bytes": lambda trap: pickled(np.ones(4)).replace(b"f8", b"O8"),
    "a place 2^31 in the memo": lambda trap: b"\x80\x04}r\xff\xff\xff\x7f.",
    "2^62 bytes": lambda trap: b"\x80\x05\x96" + b"\0" * 7 + b"\x40.",
    "a key of 2^300 parts": lambda trap: b"\x80\x04}(N" + b"2\x86" * 300 + b"Nu.",
    "a zip bomb": lambda trap: pickled(np.zeros(3 << 28, np.uint8)),
}


def hostile_client(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """A client's file of PFLlib that runs, corrupts or fills memory: refused by name."""
    name, content = list(PICKLES.items())[number % len(PICKLES)]
    folder = place.folder / "pfllib"
    (folder / "train").mkdir(parents=True)
    (folder / "config.json").write_text('{"num_clients": 1}')
    header = io.BytesIO()
    form = {"descr": "|O", "fortran_order": False, "shape": ()}
    np.lib.format.write_array_header_1_0(header, form)
    with zipfile.ZipFile(folder / "train/0.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("data.npy", header.getvalue() + content(place.traps / "pickle"))
    answer = place.agent.call("import_client", folder=str(folder), memory_limit=MEMORY)
    remove(folder)
    return [judged(place, f"PFLlib: {name}", answer, None, str(folder / "train/0.npz"))]


VALUES = (None, [], {}, "x", "<script>|\n", -1, 10**9, 0.5, [None], True)


def forged_record(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """A record with one other value: its row is refused, or what is computed is unchanged."""
    prepared(place, "stamp", True)
    folder = sorted(place.agent.root.glob("data/quick/runs/*/*/0"))[0]
    right = place.agent.call("board", folder=str(folder.parents[1])).value
    record = load_record(folder)
    places, tree = list[tuple[Any, Any]](), [record.about]
    while tree:
        block = tree.pop()
        places += [(block, key) for key in block]
        tree += [each for each in block.values() if isinstance(each, dict)]
    block, key = draw.choice(places)
    block[key] = draw.choice(VALUES)
    remove(folder)
    record.save(folder)
    answer = place.agent.call("board", folder=str(folder.parents[1]), memory_limit=4 * MEMORY)
    what = f"record: {key} is {block[key]!r}"
    if answer.value and len(answer.value) < len(right):  # a row is refused, the others are there
        kept = all(row in right for row in answer.value)
        return [Outcome(what, "refused" if kept else "silently wrong")]
    return [judged(place, what, answer, right, str(folder))]


KEYS = ("split.clients", "split.tasks", "split.cycles", "network.features", "training.shift")
HUGE = (10**9, 2**63, "9" * 5000, "0x" + "f" * 5000)
WORDS = (
    *((("--set", f"setting.{key}={value}"), f"{key}") for key in KEYS for value in HUGE),
    *((("--seeds", text), "seeds") for text in ("0to999999999", "9" * 5000, "2to1", "")),
    *((("--set", "server_lr=1", "--set", "server_lr=2"), "server_lr"), (("",), "''")),
)


def huge_count(place: Place, draw: random.Random, number: int) -> list[Outcome]:
    """A count that no memory holds, or a word twice, on the command line: refused by name."""
    words, name = WORDS[number % len(WORDS)]
    line = ["run", "tiny", "fedavg", *words]
    answer = place.agent.call("command", words=line, memory_limit=MEMORY)
    return [judged(place, f"command: {' '.join(words)[:60]}", answer, 1, name)]


KINDS = {
    "archives": Kind("archives of records that lead out of their folder", hostile_archive, 12),
    "PFLlib": Kind("clients' files that run, corrupt or fill memory", hostile_client, 16),
    "forged records": Kind("one value of a record replaced; the leaderboard", forged_record, 560),
    "counts": Kind("huge counts and repeated words on the command line", huge_count, len(WORDS)),
}
