"""Owns: what the README shows works. Python blocks run, TOML blocks are valid, commands and targets exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from marft_bridge import cli
from marft_bridge.config import BridgeConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_python_blocks_run_and_print_what_they_claim(tmp_path: Path) -> None:
    (snippet,) = blocks("python")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # "Add 3 and 4." is 12 bytes and "7" is one; the scripted policy ends each answer with one more id.
    assert done.stdout.splitlines() == ["7", "[('reasoner', 13), ('actor', 2)]"]


def test_the_toml_blocks_are_valid_configurations() -> None:
    for block in blocks("toml"):
        BridgeConfig.model_validate(tomllib.loads(block))


def test_every_command_and_target_that_is_shown_exists(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {line for block in blocks("sh") for line in block.splitlines() if line.strip()}
    commands = {line.split("#")[0].split()[1] for line in shown if line.startswith("marft-bridge")}
    assert commands == {"collect", "train", "compare"}
    mentioned = set(re.findall(r"marft-bridge ([a-z]+)\b", README))
    for command in mentioned:
        assert cli.run([command, "--help"]) == 0, command
        capsys.readouterr()
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", README, flags=re.MULTILINE)) <= set(targets)


def test_the_tree_in_the_readme_is_the_tree() -> None:
    tree = re.findall(r"^    ([a-z_]+)/ ", README, flags=re.MULTILINE)
    assert tree == ["marft_bridge", "graphs", "trace_store", "trainers", "examples", "docs", "tests"]
    assert all((ROOT / folder).is_dir() for folder in tree)
