"""Owns: what the views and the documented queries say, against numbers worked out by hand.

What is not known is NULL and never 0; terminated, truncated and failed stay apart; every query runs on an empty store.
Times of the sample traces are nanoseconds, so seconds are small.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.sample_spans import START, SampleTrace, chain

from trace_store.journal import Journal
from trace_store.queries import QUERIES, QUESTIONS
from trace_store.records import AdapterRow, Reward, RunRow, SpanRow
from trace_store.store import TraceStore
from trace_store.views import VIEWS

NS = 1e-9


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TraceStore]:
    with TraceStore.open(tmp_path / "s.duckdb") as opened:
        yield opened


def take_in(store: TraceStore, *records: SpanRow | Reward) -> None:
    journal = Journal(store.journal_folder)
    for record in records:
        journal.append(record)
    journal.close()
    store.take_in()


def reward(episode: str, value: float = 1.0, created_ns: int = 1, name: str = "reward") -> Reward:
    return Reward(episode, name, value, "test", created_ns)


def view(store: TraceStore, name: str, order: str = "ALL") -> list[tuple[Any, ...]]:
    return store.sql(f"FROM {name} ORDER BY {order}")


def approx(number: float) -> Any:
    return pytest.approx(number, rel=1e-9)


def answer(text: str) -> str:
    return json.dumps([{"role": "assistant", "content": text}])


# -- all of them ------------------------------------------------------------------------------------------------------


def test_every_view_and_query_runs_on_an_empty_store(store: TraceStore) -> None:
    assert {declared_view.name: view(store, declared_view.name) for declared_view in VIEWS} == {
        declared_view.name: [] for declared_view in VIEWS
    }
    assert {name: store.sql(query) for name, query in QUERIES.items()} == {name: [] for name in QUERIES}


def test_every_question_has_a_name_of_its_own_and_ends_as_one() -> None:
    assert len(QUERIES) == len(QUESTIONS)
    assert all(question.text.endswith("?") and question.answer.endswith(".") for question in QUESTIONS)


# -- episodes and rewards ---------------------------------------------------------------------------------------------


def test_an_episode_is_summed_up_and_what_is_unknown_is_null(store: TraceStore) -> None:
    complete, incomplete, silent = SampleTrace("1"), SampleTrace("2", START + 1), SampleTrace("3", START + 2)
    for sample in (complete, incomplete):
        sample.call("x", sample.node("a:1", 10, 20), 11, 19, USAGE_INPUT_TOKENS=7)
    complete.call("y", complete.node("b:1", 30, 40), 31, 39, PROMPT_IDS=None, SAMPLED_IDS=None, USAGE_INPUT_TOKENS=5)
    no_tokens = {"PROMPT_IDS": None, "SAMPLED_IDS": None, "USAGE_OUTPUT_TOKENS": None}
    incomplete.call("y", incomplete.node("b:1", 30, 40), 31, 39, **no_tokens)
    silent.node("a:1", 10, 50)
    take_in(
        store,
        *(*complete.spans(), *incomplete.spans(OUTCOME="truncated", OUTCOME_REASON="late"), *silent.spans()),
        *(
            reward(complete.trace_id, 9.0, created_ns=1),
            reward(complete.trace_id, 0.0, created_ns=2),
            reward(complete.trace_id, 0.5, name="fit"),
        ),
    )
    rows = store.sql(
        "SELECT outcome, reason, actions, trainable_actions, prompt_tokens, sampled_tokens, seconds, rewards"
        " FROM episode_summary ORDER BY episode_id"
    )
    assert rows == [
        ("terminated", None, 2, 1, 12, 4, approx(40 * NS), {"fit": 0.5, "reward": 0.0}),
        ("truncated", "late", 2, 1, None, None, approx(40 * NS), None),
        ("terminated", None, 0, 0, 0, 0, approx(50 * NS), None),
    ]
    assert store.sql(
        "SELECT prompt_tokens, sampled_tokens, cut_off FROM calls WHERE node = 'b' ORDER BY episode_id"
    ) == [
        (5, 2, False),
        (None, None, False),
    ]


def test_of_two_rewards_at_one_time_the_same_one_counts_as_in_a_trajectory(store: TraceStore) -> None:
    sample = chain()
    take_in(store, *sample.spans())
    store.put_rewards(
        [Reward(sample.trace_id, "reward", value, source, 5) for value, source in ((1.0, "b"), (2.0, "a"))]
    )
    (trajectory,) = store.trajectories()
    assert view(store, "episode_reward") == [(sample.trace_id, "reward", trajectory.team_reward("reward"))]


def test_outcomes_of_a_task_stay_apart_and_a_missing_reward_is_not_zero(store: TraceStore) -> None:
    outcomes = ["terminated", "terminated", "truncated", "failed", "failed"]
    traces = [chain(str(k), START + k) for k in range(5)]
    for sample, outcome in zip(traces, outcomes, strict=True):
        take_in(store, *sample.spans(OUTCOME=outcome, TASK_ID="hard"))
    easy = chain("e", START + 9)
    take_in(store, *easy.spans(TASK_ID="easy", SPLIT="heldout"))
    store.put_rewards([reward(traces[0].trace_id, 0.25), reward(traces[2].trace_id, 0.75)])
    assert view(store, "outcomes_by_task", "task_id") == [
        ("easy", "heldout", 1, 1, 0, 0, 0),
        ("hard", "train", 5, 2, 1, 2, 2),
    ]
    assert store.sql(QUERIES["failing-tasks"]) == [
        ("easy", "heldout", 1, 1, 0, 0, 0, None, None),  # nothing is known of it
        ("hard", "train", 5, 2, 1, 2, 2, "reward", 0.5),
    ]


def test_named_queries_give_what_is_worked_out_by_hand(store: TraceStore) -> None:
    for k, value in enumerate((1.0, 0.0, None)):
        sample = SampleTrace(str(k), START + k)
        node = sample.node("a:1", 10, 20 * (k + 1), step=1)
        sample.call("x", node, 11, 12, ADAPTER="a@4", ADAPTER_VERSION=4)
        sample.call("y", sample.node("b:1", 30, 40, step=2, after=("a:1",)), 31, 39, LOGPROBS=None)
        outcome = "truncated" if k == 2 else "terminated"
        take_in(store, *sample.spans(ROUND=0, OUTCOME=outcome, OUTCOME_REASON="recursion limit" if k == 2 else None))
        if value is not None:
            store.put_rewards(
                [reward(sample.trace_id, 9.0, created_ns=1), reward(sample.trace_id, value, created_ns=2)]
            )
    store.put_run(RunRow("run", "train", 1))
    store.put_run(RunRow("idle", "collect", 2))
    answers = {name: store.sql(query) for name, query in QUERIES.items()}
    deviation = 0.5**0.5
    assert answers["reward-by-node-and-version"] == [
        ("a", 4, "reward", 2, 0.5, approx(deviation)),
        ("b", None, "reward", 2, 0.5, approx(deviation)),
    ]
    assert answers["tokens-per-run"] == [("run", "train", 3, 6, 3, 18, 12), ("idle", "collect", 0, None, 0, None, None)]
    assert [row[0][-1] for row in answers["longest-episodes"]] == ["2", "0", "1"]
    assert answers["failures-by-reason"] == [
        ("untrainable action", "no log-probs from the engine", 3),
        ("episode truncated", "recursion limit", 1),
    ]
    assert answers["learning-curve"] == [("run", 0, "train", "reward", 2, 0.5, approx(deviation / 2**0.5))]
    assert answers["dependencies-between-nodes"] == [("a", "b", "trigger", 3)]


# -- nodes ------------------------------------------------------------------------------------------------------------


def test_tokens_and_seconds_of_a_node_are_over_the_calls_that_are_known(store: TraceStore) -> None:
    sample = SampleTrace()
    times = {"a:1": (0, 10), "a:2": (20, 40), "a:3": (50, 80), "b:1": (100, 140)}
    for version, (ns, (begin, end)) in enumerate(times.items(), 1):
        attributes: dict[str, Any] = {"ADAPTER": f"{ns[0]}@{version}", "ADAPTER_VERSION": min(version, 2)}
        if ns == "a:3":
            attributes |= {
                "PROMPT_IDS": None,
                "SAMPLED_IDS": None,
                "USAGE_OUTPUT_TOKENS": None,
                "FINISH_REASONS": ["length"],
            }
        if ns == "a:2":
            attributes |= {
                "SAMPLED_IDS": [1] * 8,
                "LOGPROBS": [-0.1] * 8,
                "USAGE_OUTPUT_TOKENS": 8,
                "USAGE_INPUT_TOKENS": 9,
            }
        sample.call(ns, sample.node(ns, begin, end), begin, end, **attributes)
    take_in(store, *sample.spans())
    assert view(store, "tokens_by_node_version") == [
        ("a", 1, 1, 1, 3, 2, 3.0, 2.0, 0),
        ("a", 2, 2, 1, 9, 8, 9.0, 8.0, 1),
        ("b", 2, 1, 1, 3, 2, 3.0, 2.0, 0),
    ]
    # 10, 20 and 30 ns: the 95th percentile lies nine tenths of the way from 20 to 30; 10 tokens in the 30 ns counted.
    assert view(store, "latency_by_node") == [
        ("a", 3, approx(20 * NS), approx(29 * NS), approx(30 * NS), approx(10 / (30 * NS))),
        ("b", 1, approx(40 * NS), approx(40 * NS), approx(40 * NS), approx(2 / (40 * NS))),
    ]
    assert store.sql(QUERIES["what-got-longer"]) == [
        ("a", 2, 2, 8.0, 6.0, 6.0),
        ("a", 1, 1, 2.0, None, None),
        ("b", 2, 1, 2.0, None, None),
    ]
    assert store.sql(QUERIES["where-tokens-go"]) == [("a", 3, 2, 12, 10, 22 / 27), ("b", 1, 1, 3, 2, 5 / 27)]
    assert [row[0] for row in store.sql(QUERIES["slowest-nodes"])] == ["b", "a"]


def test_steps_count_executions_with_and_without_calls_and_retries(store: TraceStore) -> None:
    first, second = SampleTrace("1"), SampleTrace("2", START + 1)
    first.node("a:1", 0, 5, ok=False)
    first.call("x", first.node("a:1", 10, 20), 11, 19)
    first.node("tools:1", 30, 40)
    first.node("a:2", 50, 60)
    second.node("a:1", 10, 20)
    waiting = chain("3", START + 2)
    take_in(store, *first.spans(), *second.spans(), *waiting.spans()[1:])
    assert view(store, "steps_by_node") == [("a", 2, 4, 2.0, 3, 1), ("tools", 1, 1, 1.0, 1, 0)]


def test_the_node_that_hurts_is_the_one_whose_bad_calls_go_with_low_rewards(store: TraceStore) -> None:
    values = {"1": 0.0, "2": 0.5, "3": 1.0, "4": None}
    for key, value in values.items():
        sample = SampleTrace(key, START + int(key))
        finish = "length" if key in ("1", "4") else "stop"
        sample.call("x", sample.node("a:1", 10, 20), 11, 19, FINISH_REASONS=[finish])
        sample.call("y", sample.node("b:1", 30, 40), 31, 39, ok=key != "2", FINISH_REASONS=None)
        take_in(store, *sample.spans())
        if value is not None:
            store.put_rewards([reward(sample.trace_id, value)])
    assert view(store, "node_trouble") == [("a", 4, 0, 2, 0, 4, 2), ("b", 4, 1, 0, 1, 4, 1)]
    assert store.sql(QUERIES["which-node-hurts"]) == [
        ("a", 4, 0, 2, 0, "reward", 0.0, 0.75),
        ("b", 4, 1, 0, 1, "reward", 0.5, 0.5),
    ]


def test_tools_fail_by_tool_and_by_the_node_around_them(store: TraceStore) -> None:
    sample = SampleTrace()
    node = sample.node("agent:1", 0, 100)
    sample.call("x", node, 1, 9)
    sample.tool("search", node, 10, 20, node="agent")
    sample.tool("search", "search10", 11, 21, ok=False)  # a tool that calls a tool, and does not say whose it is
    sample.tool("add", "x", 5, 8)
    sample.tool("search", "root", 110, 120, ok=False)
    inner = sample.node("agent:1|inner:1", 70, 90, inside=node)
    sample.tool("deep", inner, 80, 81)
    waiting = chain("2", START + 1)
    waiting.tool("search", "root", 1, 2)
    take_in(store, *sample.spans(), *waiting.spans()[1:])
    rows = store.sql("SELECT node, tool, status, status_message, seconds FROM tool_calls ORDER BY started_ns")
    assert rows == [
        ("agent", "add", "ok", None, approx(3 * NS)),
        ("agent", "search", "ok", None, approx(10 * NS)),
        ("agent", "search", "error", "boom", approx(10 * NS)),
        ("agent/inner", "deep", "ok", None, approx(1 * NS)),
        (None, "search", "error", "boom", approx(10 * NS)),
    ]
    assert store.sql(QUERIES["tool-failures"]) == [
        ("search", None, 1, 1, 1.0, approx(10 * NS)),
        ("search", "agent", 2, 1, 0.5, approx(10 * NS)),
        ("add", "agent", 1, 0, 0.0, approx(3 * NS)),
        ("deep", "agent/inner", 1, 0, 0.0, approx(1 * NS)),
    ]


# -- control that comes back ------------------------------------------------------------------------------------------


def test_a_loop_is_control_that_comes_back_and_new_data_is_said(store: TraceStore) -> None:
    t = SampleTrace()
    t.call("s1", t.node("boss:1", 10, 20), 11, 19, OUTPUT_MESSAGES=answer("go"))
    t.call("w1", t.node("worker:1", 30, 40, after=("boss:1",)), 31, 39)
    t.call(
        "s2", t.node("boss:2", 50, 60, after=("worker:1",), reads=("worker:1",)), 51, 59, OUTPUT_MESSAGES=answer("go")
    )
    t.call("w2", t.node("worker:2", 70, 80, after=("boss:2",)), 71, 79)
    t.call(
        "s3", t.node("boss:3", 90, 99, after=("worker:2",), reads=("worker:1",)), 91, 98, OUTPUT_MESSAGES=answer("stop")
    )
    take_in(store, *t.spans())
    # s2 read what the worker wrote; s3 read that again, and w2 was only told to go on. The worker
    # said nothing that could be compared.
    assert view(store, "control_returns", '"index"') == [
        (t.trace_id, "boss", "s2", 2, True, True),
        (t.trace_id, "worker", "w2", 3, False, None),
        (t.trace_id, "boss", "s3", 4, False, False),
    ]
    assert view(store, "handoff_loops", "node") == [(t.trace_id, "boss", 2, 1, 1), (t.trace_id, "worker", 1, 1, 0)]
    assert store.sql(QUERIES["handoff-loops"]) == [
        ("boss", 1, 2, 1, 1, 1, t.trace_id),
        ("worker", 1, 1, 1, 0, 1, t.trace_id),
    ]


def test_an_agent_that_goes_on_by_itself_or_runs_beside_others_is_no_loop(store: TraceStore) -> None:
    alone = SampleTrace("1")  # an agent and its tools: control never left it
    alone.call("x", alone.node("a:1", 10, 20, step=1), 11, 19)
    alone.node("tools:1", 30, 40, step=2, after=("a:1",))
    alone.call("y", alone.node("a:2", 50, 60, step=3, after=("tools:1",)), 51, 59, SAW_TOOL_RESULTS=["x"])
    fan = SampleTrace("2", START + 1)  # three workers at once, under one name
    fan.call("m", fan.node("map:1", 0, 10, step=1), 1, 9)
    for k in range(3):
        fan.call(f"w{k}", fan.node(f"w:{k}", 20, 30 + k, step=2, after=("map:1",)), 21, 29 + k)
    join = SampleTrace("3", START + 2)  # both ran at once, and then one of them again
    join.call("p", join.node("a:1", 10, 20, step=1), 11, 19)
    join.call("q", join.node("b:1", 10, 20, step=1), 12, 19)
    join.call("r", join.node("a:2", 30, 40, step=2, after=("a:1", "b:1")), 31, 39)
    instant = SampleTrace("4", START + 3)  # calls that take no time, as a scripted model's
    instant.call("i", instant.node("a:1", 10, 20), 11, 11)
    instant.call("j", instant.node("a:2", 30, 40, after=("a:1",)), 31, 31)
    take_in(store, *alone.spans(), *fan.spans(), *join.spans(), *instant.spans())
    assert view(store, "control_returns") == []


def test_the_result_of_a_tool_that_was_called_before_is_new_data(store: TraceStore) -> None:
    t = SampleTrace()
    t.call("s1", t.node("boss:1", 10, 20), 11, 19)
    t.call("w1", t.node("worker:1", 30, 40, after=("boss:1",)), 31, 39)
    t.call("s2", t.node("boss:2", 50, 60, after=("worker:1",)), 51, 59, SAW_TOOL_RESULTS=["s1"])
    take_in(store, *t.spans())
    assert view(store, "control_returns") == [(t.trace_id, "boss", "s2", 2, True, None)]


# -- costs, adapters, what waits --------------------------------------------------------------------------------------


def test_a_cost_is_tokens_times_the_price_of_that_time_and_unknown_without_one(store: TraceStore) -> None:
    t = SampleTrace()
    t.call("x", t.node("a:1", 10, 20), 11, 19, RESPONSE_MODEL="m")
    t.call("y", t.node("a:2", 50, 60), 51, 59, RESPONSE_MODEL="m")
    no_tokens = {"PROMPT_IDS": None, "SAMPLED_IDS": None, "USAGE_OUTPUT_TOKENS": None}
    t.call("z", t.node("b:1", 70, 80), 71, 79, RESPONSE_MODEL="m", **no_tokens)
    t.call("u", t.node("b:2", 90, 99), 91, 98, RESPONSE_MODEL="other")
    t.call("v", t.node("b:3", 100, 110), 101, 109)
    take_in(store, *t.spans())
    assert {row[-1] for row in view(store, "call_costs")} == {None}
    store.put_price("m", 2.0, 8.0, "EUR")
    store.put_price("m", 20.0, 80.0, "EUR", since_ns=START + 51)
    store.put_price("other", 1.0, 1.0, "USD", since_ns=START + 92)  # it was used before
    costs = store.sql("SELECT action_id, currency, cost FROM call_costs ORDER BY action_id")
    assert costs == [
        ("u", None, None),
        ("v", None, None),
        ("x", "EUR", approx(22e-6)),  # 3 prompt tokens at 2 and 2 sampled ones at 8, by the million
        ("y", "EUR", approx(220e-6)),
        ("z", "EUR", None),
    ]
    assert store.sql(QUERIES["costs"]) == [
        ("run", "a", "m", "EUR", 2, 0, approx(242e-6)),
        ("run", "b", "m", "EUR", 1, 1, None),
        ("run", "b", "other", None, 1, 1, None),
        ("run", "b", None, None, 1, 1, None),
    ]


def test_a_price_that_is_put_again_takes_the_place_of_the_one_before(store: TraceStore) -> None:
    for price in (1.0, 3.0):
        store.put_price("m", price, price, "EUR")
    assert view(store, "prices") == [("m", 0, "EUR", 3.0, 3.0)]


def test_which_adapter_served_what_and_one_that_nobody_registered_shows(store: TraceStore) -> None:
    for k, name in enumerate(("a@1", "a@1", "a@2", None)):
        sample = SampleTrace(str(k), START + k)
        version = int(name[-1]) if name else None
        sample.call("x", sample.node("a:1", 10, 20), 11, 19, ADAPTER=name, ADAPTER_VERSION=version)
        take_in(store, *sample.spans())
    store.put_adapter(AdapterRow("a", 1, 0, "p", "hash", "base", 1))
    assert view(store, "adapters_served") == [
        ("a", "a@1", 1, 2, 2, START + 11, START + 12, 0, "hash"),
        ("a", "a@2", 2, 1, 1, START + 13, START + 13, None, None),
    ]
    assert [row[:5] for row in store.sql(QUERIES["adapters-served"])] == [("a", 1, "a@1", 2, 2), ("a", 2, "a@2", 1, 1)]


def test_what_waits_says_what_it_waits_for(store: TraceStore) -> None:
    rootless, partial, bad, finished = (chain(str(k), START + k) for k in range(1, 5))
    take_in(store, *rootless.spans()[:-1], *partial.spans()[2:], *bad.spans(RUN_ID=None), *finished.spans())
    assert view(store, "waiting_traces", "trace_id") == [
        (rootless.trace_id, 4, None, START + 11, START + 41, "the root span has not arrived"),
        (partial.trace_id, 3, 5, START + 2, START + 42, "3 of 5 spans have arrived"),
    ]
    assert [row[:4] for row in store.sql(QUERIES["waiting"])] == [
        (rootless.trace_id, 4, None, "the root span has not arrived"),
        (partial.trace_id, 3, 5, "3 of 5 spans have arrived"),
    ]
