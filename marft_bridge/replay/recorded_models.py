"""A model that an app calls -> a model with its callbacks and tags that answers from the record.

Invariant: whatever the model, no request is made; a call that the record has no answer for raises `DivergedError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.llms import BaseLLM
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import (
    ChatGenerationChunk,
    ChatResult,
    Generation,
    GenerationChunk,
    LLMResult,
)
from langchain_core.runnables import Runnable
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, Field

from marft_bridge.model_calls.given_answers import message_to_chunk, message_to_result
from marft_bridge.model_calls.model_entries import Arguments
from marft_bridge.model_calls.token_capture import announced_call

# Fields of a model that decide what the app sees of a call, whoever answers.
_CHAT_FIELDS = ("callbacks", "tags", "metadata", "verbose", "disable_streaming", "name")
_LLM_FIELDS = ("callbacks", "tags", "metadata", "verbose", "name")


class AnswerSource(Protocol):
    """Gives back the answers of a record."""

    def take_answer(self, run_id: UUID | None, *, knows_settings: bool = True) -> AIMessage:
        """The answer of the call with this run id, when it is due. Raises what the call raised, or DivergedError.

        `knows_settings`: the model that the app called has its own, which are to be compared.
        """

    async def atake_answer(self, run_id: UUID | None, *, knows_settings: bool = True) -> AIMessage:
        """As `take_answer`."""


class RecordedChat(BaseChatModel):
    """Answers from a record, whatever it is asked for."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    source: Any = Field(default=None, exclude=True)
    """An AnswerSource; None for a model that an app is built with, which the replay's own stands in for."""
    asked_model: Any = Field(default=None, exclude=True)
    """The model that the app called; None where it was built with one of these, whose settings nobody gave."""
    cache: Any = Field(default=False, exclude=True)

    @property
    def _llm_type(self) -> str:
        return "recorded"

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        """What callbacks, and so the recorder, are told that the app asked for."""
        if self.asked_model is None:
            return super()._get_invocation_params(stop=stop, **kwargs)
        parameters: dict[str, Any] = self.asked_model._get_invocation_params(stop=stop, **kwargs)
        return parameters

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        if self.asked_model is None:
            return super()._get_ls_params(stop=stop, **kwargs)
        return _ls_params(self.asked_model, stop, kwargs)

    def bind_tools(self, tools: Sequence[Any], *, tool_choice: str | None = None, **options: Any) -> Runnable[Any, Any]:
        """The same model, which offers these tools as any other would."""
        choice_option = {} if tool_choice is None else {"tool_choice": tool_choice}
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **choice_option, **options)

    def _generate(
        self,
        messages: list[BaseMessage],  # noqa: ARG002
        stop: list[str] | None = None,  # noqa: ARG002
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> ChatResult:
        return message_to_result(self._take_answer(run_manager))

    async def _agenerate(
        self,
        messages: list[BaseMessage],  # noqa: ARG002
        stop: list[str] | None = None,  # noqa: ARG002
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> ChatResult:
        return message_to_result(await self._atake_answer(run_manager))

    def _stream(
        self,
        messages: list[BaseMessage],  # noqa: ARG002
        stop: list[str] | None = None,  # noqa: ARG002
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> Iterator[ChatGenerationChunk]:
        yield message_to_chunk(self._take_answer(run_manager))

    async def _astream(
        self,
        messages: list[BaseMessage],  # noqa: ARG002
        stop: list[str] | None = None,  # noqa: ARG002
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> AsyncIterator[ChatGenerationChunk]:
        yield message_to_chunk(await self._atake_answer(run_manager))

    def _take_answer(self, run_manager: Any) -> AIMessage:
        answer: AIMessage = self.source.take_answer(_run_of(run_manager), knows_settings=self.asked_model is not None)
        return answer

    async def _atake_answer(self, run_manager: Any) -> AIMessage:
        answer: AIMessage = await self.source.atake_answer(
            _run_of(run_manager), knows_settings=self.asked_model is not None
        )
        return answer


class RecordedLLM(BaseLLM):
    """A completion model that answers from a record."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    source: Any = Field(exclude=True)
    """An AnswerSource."""
    asked_model: Any = Field(exclude=True)
    """The model that the app called."""
    cache: Any = Field(default=False, exclude=True)

    @property
    def _llm_type(self) -> str:
        return "recorded"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        parameters: Mapping[str, Any] = self.asked_model._identifying_params
        return parameters

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return _ls_params(self.asked_model, stop, kwargs)

    # LangChain asks several prompts in one `_generate`, and tells it the run of the first one only.

    def _generate_helper(self, prompts: Any, stop: Any, run_managers: Any, **kwargs: Any) -> LLMResult:
        with _asking_together(run_managers):
            return super()._generate_helper(prompts, stop, run_managers, **kwargs)

    async def _agenerate_helper(self, prompts: Any, stop: Any, run_managers: Any, **kwargs: Any) -> LLMResult:
        with _asking_together(run_managers):
            return await super()._agenerate_helper(prompts, stop, run_managers, **kwargs)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,  # noqa: ARG002
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> LLMResult:
        texts, errors = [], []
        for run_id in _runs_of(prompts, run_manager):
            try:
                texts.append(str(self.source.take_answer(run_id).text))
            except Exception as error:  # noqa: BLE001 - what fails fails for all, and every call of it is taken
                errors.append(error)
        if errors:
            raise errors[0]
        return LLMResult(generations=[[Generation(text=text)] for text in texts])

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,  # noqa: ARG002
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> LLMResult:
        run_ids = _runs_of(prompts, run_manager)
        texts = []
        for answer in await asyncio.gather(*map(self.source.atake_answer, run_ids), return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
            texts.append(str(answer.text))
        return LLMResult(generations=[[Generation(text=text)] for text in texts])

    def _stream(
        self,
        prompt: str,  # noqa: ARG002
        stop: list[str] | None = None,  # noqa: ARG002
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> Iterator[GenerationChunk]:
        yield GenerationChunk(text=str(self.source.take_answer(_run_of(run_manager)).text))


def chat_stand_in(source: AnswerSource) -> Any:
    """Who answers in place of a chat model; see `model_entries.StandIn`."""
    prototype = RecordedChat(source=source)

    def stand_in(model: Any, arguments: Arguments, entry: str) -> tuple[Any, Arguments]:  # noqa: ARG001
        is_own = isinstance(model, RecordedChat)
        if is_own and model.source is source:
            return model, arguments
        fields = {name: getattr(model, name) for name in _CHAT_FIELDS}
        fields |= {"name": model.name or type(model).__name__, "asked_model": None if is_own else model}
        return prototype.model_copy(update=fields), arguments

    return stand_in


def llm_stand_in(source: AnswerSource) -> Any:
    """Who answers in place of a completion model; see `model_entries.StandIn`."""
    prototype = RecordedLLM(source=source, asked_model=None)

    def stand_in(model: Any, arguments: Arguments, entry: str) -> tuple[Any, Arguments]:  # noqa: ARG001
        if isinstance(model, RecordedLLM):
            return model, arguments
        fields = {name: getattr(model, name) for name in _LLM_FIELDS}
        return prototype.model_copy(update=fields | {"asked_model": model}), arguments

    return stand_in


def _ls_params(model: Any, stop: list[str] | None, options: Mapping[str, Any]) -> LangSmithParams:
    """What callbacks are told of a model besides: its name, where its parameters do not have it."""
    parameters: LangSmithParams = model._get_ls_params(stop=stop, **options)
    return parameters


_asked_together: ContextVar[Sequence[UUID]] = ContextVar("marft_asked_together", default=())


@contextmanager
def _asking_together(run_managers: Sequence[Any]) -> Iterator[None]:
    """While the block runs, one `_generate` is asked the prompts of these runs."""
    reset_token = _asked_together.set([run_manager.run_id for run_manager in run_managers])
    try:
        yield
    finally:
        _asked_together.reset(reset_token)


def _runs_of(prompts: Sequence[str], run_manager: Any) -> Sequence[UUID | None]:
    """The run id of each prompt."""
    run_ids = _asked_together.get()
    return run_ids if len(run_ids) == len(prompts) else [_run_of(run_manager)] * len(prompts)


def _run_of(run_manager: Any) -> UUID | None:
    """The run id of a call; LangChain does not tell it to every model that streams, the recorder does."""
    if run_manager is not None:
        run_id: UUID = run_manager.run_id
        return run_id
    announced = announced_call.get()
    return None if announced is None else announced[0]
