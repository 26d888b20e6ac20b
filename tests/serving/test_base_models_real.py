"""Owns: two base models on two real vLLM servers at once: rollouts, an update of both, and the next rollouts.

The second model is small and random, of another shape, and speaks SmolLM2's tokens.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from support.paths import ROOT
from transformers import LlamaConfig, LlamaForCausalLM

from examples.study.run import dict_to_toml
from marft_bridge.runs.run_folder import read_metrics
from trace_store.store import TraceStore
from trainers.common.files import weights_to_sha256

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


REWARD = """
def uneven(task, result):
    '''A reward that differs between answers, whatever is said.'''
    return len(result.get("answer", "")) % 7 / 7
"""


@pytest.fixture
def other_dir(smollm2_dir: Path, tmp_path: Path) -> Path:
    """A random Llama of two layers with SmolLM2's tokenizer and chat template."""
    folder = tmp_path / "small-random"
    shutil.copytree(smollm2_dir, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    vocabulary = json.loads((smollm2_dir / "config.json").read_text())["vocab_size"]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_nodes_on_two_real_servers_are_trained_together(smollm2_dir: Path, other_dir: Path, tmp_path: Path) -> None:
    raw = tomllib.loads((ROOT / "examples/math_duo/bridge.toml").read_text())
    run = tmp_path / "run"
    served = {"max_model_len": 512, "dtype": "float32", "startup_timeout_s": 600.0}
    raw |= {
        "run": str(run),
        "model": {"path": str(smollm2_dir)},
        "serve": served,
        "models": {"random": {"path": str(other_dir), "nodes": ["actor"], "serve": served}},
        "collect": {"episodes": 8},
        "compare": {"metric": "reward"},
    }
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    raw["graph"]["reward"] = f"{reward}:uneven"
    raw["train"] |= {"rounds": 2, "episodes_per_round": 8, "evaluation_episodes": 0}
    raw["train"]["trainer"]["offline"] = {"mode": "off"}
    config = tmp_path / "bridge.toml"
    config.write_text(dict_to_toml(raw))
    bridge = f"{sys.executable} -m marft_bridge"
    both = f"set -e; {bridge} collect --config {config}; {bridge} train --config {config}"
    argv = [sys.executable, "-m", "marft_bridge", "serve", "--config", str(config), "--", "sh", "-c", both]
    done = subprocess.run(argv, cwd=ROOT, text=True, capture_output=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("using the model server random at") == 2
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["round"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:  # engine and trainer agree on the log-probs of what each server said
        for node in ("reasoner", "actor"):
            assert line["agents"][node]["engine_logprob_gap"] < 1e-3
            assert line["served"][node] is not False
    with TraceStore.open(run / "store.duckdb") as store:
        assert {(row.node, row.base_sha256) for row in store.adapters()} == {
            ("reasoner", weights_to_sha256(smollm2_dir)),
            ("actor", weights_to_sha256(other_dir)),
        }
        played = [action for t in store.trajectories(run_ids=["train"], round=2) for action in t.actions]
    assert {action.node for action in played} == {"reasoner", "actor"}
    assert all(action.logprobs and action.adapter_version == 2 for action in played)
