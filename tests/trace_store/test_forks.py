"""Owns: a fork is stored as one, and nobody takes it, or what it repeats, for a fresh sample.

The parent is x by node a, then y by node b. The fork leaves it at y: x is given again, y sampled anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.growth_rig import fill, trace_id
from support.sample_spans import START, SampleTrace, chain

from trace_store import conventions as c
from trace_store.assemble import spans_to_trajectory
from trace_store.erasure import subject_to_traces
from trace_store.parquet import parquet_to_store, store_to_parquet
from trace_store.queries import QUERIES
from trace_store.records import REPLAYED, Reward, SpanRow
from trace_store.store import TraceStore
from trace_store.threads import EpisodeLink, episodes_to_links

PARENT, FORK = trace_id("parent"), trace_id("fork")


def fork_spans() -> list[SpanRow]:
    sample = SampleTrace("fork", START + 100)
    sample.call("x2", sample.node("a:1", 10, 20, step=1), 11, 19, REPLAYED_FROM="x", ADAPTER="a@3", ADAPTER_VERSION=3)
    sample.call("y2", sample.node("b:1", 30, 40, step=2, after=("a:1",)), 31, 39)
    return sample.spans(PARENT_EPISODE=PARENT, FORK_ACTION="y", RUN_ID="fork")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rewards = [Reward(PARENT, "reward", 0.0, "test", 1), Reward(FORK, "reward", 1.0, "test", 1)]
    fill(tmp_path / "s.duckdb", [[*chain("parent").spans(SUBJECT_ID="ann"), rewards[0]], [*fork_spans(), rewards[1]]])
    return tmp_path / "s.duckdb"


@pytest.fixture
def store(path: Path) -> Iterator[TraceStore]:
    with TraceStore.open(path) as opened:
        yield opened


def test_an_answer_that_was_given_again_is_no_action_to_train_on_and_the_call_after_it_is(store: TraceStore) -> None:
    trajectory = store.trajectory(FORK)
    assert trajectory is not None
    assert (trajectory.episode.parent_episode, trajectory.episode.fork_action) == (PARENT, "y")
    facts = [(a.action_id, a.replayed_from, a.trainable, a.untrainable_reason) for a in trajectory.actions]
    assert facts == [("x2", "x", False, REPLAYED), ("y2", None, True, None)]
    assert trajectory.actions[0].sampled_ids == (4, 5)


def test_what_could_not_be_trained_on_where_it_was_sampled_keeps_its_reason() -> None:
    spans = [
        replace(span, attributes={name: value for name, value in span.attributes.items() if name != c.LOGPROBS})
        for span in fork_spans()
    ]
    (given_again, _) = spans_to_trajectory(spans).actions
    assert given_again.replayed_from == "x"
    assert given_again.untrainable_reason == "no log-probs from the engine"


def test_who_reads_the_episodes_gets_no_fork_unless_it_asks_for_them(store: TraceStore) -> None:
    assert [each.episode_id for each in store.episodes()] == [PARENT]
    assert [each.episode.episode_id for each in store.trajectories()] == [PARENT]
    assert [each.episode_id for each in store.episodes(forks=True)] == [PARENT, FORK]
    assert [each.episode.episode_id for each in store.trajectories(forks=True)] == [PARENT, FORK]


def test_figures_of_tasks_and_versions_leave_forks_out(store: TraceStore) -> None:
    assert store.sql("SELECT episodes, rewarded FROM outcomes_by_task") == [(1, 1)]
    assert {mean for (mean,) in store.sql("SELECT mean FROM reward_by_node_version")} == {0.0}
    assert store.sql("SELECT node, executions FROM steps_by_node ORDER BY node") == [("a", 1), ("b", 1)]
    assert store.sql(QUERIES["dependencies-between-nodes"]) == [("a", "b", "trigger", 1)]
    assert [row[-1] for row in store.sql(QUERIES["failing-tasks"])] == [0.0]
    assert [row[2] for row in store.sql(QUERIES["failures-by-reason"])] == []


def test_a_loop_that_forks_repeat_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "loops.duckdb"
    fill(path, [loop_spans("loop"), loop_spans("fork1", given_again=3), loop_spans("fork2", given_again=3)])
    with TraceStore.open(path) as store:
        assert store.sql("SELECT episode_id, node, returns FROM handoff_loops ORDER BY node") == [
            (trace_id("loop"), "boss", 1),
            (trace_id("loop"), "worker", 1),
        ]
        assert [row[:3] for row in store.sql(QUERIES["handoff-loops"])] == [("boss", 1, 1), ("worker", 1, 1)]
        assert store.sql("SELECT count(*) FROM control_returns") == [(6,)]  # what happened in each stays to be seen


def loop_spans(name: str, given_again: int = 0) -> list[SpanRow]:
    """Control goes to and fro between two nodes; a fork gives the first answers again."""
    sample = SampleTrace(name, START + 200)
    before: tuple[str, ...] = ()
    for step, ns in enumerate(("boss:1", "worker:1", "boss:2", "worker:2")):
        node = sample.node(ns, 100 * step, 100 * step + 50, after=before)
        replayed = f"call{step}" if step < given_again else None
        sample.call(f"call{step}", node, 100 * step + 1, 100 * step + 9, REPLAYED_FROM=replayed)
        before = (ns,)
    if not given_again:
        return sample.spans()
    return sample.spans(PARENT_EPISODE=trace_id("loop"), FORK_ACTION=f"call{given_again}")


def test_tokens_and_costs_count_what_was_computed_and_not_what_was_given_again(store: TraceStore) -> None:
    assert store.sql("SELECT node, calls, sampled_tokens FROM tokens_by_node_version ORDER BY node") == [
        ("a", 1, 2),
        ("b", 2, 4),
    ]
    assert store.sql("SELECT node, calls FROM latency_by_node ORDER BY node") == [("a", 1), ("b", 2)]
    assert store.sql("SELECT action_id FROM call_costs ORDER BY 1") == [("x",), ("y",), ("y2",)]
    assert store.sql("FROM adapters_served") == []  # the parent's calls had none, and the fork's first was not served
    summary = store.sql("SELECT actions, sampled_tokens, is_fork FROM episode_summary ORDER BY is_fork")
    assert summary == [(2, 4, False), (2, 2, True)]


def test_a_fork_is_linked_to_its_parent(store: TraceStore) -> None:
    assert episodes_to_links(store, [FORK])[FORK] == EpisodeLink("fork", PARENT, None)


def test_who_erases_a_person_erases_the_forks_of_their_episodes(store: TraceStore) -> None:
    assert subject_to_traces(store, "ann").trace_ids == (FORK, PARENT)


def test_an_export_keeps_what_a_fork_is(store: TraceStore, tmp_path: Path) -> None:
    store_to_parquet(store, tmp_path / "export")
    with TraceStore.open(tmp_path / "other.duckdb") as other:
        parquet_to_store(tmp_path / "export", other)
        assert other.trajectory(FORK) == store.trajectory(FORK)
