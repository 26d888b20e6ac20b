"""A run folder, for the tests that look at what a command leaves in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from marft_bridge.runs.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """With nothing in it."""
    made = RunFolder(tmp_path / "run")
    made.create()
    return made
