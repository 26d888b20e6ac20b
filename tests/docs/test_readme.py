"""Owns: what the README shows works. Python blocks run, TOML blocks are valid, commands and targets exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.paths import ROOT

from marft_bridge import cli
from marft_bridge.config.bridge import BridgeConfig

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


APP = """
from graphs import math_duo
from marft_bridge import ScriptedPolicy

graph = math_duo.build(ScriptedPolicy(answers={"reasoner": ["Add 3 and 4."], "actor": ["7"]}))
"""
USED_AS_BEFORE = """
import asyncio
from trace_store import TraceStore

print(asyncio.run(graph.ainvoke({"question": "What is 3 + 4?"}))["answer"])
with TraceStore.open("traces.duckdb") as store:
    store.take_in()
    (episode,) = store.trajectories()
    print([(action.node, len(action.sampled_ids)) for action in episode.actions])
"""


def test_the_lines_that_record_a_graph_record_it(tmp_path: Path) -> None:
    (snippet,) = blocks("python")
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 3
    command = [sys.executable, "-c", APP + snippet + USED_AS_BEFORE]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # "Add 3 and 4." is 12 bytes and "7" is one; the scripted policy ends each answer with one more id.
    assert done.stdout.splitlines() == ["7", "[('reasoner', 13), ('actor', 2)]"]


def test_the_toml_blocks_are_valid_configurations() -> None:
    for block in blocks("toml"):
        BridgeConfig.model_validate(tomllib.loads(block))


def test_every_command_and_target_that_is_shown_exists(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {line for block in blocks("sh") for line in block.splitlines() if line.strip()}
    commands = {line.split("#")[0].split()[1] for line in shown if line.startswith("marft-bridge")}
    assert commands == {"traces", "view", "collect", "train", "compare"}
    mentioned = set(re.findall(r"marft-bridge ([a-z]+)\b", README))
    for command in mentioned:
        assert cli.run([command, "--help"]) == 0, command
        capsys.readouterr()
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", README, flags=re.MULTILINE)) <= set(targets)


def test_the_readme_stays_short() -> None:
    assert len(README.splitlines()) < 110
