"""Comparisons on stand-ins for model servers: real graphs, spans, journal and store; invented answers.

What a node answers follows from the name of the model that it reached (`actor@2`, or `base`) and from the task.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from safetensors.numpy import save_file

from marft_bridge.common.progress import Reporter
from marft_bridge.comparison.command import VersionFlags, compare
from marft_bridge.comparison.records import Report
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.zero_adapter import write_zero_adapter
from support.fake_vllm import FakeVllm, running
from trace_store.records import Trajectory
from trace_store.store import TraceStore
from trainers.common.files import weights_to_sha256

NODES = ("reasoner", "actor")

# What the hosted model and our own cost; `compare.prices` names a file with it.
PRICES = """
currency = "EUR"
[[prices]]
model = "hosted"
prompt = 1000.0
sampled = 10000.0
[[prices]]
model = "local"
prompt = 10.0
sampled = 100.0
"""

APPS = '''
"""Graphs that a comparison can run, their tasks and their reward."""
import operator
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph


class State(TypedDict):
    number: int
    log: Annotated[list[str], operator.add]


def speaker(model):
    async def speak(state: State) -> dict[str, Any]:
        reply = await model.ainvoke(f"{state['number']} " + "; ".join(state["log"]))
        if reply.text == "crash":
            raise ValueError("the node crashed")
        return {"log": [str(reply.text)]}

    return speak


def chain(model, *nodes):
    graph = StateGraph(State)
    for before, name in zip([START, *nodes], nodes):
        graph.add_node(name, speaker(model))
        graph.add_edge(before, name)
    graph.add_edge(nodes[-1], END)
    return graph.compile()


def duo(model: BaseChatModel):
    return chain(model, "reasoner", "actor")


def solo(model: BaseChatModel):
    return chain(model, "solo")


def hosted():
    return chain(ChatOpenAI(model="hosted", base_url="HOSTED/v1", api_key="k", max_retries=0), "writer")


def tasks():
    return [{"id": f"t{n}", "number": n, "topic": "even" if n % 2 == 0 else "odd"} for n in range(400)]


def to_input(task):
    return {"number": task["number"], "log": []}


def reward(task, state):
    """Right where the last node says yes; half a point besides where the first one thinks."""
    correct = float(state["log"][-1] == "yes")
    return {"correct": correct, "reward": (correct + (state["log"][0] == "think")) / 2}
'''


def save_model(folder: Path, value: float = 0.0) -> Path:
    """As much of a model as an adapter of zeros needs; another value makes another model."""
    folder.mkdir(parents=True)
    layers = {
        f"model.layers.0.self_attn.{name}.weight": np.full((4, 4), value, np.float32) for name in ("q_proj", "v_proj")
    }
    save_file(layers, folder / "model.safetensors")
    sizes = {
        "hidden_size": 4,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 8,
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@dataclass
class Lab:
    """A run folder with adapters 0 to 2 of the duo, and three servers: ours, one of another model, a hosted one."""

    folder: Path
    ours: FakeVllm
    other: FakeVllm
    hosted: FakeVllm
    asked: list[tuple[str, int, int]] = field(default_factory=list)  # (model, number of the task, seed), as they come

    def __post_init__(self) -> None:
        self.answer: Callable[[str, int], str] = self.newest_is_right  # `crash` crashes the node
        self.apps = self.folder / "apps.py"
        self.apps.write_text(APPS.replace("HOSTED", self.hosted.url))
        self.run = self.folder / "run"
        self.model = save_model(self.folder / "model")
        registry = AdapterRegistry(self.run / "adapters", weights_to_sha256(self.model))
        self.run.mkdir()
        for node in NODES:
            for version in range(3):
                write_zero_adapter(registry.new_folder(node, version), self.model, ("q_proj", "v_proj"))
                registry.register(node, version, None, {})
        TraceStore.open(self.run / "store.duckdb").close()
        self.hosted.adapters["hosted"] = ""  # a model by another name than ours
        for server in (self.ours, self.other, self.hosted):
            server.answer = self._answer

    def _answer(self, body: Mapping[str, Any]) -> str:
        number = int(str(body["messages"][-1]["content"]).split(" ")[0])
        self.asked.append((str(body["model"]), number, int(body.get("seed") or 0)))
        return self.answer(str(body["model"]), number)

    def newest_is_right(self, model: str, number: int) -> str:
        """The actor's newest version is right on every task, the others on every third."""
        if model.startswith("reasoner"):
            return "think"
        return "yes" if model == "actor@2" or number % 3 == 0 else "no"

    def config(self, *variants: Mapping[str, Any], **options: Any) -> BridgeConfig:
        """The duo's configuration; options are those of [compare], and further ones of [graph] and [collect]."""
        seed, in_flight = options.pop("seed", 0), options.pop("in_flight", 4)
        collect = {"in_flight": in_flight} | options.pop("collect", {})
        graph = {
            "app": f"{self.apps}:duo",
            "nodes": list(NODES),
            "tasks": f"{self.apps}:tasks",
            "task_to_input": f"{self.apps}:to_input",
            "reward": f"{self.apps}:reward",
        } | options.pop("graph", {})
        return BridgeConfig.model_validate(
            {
                "seed": seed,
                "run": str(self.run),
                "graph": graph,
                "model": {"path": str(self.model)},
                "serve": {"attach": self.ours.url},
                "collect": collect,
                "compare": {"variants": list(variants), "mixed_teams": "off", "tasks": 8, "kl_actions": 0} | options,
            }
        )

    def compare(
        self, *variants: Mapping[str, Any], resume: bool = False, flags: VersionFlags | None = None, **options: Any
    ) -> Report:
        """Runs the command; what it said is in `said`."""
        text = io.StringIO()
        try:
            return compare(
                self.config(*variants, **options),
                Reporter(Console(file=text, width=200)),
                resume,
                flags or VersionFlags(),
            )
        finally:
            self.said = text.getvalue()

    def stored(self, run_id: str = "compare-1") -> list[Trajectory]:
        """What the store holds of a comparison, in the order in which the episodes began."""
        with TraceStore.open(self.run / "store.duckdb") as store:
            store.take_in()
            return list(store.trajectories(run_ids=[run_id]))

    def solo(self, **changes: Any) -> dict[str, Any]:
        """A variant: one agent."""
        return {"name": "one agent", "app": f"{self.apps}:solo", "nodes": ["solo"]} | changes


@contextmanager
def lab_in(folder: Path) -> Iterator[Lab]:
    """The servers run until the block ends."""
    with running(FakeVllm()) as ours, running(FakeVllm()) as other, running(FakeVllm()) as hosted:
        yield Lab(folder, ours, other, hosted)
