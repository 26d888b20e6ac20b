"""Owns: the whole path in seconds, span -> store -> trajectory -> update -> adapter.

On a tiny model and a scripted policy. The same path on the real engine is in test_end_to_end.py.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from peft import PeftModel
from safetensors.torch import load_file
from support.stand_in_backend import StandInBackend
from support.tiny_policy import save_tiny_llama
from support.trainer_options import trainer_options
from transformers import AutoModelForCausalLM

from graphs import math_duo
from marft_bridge.model_calls.routing import Route
from marft_bridge.model_calls.scripted_model import END_OF_TURN, ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.rollouts.app import App
from marft_bridge.rollouts.collector import Collector
from marft_bridge.rollouts.episode_plan import plan_episodes
from marft_bridge.serving.adapter_registry import AdapterRegistry
from trace_store.journal import Journal
from trace_store.store import TraceStore
from trainers.marft import MarftTrainer

NODES = ("reasoner", "actor")
TASKS = [{"id": f"t{n}", "question": f"{n} + 1?", "answer": n + 1} for n in range(8)]


def sometimes_right(node: str, prompt: str, chance: random.Random) -> str:
    answer = int(prompt.split("human: ")[1].split(" ")[0]) + chance.choice([1, 2])
    return str(answer) if node == "actor" else "add"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), vocabulary=END_OF_TURN + 1)


def test_recorded_episodes_become_an_adapter_that_peft_loads(tmp_path: Path, tiny_model: Path) -> None:
    app = App(math_duo.build, TASKS, TASKS, math_duo.task_to_input, math_duo.reward, "graphs.math_duo:reward")
    journal = Journal(tmp_path / "store.duckdb.journal")
    graph = wrap(math_duo.build(ScriptedPolicy(script=sometimes_right)), Recorder(journal))
    backend = StandInBackend(lambda node, version, _: Route("base", None, version, 1.0, 16))
    collector = Collector(graph=graph, app=app, backend=backend)
    common = {"run_id": "r", "split": "train", "adapters": dict.fromkeys(NODES, 0)}
    asyncio.run(collector.requests_to_episodes(plan_episodes(TASKS, 16, 1, seed=0, **common)))
    graph.unwrap()

    with TraceStore.open(tmp_path / "store.duckdb") as store:
        taken = store.take_in()
        episodes = list(store.trajectories(run_ids=["r"]))
    assert (taken.episodes, taken.spans, taken.torn, taken.refused) == (16, 16 * 5, 0, 0)
    rewards = [episode.team_reward("reward") for episode in episodes]
    assert {0.0, 1.0} <= set(rewards)  # something to learn from

    fields = {"lora": {"rank": 4}, "tokens_per_microbatch": 512, "mismatch": "none"}
    options = trainer_options(**(fields | {"engine_tolerance": 1e3}))  # the script's log-probs are invented
    trainer = MarftTrainer(options, tiny_model, NODES, seed=0)
    trainer.warm_up(episodes)
    trainer.replay(episodes)
    metrics = trainer.update(episodes)
    assert metrics["episodes"] == 16
    assert metrics["drops"] == {}

    registry = AdapterRegistry(tmp_path / "adapters", trainer.policies.model.base_sha256)
    for node in NODES:
        trainer.policies.save_adapter(node, registry.new_folder(node, 1))
        row = registry.register(node, 1, None, metrics["agents"][node])
        assert trainer.policies.adapter_norm(node) > 0
        weights = load_file(Path(row.path) / "adapter_model.safetensors")
        assert any(tensor.abs().max() > 0 for name, tensor in weights.items() if "lora_B" in name)
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), row.path)
