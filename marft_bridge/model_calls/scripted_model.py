"""A chat model that answers from a script: for tests and dry runs, ours and our users'.

It replaces the model server: it answers each node with text and hands exact token ids and log-probs to the recorder.
Its tokenizer is the simplest that round-trips: one id per UTF-8 byte. It keeps the calls that it answered
(`ScriptedPolicy.calls`), so that a test can check what the model saw.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import PrivateAttr

from marft_bridge.model_calls.given_answers import answer_given_call, message_to_result
from marft_bridge.model_calls.routing import route_for_call
from marft_bridge.model_calls.scripted_answer import fixed_answer
from marft_bridge.model_calls.token_capture import ExactTokens, announcement_of, hand_over_tokens

END_OF_TURN = 256  # token id of the end of an answer; 0 to 255 are the bytes

Script = Callable[[str, str, random.Random], str]
"""(node, prompt text, random generator seeded by the call) -> answer."""


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """One call that the scripted policy answered."""

    node: str
    model: str | None
    prompt: str
    answer: str


def text_to_ids(text: str) -> list[int]:
    """Token ids of a text: its UTF-8 bytes."""
    return list(text.encode())


class ScriptedPolicy(BaseChatModel):
    """Answers by node: from a list (each answer once, in order), or from a function."""

    script: Script | None = None
    answers: Mapping[str, Sequence[str]] = {}
    logprob: float = -1.0
    """Log-prob that is reported for every token."""
    delay_s: float = 0.0
    """Seconds that each call takes."""
    _calls: list[ScriptedCall] = PrivateAttr(default_factory=list)

    @property
    def asked(self) -> list[ScriptedCall]:
        """Every call so far, in order. (Apps and their tests know the attribute by this name.)"""
        return self._calls

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], *, tool_choice: str | None = None, **options: Any) -> Runnable[Any, Any]:
        """The same model with tools bound, of which it calls none: for apps that bind tools when they are built."""
        choice_option = {} if tool_choice is None else {"tool_choice": tool_choice}
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **choice_option, **options)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        announced = announcement_of(run_manager.run_id if run_manager else None)
        if (given := answer_given_call(run_manager.run_id if run_manager else None)) is not None:
            hand_over_tokens(announced, given.tokens)
            return message_to_result(given.message)
        node, route, seed = route_for_call()
        if route is not None and route.answer is not None:
            message = fixed_answer(fixed_tokens := ExactTokens(), node, route)
            hand_over_tokens(announced, fixed_tokens)
            return message_to_result(message)
        prompt = "\n".join(f"{message.type}: {message.text}" for message in messages) + "\nai: "
        if self.delay_s:  # sleeping for 0 seconds gives the core away
            time.sleep(self.delay_s)
        answer = self._answer(node, prompt, seed)
        self._calls.append(ScriptedCall(node, route.model if route else None, prompt, answer=answer))
        sampled_ids = [*text_to_ids(answer), END_OF_TURN]
        tokens = ExactTokens(
            route=route,
            seed=seed,
            prompt_ids=text_to_ids(prompt),
            sampled_ids=sampled_ids,
            logprobs=[self.logprob] * len(sampled_ids),
            node=node,
            max_tokens=route.max_tokens if route else None,
        )
        hand_over_tokens(announced, tokens)
        usage = {"input_tokens": len(prompt.encode()), "output_tokens": len(sampled_ids)}
        message = AIMessage(
            answer,
            usage_metadata={**usage, "total_tokens": sum(usage.values())},
            response_metadata={"model_name": route.model if route else "scripted"},
        )
        return ChatResult(generations=[ChatGeneration(message=message, generation_info={"finish_reason": "stop"})])

    def _answer(self, node: str, prompt: str, seed: int | None) -> str:
        if self.script is not None:
            return self.script(node, prompt, random.Random(seed))
        answers = self.answers.get(node, ())
        used_count = sum(1 for call in self._calls if call.node == node)
        if used_count >= len(answers):
            raise LookupError(f"the script has {len(answers)} answers for node {node!r}; call {used_count + 1} came")
        return answers[used_count]
