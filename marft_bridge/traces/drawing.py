"""One episode with its spans and advantages -> a tree, or D as a matrix, for people.

    episode > superstep > node execution > calls (actions) and tools, and what is nested in them

Invariant: all text of the episode goes through `plain`, so nothing in it is obeyed by a terminal or taken for markup.
Where the parts come from is not known here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.text import Text
from rich.tree import Tree

from marft_bridge.traces.advantages import Advantages
from marft_bridge.traces.listing import time_to_text, tokens_to_text
from marft_bridge.traces.plain import text_to_line, text_to_lines, value_to_json
from trace_store import conventions as c
from trace_store.records import Action, Edge, Reward, SpanRow, Trajectory

KIND_LETTERS = {"trigger": "t", "data": "d", "send": "s", "tool": "o"}
SHORT_TEXT = 400  # characters of each message, unless all of it is asked for


@dataclass(frozen=True, slots=True)
class Shown:
    """What is drawn. `text`: characters of each prompt message and answer; 0 for none, None for all of them."""

    trajectory: Trajectory
    spans: Sequence[SpanRow]
    advantages: Sequence[Advantages]
    text: int | None = 0


def episode_to_tree(shown: Shown) -> Tree:
    """The whole drawing."""
    drawer = _Drawer(shown)
    tree = Tree(drawer.episode())
    root = next((span for span in shown.spans if span.parent_span_id is None), None)
    if root is not None:
        drawer.grow(tree, root.span_id)
    drawer.add_rewards(tree)
    drawer.add_advantages(tree)
    return tree


def dependencies_to_rows(trajectory: Trajectory) -> tuple[list[str], list[list[str]]]:
    """D as a matrix: a row for each action, and under each other action the letters of their edges, `?` for a bound."""
    numbers = {action.action_id: action.index for action in trajectory.actions}
    cells: dict[tuple[int | None, int | None], str] = {}
    for edge in sorted(trajectory.edges, key=lambda edge: edge.kind):
        key = (numbers.get(edge.dst), numbers.get(edge.src))
        cells[key] = cells.get(key, "") + KIND_LETTERS.get(edge.kind, "!") + ("" if edge.exact else "?")
    columns = ["#", "node", *(str(action.index) for action in trajectory.actions)]
    rows = [
        [str(row.index), row.node, *(cells.get((row.index, other.index), ".") for other in trajectory.actions)]
        for row in trajectory.actions
    ]
    return columns, rows


class _Drawer:
    def __init__(self, shown: Shown) -> None:
        self.shown = shown
        self.episode_row = shown.trajectory.episode
        self.actions = {action.action_id: action for action in shown.trajectory.actions}
        self.incoming: dict[str, list[Edge]] = {}
        for edge in shown.trajectory.edges:
            self.incoming.setdefault(edge.dst, []).append(edge)
        self.children: dict[str | None, list[SpanRow]] = {}
        for span in sorted(shown.spans, key=lambda span: (span.start_ns, span.span_id)):
            self.children.setdefault(span.parent_span_id, []).append(span)

    def episode(self) -> Text:
        e = self.episode_row
        actions = self.actions.values()
        parts = [
            f"task {e.task_id} sample {e.sample}",
            f"run {e.run_id}" + (f" round {e.round}" if e.round is not None else ""),
            *([f"variant {e.variant}"] if e.variant is not None else []),
            e.split,
            f"{len(actions)} actions",
            f"{(e.ended_ns - e.started_ns) / 1e9:.2f} s",
            f"{time_to_text(e.started_ns)} UTC",
        ]
        title = Text(text_to_line(f"episode {e.episode_id}  "), style="bold")
        outcome = e.outcome if e.reason is None else f"{e.outcome}: {e.reason}"
        title.append(text_to_line(outcome), style="green" if e.outcome == "terminated" else "yellow")
        title.append("\n" + text_to_line("  ".join(parts)), style="not bold")
        return title

    def grow(self, branch: Tree, span_id: str) -> None:
        """Adds what is inside a span, node executions under their superstep."""
        children = self.children.get(span_id, [])
        for step, spans in groupby(children, key=lambda span: span.attributes.get(c.STEP) if _is_node(span) else None):
            under = branch if step is None else branch.add(Text(text_to_line(f"step {step}"), style="dim"))
            for span in spans:
                self.grow(self._add(under, span), span.span_id)

    def _add(self, branch: Tree, span: SpanRow) -> Tree:
        if span.operation == c.CHAT and span.span_id in self.actions:
            return self._add_action(branch, span, self.actions[span.span_id])
        what = {c.INVOKE_AGENT: ("", c.NODE, "bold cyan"), c.EXECUTE_TOOL: ("tool ", c.TOOL_NAME, "magenta")}
        word, key, style = what.get(span.operation, ("", "", ""))
        label = Text(text_to_line(word + str(span.attributes.get(key) or span.name)), style=style)
        if span.attributes.get(c.CACHED):
            label.append("  from a cache")
        if span.status == "error":
            label.append(text_to_line(f"  failed: {span.status_message or 'no reason given'}", 200), style="red")
        if span.operation != c.INVOKE_AGENT:
            label.append(f"  {(span.end_ns - span.start_ns) / 1e9:.2f} s", style="dim")
        added = branch.add(label)
        if span.operation == c.EXECUTE_TOOL:
            self._add_text(added, "arguments", span.attributes.get(c.TOOL_ARGUMENTS))
            self._add_text(added, "result", span.attributes.get(c.TOOL_RESULT))
        return added

    def _add_action(self, branch: Tree, span: SpanRow, action: Action) -> Tree:
        prompt = action.prompt_tokens if action.prompt_ids is None else len(action.prompt_ids)
        sampled = action.sampled_tokens if action.sampled_ids is None else len(action.sampled_ids)
        parts = [
            f"#{action.index}",
            action.adapter or action.model or "unknown model",
            f"{tokens_to_text(prompt, sampled) or 'unknown'} tokens",
            f"finish {action.finish_reason or 'unknown'}",
            f"{(action.ended_ns - action.started_ns) / 1e9:.2f} s",
        ]
        label = Text(text_to_line("  ".join(parts)))
        if action.trainable:
            label.append("  trainable", style="green")
        else:
            label.append(text_to_line(f"  not trainable: {action.untrainable_reason}", 300), style="yellow")
        label.append("\n" + text_to_line(self._dependencies(action)), style="dim")
        for reward in self.shown.trajectory.rewards:
            if reward.action_id == action.action_id:
                label.append("\n" + _reward_to_text(reward), style="blue")
        added = branch.add(label)
        for role, text in messages_to_texts(span.attributes.get(c.INPUT_MESSAGES)):
            self._add_text(added, f"> {role}", text)
        self._add_text(added, "< answer", action.completion)
        return added

    def _dependencies(self, action: Action) -> str:
        found: dict[str, list[str]] = {}
        for edge in self.incoming.get(action.action_id, []):
            found.setdefault(edge.src, []).append(edge.kind + ("" if edge.exact else "?"))
        if not found:
            return "depends on no other action"
        names = {key: f"#{source.index} {source.node}" for key, source in self.actions.items()}
        return "after " + ", ".join(f"{names.get(src, src)} ({' '.join(kinds)})" for src, kinds in found.items())

    def _add_text(self, branch: Tree, title: str, text: Any) -> None:
        most = self.shown.text
        if most == 0 or text is None:
            return
        words = text if isinstance(text, str) else value_to_json(text, None)
        cut = "" if most is None or len(words) <= most else f"… ({len(words)} characters)"
        lines = text_to_lines(words if most is None else words[:most])
        label = Text(text_to_line(f"{title}: "), style="dim")
        label.append("\n".join(lines) + cut, style="not dim")
        branch.add(label)

    def add_rewards(self, tree: Tree) -> None:
        rewards = [reward for reward in self.shown.trajectory.rewards if reward.scope != "step"]
        branch = tree.add(Text("rewards" if self.shown.trajectory.rewards else "no rewards", style="bold"))
        for reward in rewards:
            branch.add(Text(_reward_to_text(reward)))

    def add_advantages(self, tree: Tree) -> None:
        if not self.shown.advantages:
            return
        branch = tree.add(Text("advantages without a critic", style="bold"))
        for estimate in self.shown.advantages:
            label = f"{estimate.reward}: {estimate.label}: "
            if estimate.values is None:
                label += f"none, {estimate.why_not}"
            else:
                numbered = ((self.actions[key].index, value) for key, value in estimate.values.items())
                label += "  ".join(f"#{index} {value:+.4g}" for index, value in numbered)
            branch.add(Text(text_to_line(label)))


def _is_node(span: SpanRow) -> bool:
    return span.operation == c.INVOKE_AGENT


def _reward_to_text(reward: Reward) -> str:
    whose = {"step": "step ", "agent": f"agent {reward.node} "}.get(reward.scope, "team ")
    return text_to_line(f"{whose}{reward.name} {reward.value:.6g}  from {reward.source}")


def messages_to_texts(messages: Any) -> Iterable[tuple[str, str]]:
    """Recorded messages of any shape -> (role, text); what is not text is shown as JSON."""
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except ValueError:
            return [("unknown", messages)]
    found = []
    for message in messages if isinstance(messages, list) else []:
        bag = message if isinstance(message, dict) else {"content": message}
        inner = bag["data"] if isinstance(bag.get("data"), dict) else bag
        content = inner.get("content", inner.get("parts"))
        if isinstance(content, list):
            texts = [part.get("content", part.get("text")) if isinstance(part, dict) else part for part in content]
            parts = [
                text if isinstance(text, str) else value_to_json(part, None)
                for text, part in zip(texts, content, strict=True)
            ]
            content = "\n".join(parts)
        calls = inner.get("tool_calls")
        words = [
            content if isinstance(content, str) else value_to_json(content, None),
            *([value_to_json(calls, None)] if calls else []),
        ]
        found.append((str(bag.get("role", bag.get("type", "unknown"))), "\n".join(word for word in words if word)))
    return found
