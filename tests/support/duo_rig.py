"""A collector over a scripted duo with a store beside it: rollouts without a model server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphs import math_duo
from marft_bridge.config.bridge import CollectOptions
from marft_bridge.model_calls.routing import Route
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.rollouts.app import App
from marft_bridge.rollouts.collector import Collector
from marft_bridge.rollouts.episode_plan import EpisodeRequest
from marft_bridge.rollouts.run_counts import Tally
from support.stand_in_backend import StandInBackend
from trace_store.journal import Journal
from trace_store.store import TraceStore

TASKS = [{"id": f"t{n}", "question": f"{n} + 1?", "answer": n + 1} for n in range(8)]
COMMON: dict[str, Any] = {"run_id": "run", "split": "train", "adapters": {"reasoner": 0, "actor": 3}}


def route_of(node: str, version: int, temperature: float | None) -> Route:
    name = f"{node}@{version}"
    return Route(name if version else "base", name if version else None, version, temperature or 0.7, 16)


def right_answer(node: str, prompt: str, _random: Any) -> str:
    question = prompt.split("human: ")[1]
    return str(int(question.split(" ")[0]) + 1) if node == "actor" else "add one"


class Rig:
    """A collector over a scripted duo, and the store beside it."""

    def __init__(self, folder: Path, script: Callable[..., str] = right_answer, **changes: Any) -> None:
        self.path = folder / "store.duckdb"
        self.policy = ScriptedPolicy(script=script, delay_s=changes.pop("delay_s", 0.0))
        reward = changes.pop("reward", math_duo.reward)
        limit_reward = changes.pop("limit_reward", None)
        app = App(
            math_duo.build, TASKS, TASKS, math_duo.task_to_input, reward, "test:reward", limit_reward=limit_reward
        )
        journal = Journal(self.path.with_name("store.duckdb.journal"))
        build = changes.pop("build", math_duo.build)
        graph = wrap(build(changes.pop("model", self.policy)), Recorder(journal))
        backend = {name: changes.pop(name) for name in ("chat", "lineage", "check", "came_back") if name in changes}
        self.collector = Collector(
            graph=graph,
            app=app,
            backend=StandInBackend(route_of, **backend),
            options=CollectOptions(**({"in_flight": 4, "timeout_s": 30.0} | changes)),
        )

    def run(
        self, requests: list[EpisodeRequest], loop: asyncio.Runner | None = None, *, finished_before: int = 0
    ) -> Tally:
        running = self.collector.requests_to_episodes(requests, finished_before=finished_before)
        return (loop.run if loop else asyncio.run)(running)

    def store(self) -> TraceStore:
        store = TraceStore.open(self.path)
        store.take_in()
        return store
