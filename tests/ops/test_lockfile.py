"""Lock files: what DVC would refuse is replaced by the last good copy; one driver at a time."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import wait_until

from stamp_core.core import paths
from workbench.workflow import lockfile

STAGE = """\
  {}:
    cmd: touch {}
    outs:
    - path: {}
      hash: md5
      md5: d41d8cd98f00b204e9800998ecf8427e
"""
NAMES = ("source", "train@tiny-fedavg-0to1", "sweep@kappa")
WHOLE = "schema: '2.0'\nstages:\n" + "".join(STAGE.format(name, name, name) for name in NAMES)

FIRST_STAGE = """
import sys
from pathlib import Path
from stamp_core.core import paths
from workbench.workflow import repro
from workbench.workflow import lockfile
paths.ROOT = repro.ROOT = Path(sys.argv[1])
with lockfile.driver_lock():
    repro.dvc("repro", "source")
"""


@pytest.fixture(autouse=True)
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sound lock file in an empty project."""
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    (tmp_path / "dvc.lock").write_text(WHOLE)
    return tmp_path / "dvc.lock"


def test_a_lock_file_cut_anywhere_comes_back_or_is_one_of_fewer_outputs(lock: Path) -> None:
    """A file that DVC accepts lacks the end: it only runs those stages again."""
    lockfile.copy_sound_files()
    for length in range(len(WHOLE)):
        lock.write_text(WHOLE[:length])
        sound = lockfile.is_sound(lock.read_bytes())
        assert not sound or WHOLE[length - 1] == "\n"
        lockfile.restore_damaged_files()
        assert lock.read_text() == (WHOLE[:length] if sound else WHOLE), length


def test_processes_that_a_killed_driver_left_are_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DVC would refuse to run beside them; a list that a kill has cut would stop it for ever."""
    rwlock = tmp_path / ".dvc" / "tmp" / "rwlock"
    rwlock.parent.mkdir(parents=True)
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
    threading.Thread(target=left.wait).start()  # or it would stay as a zombie
    info = {"pid": left.pid, "cmd": "dvc repro"}
    rwlock.write_text(json.dumps({"read": {"a": [info]}, "write": {"b": info}}))
    lockfile.clear_rwlock()
    assert left.poll() is not None and not rwlock.exists()
    assert capsys.readouterr().out.count(f"DVC process {left.pid} of an earlier call runs") == 1
    for content in ("", '{"read": {"a": [{"pid"', "[]"):
        rwlock.write_text(content)
        lockfile.clear_rwlock()
        assert not rwlock.exists()


OLDER = WHOLE[: WHOLE.index("  sweep@kappa")]  # as after `git checkout` of other results
BACK = "dvc.lock was damaged: its last good copy is back\n"
ASIDE = "dvc.lock was damaged, and is now dvc.damaged\n"


@pytest.mark.parametrize(
    ("content", "copied", "expected", "message"),
    [
        (None, True, WHOLE, BACK),
        (None, False, None, ASIDE),
        (b"\xff\x00 of somebody else", False, None, ASIDE),
        (WHOLE[:-1].encode(), True, WHOLE, BACK),
        (OLDER.encode(), True, OLDER, ""),
    ],
)
def test_what_dvc_refuses_is_replaced_by_a_copy_or_set_aside(
    content: bytes | None,
    copied: bool,
    expected: str | None,
    message: str,
    lock: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Be it a file or a folder (None); of a damaged file no copy is made."""
    if copied:
        lockfile.copy_sound_files()
    lock.unlink()
    if content is None:
        lock.mkdir()
    else:
        lock.write_bytes(content)
        lockfile.copy_sound_files()
    lockfile.restore_damaged_files()
    assert (lock.read_text() if lock.exists() else None) == expected
    assert lock.with_suffix(".damaged").exists() == (content is None or expected is None)
    assert capsys.readouterr().out == message


def test_all_threads_of_the_driver_may_copy_at_once() -> None:
    """Each does when its stages have ended."""
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(lockfile.copy_sound_files) for _ in range(40)]:
            done.result()


def test_stages_that_are_gone_leave_the_lock_file(lock: Path) -> None:
    lockfile.drop_gone_stages(["source", "sweep@kappa", "train@tiny-fedavg-0to10"])
    expected = STAGE.format(*3 * [NAMES[1]])
    assert expected in WHOLE and lock.read_text() == WHOLE.replace(expected, "")


def test_a_driver_waits_for_the_dvc_that_a_killed_one_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may not have written yet which paths it uses; nothing has to be removed by hand."""
    program, begun, ended = (tmp_path / name for name in ("dvc", "begun", "ended"))
    program.write_text(f"#!/bin/sh\ntouch {begun}\nsleep 1\ntouch {ended}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with subprocess.Popen([sys.executable, "-c", FIRST_STAGE, str(tmp_path)]) as driver:
        wait_until(begun.exists, "its DVC")
        driver.kill()
    assert not ended.exists()
    with lockfile.driver_lock():
        assert ended.exists()
    waiting = f"process {driver.pid} runs this pipeline: waiting for its end\n"
    assert capsys.readouterr().out == waiting


def test_folders_in_the_place_of_objects_of_dvcs_cache_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lockfile.paths, "ROOT", tmp_path)
    objects = tmp_path / ".dvc/cache/files/md5/ab"
    (objects / "folder").mkdir(parents=True)
    (objects / "folder/inside").touch()
    (objects / "file").touch()
    lockfile.remove_folders_from_cache()
    assert [path.name for path in objects.iterdir()] == ["file"]
    assert "ab/folder was a folder" in capsys.readouterr().out
