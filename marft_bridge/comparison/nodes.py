"""Episodes of several variants -> what each node did in each of them.

Invariant: a figure that the record does not hold is None, never 0; a node that a variant does not have is absent. The
figures describe and judge nothing. The KL to the base is estimated in `kl`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marft_bridge.comparison.records import NodeSide
from marft_bridge.rewards.contract import RunView
from marft_bridge.rewards.facts import ToolCall, run_to_tool_calls, sampled_tokens
from trace_store import conventions as names
from trace_store.records import Action, SpanRow, Trajectory

Kl = Mapping[tuple[str, str], tuple[float | None, int]]
"""(node, variant) -> nats per sampled token, and the calls that the estimate rests on."""
SpansOf = Callable[[str], Sequence[SpanRow]]
"""Episode id -> its spans."""
_BY_ITSELF = ("stop", "tool_calls")


def episodes_to_nodes(
    by_variant: Mapping[str, Iterable[Trajectory]],
    nodes: Sequence[str],
    kl: Kl,
    spans_of: SpansOf = lambda _: (),
) -> dict[str, dict[str, NodeSide]]:
    """Node -> variant -> what it did; a node without a call is there where it was given a version to act by.

    Args:
        by_variant: the episodes, which may be streamed: each is read once.
        nodes: of all variants.
        kl: as `kl.adapters_to_kl` gives it.
        spans_of: without it, or where an episode's spans are gone, tools and formats are unknown.
    """
    sides: dict[str, dict[str, NodeSide]] = {node: {} for node in nodes}
    for variant, episodes in by_variant.items():
        counted = {node: _Counted() for node in nodes}
        for episode in episodes:
            spans = spans_of(episode.episode.episode_id)
            tools = run_to_tool_calls(RunView(episode.episode.task, None, episode, spans)) if spans else None
            for node, figures in counted.items():
                figures.add(node, episode, spans, tools)
        for node, figures in counted.items():
            if figures.calls or figures.expected:
                sides[node][variant] = figures.to_side(*kl.get((node, variant), (None, 0)))
    return {node: by_name for node, by_name in sides.items() if by_name}


@dataclass(slots=True)
class _Counted:
    """What one node did in one variant, so far."""

    episodes: int = 0
    expected: bool = False  # whether an episode had a version for it
    calls: int = 0
    lengths: list[int] = field(default_factory=list)
    finished: Counter[str] = field(default_factory=Counter)
    logprob_sum: float = 0.0
    logprobs: int = 0
    tools: Counter[str] = field(default_factory=Counter)
    tool_runs: int = 0
    tool_errors: int = 0
    fitting: list[bool] = field(default_factory=list)

    def add(
        self, node: str, episode: Trajectory, spans: Sequence[SpanRow], tool_calls: Sequence[ToolCall] | None
    ) -> None:
        """One episode."""
        calls = [action for action in episode.actions if action.node == node]
        self.episodes += 1
        self.expected |= node in episode.episode.adapters
        self.calls += len(calls)
        for call in calls:
            self._add_call(call)
        if tool_calls is None:
            return
        ids = {call.action_id for call in calls}
        chats = [span for span in spans if span.span_id in ids]
        ran = [call for call in tool_calls if call.agent == node]
        self.tool_runs += len(ran)
        self.tool_errors += sum(not call.ok for call in ran)
        # Where messages are not captured, what ran is what is known of what was asked for.
        written = any(names.OUTPUT_MESSAGES in span.attributes for span in chats)
        self.tools.update(_asked(chats) if written else (call.name for call in ran))
        judged = (span.attributes.get(names.FORMAT_VALID) for span in chats)
        self.fitting += [fits for fits in judged if isinstance(fits, bool)]

    def _add_call(self, call: Action) -> None:
        length = sampled_tokens(call)
        if length is not None:
            self.lengths.append(length)
        if call.finish_reason is not None:
            self.finished[call.finish_reason] += 1
        if call.logprobs is not None:
            self.logprob_sum += sum(call.logprobs)
            self.logprobs += len(call.logprobs)

    def to_side(self, kl: float | None, kl_actions: int) -> NodeSide:
        """The figures."""
        ended = self.finished.total()
        return NodeSide(
            calls_per_episode=self.calls / self.episodes,
            tokens_mean=_share(sum(self.lengths), len(self.lengths)),
            stop_share=_share(sum(self.finished[reason] for reason in _BY_ITSELF), ended),
            logprob_mean=_share(self.logprob_sum, self.logprobs),
            kl_to_base=kl,
            kl_actions=kl_actions,
            format_valid=_share(sum(self.fitting), len(self.fitting)),
            tools=dict(self.tools.most_common()),
            tool_error_share=_share(self.tool_errors, self.tool_runs),
        )


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None


def _asked(chats: Iterable[SpanRow]) -> Iterator[str]:
    """Names of the tools that answers ask for, as this recorder or the GenAI conventions (parts) write them."""
    for chat in chats:
        try:
            messages: Any = json.loads(chat.attributes.get(names.OUTPUT_MESSAGES) or "[]")
        except (TypeError, ValueError, RecursionError):
            continue
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                parts = [p for p in _dicts(message, "parts") if p.get("type") == "tool_call"]
                yield from (str(call.get("name")) for call in (*_dicts(message, "tool_calls"), *parts))


def _dicts(message: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = message.get(key)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
