"""Owns: which id of a record stands for which of its replay, in answers, tool calls and calls that cannot be read."""

from __future__ import annotations

from langchain_core.messages import AIMessage

from marft_bridge.replay.drawn_ids import DrawnIds, number_ids
from marft_bridge.replay.recorded_run import RecordedError, RecordedTool
from marft_bridge.replay.recorded_tools import tool_to_now

WAS, NOW = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"


def test_an_answer_quotes_the_replays_ids_in_all_that_it_says_and_calls() -> None:
    ids = DrawnIds([])
    ids.note_pair(f"ticket {WAS}", f"ticket {NOW}")
    answer = AIMessage(
        f"see {WAS}",
        tool_calls=[{"name": "open", "args": {"id": WAS}, "id": "1"}],
        invalid_tool_calls=[{"name": "open", "args": f'{{"id": "{WAS}"', "id": "2", "error": None}],
    )
    now = ids.answer_to_now(answer)
    assert (now.content, now.tool_calls[0]["args"]) == (f"see {NOW}", {"id": NOW})
    assert now.invalid_tool_calls[0]["args"] == f'{{"id": "{NOW}"'
    assert ids.answer_to_now(AIMessage("none")).content == "none"


def test_what_a_tool_gave_or_raised_has_the_ids_of_now() -> None:
    ids = DrawnIds([])
    ids.note_pair(f"open {WAS}", f"open {NOW}")
    error = RecordedError("ValueError", f"no ticket {WAS}")
    tool = RecordedTool(
        span_id="1",
        name="look",
        node="a",
        call_id=None,
        arguments={},
        result=f"of {WAS}",
        output={"key": WAS},
        error=error,
        has_calls=False,
    )
    now = tool_to_now(tool, ids)
    assert (now.result, now.output) == (f"of {NOW}", {"key": NOW})
    assert now.error == RecordedError("ValueError", f"no ticket {NOW}")


def test_a_prompt_with_another_number_of_ids_fits_no_record() -> None:
    ids = DrawnIds([])
    assert number_ids(f"see {WAS}") == "see id 1"
    assert not ids.fit("see id 1", f"see {NOW}")
    assert ids.fit(f"see {WAS}", f"see {NOW}")
    ids.note_pair(f"see {WAS}", f"see {NOW}")
    assert not ids.fit(f"see {WAS}", f"see {WAS}")
