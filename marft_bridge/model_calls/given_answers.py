"""A call of a node -> an answer that is known beforehand, instead of a request to a model.

For forks of recorded episodes: the calls before the fork get their recorded answers again. For rounds whose hosted
nodes are answered from the record: their calls get the answer of an equal recorded call. Invariant: who gives an answer
also says what is recorded of the call, so that nothing of the live route is taken for what it was sampled by.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from marft_bridge.model_calls.routing import current_routing
from marft_bridge.model_calls.token_capture import ExactTokens, announced_call


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """The answer of one call, and what is known of its tokens."""

    message: AIMessage
    tokens: ExactTokens


class Prefix(Protocol):
    """The beginning of an episode whose answers are known."""

    def answer_call(self, run_id: UUID | None) -> GivenAnswer | None:
        """The answer of the call with this run id; None where its live route is to answer it.

        Raises an error in the app where the episode does not begin as it is known to. It may have to wait until other
        calls have come, as `await_turn` does.
        """

    async def await_turn(self, run_id: UUID | None) -> None:
        """Waits until the call with this run id can be answered, or until it is clear that it cannot.

        Call it before `answer_call` where an event loop runs: the calls that are waited for may need the loop.
        """

    def judge_end(self, error: BaseException | None) -> Exception | None:
        """By the error that the run ended with: another one that it failed with; see `EpisodeContext.judge_end`."""


class AnswerRecord(Protocol):
    """Recorded answers of the nodes without a route, for one episode."""

    def answer_call(self, run_id: UUID | None) -> GivenAnswer | None:
        """A recorded answer of the call with this run id; None where the node's route, or its own model, is to answer.

        Raises an error in the app where no recorded call equals it and its own model may not be asked.
        """

    def refuse_unanswerable(self, kind: str) -> None:
        """Told of a call whose kind cannot be given an answer. Raises where its own model may not be asked."""

    def judge_end(self, error: BaseException | None) -> Exception | None:
        """As `Prefix.judge_end`."""


def answer_given_call(run_id: UUID | None) -> GivenAnswer | None:
    """The answer that is known of the call that starts now; None where a model is to be asked.

    `run_id` is None where LangChain does not pass it, and then that of the announced call counts.

    Raises: as `Prefix.answer_call` and `AnswerRecord.answer_call`.
    """
    routing = current_routing.get()
    if routing is None or not routing.knows_answers:
        return None
    if run_id is None and (announced := announced_call.get()) is not None:
        run_id = announced[0]
    given = None if routing.prefix is None else routing.prefix.answer_call(run_id)
    return routing.record.answer_call(run_id) if given is None and routing.record is not None else given


async def await_given_call(run_id: UUID | None) -> None:
    """Waits until `answer_given_call` need not; see `Prefix.await_turn`."""
    routing = current_routing.get()
    if routing is None or routing.prefix is None:
        return
    if run_id is None and (announced := announced_call.get()) is not None:
        run_id = announced[0]
    await routing.prefix.await_turn(run_id)


def message_to_result(message: AIMessage) -> ChatResult:
    """A whole answer as the result of a chat model."""
    reason = message.response_metadata.get("finish_reason")
    info = {} if reason is None else {"finish_reason": reason}
    return ChatResult(generations=[ChatGeneration(message=message, generation_info=info)])


def message_to_chunk(message: AIMessage) -> ChatGenerationChunk:
    """A whole answer as the one chunk of a stream."""
    calls: list[tuple[Any, Any, Any]] = [
        (call["id"], call["name"], json.dumps(call["args"])) for call in message.tool_calls
    ]
    calls += [(call["id"], call["name"], call["args"] or "") for call in message.invalid_tool_calls]
    chunks: Any = [
        {"id": call_id, "name": name, "args": text, "index": index, "type": "tool_call_chunk"}
        for index, (call_id, name, text) in enumerate(calls)
    ]
    chunk = AIMessageChunk(
        content=message.content,
        id=message.id,
        name=message.name,
        additional_kwargs=message.additional_kwargs,
        response_metadata=message.response_metadata,
        usage_metadata=message.usage_metadata,
        tool_call_chunks=chunks,
        chunk_position="last",
    )
    return ChatGenerationChunk(message=chunk)
