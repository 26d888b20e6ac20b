"""Owns: which tools of a fork give their recorded results, and which run.

- Tools before the forked call give what is recorded, and have no effect; those after it run. Or all run, by choice.
- A result goes to no tool run of another node or another tool call, in whichever order the branches come.
- What the app cancelled waits to be cancelled again; a text that looks like an object is a text.
- A tool of the repeated part that is called otherwise does not run; the fork fails with the place.
- With answers at hand a later tool of another branch may come early: it runs, and is no divergence.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forks.test_recorded_prefix import State, Team
from langchain_core.tools import BaseTool, tool
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from marft_bridge.common.errors import GraphError
from marft_bridge.forks.fork_plan import ForkChange, plan_forks, spans_to_parent, text_to_prefix
from marft_bridge.forks.given_tools import ToolChoice, given_tools
from marft_bridge.recording.redaction import REDACTED
from marft_bridge.replay.recorded_run import spans_to_run
from trace_store.conventions import REPLAYED_FROM, RUN_CONFIG, TOOL_RESULT
from trace_store.records import SpanRow, Trajectory


def counting_tool(effects: list[str]) -> BaseTool:
    """A tool that does something, and whose result says how often it did."""

    @tool
    def search(query: str) -> str:
        """Search."""
        effects.append(query)
        return f"result {len(effects)} of {query}"

    return search


def tool_chain(effects: list[str], asked: dict[str, str], *, catches: bool = False) -> Callable[[Any], Any]:
    """plan asks a model, look runs the tool, answer asks on what it found, check runs the tool again."""
    search = counting_tool(effects)

    def build(model: Any) -> Any:
        graph = StateGraph(State)

        def look(_: State) -> dict[str, Any]:
            try:
                return {"words": [search.invoke({"query": asked["look"]})]}
            except RuntimeError:
                if not catches:
                    raise
                return {"words": ["nothing"]}

        graph.add_node("plan", lambda _: {"words": [model.invoke("plan").text]})
        graph.add_node("look", look)
        graph.add_node("answer", lambda state: {"words": [model.invoke(f"answer {state['words'][-1]}").text]})
        graph.add_node("check", lambda state: {"words": [search.invoke({"query": state["words"][-1]})]})
        order = [START, "plan", "look", "answer", "check", END]
        for one, other in itertools.pairwise(order):
            graph.add_edge(one, other)
        return graph.compile()

    return build


def fork(team: Team, at: str, tools: ToolChoice = "recorded", **change: Any) -> Trajectory:
    with team.rig.store() as store:
        run = spans_to_parent(store.spans(team.parent.episode.episode_id))
    chosen = ForkChange(**change)
    plan = plan_forks(run, text_to_prefix(run, at, chosen.text, tools), chosen, run_id="fork-1", samples=1, seed=0)
    with given_tools():
        team.rig.run(plan)
    (made,) = team.episodes("fork-1")
    return made


def tool_spans(team: Team, episode: Trajectory) -> list[SpanRow]:
    with team.rig.store() as store:
        spans = [span for span in store.spans(episode.episode.episode_id) if span.operation == "execute_tool"]
    return sorted(spans, key=lambda span: span.start_ns)


def test_a_tool_before_the_fork_gives_its_recorded_result_and_one_after_it_runs(tmp_path: Path) -> None:
    effects: list[str] = []
    team = Team(tmp_path, tool_chain(effects, {"look": "word"}), ("plan", "answer"))
    assert len(effects) == 2
    made = fork(team, "answer")
    assert made.episode.outcome == "terminated"
    assert (len(effects), effects[2]) == (3, made.actions[1].completion)
    recorded, (given, run) = tool_spans(team, team.parent), tool_spans(team, made)
    assert given.attributes[TOOL_RESULT] == recorded[0].attributes[TOOL_RESULT] == "result 1 of word"
    assert (given.attributes[REPLAYED_FROM], run.attributes.get(REPLAYED_FROM)) == (recorded[0].span_id, None)
    assert run.attributes[TOOL_RESULT] == f"result 3 of {effects[2]}"
    assert made.actions[1].prompt_ids == team.parent.actions[1].prompt_ids
    assert [(edge.kind, edge.exact) for edge in made.edges] == [(edge.kind, edge.exact) for edge in team.parent.edges]


class EmptyShelfError(LookupError):
    """An error of the app's own."""


def test_a_tool_that_failed_by_an_error_of_the_apps_own_fails_by_it_again(tmp_path: Path) -> None:
    effects: list[str] = []

    @tool
    def take(item: str) -> str:
        """Take."""
        effects.append(item)
        raise EmptyShelfError(item)

    def build(model: Any) -> Any:
        def look(_: State) -> dict[str, Any]:
            try:
                take.invoke({"item": "pear"})
            except EmptyShelfError as error:
                return {"words": [f"no {error}"]}
            return {}

        graph = StateGraph(State)
        graph.add_node("plan", lambda _: {"words": [model.invoke("plan").text]})
        graph.add_node("look", look)
        graph.add_node("answer", lambda state: {"words": [model.invoke(f"answer {state['words'][-1]}").text]})
        for edge in ((START, "plan"), ("plan", "look"), ("look", "answer"), ("answer", END)):
            graph.add_edge(*edge)
        return graph.compile()

    team = Team(tmp_path, build, ("plan", "answer"))
    made = fork(team, "answer")
    assert (made.episode.outcome, effects) == ("terminated", ["pear"])
    assert made.actions[1].prompt_ids == team.parent.actions[1].prompt_ids


def test_by_choice_tools_run_again_and_another_result_is_a_divergence(tmp_path: Path) -> None:
    effects: list[str] = []
    team = Team(tmp_path, tool_chain(effects, {"look": "word"}), ("plan", "answer"))
    made = fork(team, "answer", "run")
    assert (made.episode.outcome, effects[2:]) == ("failed", ["word"])
    assert 'answer, call 1: message 0 (user) differs at word 2: recorded "1 of word", now "3 of word"' in str(
        made.episode.reason
    )


def test_a_tool_after_the_forked_call_runs(tmp_path: Path) -> None:
    effects: list[str] = []
    team = Team(tmp_path, tool_chain(effects, {"look": "word"}), ("plan", "answer"))
    assert fork(team, "plan").episode.outcome == "terminated"
    assert len(effects) == 4


@pytest.mark.parametrize("catches", [False, True])
def test_a_tool_of_the_repeated_part_that_is_called_otherwise_does_not_run_and_is_named(
    tmp_path: Path, catches: bool
) -> None:
    effects: list[str] = []
    asked = {"look": "word"}
    team = Team(tmp_path, tool_chain(effects, asked, catches=catches), ("plan", "answer"))
    asked["look"] = "another word"
    made = fork(team, "answer")
    assert (made.episode.outcome, len(effects), team.sampled_since()) == ("failed", 2, {})
    assert made.episode.reason == (
        "DivergedError: look: it runs the tool search with other arguments, at query:"
        ' recorded "word", now "another word"'
    )


def test_a_later_tool_of_another_branch_may_come_early_and_runs(tmp_path: Path) -> None:
    """Both calls begin together; the tool after right begins when left has ended, and in the fork before it is made."""
    effects: list[str] = []
    search = counting_tool(effects)
    waits = {"left": [0.0, 0.5], "look": [0.3, 0.0]}

    def build(model: Any) -> Any:
        graph = StateGraph(State)

        def left(_: State) -> dict[str, Any]:
            time.sleep(waits["left"].pop(0))
            return {"words": [model.invoke("left").text]}

        def right(_: State) -> dict[str, Any]:
            word = model.invoke("right").text
            time.sleep(waits["look"].pop(0))
            return {"words": [search.invoke({"query": word})]}

        for name, node in (("left", left), ("right", right)):
            graph.add_node(name, node)
            graph.add_edge(START, name)
            graph.add_edge(name, END)
        return graph.compile()

    team = Team(tmp_path, build, ("left", "right"), delay_s=0.1)
    made = fork(team, "left")
    assert (made.episode.outcome, team.sampled_since()) == ("terminated", {"left": 1})
    (right_word,) = [action.completion for action in team.parent.actions if action.node == "right"]
    assert effects == [right_word] * 2


def two_branches(search: BaseTool, waits: list[float], *, is_one_node: bool) -> Callable[[Any], Any]:
    """One branch asks its model, then runs the tool; the other works for a while, then runs it with the same words.

    They are two nodes, or two packets to one node, whose tool calls have ids.
    """

    def build(model: Any) -> Any:
        def run_tool(call_id: str) -> str:
            call = {"name": "search", "args": {"query": "x"}, "id": call_id, "type": "tool_call"}
            return str(search.invoke(call).content if is_one_node else search.invoke({"query": "x"}))

        def asks(_: State) -> dict[str, Any]:
            model.invoke("which")
            return {"words": [run_tool("call_1")]}

        def works(_: State) -> dict[str, Any]:
            time.sleep(waits.pop(0))
            return {"words": [run_tool("call_2")]}

        graph = StateGraph(State)
        if is_one_node:
            graph.add_node("asks", lambda packet: works(packet) if packet["is_work"] else asks(packet))  # type: ignore[arg-type]
            graph.add_conditional_edges(
                START, lambda _: [Send("asks", {"is_work": each}) for each in (False, True)], ["asks"]
            )
            graph.add_edge("asks", END)
            return graph.compile()
        for name, node in (("asks", asks), ("works", works)):
            graph.add_node(name, node)
            graph.add_edge(START, name)
            graph.add_edge(name, END)
        return graph.compile()

    return build


@pytest.mark.parametrize("is_one_node", [False, True], ids=["nodes", "call ids"])
def test_a_result_goes_to_no_other_tool_run_that_comes_first_this_time(tmp_path: Path, is_one_node: bool) -> None:
    """In the parent the branch that works was first, so that its result is given; in the fork it is last."""
    effects: list[str] = []
    team = Team(
        tmp_path, two_branches(counting_tool(effects), [0.05, 0.9], is_one_node=is_one_node), ("asks",), delay_s=0.3
    )
    first, second = tool_spans(team, team.parent)
    made = fork(team, "asks")
    assert (made.episode.outcome, len(effects)) == ("terminated", 3)
    run, given = tool_spans(team, made)
    assert (run.attributes.get(REPLAYED_FROM), given.attributes[REPLAYED_FROM]) == (None, first.span_id)
    assert [each.attributes[TOOL_RESULT] for each in (second, run, given)] == [
        f"result {number} of x" for number in (2, 3, 1)
    ]


def test_tool_calls_whose_ids_the_app_draws_keep_their_results(tmp_path: Path) -> None:
    """Two at once with the same words, and the first of them once more by its id."""
    effects: list[str] = []
    search = counting_tool(effects)

    def build(model: Any) -> Any:
        def look(_: State) -> dict[str, Any]:
            one, other = str(uuid.uuid4()), str(uuid.uuid4())
            calls = [
                {"name": "search", "args": {"query": "x"}, "id": each, "type": "tool_call"}
                for each in (one, other, one)
            ]
            return {"words": [str(search.invoke(call).content) for call in calls]}

        graph = StateGraph(State)
        graph.add_node("look", look)
        graph.add_node("answer", lambda state: {"words": [model.invoke(" ".join(state["words"])).text]})
        for name, other in ((START, "look"), ("look", "answer"), ("answer", END)):
            graph.add_edge(name, other)
        return graph.compile()

    team = Team(tmp_path, build, ("answer",))
    made = fork(team, "answer")
    assert (made.episode.outcome, len(effects)) == ("terminated", 3)
    assert [each.attributes[REPLAYED_FROM] for each in tool_spans(team, made)] == [
        each.span_id for each in tool_spans(team, team.parent)
    ]


def test_a_text_that_looks_like_an_object_of_the_apps_is_given(tmp_path: Path) -> None:
    effects: list[str] = []

    @tool
    def search(query: str) -> str:
        """Runs a command."""
        effects.append(query)
        return "Command(ls) done"

    def build(model: Any) -> Any:
        graph = StateGraph(State)
        graph.add_node("answer", lambda _: {"words": [model.invoke(search.invoke({"query": "ls"})).text]})
        graph.add_edge(START, "answer")
        graph.add_edge("answer", END)
        return graph.compile()

    team = Team(tmp_path, build, ("answer",))
    made = fork(team, "answer")
    assert (made.episode.outcome, effects) == ("terminated", ["ls"])
    with team.rig.store() as store:
        spans = store.spans(team.parent.episode.episode_id)
    dated = [replace(span, attributes=span.attributes | {RUN_CONFIG: None}) for span in spans]
    dated = [replace(span, attributes={k: v for k, v in span.attributes.items() if v is not None}) for span in dated]
    assert [[each.must_run for each in spans_to_run(rows).tools] for rows in (spans, dated)] == [[False], [True]]


def test_a_tool_that_the_app_cancelled_waits_to_be_cancelled_and_does_not_run_again(tmp_path: Path) -> None:
    effects: list[str] = []

    @tool
    async def pay(amount: str) -> str:
        """Pays."""
        effects.append(amount)
        await asyncio.sleep(20)
        return "paid"

    def build(model: Any) -> Any:
        async def buy(_: State) -> dict[str, Any]:
            try:
                result = await asyncio.wait_for(pay.ainvoke({"amount": "5"}), 0.2)
            except TimeoutError:
                result = "too late"
            return {"words": [(await model.ainvoke(result)).text]}

        graph = StateGraph(State)
        graph.add_node("buy", buy)
        graph.add_edge(START, "buy")
        graph.add_edge("buy", END)
        return graph.compile()

    team = Team(tmp_path, build, ("buy",))
    made = fork(team, "buy")
    assert (made.episode.outcome, effects) == ("terminated", ["5"])
    recorded, (given,) = tool_spans(team, team.parent), tool_spans(team, made)
    assert given.attributes[REPLAYED_FROM] == recorded[0].span_id
    assert (given.status, recorded[0].status) == ("error", "error")


def test_a_redacted_result_is_refused_in_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    team = Team(tmp_path, tool_chain([], {"look": "word"}), ("plan", "answer"))
    with team.rig.store() as store:
        run = spans_to_parent(store.spans(team.parent.episode.episode_id))
    redacted = replace(run, tools=[replace(run.tools[0], result=f"mail {REDACTED}"), run.tools[1]])
    with pytest.raises(GraphError, match=r"is redacted \(tool search of node look\).*let tools run with --tools run"):
        text_to_prefix(redacted, "answer", None)
    assert text_to_prefix(redacted, "answer", None, "run").tools is None
    assert text_to_prefix(redacted, "plan", None).tools is not None  # it runs: nothing of it is given
