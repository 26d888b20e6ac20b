"""Owns: episodes of a command, with exact tokens and their input in a task, are replayed by their run folder."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from examples.test_wrapping import EXPECTED, GUIDES, serving
from rich.console import Console
from support.compare_rig import save_model

from marft_bridge import cli
from marft_bridge.commands.collect import collect
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.config.serve import ServeOptions
from trace_store.store import TraceStore


@pytest.mark.parametrize("name", ["chat_openai", "swarm"])
def test_what_collect_recorded_comes_out_the_same_without_its_server(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    shutil.copytree(GUIDES, tmp_path / "wrapping", ignore=shutil.ignore_patterns("__pycache__", "runs", "traces.*"))
    monkeypatch.chdir(tmp_path / "wrapping" / name)
    save_model(tmp_path / "model")
    with serving(EXPECTED[name]) as server:
        config = toml_to_config(Path("bridge.toml"), {"collect.episodes": 2, "model.path": str(tmp_path / "model")})
        config = config.model_copy(update={"serve": ServeOptions(attach=server.url)})
        collect(config, Reporter(Console(file=io.StringIO(), width=200)), resume=False)
    with TraceStore.open(Path("runs/app/store.duckdb"), read_only=True) as store:
        assert all(action.prompt_ids for trajectory in store.trajectories() for action in trajectory.actions)
    capsys.readouterr()
    assert cli.run(["replay", "runs/app", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["summary"]["episodes"], told["summary"]["same"]) == (2, 2)
    for episode in told["episodes"]:  # that model's tokenizer is none
        assert episode["prompts_compared"] == 0
        assert "prompts compared without token ids: " in episode["note"]
        assert "its tokenizer cannot be loaded" in episode["note"]
    text = Path("app.py").read_text()
    Path("changed.py").write_text(text.replace("one number", "one figure"))
    assert cli.run(["replay", "runs/app", "--app", "changed.py:graph"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [": diverged: writer, call 1: message 0" in line for line in lines] == [True, True, False]
