"""Stored calls without an engine's token ids -> actions with ids from the base model's chat template and tokenizer.

A hosted model reports no ids, and another program's trace holds none: only the messages are left. The prompt is what
today's engine would build from them; the answer is what the template renders behind that prompt, up to the token that
ends a turn. Invariants: such an action has no log-probs and no temperature and is marked RETOKENISED, which only
imitation accepts; an action whose answer the template does not render word for word keeps its state and gets the
reason; the ending token is there only where the record says that the model ended by itself. Nothing is stored.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from marft_bridge.common.digests import canonical_json
from marft_bridge.common.errors import ConfigError
from marft_bridge.ingest.recorded_chats import (
    ChatMessage,
    RecordedChat,
    UnusableChatError,
    attributes_to_tools,
    span_to_chat,
)
from marft_bridge.recording.tool_lineage import tools_to_lineage
from marft_bridge.serving.base_models import BaseModelSpec
from marft_bridge.serving.model_config import context_length
from trace_store import conventions as c
from trace_store.records import FROM_ENGINE, RETOKENISED, TOOLS_OF, Action, SpanRow, Trajectory

NOT_RETOKENISED = "not re-tokenised"
WITHOUT_IDS = (
    "stored calls have no token ids of an engine and are not learned from; "
    "offline.retokenise with offline.mode 'filtered' imitates such calls"
)
STOP_REASONS = frozenset({"stop", "end_turn", "eos", "STOP", "tool_calls", "tool_use", "function_call"})
LENGTH_REASONS = frozenset({"length", "max_tokens", "MAX_TOKENS"})


@dataclass(frozen=True, slots=True)
class ChatIds:
    """The token ids of a call."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class ChatTokenizer:
    """The chat template and the tokenizer of a model directory.

    Raises:
        ConfigError: it has no chat template, or names no token at which an answer ends.
    """

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        if self._tokenizer.chat_template is None:
            raise ConfigError(f"offline.retokenise: the model in {model_dir} has no chat template to render calls with")
        stops = _stop_ids(model_dir) | {self._tokenizer.eos_token_id} - {None}
        self._stops = {str(self._tokenizer.convert_ids_to_tokens(stop)): stop for stop in stops}
        if not self._stops:
            raise ConfigError(f"offline.retokenise: the model in {model_dir} names no token at which an answer ends")
        added = self._tokenizer.added_tokens_decoder.values()
        self._control = {*self._stops, *(str(token) for token in added if token.special)}

    def chat_to_ids(self, chat: RecordedChat, *, ended: bool) -> ChatIds:
        """The ids that the engine would have read and sampled for a call.

        Args:
            ended: whether the model ended the answer by itself, so that the token that ends the turn was sampled.

        Raises:
            UnusableChatError: the template refuses the messages, or does not render the answer as it was given.
        """
        prompt_text, answer_text, stop = self._texts(chat)
        if chat.tools and self._render(chat.prompt, (), True) == prompt_text:
            # Learning only from those of its answers that call no tool would teach it to call none.
            raise UnusableChatError("the chat template does not show the tools that it offered")
        prompt, sampled = self._encode(prompt_text), self._encode(prompt_text + answer_text + (stop if ended else ""))
        if sampled[: len(prompt)] != prompt or len(sampled) == len(prompt):
            raise UnusableChatError("prompt and answer share a token")
        if ended and sampled[-1] != self._stops[stop]:
            raise UnusableChatError("the chat template ends the answer with no token at which the model stops")
        return ChatIds(tuple(prompt), tuple(sampled[len(prompt) :]))

    def answer_to_ids(self, chat: RecordedChat, *, ended: bool) -> tuple[int, ...]:
        """The ids of the answer alone, for a call whose prompt ids the engine told; else as `chat_to_ids`."""
        _, answer_text, stop = self._texts(chat)
        sampled = self._encode(answer_text + (stop if ended else ""))
        if not sampled or (ended and sampled[-1] != self._stops[stop]):
            raise UnusableChatError("the chat template ends the answer with no token at which the model stops")
        return tuple(sampled)

    def _texts(self, chat: RecordedChat) -> tuple[str, str, str]:
        """A call as it is rendered: the prompt, the answer behind it, and the token that ends that."""
        answer_content = chat.answer["content"] + json.dumps(chat.answer.get("tool_calls", []), ensure_ascii=False)
        if any(token in answer_content for token in self._control):
            raise UnusableChatError("the answer holds a control token of the base model")
        prompt_text = self._render(chat.prompt, chat.tools, True)
        full_text = self._render([*chat.prompt, chat.answer], chat.tools, False)
        if not full_text.startswith(prompt_text):
            raise UnusableChatError("the chat template renders the prompt otherwise once it is answered")
        return prompt_text, *self._turn(full_text[len(prompt_text) :], chat.answer)

    def _turn(self, rest: str, answer: ChatMessage) -> tuple[str, str]:
        """The rendered text behind the prompt -> the answer as it is rendered, and the token that ends it."""
        ends = [(index, stop) for stop in self._stops if (index := rest.find(stop)) >= 0]
        if not ends:
            raise UnusableChatError("the chat template ends the answer with no token at which the model stops")
        end, stop = min(ends)
        answer_text = rest[:end]
        calls = answer.get("tool_calls", ())
        # A template may strip or add white space in front of an answer, as the model was trained with it.
        is_verbatim = answer_text == answer["content"] or answer_text.lstrip() == answer["content"].lstrip() != ""
        if calls:
            parts = [answer["content"], *(part for call in calls for part in _call_texts(call["function"]))]
            is_verbatim = all(part in answer_text for part in parts)
        if not is_verbatim:
            raise UnusableChatError("the chat template does not render the answer as it was said")
        return answer_text, stop

    def _render(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], add_generation_prompt: bool
    ) -> str:
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except Exception:  # noqa: BLE001 - a template may raise anything, and may quote the messages
            raise UnusableChatError("the chat template refuses its messages") from None
        return rendered

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


class Retokeniser:
    """Makes ids for the calls of some nodes, and counts those that it made ids for and those that it could not.

    Args:
        tokenizer: of the base model; None makes no ids, and only counts.
        nodes: whose calls get ids; other nodes' calls stay as they are.
        limits: upper limits on the tokens of prompt and answer together; None is no limit.
    """

    def __init__(
        self, tokenizer: ChatTokenizer | None, nodes: Collection[str], limits: Sequence[int | None] = ()
    ) -> None:
        self._by_node: dict[str, tuple[ChatTokenizer | None, int | None]] = {}  # node -> tokenizer, token limit
        self.add(tokenizer, nodes, limits)
        self.without_ids = 0  # calls that lack ids and nothing else
        self.retokenised = 0  # those of them that got ids
        self.open_ended = 0  # those of `retokenised` whose end is not recorded
        self.refused: Counter[str] = Counter()  # reason -> calls that got no ids

    def add(self, tokenizer: ChatTokenizer | None, nodes: Collection[str], limits: Sequence[int | None] = ()) -> None:
        """Adds nodes that run on another base model; the arguments are those of the class."""
        max_tokens = min((limit for limit in limits if limit is not None), default=None)
        self._by_node |= dict.fromkeys(nodes, (tokenizer, max_tokens))

    def trajectory_to_retokenised(
        self, trajectory: Trajectory, spans_of: Callable[[str], Sequence[SpanRow]]
    ) -> Trajectory:
        """The trajectory with ids for the calls that lack nothing else; the same object where there are none.

        Args:
            spans_of: the spans of a trace, by its id.
        """
        without_ids = sum(_lacks_only_ids(action, self._by_node) for action in trajectory.actions)
        self.without_ids += without_ids
        if not self._has_tokenizer or not without_ids:
            return trajectory
        spans = {span.span_id: span for span in spans_of(trajectory.episode.episode_id)}
        lacking_nodes = _nodes_that_lack_tools(trajectory.episode.lineage, spans.values())
        actions = (
            self._action(action, spans.get(action.action_id), offers_tools=action.node in lacking_nodes)
            if _lacks_only_ids(action, self._by_node)
            else action
            for action in trajectory.actions
        )
        return replace(trajectory, actions=tuple(actions))

    @property
    def _has_tokenizer(self) -> bool:
        return any(tokenizer is not None for tokenizer, _ in self._by_node.values())

    def _action(self, action: Action, span: SpanRow | None, *, offers_tools: bool) -> Action:
        tokenizer, max_tokens = self._by_node[action.node]
        if tokenizer is None:
            return action
        try:
            ids, end_is_known = span_to_ids(
                span, tokenizer, finish_reason=action.finish_reason, offers_tools=offers_tools, max_tokens=max_tokens
            )
        except UnusableChatError as error:
            self.refused[str(error)] += 1
            return replace(action, untrainable_reason=f"{NOT_RETOKENISED}: {error}")
        self.retokenised += 1
        self.open_ended += not end_is_known
        return replace(
            action,
            prompt_ids=ids.prompt,
            sampled_ids=ids.answer,
            logprobs=None,
            temperature=None,
            trainable=False,
            untrainable_reason=RETOKENISED,
        )

    def summary(self) -> str | None:
        """The counts in one line; None where every call has its ids."""
        if not self._has_tokenizer:
            return f"{self.without_ids} {WITHOUT_IDS}" if self.without_ids else None
        parts = [
            f"{self.retokenised} of {self.without_ids} stored calls without token ids were re-tokenised for imitation"
        ]
        if self.open_ended:
            parts.append(f"{self.open_ended} of them without a known end, so without the token that ends a turn")
        parts += [f"not {count}: {reason}" for reason, count in sorted(self.refused.items())]
        return "; ".join(parts)


def span_to_ids(
    span: SpanRow | None,
    tokenizer: ChatTokenizer,
    *,
    finish_reason: str | None,
    offers_tools: bool,
    max_tokens: int | None,
) -> tuple[ChatIds, bool]:
    """The ids of a recorded call, and whether the record tells how its answer ended.

    Args:
        span: of the call; None where it is not stored.
        finish_reason: of its action.
        offers_tools: whether the call's node is known to have offered tools that its spans do not hold.
        max_tokens: upper limit on prompt and answer together; None is no limit.

    Raises:
        UnusableChatError: the call cannot be imitated by this base model; the message is the reason.
    """
    if span is None:
        raise UnusableChatError("its span is not stored")
    if span.status != "ok":
        raise UnusableChatError("the call failed")
    if finish_reason == "content_filter":
        raise UnusableChatError("a filter of the provider cut the answer")
    # A provider that ends the answer at a stop sequence reports "stop" too, as if the model had ended it.
    ended = finish_reason in STOP_REASONS and not span.attributes.get(c.REQUEST_STOP)
    ids = tokenizer.chat_to_ids(span_to_chat(span, offers_tools=offers_tools), ended=ended)
    if max_tokens is not None and len(ids.prompt) + len(ids.answer) > max_tokens:
        raise UnusableChatError("longer than the base model reads")
    return ids, ended or finish_reason in LENGTH_REASONS


def _nodes_that_lack_tools(lineage: Mapping[str, str], spans: Iterable[SpanRow]) -> set[str]:
    """The nodes that are known to have offered tools which their spans do not hold, or not all of them.

    Of the others a call without tools offered none.
    """
    offered_tools: dict[str, set[str]] = {}
    for span in spans:
        with suppress(UnusableChatError):
            tools = attributes_to_tools(span.attributes)
            offered_tools.setdefault(span.attributes.get(c.NODE, ""), set()).update(map(canonical_json, tools))
    held = tools_to_lineage(offered_tools)
    return {key.removeprefix(TOOLS_OF) for key, digest in lineage.items() if key.startswith(TOOLS_OF)} - {
        key.removeprefix(TOOLS_OF) for key, digest in held.items() if lineage.get(key) == digest
    }


def bases_to_retokeniser(bases: Sequence[BaseModelSpec], nodes: Collection[str], retokenise: bool) -> Retokeniser:
    """A retokeniser for these nodes on their base models; without `retokenise` it only counts the calls without ids.

    Raises as `ChatTokenizer`.
    """
    retokeniser = Retokeniser(None, ())
    for base in bases:
        its_nodes = [node for node in base.nodes if node in nodes]
        if its_nodes:
            tokenizer = ChatTokenizer(base.directory) if retokenise else None
            retokeniser.add(tokenizer, its_nodes, _base_to_limits(base))
    return retokeniser


def bases_to_tokenizers(
    bases: Sequence[BaseModelSpec], nodes: Collection[str]
) -> dict[str, tuple[ChatTokenizer, int | None]]:
    """Node -> the tokenizer of its base model, and the most tokens of prompt and answer together; None: no limit.

    Raises as `ChatTokenizer`.
    """
    tokenizers: dict[str, tuple[ChatTokenizer, int | None]] = {}
    for base in bases:
        its_nodes = [node for node in base.nodes if node in nodes]
        if its_nodes:
            limit = min((each for each in _base_to_limits(base) if each is not None), default=None)
            tokenizers |= dict.fromkeys(its_nodes, (ChatTokenizer(base.directory), limit))
    return tokenizers


def _base_to_limits(base: BaseModelSpec) -> list[int | None]:
    # a server that runs already, or sizes itself, has a limit of its own, which is not known here
    return [base.serve.max_model_len if base.serve.attach is None else None, context_length(base.directory)]


def _lacks_only_ids(action: Action, nodes: Collection[str]) -> bool:
    has_ids = action.prompt_ids and action.sampled_ids
    return action.node in nodes and not has_ids and (action.untrainable_reason or "").endswith(FROM_ENGINE)


def _stop_ids(model_dir: Path) -> set[int]:
    """The ids at which the engine ends an answer besides the tokenizer's own: those of generation_config.json."""
    path = model_dir / "generation_config.json"
    eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    return set(eos) if isinstance(eos, list) else set() if eos is None else {eos}


def _call_texts(function: dict[str, Any]) -> list[str]:
    """The texts that a rendered tool call has to hold: its name, and arguments of letters and digits, which no template
    escapes."""
    values = function["arguments"].values()
    return [function["name"], *(value for value in values if isinstance(value, str) and value.isalnum())]
