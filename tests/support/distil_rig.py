"""Teams of three shapes on scripted models, recorded; and the apps with one node that shall learn from them."""

from __future__ import annotations

import asyncio
import io
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langchain.agents import create_agent
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command
from rich.console import Console

from graphs import math_duo
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig, CollectOptions
from marft_bridge.distillation.command import distil
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.rollouts.app import App
from marft_bridge.rollouts.collector import OWN_MODELS, Collector
from marft_bridge.rollouts.episode_plan import EpisodeRequest
from support.edge_rig import SaysNext, calls_tool, says
from trace_store.journal import Journal
from trace_store.store import TraceStore

TASK = {"id": "t0", "question": "What is 2 + 3?", "answer": 5}


class Draft(TypedDict, total=False):
    question: str
    log: Annotated[list[str], operator.add]
    answer: str


ADDED: list[tuple[int, int]] = []  # what the tool was really run with


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    ADDED.append((a, b))
    return a + b


def duo(hint: str = "Add the two.", answer: str = "5") -> Any:
    """Reasoner, then actor."""
    return math_duo.build(says(hint, answer))


def loop() -> Any:
    """A writer, and a critic that sends it back once and then ends the run."""
    writer, critic = says("4", "5"), says("again", "stop")

    def write(state: Draft) -> Draft:
        text = str(writer.invoke(state["question"]).text)
        return {"log": [text], "answer": text}

    def criticise(state: Draft) -> Command[str]:
        word = str(critic.invoke(state["log"][-1]).text)
        return Command(goto="writer" if word == "again" else END, update={"log": [word]})

    graph = StateGraph(Draft)
    graph.add_node("writer", write)
    graph.add_node("critic", criticise, destinations=("writer", END))
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "critic")
    return graph.compile()


def supervisor() -> Any:
    """A supervisor with an adder behind a tool, and the adder has a tool of its own."""
    adder = create_agent(says(calls_tool("add", a=2, b=3), "It is 5."), [add], name="adder")

    @tool
    def ask_adder(question: str) -> str:
        """Asks the adder."""
        return str(adder.invoke({"messages": [("user", question)]})["messages"][-1].text)

    return create_agent(says(calls_tool("ask_adder", question="2 + 3"), "5"), [ask_adder], name="supervisor")


def to_messages(task: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [("user", task["question"])]}


def reward(task: dict[str, Any], result: dict[str, Any]) -> float:
    """Whether the last number of the answer is right, of a state or of messages."""
    text = result["answer"] if "answer" in result else str(result["messages"][-1].text)
    return float(math_duo.reward(task, {"answer": text})["correct"])


def exact_reward(task: dict[str, Any], result: dict[str, Any]) -> float:
    """Whether the last line of the answer is the right number, and nothing else."""
    return float(str(result["answer"]).splitlines()[-1] == str(task["answer"]))


def record_team(
    folder: Path,
    graphs: Sequence[Any],
    *,
    tasks: Sequence[dict[str, Any]] = (TASK,),
    task_to_input: Callable[[Any], Any] = math_duo.task_to_input,
    team_reward: Callable[..., Any] = reward,
    subject_field: str | None = None,
) -> TraceStore:
    """A run of each graph on the task of its place, in the store of a run folder; the store, open."""
    folder.mkdir(mode=0o700, exist_ok=True)
    store = folder / "store.duckdb"
    journal = Journal(folder / "store.duckdb.journal")
    for graph, task in zip(graphs, tasks, strict=True):
        recorder = Recorder(journal)
        app = App(lambda _: None, tasks, tasks, task_to_input, team_reward, "test:reward", subject_field=subject_field)
        collector = Collector(
            graph=wrap(graph, recorder), app=app, backend=OWN_MODELS, options=CollectOptions(in_flight=1)
        )
        request = EpisodeRequest(run_id="train", task=task, split="train", sample=0, seed=1, adapters={})
        tally = asyncio.run(collector.requests_to_episodes([request]))
        assert tally.outcomes == {"terminated": 1}, tally.reasons
        assert recorder.failures == 0
        collector.graph.unwrap()
    journal.close()
    opened = TraceStore.open(store)
    opened.take_in()
    return opened


# -- the apps with one node ----------------------------------------------------------------------------------------


def one_node(solver: Callable[[Draft], Draft]) -> Any:
    """The graph of a single node."""
    graph = StateGraph(Draft)
    graph.add_node("solver", solver)
    graph.add_edge(START, "solver")
    graph.add_edge("solver", END)
    return graph.compile()


def scribe(model: Any) -> Any:
    """One node, asked until it writes a message without a block; at most four times."""

    def solver(state: Draft) -> Draft:
        text = str(model.invoke(state["question"] + "".join(state.get("log", []))).text)
        return {"log": [text], "answer": text}

    def is_done(state: Draft) -> str:
        return "solver" if state["answer"].startswith("<") and len(state["log"]) < 4 else END

    graph = StateGraph(Draft)
    graph.add_node("solver", solver)
    graph.add_edge(START, "solver")
    graph.add_conditional_edges("solver", is_done)
    return graph.compile()


def stubborn(model: Any) -> Any:
    """One node that is asked three times, whatever it says."""

    def solver(state: Draft) -> Draft:
        return {"answer": " ".join(str(model.invoke(state["question"]).text) for _ in range(3))}

    return one_node(solver)


def two_speakers(model: Any) -> Any:
    """A node `other` that asks a model before `solver` does."""

    def ask(state: Draft) -> Draft:
        return {"answer": str(model.invoke(state["question"]).text)}

    graph = StateGraph(Draft)
    graph.add_node("other", ask)
    graph.add_node("solver", ask)
    graph.add_edge(START, "other")
    graph.add_edge("other", "solver")
    graph.add_edge("solver", END)
    return graph.compile()


def broken(model: Any) -> Any:
    """One node that fails."""

    def solver(_: Draft) -> Draft:
        raise ValueError("no")

    return one_node(solver)


def agent(model: Any) -> Any:
    """One agent with the adder's tool."""
    return create_agent(model, [add], name="solver")


def toolless(model: Any) -> Any:
    """One agent without a tool."""
    return create_agent(model, [], name="solver")


def own() -> Any:
    """One node with a model of its own, which nobody may ask."""
    model = SaysNext(answers=[])

    def solver(state: Draft) -> Draft:
        return {"answer": str(model.invoke(state["question"]).text)}

    return one_node(solver)


OWN_GRAPH = own()


OFFLINE = {"mode": "filtered", "retokenise": True}


def one_config(
    folder: Path,
    model: Path,
    *,
    app: str = "examples/team_in_one/app.py:build",
    task_to_input: str = "graphs.math_duo:task_to_input",
    **tables: Any,
) -> BridgeConfig:
    """The configuration of an app with the node `solver`."""
    trainer = {"lora": {"rank": 4}, "importance": {"mismatch": "none", "engine_tolerance": 1e3}, "offline": OFFLINE}
    content: dict[str, Any] = {
        "run": str(folder),
        "graph": {
            "app": app,
            "nodes": ["solver"],
            "tasks": "graphs.math_duo:tasks",
            "task_to_input": task_to_input,
            "reward": "support.distil_rig:reward",
            "heldout": 0.25,
        },
        "model": {"path": str(model)},
        "train": {"rounds": 1, "episodes_per_round": 4, "trainer": trainer},
        "compare": {"metric": "reward", "kl_actions": 0},
    }
    for name, table in tables.items():
        content[name] = {**content.get(name, {}), **table}
    return BridgeConfig.model_validate(content)


def distil_team(config: BridgeConfig, team: Path) -> str:
    """Runs the command; what it said."""
    text = io.StringIO()
    try:
        distil(config, team, "solver", reporter=Reporter(Console(file=text, width=300)))
    except Exception as error:
        error.add_note(text.getvalue())
        raise
    return text.getvalue()
