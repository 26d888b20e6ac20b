"""Owns: a folder that is replaced whole is the old one or the new one, at whatever moment it is stopped.

What a killed writer left beside it goes with the next write; a living writer's, and anybody else's, stays.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.power_cuts import recorded, restore

from trainers import checkpoint
from trainers.common.files import finish_replacing, whole_folder


def write(folder: Path, text: str) -> None:
    with whole_folder(folder) as fresh:
        for name in (checkpoint.STATE_FILE, "trainer.safetensors"):
            (fresh / name).write_text(text)


def read(folder: Path) -> set[str]:
    return {path.read_text() for path in folder.iterdir()}


def test_a_power_cut_leaves_one_whole_checkpoint_and_none_that_was_replaced_and_acknowledged(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with recorded(disk) as cuts:
        for text in ("first", "second", "third"):
            write(disk / "runs" / "try" / "checkpoint", text)
            cuts.acknowledge(text)
    states = 0
    for number, (tree, acknowledged) in enumerate(cuts.crashes()):
        left = tmp_path / f"left {number}"
        restore(tree, left)
        folder = left / "runs" / "try" / "checkpoint"
        if not acknowledged and not checkpoint.is_saved(folder):
            continue
        assert checkpoint.is_saved(folder)
        (text,) = read(folder)  # of one save, in all of its files
        assert text in ("first", "second", "third")[max(0, len(acknowledged) - 1) :]
        write(folder, "later")
        assert read(folder) == {"later"}
        states += 1
    assert states > 20


def test_a_crash_between_the_two_moves_is_made_up_for(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint", "old")
    (tmp_path / "checkpoint").rename(tmp_path / ".checkpoint.abc.old")
    write(tmp_path / "elsewhere", "new")
    (tmp_path / "elsewhere").rename(tmp_path / ".checkpoint.abc")
    assert checkpoint.is_saved(tmp_path / "checkpoint")
    assert read(tmp_path / "checkpoint") == {"new"}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_folder_that_somebody_removed_does_not_come_back(tmp_path: Path) -> None:
    write(tmp_path / ".checkpoint.abc.old", "old")
    finish_replacing(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def test_a_move_that_fails_leaves_the_old_folder_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoint"
    write(folder, "old")
    rename = Path.rename

    def refusing(self: Path, target: Path) -> Path:
        if target == folder and not self.name.endswith(".old"):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refusing)
    with pytest.raises(OSError, match="No space left"):
        write(folder, "new")
    assert read(folder) == {"old"}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_what_a_killed_writer_left_goes_when_the_folder_is_next_looked_for(tmp_path: Path) -> None:
    """A run whose last write was killed after the new folder had its name writes no more."""
    write(tmp_path / "checkpoint", "whole")
    (tmp_path / ".checkpoint.abcdefgh.old").mkdir()
    (tmp_path / ".checkpoint.hgfedcba").mkdir()
    assert checkpoint.is_saved(tmp_path / "checkpoint")
    assert read(tmp_path / "checkpoint") == {"whole"}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write(folder, "first")
    if (pid := os.fork()) == 0:
        with whole_folder(folder) as fresh:
            (fresh / checkpoint.STATE_FILE).write_text("half")
            os._exit(9)  # as a kill: nothing is cleaned up
    os.waitpid(pid, 0)
    (tmp_path / ".checkpoint.abcdefgh.old").mkdir()  # a kill before the replaced one was deleted
    (tmp_path / ".checkpoint.notes").mkdir()  # a user's
    assert len(list(tmp_path.iterdir())) == 4
    with whole_folder(folder) as living:
        (living / checkpoint.STATE_FILE).write_text("third")
        write(folder, "second")
        assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", ".checkpoint.notes", living.name}
        assert read(folder) == {"second"}
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", ".checkpoint.notes"}
    assert read(folder) == {"third"}
