"""Owns: what is replayed unchanged comes out the same: every graph of the zoo, every app of the suite, random programs.

Calls, prompts, D and the result are compared by the replay itself; that it sees a difference is held beside this file.
Here the models of the replayed apps answer nothing: a live call fails the test.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import operator
import random
import re
import tempfile
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from apps.by_hand import FOLDER, SUITE
from apps.test_suite import IS_ASYNC, module_of, provider
from examples.test_wrapping import EXPECTED, GUIDES, QUESTION, serving, sink
from examples.test_wrapping import _forget as forget_app
from hypothesis import HealthCheck, given, settings
from langchain_core.messages import AIMessage
from langchain_core.tools import StructuredTool
from langgraph.graph import START, MessagesState, StateGraph
from support.edge_rig import says
from support.own_process import hold_for_drawn_programs
from support.pages.zoo_page import config_to_name, configs
from support.random_programs import Drawing, Witness, drawing_to_graph, drawings
from support.replay_rig import differences, record_runs, replay_all

from marft_bridge.config.bridge import toml_to_config
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.replay import quoted_messages
from marft_bridge.replay.quoted_messages import without_reports
from marft_bridge.replay.replayed_run import replay_run
from marft_bridge.rollouts.app import load_app
from marft_bridge.rollouts.app_graph import call_app_factory, load_app_object, open_graph
from trace_store import conventions as c

__all__ = ["sink"]  # a fixture


def any_answer(node: str, prompt: str, _: random.Random) -> str:
    """Something that a graph of the zoo may take a turn on."""
    chance = random.Random(f"{node}{prompt}")
    number = next(iter(re.findall(r"\d+", prompt)), "7")
    texts = ("DONE", "ADDER", "MULTIPLIER", "1, 2", "yes", "print(3)", "Anna lives\nBob keeps", "<search>Anna</search>")
    return chance.choice((*texts, number, f"it is {number}"))


def never(node: str, prompt: str, _: random.Random) -> str:
    raise AssertionError(f"a live call of {node}: {prompt}")


@pytest.mark.parametrize("path", configs(), ids=config_to_name)
def test_every_graph_of_the_zoo_comes_out_the_same(path: Path, tmp_path: Path) -> None:
    app = load_app(toml_to_config(path))
    graph, quiet_graph = (app.build(ScriptedPolicy(script=script)) for script in (any_answer, never))
    for number, task in enumerate(app.train_tasks[:3]):
        settings = app.runs.to_arguments(task, {})
        graph_input = app.task_to_input(task)
        (run,) = record_runs(graph, [graph_input], tmp_path / str(number), **settings)
        replayed = replay_run(quiet_graph, run)
        assert (replayed.divergence, replayed.note) == (None, None)
        assert replayed.call_count == len(run.calls) > 0
        assert all(span.attributes[c.PROMPT_IDS] for span in run.spans if span.operation == c.CHAT)


# langgraph-supervisor 0.0.31 still builds on LangGraph's older agent.
@pytest.mark.filterwarnings("ignore::langgraph.warnings.LangGraphDeprecatedSinceV10")
@pytest.mark.parametrize("name", SUITE)
def test_every_app_of_the_suite_comes_out_the_same_with_its_provider_gone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "hosted")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    app, text = SUITE[name], (FOLDER / f"{name}.py").read_text()
    for is_async in (True,) if name in IS_ASYNC else (True, False):
        folder = tmp_path / str(is_async)
        folder.mkdir()
        with provider(app, monkeypatch) as server, module_of(text, folder / f"app_{name}.py") as module:
            runs = record_runs(
                module.graph,
                [module.tasks[0], *app.later_inputs],
                folder,
                is_async=is_async,
                config={"configurable": {"thread_id": "t"}},
                context=app.context or app.default_context,
            )
            call_count = len(server.asked)
        with module_of(text, folder / f"app_{name}.py") as module:  # the app as it starts, and nobody to ask
            replayed = replay_all(module.graph, runs)
        assert differences(replayed) == [None] * len(runs)
        assert sum(one.call_count for one in replayed) == call_count


def check(drawing: Drawing) -> None:
    with tempfile.TemporaryDirectory() as folder:
        graph_input: dict[str, Any] = {"k0": "", "log": []}
        (run,) = record_runs(drawing_to_graph(drawing, Witness()), [graph_input], Path(folder))
        replayed = replay_run(drawing_to_graph(drawing, Witness(meets=False)), run)
    assert (replayed.divergence, replayed.note) == (None, None)
    assert replayed.call_count == len(run.calls)


LAW = settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@LAW
@given(drawing=drawings())
def test_random_programs_come_out_the_same(drawing: Drawing) -> None:
    check(drawing)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_hundred_random_programs_come_out_the_same() -> None:
    hold_for_drawn_programs("replay.test_same_again", max_examples=300)


class Log(TypedDict):
    log: Annotated[list[str], operator.add]


@pytest.mark.parametrize("in_tools", [False, True])
def test_branches_that_ask_the_same_at_once_are_told_apart_by_what_they_do_next(in_tools: bool, tmp_path: Path) -> None:
    """Eight nodes, whose two branches begin the other way round in the replay: nothing but what follows tells them."""

    def graph_of(model: Any, *, is_turned: bool) -> Any:
        async def long(text: str) -> str:
            first = (await model.ainvoke(text)).text
            return str((await model.ainvoke(f"{text} {first}")).text)

        async def short(text: str) -> str:
            return str((await model.ainvoke(text)).text)

        branches = [long, short]
        tools = [StructuredTool.from_function(coroutine=each, name="ask", description="Asks.") for each in branches]

        def node(name: str) -> Any:
            async def act(state: dict[str, Any]) -> dict[str, Any]:
                text = f"{name}: {state['log'][-1:]}"
                running = [
                    each.ainvoke({"text": text}) if in_tools else branch(text)
                    for each, branch in zip(tools, branches, strict=True)
                ]
                turned = await asyncio.gather(*(running[::-1] if is_turned else running))
                return {"log": [" ".join(turned[::-1] if is_turned else turned)]}

            return act

        graph = StateGraph(Log)
        names = [f"n{number}" for number in range(8)]
        for earlier, name in zip([START, *names], names, strict=False):
            graph.add_node(name, node(name))
            graph.add_edge(earlier, name)
        return graph.compile()

    numbers = itertools.count()
    model = ScriptedPolicy(script=lambda node, prompt, chance: f"answer {next(numbers)}")
    (run,) = record_runs(graph_of(model, is_turned=False), [{"log": []}], tmp_path)
    replayed = replay_run(graph_of(ScriptedPolicy(script=never), is_turned=True), run)
    assert (replayed.divergence, replayed.note, replayed.call_count) == (None, None, 24)


@pytest.mark.filterwarnings("ignore::langgraph.warnings.LangGraphDeprecatedSinceV10")
@pytest.mark.parametrize("name", EXPECTED)
def test_every_app_of_the_guides_comes_out_the_same_with_its_provider_gone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: ThreadingHTTPServer
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{sink.server_address[1]}")
    for variable, value in {"OPENAI_API_KEY": "x", "SUMS_STYLE": "Answer with one number.", "NO_PROXY": "*"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(GUIDES / name)
    graph_name = toml_to_config(Path("bridge.toml")).graph.app
    try:
        with serving(EXPECTED[name]) as server, asyncio.Runner() as runner:
            monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
            with open_graph(call_app_factory(load_app_object(graph_name, "app"), "app", None), "app", runner) as graph:
                graph_input = {"messages": [("user", QUESTION)], "question": QUESTION}
                runs = record_runs(graph, [graph_input], tmp_path)
        replayed = replay_all(graph, runs)
    finally:
        forget_app()
    assert differences(replayed) == [None]
    assert replayed[0].call_count == len(EXPECTED[name].called)


QUOTE: dict[str, Callable[[Any], str]] = {
    "list": str,
    "one": lambda messages: str(messages[-1]),
    "JSON": lambda messages: json.dumps([message.model_dump() for message in messages], default=str),
}


@pytest.mark.parametrize("how", QUOTE)
@pytest.mark.parametrize("counts", [{"input_tokens": 5, "output_tokens": 2, "total_tokens": 7}, None])
def test_a_prompt_that_quotes_whole_messages_is_the_same_whatever_their_model_reported(
    how: str, counts: Any, tmp_path: Path
) -> None:
    """What a replay does not give back: the provider's own names and numbers, with braces and quotes in them."""
    report = {"provider": 'a {"', "system_fingerprint": "it's } 'here'", "list": [{"x": None}]}
    answer = AIMessage(
        "Say {this} 'or' that.",
        additional_kwargs={"refusal": None},
        response_metadata=report,
        usage_metadata=counts,
    )

    def graph_of(*answers: AIMessage) -> Any:
        model = says(*answers)

        def summary(state: dict[str, Any]) -> dict[str, Any]:
            return {"messages": [model.invoke(f"Sum it up: {QUOTE[how](state['messages'])}")]}

        graph = StateGraph(MessagesState)
        graph.add_node("talk", lambda state: {"messages": [model.invoke(state["messages"])]})
        graph.add_node("summary", summary)
        graph.add_edge(START, "talk")
        graph.add_edge("talk", "summary")
        return graph.compile()

    (run,) = record_runs(graph_of(answer, AIMessage("end")), [{"messages": [("user", "hello")]}], tmp_path)
    assert differences(replay_all(graph_of(), [run])) == [None]


def test_what_stands_beside_a_report_in_a_text_is_compared() -> None:
    text = "content='a' additional_kwargs={'x': '}'} response_metadata={'y': {}} id='1', usage_metadata={'n': 1} end"
    assert without_reports([text]) == ["content='a' id='1' end"]
    assert without_reports('{"response_metadata": {"a": "}"}, "usage_metadata": null, "id": 1}') == '{, "id": 1}'
    assert without_reports("response_metadata={'cut") == "response_metadata={'cut"
    assert without_reports("usage_metadata={}") == "usage_metadata={}"  # no message is quoted


@pytest.mark.parametrize("end", ["", "}" * 300])
def test_a_text_is_read_once_however_many_reports_it_has_in_each_other(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_counts: list[int] = []
    end_of_table = quoted_messages._end_of_table

    def count_read(text: str, start: int) -> int | None:
        table_end = end_of_table(text, start)
        read_counts.append((len(text) if table_end is None else table_end) - start)
        return table_end

    monkeypatch.setattr(quoted_messages, "_end_of_table", count_read)
    text = "response_metadata={" * 300 + end
    assert without_reports(text) == ("" if end else text)
    assert sum(read_counts) <= len(text)
