"""The command line as a user starts it: in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.paths import ROOT


def start_command(command: str, config: Path, run: Path, *flags: str) -> subprocess.Popen[str]:
    """A running `marft-bridge COMMAND --config CONFIG --run RUN FLAGS`; both of its outputs in one pipe."""
    argv = [sys.executable, "-m", "marft_bridge", command, "--config", str(config), "--run", str(run), *flags]
    return subprocess.Popen(argv, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
