"""Owns: what the rollout benches compare is the same work on both sides; never how fast it is.

A fake server answers, so that the whole path runs in seconds; what the real one does is the benches' own business.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from support.fake_vllm import FakeVllm, running, text_to_ids
from support.sessions import session_of

from benchmarks import rollout_app
from benchmarks.rollout_memory import _memory_of
from benchmarks.rollout_rig import Rollouts, bench_config, calls_to_rate
from examples.study.run import dict_to_toml
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.runs.run_folder import RunFolder

EPISODES = 6


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    import numpy as np
    from safetensors.numpy import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").touch()
    layer = "model.layers.0.self_attn"
    weights = {f"{layer}.{name}.weight": np.zeros((4, 4), np.float32) for name in ("q_proj", "v_proj")}
    save_file(weights, folder / "model.safetensors")
    return folder


def test_the_bare_client_sends_what_the_graph_sent_and_counts_the_same_tokens(tmp_path: Path, model_dir: Path) -> None:
    with running(FakeVllm()) as fake:
        config = bench_config(tmp_path, model_dir, EPISODES, in_flight=3)
        config = config.model_copy(update={"serve": config.serve.model_validate({"attach": fake.url})})
        folder = RunFolder(tmp_path / "run")
        folder.create()
        with session_of(config, folder, Reporter(Console(file=io.StringIO()))) as session:
            session.models.publish(dict.fromkeys(rollout_app.NODES, 0))
            graph = Rollouts(session, config, version=0)
            chains = graph.recorded()
            fake.asked.clear()
            through = graph.run()
            by_graph = list(fake.asked)
            fake.asked.clear()
            raw = asyncio.run(calls_to_rate(f"{fake.url}/v1", "none", chains))
        assert [len(chain) for chain in chains] == [2] * EPISODES
        models = [[json.loads(body)["model"] for body in chain] for chain in chains]
        assert models == [["reader@0", "writer@0"]] * EPISODES
        assert Counter(map(json.dumps, fake.asked)) == Counter(map(json.dumps, by_graph))
        said = sum(len(text_to_ids(f"{body['model']} speaks")) for body in by_graph)
        assert through.tokens == raw.tokens == said


def test_the_workload_is_the_same_every_time_and_has_short_and_long_prompts() -> None:
    first, second = list(rollout_app.tasks()), list(rollout_app.tasks())
    assert first == second
    words = sorted(len(task["question"].split()) for task in first)
    assert words[0] < 20
    assert words[-1] > 150


def test_the_configuration_that_is_written_is_the_one_that_was_made(tmp_path: Path, model_dir: Path) -> None:
    made = bench_config(tmp_path, model_dir, EPISODES)
    text = dict_to_toml(made.model_dump(mode="json", exclude_unset=True))
    assert tomllib.loads(text)["serve"]["dtype"] == "float32"
    path = tmp_path / "bench.toml"
    path.write_text(text)
    assert toml_to_config(path).model_dump() == made.model_dump()


def test_memory_counts_a_process_and_all_that_it_started_apart() -> None:
    grandchild = "held = bytearray(64 << 20); print('held', flush=True); import time; time.sleep(600)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    before = _memory_of(os.getpid())
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            now = _memory_of(os.getpid())
        finally:
            os.killpg(process.pid, 9)
    assert now.server - before.server >= 64
