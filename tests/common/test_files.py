"""Owns: a file that was written atomically is the old one or the new one after a power cut, and the new one once that
was acknowledged; what a killed writer left is deleted by the next writer of the file, and nothing else is."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from support.power_cuts import recorded

from marft_bridge.common.files import replacing, write_atomically
from marft_bridge.training.advantage_log import credits_to_file


def test_a_power_cut_leaves_the_old_text_or_the_new_one_and_never_the_old_one_once_that_was_said(
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "a.json").write_text("old")
    with recorded(disk) as cuts:
        write_atomically(disk / "a.json", "new and longer")
        cuts.acknowledge("new")
    texts = set()
    for tree, acknowledged in cuts.crashes():
        text = tree["a.json"]
        assert text in (b"old", b"new and longer")
        assert text != b"old" or "new" not in acknowledged
        texts.add(text)
    assert len(texts) == 2


def leave_half_written(path: Path) -> None:
    """Has a process write half a file and be killed."""
    pid = os.fork()
    if pid == 0:
        with replacing(path) as (handle, _):
            os.write(handle, b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_writer_left_goes_with_the_next_writing_of_the_file(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        leave_half_written(tmp_path / name)
    (tmp_path / ".a.json.notes").touch()  # a user's
    assert len(names_in(tmp_path)) == 3
    write_atomically(tmp_path / "a.json", "new")
    assert [name for name in names_in(tmp_path) if ".b.json." not in name] == [".a.json.notes", "a.json"]
    assert len(names_in(tmp_path)) == 3  # that of another file waits for its own writer
    leave_half_written(tmp_path / "round-00001.parquet")
    write_atomically(tmp_path / "b.json", "new")
    credits_to_file([], tmp_path, 1)
    assert names_in(tmp_path) == [".a.json.notes", "a.json", "b.json", "round-00001.parquet"]


def test_what_a_living_writer_has_begun_stays(tmp_path: Path) -> None:
    with replacing(tmp_path / "a.json") as (handle, _):
        os.write(handle, b"last")
        write_atomically(tmp_path / "a.json", "first")
        assert (tmp_path / "a.json").read_text() == "first"
    assert (tmp_path / "a.json").read_text() == "last"
    assert names_in(tmp_path) == ["a.json"]
