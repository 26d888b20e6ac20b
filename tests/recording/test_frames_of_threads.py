"""Owns: that recording never looks into other threads: on CPython 3.11 that can stop or crash the app."""

from __future__ import annotations

import re
import subprocess
import sys

from support.paths import ROOT

# Nodes ask a model in threads of their own, while the collector runs all the time and lets other threads run.
_BUSY = """
import gc, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from langgraph.graph import START, StateGraph
from marft_bridge import ScriptedPolicy, wrap

model = ScriptedPolicy(script=lambda *_: "yes")

def node(state):
    text = state["text"]
    with ThreadPoolExecutor(4) as pool:
        return {"text": "".join(run.text for run in pool.map(model.invoke, [text] * 4))}

graph = StateGraph(dict)
graph.add_node("node", node)
graph.add_edge(START, "node")
recorded = wrap(graph.compile(), sys.argv[1])
gc.callbacks.append(lambda phase, info: time.sleep(1e-6))
gc.set_threshold(100, 1, 1)
for _ in range(40):
    recorded.invoke({"text": "so"})
print("came to its end")
"""


def test_nobody_asks_for_the_frames_of_other_threads() -> None:
    sources = [path for folder in ("marft_bridge", "trace_store") for path in (ROOT / folder).rglob("*.py")]
    asking = [
        str(path) for path in sources if re.search(r"sys\._current_frames\(|threading\._current", path.read_text())
    ]
    assert asking == []


def test_nodes_that_make_threads_come_to_their_end_whatever_the_collector_does(tmp_path: object) -> None:
    command = [sys.executable, "-c", _BUSY, f"{tmp_path}/traces.duckdb"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "came to its end\n", done.stderr
