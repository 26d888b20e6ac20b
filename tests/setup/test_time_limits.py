"""Owns: a test that hangs ends and says where it hung; a property too, whose runner takes the alarm for a find."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT, TESTS

PROPERTY = """
import threading
import pytest
from hypothesis import given, strategies

@pytest.mark.timeout(3)
@given(number=strategies.integers())
def test_that_never_ends(number):
    while True:
        try:
            threading.Event().wait()
        except BaseException:
            pass  # as code does that an alarm interrupts at the wrong place

def test_another():
    pass
"""


@pytest.mark.slow
def test_a_property_that_hangs_fails_with_all_stacks_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_hang.py").write_text(PROPERTY)
    options = ["-n", "1", "--dist", "worksteal", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=1"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{TESTS}"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert "1 failed, 1 passed" in run.stdout, run.stdout + run.stderr
    assert "in test_that_never_ends" in run.stderr
