"""docs/ and the docstrings -> the documentation as a site, by Zensical: `make docs` writes build/site.

The site is built in a folder of its own, build/docs, from a copy of docs/ and links to the packages: Zensical keeps a
cache in `.cache` beside its configuration and empties all of that folder on `--clean`, and in the checkout that is
where the prepared models lie. Invariant: a warning, griffe's on docstrings too, fails the build.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

CONFIG = ROOT / "docs/zensical.toml"
PACKAGES = ("marft_bridge", "trace_store", "trainers")
QUIET = "No issues found"  # what Zensical says on stderr where all is well


def build_site(folder: Path) -> Path:
    """Builds in an empty folder; the folder of the site. Raises RuntimeError with all that the tools said."""
    shutil.copytree(CONFIG.parent, folder / "docs")
    shutil.copy(CONFIG, folder)
    for package in PACKAGES:
        (folder / package).symlink_to(ROOT / package)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0 or done.stderr.strip() != QUIET:
        raise RuntimeError(f"the documentation was not built:\n{done.stdout}{done.stderr}")
    return folder / "site"


def write() -> None:
    """Writes build/site anew."""
    scratch, site = ROOT / "build/docs", ROOT / "build/site"
    for folder in (scratch, site):
        shutil.rmtree(folder, ignore_errors=True)
    scratch.mkdir(parents=True)
    build_site(scratch).rename(site)
    print(f"wrote {site / 'index.html'}")  # noqa: T201 - a script


if __name__ == "__main__":
    write()
