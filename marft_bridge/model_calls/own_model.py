"""A node's own chat model -> the same model, which first gives the answer that is known of a call.

For nodes without a route: their models are no served ones, and yet the calls before a fork get their recorded answers,
and so do those of rounds that answer hosted nodes from the record.
Invariant: the class, the settings and the callbacks are the model's own; only the methods that make the request differ,
on the object alone.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any
from uuid import UUID

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from marft_bridge.model_calls.given_answers import (
    answer_given_call,
    await_given_call,
    message_to_chunk,
    message_to_result,
)
from marft_bridge.model_calls.token_capture import capture_tokens


def own_model_with_answers(model: BaseChatModel) -> BaseChatModel:
    """A copy of the model that asks the episode's prefix and record first; itself where it does so already."""
    if "_generate" in vars(model):
        return model
    copied = model.model_copy(update={"cache": False})  # a cached answer would be no recorded one
    copied.__dict__.update(_asking_first(model))
    return copied


def _asking_first(model: BaseChatModel) -> dict[str, Any]:
    generate, agenerate = model._generate, model._agenerate
    stream, astream = model._stream, model._astream

    # LangChain reads from the signatures beneath whether a method takes a run manager.
    @functools.wraps(generate)
    def given_generate(*args: Any, **kwargs: Any) -> ChatResult:
        message = _known_answer(kwargs)
        return generate(*args, **kwargs) if message is None else message_to_result(message)

    @functools.wraps(agenerate)
    async def given_agenerate(*args: Any, **kwargs: Any) -> ChatResult:
        await await_given_call(_run_id(kwargs))
        message = _known_answer(kwargs)
        return await agenerate(*args, **kwargs) if message is None else message_to_result(message)

    @functools.wraps(stream)
    def given_stream(*args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        message = _known_answer(kwargs)
        if message is None:
            yield from stream(*args, **kwargs)
        else:
            yield message_to_chunk(message)

    @functools.wraps(astream)
    async def given_astream(*args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        await await_given_call(_run_id(kwargs))
        message = _known_answer(kwargs)
        if message is not None:
            yield message_to_chunk(message)
            return
        async for chunk in astream(*args, **kwargs):
            yield chunk

    return {
        "_stream_chat_model_events": None,  # of providers that stream in LangChain's newer form, past `_stream`
        "_astream_chat_model_events": None,
        "_generate": given_generate,
        "_agenerate": given_agenerate,
        "_stream": given_stream,
        "_astream": given_astream,
    }


def _known_answer(arguments: Mapping[str, Any]) -> AIMessage | None:
    """The answer that is known, whose tokens are handed to the recorder; None where the model is to answer."""
    run_id = _run_id(arguments)
    given = answer_given_call(run_id)
    if given is None:
        return None
    with capture_tokens(run_id) as tokens:
        tokens.take(given.tokens)
    return given.message


def _run_id(arguments: Mapping[str, Any]) -> UUID | None:
    run_manager = arguments.get("run_manager")
    return None if run_manager is None else run_manager.run_id
