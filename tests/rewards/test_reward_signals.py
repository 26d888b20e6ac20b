"""Owns: what is computed from the record of a run.

- Every signal has the value that docs/rewards.md works out by hand, with the tables that stand there.
- Steps and agents: each call's tools, tokens, seconds and faults are credited to who made it, by tool call id first.
- What does not apply or is not known is absent, with the reason, and never 0.
- Only chains of D between two agents are a loop: parallel branches, a third agent, and an agent's own calls are none.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError
from support.paths import ROOT
from support.reward_rig import TASK, earned, example_run, example_spans, score, table, value
from support.sample_spans import SampleTrace, chain

from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.rewards.contract import RunView
from marft_bridge.rewards.facts import longest_exchange, run_to_tool_calls
from marft_bridge.rewards.registry import rewards_to_layers
from marft_bridge.rewards.tools import selection_accuracy
from trace_store import conventions as c
from trace_store.assemble import spans_to_trajectory
from trace_store.records import Action, Edge, SpanRow

PAGE = (ROOT / "docs/rewards.md").read_text()
TABLES = tomllib.loads(PAGE.split("<!-- worked -->\n```toml\n")[1].split("```")[0])
WORKED = [table(**each) for each in TABLES["rewards"]]
VALUES = {
    name: float(number) for name, number in re.findall(r"^\| `(\w+)` \| .* \| ([\d.]+) \|$", PAGE, flags=re.MULTILINE)
}


def run_of(spans: Sequence[SpanRow], task: Any = TASK) -> RunView:
    return RunView(task, None, spans_to_trajectory(spans), spans)


def test_every_signal_has_the_value_that_the_page_works_out() -> None:
    assert [reward.name for reward in WORKED] == list(VALUES)
    assert score(example_run(), *WORKED).team == pytest.approx(VALUES, abs=5e-5)


def test_the_tables_that_the_page_begins_with_go_together() -> None:
    tables = [table(**each) for each in tomllib.loads(PAGE.split("```toml\n")[1].split("```")[0])["rewards"]]
    # Right, three of five calls without a fault, 25 tokens.
    assert score(example_run(result={"answer": "= 12"}), *tables).team["reward"] == pytest.approx(1 + 0.2 * 0.6 - 0.025)


def test_the_preset_is_the_articles_formula() -> None:
    # Every term is 1, so the sum is that of the weights: 1 + 0.5 - 0.1 - 0.2 + 0.3.
    known = dict.fromkeys(
        ["task_completion", "trajectory_score", "step_count", "tool_error_rate", "goal_progress"], 1.0
    )
    preset = table(kind="composite", preset="futureagi")
    found = score(example_run(), preset, known=known, function=(lambda *_: known, "f"))
    assert found.team["composite"] == pytest.approx(1.5)


def by_step(**options: Any) -> dict[str | None, float]:
    return {one.action_id: one.value for one in earned(example_run(), level="step", **options)}


def by_agent(**options: Any) -> dict[str | None, float]:
    return {one.node: one.value for one in earned(example_run(), level="agent", **options)}


def test_steps_are_credited_each_for_itself() -> None:
    calls = [f"call{n}" for n in range(1, 6)]
    assert by_step(kind="tokens") == dict(zip(calls, [4, 6, 2, 8, 5], strict=True))
    assert by_step(kind="latency_s") == dict(zip(calls, [1, 2, 1, 2, 1], strict=True))
    assert by_step(kind="trajectory_score") == dict(zip(calls, [1, 0, 1, 1, 0], strict=True))
    assert by_step(kind="tool_success") == {"call1": 1, "call2": 0, "call4": 1}
    assert by_step(kind="tool_error_rate") == {"call1": 0, "call2": 1, "call4": 0}
    assert by_step(kind="cost", per_million={"prompt": 2, "sampled": 10}) == pytest.approx(
        dict(zip(calls, [60e-6, 100e-6, 80e-6, 160e-6, 150e-6], strict=True))
    )


def test_agents_are_credited_for_their_own_calls() -> None:
    assert by_agent(kind="tokens", count="all") == {"planner": 101, "worker": 74}
    assert by_agent(kind="latency_s") == {"planner": 3, "worker": 4}
    assert by_agent(kind="trajectory_score") == {"planner": pytest.approx(2 / 3), "worker": 0.5}
    assert by_agent(kind="tool_error_rate") == {"planner": 0, "worker": 0.5}
    prices = {"planner@1": {"prompt": 1, "sampled": 0}, "worker@1": {"prompt": 0, "sampled": 1}}
    assert by_agent(kind="cost", models=prices) == {"planner": pytest.approx(90e-6), "worker": pytest.approx(14e-6)}


def test_expected_tools_may_be_given_by_agent() -> None:
    task = {"id": "t", "tools": {"planner": ["search"], "worker": ["calc"], "critic": ["search"]}}
    accuracy = table(kind="tool_selection_accuracy", expected_from="tools", level="agent")
    found = score(example_run(task), accuracy, agents=("critic",)).earned["tool_selection_accuracy"]
    assert {one.node: one.value for one in found} == {"planner": 1.0, "worker": 0.5, "critic": 0.0}
    with pytest.raises(GraphError, match="is for node 'critic', which called no model in the episode"):
        score(example_run(task), accuracy)  # nobody knows that name: a slip of the pen


def test_a_call_that_failed_is_a_fault() -> None:
    sample = chain()
    node = sample.node("c:1", 50, 60, step=3, after=("b:1",))
    sample.call("z", node, 51, 59, ok=False, SAMPLED_IDS=None, LOGPROBS=None)
    found = earned(run_of(sample.spans()), kind="trajectory_score", level="step")
    assert {one.action_id: one.value for one in found} == {"x": 1, "y": 1, "z": 0}


def test_a_signal_may_be_of_some_tools_only() -> None:
    assert value(example_run(), kind="tool_error_rate", tools=["calc"]) == 0.5
    assert value(example_run(), kind="tool_success", tools=["search"]) == 1.0
    assert value(example_run(), kind="tool_success", tools=["submit"]) is None


def test_fewer_calls_than_ideal_are_no_better_than_ideal() -> None:
    assert value(example_run(), kind="step_efficiency", ideal=9) == 1.0
    assert value(run_of(SampleTrace().spans()), kind="step_efficiency", ideal=9) is None


@pytest.mark.parametrize(
    ("goal", "progress"),
    [
        ({"tools": ["search", "submit"]}, 1 / 2),
        ({"nodes": ["worker", "critic", "planner"]}, 2 / 3),
        ({"fields": ["text", "empty", "nothing", "list", "missing", "zero"]}, 2 / 6),
        ({"tools_from": "tools", "nodes": ["critic"]}, 2 / 3),
    ],
)
def test_a_goal_is_met_as_far_as_its_conditions_are(goal: dict[str, Any], progress: float) -> None:
    run = example_run(result={"text": "x", "empty": "", "nothing": None, "list": [], "zero": 0})
    assert value(run, kind="goal_progress", **goal) == progress
    assert value(run, kind="task_completion", **goal) == 0.0


def test_a_tool_that_only_failed_meets_no_goal() -> None:
    sample = chain()
    node = sample.node("c:1", 50, 60, step=3, after=("b:1",))
    sample.tool("submit", node, 51, 59, ok=False, node="c")
    assert value(run_of(sample.spans()), kind="task_completion", tools=["submit"]) == 0.0


@pytest.mark.parametrize(
    ("called", "expected", "ordered", "accuracy"),
    [
        ("ab", "ab", False, 1),
        ("ba", "ab", False, 1),
        ("ba", "ab", True, 1 / 2),
        ("aab", "ab", False, 2 / 3),
        ("a", "aa", False, 1 / 2),
        ("xaybz", "ab", True, 2 / 5),
        ("", "", False, 1),
        ("a", "", False, 0),
        ("", "a", True, 0),
    ],
)
def test_selection_accuracy(called: str, expected: str, ordered: bool, accuracy: float) -> None:
    assert selection_accuracy(list(called), list(expected), ordered=ordered) == accuracy


# -- absent -------------------------------------------------------------------------------------------------------


def test_without_a_tool_call_there_is_no_rate_and_the_composite_says_so() -> None:
    rate = table(kind="tool_error_rate")
    strict = table(kind="composite", name="strict", weights={"tool_error_rate": -1.0, "step_count": 1.0})
    lenient = table(kind="composite", name="lenient", leave_out=["tool_error_rate"], weights=strict.weights)  # type: ignore[attr-defined]
    found = score(run_of(chain().spans()), rate, table(kind="step_count", budget=4), strict, lenient)
    assert found.team == {"step_count": 0.5, "lenient": 0.5}
    assert found.absent == {
        "tool_error_rate": "does not apply to the episode",
        "strict": "'tool_error_rate' is absent",
    }


def test_tokens_that_nobody_counted_are_not_0() -> None:
    sample = chain()
    sample.call(
        "z", sample.node("c:1", 50, 60, step=3, after=("b:1",)), 51, 59, SAMPLED_IDS=None, USAGE_OUTPUT_TOKENS=None
    )
    found = score(run_of(sample.spans()), table(kind="tokens"), table(kind="step_count", budget=3))
    assert found.absent == {"tokens": "node 'c' made a call whose tokens nobody counted"}
    assert found.team == {"step_count": 1.0}
    # The prompt's are known, and half of a sum is no sum.
    assert value(run_of(sample.spans()), kind="tokens", count="prompt") == 9
    assert value(run_of(sample.spans()), kind="tokens", count="all") is None


def test_a_run_that_was_not_recorded_whole_has_no_signals() -> None:
    whole = example_run()
    torn = replace(whole, trajectory=None)
    assert score(torn, table(kind="step_count", budget=3)).absent == {
        "step_count": "the episode was not recorded whole"
    }
    without = replace(whole, spans=())
    assert score(without, table(kind="tool_success")).absent == {"tool_success": "its spans are not there"}


def test_a_model_without_a_price_is_named() -> None:
    with pytest.raises(GraphError, match=r"rewards\.it: no price for the model 'planner@1'"):
        value(example_run(), kind="cost", models={"worker@1": {"prompt": 1, "sampled": 1}})


# -- faults, handoffs, askers -------------------------------------------------------------------------------------


def test_an_agent_that_says_the_same_again_is_at_fault_and_another_agent_is_not() -> None:
    sample = SampleTrace()
    for n, agent in enumerate(["a", "b", "a"]):
        node = sample.node(f"{agent}:{n}", 100 * n, 100 * n + 50, step=n + 1, after=(f"x:{n}",) if n else ())
        sample.call(f"call{n}", node, 100 * n, 100 * n + 40)  # the same two tokens each time
    found = earned(run_of(sample.spans()), kind="trajectory_score", level="step")
    assert {one.action_id: one.value for one in found} == {"call0": 1, "call1": 1, "call2": 0}


def game(nodes: str, edges: str) -> int:
    """Handoffs of the longest exchange; edges as "01 12", by position."""
    blank = spans_to_trajectory(chain().spans()).actions[0]
    actions: list[Action] = [replace(blank, action_id=str(n), node=node, index=n) for n, node in enumerate(nodes)]
    return longest_exchange(actions, [Edge("e", pair[0], pair[1], "trigger") for pair in edges.split()])


@pytest.mark.parametrize(
    ("nodes", "edges", "handoffs"),
    [
        ("ababab", "01 12 23 34 45", 5),
        ("ababab", "01 12 23 34 45 02 13 24 03 05", 5),  # shortcuts change nothing
        ("aabba", "01 12 23 34", 2),  # an agent's own calls are one turn
        ("abcabc", "01 12 23 34 45", 1),  # a round of three is no exchange of two
        ("ababab", "", 0),  # nothing depends on anything: parallel
        ("abbb", "01 02 03", 1),  # a fans out
        ("abab", "01 23", 1),  # two separate handoffs
        ("abcab", "01 12 23 34", 1),
        ("", "", 0),
    ],
)
def test_a_loop_is_a_chain_of_d_between_two_agents(nodes: str, edges: str, handoffs: int) -> None:
    assert game(nodes, edges) == handoffs


def test_a_tool_belongs_to_the_latest_call_that_asked_for_its_id() -> None:
    spans = example_spans()
    asks = '[{"role": "assistant", "content": "", "tool_calls": [{"name": "calc", "args": {}, "id": "c1"}]}]'
    parts = '[{"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "calc"}]}]'

    def say(span_id: str, key: str, text: str) -> None:
        at = next(n for n, span in enumerate(spans) if span.span_id.startswith(span_id))
        spans[at] = replace(spans[at], attributes=spans[at].attributes | {key: text})

    say("call1", c.OUTPUT_MESSAGES, asks)
    say("call3", c.OUTPUT_MESSAGES, parts)
    say("call2", c.OUTPUT_MESSAGES, "not JSON {")
    for tool in ("calc4", "calc9"):
        say(tool, c.TOOL_CALL_ID, "c1")
    askers = [call.requested_by.action_id if call.requested_by else None for call in run_to_tool_calls(run_of(spans))]
    assert askers == ["call1", "call1", "call3"]


# -- tables that make no sense ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([{"kind": "tokens"}, {"kind": "tokens"}], "rewards.tokens: two tables have this name"),
        ([{"kind": "tokens", "weight": 2.0}], "rewards.tokens.weight has no effect"),
        ([{"kind": "composite", "weights": {"x": 1}}], "it is computed from 'x', which is not declared"),
        (
            [{"kind": "composite", "of": ["tokens"]}, {"kind": "tokens", "level": "step"}],
            "'tokens', which is not the team's",
        ),
        (
            [
                {"kind": "composite", "name": "a", "weights": {"b": 1}},
                {"kind": "composite", "name": "b", "weights": {"a": 1}},
            ],
            "rewards: these are computed from each other: a <- b <- a",
        ),
        ([{"kind": "tokens", "agent": "a", "level": "step"}], "agent and level both say whose it is"),
        (
            [{"kind": "composite", "preset": "futureagi"}],
            "it is computed from 'task_completion', which is not declared",
        ),
    ],
)
def test_tables_that_make_no_sense_together_are_refused_in_one_line(tables: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rewards_to_layers([table(**each) for each in tables], has_function=False)
    assert message.split(": a <-")[0] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "task_completion"}, "give the goal"),
        ({"kind": "step_efficiency"}, "give one of ideal and ideal_from"),
        ({"kind": "step_efficiency", "ideal": 1, "ideal_from": "x"}, "give one of ideal and ideal_from"),
        ({"kind": "composite"}, "give one of of, weights and preset"),
        ({"kind": "composite", "of": ["a"], "leave_out": ["b"]}, "leave_out: 'b' is none of its terms: a"),
        ({"kind": "cost"}, "give per_million"),
        ({"kind": "tokens", "level": "team"}, "'episode', 'step' or 'agent'"),
    ],
)
def test_options_that_say_nothing_or_too_much_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        table(**options)
    assert message in str(caught.value)


def test_terms_of_a_composite_have_their_own_weights() -> None:
    terms = [table(kind="tokens", weight=-0.01), table(kind="step_count", budget=5, weight=2.0)]
    assert score(example_run(), table(kind="composite", of=["tokens", "step_count"]), *terms).team["composite"] == (
        pytest.approx(-0.01 * 25 + 2.0)
    )
