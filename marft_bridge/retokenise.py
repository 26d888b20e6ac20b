"""Stored calls whose token ids no engine told -> actions with ids from the base model's template and tokenizer.

A hosted model tells no ids, and somebody else's trace holds none. What is left are messages. The prompt is what today's
engine would build of them; the answer is what the template makes of it behind that prompt, up to the token that ends a
turn. Invariants: such an action has no log-probs and no temperature and says RETOKENISED, which nothing but imitation
takes; an answer that the template does not render word for word behind the prompt is left as it is, with the reason;
the ending token is there only where the record says that the model ended by itself. Nothing is written to a store.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from marft_bridge.bases import Base
from marft_bridge.errors import ConfigError
from marft_bridge.recorded_messages import ChatMessage, NotAChat, RecordedChat, span_to_chat
from trace_store import conventions as c
from trace_store.records import FROM_ENGINE, RETOKENISED, TOOLS_OF, Action, Episode, SpanRow, Trajectory

NOT_RETOKENISED = "not re-tokenised"
LEFT_OUT = (
    "stored calls have no token ids of an engine and are not learned from; "
    "offline.retokenise with offline.mode 'filtered' imitates such calls"
)
ENDED = frozenset({"stop", "end_turn", "eos", "STOP", "tool_calls", "tool_use", "function_call"})
CUT = frozenset({"length", "max_tokens", "MAX_TOKENS"})


@dataclass(frozen=True, slots=True)
class ChatIds:
    """A call as token ids."""

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
        """A call as the engine would have read and sampled it; with `ended` the token that ends the turn is sampled.

        Raises:
            NotAChat: the template refuses the messages, or does not render the answer as it was said.
        """
        spoken = chat.answer["content"] + json.dumps(chat.answer.get("tool_calls", []), ensure_ascii=False)
        if any(token in spoken for token in self._control):
            raise NotAChat("the answer holds a control token of the base model")
        before = self._render(chat.prompt, chat.tools, True)
        whole = self._render([*chat.prompt, chat.answer], chat.tools, False)
        if not whole.startswith(before):
            raise NotAChat("the chat template renders the prompt otherwise once it is answered")
        said, stop = self._turn(whole[len(before) :], chat.answer)
        prompt, sampled = self._encode(before), self._encode(before + said + (stop if ended else ""))
        if sampled[: len(prompt)] != prompt or len(sampled) == len(prompt):
            raise NotAChat("prompt and answer share a token")
        if ended and sampled[-1] != self._stops[stop]:
            raise NotAChat("the chat template ends the answer with no token at which the model stops")
        return ChatIds(tuple(prompt), tuple(sampled[len(prompt) :]))

    def _turn(self, rest: str, answer: ChatMessage) -> tuple[str, str]:
        """What stands behind the prompt -> the answer as it is rendered, and the token that ends it."""
        ends = [(place, stop) for stop in self._stops if (place := rest.find(stop)) >= 0]
        if not ends:
            raise NotAChat("the chat template ends the answer with no token at which the model stops")
        end, stop = min(ends)
        said = rest[:end]
        calls = answer.get("tool_calls", ())
        # White space in front is the template's, and the model's that was trained with it.
        faithful = said == answer["content"] or said.lstrip() == answer["content"].lstrip() != ""
        if calls:
            parts = [answer["content"], *(part for call in calls for part in _call_texts(call["function"]))]
            faithful = all(part in said for part in parts)
        if not faithful:
            raise NotAChat("the chat template does not render the answer as it was said")
        return said, stop

    def _render(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], asks: bool) -> str:
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, add_generation_prompt=asks, tokenize=False
            )
        except Exception:  # noqa: BLE001 - a template raises what it likes, and may quote the messages
            raise NotAChat("the chat template refuses its messages") from None
        return rendered

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


class Retokeniser:
    """Makes ids for the calls of some nodes, and counts what it made and could not make.

    Args:
        tokenizer: of the base model; None makes nothing, and only counts.
        nodes: whose calls are wanted; those of others stay as they are.
        limits: tokens of prompt and answer together that may not be exceeded; None is no limit.
    """

    def __init__(
        self, tokenizer: ChatTokenizer | None, nodes: Collection[str], limits: Sequence[int | None] = ()
    ) -> None:
        self._of_node: dict[str, tuple[ChatTokenizer | None, int | None]] = {}
        self.add(tokenizer, nodes, limits)
        self.lacking = 0  # calls that lack ids and nothing else
        self.made = 0  # of them those that got some
        self.open_ended = 0  # of these those whose end the record does not tell
        self.refused: Counter[str] = Counter()  # and those that got none, by reason

    def add(self, tokenizer: ChatTokenizer | None, nodes: Collection[str], limits: Sequence[int | None] = ()) -> None:
        """Nodes that run on another base model; the arguments are those of the class."""
        longest = min((limit for limit in limits if limit is not None), default=None)
        self._of_node |= dict.fromkeys(nodes, (tokenizer, longest))

    def trajectory_to_retokenised(
        self, trajectory: Trajectory, spans_of: Callable[[str], Sequence[SpanRow]]
    ) -> Trajectory:
        """The trajectory with ids for the calls that lack nothing else; itself where there are none.

        Args:
            spans_of: the spans of a trace, by its id.
        """
        lacking = sum(_lacks_ids(action, self._of_node) for action in trajectory.actions)
        self.lacking += lacking
        if not self._makes or not lacking:
            return trajectory
        spans = {span.span_id: span for span in spans_of(trajectory.episode.episode_id)}
        actions = (
            self._action(action, trajectory.episode, spans.get(action.action_id))
            if _lacks_ids(action, self._of_node)
            else action
            for action in trajectory.actions
        )
        return replace(trajectory, actions=tuple(actions))

    @property
    def _makes(self) -> bool:
        return any(tokenizer is not None for tokenizer, _ in self._of_node.values())

    def _action(self, action: Action, episode: Episode, span: SpanRow | None) -> Action:
        tokenizer, longest = self._of_node[action.node]
        if tokenizer is None:
            return action
        try:
            ids, known_end = self._ids(action, episode, span, tokenizer, longest)
        except NotAChat as error:
            self.refused[str(error)] += 1
            return replace(action, untrainable_reason=f"{NOT_RETOKENISED}: {error}")
        self.made += 1
        self.open_ended += not known_end
        return replace(
            action,
            prompt_ids=ids.prompt,
            sampled_ids=ids.answer,
            logprobs=None,
            temperature=None,
            trainable=False,
            untrainable_reason=RETOKENISED,
        )

    def _ids(
        self, action: Action, episode: Episode, span: SpanRow | None, tokenizer: ChatTokenizer, longest: int | None
    ) -> tuple[ChatIds, bool]:
        """The call as ids, and whether the record tells how its answer ended."""
        if span is None:
            raise NotAChat("its span is not stored")
        if span.status != "ok":
            raise NotAChat("the call failed")
        if action.finish_reason == "content_filter":
            raise NotAChat("a filter of the provider cut the answer")
        offers = f"{TOOLS_OF}{action.node}" in episode.lineage  # by their hash: our recorder does not keep them
        # At a stop sequence the provider ends the answer, not the model, and both are called "stop".
        ended = action.finish_reason in ENDED and not span.attributes.get(c.REQUEST_STOP)
        ids = tokenizer.chat_to_ids(span_to_chat(span, offers_tools=offers), ended=ended)
        if longest is not None and len(ids.prompt) + len(ids.answer) > longest:
            raise NotAChat("longer than the base model reads")
        return ids, ended or action.finish_reason in CUT

    def said(self) -> str | None:
        """What was made and what was not, in one line; None where every call has its ids."""
        if not self._makes:
            return f"{self.lacking} {LEFT_OUT}" if self.lacking else None
        parts = [f"{self.made} of {self.lacking} stored calls without token ids were re-tokenised for imitation"]
        if self.open_ended:
            parts.append(f"{self.open_ended} of them without a known end, so without the token that ends a turn")
        parts += [f"not {count}: {reason}" for reason, count in sorted(self.refused.items())]
        return "; ".join(parts)


def bases_to_retokeniser(bases: Sequence[Base], nodes: Collection[str], wanted: bool) -> Retokeniser:
    """For these nodes of a configuration; where ids are not `wanted`, one that only counts what lacks them.

    Raises as `ChatTokenizer`.
    """
    made = Retokeniser(None, ())
    for base in bases:
        its = [node for node in base.nodes if node in nodes]
        # a server that runs already has a limit of its own
        served = base.serve.max_model_len if base.serve.attach is None else None
        if its:
            tokenizer = ChatTokenizer(base.directory) if wanted else None
            made.add(tokenizer, its, [served, longest_call(base.directory)])
    return made


def _lacks_ids(action: Action, nodes: Collection[str]) -> bool:
    told = action.prompt_ids and action.sampled_ids
    return action.node in nodes and not told and (action.untrainable_reason or "").endswith(FROM_ENGINE)


def longest_call(model_dir: Path) -> int | None:
    """Tokens that the base model reads at most, as its configuration says; None where it does not."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    found = config.get("max_position_embeddings") or (config.get("text_config") or {}).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _stop_ids(model_dir: Path) -> set[int]:
    """The ids at which the engine ends an answer besides the tokenizer's own, as the generation configuration says."""
    path = model_dir / "generation_config.json"
    named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    return set(named) if isinstance(named, list) else set() if named is None else {named}


def _call_texts(function: dict[str, Any]) -> list[str]:
    """What a rendered tool call has to show: its name, and the words among its arguments."""
    values = function["arguments"].values()
    return [function["name"], *(value for value in values if isinstance(value, str) and value.isalnum())]
