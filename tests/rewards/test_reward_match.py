"""Owns: an answer against what the task says.

- exact, regex, json_schema and numeric are 1 or 0 as worked out by hand; a list in the task means any of these.
- A field that is missing is an error that names it; an answer of the wrong form is a wrong answer.
- A pattern that would search for years is given up in its time, with other work going on; a schema fetches nothing.
- A path walks mappings, lists, attributes and the last text of an agent, and no private attribute.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from support.reward_rig import example_run, score, table, value
from support.sample_spans import chain

from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.rewards.contract import RunView, path_to_value
from marft_bridge.rewards.scoring import Scorer
from trace_store.assemble import spans_to_trajectory


def run_of(answer: Any, expected: Any = None) -> RunView:
    return RunView({"id": "t", "expected": expected}, {"answer": answer})


@pytest.mark.parametrize(
    ("answer", "expected", "options", "right"),
    [
        (" 12\n", "12", {}, 1),
        (" 12\n", "12", {"strip": False}, 0),
        ("12", 12, {}, 1),
        ("12.0", 12, {}, 0),
        ("Paris", "paris", {}, 0),
        ("STRASSE", "straße", {"ignore_case": True}, 1),
        ("a  b\nc", "a b c", {"ignore_space": True}, 1),
        ("a  b\nc", "a b c", {}, 0),
        ("b", ["a", "b"], {}, 1),
        ("c", ["a", "b"], {}, 0),
        (True, "true", {}, 1),
        (1e-05, "0.00001", {}, 1),
        (1e16, "10000000000000000.0", {}, 1),
        (12.5, "12.5", {}, 1),
    ],
)
def test_exact(answer: Any, expected: Any, options: dict[str, Any], right: int) -> None:
    given = value(run_of(answer, expected), kind="exact", answer_from="answer", expected_from="expected", **options)
    assert given == right


@pytest.mark.parametrize(
    ("answer", "options", "right"),
    [
        ("so #### 42 it is", {"pattern": r"#### (\d+)"}, 1),
        ("so 42 it is", {"pattern": r"#### (\d+)"}, 0),
        ("so #### 42 it is", {"pattern": r"#### (\d+)", "full": True}, 0),
        ("so #### 42 it is", {"pattern": r"#### (\d+)", "expected_from": "expected"}, 1),
        ("so #### 43 it is", {"pattern": r"#### (\d+)", "expected_from": "expected"}, 0),
    ],
)
def test_regex(answer: str, options: dict[str, Any], right: int) -> None:
    assert value(run_of(answer, 42), kind="regex", answer_from="answer", **options) == right


SCHEMA = {"type": "object", "required": ["city"], "properties": {"city": {"$ref": "#/$defs/name"}}}
SCHEMA["$defs"] = {"name": {"type": "string", "minLength": 2}}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ('{"city": "Rome"}', 1),
        ({"city": "Rome"}, 1),
        ('{"city": "R"}', 0),
        ('{"town": "Rome"}', 0),
        ("Rome", 0),
        ("", 0),
        ("[" * 100_000, 0),
        (None, 0),
    ],
    ids=lambda value: str(value)[:20],
)
def test_json_schema(answer: Any, right: int) -> None:
    assert value(run_of(answer), kind="json_schema", answer_from="answer", schema=SCHEMA) == right


@pytest.mark.parametrize(
    "answer", ["NaN", "Infinity", "[-Infinity]", "1e999", float("nan"), {"x": [float("inf")]}], ids=str
)
def test_what_no_json_can_hold_meets_no_schema(answer: Any) -> None:
    assert value(run_of(answer), kind="json_schema", answer_from="answer", schema={"not": {"const": 1}}) == 0
    assert value(run_of("[2, 1e3]"), kind="json_schema", answer_from="answer", schema={"not": {"const": 1}}) == 1


def test_references_that_lead_somewhere_inside_are_accepted() -> None:
    schema = {
        "$id": "https://example.test/plan",
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "name": {"$ref": "#word"}, "$ref": {"const": "#/nowhere"}},
        "$defs": {"word": {"$anchor": "word", "type": "string"}},
        "examples": [{"$ref": "#/nowhere"}],
    }
    assert value(run_of('{"next": {"name": "a"}}'), kind="json_schema", answer_from="answer", schema=schema) == 1
    assert value(run_of('{"next": {"name": 1}}'), kind="json_schema", answer_from="answer", schema=schema) == 0


@pytest.mark.parametrize(
    ("answer", "expected", "options", "right"),
    [
        ("3 + 4 = 7", 7, {}, 1),
        ("3 + 4 = 7", 3, {"pick": "first"}, 1),
        ("3 + 4 = 7", 7, {"pick": "only"}, 0),
        ("7", 7, {"pick": "only"}, 1),
        ("it costs 1,234.50.", 1234.5, {}, 1),
        ("1,2,3", 3, {}, 1),
        ("10-4", 4, {}, 1),  # a dash between two numbers is no sign
        ("x = -4", -4, {}, 1),
        ("2.5e3", "2500", {}, 1),
        (".5", 0.5, {}, 1),
        (7.25, 7, {"abs_tol": 0.25}, 1),
        (7.26, 7, {"abs_tol": 0.25}, 0),
        (102, 100, {"rel_tol": 0.02}, 1),
        (98, 100, {"rel_tol": 0.01}, 0),
        (102, 100, {"rel_tol": 0.0198}, 0),  # relative to what is expected: 1.98
        (102, 100, {"rel_tol": 0.01, "abs_tol": 2}, 1),
        ("none", 7, {}, 0),
        ("1e999", 7, {"abs_tol": 1e300}, 0),  # infinite: not a number to compare
        (10**400, 7, {"abs_tol": 1e300}, 0),
        (0, 0, {"rel_tol": 0.5}, 1),
        ("it is − no, −5", -5, {}, 1),
        ("−5", 5, {}, 0),
        ("x = - 5", -5, {}, 1),
        ("x = - 5", 5, {}, 0),
        ("so x=− 5.", -5, {}, 1),
        ("steps:\n- 3\n- 5", 5, {}, 1),  # a bullet is no sign
        ("x-5", 5, {}, 1),
        ("f(x)-5", 5, {}, 1),
        ("a loss of -$1,250.50", -1250.5, {}, 1),
        ("3-4 apples", 4, {}, 1),
        ("5 -3", -3, {}, 1),
        ("1.2.3", 0.3, {}, 0),  # two points: no number, nor a part of one
        ("1.2.3", 3, {}, 0),
        ("7 by version 10.20.30", 7, {}, 1),
        ("v2.0.1-3", -3, {}, 0),  # a dash behind it is no sign
        ("7 at 127.0.0.1.", 7, {}, 1),
        ("1,234.5.6 and 8", 8, {}, 1),
        ("so it is 1.5.", 1.5, {}, 1),
        ("it is...5", 5, {}, 1),  # the last of several points belongs to them
        ("1." * 50_000 + " 4", 4, {}, 1),
        ("1,1" * 50_000 + ".1.1 4", 4, {}, 1),
        ("1e5", 100_000, {}, 1),
        ("1.5E−3", 0.0015, {}, 1),
        (1e-05, 0.00001, {}, 1),
        (0.3, "0.3", {}, 1),
        (9_007_199_254_740_992, 9_007_199_254_740_993, {}, 0),  # one and the same as floats
        ("9007199254740993", 9_007_199_254_740_993, {}, 1),
        ("12345678901234568", "12345678901234567", {}, 0),
        ("12345678901234568", "12345678901234567", {"abs_tol": 1}, 1),
        (10**400 + 1, 10**400, {}, 0),
        ("1e99999999999999999999999", 7, {}, 0),  # no number that can be had
        ("9" * 5_000, "9" * 5_000, {}, 1),
        (float("nan"), 7, {}, 0),
        (float("inf"), 7, {"abs_tol": 1e300}, 0),
    ],
    ids=lambda value: str(value)[:40] if abs(value if isinstance(value, int) else 0) < 10**50 else "huge",
)
def test_numeric(answer: Any, expected: Any, options: dict[str, Any], right: int) -> None:
    given = value(run_of(answer, expected), kind="numeric", answer_from="answer", expected_from="expected", **options)
    assert given == right


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer_from": "answr"}, "rewards.it: no 'answr' in the final state (looking for 'answr'); there: answer"),
        (
            {"expected_from": "solution"},
            "rewards.it: no 'solution' in task 't' (looking for 'solution'); there: expected, id",
        ),
        ({"answer_from": "."}, "rewards.it: '.' is a dict, not a text or a number; name a field inside it"),
    ],
)
def test_a_field_that_is_missing_or_no_text_is_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(GraphError) as caught:
        value(run_of("1", "1"), **({"kind": "exact", "answer_from": "answer", "expected_from": "expected"} | options))
    assert str(caught.value) == message


@pytest.mark.parametrize("answer", [None, ["7"], {"x": 7}, [{"x": [None]}], ("7",)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"kind": "exact", "expected_from": "expected"},
        {"kind": "regex", "pattern": "(7)", "expected_from": "expected"},
        {"kind": "regex", "pattern": ".*"},
        {"kind": "numeric", "expected_from": "expected"},
    ],
    ids=str,
)
def test_an_answer_of_another_form_is_a_wrong_answer(options: dict[str, Any], answer: Any) -> None:
    assert value(run_of(answer, "7"), answer_from="answer", **options) == 0


@pytest.mark.parametrize("expected", [None, ["7", None], {"x": 7}], ids=str)
def test_a_task_of_another_form_is_an_error_of_the_task(expected: Any) -> None:
    with pytest.raises(GraphError, match=r"'expected' is a (NoneType|dict), not a text or a number"):
        value(run_of(None, expected), kind="exact", answer_from="answer", expected_from="expected")


def test_a_path_to_what_no_model_writes_lacks_a_step() -> None:
    with pytest.raises(GraphError, match="'answer' is a list, not a text or a number; name a field inside it"):
        value(run_of([SimpleNamespace(text="7")], "7"), kind="exact", answer_from="answer", expected_from="expected")


def test_a_task_without_a_number_is_named() -> None:
    with pytest.raises(GraphError, match="'expected' of task 't' is not one finite number"):
        value(run_of("1", "one"), kind="numeric", answer_from="answer", expected_from="expected")


def test_a_path_walks_what_states_are_made_of() -> None:
    state = {"messages": [{"text": "a"}, SimpleNamespace(text="b", _secret="c")], "a": {"b": 1}}
    found = [path_to_value(state, path, "x") for path in ("messages.-1.text", "messages.0.text", "a.b")]
    assert found == ["b", "a", 1]
    assert path_to_value("all", ".", "x") == "all"
    for wrong in ("messages.2", "messages.x", "messages.-1._secret", "a.b.c.d", "messages.1.__class__"):
        with pytest.raises(GraphError, match="looking for"):
            path_to_value(state, wrong, "x")


def test_the_last_text_of_an_agent_is_an_answer_too() -> None:
    sample = chain()
    sample.call("z", sample.node("a:2", 50, 60, step=3, after=("b:1",)), 51, 59, OUTPUT_MESSAGES='[{"content": "42"}]')
    spans = sample.spans()
    run = RunView({"id": "t", "expected": "42"}, {}, spans_to_trajectory(spans), spans)
    options = {"kind": "exact", "expected_from": "expected"}
    assert value(run, answer_from="node:a", **options) == 1.0
    assert value(run, answer_from="node:b", **options) is None  # its text was not recorded
    absent = score(run, table(answer_from="node:b", **options)).absent
    assert absent == {"exact": "node 'b' wrote no recorded text"}


def test_a_pattern_that_would_search_for_years_is_given_up_and_others_go_on_meanwhile() -> None:
    slow = table(kind="regex", answer_from="answer", pattern=r"(a|aa)+$", timeout_s=0.3)
    beats: list[float] = []

    async def beat() -> None:
        while True:
            beats.append(time.monotonic())
            await asyncio.sleep(0.02)

    async def both() -> Any:
        beating = asyncio.create_task(beat())
        found = await Scorer([slow]).run_to_score(run_of("a" * 5000 + "b"))
        beating.cancel()
        return found

    began = time.monotonic()
    found = asyncio.run(both())
    assert time.monotonic() - began < 5
    assert found.earned == {}
    assert found.absent == {"regex": "the pattern took longer than 0.3 s"} or found.absent == {
        "regex": "took longer than 0.3 s"
    }
    assert len(beats) > 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "regex", "pattern": "("}, "pattern '('"),
        ({"kind": "regex", "pattern": "a", "expected_from": "x"}, "the first group of the pattern, which has none"),
        ({"kind": "numeric", "expected_from": "x", "rel_tol": 1.0}, "accepts 0 for every number"),
        ({"kind": "exact", "expected_from": "x", "tolerance": 1}, "Extra inputs are not permitted"),
        ({"kind": "exact", "expected_from": "x", "timeout_s": 0}, "greater than 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        table(answer_from="answer", **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, "rewards.json_schema: its schema is none: 'objekt' is not valid"),
        ({"properties": {"a": {"$ref": "http://127.0.0.1:9/x.json"}}}, "refers to 'http://127.0.0.1:9/x.json'"),
        ({"items": {"$ref": "#/$defs/nope"}}, "its schema refers to '#/$defs/nope', which is not there"),
        ({"$ref": "#nope"}, "its schema refers to '#nope', which is not there"),
        ("nowhere.json", "rewards.json_schema: cannot read the schema 'nowhere.json'"),
    ],
)
def test_a_schema_that_is_none_or_lies_elsewhere_is_refused_before_any_episode(schema: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Scorer([table(kind="json_schema", answer_from="answer", schema=schema)])
    assert message in str(caught.value)


def test_an_answer_may_be_the_private_reward_of_an_agent() -> None:
    options = {"kind": "exact", "answer_from": "answer", "expected_from": "answer", "agent": "worker"}
    (reward,) = score(example_run(result={"answer": "12"}), table(**options)).to_rewards("e", 5)
    assert (reward.name, reward.value, reward.scope, reward.node, reward.action_id) == (
        "exact",
        1.0,
        "agent",
        "worker",
        None,
    )
    assert (reward.source, reward.created_ns, reward.episode_id) == ("exact", 5, "e")
