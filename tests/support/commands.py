"""The command line as a user starts it: in a process of its own; and what it is given."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.paths import ROOT


def start_command(command: str, config: Path, run: Path, *flags: str) -> subprocess.Popen[str]:
    """A running `marft-bridge COMMAND --config CONFIG --run RUN FLAGS`; both of its outputs in one pipe."""
    argv = [sys.executable, "-m", "marft_bridge", command, "--config", str(config), "--run", str(run), *flags]
    return subprocess.Popen(argv, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish_command(command: str, config: Path, run: Path, *flags: str) -> str:
    """What a command said that ended well."""
    process = start_command(command, config, run, *flags)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def write_bridge_toml(path: Path, run: str, rounds: int | None = None) -> Path:
    """The example's configuration at `path`, with a run folder of its own."""
    text = (ROOT / "examples/math_duo/bridge.toml").read_text()
    if rounds is not None:
        assert text.count("rounds = 8") == 1
        text = text.replace("rounds = 8", f"rounds = {rounds}")
        text = text.replace("evaluation_episodes = 64", "evaluation_episodes = 0")
    path.write_text(f'run = "{run}"\n{text}')
    return path


@contextmanager
def no_rights() -> Iterator[None]:
    """Inside the block the process has the rights of somebody else, where it is root's, whom no mode keeps out."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
