"""Owns: a recorded run of a team -> the turns of one node.

- Three shapes give the turns that are written here by hand.
- A text is read back as it was written, or refused.
- What the record does not hold, or hides, is refused with a reason.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.distil_rig import duo, loop, record_team, supervisor, to_messages
from support.edge_rig import says

from graphs import supervisor as zoo_supervisor
from marft_bridge.distillation.role_turns import (
    RoleMessage,
    UndistillableError,
    messages_to_answers,
    messages_to_turns,
    spans_to_messages,
    text_to_blocks,
)
from trace_store import conventions as c
from trace_store.records import SpanRow


def recorded(folder: Path, graph: Any, **options: Any) -> list[SpanRow]:
    with record_team(folder / "team", [graph], **options) as store:
        (episode,) = store.episodes()
        return store.spans(episode.episode_id)


def turns_of(spans: list[SpanRow], answer: int, *, each_apart: bool = False) -> list[tuple[str, list[Any]]]:
    turns = messages_to_turns(spans_to_messages(spans), answer, each_apart=each_apart)
    return [
        (turn.text, [(use.call["name"], use.call["arguments"], use.run.result) for use in turn.tools]) for turn in turns
    ]


def test_a_duo_becomes_a_block_and_the_answer(tmp_path: Path) -> None:
    spans = recorded(tmp_path, duo(hint="Add the two.\nCarefully. "))
    assert messages_to_answers(spans_to_messages(spans)) == [1, 0]
    hint = "<reasoner>\nAdd the two.\nCarefully.\n</reasoner>"
    assert turns_of(spans, 1) == [(f"{hint}\n5", [])]
    assert turns_of(spans, 1, each_apart=True) == [(hint, []), ("5", [])]


def test_a_loop_with_a_router_ends_with_the_writers_last_message(tmp_path: Path) -> None:
    spans = recorded(tmp_path, loop())
    assert messages_to_answers(spans_to_messages(spans)) == [3, 2], "the router spoke last"
    first, again = "<writer>\n4\n</writer>", "<critic>\nagain\n</critic>"
    assert turns_of(spans, 2) == [(f"{first}\n{again}\n5", [])], "what was said after the answer is left out"
    assert turns_of(spans, 3) == [(f"{first}\n{again}\n<writer>\n5\n</writer>\nstop", [])]
    assert turns_of(spans, 2, each_apart=True) == [(first, []), (again, []), ("5", [])]


def test_a_tool_call_ends_a_turn_and_an_agent_behind_a_tool_is_a_role(tmp_path: Path) -> None:
    spans = recorded(tmp_path, supervisor(), task_to_input=to_messages)
    asks = '<supervisor>\n{"name": "ask_adder", "arguments": {"question": "2 + 3"}}\n</supervisor>\n<adder>\n</adder>'
    assert turns_of(spans, 3) == [
        (asks, [("add", {"a": 2, "b": 3}, "5")]),
        ("<adder>\nIt is 5.\n</adder>\n5", []),
    ]
    assert messages_to_answers(spans_to_messages(spans)) == [3, 2]


def test_a_tool_that_the_teams_code_ran_is_no_turn_of_a_node(tmp_path: Path) -> None:
    task = next(iter(zoo_supervisor.tasks()))
    team = zoo_supervisor.build(says("ROUTE: ADDER", "2, 3", "ROUTE: DONE"))
    spans = recorded(tmp_path, team, tasks=[task], team_reward=zoo_supervisor.reward)
    with pytest.raises(UndistillableError, match="the team ran the tool 'add' without a model that called it"):
        spans_to_messages(spans)


def test_the_blocks_of_a_turn_are_read_back() -> None:
    text = "<a/b>\none\n\ntwo\n</a/b>\n<critic>\n</critic>\n<x> y\n5"
    assert text_to_blocks(text) == ([("a/b", "one\n\ntwo"), ("critic", "")], "<x> y\n5")
    assert text_to_blocks("5") == ([], "5")


@pytest.mark.parametrize(
    ("hint", "answer"), [("a\n</reasoner>\nb", "5"), ("a", "<x>\n1\n</x>\n5"), ("a", "<x>\n5\n</x>")]
)
def test_a_text_that_holds_a_mark_is_refused(hint: str, answer: str) -> None:
    messages = [RoleMessage("reasoner", hint), RoleMessage("actor", answer)]
    with pytest.raises(UndistillableError, match="holds the mark of a block"):
        messages_to_turns(messages, 1, each_apart=False)


def test_what_the_record_hides_or_lacks_is_refused_with_a_reason(tmp_path: Path) -> None:
    spans = recorded(tmp_path, duo())
    for change, reason in (
        ({c.OUTPUT_MESSAGES: None}, "was recorded without content"),
        ({c.OUTPUT_MESSAGES: '[{"role": "assistant", "parts": []}]'}, "of a call of the team: the answer is empty"),
        (
            {c.OUTPUT_MESSAGES: '[{"role": "assistant", "parts": [{"type": "text", "content": "[redacted:email]"}]}]'},
            "its record is redacted",
        ),
    ):
        changed = [
            replace(span, attributes={k: v for k, v in {**span.attributes, **change}.items() if v is not None})
            if span.operation == c.CHAT
            else span
            for span in spans
        ]
        with pytest.raises(UndistillableError, match=re.escape(reason)) as caught:
            spans_to_messages(changed)
        assert spans[0].trace_id not in str(caught.value), "so that runs with one reason are counted together"
