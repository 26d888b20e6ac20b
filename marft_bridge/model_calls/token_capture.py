"""The engine's answers on the wire -> the exact tokens of one call, handed to the listeners of that call.

Invariants: ids, log-probs and counts are the engine's own, and None where it sent none; a call with several answers
has no tokens, because they are not one action; nothing of this reaches the app's messages or state. On a route that
is trained, an answer without usable tokens fails its call: nothing could be learned from the episode, and the cause
would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any, Protocol
from uuid import UUID

from marft_bridge.common.errors import ServingError
from marft_bridge.model_calls.routing import Route, current_routing
from marft_bridge.model_calls.teacher import TeacherAnswer
from trace_store.assemble import token_fault


@dataclass(slots=True)
class ExactTokens:
    """The engine's exact tokens of one call, and how the call was routed. None where the engine sent nothing."""

    route: Route | None = None
    seed: int | None = None
    prompt_ids: list[int] | None = None
    sampled_ids: list[int] | None = None
    logprobs: list[float] | None = None
    node: str = ""
    max_tokens: int | None = None  # the limit of this call
    prompt_tokens: int | None = None  # the engine's own counts
    completion_tokens: int | None = None
    finish_reason: str | None = None
    response_id: str | None = None
    model: str | None = None  # served name of the model that answered
    provider: str | None = None  # kind of server that answered, such as vllm
    choices: int = 1  # answers to the one prompt
    teacher: TeacherAnswer | None = None  # what the node's own model answered to the same call, where it was asked
    given: Mapping[str, Any] | None = None  # span attributes of the recorded call whose answer was given again

    def take(self, tokens: ExactTokens) -> None:
        """Becomes a copy of `tokens`: of an answer that is known as a whole."""
        for each in fields(self):
            setattr(self, each.name, getattr(tokens, each.name))

    def malformed_error(self, reason: str) -> ServingError:
        """The error of a call whose answer does not have the requested form."""
        return ServingError(f"malformed answer of the model server to node {self.node!r}: {reason}")


class TokenListener(Protocol):
    """A callback handler that receives the exact tokens of a call, by the call's run id."""

    def note_exact_tokens(self, run_id: UUID, tokens: ExactTokens) -> None:
        """Called once per LLM call, before its end is announced."""


# LangChain does not pass the run manager to a model that streams, so a recorder announces each call here just before
# it starts, in the context that the call runs in: the call's run id, and its listeners.
announced_call: ContextVar[tuple[UUID, tuple[TokenListener, ...]] | None] = ContextVar("marft_call_id", default=None)


def announce_call(run_id: UUID, listener: TokenListener) -> None:
    """Registers `listener` for the exact tokens of the LLM call that is about to start in this context."""
    announced = announced_call.get()
    earlier_listeners = announced[1] if announced is not None and announced[0] == run_id else ()
    announced_call.set((run_id, (*earlier_listeners, listener)))


def announcement_of(run_id: UUID | None) -> tuple[UUID, tuple[TokenListener, ...]] | None:
    """The run id of the call that is answered now, and its listeners.

    `run_id` is the call's own, or None where LangChain does not pass it. It goes before the announced one: of several
    prompts in one request, all are announced before the first is answered.
    """
    announced = announced_call.get()
    return announced if announced is None or run_id is None else (run_id, announced[1])


def hand_over_tokens(announced: tuple[UUID, tuple[TokenListener, ...]] | None, tokens: ExactTokens) -> None:
    """Gives the tokens of the announced call to all its listeners, and counts them for the episode."""
    routing = current_routing.get()
    if routing is not None:
        sampled_count = len(tokens.sampled_ids or ())
        routing.count_sampled(tokens.node, tokens.route, sampled_count, finish_reason=tokens.finish_reason)
        routing.given_tokens += sampled_count if tokens.given is not None else 0
        if tokens.route is not None and announced is not None:
            routing.routed_calls[tokens.node] += 1
    if announced is not None:
        run_id, listeners = announced
        for listener in listeners:
            listener.note_exact_tokens(run_id, tokens)


@contextmanager
def capture_tokens(run_id: UUID | None) -> Iterator[ExactTokens]:
    """Collects the tokens of one call, and hands them over when the block ends, however it ends; `run_id` as for
    `announcement_of`.

    Raises:
        ServingError: the server answered a trained node with tokens that cannot be trained on.
    """
    tokens, announced = ExactTokens(), announcement_of(run_id)
    try:
        yield tokens
    finally:
        hand_over_tokens(announced, tokens)
    require_tokens(tokens)


def require_tokens(tokens: ExactTokens) -> None:
    """Refuses the tokens of a trained node's answer that cannot be trained on. Raises ServingError."""
    if tokens.given is None and tokens.route is not None and tokens.route.trainable and tokens.choices == 1:
        fault = token_fault(tokens.prompt_ids, tokens.sampled_ids, tokens.logprobs, reported_count=None)
        if fault is not None:
            raise tokens.malformed_error(fault)


def add_wire_answer(tokens: ExactTokens, body: Mapping[str, Any]) -> None:
    """Adds the fields of one whole answer or one streamed chunk to `tokens`; an absent field leaves them as they are.

    Raises:
        ServingError: `body` is not an answer to a chat request.
    """
    try:
        _add_fields(tokens, body)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise tokens.malformed_error(f"{type(error).__name__}: {error}") from error


def _add_fields(tokens: ExactTokens, body: Mapping[str, Any]) -> None:
    choices = body.get("choices") or ()
    tokens.response_id = body.get("id") or tokens.response_id
    tokens.model = body.get("model") or tokens.model
    usage = body.get("usage") or {}
    tokens.prompt_tokens = usage.get("prompt_tokens", tokens.prompt_tokens)
    tokens.completion_tokens = usage.get("completion_tokens", tokens.completion_tokens)
    if body.get("prompt_token_ids") is not None and tokens.prompt_ids is None:
        tokens.prompt_ids = list(body["prompt_token_ids"])
    tokens.choices = max([tokens.choices, *(choice.get("index", 0) + 1 for choice in choices)])
    if tokens.choices > 1:
        tokens.sampled_ids = tokens.logprobs = None
        return
    for choice in choices:
        tokens.finish_reason = choice.get("finish_reason") or tokens.finish_reason
        if choice.get("token_ids") is not None:
            tokens.sampled_ids = tokens.sampled_ids or []
            tokens.sampled_ids.extend(choice["token_ids"])  # a new list for each chunk would copy all before it
        content = (choice.get("logprobs") or {}).get("content")
        if content is not None:
            tokens.logprobs = tokens.logprobs or []
            tokens.logprobs.extend(float(entry["logprob"]) for entry in content)
