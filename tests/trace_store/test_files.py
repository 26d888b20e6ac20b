"""Owns: what `trace_store.files` does on other systems than the one that the tests run on."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from trace_store.files import sync


def test_where_fsync_leaves_bytes_in_the_drive_the_drive_is_told_to_write_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[int] = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)  # as macOS has it
    monkeypatch.setattr(fcntl, "fcntl", lambda handle, command: commands.append(command))
    monkeypatch.setattr(os, "fsync", lambda handle: pytest.fail("fsync alone is not enough there"))
    sync(tmp_path)
    assert commands == [51]
