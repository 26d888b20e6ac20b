"""Owns: what of a trace becomes an action, an edge or an episode, and what is refused with which words.

Edges are worked out by hand for each graph shape; the laws about any graph hold for random ones.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sample_spans import SampleTrace, chain

from trace_store import conventions as c
from trace_store.assemble import Incomplete, Malformed, spans_to_trajectory
from trace_store.records import Trajectory


def edges_of(trajectory: Trajectory) -> set[tuple[str, str, str]]:
    return {(edge.src, edge.dst, edge.kind) for edge in trajectory.edges}


def order_of(trajectory: Trajectory) -> list[str]:
    assert [action.index for action in trajectory.actions] == list(range(len(trajectory.actions)))
    return [action.action_id for action in trajectory.actions]


def test_a_chain_of_nodes_is_a_chain_of_trigger_edges() -> None:
    trajectory = spans_to_trajectory(chain().spans())
    assert edges_of(trajectory) == {("x", "y", "trigger")}
    assert trajectory.edges[0].exact
    assert order_of(trajectory) == ["x", "y"]


def test_parallel_branches_do_not_depend_on_each_other_and_join() -> None:
    t = SampleTrace()
    t.call("p", t.node("p:1", 10, 20, step=1), 11, 19)
    t.call("q", t.node("q:1", 10, 30, step=1, reads=("p:1",)), 12, 29)  # one superstep: cannot depend on p
    t.call("r", t.node("r:1", 40, 50, step=2, after=("p:1", "q:1"), reads=("p:1",)), 41, 49)
    trajectory = spans_to_trajectory(t.spans())
    assert edges_of(trajectory) == {("p", "r", "trigger"), ("q", "r", "trigger"), ("p", "r", "data")}
    assert order_of(trajectory) == ["p", "q", "r"]


def test_a_loop_unrolls_into_one_execution_after_another() -> None:
    t = SampleTrace()
    t.call("w1", t.node("writer:1", 10, 20, step=1), 11, 19)
    t.call("k1", t.node("critic:1", 30, 40, step=2, after=("writer:1",)), 31, 39)
    t.call("w2", t.node("writer:2", 50, 60, step=3, after=("critic:1",), reads=("writer:1", "critic:1")), 51, 59)
    trajectory = spans_to_trajectory(t.spans())
    trigger_edges = {("w1", "k1", "trigger"), ("k1", "w2", "trigger")}
    assert edges_of(trajectory) == trigger_edges | {("w1", "w2", "data"), ("k1", "w2", "data")}
    assert all(edge.exact for edge in trajectory.edges)


def test_a_node_without_a_call_passes_dependencies_on() -> None:
    t = SampleTrace()
    t.call("x", t.node("a:1", 10, 20, step=1), 11, 19)
    t.call("z", t.node("s:1", 10, 15, step=1), 11, 14)
    t.node("tool:1", 30, 40, step=2, after=("a:1",), reads=("s:1",))
    t.node("route:1", 50, 60, step=3, after=("tool:1",))
    t.call("y", t.node("b:1", 70, 80, step=4, after=("route:1",), reads=("tool:1",)), 71, 79)
    carried = {("x", "y", "data"), ("z", "y", "data")}  # what tool:1 wrote comes from s, and from x that made it run
    assert edges_of(spans_to_trajectory(t.spans())) == carried | {("x", "y", "trigger")}


def test_nodes_without_calls_that_trigger_each_other_do_not_hang() -> None:
    t = SampleTrace()
    t.node("u:1", 10, 20, step=1, after=("v:1",))
    t.node("v:1", 30, 40, step=2, after=("u:1",))
    t.call("y", t.node("b:1", 70, 80, step=4, after=("v:1",)), 71, 79)
    assert edges_of(spans_to_trajectory(t.spans())) == set()


def test_calls_inside_a_node_follow_time_and_overlapping_ones_are_independent() -> None:
    t = SampleTrace()
    node = t.node("a:1", 10, 100, step=1)
    t.call("first", node, 11, 20)
    t.call("left", node, 30, 50)
    t.call("right", node, 40, 60)
    t.call("late", node, 55, 70)  # after left has ended, while right still runs
    t.call("last", node, 80, 90)
    t.call("y", t.node("b:1", 110, 120, step=2, after=("a:1",)), 111, 119)
    assert edges_of(spans_to_trajectory(t.spans())) == {
        ("first", "left", "data"),
        ("first", "right", "data"),
        ("left", "late", "data"),
        ("right", "last", "data"),
        ("late", "last", "data"),
        ("last", "y", "trigger"),
    }


def test_a_subgraph_is_entered_at_its_first_actions_and_left_at_its_last() -> None:
    t = SampleTrace()
    t.call("x", t.node("a:1", 10, 20, step=1), 11, 19)
    sub = t.node("sub:1", 30, 70, step=2, after=("a:1",))
    t.call("s1", t.node("sub:1|one:1", 31, 45, step=1, inside=sub), 32, 44)
    t.call("s2", t.node("sub:1|two:1", 50, 65, step=2, after=("sub:1|one:1",), inside=sub), 51, 64)
    t.call("y", t.node("b:1", 80, 90, step=3, after=("sub:1",)), 81, 89)
    trajectory = spans_to_trajectory(t.spans())
    assert edges_of(trajectory) == {("x", "s1", "trigger"), ("s1", "s2", "trigger"), ("s2", "y", "trigger")}
    assert [action.node for action in trajectory.actions] == ["a", "sub/one", "sub/two", "b"]


def test_a_node_that_calls_before_and_after_a_subgraph_is_linked_to_its_ends_only() -> None:
    t = SampleTrace()
    outer = t.node("a:1", 10, 100, step=1)
    t.call("before", outer, 11, 20)
    t.call("p", t.node("a:1|p:1", 30, 40, step=1, inside=outer), 31, 39)
    t.call("q", t.node("a:1|q:1", 30, 60, step=1, inside=outer), 45, 59)  # after p in time, but not in D
    t.call("r", t.node("a:1|r:1", 65, 75, step=2, after=("a:1|q:1",), inside=outer), 66, 74)
    t.call("after", outer, 80, 90)
    assert edges_of(spans_to_trajectory(t.spans())) == {
        ("before", "p", "data"),
        ("before", "q", "data"),
        ("q", "r", "trigger"),
        ("p", "after", "data"),
        ("r", "after", "data"),
    }


def test_a_retried_attempt_keeps_its_actions_but_neither_edges_nor_training() -> None:
    t = SampleTrace()
    t.call("x", t.node("a:1", 10, 20, step=1), 11, 19)
    t.call("bad", t.node("b:1", 30, 40, step=2, after=("a:1",), ok=False), 31, 39)
    t.call("good", t.node("b:1", 50, 60, step=2, after=("a:1",)), 51, 59)
    t.call("y", t.node("d:1", 70, 80, step=3, after=("b:1",)), 71, 79)
    trajectory = spans_to_trajectory(t.spans())
    assert edges_of(trajectory) == {("x", "good", "trigger"), ("good", "y", "trigger")}
    reasons = {action.action_id: action.untrainable_reason for action in trajectory.actions}
    assert reasons == {"x": None, "bad": "attempt failed and was retried", "good": None, "y": None}


def test_of_two_successful_attempts_the_later_counts() -> None:
    t = SampleTrace()
    t.call("x", t.node("a:1", 10, 20, step=1), 11, 19)
    t.call("z", t.node("a:1", 30, 40, step=1), 31, 39)
    t.call("y", t.node("b:1", 50, 60, step=2, after=("a:1",)), 51, 59)
    trajectory = spans_to_trajectory(t.spans())
    assert edges_of(trajectory) == {("z", "y", "trigger")}
    assert trajectory.actions[0].untrainable_reason == "attempt was superseded by a later one"


def tool_with_a_subgraph(t: SampleTrace, begin: int, *, node_ok: bool, inner_ok: bool, call: str) -> None:
    """An attempt at a node whose tool runs a subgraph that makes one call."""
    node = t.node("outer:1", begin, begin + 50, step=2, after=("a:1",), ok=node_ok)
    t.tool("search", node, begin + 5, begin + 40)
    inner = t.node("outer:1|inner:1", begin + 10, begin + 30, step=1, ok=inner_ok, inside=f"search{begin + 5}")
    t.call(call, inner, begin + 12, begin + 20)


@pytest.mark.parametrize(
    ("first", "second", "counts"),
    [  # whether node and subgraph ended well, in each attempt
        ((False, True), (True, False), "c2"),  # the tool of the second caught what its subgraph raised
        ((False, True), (True, True), "c2"),
        ((False, False), (True, True), "c2"),
        ((True, True), (False, True), "c1"),
        ((True, False), (False, True), "c1"),
    ],
)
def test_what_ran_inside_a_node_counts_by_the_attempt_at_the_node(
    first: tuple[bool, bool], second: tuple[bool, bool], counts: str
) -> None:
    t = SampleTrace()
    t.call("x", t.node("a:1", 10, 20, step=1), 11, 19)
    tool_with_a_subgraph(t, 100, node_ok=first[0], inner_ok=first[1], call="c1")
    tool_with_a_subgraph(t, 200, node_ok=second[0], inner_ok=second[1], call="c2")
    t.call("y", t.node("b:1", 300, 320, step=3, after=("outer:1",)), 301, 319)
    trajectory = spans_to_trajectory(t.spans())
    assert edges_of(trajectory) == {("x", counts, "trigger"), (counts, "y", "trigger")}
    reasons = {action.action_id: action.untrainable_reason for action in trajectory.actions}
    assert {action for action in ("c1", "c2") if reasons[action] in (None, "attempt failed")} == {counts}


def test_a_node_does_not_depend_on_the_subgraph_that_contains_it() -> None:
    t = SampleTrace()
    sub = t.node("sub:1", 10, 90, step=1)
    t.call("s1", t.node("sub:1|one:1", 20, 30, step=1, reads=("sub:1",), inside=sub), 21, 29)
    t.call("s2", t.node("sub:1|two:1", 40, 50, step=2, after=("sub:1",), inside=sub), 41, 49)
    assert edges_of(spans_to_trajectory(t.spans())) == set()


def test_a_node_that_never_succeeded_has_no_trainable_action() -> None:
    t = SampleTrace()
    t.call("one", t.node("a:1", 10, 20, ok=False), 11, 19)
    t.call("two", t.node("a:1", 30, 40, ok=False), 31, 39)
    trajectory = spans_to_trajectory(t.spans(OUTCOME="failed", OUTCOME_REASON="ValueError"))
    assert [action.untrainable_reason for action in trajectory.actions] == [
        "attempt failed and was retried",
        "attempt failed",
    ]
    assert (trajectory.episode.outcome, trajectory.episode.reason) == ("failed", "ValueError")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"LOGPROBS": [0.00005, -0.1]}, None),  # rounding of the engine
        ({"PROMPT_IDS": "[1,2]", "SAMPLED_IDS": "[4,5]", "LOGPROBS": "[-0.1,-0.2]"}, None),  # JSON text
        ({"PROMPT_IDS": None}, "no prompt token ids from the engine"),
        ({"PROMPT_IDS": []}, "no prompt token ids from the engine"),
        ({"SAMPLED_IDS": None}, "no sampled token ids from the engine"),
        ({"SAMPLED_IDS": [], "LOGPROBS": []}, "no sampled token ids from the engine"),
        ({"LOGPROBS": None}, "no log-probs from the engine"),
        ({"LOGPROBS": [-0.1]}, "2 sampled tokens but 1 log-probs"),
        ({"USAGE_OUTPUT_TOKENS": 3}, "2 sampled tokens but the engine counted 3"),
        ({"USAGE_OUTPUT_TOKENS": None}, None),
        ({"LOGPROBS": [-0.1, "NaN"]}, "a log-prob is not finite"),
        ({"LOGPROBS": [-0.1, "-Infinity"]}, "a log-prob is not finite"),
        ({"LOGPROBS": [-0.1, 0.5]}, "a log-prob is positive: 0.5"),
        ({"UNTRAINABLE": "n=2"}, "n=2"),
        ({"ok": False}, "the call failed: boom"),
    ],
)
def test_an_action_is_trainable_exactly_when_its_tokens_are_whole(changed: dict[str, Any], reason: str | None) -> None:
    t = SampleTrace()
    t.call("x", t.node("a:1", 10, 20), 11, 19, **changed)
    (action,) = spans_to_trajectory(t.spans()).actions
    assert (action.trainable, action.untrainable_reason) == (reason is None, reason)


def test_a_call_outside_any_node_is_kept_without_training() -> None:
    t = SampleTrace()
    t.call("x", "root", 11, 19)
    t.call("y", "root", 21, 29, NODE="a")
    first, second = spans_to_trajectory(t.spans()).actions
    assert (first.node, first.untrainable_reason) == ("", "called outside any graph node")
    assert (second.node, second.trainable) == ("a", False)


def test_an_action_says_what_the_engine_said() -> None:
    t = SampleTrace()
    t.call(
        "x",
        t.node("a:1", 10, 20, step=4),
        11,
        19,
        RESPONSE_MODEL="base",
        ADAPTER="a@3",
        ADAPTER_VERSION=3,
        REQUEST_TEMPERATURE=1,
        REQUEST_TOP_P=0.9,
        REQUEST_TOP_K=20,
        REQUEST_MAX_TOKENS=64,
        REQUEST_SEED=2**40,
        OUTPUT_MESSAGES='[{"role":"assistant","parts":[{"type":"text","content":"four"}]}]',
    )
    (action,) = spans_to_trajectory(t.spans()).actions
    assert (action.model, action.adapter, action.adapter_version, action.step) == ("base", "a@3", 3, 4)
    assert (action.temperature, action.top_p, action.top_k, action.max_tokens) == (1.0, 0.9, 20, 64)
    assert (action.seed, action.finish_reason, action.completion) == (2**40, "stop", "four")
    assert (action.prompt_ids, action.sampled_ids, action.logprobs) == ((1, 2, 3), (4, 5), (-0.1, -1 / 3))


def test_the_root_says_what_the_episode_was_and_absent_stays_none() -> None:
    episode = spans_to_trajectory(chain().spans(ROUND=2, TAGS='{"k":"v"}', SEED=7)).episode
    assert (episode.run_id, episode.task_id, episode.split, episode.sample) == ("run", "task", "train", 0)
    assert (episode.round, episode.seed, episode.tags) == (2, 7, {"k": "v"})
    assert (episode.task, episode.adapters, episode.span_count) == ({"question": "1+1"}, {"a": 3}, 5)
    assert (episode.variant, episode.subject_id, episode.parent_episode, episode.reason) == (None,) * 4


def test_missing_spans_are_waited_for() -> None:
    spans = chain().spans()
    with pytest.raises(Incomplete, match="the root span has not arrived"):
        spans_to_trajectory(spans[:-1])
    with pytest.raises(Incomplete, match="4 of 5 spans"):
        spans_to_trajectory(spans[1:])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RUN_ID": None}, "the root span lacks marft.run.id"),
        ({"RUN_ID": "", "TASK_ID": "", "SPLIT": ""}, "the root span lacks marft.run.id, marft.task.id, marft.split"),
        ({"SAMPLE": None}, "the root span lacks marft.sample"),
        ({"SPAN_COUNT": None}, "the root span lacks marft.span_count"),
        ({"SPAN_COUNT": 4}, "the trace has 5 spans, its root says 4"),
        ({"OUTCOME": "won"}, "outcome 'won' is not one of terminated, truncated, failed"),
        ({"TASK": "{"}, "attribute marft.task of span root is not JSON: '{'"),
        ({"ADAPTERS": '{"a":"3"}'}, "attribute marft.adapters of span root is not a JSON object of integers"),
        ({"ROUND": 2**40}, "attribute marft.round of span root is not an integer of 32 bits"),
    ],
)
def test_a_root_that_makes_no_episode_is_refused_in_words(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(Malformed, match=words.replace("{", r"\{")):
        spans_to_trajectory(chain().spans(**changed))


def test_a_broken_tree_is_refused() -> None:
    t = chain()
    t.call("orphan", "nobody", 50, 60)
    with pytest.raises(Malformed, match="the parent nobody of span orphan is not in the trace"):
        spans_to_trajectory(t.spans())
    t = chain()
    t.call("e", "f", 50, 60)
    t.call("f", "e", 50, 60)
    with pytest.raises(Malformed, match="span e is its own ancestor"):
        spans_to_trajectory(t.spans())


def test_two_nodes_cannot_claim_one_call() -> None:
    t = SampleTrace()
    t.call("x", t.node("a:1", 10, 20), 11, 19, NODE="b")
    with pytest.raises(Malformed, match="two nodes claim the call x: 'b' and 'a'"):
        spans_to_trajectory(t.spans())


def test_cyclic_dependencies_are_refused() -> None:
    t = SampleTrace()
    t.call("x", t.node("a:1", 10, 20, step=1, after=("b:1",)), 11, 19)
    t.call("y", t.node("b:1", 30, 40, step=2, after=("a:1",)), 31, 39)
    with pytest.raises(Malformed, match="the dependencies of action x form a cycle"):
        spans_to_trajectory(t.spans())


@st.composite
def traces(draw: st.DrawFn) -> SampleTrace:
    """Random layered graphs: supersteps of nodes with zero to three calls, triggered by and reading from earlier."""
    t = SampleTrace()
    earlier: list[str] = []
    calls = 0
    for step in range(draw(st.integers(1, 4))):
        begin = 1000 * step
        names = [f"n{k}:{step}" for k in range(draw(st.integers(1, 3)))]
        for ns in names:
            sources = st.lists(st.sampled_from(earlier), max_size=3, unique=True) if earlier else st.just([])
            triggers, reads = tuple(draw(sources)), tuple(draw(sources))
            for attempt in range(draw(st.integers(1, 2)), 0, -1):
                ok = attempt == 1
                first = begin + (500 if ok else 0)
                node = t.node(ns, first, first + 400, step=step, after=triggers, reads=reads, ok=ok)
                for _ in range(draw(st.integers(0, 3))):
                    start = first + draw(st.integers(0, 300))
                    t.call(f"c{calls}", node, start, start + draw(st.integers(0, 90)))
                    calls += 1
        earlier += names
    return t


@settings(max_examples=60, deadline=None)
@given(traces(), st.randoms(use_true_random=False))
def test_assembling_does_not_depend_on_the_order_of_the_spans(t: SampleTrace, rng: random.Random) -> None:
    spans = t.spans()
    shuffled = [*spans, *spans[:2]]  # a span that arrives twice is one span
    rng.shuffle(shuffled)
    assert spans_to_trajectory(shuffled) == spans_to_trajectory(spans)


@settings(max_examples=60, deadline=None)
@given(traces())
def test_every_edge_points_forwards_and_never_into_the_same_superstep_of_another_node(t: SampleTrace) -> None:
    trajectory = spans_to_trajectory(t.spans())
    actions = {action.action_id: action for action in trajectory.actions}
    for edge in trajectory.edges:
        src, dst = actions[edge.src], actions[edge.dst]
        assert src.index < dst.index
        assert src.ended_ns <= dst.started_ns
        assert src.step != dst.step or src.node == dst.node
        assert src.trainable
        assert dst.trainable


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), min_size=1, max_size=12))
def test_edges_inside_a_node_are_the_transitive_reduction_of_ended_before(calls: list[tuple[int, int]]) -> None:
    t = SampleTrace()
    node = t.node("a:1", 0, 100)
    for k, (start, length) in enumerate(calls):
        t.call(f"c{k}", node, start, start + length)
    ended_pairs = {
        (i, j)
        for i, (start_i, length_i) in enumerate(calls)
        for j, (start_j, _) in enumerate(calls)
        if start_i + length_i <= start_j and start_i < start_j
    }
    indexes = range(len(calls))
    reduced = {
        (i, j) for i, j in ended_pairs if not any((i, k) in ended_pairs and (k, j) in ended_pairs for k in indexes)
    }
    edges = spans_to_trajectory(t.spans()).edges
    assert {(edge.src, edge.dst) for edge in edges} == {(f"c{i}", f"c{j}") for i, j in reduced}


def test_ids_outside_the_column_are_refused_and_not_cut() -> None:
    t = SampleTrace()
    t.call("x", t.node("a:1", 10, 20), 11, 19, SAMPLED_IDS=[4, 2**31])
    with pytest.raises(Malformed, match=f"attribute {c.SAMPLED_IDS} of span x is not a list of token ids"):
        spans_to_trajectory(t.spans())
