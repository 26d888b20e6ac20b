"""Episodes of several variants -> what each node did in each of them: who answered, calls, cost, tools, formats.

Invariants: every node that made a call is there, also one that no configuration names; a figure that the record does
not hold is None, never 0; a node that a variant does not have is absent. The KL to the base model is estimated in `kl`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marft_bridge.comparison.records import NodeSide
from marft_bridge.rewards.contract import RunView
from marft_bridge.rewards.facts import ToolCall, run_to_tool_calls, sampled_tokens
from trace_store import conventions as names
from trace_store.json_text import read_json
from trace_store.records import Action, SpanRow, Trajectory

KlEstimates = Mapping[tuple[str, str], tuple[float | None, int]]
"""(node, variant) -> nats per sampled token, and the calls that the estimate rests on."""
SpansOf = Callable[[str], Sequence[SpanRow]]
"""Episode id -> its spans."""
NodeMoney = Mapping[tuple[str, str], float]
"""(episode id, node) -> what the node's calls cost there; absent where that of a call is not known."""
_UNFORCED_FINISH_REASONS = ("stop", "tool_calls")


def episodes_to_nodes(
    by_variant: Mapping[str, Iterable[Trajectory]],
    nodes: Sequence[str],
    kl: KlEstimates,
    spans_of: SpansOf = lambda _: (),
    money: Mapping[str, NodeMoney] | None = None,
) -> dict[str, dict[str, NodeSide]]:
    """Node -> variant -> what it did; a node without calls has figures where an episode had an adapter version for it.

    Args:
        by_variant: the episodes, which may be streamed: each is read once.
        nodes: of all variants, as they are configured.
        kl: as `kl.adapters_to_kl` returns it.
        spans_of: without it, or where an episode's spans are erased, tools and formats are unknown.
        money: of each variant, where there are prices.
    """
    sides: dict[str, dict[str, NodeSide]] = {node: {} for node in nodes}
    for variant, episodes in by_variant.items():
        tallies = {node: _NodeTally() for node in nodes}
        node_money = None if money is None else money[variant]
        episode_count = 0
        for episode in episodes:
            episode_count += 1
            for node in {action.node for action in episode.actions}:
                tallies.setdefault(node, _NodeTally())
            spans = spans_of(episode.episode.episode_id)
            tools = run_to_tool_calls(RunView(episode.episode.task, None, episode, spans=spans)) if spans else None
            for node, tally in tallies.items():
                tally.add(node, episode, spans, tool_calls=tools)
                if node_money is not None:
                    tally.add_money(node, episode, node_money)
        for node, tally in tallies.items():
            if tally.calls or tally.expected:
                estimate = kl.get((node, variant), (None, 0))
                sides.setdefault(node, {})[variant] = tally.to_side(episode_count, estimate)
    return {node: by_name for node, by_name in sides.items() if by_name}


@dataclass(slots=True)
class _NodeTally:
    """Running counts of one node in one variant."""

    expected: bool = False  # whether some episode had an adapter version for it
    calls: int = 0
    answered_by: Counter[str] = field(default_factory=Counter)
    acting_episodes: int = 0
    costs: list[float] = field(default_factory=list)  # of the episodes in which it acted, as far as they are known
    lengths: list[int] = field(default_factory=list)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    logprob_sum: float = 0.0
    logprobs: int = 0
    tools: Counter[str] = field(default_factory=Counter)
    tool_calls_made: int = 0
    tool_errors: int = 0
    format_checks: list[bool] = field(default_factory=list)

    def add(
        self, node: str, episode: Trajectory, spans: Sequence[SpanRow], tool_calls: Sequence[ToolCall] | None
    ) -> None:
        """Counts one episode. `tool_calls` are those of all nodes; None where its spans are not there."""
        calls = [action for action in episode.actions if action.node == node]
        self.expected |= node in episode.episode.adapters
        self.calls += len(calls)
        for call in calls:
            self._add_call(call)
        if tool_calls is None:
            return
        call_ids = {call.action_id for call in calls}
        chat_spans = [span for span in spans if span.span_id in call_ids]
        own_tool_calls = [call for call in tool_calls if call.agent == node]
        self.tool_calls_made += len(own_tool_calls)
        self.tool_errors += sum(not call.ok for call in own_tool_calls)
        # Where messages are not captured, the tools that ran stand in for those that the model asked for.
        has_messages = any(names.OUTPUT_MESSAGES in span.attributes for span in chat_spans)
        self.tools.update(_requested_tools(chat_spans) if has_messages else (call.name for call in own_tool_calls))
        validity = (span.attributes.get(names.FORMAT_VALID) for span in chat_spans)
        self.format_checks += [fits for fits in validity if isinstance(fits, bool)]

    def add_money(self, node: str, episode: Trajectory, node_money: NodeMoney) -> None:
        """Counts what the episode's calls of the node cost, where it made any and that is known."""
        cost = node_money.get((episode.episode.episode_id, node))
        acted = any(action.node == node for action in episode.actions)
        self.acting_episodes += acted
        if acted and cost is not None:
            self.costs.append(cost)

    def _add_call(self, call: Action) -> None:
        self.answered_by[_answerer(call)] += 1
        length = sampled_tokens(call)
        if length is not None:
            self.lengths.append(length)
        if call.finish_reason is not None:
            self.finish_reasons[call.finish_reason] += 1
        if call.logprobs is not None:
            self.logprob_sum += sum(call.logprobs)
            self.logprobs += len(call.logprobs)

    def to_side(self, episodes: int, kl: tuple[float | None, int]) -> NodeSide:
        """The counts of so many episodes into means and shares."""
        finished_calls = self.finish_reasons.total()
        costed_episodes = episodes - self.acting_episodes + len(self.costs)  # where it did not act, it cost nothing
        return NodeSide(
            calls_per_episode=self.calls / episodes,
            tokens_mean=_share(sum(self.lengths), len(self.lengths)),
            stop_share=_share(sum(self.finish_reasons[reason] for reason in _UNFORCED_FINISH_REASONS), finished_calls),
            logprob_mean=_share(self.logprob_sum, self.logprobs),
            kl_to_base=kl[0],
            kl_actions=kl[1],
            format_valid=_share(sum(self.format_checks), len(self.format_checks)),
            tools=dict(self.tools.most_common()),
            tool_error_share=_share(self.tool_errors, self.tool_calls_made),
            answered_by=dict(self.answered_by.most_common()),
            cost_mean=math.fsum(self.costs) / costed_episodes if self.costs else None,
        )


def _answerer(call: Action) -> str:
    """Who answered a call: an adapter, whose name has its version, or else a model by the name that it gave."""
    return call.adapter or call.model or "a model that is not named"


def _share(part: float, total: int) -> float | None:
    return part / total if total else None


def _requested_tools(chat_spans: Iterable[SpanRow]) -> Iterator[str]:
    """Names of the tools that answers ask for, as this recorder or the GenAI conventions (parts) write them."""
    for chat_span in chat_spans:
        try:
            messages: Any = read_json(chat_span.attributes.get(names.OUTPUT_MESSAGES) or "[]")
        except (TypeError, ValueError):
            continue
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                parts = [p for p in _dicts(message, "parts") if p.get("type") == "tool_call"]
                yield from (str(call.get("name")) for call in (*_dicts(message, "tool_calls"), *parts))


def _dicts(message: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    entries = message.get(key)
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
