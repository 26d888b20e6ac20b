"""The chat model that a node calls: messages in, a reply out, and the engine's exact tokens to the recorder.

`NodeChat` asks at each call which node it is called from and which route that node has in this episode (served
model name, sampling). Invariant: prompt ids, sampled ids and log-probs are taken from the engine's answer, and
go to the recorder only, never into the app's messages or state. It knows nothing of stores or training.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from langchain_core.caches import BaseCache
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_openai import ChatOpenAI
from pydantic import Field, PrivateAttr

from marft_bridge.exact_tokens import (
    ExactTokens,
    add_wire_answer,
    handed_over,
)
from marft_bridge.fixed_answer import fixed_answer, result_to_chunk
from marft_bridge.routing import (
    calling_route,
    current_routing,
    route_for_call,
)
from marft_bridge.wire_rules import payload_to_routed

PROVIDER = "vllm"
_OF_SERVER = (
    *("openai_api_base", "openai_api_key", "auto_tools"),
    *("client", "async_client", "root_client", "root_async_client", "http_client", "http_async_client"),
)
log = logging.getLogger("marft_bridge")


@dataclass(slots=True)
class _Call:
    """One call while it is being answered: its tokens, and what the app itself wants to see of the answer."""

    tokens: ExactTokens
    shows_logprobs: bool = False
    shows_usage: bool = True
    streamed: bool = False


@dataclass(slots=True)
class _Told:
    """What was said already, so that it is said once for each node. Copies of a model share it."""

    left_out: set[tuple[str, str]] = field(default_factory=set)


_current_call: ContextVar[_Call | None] = ContextVar("marft_call", default=None)


@contextmanager
def _collecting(call: _Call) -> Iterator[None]:
    """What the engine answers inside the block is added to `call`."""
    token = _current_call.set(call)
    try:
        yield
    except json.JSONDecodeError as error:
        if call.tokens.route is None:
            raise
        raise call.tokens.malformed(f"not JSON ({error})") from error
    finally:
        _current_call.reset(token)


class NodeChat(ChatOpenAI):
    """A ChatOpenAI whose served model is the adapter of the node that calls it.

    Inside an episode the route decides model, temperature and length, and sampling is from the whole
    distribution (top_p 1, no top_k, no penalties); see `wire_rules`. Outside one it is a plain ChatOpenAI on the
    model it was built with.
    """

    cache: BaseCache | bool | None = Field(default=False, exclude=True)
    """Off: a remembered answer is no sample."""
    auto_tools: bool = Field(default=True, exclude=True)
    """Whether the server can tell a tool call from text by itself (vLLM: --tool-call-parser)."""
    _told: _Told = PrivateAttr(default_factory=_Told)
    _elsewhere: dict[str, dict[str, Any]] = PrivateAttr(default_factory=dict)
    """Address of another server -> the fields that a copy of this model has to ask it. Shared by all copies."""

    def beside(self, others: Sequence[NodeChat]) -> NodeChat:
        """This model, which from now on hands the calls of nodes that run on another server to that one."""
        self._elsewhere.update(
            {other.openai_api_base or "": {f: getattr(other, f) for f in _OF_SERVER} for other in others}
        )
        return self

    def is_copy_of(self, other: Any) -> bool:
        """Whether `other` is this model or a copy of it, whichever of its servers that asks."""
        return isinstance(other, NodeChat) and other._elsewhere is self._elsewhere

    def say_left_out(self, node: str, what: list[str]) -> None:
        """Tells the user, once for each node, what of the app's settings the served model does not get."""
        new = [name for name in what if (node, name) not in self._told.left_out]
        if new:
            self._told.left_out.update((node, name) for name in new)
            log.warning("node %r: in training its model's %s has no effect; [sampling] decides", node, ", ".join(new))

    def _routed(self) -> bool:
        """Whether the routes of an episode apply: one that the app built itself answers from its own server."""
        routing = current_routing.get()
        return routing is not None and (routing.chat is None or self.is_copy_of(routing.chat))

    def _asks_for_tokens(self) -> bool:
        """Any server but OpenAI's own, which refuses the field, may be one that tells token ids."""
        host = urlsplit(self.openai_api_base or "").hostname or "api.openai.com"
        return self._routed() or host != "api.openai.com"

    def _use_responses_api(self, payload: dict[str, Any]) -> bool:
        return not self._routed() and super()._use_responses_api(payload)

    def _get_request_payload(self, input_: Any, *, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        call = _current_call.get()
        if call is not None:
            call.shows_logprobs = bool(payload.get("logprobs"))
        if self._routed():
            node, route, seed = route_for_call()
            assert route is not None  # there is a routing
            payload, left_out = payload_to_routed(payload, node, route, seed, auto_tools=self.auto_tools)
            self.say_left_out(node, left_out)
            if call is not None:
                call.tokens.node, call.tokens.route, call.tokens.seed = node, route, seed
                call.tokens.max_tokens, call.tokens.provider = payload["max_tokens"], PROVIDER
        if self._asks_for_tokens() and "messages" in payload:
            payload["logprobs"] = True
            payload["extra_body"] = {**(payload.get("extra_body") or {}), "return_token_ids": True}
        return payload

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        """What callbacks are told: the model that really answers."""
        params = super()._get_invocation_params(stop, **kwargs)
        route = calling_route()[1] if self._routed() else None
        if route is not None:
            params |= {"model": route.model, "model_name": route.model, "temperature": route.temperature}
        return params

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop, **kwargs)
        if self._routed():
            params["ls_provider"] = PROVIDER
        return params

    def _create_chat_result(self, response: Any, generation_info: dict[str, Any] | None = None) -> ChatResult:
        call = _current_call.get()
        try:
            result = super()._create_chat_result(response, generation_info)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if call is None or call.tokens.route is None:
                raise
            raise call.tokens.malformed(f"{type(error).__name__}: {error}") from error
        if call is None:
            return result
        if not call.streamed:  # a stream of structured output ends with the whole answer once more
            add_wire_answer(
                call.tokens, response if isinstance(response, dict) else response.model_dump(warnings=False)
            )
        for generation in result.generations:
            _hide_unasked(call, generation)
        if not call.shows_usage and result.llm_output is not None:
            result.llm_output.pop("token_usage", None)
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        converted = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        call = _current_call.get()
        if call is None:
            return converted
        # A stream of structured output is one of events, some of which hold a chunk.
        wire: Mapping[str, Any] = (chunk.get("chunk") or {}) if "type" in chunk else chunk
        call.streamed = True
        add_wire_answer(call.tokens, wire)
        if wire.get("usage") and not wire.get("choices") and not call.shows_usage:
            return None  # the extra chunk that only we asked for
        if converted is not None:
            _hide_unasked(call, converted)
        return converted

    def _at_server(self) -> NodeChat:
        """This model as it asks the server of the calling node's route: itself, unless there are several."""
        if not self._elsewhere or not self._routed():
            return self
        route = calling_route()[1]
        fields = self._elsewhere.get(route.server or "") if route is not None else None
        return self if fields is None else self.model_copy(update=fields)

    def _fixed(self, tokens: ExactTokens) -> ChatResult | None:
        """The answer where a fixed text answers for the calling node; None where the server is to be asked."""
        node, route = calling_route() if self._routed() else ("", None)
        return None if route is None or route.answer is None else fixed_answer(tokens, node, route)

    def _stream_call(self, tokens: ExactTokens, options: dict[str, Any]) -> _Call:
        """A streamed call, and in `options` the request for the engine's own count of its tokens."""
        shows_usage = self._should_stream_usage(**options)
        if self._asks_for_tokens():
            options["stream_usage"] = True
        return _Call(tokens, shows_usage=shows_usage)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with handed_over(run_manager.run_id if run_manager else None) as tokens, _collecting(_Call(tokens)):
            if (fixed := self._fixed(tokens)) is not None:
                return fixed
            return super(NodeChat, self._at_server())._generate(messages, stop, run_manager, **kwargs)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with handed_over(run_manager.run_id if run_manager else None) as tokens, _collecting(_Call(tokens)):
            if (fixed := self._fixed(tokens)) is not None:
                return fixed
            return await super(NodeChat, self._at_server())._agenerate(messages, stop, run_manager, **kwargs)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        # A generator runs in the context of whoever pulls it, so the call is set anew around each pull.
        with handed_over(run_manager.run_id if run_manager else None) as tokens:
            if (fixed := self._fixed(tokens)) is not None:
                yield result_to_chunk(fixed)
                return
            call = self._stream_call(tokens, kwargs)
            chunks = super(NodeChat, self._at_server())._stream(messages, stop, run_manager, **kwargs)
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
        with handed_over(run_manager.run_id if run_manager else None) as tokens:
            if (fixed := self._fixed(tokens)) is not None:
                yield result_to_chunk(fixed)
                return
            call = self._stream_call(tokens, kwargs)
            chunks = super(NodeChat, self._at_server())._astream(messages, stop, run_manager, **kwargs)
            while True:
                with _collecting(call):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return
                yield chunk


def _hide_unasked(call: _Call, generation: Any) -> None:
    """The recorder asked for log-probs and counts; the app gets them only where it asked for them itself."""
    info = generation.generation_info
    if info is not None and not call.shows_logprobs:
        info.pop("logprobs", None)
    if not call.shows_usage and hasattr(generation.message, "usage_metadata"):
        generation.message.usage_metadata = None
        if info is not None:
            info.pop("token_usage", None)
