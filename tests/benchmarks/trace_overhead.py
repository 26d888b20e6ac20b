"""What recording adds to a run: the same graph, plain and recorded, run in turns in one process.

The graph has three nodes with one call each, so a recorded run has seven spans. The journal is a real one on a real
disk; its syncs are made by its own thread, and what they cost the app is part of what is measured. The added time is
the median of paired differences: each pair runs plain and recorded right after each other, in changing order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

import httpx
from langchain_core.language_models import BaseChatModel
from langgraph.graph import END, START, StateGraph

from benchmarks.harness import Measurement, bench
from marft_bridge.config.serve import ServeOptions
from marft_bridge.model_calls.node_chat_model import NodeChat
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.serving.prepare_model import prepare_smollm2
from marft_bridge.serving.vllm_server import ModelServer
from trace_store.journal import Journal

NODES = ("plan", "solve", "check")
SPANS = 1 + 2 * len(NODES)
PROMPT = "What is three and four? Think of apples in two baskets, and count them one by one before you answer. " * 2
ANSWER = "Seven: three apples from the first basket and four apples from the second one, counted one by one. "
WARM, PAIRS = 30, 300
REAL_RUNS, REAL_TOKENS = 8, 48


class Text(TypedDict):
    text: str


def three_calls(model: BaseChatModel) -> Any:
    """START -> plan -> solve -> check -> END, one call of `model` in each."""
    graph = StateGraph(Text)
    for name in NODES:
        graph.add_node(name, lambda _: {"text": model.invoke(PROMPT).text})
    for edge in zip((START, *NODES), (*NODES, END), strict=True):
        graph.add_edge(*edge)
    return graph.compile()


def run_to_seconds(graph: Any) -> float:
    """Wall-clock time of one run."""
    began = time.perf_counter()
    graph.invoke({"text": ""})
    return time.perf_counter() - began


def added_seconds(folder: Path) -> Iterator[tuple[float, float]]:
    """(median added time of a recorded run, median time of a plain one), with a model that answers at once."""
    plain = three_calls(ScriptedPolicy(script=lambda *_: ANSWER))
    recorded = wrap(three_calls(ScriptedPolicy(script=lambda *_: ANSWER)), Recorder(Journal(folder / "journal")))
    for graph in (plain, recorded) * WARM:
        run_to_seconds(graph)
    try:
        while True:
            pairs = []
            for number in range(PAIRS):
                order = (plain, recorded) if number % 2 else (recorded, plain)
                seconds = {id(graph): run_to_seconds(graph) for graph in order}
                pairs.append((seconds[id(plain)], seconds[id(recorded)]))
            yield median(with_it - without for without, with_it in pairs), median(without for without, _ in pairs)
    finally:
        recorded.unwrap()
        recorded.recorder.journal.close()


@bench
def trace_overhead_us_per_span(folder: Path) -> Iterator[Measurement]:
    """Added time of a run with an instant model, by its spans. It should stay under 150 us."""
    for added, plain in added_seconds(folder):
        yield Measurement(added / SPANS * 1e6, "us", plain / SPANS * 1e6, (plain + added) / plain)


@bench
def trace_overhead_percent_real_model(folder: Path) -> Iterator[Measurement]:
    """Added time of a run, in percent of the same run on the real server with the small model. It should be under 1.

    Two runs on a real model differ by more than recording costs, so the two are measured apart: the added time with
    the instant model, beside the idle server, and the time of a run on the server.
    """
    model_dir = prepare_smollm2(Path(os.environ.get("MARFT_CACHE") or ".cache"))
    options = ServeOptions(lora_target_modules=("q_proj", "v_proj"))
    with (
        ModelServer.start(options, model_dir, adapters=folder / "adapters", log=folder / "server.log") as server,
        httpx.Client(trust_env=False, timeout=120) as client,
    ):
        at = server.endpoint
        chat = NodeChat(
            model=at.model, base_url=at.base_url, api_key=at.api_key, http_client=client, max_tokens=REAL_TOKENS
        )
        graph = three_calls(chat)
        run_to_seconds(graph)  # the first run compiles and fills caches
        for added, _ in added_seconds(folder):
            real = median(run_to_seconds(graph) for _ in range(REAL_RUNS))
            yield Measurement(100 * added / real, "%", 100.0, (real + added) / real)
