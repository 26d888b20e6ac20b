"""One episode with its spans and advantages -> a tree for the terminal, or its dependency function D as a matrix.

    episode > superstep > node execution > calls (actions) and tools, and what is nested in them

Invariant: all text of the episode goes through `text_to_line` or `text_to_lines`, so that a terminal obeys no control
character in it and rich takes none of it for markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from rich.text import Text
from rich.tree import Tree

from marft_bridge.common.terminal_text import text_to_line, text_to_lines, value_to_json
from marft_bridge.traces.advantages import Advantages
from marft_bridge.traces.fork_tree import DeeperFork, DeeperForks, ForkAncestors
from marft_bridge.traces.forks import ForkBranch, ForkedCall, ForkOrigin, worth_to_text
from marft_bridge.traces.listing import time_to_text, tokens_to_text
from trace_store import conventions as c
from trace_store.json_text import read_json
from trace_store.records import Action, Edge, Reward, SpanRow, Trajectory
from trace_store.threads import EpisodeLink, LinkKind

KIND_LETTERS = {"trigger": "t", "data": "d", "send": "s", "tool": "o"}
LINK_WORDS: dict[LinkKind, str] = {
    "turn": "the turn after",
    "resume": "resumes",
    "fork": "forks",
    "replay": "replays",
}
SHORT_TEXT = 400  # characters of each message with `--text`


@dataclass(frozen=True, slots=True)
class EpisodeParts:
    """An episode to draw. `text_limit`: characters per prompt message and answer; 0 for none, None for all."""

    trajectory: Trajectory
    spans: Sequence[SpanRow]
    advantages: Sequence[Advantages]
    text_limit: int | None = 0
    link: EpisodeLink = field(default_factory=EpisodeLink)
    followers: Sequence[tuple[str, LinkKind]] = ()  # the episodes that go on with it, and how
    origin: ForkOrigin | None = None  # where it left another episode; None: it is no fork
    ancestors: ForkAncestors = field(default_factory=lambda: ForkAncestors([], omitted=0))  # the last is the origin
    forks: Sequence[ForkedCall] = ()  # those that leave it, by call
    deeper: DeeperForks = field(default_factory=lambda: DeeperForks({}, omitted=0))  # forks of its forks


def episode_to_tree(parts: EpisodeParts) -> Tree:
    """The tree: supersteps with their calls and tools, then rewards, forks, and advantages."""
    drawer = _Drawer(parts)
    tree = Tree(drawer.episode_label())
    root = next((span for span in parts.spans if span.parent_span_id is None), None)
    if root is not None:
        drawer.add_text(tree, "input", root.attributes.get(c.INPUT))
        drawer.add_children(tree, root.span_id)
        drawer.add_text(tree, "output", root.attributes.get(c.OUTPUT))
    drawer.add_rewards(tree)
    drawer.add_forks(tree)
    drawer.add_advantages(tree)
    return tree


def dependencies_to_rows(trajectory: Trajectory) -> tuple[list[str], list[list[str]]]:
    """D as a matrix (columns, rows): row i, column j has the letters of the edges j -> i, `?` for an upper bound."""
    numbers = {action.action_id: action.index for action in trajectory.actions}
    cells: dict[tuple[int | None, int | None], str] = {}
    for edge in sorted(trajectory.edges, key=lambda edge: edge.kind):
        key = (numbers.get(edge.dst), numbers.get(edge.src))
        cells[key] = cells.get(key, "") + KIND_LETTERS.get(edge.kind, "!") + ("" if edge.exact else "?")
    columns = ["#", "node", *(str(action.index) for action in trajectory.actions)]
    rows = [
        [str(row.index), row.node, *(cells.get((row.index, source.index), ".") for source in trajectory.actions)]
        for row in trajectory.actions
    ]
    return columns, rows


class _Drawer:
    def __init__(self, parts: EpisodeParts) -> None:
        self.parts = parts
        self.episode_row = parts.trajectory.episode
        self.actions = {action.action_id: action for action in parts.trajectory.actions}
        self.incoming: dict[str, list[Edge]] = {}
        for edge in parts.trajectory.edges:
            self.incoming.setdefault(edge.dst, []).append(edge)
        self.children: dict[str | None, list[SpanRow]] = {}
        for span in sorted(parts.spans, key=lambda span: (span.start_ns, span.span_id)):
            self.children.setdefault(span.parent_span_id, []).append(span)

    def episode_label(self) -> Text:
        episode = self.episode_row
        actions = self.actions.values()
        parts = [
            f"task {episode.task_id} sample {episode.sample}",
            f"run {episode.run_id}" + (f" round {episode.round}" if episode.round is not None else ""),
            *([f"variant {episode.variant}"] if episode.variant is not None else []),
            episode.split,
            f"{len(actions)} actions",
            f"{(episode.ended_ns - episode.started_ns) / 1e9:.2f} s",
            f"{time_to_text(episode.started_ns)} UTC",
        ]
        title = Text(text_to_line(f"episode {episode.episode_id}  "), style="bold")
        outcome = episode.outcome if episode.reason is None else f"{episode.outcome}: {episode.reason}"
        title.append(text_to_line(outcome), style="green" if episode.outcome == "terminated" else "yellow")
        title.append("\n" + text_to_line("  ".join(parts)), style="not bold")
        for line in (self._app_line(), self._link_line(), _ancestors_to_line(self.parts.ancestors)):
            if line:
                title.append("\n" + text_to_line(line, 1000), style="not bold")
        return title

    def _app_line(self) -> str:
        """What the app said of the run."""
        episode, turn = self.episode_row, self.parts.link.turn
        thread = f"thread {episode.thread_id}" + (f" turn {turn}" if turn is not None else "")
        parts = [
            *([thread] if episode.thread_id is not None else []),
            *([f"user {episode.user_id}"] if episode.user_id is not None else []),
            *(f"{name}={value}" if value else f"tag {name}" for name, value in episode.tags.items()),
            *([f"metadata {value_to_json(episode.metadata, None)}"] if episode.metadata else []),
        ]
        return "  ".join(parts)

    def _link_line(self) -> str:
        """What it goes on with, and what goes on with it."""
        link = self.parts.link
        parts = [f"{LINK_WORDS[link.kind]} {link.linked_episode}"] if link.kind is not None else []
        if self.parts.origin is not None:
            parts = [origin_to_text(self.parts.origin)]
        forked_ids = {branch.episode_id for point in self.parts.forks for branch in point.branches}
        followers = [(key, kind) for key, kind in self.parts.followers if key not in forked_ids]  # drawn below
        return "  ".join([*parts, *(f"then {kind} {episode_id}" for episode_id, kind in followers)])

    def add_children(self, branch: Tree, span_id: str) -> None:
        """Adds the spans inside a span, node executions under their superstep."""
        children = self.children.get(span_id, [])
        for step, spans in groupby(children, key=lambda span: span.attributes.get(c.STEP) if _is_node(span) else None):
            parent = branch if step is None else branch.add(Text(text_to_line(f"step {step}"), style="dim"))
            for span in spans:
                self.add_children(self._add(parent, span), span.span_id)

    def _add(self, branch: Tree, span: SpanRow) -> Tree:
        if span.operation == c.CHAT and span.span_id in self.actions:
            return self._add_action(branch, span, self.actions[span.span_id])
        styles = {c.INVOKE_AGENT: ("", c.NODE, "bold cyan"), c.EXECUTE_TOOL: ("tool ", c.TOOL_NAME, "magenta")}
        word, key, style = styles.get(span.operation, ("", "", ""))
        label = Text(text_to_line(word + str(span.attributes.get(key) or span.name)), style=style)
        if span.attributes.get(c.CACHED):
            label.append("  from a cache")
        if span.status == "error":
            label.append(text_to_line(f"  failed: {span.status_message or 'no reason given'}", 200), style="red")
        if span.operation != c.INVOKE_AGENT:
            label.append(f"  {(span.end_ns - span.start_ns) / 1e9:.2f} s", style="dim")
        child = branch.add(label)
        if span.operation == c.EXECUTE_TOOL:
            self.add_text(child, "arguments", span.attributes.get(c.TOOL_ARGUMENTS))
            self.add_text(child, "result", span.attributes.get(c.TOOL_RESULT))
        return child

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
        for reward in self.parts.trajectory.rewards:
            if reward.action_id == action.action_id:
                label.append("\n" + _reward_to_text(reward), style="blue")
        child = branch.add(label)
        for role, text in messages_to_texts(span.attributes.get(c.INPUT_MESSAGES)):
            self.add_text(child, f"> {role}", text)
        self.add_text(child, "< answer", action.completion)
        return child

    def _dependencies(self, action: Action) -> str:
        kinds_by_source: dict[str, list[str]] = {}
        for edge in self.incoming.get(action.action_id, []):
            kinds_by_source.setdefault(edge.src, []).append(edge.kind + ("" if edge.exact else "?"))
        if not kinds_by_source:
            return "depends on no other action"
        names = {key: f"#{source.index} {source.node}" for key, source in self.actions.items()}
        return "after " + ", ".join(
            f"{names.get(src, src)} ({' '.join(kinds)})" for src, kinds in kinds_by_source.items()
        )

    def add_text(self, branch: Tree, title: str, text: Any) -> None:
        limit = self.parts.text_limit
        if limit == 0 or text is None:
            return
        content = text if isinstance(text, str) else value_to_json(text, None)
        cut = "" if limit is None or len(content) <= limit else f"… ({len(content)} characters)"
        lines = text_to_lines(content if limit is None else content[:limit])
        label = Text(text_to_line(f"{title}: "), style="dim")
        label.append("\n".join(lines) + cut, style="not dim")
        branch.add(label)

    def add_rewards(self, tree: Tree) -> None:
        rewards = [reward for reward in self.parts.trajectory.rewards if reward.scope != "step"]
        branch = tree.add(Text("rewards" if self.parts.trajectory.rewards else "no rewards", style="bold"))
        for reward in rewards:
            branch.add(Text(_reward_to_text(reward)))

    def add_forks(self, tree: Tree) -> None:
        if not self.parts.forks:
            return
        branch = tree.add(Text("forks", style="bold"))
        for point in self.parts.forks:
            child = branch.add(Text(text_to_line(forked_call_to_text(point))))
            for worth in point.worths.items():
                child.add(Text(text_to_line(worth_to_text(*worth)), style="blue"))
            self.add_text(child, "recorded answer", point.answer)
            for fork in point.branches:
                leaf = child.add(Text(text_to_line(_branch_to_text(fork))))
                self.add_text(leaf, "< answer", fork.answer)
                self._add_deeper(leaf, self.parts.deeper.by_branch.get(fork.episode_id, ()))
        if self.parts.deeper.omitted:
            count = self.parts.deeper.omitted
            branch.add(Text(f"forks of forks that are left out: {count}; `traces show FORK` lists a fork's own"))

    def _add_deeper(self, leaf: Tree, forks: Sequence[DeeperFork]) -> None:
        above = [leaf]  # of the fork that is drawn next, from the first level
        for fork in forks:
            del above[fork.depth - 1 :]
            above.append(above[-1].add(Text(text_to_line(_deeper_to_text(fork)))))

    def add_advantages(self, tree: Tree) -> None:
        if not self.parts.advantages:
            return
        branch = tree.add(Text("advantages without a critic", style="bold"))
        for estimate in self.parts.advantages:
            label = f"{estimate.reward}: {estimate.label}: "
            if estimate.values is None:
                label += f"none, {estimate.why_not}"
            else:
                numbered = ((self.actions[key].index, value) for key, value in estimate.values.items())
                label += "  ".join(f"#{index} {value:+.4g}" for index, value in numbered)
            branch.add(Text(text_to_line(label)))


def origin_to_text(origin: ForkOrigin) -> str:
    """`fork of 4be1... at planner, call 2`."""
    call = "a call that is not stored" if origin.node is None else f"{origin.node}, call {origin.call}"
    return f"fork of {origin.episode_id} at {call}"


def forked_call_to_text(point: ForkedCall) -> str:
    """`#1 planner, call 2, fork-1`: the call, the run of its forks, and what they did otherwise."""
    call = "a call that is not stored" if point.node is None else f"#{point.index} {point.node}, call {point.call}"
    parts = [call, point.run_id + ("" if point.round is None else f" round {point.round}")]
    return ", ".join([*parts, *([] if point.variant is None else [point.variant])])


def _branch_to_text(fork: ForkBranch) -> str:
    outcome = fork.outcome if fork.reason is None else f"{fork.outcome}: {fork.reason}"
    rewards = ", ".join(f"{name} {value:.6g}" for name, value in fork.rewards.items()) or outcome
    own_forks = f"  with {fork.fork_count} forks of its own" if fork.fork_count else ""
    return f"sample {fork.sample}: {fork.episode_id[:12]} {rewards}{own_forks}"


def _deeper_to_text(fork: DeeperFork) -> str:
    call = "a call that is not stored" if fork.node is None else f"#{fork.index} {fork.node}, call {fork.call}"
    where = "" if fork.level == fork.depth else f"level {fork.level}, of {fork.parent_id[:12]}, "
    change = "" if fork.variant is None else f", {fork.variant}"
    outcome = fork.outcome if fork.reason is None else f"{fork.outcome}: {fork.reason}"
    rewards = ", ".join(f"{name} {reward:.6g}" for name, reward in fork.rewards.items()) or outcome
    return f"{where}{call}, {fork.run_id}{change}, sample {fork.sample}: {fork.episode_id[:12]} {rewards}"


def _ancestors_to_line(ancestors: ForkAncestors) -> str:
    """`that is a fork of 4be1... at planner, call 2`: what an episode's origin was forked from, the nearest first."""
    upper = ancestors.origins[-2::-1]
    texts = [f"that is a {origin_to_text(replace(origin, episode_id=origin.episode_id[:12]))}" for origin in upper]
    if ancestors.omitted:
        texts.insert(-1, f"{ancestors.omitted} more between")
    return ", ".join(texts)


def _is_node(span: SpanRow) -> bool:
    return span.operation == c.INVOKE_AGENT


def _reward_to_text(reward: Reward) -> str:
    owner = {"step": "step ", "agent": f"agent {reward.node} "}.get(reward.scope, "team ")
    return text_to_line(f"{owner}{reward.name} {reward.value:.6g}  from {reward.source}")


def messages_to_texts(messages: Any) -> Iterable[tuple[str, str]]:
    """Recorded messages of any shape -> (role, text); what is not text is shown as JSON."""
    if isinstance(messages, str):
        try:
            messages = read_json(messages)
        except ValueError:
            return [("unknown", messages)]
    roles_and_texts = []
    for message in messages if isinstance(messages, list) else []:
        fields = message if isinstance(message, dict) else {"content": message}
        # LangChain's `messages_to_dict` nests the message under "data"; others have content or parts at the top.
        content_fields = fields["data"] if isinstance(fields.get("data"), dict) else fields
        content = content_fields.get("content", content_fields.get("parts"))
        if isinstance(content, list):
            part_texts = [part.get("content", part.get("text")) if isinstance(part, dict) else part for part in content]
            parts = [
                text if isinstance(text, str) else value_to_json(part, None)
                for text, part in zip(part_texts, content, strict=True)
            ]
            content = "\n".join(parts)
        calls = content_fields.get("tool_calls")
        sections = [
            content if isinstance(content, str) else value_to_json(content, None),
            *([value_to_json(calls, None)] if calls else []),
        ]
        roles_and_texts.append(
            (
                str(fields.get("role", fields.get("type", "unknown"))),
                "\n".join(section for section in sections if section),
            )
        )
    return roles_and_texts
