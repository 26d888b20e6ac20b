"""Owns: the libraries of others that pages load are those that were published.

- each file has the SHA-256 that its note says, and each has its licence beside it; none is there without a note
- the wheel takes them along
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

from support.paths import ROOT

import marft_bridge.view

VENDOR = Path(marft_bridge.view.__file__).parent / "static/vendor"


def test_every_vendored_file_is_the_published_one_with_its_licence() -> None:
    rows = re.findall(
        r"^\| `(\S+)` \| \S+ \| [\d.]+ \| \w+, `(\S+)` \| `(\w{64})` \|$",
        (VENDOR / "README.md").read_text(),
        re.MULTILINE,
    )
    for name, licence, digest in rows:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest
        assert "ermission" in (VENDOR / licence).read_text()
    assert {path.name for path in VENDOR.iterdir()} == {"README.md", *(n for row in rows for n in row[:2])}


def test_the_wheel_takes_what_pages_load_along() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = config["tool"]["setuptools"]["package-data"]["marft_bridge"]
    package = ROOT / "marft_bridge"
    packed = {path for pattern in patterns for path in package.glob(pattern) if path.is_file()}
    files = {
        path for folder in ("static", "templates") for path in (package / "view" / folder).rglob("*") if path.is_file()
    }
    assert files <= packed
