"""Owns: what a plan counts of a store without a model, worked by hand on five episodes of two tasks.

- Calls, tokens, cost and seconds are those of the app's own runs; what is not known is said, and never 0.
- What answers are: formats, how many differ, lengths, tool calls.
- What hangs on an answer: reach along D, and two associations with the recorded reward, tasks being clusters.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.growth_rig import fill, trace_id
from support.plan_rig import SECOND, hosted, many_calls, small_store
from support.sample_spans import START, SampleTrace

from marft_bridge.common.errors import ConfigError
from marft_bridge.config.prices import file_to_prices
from marft_bridge.move_plan.answers import NodeAnswers, store_to_answers
from marft_bridge.move_plan.considered import count_episodes
from marft_bridge.move_plan.drawn_calls import draw_calls
from marft_bridge.move_plan.reward_links import choose_reward, store_to_links
from marft_bridge.move_plan.tool_calls import count_tool_calls
from marft_bridge.move_plan.usage import ModelUsage, store_to_usage
from trace_store.records import Reward
from trace_store.store import TraceStore

PRICES = """
currency = "EUR"

[[prices]]
model = "m1"
prompt = 1.0
sampled = 2.0
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_store(tmp_path_factory.mktemp("plan") / "s.duckdb")


def test_sides_of_a_comparison_forks_and_held_out_runs_are_left_out_and_counted(path: Path) -> None:
    with TraceStore.open(path, read_only=True) as store:
        assert count_episodes(store) == (5, {"forks": 1, "of the split heldout": 1, "sides of a comparison": 1})
        assert [usage.calls for usage in store_to_usage(store)] == [3, 5, 5]


def test_calls_tokens_costs_and_seconds_are_those_worked_by_hand(path: Path, tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text(PRICES)
    with TraceStore.open(path, read_only=True) as store:
        idle, router, writer = store_to_usage(store, file_to_prices(tmp_path / "prices.toml", "plan --prices"))
        unpriced = store_to_usage(store)[1]
    assert (router.node, router.calls, router.local_calls, router.episodes) == ("router", 5, 0, 5)
    assert (router.prompt_tokens, router.sampled_tokens, router.uncounted) == (500, 50, 0)
    assert (router.seconds_median, router.seconds_p90) == (3.0, pytest.approx(4.6))  # of 1, 2, 3, 4, 5
    # a call is 100 * 1 / 1e6 + 10 * 2 / 1e6
    assert router.models == (ModelUsage("m1", 5, "EUR", pytest.approx(5 * 120e-6), 5),)
    assert (router.costs, router.uncosted) == ({"EUR": pytest.approx(600e-6)}, 0)
    assert (writer.sampled_tokens, writer.uncounted, writer.uncosted) == (40, 1, 1)  # one answer was not counted
    assert writer.costs == {"EUR": pytest.approx(480e-6)}
    assert (idle.costs, idle.uncosted, idle.models[0].cost) == ({}, 3, None)  # nobody knows what m2 costs
    assert (unpriced.costs, unpriced.uncosted) == ({}, 5)


def test_a_price_holds_from_its_day_on_and_the_file_stands_before_the_store(path: Path, tmp_path: Path) -> None:
    (tmp_path / "prices.json").write_text(
        json.dumps(
            {
                "currency": "EUR",
                "prices": [
                    {"model": "m1", "prompt": 1.0, "sampled": 2.0},
                    {"model": "m1", "since": "2023-11-14", "prompt": 10.0, "sampled": 20.0},
                    {"model": "m1", "since": "2023-11-15", "prompt": 1e6, "sampled": 1e6},
                ],
            }
        )
    )
    prices = file_to_prices(tmp_path / "prices.json", "plan --prices")
    other = tmp_path / "s.duckdb"
    other.write_bytes(path.read_bytes())
    with TraceStore.open(other) as store:
        store.put_price("m1", 5.0, 5.0, "USD", since_ns=prices.prices[1].since_ns)
        assert store_to_usage(store)[1].costs == {"USD": pytest.approx(5 * 550e-6)}
        assert store_to_usage(store, prices)[1].costs == {"EUR": pytest.approx(5 * 1200e-6)}  # START is on the 14th
        prices.put_into(store)
        assert store_to_usage(store)[1].costs == {"EUR": pytest.approx(5 * 1200e-6)}


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("p.toml", "currency = ", "neither TOML"),
        ("p.json", "[1", "neither TOML nor, as a .json file, JSON"),
        ("p.toml", "prices = []", "currency: Field required"),
        ("p.toml", PRICES.replace("2.0", "-2.0"), "prices.0.sampled"),
        ("p.toml", PRICES.replace("2.0", "nan"), "prices.0.sampled"),
        ("p.toml", PRICES.replace("prompt", "promt"), "prices.0.prompt"),
        ("p.toml", PRICES + PRICES.partition("\n\n")[2], "two prices of 'm1'"),
        ("missing.toml", None, "cannot read"),
    ],
)
def test_a_price_file_that_is_wrong_is_one_line(tmp_path: Path, name: str, text: str | None, what: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as refusal:
        file_to_prices(tmp_path / name, "plan --prices")
    assert what in str(refusal.value)
    assert "\n" not in str(refusal.value)


# -- answers -------------------------------------------------------------------------------------------------------


def answers_of(path: Path) -> dict[str, NodeAnswers]:
    with TraceStore.open(path, read_only=True) as store:
        return store_to_answers(store, count_tool_calls(draw_calls(store, 100, seed=0)))


def test_answers_are_counted_by_format_and_by_how_many_differ(path: Path) -> None:
    answers = answers_of(path)
    router, idle, writer = answers["router"], answers["idle"], answers["writer"]
    assert (router.answered, router.different, router.most, router.form) == (5, 2, 3, "text")  # yes, no, yes, no, no
    assert (idle.answered, idle.json, idle.different, idle.form) == (3, 3, 3, "JSON")
    assert (writer.numbers, writer.characters_median, writer.tokens_median) == (0, 6.0, 10.0)


def test_few_answers_given_often_are_a_choice_and_numbers_are_numbers(tmp_path: Path) -> None:
    answers = answers_of(
        many_calls(
            tmp_path / "s.duckdb",
            {
                "router": lambda k: ("left", "right")[k % 2],
                "counter": lambda k: f"{k},000.5",
                "fenced": lambda k: f'```json\n{{"k": {k}}}\n```',
                "nearly": lambda k: f"{k}" if k else "none",
                "nan": lambda k: "nan",
            },
            count=20,
        )
    )
    forms = {node: row.form for node, row in answers.items()}
    assert forms == {
        "router": "a choice",
        "counter": "numbers",
        "fenced": "JSON",
        "nearly": "numbers",
        "nan": "a choice",
    }
    assert (answers["nearly"].numbers, answers["nan"].numbers) == (19, 0)


def test_answers_that_call_a_tool_are_counted_though_they_have_no_text(tmp_path: Path) -> None:
    call = {"type": "tool_call", "id": "1", "name": "add", "arguments": {}}
    asked = json.dumps([{"role": "assistant", "parts": [call], "finish_reason": "stop"}])
    hidden = many_calls(tmp_path / "hidden.duckdb", {"a": lambda _: ""}, 3, OUTPUT_MESSAGES=None)
    asking = many_calls(tmp_path / "asking.duckdb", {"a": lambda _: ""}, 3, OUTPUT_MESSAGES=asked)
    claiming = many_calls(tmp_path / "claiming.duckdb", {"a": lambda _: asked}, 3)
    assert [answers_of(path)["a"].form for path in (hidden, asking, claiming)] == ["not recorded", "tool calls", "JSON"]
    assert (answers_of(asking)["a"].drawn, answers_of(asking)["a"].call_tools) == (3, 3)


# -- what hangs on them ----------------------------------------------------------------------------------------------


def test_reach_and_associations_are_those_worked_by_hand(path: Path) -> None:
    with TraceStore.open(path, read_only=True) as store:
        assert choose_reward(store, None) == ("right", ["right"])
        links = store_to_links(store, ["idle", "router", "writer"], "right", seed=0)
    assert (links.rewarded, links.without_edges, links.is_drawn) == (5, 0, False)
    idle, router, writer = (links.nodes[node] for node in ("idle", "router", "writer"))
    assert [row.reach and row.reach.mean for row in (idle, router, writer)] == [0.0, 1.0, 1.0]
    assert [row.reach_exact for row in (idle, router, writer)] == [0.0, 1.0, 1.0]
    assert router.reach is not None
    assert router.reach.low is not None
    assert router.reach.low < 1, "two tasks show little"
    assert router.acted is writer.acted is None  # they always do
    assert idle.acted is not None
    # 1/3 where it acted, 1/2 where not. Task A adds (2/3 - 1/3)/3 - (1/2)/2 = -5/36 and B the opposite, so with K = 2
    # the standard error is sqrt(2 * 2 * (5/36)^2) = 5/18, and t(1; 0.975) is 12.7062.
    assert idle.acted == pytest.approx((-1 / 6, -1 / 6 - 12.7062047 * 5 / 18, -1 / 6 + 12.7062047 * 5 / 18))
    # In task A the router said yes, no, yes for 1, 0, 1; in B it never differs, so one task tells: no interval.
    assert router.answers == (1.0, None, None)
    # No two texts of the writer are alike, and in no task is there a pair of like ones to hold against.
    assert writer.answers is None
    assert idle.credit is None


def test_what_credit_measured_is_that_of_its_latest_run_on_the_reward_that_is_looked_at(
    path: Path, tmp_path: Path
) -> None:
    other = tmp_path / "s.duckdb"
    other.write_bytes(path.read_bytes())
    rows = [
        Reward(trace_id(str(k)), "difference", value, source, created_ns, "agent", None, "router")
        for k, value, source, created_ns in (
            (0, 9.0, "credit:credit-1: right, base instead", 1),
            (0, 0.5, "credit:credit-2: right, silent instead", 2),
            (3, 0.25, "credit:credit-2: right, silent instead", 2),
            (0, -40.0, "credit:credit-3: seconds_left, silent instead", 4),
            (4, 7.0, "somebody", 3),
        )
    ]
    with TraceStore.open(other) as store:
        store.put_rewards(rows)
        links = store_to_links(store, ["router", "writer"], None, seed=0)
        means = {
            reward: store_to_links(store, ["router"], reward, seed=0).nodes["router"].credit
            for reward in ("right", "seconds_left", "other")
        }
    assert means["right"] is not None
    assert means["right"].mean == 0.375
    assert means["seconds_left"] is not None
    assert means["seconds_left"].mean == -40
    assert means["other"] is None
    assert links.nodes["writer"].credit is links.nodes["writer"].reach is None
    assert (links.rewarded, links.reward) == (0, None)


def test_upper_bounds_of_d_reach_farther_than_what_is_exact_and_no_edges_tell_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    trace = SampleTrace("1", START)
    one = trace.node("one:1", 0, 2 * SECOND, step=1)
    two = trace.node("two:1", 3 * SECOND, 5 * SECOND, step=2)
    hosted(trace, "a", one, (0, 1), "q", "x")
    hosted(trace, "b", two, (3, 4), "q", "y")
    fill(path, [[*trace.spans(ADAPTERS="{}"), Reward(trace.trace_id, "right", 1.0, "test", 1)]])
    with TraceStore.open(path) as store:
        links = store_to_links(store, ["one", "two"], "right", seed=0)
        assert (links.without_edges, links.nodes["one"].reach) == (1, None)
        store.sql(f"INSERT INTO edges VALUES ('{trace.trace_id}', 'a', 'b', 'data', false, {START})")  # noqa: S608
        links = store_to_links(store, ["one", "two"], "right", seed=0)
    assert links.nodes["one"].reach is not None
    assert (links.nodes["one"].reach.mean, links.nodes["one"].reach_exact) == (1.0, 0.0)
    assert (links.nodes["two"].reach_exact, links.without_edges) == (1.0, 0)


def test_the_last_calls_are_those_of_the_last_superstep_of_its_own_graph(tmp_path: Path) -> None:
    """Steps of a subgraph are counted by themselves: its step 2 is no end of a run whose step 2 is another."""
    path = tmp_path / "s.duckdb"
    trace = SampleTrace("1", START)
    inner = trace.node("team:1|inner:1", 0, 2 * SECOND, step=2)
    hosted(trace, "x", inner, (0, 1), "q", "x")
    for name, end in (("left", 5), ("right", 4)):
        node = trace.node(f"{name}:1", 3 * SECOND, 6 * SECOND, step=2)
        hosted(trace, name, node, (3, end), "q", name)
    fill(path, [[*trace.spans(ADAPTERS="{}"), Reward(trace.trace_id, "right", 1.0, "test", 1)]])
    with TraceStore.open(path) as store:
        store.sql(f"INSERT INTO edges VALUES ('{trace.trace_id}', 'left', 'right', 'data', true, {START})")  # noqa: S608
        links = store_to_links(store, ["team/inner", "left", "right"], "right", seed=0)
    assert {node: link.reach_exact for node, link in links.nodes.items()} == {"team/inner": 0, "left": 1, "right": 1}


def test_several_rewards_want_a_name(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "s.duckdb"
    other.write_bytes(path.read_bytes())
    with TraceStore.open(other) as store:
        store.put_rewards([Reward(trace_id("0"), "shy", 0.5, "test", 1)])
        assert choose_reward(store, None) == (None, ["right", "shy"])
        assert [choose_reward(store, name)[0] for name in ("shy", "other")] == ["shy", None]
        assert [choose_reward(store, None, usual=name)[0] for name in ("shy", "other")] == ["shy", None]
    with TraceStore.open(path, read_only=True) as store:
        assert choose_reward(store, None, usual="other")[0] == "right", "the only one there is"


# -- the draw --------------------------------------------------------------------------------------------------------


def test_the_draw_is_that_of_the_seed_and_tasks_with_the_same_fields_are_one_group(path: Path, tmp_path: Path) -> None:
    with TraceStore.open(path, read_only=True) as store:
        drawn = [(call.node, call.span.span_id) for call in draw_calls(store, 2, seed=1)]
        more = [(call.node, call.span.span_id) for call in draw_calls(store, 5, seed=1)]
        seeds = {tuple(call.span.span_id for call in draw_calls(store, 2, seed=seed)) for seed in range(8)}
        groups = {call.span.span_id: call.group for call in draw_calls(store, 9, seed=0)}
    assert [node for node, _ in drawn] == ["idle"] * 2 + ["router"] * 2 + ["writer"] * 2
    assert [[call for call in more if call[0] == node][:2] for node in ("idle", "router")] == [drawn[:2], drawn[2:4]]
    assert len(seeds) > 1
    assert groups["r0"] == groups["r1"] != groups["r3"]  # a task without fields goes by its id
    same = tmp_path / "same.duckdb"
    traces = []
    for number in range(2):
        trace = SampleTrace(f"{number}", START + number)
        hosted(trace, f"c{number}", trace.node("a:1", 0, 2 * SECOND, step=1), (0, 1), "q", "x")
        traces.append(trace.spans(TASK_ID=f"live-{number}", TASK=json.dumps({"id": number, "q": "x"}), ADAPTERS="{}"))
    fill(same, traces)
    with TraceStore.open(same) as store:
        assert len({call.group for call in draw_calls(store, 9, seed=0)}) == 1
