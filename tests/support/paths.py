"""Where the checkout is, for tests that read its files."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
DOCS = ROOT / "docs"


def source_of_test(name: str) -> str:
    """The source of the test file of that name, in whichever folder it lies."""
    (path,) = TESTS.rglob(name)
    return path.read_text()
