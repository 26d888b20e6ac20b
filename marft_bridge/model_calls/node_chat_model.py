"""The chat model that a node calls: messages in, a reply out, and the engine's exact tokens to the recorder.

`NodeChat` looks up at each call which node it is called from and which route that node has in this episode (served
model name, sampling). Invariant: prompt ids, sampled ids and log-probs are taken from the engine's answer, and
go to the recorder only, never into the app's messages or state.
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
from uuid import UUID

from langchain_core.caches import BaseCache
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_openai import ChatOpenAI
from pydantic import Field, PrivateAttr

from marft_bridge.model_calls.given_answers import (
    answer_given_call,
    await_given_call,
    message_to_chunk,
    message_to_result,
)
from marft_bridge.model_calls.request_rules import payload_to_routed
from marft_bridge.model_calls.routing import (
    PROVIDER,
    calling_route,
    current_routing,
    route_for_call,
)
from marft_bridge.model_calls.scripted_answer import fixed_answer
from marft_bridge.model_calls.token_capture import (
    ExactTokens,
    add_wire_answer,
    capture_tokens,
)

# Fields of a ChatOpenAI that say which server it asks.
_SERVER_FIELDS = (
    "openai_api_base",
    "openai_api_key",
    "auto_tools",
    "client",
    "async_client",
    "root_client",
    "root_async_client",
    "http_client",
    "http_async_client",
)
log = logging.getLogger("marft_bridge")


@dataclass(slots=True)
class _Call:
    """One call while it is being answered: its tokens, and which parts of the answer the app itself requested."""

    tokens: ExactTokens
    shows_logprobs: bool = False
    shows_usage: bool = True
    streamed: bool = False


@dataclass(slots=True)
class _SettingWarnings:
    """Warnings that were logged already, so that each is logged once per node. Copies of a model share it."""

    warned_settings: set[tuple[str, str]] = field(default_factory=set)  # (node, setting)


_current_call: ContextVar[_Call | None] = ContextVar("marft_call", default=None)


@contextmanager
def _collect_into(call: _Call) -> Iterator[None]:
    """Adds the engine's answers inside the block to `call`."""
    reset_token = _current_call.set(call)
    try:
        yield
    except json.JSONDecodeError as error:
        if call.tokens.route is None:
            raise
        raise call.tokens.malformed_error(f"not JSON ({error})") from error
    finally:
        _current_call.reset(reset_token)


class NodeChat(ChatOpenAI):
    """A ChatOpenAI whose served model is the adapter of the node that calls it.

    Inside an episode the route decides model, temperature and length, and sampling is from the whole
    distribution (top_p 1, no top_k, no penalties); see `request_rules`. Outside one it is a plain ChatOpenAI on the
    model it was built with.
    """

    cache: BaseCache | bool | None = Field(default=False, exclude=True)
    """Off: a cached answer is no sample."""
    auto_tools: bool = Field(default=True, exclude=True)
    """Whether the server parses tool calls out of the model's text (vLLM: --tool-call-parser)."""
    teacher: Any = Field(default=None, exclude=True)
    """A `Teacher`: the node's own model, asked beside this one; None: nobody is."""
    _warnings: _SettingWarnings = PrivateAttr(default_factory=_SettingWarnings)
    _server_fields: dict[str, dict[str, Any]] = PrivateAttr(default_factory=dict)
    """Address of another server -> the field values of a copy of this model that calls it. Shared by all copies."""

    def add_servers(self, models: Sequence[NodeChat]) -> NodeChat:
        """Lets this model call the servers of `models` too, by the server that a node's route names; returns it."""
        self._server_fields.update(
            {model.openai_api_base or "": {f: getattr(model, f) for f in _SERVER_FIELDS} for model in models}
        )
        return self

    def is_copy_of(self, model: Any) -> bool:
        """Whether `model` is this model or a copy of it, whichever server it calls."""
        return isinstance(model, NodeChat) and model._server_fields is self._server_fields  # copies share the dict

    def warn_left_out(self, node: str, settings: list[str]) -> None:
        """Warns once per node and setting that the served model does not get these settings of the app."""
        new_settings = [name for name in settings if (node, name) not in self._warnings.warned_settings]
        if new_settings:
            self._warnings.warned_settings.update((node, name) for name in new_settings)
            log.warning(
                "node %r: in training its model's %s has no effect; [sampling] decides", node, ", ".join(new_settings)
            )

    def warn_idle_methods(self, node: str, class_name: str, methods: Sequence[str]) -> None:
        """Warns once per node that methods of the app's own model class do not run around the served model."""
        key = (node, f"{class_name}.{methods[0]}")
        if key not in self._warnings.warned_settings:
            self._warnings.warned_settings.add(key)
            log.warning(
                "node %r: in training its model's own %s does not run: the served model answers in the place of %s",
                node,
                ", ".join(methods),
                class_name,
            )

    def _is_routed(self) -> bool:
        """Whether an episode's routes apply. They do not to a NodeChat that the app built for a server of its own."""
        routing = current_routing.get()
        return routing is not None and (routing.chat is None or self.is_copy_of(routing.chat))

    def _requests_tokens(self) -> bool:
        """Whether to request token ids: of any server but OpenAI's own, which refuses the field."""
        host = urlsplit(self.openai_api_base or "").hostname or "api.openai.com"
        return self._is_routed() or host != "api.openai.com"

    def _use_responses_api(self, payload: dict[str, Any]) -> bool:
        return not self._is_routed() and super()._use_responses_api(payload)

    def _get_request_payload(self, input_: Any, *, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        call = _current_call.get()
        if call is not None:
            call.shows_logprobs = bool(payload.get("logprobs"))
        if self._is_routed():
            node, route, seed = route_for_call()
            assert route is not None  # there is a routing
            payload, left_out_fields = payload_to_routed(payload, node, route, seed=seed, auto_tools=self.auto_tools)
            self.warn_left_out(node, left_out_fields)
            if call is not None:
                call.tokens.node, call.tokens.route, call.tokens.seed = node, route, seed
                call.tokens.max_tokens, call.tokens.provider = payload["max_tokens"], PROVIDER
        if self._requests_tokens() and "messages" in payload:
            payload["logprobs"] = True
            payload["extra_body"] = {**(payload.get("extra_body") or {}), "return_token_ids": True}
        return payload

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        """The parameters that callbacks receive, with the model that really answers."""
        params = super()._get_invocation_params(stop, **kwargs)
        route = calling_route()[1] if self._is_routed() else None
        if route is not None:
            params |= {"model": route.model, "model_name": route.model, "temperature": route.temperature}
        return params

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop, **kwargs)
        if self._is_routed():
            params["ls_provider"] = PROVIDER
        return params

    def _create_chat_result(self, response: Any, generation_info: dict[str, Any] | None = None) -> ChatResult:
        call = _current_call.get()
        try:
            result = super()._create_chat_result(response, generation_info)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if call is None or call.tokens.route is None:
                raise
            raise call.tokens.malformed_error(f"{type(error).__name__}: {error}") from error
        if call is None:
            return result
        if not call.streamed:  # a stream of structured output ends with the whole answer once more
            add_wire_answer(
                call.tokens, response if isinstance(response, dict) else response.model_dump(warnings=False)
            )
        for generation in result.generations:
            _hide_unrequested(call, generation)
        if not call.shows_usage and result.llm_output is not None:
            result.llm_output.pop("token_usage", None)
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        converted_chunk = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        call = _current_call.get()
        if call is None:
            return converted_chunk
        # A stream of structured output is one of events, some of which hold a chunk.
        wire_chunk: Mapping[str, Any] = (chunk.get("chunk") or {}) if "type" in chunk else chunk
        call.streamed = True
        add_wire_answer(call.tokens, wire_chunk)
        if wire_chunk.get("usage") and not wire_chunk.get("choices") and not call.shows_usage:
            return None  # the extra chunk that only we requested
        if converted_chunk is not None:
            _hide_unrequested(call, converted_chunk)
        return converted_chunk

    def model_for_server(self) -> NodeChat:
        """A copy of this model that calls the server of the calling node's route; itself where there is one server."""
        if not self._server_fields or not self._is_routed():
            return self
        route = calling_route()[1]
        fields = self._server_fields.get(route.server or "") if route is not None else None
        return self if fields is None else self.model_copy(update=fields)

    def _known_answer(self, tokens: ExactTokens, run_id: UUID | None) -> AIMessage | None:
        """The answer that the episode's prefix or a fixed text gives; None where the server is to be called."""
        if not self._is_routed():
            return None
        if (given := answer_given_call(run_id)) is not None:
            tokens.take(given.tokens)
            return given.message
        node, route = calling_route()
        return None if route is None or route.answer is None else fixed_answer(tokens, node, route)

    async def _await_known_answer(self, run_id: UUID | None) -> None:
        if self._is_routed():
            await await_given_call(run_id)

    def _open_stream_call(self, tokens: ExactTokens, options: dict[str, Any]) -> _Call:
        """A streamed call. Adds to `options` the request for the engine's own count of its tokens."""
        shows_usage = self._should_stream_usage(**options)
        if self._requests_tokens():
            options["stream_usage"] = True
        return _Call(tokens, shows_usage=shows_usage)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with capture_tokens(run_manager.run_id if run_manager else None) as tokens, _collect_into(_Call(tokens)):
            if (known_answer := self._known_answer(tokens, run_manager.run_id if run_manager else None)) is not None:
                return message_to_result(known_answer)
            result = super(NodeChat, self.model_for_server())._generate(messages, stop, run_manager, **kwargs)
            tokens.teacher = None if self.teacher is None else self.teacher.ask(messages)
            return result

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with capture_tokens(run_manager.run_id if run_manager else None) as tokens, _collect_into(_Call(tokens)):
            await self._await_known_answer(run_manager.run_id if run_manager else None)
            if (known_answer := self._known_answer(tokens, run_manager.run_id if run_manager else None)) is not None:
                return message_to_result(known_answer)
            result = await super(NodeChat, self.model_for_server())._agenerate(messages, stop, run_manager, **kwargs)
            tokens.teacher = None if self.teacher is None else await self.teacher.aask(messages)
            return result

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        # A generator runs in the context of its consumer, so the current call is set anew around each `next`.
        with capture_tokens(run_manager.run_id if run_manager else None) as tokens:
            if (known_answer := self._known_answer(tokens, run_manager.run_id if run_manager else None)) is not None:
                yield message_to_chunk(known_answer)
                return
            call = self._open_stream_call(tokens, kwargs)
            chunks = super(NodeChat, self.model_for_server())._stream(messages, stop, run_manager, **kwargs)
            while True:
                with _collect_into(call):
                    chunk = next(chunks, None)
                if chunk is None:
                    tokens.teacher = None if self.teacher is None else self.teacher.ask(messages)
                    return
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with capture_tokens(run_manager.run_id if run_manager else None) as tokens:
            await self._await_known_answer(run_manager.run_id if run_manager else None)
            if (known_answer := self._known_answer(tokens, run_manager.run_id if run_manager else None)) is not None:
                yield message_to_chunk(known_answer)
                return
            call = self._open_stream_call(tokens, kwargs)
            chunks = super(NodeChat, self.model_for_server())._astream(messages, stop, run_manager, **kwargs)
            while True:
                with _collect_into(call):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    tokens.teacher = None if self.teacher is None else await self.teacher.aask(messages)
                    return
                yield chunk


def _hide_unrequested(call: _Call, generation: Any) -> None:
    """Removes log-probs and counts, which are requested for the recorder, unless the app requested them itself."""
    info = generation.generation_info
    if info is not None and not call.shows_logprobs:
        info.pop("logprobs", None)
    if not call.shows_usage and hasattr(generation.message, "usage_metadata"):
        generation.message.usage_metadata = None
        if info is not None:
            info.pop("token_usage", None)
