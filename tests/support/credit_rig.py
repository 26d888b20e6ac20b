"""A team of four on a fake server: one helps, one idles, one harms, and a solver reads what they say."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig, toml_to_config
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.model_versions import config_to_versions
from marft_bridge.serving.zero_adapter import write_zero_adapter
from support.compare_rig import save_model
from support.fake_vllm import FakeVllm
from trace_store.store import TraceStore

NODES = ("helper", "idler", "harmer")
APP = """
import operator
from typing import Annotated, TypedDict

from langgraph.graph import END, START, StateGraph


class State(TypedDict):
    x: int
    said: Annotated[list[str], operator.add]


def build(model):
    def invoked(name):
        return lambda state: {"said": [model.invoke(f"{name} {state['x']}").text]}

    def ainvoked(name):
        async def node(state):
            return {"said": [(await model.ainvoke(f"{name} {state['x']}")).text]}
        return node

    def streamed(name):
        return lambda state: {"said": ["".join(c.text for c in model.stream(f"{name} {state['x']}"))]}

    async def solver(state):
        asked = f"solver {state['x']}: " + " | ".join(state["said"])
        return {"said": ["".join([c.text async for c in model.astream(asked)])]}

    graph = StateGraph(State)
    names = ["helper", "idler", "harmer", "solver"]
    for name, node in zip(names, [invoked("helper"), ainvoked("idler"), streamed("harmer"), solver]):
        graph.add_node(name, node)
    for before, after in zip([START, *names], [*names, END]):
        graph.add_edge(before, after)
    return graph.compile()


def to_input(task):
    return {"x": task["x"], "said": []}


def reward(task, state):
    return float(state["said"][-1] == "right")
"""


def team_answer(body: dict[str, Any]) -> str:
    """The helper's hint is needed; the harmer's poison, on odd tasks, spoils it; the idler is not read."""
    who, x, *_ = body["messages"][-1]["content"].split()
    trained = not body["model"].endswith("@0")
    if who == "helper":
        return "hint" if trained else "hm"
    if who == "harmer":
        return "poison" if trained and int(x) % 2 else "hm"
    said = body["messages"][-1]["content"]
    return "right" if who == "solver" and "hint" in said and "poison" not in said else "idle"


class CreditLab:
    """A bridge.toml with its app, tasks, model and server; and what was said and stored."""

    def __init__(self, folder: Path, server: FakeVllm) -> None:
        self.folder, self.server = folder, server
        self.run_folder = RunFolder(folder / "run")
        server.answer = team_answer
        (folder / "app.py").write_text(APP)
        tasks = [{"id": f"t{x}", "x": x} for x in range(48)]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        save_model(folder / "model")

    def config(self, more: str = "") -> BridgeConfig:
        app = self.folder / "app.py"
        text = f"""
            run = "{self.run_folder.path}"
            [graph]
            app = "{app}:build"
            nodes = ["helper", "idler", "harmer"]
            frozen = ["solver"]
            tasks = "{self.folder / "tasks.jsonl"}"
            task_to_input = "{app}:to_input"
            reward = "{app}:reward"
            [model]
            path = "{self.folder / "model"}"
            [serve]
            attach = "{self.server.url}"
            [collect]
            episodes = 24
            {more}
        """
        path = self.folder / "bridge.toml"
        path.write_text("\n".join(line.strip() for line in text.splitlines()))
        return toml_to_config(path)

    def train_all(self) -> None:
        """A version 1 of every node, which the server's script takes for trained."""
        self.run_folder.create()
        registry = config_to_versions(self.config(), self.run_folder.adapters, self.reporter().say).registry
        for node in NODES:
            for version in (0, 1):
                write_zero_adapter(registry.new_folder(node, version), self.folder / "model", ("q_proj", "v_proj"))
                registry.register(node, version, version - 1 if version else None, {})

    def reporter(self) -> Reporter:
        """One that nobody reads."""
        return Reporter(Console(file=io.StringIO()))

    def say(self, command: Callable[[Reporter], Any]) -> list[str]:
        """What a command prints."""
        text = io.StringIO()
        command(Reporter(Console(file=text, width=300)))
        return [line for line in text.getvalue().splitlines() if not line.endswith(" s]")]

    def store(self) -> TraceStore:
        store = TraceStore.open(self.run_folder.store)
        store.take_in()
        return store
