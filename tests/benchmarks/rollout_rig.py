"""What the rollout benches share: the workload on the real engine, through adapters that change what is sampled.

The server runs as in the demo, in float32, on the small instruct model; the adapters have rank 8 on q_proj and v_proj
and random weights, so that no shortcut for an adapter that does nothing is measured.
"""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from support.lora_files import write_adapter
from support.sessions import session_of

from benchmarks import rollout_app
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.recording.episode_context import current_episode
from marft_bridge.rollouts.episode_plan import EpisodeRequest, plan_episodes
from marft_bridge.rollouts.session import Session
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.adapter_checks import model_layers
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.prepare_model import prepare_smollm2

MODULES = ("q_proj", "v_proj")
MAX_TOKENS, TEMPERATURE = 128, 0.7
IN_FLIGHT = 32


@dataclass(frozen=True, slots=True)
class Rate:
    """Sampled tokens and the time that they took."""

    tokens: int
    seconds: float

    def __add__(self, other: Rate) -> Rate:
        return Rate(self.tokens + other.tokens, self.seconds + other.seconds)

    @property
    def per_s(self) -> float:
        return self.tokens / self.seconds


def bench_model() -> Path:
    """The small instruct model, prepared once."""
    return prepare_smollm2(Path(os.environ.get("MARFT_CACHE") or ".cache"))


def bench_config(folder: Path, model_dir: Path, episodes: int, in_flight: int = IN_FLIGHT) -> BridgeConfig:
    """The workload as a user would configure it."""
    app = f"{rollout_app.__name__}:"
    return BridgeConfig.model_validate(
        {
            "name": "bench",
            "run": str(folder / "run"),
            "graph": {
                "app": app + "build",
                "nodes": list(rollout_app.NODES),
                "tasks": app + "tasks",
                "task_to_input": app + "task_to_input",
                "reward": app + "reward",
            },
            "model": {"path": str(model_dir)},
            "serve": {"max_model_len": 1024, "max_num_seqs": 64, "max_loras": 4, "dtype": "float32"},
            "sampling": {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS},
            "collect": {"episodes": episodes, "in_flight": in_flight},
        }
    )


def add_adapter(registry: AdapterRegistry, model_dir: Path, node: str, version: int) -> None:
    """A version of the node whose update of each weight is small, random and of full rank 8."""
    write_adapter(registry.new_folder(node, version), adapter_layers(model_dir), scale=0.002, seed=version)
    registry.register(node, version, None, {})


def adapter_layers(model_dir: Path) -> dict[str, tuple[int, int]]:
    """Layer -> (outputs, inputs) of what the adapters change."""
    layers = model_layers(model_dir).items()
    return {name: next(iter(shapes)) for name, shapes in layers if name.rpartition(".")[2] in MODULES}


@contextmanager
def rollouts(folder: Path, episodes: int) -> Iterator[Rollouts]:
    """The engine with version 1 of both nodes in service."""
    config = bench_config(folder, bench_model(), episodes)
    run = RunFolder(Path(config.run or ""))
    run.create()
    with session_of(config, run, Reporter(Console(file=io.StringIO()))) as session:
        versions = session.models.versions
        for node in rollout_app.NODES:
            add_adapter(versions.registry, versions.bases[0].directory, node, 1)
        session.models.publish(dict.fromkeys(rollout_app.NODES, 1))
        yield Rollouts(session, config)


class Rollouts:
    """The whole graph path: LangGraph, spans, rewards, store; and the calls that it makes."""

    def __init__(self, session: Session, config: BridgeConfig, version: int = 1) -> None:
        self.session, self._config, self._version = session, config, version
        self._runs = 0
        self._calls: dict[int, list[httpx.Request]] = defaultdict(list)
        self._episodes: list[Any] = []  # kept, so that no two have one identity
        self.chat = session.models.chat

    def run(self, *, fresh: bool = False) -> Rate:
        """All episodes once: with the same seeds each time, or `fresh` ones."""
        config = self._config
        self._runs += 1
        requests: list[EpisodeRequest] = plan_episodes(
            list(rollout_app.tasks()),
            config.collect.episodes,
            1,
            seed=self._runs if fresh else 0,
            run_id=f"bench-{self._runs}",
            split="train",
            adapters=dict.fromkeys(rollout_app.NODES, self._version),
        )
        began = time.perf_counter()
        tally = self.session.run(requests, "bench", "reward")
        seconds = time.perf_counter() - began
        assert tally.outcomes["terminated"] == len(requests), tally.reasons
        return Rate(tally.sampled_tokens, seconds)

    def recorded(self) -> list[list[bytes]]:
        """Runs all episodes; for each, the bodies of its calls in order."""
        client = self.chat.http_async_client

        async def note(request: httpx.Request) -> None:
            episode = current_episode.get()
            self._episodes.append(episode)
            self._calls[id(episode)].append(request)

        client.event_hooks = {"request": [note], "response": []}
        self.run()
        client.event_hooks = {"request": [], "response": []}
        return [[request.content for request in calls] for calls in self._calls.values()]


async def calls_to_rate(
    address: str, key: str, chains: Sequence[Sequence[bytes]], answered: Callable[[dict[str, Any]], None] | None = None
) -> Rate:
    """A bare load generator: IN_FLIGHT chains of requests at a time, each sent when the one before is answered."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=IN_FLIGHT)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    waiting = iter(chains)
    tokens = 0
    async with httpx.AsyncClient(limits=limits, headers=headers, timeout=600, trust_env=False) as client:

        async def worker() -> None:
            nonlocal tokens
            for chain in waiting:
                for body in chain:
                    answer = await client.post(f"{address}/chat/completions", content=body)
                    assert answer.status_code == 200, answer.text
                    content = answer.json()
                    tokens += content["usage"]["completion_tokens"]
                    if answered is not None:
                        answered(content)

        began = time.perf_counter()
        workers: list[Awaitable[None]] = [worker() for _ in range(IN_FLIGHT)]
        await asyncio.gather(*workers)
        return Rate(tokens, time.perf_counter() - began)
