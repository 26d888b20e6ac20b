"""A file of requirements -> an environment for tests that need these packages alone, with those of this one behind."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from pathlib import Path


def make_environment(folder: Path, requirements: Path) -> Path:
    """Makes it in `folder/env`, and installs what the file pins, without what that depends on; its Python."""
    environment = folder / "env"
    venv.create(environment, with_pip=True)
    python = environment / "bin/python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", requirements]
    subprocess.run(pip, check=True, timeout=500)
    site = next((environment / "lib").glob("python*")) / "site-packages"
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python
