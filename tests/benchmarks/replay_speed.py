"""How much faster a replay is than the run that it repeats, which a real model answered.

The graph has three nodes with one call of 48 tokens each, on the real server with the small model. Recorded runs and
their replays are timed by the same clock; a replay includes its own recording and the comparison of both records.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import httpx
from support.replay_rig import record_runs

from benchmarks.harness import Measurement, bench
from benchmarks.trace_overhead import REAL_TOKENS, three_calls
from marft_bridge.config.serve import ServeOptions
from marft_bridge.model_calls.node_chat_model import NodeChat
from marft_bridge.replay.replayed_run import replay_run
from marft_bridge.serving.prepare_model import prepare_smollm2
from marft_bridge.serving.vllm_server import ModelServer

RUNS, REPEATS = 8, 5


@bench
def replay_speedup(folder: Path) -> Iterator[Measurement]:
    """Times as fast as the recorded run was: whole replays, comparison included. It should be over 20."""
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
        graph.invoke({"text": ""})  # the first run compiles and fills caches
        number = 0
        while True:
            number += 1
            runs = record_runs(graph, [{"text": ""}] * RUNS, folder / str(number), is_async=False)
            seconds = []
            for run in runs * REPEATS:
                began = time.perf_counter()
                replayed = replay_run(graph, run)
                seconds.append(time.perf_counter() - began)
                if replayed.divergence is not None:
                    raise AssertionError(str(replayed.divergence))
            recorded = median((run.root.end_ns - run.root.start_ns) / 1e9 for run in runs)
            ratio = recorded / median(seconds)
            yield Measurement(ratio, "x", 1.0, ratio)
