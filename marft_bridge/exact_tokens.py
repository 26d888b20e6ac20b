"""The engine's answers on the wire -> the exact tokens of one call, handed to whoever it was announced to.

Invariants: ids, log-probs and counts are the engine's own, and None where it said nothing; a call with several
answers has no tokens, because they are not one action; nothing of this reaches the app's messages or state.
An answer that lacks what it was asked for, on a route that is trained, fails its call: nothing could be learned from
the episode, and nobody would see why. It knows nothing of spans or stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

from marft_bridge.errors import ServingError
from marft_bridge.routing import Route, current_routing
from trace_store.assemble import token_fault


@dataclass(slots=True)
class ExactTokens:
    """What the engine answered about one call, and what was asked of it. None where it said nothing."""

    route: Route | None = None
    seed: int | None = None
    prompt_ids: list[int] | None = None
    sampled_ids: list[int] | None = None
    logprobs: list[float] | None = None
    node: str = ""
    max_tokens: int | None = None  # that this call was allowed
    prompt_tokens: int | None = None  # the engine's own counts
    completion_tokens: int | None = None
    finish_reason: str | None = None
    response_id: str | None = None
    model: str | None = None  # that answered, by its served name
    provider: str | None = None  # what kind of server answered
    choices: int = 1  # answers to the one prompt

    def malformed(self, why: str) -> ServingError:
        """The error of a call that the server answered with something else than what it was asked."""
        return ServingError(f"malformed answer of the model server to node {self.node!r}: {why}")


class TakesExactTokens(Protocol):
    """A callback handler that wants the exact tokens of a call, by the call's run id."""

    def note_exact_tokens(self, run_id: UUID, tokens: ExactTokens) -> None:
        """Called once per LLM call, before its end is announced."""


# LangChain does not pass the run manager to a model that streams, so a recorder announces each call here just before
# it starts, in the context that the call runs in: the call's run id, and who listens.
announced_call: ContextVar[tuple[UUID, tuple[TakesExactTokens, ...]] | None] = ContextVar("marft_call_id", default=None)


def announce_call(run_id: UUID, listener: TakesExactTokens) -> None:
    """Says that an LLM call is about to start and that `listener` wants its exact tokens."""
    announced = announced_call.get()
    others = announced[1] if announced is not None and announced[0] == run_id else ()
    announced_call.set((run_id, (*others, listener)))


def hand_over_tokens(announced: tuple[UUID, tuple[TakesExactTokens, ...]] | None, tokens: ExactTokens) -> None:
    """Gives the tokens of the announced call to all who listen, and counts them for the episode."""
    routing = current_routing.get()
    if routing is not None:
        sampled = len(tokens.sampled_ids or ())
        routing.count_sampled(tokens.node, tokens.route, sampled, tokens.finish_reason)
        if tokens.route is not None and announced is not None:
            routing.answered[tokens.node] += 1
    if announced is not None:
        run_id, listeners = announced
        for listener in listeners:
            listener.note_exact_tokens(run_id, tokens)


@contextmanager
def handed_over(run_id: UUID | None) -> Iterator[ExactTokens]:
    """The tokens of one call, handed over when the block ends, however it ends.

    `run_id` is the call's own where LangChain tells it: of several prompts in one request, only the last is the
    one that was announced last.

    Raises:
        ServingError: the server answered a trained node with tokens that cannot be trained on.
    """
    call, announced = ExactTokens(), announced_call.get()
    if announced is not None and run_id is not None:
        announced = (run_id, announced[1])
    try:
        yield call
    finally:
        hand_over_tokens(announced, call)
    if call.route is not None and call.route.trainable and call.choices == 1:
        fault = token_fault(call.prompt_ids, call.sampled_ids, call.logprobs, None)
        if fault is not None:
            raise call.malformed(fault)


def add_wire_answer(call: ExactTokens, body: Mapping[str, Any]) -> None:
    """Adds what one whole answer or one streamed chunk says; a field that is absent stays as it is.

    Raises:
        ServingError: it is no answer to a chat request.
    """
    try:
        _add(call, body)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise call.malformed(f"{type(error).__name__}: {error}") from error


def _add(call: ExactTokens, body: Mapping[str, Any]) -> None:
    choices = body.get("choices") or ()
    call.response_id = body.get("id") or call.response_id
    call.model = body.get("model") or call.model
    usage = body.get("usage") or {}
    call.prompt_tokens = usage.get("prompt_tokens", call.prompt_tokens)
    call.completion_tokens = usage.get("completion_tokens", call.completion_tokens)
    if body.get("prompt_token_ids") is not None and call.prompt_ids is None:
        call.prompt_ids = list(body["prompt_token_ids"])
    call.choices = max([call.choices, *(choice.get("index", 0) + 1 for choice in choices)])
    if call.choices > 1:
        call.sampled_ids = call.logprobs = None
        return
    for choice in choices:
        call.finish_reason = choice.get("finish_reason") or call.finish_reason
        if choice.get("token_ids") is not None:
            call.sampled_ids = [*(call.sampled_ids or ()), *choice["token_ids"]]
        content = (choice.get("logprobs") or {}).get("content")
        if content is not None:
            call.logprobs = [*(call.logprobs or ()), *(float(entry["logprob"]) for entry in content)]
