"""One episode of a store, with the advantages and the tokenizer that there are -> all that its page shows.

Invariants: what has no advantage says why; actions are shown a page at a time and texts are cut, with what was left
out; text is not made safe here, the templates do that. It does not know HTML beyond the drawings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from marft_bridge.kept_advantages import KeptAdvantage, file_to_advantages, file_to_scale
from marft_bridge.run_folder import TRAIN
from marft_bridge.traces.advantages import Advantages, episode_to_group, trajectory_to_advantages
from marft_bridge.traces.drawing import messages_to_texts
from marft_bridge.traces.plain import value_to_json
from marft_bridge.view.graph_drawing import trajectory_to_svg
from marft_bridge.view.place import Place
from marft_bridge.view.reading import spans_to_tools
from marft_bridge.view.shades import MOST_TOKENS, Shades, action_to_mean, action_to_spans, fits
from marft_bridge.view.tokens import TextsByNode
from trace_store import conventions as c
from trace_store.records import Action, Episode, Reward, SpanRow, Trajectory
from trace_store.store import TraceStore

ACTIONS_PER_PAGE = 40
MOST_TEXT = 20_000  # letters of one message
MOST_MESSAGES = 60  # of one prompt
MOST_DRAWN = 400  # actions of a drawing
_GAMMA, _LAMBDA = 1.0, 0.95


@dataclass(frozen=True, slots=True)
class ShownText:
    """One message. `cut`: letters that were left out."""

    role: str
    text: str
    cut: int


@dataclass(frozen=True, slots=True)
class ShownAction:
    """One action. `why_not` says why its tokens are not shaded; None where they are."""

    action: Action
    messages: list[ShownText]
    skipped: int  # messages in the middle of the prompt that were left out
    answer: ShownText | None
    failed: str | None  # what went wrong with the call
    tokens: Markup
    tokens_cut: int
    mean: float | None  # of its normalised advantages
    why_not: str | None
    after: list[tuple[Action, list[str]]]  # what it depends on, with the kinds of edges
    tools: list[tuple[str, list[ShownText]]]  # name; arguments, result and what went wrong
    rewards: list[Reward]


@dataclass(frozen=True, slots=True)
class ShownEpisode:
    """What the page of an episode shows."""

    episode: Episode
    drawing: Markup | None  # None where there is too much to draw
    rewards: list[Reward]  # of the team and of agents
    estimates: list[Advantages]  # without a critic
    actions: list[ShownAction]
    first: int  # index of the first action that is shown
    count: int
    shades: Shades | None
    why_not: str | None  # why nothing is shaded
    ids_because: str | None  # why ids stand in the place of texts


def store_to_episode(
    store: TraceStore, place: Place, texts: TextsByNode, episode_id: str, first: int
) -> ShownEpisode | None:
    """The episode with its actions from `first` on; None when there is no such episode."""
    trajectory = store.trajectory(episode_id)
    if trajectory is None:
        return None
    spans = store.spans(episode_id)
    estimates = trajectory_to_advantages(trajectory, episode_to_group(store, trajectory.episode), _GAMMA, _LAMBDA)
    kept, shades, why_not = _advantages(place, trajectory.episode)
    tools = spans_to_tools(spans)
    names = {action_id: [_tool_name(tool) for tool in called] for action_id, called in tools.items()}
    shown = _Showing(trajectory, spans, tools, kept, shades, why_not, texts)
    page = trajectory.actions[first : first + ACTIONS_PER_PAGE]
    drawing = None
    if len(trajectory.actions) <= MOST_DRAWN:
        shade = {
            action_id: shades.of(action_to_mean(own)) for action_id, own in kept.items() if shades and own.normalised
        }
        drawing = trajectory_to_svg(trajectory, names, name="graph", link=_link, shade=shade)
    return ShownEpisode(
        episode=trajectory.episode,
        drawing=drawing,
        rewards=[reward for reward in trajectory.rewards if reward.scope != "step"],
        estimates=estimates,
        actions=[shown.action(action) for action in page],
        first=first,
        count=len(trajectory.actions),
        shades=shades,
        why_not=why_not,
        ids_because=next((why for a in trajectory.actions if (why := texts.of(a.node).why_not) is not None), None),
    )


def _link(action: Action) -> str:
    at = action.index // ACTIONS_PER_PAGE * ACTIONS_PER_PAGE
    return f"/episode?id={action.episode_id}&at={at}#a{action.index}"


def _advantages(place: Place, episode: Episode) -> tuple[Mapping[str, KeptAdvantage], Shades | None, str | None]:
    """What the episode's actions were credited with in the round that it was played for, or why that is not known."""
    if episode.run_id != TRAIN or episode.round is None:
        return {}, None, "advantages are kept of rounds of `marft-bridge train`, and this episode was played for none"
    if place.run is None:
        return {}, None, "advantages lie in the run folder, and this store was opened without one"
    folder, number = place.run.advantages, episode.round
    try:
        kept = file_to_advantages(folder, number, episode.episode_id)
        scale = file_to_scale(folder, number)
    except FileNotFoundError:
        return {}, None, f"none are kept of round {number}: it was not learned from, or not with train.keep_advantages"
    except ValueError as error:
        return {}, None, f"the file of round {number} cannot be read: {error}"
    if not kept:
        return {}, None, f"round {number} did not learn from this episode, or kept no more than the first of them"
    return kept, Shades(scale or 1.0), None


class _Showing:
    def __init__(
        self,
        trajectory: Trajectory,
        spans: Sequence[SpanRow],
        tools: Mapping[str, Sequence[SpanRow]],
        kept: Mapping[str, KeptAdvantage],
        shades: Shades | None,
        why_not: str | None,
        texts: TextsByNode,
    ) -> None:
        self.trajectory, self.kept, self.shades, self.why_not, self.texts = trajectory, kept, shades, why_not, texts
        self.spans = {span.span_id: span for span in spans}
        self.actions = {action.action_id: action for action in trajectory.actions}
        self.called = tools

    def action(self, action: Action) -> ShownAction:
        """All that is shown of one action."""
        span = self.spans.get(action.action_id)
        messages = [] if span is None else list(messages_to_texts(span.attributes.get(c.INPUT_MESSAGES)))
        half = MOST_MESSAGES // 2
        skipped = max(0, len(messages) - MOST_MESSAGES)
        chosen = messages if not skipped else [*messages[:half], *messages[-half:]]
        answer = None if span is None else next(iter(messages_to_texts(span.attributes.get(c.OUTPUT_MESSAGES))), None)
        said = answer[1] if answer is not None and answer[1] else action.completion
        kept, why_not = self.kept.get(action.action_id), self.why_not
        if kept is None and why_not is None:
            why_not = "this action was not learned from"
        elif kept is not None and not fits(action, kept):
            kept, why_not = None, "what is kept of it does not fit its tokens"
        ids = (action.sampled_ids or ())[:MOST_TOKENS]
        pieces = self.texts.of(action.node).ids_to_pieces(ids) if ids else None
        after: dict[str, list[str]] = {}
        for edge in self.trajectory.edges:
            if edge.dst == action.action_id:
                after.setdefault(edge.src, []).append(edge.kind + ("" if edge.exact else ", an upper bound"))
        return ShownAction(
            action=action,
            messages=[_cut(role, text) for role, text in chosen],
            skipped=skipped,
            answer=None if said is None else _cut("answer", said),
            failed=None if span is None or span.status == "ok" else span.status_message or "it failed",
            tokens=action_to_spans(action, pieces, kept, self.shades),
            tokens_cut=len(action.sampled_ids or ()) - len(ids),
            mean=None if kept is None else action_to_mean(kept),
            why_not=why_not,
            after=[(self.actions[src], kinds) for src, kinds in after.items()],
            tools=[_tool(tool) for tool in self.called.get(action.action_id, ())],
            rewards=[reward for reward in self.trajectory.rewards if reward.action_id == action.action_id],
        )


def _tool_name(tool: SpanRow) -> str:
    return str(tool.attributes.get(c.TOOL_NAME) or tool.name)


def _tool(tool: SpanRow) -> tuple[str, list[ShownText]]:
    said = {
        "arguments": tool.attributes.get(c.TOOL_ARGUMENTS),
        "result": tool.attributes.get(c.TOOL_RESULT),
        "failed": tool.status_message if tool.status == "error" else None,
    }
    texts = {name: value if isinstance(value, str) else value_to_json(value, None) for name, value in said.items()}
    return _tool_name(tool), [_cut(name, texts[name]) for name, value in said.items() if value is not None]


def _cut(role: str, text: str) -> ShownText:
    return ShownText(role, text[:MOST_TEXT], max(0, len(text) - MOST_TEXT))
