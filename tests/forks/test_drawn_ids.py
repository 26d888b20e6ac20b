"""Owns: a run that draws ids of its own can be forked, with new ids in place of the parent's.

- Ids in a prompt, in a tool's arguments and result, and in state that a later node reads stand for those of the parent.
- What is given again quotes the ids of the fork, so that the live rest reads no others; a fork of a fork does too.
- Ids that were given (in a task, by a tool) stand for themselves; a prompt that differs otherwise is named.
"""

from __future__ import annotations

import itertools
import json
import re
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from forks.test_given_tools import fork, tool_spans
from forks.test_recorded_prefix import State, Team
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph

from marft_bridge.fork_credit.run_levels import run_to_levels
from marft_bridge.forks.fork_plan import ForkChange, plan_forks, spans_to_parent, text_to_prefix
from marft_bridge.forks.given_tools import given_tools
from trace_store.conventions import REPLAYED_FROM, TOOL_RESULT
from trace_store.records import Trajectory

_UUID = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def ids_of(made: Trajectory) -> list[list[str]]:
    """The UUIDs of each call's prompt."""
    return [_UUID.findall(bytes(action.prompt_ids or ()).decode()) for action in made.actions]


def chain_of(*nodes: tuple[str, Callable[[State], dict[str, Any]]]) -> Any:
    graph = StateGraph(State)
    for name, node in nodes:
        graph.add_node(name, node)
    for one, other in itertools.pairwise([START, *(name for name, _ in nodes), END]):
        graph.add_edge(one, other)
    return graph.compile()


def ticket_team(folder: Path, wording: dict[str, str], effects: list[str]) -> Team:
    """open draws an id and asks, look runs a tool on it, answer asks on both, close asks on all."""

    @tool
    def look(key: str) -> str:
        """Look."""
        effects.append(key)
        return f"shelf of {key}"

    def build(model: Any) -> Any:
        def open_ticket(_: State) -> dict[str, Any]:
            ticket = str(uuid.uuid4())
            return {"words": [ticket, model.invoke(f"{wording['open']} ticket {ticket}").text]}

        def look_up(state: State) -> dict[str, Any]:
            return {"words": [look.invoke({"key": state["words"][1]}), look.invoke({"key": str(uuid.uuid4())})]}

        def ask(name: str) -> Callable[[State], dict[str, Any]]:
            return lambda state: {"words": [model.invoke(f"{name} {' '.join(state['words'])}").text]}

        return chain_of(("open", open_ticket), ("look", look_up), ("answer", ask("answer")), ("close", ask("close")))

    return Team(folder, build, ("open", "answer", "close"))


def test_a_run_whose_prompts_tools_and_state_hold_drawn_ids_is_forked_with_ids_of_its_own(tmp_path: Path) -> None:
    effects: list[str] = []
    team = ticket_team(tmp_path, {"open": "new"}, effects)
    made = fork(team, "answer")
    assert (made.episode.reason, made.episode.outcome, len(effects)) == (None, "terminated", 2)
    assert [action.replayed_from for action in made.actions] == [team.parent.actions[0].action_id, None, None]
    assert team.sampled_since() == {"answer": 1, "close": 1}
    mine, parents = ids_of(made), ids_of(team.parent)
    assert (mine[0], [len(each) for each in mine]) == (parents[0], [1, 3, 3])  # the repeated call has its tokens
    assert mine[1] == mine[2]
    assert not set(mine[1]) & set(itertools.chain(*parents)), "the live rest reads ids of the parent"
    recorded, given = tool_spans(team, team.parent), tool_spans(team, made)
    assert [each.attributes[REPLAYED_FROM] for each in given] == [each.span_id for each in recorded]
    assert given[1].attributes[TOOL_RESULT] == f"shelf of {mine[1][2]}"


def test_a_fork_of_a_fork_with_drawn_ids_goes_on_with_new_ones(tmp_path: Path) -> None:
    team = ticket_team(tmp_path, {"open": "new"}, [])
    team.parent = fork(team, "answer")
    with team.rig.store() as store:
        run = spans_to_parent(store.spans(team.parent.episode.episode_id))
    prefix = text_to_prefix(run, "close", None)
    plan = plan_forks(run, prefix, ForkChange(), run_id="fork-2", samples=2, seed=0)
    with given_tools():
        team.rig.run(plan)
    made = team.episodes("fork-2")
    assert [each.episode.reason for each in made] == [None, None]
    assert len({tuple(ids_of(each)[2]) for each in [*made, team.parent]}) == 3


def test_a_prompt_that_differs_by_more_than_its_id_is_named(tmp_path: Path) -> None:
    wording = {"open": "new"}
    team = ticket_team(tmp_path, wording, [])
    wording["open"] = "other"
    made = fork(team, "answer")
    assert team.sampled_since() == {}
    assert "open, call 1: message 0 (user) differs at word 0" in str(made.episode.reason)


def test_an_id_that_was_given_stands_for_itself(tmp_path: Path) -> None:
    """The parent's task has an id; a fork whose app writes another one in its place is another run."""
    shown: list[str] = []

    def build(model: Any) -> Any:
        def ask(state: State) -> dict[str, Any]:
            return {"words": [model.invoke(f"case {shown[0] if shown else state['words'][0]}").text]}

        return chain_of(("a", ask), ("b", lambda state: {"words": [model.invoke(state["words"][-1]).text]}))

    team = Team(tmp_path, build, ("a", "b"))
    with team.rig.store() as store:
        run = spans_to_parent(store.spans(team.parent.episode.episode_id))
    case, other = str(uuid.uuid4()), str(uuid.uuid4())
    prompt = json.loads(json.dumps(run.calls[0].prompt).replace("case q", f"case {case}"))
    calls = [replace(run.calls[0], prompt=prompt), run.calls[1]]
    for given, outcome in (([case], "failed"), ([], "terminated")):
        shown[:] = [other]
        prefix = replace(text_to_prefix(replace(run, calls=calls), "b", None), inputs=given)
        plan = plan_forks(run, prefix, ForkChange(), run_id=f"fork-{outcome}", samples=1, seed=0)
        team.rig.run(plan)
        (made,) = team.episodes(f"fork-{outcome}")
        assert made.episode.outcome == outcome
    with team.rig.store() as store:
        inputs = text_to_prefix(spans_to_parent(store.spans(team.parent.episode.episode_id)), "b", None).inputs
    assert any("q" in str(each) for each in inputs)


def test_branches_with_ids_of_their_own_keep_their_answers_and_join_with_them(tmp_path: Path) -> None:
    def build(model: Any) -> Any:
        graph = StateGraph(State)

        def branch(name: str) -> Callable[[State], dict[str, Any]]:
            def node(_: State) -> dict[str, Any]:
                drawn = uuid.uuid4().hex
                return {"words": [f"{name} {drawn}", model.invoke(f"work on {drawn}").text]}

            return node

        for name in ("left", "right"):
            graph.add_node(name, branch(name))
            graph.add_edge(START, name)
            graph.add_edge(name, "join")
        graph.add_node("join", lambda state: {"words": [model.invoke(" ".join(state["words"])).text]})
        graph.add_node("end", lambda state: {"words": [model.invoke(" ".join(state["words"])).text]})
        graph.add_edge("join", "end")
        graph.add_edge("end", END)
        return graph.compile()

    team = Team(tmp_path, build, ("left", "right", "join", "end"), delay_s=0.05)
    made = fork(team, "end")
    assert (made.episode.reason, team.sampled_since()) == (None, {"end": 1})
    given = {action.node: action.completion for action in team.parent.actions if action.node != "end"}
    assert {action.node: action.completion for action in made.actions if action.replayed_from} == given


def test_an_answer_that_quotes_a_drawn_id_quotes_the_forks(tmp_path: Path) -> None:
    def build(model: Any) -> Any:
        def draw(_: State) -> dict[str, Any]:
            drawn = str(uuid.uuid4())
            return {"words": [drawn, model.invoke(f"say {drawn}").text]}

        return chain_of(("a", draw), ("b", lambda state: {"words": [model.invoke(" ".join(state["words"])).text]}))

    team = Team(tmp_path, build, ("a", "b"))
    with team.rig.store() as store:
        run = spans_to_parent(store.spans(team.parent.episode.episode_id))
    (drawn,) = _UUID.findall(json.dumps(run.calls[0].prompt))
    answer = run.calls[0].answer
    assert answer is not None
    before = [replace(run.calls[0], answer=answer.model_copy(update={"content": f"heard {drawn}"}))]
    texts = json.dumps(run.calls[1].prompt).replace(str(answer.content), f"heard {drawn}")
    quoting = replace(run, calls=[*before, replace(run.calls[1], prompt=json.loads(texts))])
    plan = plan_forks(run, text_to_prefix(quoting, "b", None), ForkChange(), run_id="fork-1", samples=1, seed=0)
    team.rig.run(plan)
    (made,) = team.episodes("fork-1")
    one, other = ids_of(made)[1]
    assert (made.episode.outcome, one == other, one != drawn) == ("terminated", True, True)


def test_credit_by_forks_runs_the_levels_of_a_run_with_drawn_ids(tmp_path: Path) -> None:
    team = ticket_team(tmp_path, {"open": "new"}, [])
    with team.rig.store() as store:
        run = spans_to_parent(store.spans(team.parent.episode.episode_id))
    for number, level in enumerate(run_to_levels(run, ["open", "answer", "close"]).levels):
        plan = plan_forks(run, level.prefix, ForkChange(), run_id=f"level-{number}", samples=2, seed=0)
        with given_tools():
            team.rig.run(plan)
        assert {each.episode.outcome for each in team.episodes(f"level-{number}")} == {"terminated"}
