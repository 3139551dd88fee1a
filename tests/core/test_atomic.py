"""Files and folders replaced whole: after any error the old content, no scratch file, a name."""

import errno
import os
import threading
from pathlib import Path

import pytest

from stamp_core.core.atomic import add_path_to_errors, atomic_folder, atomic_write

TIMES = 50


def test_a_file_is_replaced_when_the_context_ends(tmp_path):
    path = tmp_path / "new" / "plan.json"
    for text in ("first", "second"):
        with atomic_write(path) as part:
            part.write_text(text)
            assert part.parent == path.parent
            assert str(os.getpid()) in part.name
            assert part.suffix == ".part"
            assert path.exists() == (text == "second")
        assert path.read_text() == text
    assert list(path.parent.iterdir()) == [path]


def test_data_are_flushed_before_the_rename(tmp_path, monkeypatch):
    path, seen, flush = tmp_path / "plan.json", list[tuple[str, bool]](), os.fsync

    def record(handle: int) -> None:
        seen.append((str(Path(f"/proc/self/fd/{handle}").readlink()), path.exists()))
        flush(handle)

    monkeypatch.setattr(os, "fsync", record)
    with atomic_write(path) as part:
        part.write_text("new")
    assert seen == [(str(part), False)]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space"), "[Errno 28] No space: 'a.npy'"),
        (OSError("9 requested and 4 written"), "a.npy: 9 requested and 4 written"),
        (OSError(errno.ENOSPC, "No space", "b.npy"), "[Errno 28] No space: 'b.npy'"),
        (OSError("a.npy could not be read"), "a.npy could not be read"),
        (ValueError("bad"), "bad"),
    ],
)
def test_an_os_error_names_its_file(error, text):
    with pytest.raises(type(error)) as caught, add_path_to_errors(Path("a.npy")):
        raise error
    assert str(caught.value).startswith(text)


def test_threads_that_replace_one_folder_leave_one_of_theirs_whole(tmp_path):
    folder, errors = tmp_path / "record", list[BaseException]()

    def write(content: str) -> None:
        try:
            for _ in range(TIMES):
                with atomic_folder(folder) as part:
                    for name in ("a", "b"):
                        (part / name).write_text(content)
        except BaseException as error:  # any error fails the test
            errors.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in "xyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert list(tmp_path.iterdir()) == [folder]
    assert (folder / "a").read_text() == (folder / "b").read_text()


def test_the_scratch_folder_of_a_killed_process_goes_and_a_running_ones_stays(tmp_path):
    ended = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(ended, 0)
    killed, running = (tmp_path / f"record.{pid}.7.part" for pid in (ended, os.getppid()))
    for left in (killed, running):
        left.mkdir()
    with atomic_folder(tmp_path / "record"):
        assert not killed.exists()
    assert running.exists()
