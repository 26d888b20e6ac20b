"""The chat model that a node calls: messages in, a reply out, and the engine's exact tokens to the recorder.

`NodeChat` asks at each call which node it is called from and which route that node has in this episode (served
model name, sampling). Invariant: prompt ids, sampled ids and log-probs are taken from the engine's answer, and
go to the recorder only, never into the app's messages or state. It knows nothing of stores or training.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_openai import ChatOpenAI
from langgraph.config import get_config

from marft_bridge.errors import GraphError


@dataclass(frozen=True, slots=True)
class Route:
    """Where the calls of one node go, and how they sample."""

    model: str  # the name under which the server serves it
    adapter: str | None  # None for a model without an adapter
    version: int | None
    temperature: float
    max_tokens: int


@dataclass(slots=True)
class Routing:
    """The routes of one episode. Its seed and the order of a node's calls give each call its own seed."""

    routes: Mapping[str, Route]
    seed: int | None = None
    sampled_tokens: int = 0  # by all calls so far
    _calls: dict[str, Iterator[int]] = field(default_factory=dict)

    def call_seed(self, node: str) -> int | None:
        """A seed for the next call of `node`: the same episode seed gives the same sequence."""
        if self.seed is None:
            return None
        number = next(self._calls.setdefault(node, itertools.count()))
        digest = hashlib.sha256(f"{self.seed}/{node}/{number}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


current_routing: ContextVar[Routing | None] = ContextVar("marft_routing", default=None)


@dataclass(slots=True)
class ExactTokens:
    """What the engine answered about one call, and what was asked of it. None where it said nothing."""

    route: Route | None = None
    seed: int | None = None
    prompt_ids: list[int] | None = None
    sampled_ids: list[int] | None = None
    logprobs: list[float] | None = None


class TakesExactTokens(Protocol):
    """A callback handler that wants the exact tokens of a call, by the call's run id."""

    def note_exact_tokens(self, run_id: UUID, tokens: ExactTokens) -> None:
        """Called once per LLM call, before its end is announced."""


_current_call: ContextVar[ExactTokens | None] = ContextVar("marft_call", default=None)


def calling_node() -> str:
    """Name of the LangGraph node that the caller runs in, subgraph path included; "" outside any node."""
    try:
        config = get_config()
    except RuntimeError:
        return ""
    return namespace_to_node(config.get("configurable", {}).get("checkpoint_ns", ""))


def namespace_to_node(checkpoint_ns: str) -> str:
    """`outer:<id>|inner:<id>` becomes `outer/inner`."""
    return "/".join(part.partition(":")[0] for part in checkpoint_ns.split("|")) if checkpoint_ns else ""


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
        routing.sampled_tokens += len(tokens.sampled_ids or ())
    if announced is not None:
        run_id, listeners = announced
        for listener in listeners:
            listener.note_exact_tokens(run_id, tokens)


@contextmanager
def _handed_over() -> Iterator[ExactTokens]:
    """The tokens of one call, handed over to whoever it was announced to when the block ends, however it ends."""
    call, announced = ExactTokens(), announced_call.get()
    try:
        yield call
    finally:
        hand_over_tokens(announced, call)


@contextmanager
def _collecting(call: ExactTokens) -> Iterator[None]:
    """What the engine answers inside the block is added to `call`."""
    token = _current_call.set(call)
    try:
        yield
    finally:
        _current_call.reset(token)


def route_for_call() -> tuple[str, Route | None, int | None]:
    """The calling node, its route in this episode (None outside one) and the seed of this call."""
    routing = current_routing.get()
    node = calling_node()
    if routing is None:
        return node, None, None
    route = routing.routes.get(node)
    if route is None:
        known = ", ".join(sorted(routing.routes))
        raise GraphError(f"node {node!r} calls a NodeChat but has no route; trainable nodes: {known}")
    return node, route, routing.call_seed(node)


class NodeChat(ChatOpenAI):
    """A ChatOpenAI whose served model is the adapter of the node that calls it.

    Inside an episode the route decides model, temperature and length, and sampling is from the whole
    distribution (top_p 1, no top_k). Outside one it is a plain ChatOpenAI on the model it was built with.
    """

    def _get_request_payload(self, input_: Any, *, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        _, route, seed = route_for_call()
        call = _current_call.get()
        if call is not None:
            call.route, call.seed = route, seed
        if route is not None:
            payload.pop("max_completion_tokens", None)
            payload |= {"model": route.model, "temperature": route.temperature, "max_tokens": route.max_tokens}
            payload["top_p"] = 1.0
            if seed is not None:
                payload["seed"] = seed
        payload["logprobs"] = True
        payload["extra_body"] = {**(payload.get("extra_body") or {}), "return_token_ids": True}
        return payload

    def _create_chat_result(self, response: Any, generation_info: dict[str, Any] | None = None) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        call = _current_call.get()
        if call is not None:
            body = response if isinstance(response, dict) else response.model_dump(warnings=False)
            if len(body["choices"]) == 1:  # several choices of one prompt are not one action
                _add_wire_tokens(call, body)
        for generation in result.generations:
            _drop_unasked_logprobs(self, generation.generation_info)
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        converted = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        call = _current_call.get()
        if call is not None and len(chunk.get("choices") or ()) <= 1:
            _add_wire_tokens(call, chunk)
        if converted is not None:
            _drop_unasked_logprobs(self, converted.generation_info)
        return converted

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with _handed_over() as call, _collecting(call):
            return super()._generate(messages, stop, run_manager, **kwargs)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with _handed_over() as call, _collecting(call):
            return await super()._agenerate(messages, stop, run_manager, **kwargs)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        # A generator runs in the context of whoever pulls it, so the call is set anew around each pull.
        chunks = super()._stream(messages, stop, run_manager, **kwargs)
        with _handed_over() as call:
            while True:
                with _collecting(call):
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        chunks = super()._astream(messages, stop, run_manager, **kwargs)
        with _handed_over() as call:
            while True:
                with _collecting(call):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return
                yield chunk


def _add_wire_tokens(call: ExactTokens, body: Mapping[str, Any]) -> None:
    """Adds what one answer or one streamed chunk says; a field that is absent stays None."""
    choice = (body.get("choices") or [{}])[0]
    prompt_ids = body.get("prompt_token_ids")
    if prompt_ids is not None and call.prompt_ids is None:
        call.prompt_ids = list(prompt_ids)
    if choice.get("token_ids") is not None:
        call.sampled_ids = [*(call.sampled_ids or ()), *choice["token_ids"]]
    content = (choice.get("logprobs") or {}).get("content")
    if content is not None:
        call.logprobs = [*(call.logprobs or ()), *(float(entry["logprob"]) for entry in content)]


def _drop_unasked_logprobs(model: ChatOpenAI, generation_info: dict[str, Any] | None) -> None:
    """The recorder asked for log-probs; the app gets them only where it asked for them itself."""
    if generation_info is not None and not model.logprobs:
        generation_info.pop("logprobs", None)
