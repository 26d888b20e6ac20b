"""Owns: collecting on a Ray cluster with the real vLLM under its workers.

- Two workers, each with a server of its own: every planned episode ends in this machine's store, once, with the
  engine's token ids and with log-probs that the trainer computes for them; no server outlives the command.
"""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest
from support.commands import start_command
from support.paths import ROOT

from trace_store.store import TraceStore
from trainers.config import TrainerOptions
from trainers.marft import MarftTrainer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

DUO = ROOT / "examples/math_duo/bridge.toml"
EPISODES = 12
TOLERANCE = 1e-3  # nats per token: two ways to add in float32; see test_end_to_end.py


def test_two_workers_with_servers_of_their_own_record_what_their_engines_said(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    text = DUO.read_text()
    for old, new in (("episodes = 192", f"episodes = {EPISODES}"), ("in_flight = 48", "in_flight = 4")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    config = tmp_path / "bridge.toml"
    config.write_text(f"{text}\n[ray]\nworkers = 2\ncpus_per_worker = 0.5\n")
    process = start_command("collect", config, tmp_path / "run", "--engine", "ray")
    try:
        said = process.communicate(timeout=900)[0]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    assert process.returncode == 0, said

    with TraceStore.open(tmp_path / "run/store.duckdb", read_only=True) as store:
        episodes = list(store.trajectories(run_ids=["collect"]))
    assert Counter(episode.episode.outcome for episode in episodes) == {"terminated": EPISODES}
    assert len({(e.episode.task_id, e.episode.sample) for e in episodes}) == EPISODES
    actions = [action for episode in episodes for action in episode.actions]
    assert Counter((action.node, action.adapter_version) for action in actions) == {
        ("reasoner", 0): EPISODES,
        ("actor", 0): EPISODES,
    }
    trainer = MarftTrainer(TrainerOptions(), smollm2_dir, ("reasoner", "actor"), seed=0)
    for node in ("reasoner", "actor"):
        mine = [action for action in actions if action.node == node]
        for action, ours in zip(mine, trainer.policies.logprobs_of(node, mine), strict=True):
            assert action.logprobs == pytest.approx(ours, abs=TOLERANCE)

    assert [p.pid for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])] == []
