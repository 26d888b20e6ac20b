"""One episode of a store, its round's advantages and its tokenizers -> the values that the template of its page shows.

Invariants: tokens without an advantage carry the reason; actions are shown a page at a time; texts are cut, and the
number of omitted letters, messages and tokens is kept. Texts are escaped by the template; only the drawing and the
token spans are HTML already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from marft_bridge.common.terminal_text import value_to_json
from marft_bridge.runs.run_folder import TRAIN
from marft_bridge.traces.advantages import Advantages, episode_to_group, trajectory_to_advantages
from marft_bridge.traces.drawing import messages_to_texts
from marft_bridge.traces.listing import first_words
from marft_bridge.training.advantage_log import StoredAdvantage, file_to_advantages, file_to_scale
from marft_bridge.view.colours import MAX_SHOWN_TOKENS, ColourScale, action_to_mean, action_to_spans, fits
from marft_bridge.view.graph_drawing import trajectory_to_svg
from marft_bridge.view.source import ViewSource
from marft_bridge.view.store_queries import spans_to_tools
from marft_bridge.view.token_texts import TextsByNode
from trace_store import conventions as c
from trace_store.records import Action, Episode, Reward, SpanRow, Trajectory
from trace_store.store import TraceStore
from trace_store.threads import EpisodeLink, LinkKind, episode_to_next, episodes_to_links

ACTIONS_PER_PAGE = 40
MAX_TEXT_LETTERS = 20_000  # of one message
MAX_MESSAGES = 60  # of one prompt
MAX_DRAWN_ACTIONS = 400  # beyond, there is no drawing
_GAMMA, _LAMBDA = 1.0, 0.95  # of the estimates without a critic


@dataclass(frozen=True, slots=True)
class MessageText:
    """One message, cut to MAX_TEXT_LETTERS."""

    role: str
    text: str
    omitted_letters: int


@dataclass(frozen=True, slots=True)
class ActionCard:
    """One action. `uncoloured_reason`: why its tokens have no colours; None where they have."""

    action: Action
    messages: list[MessageText]
    omitted_messages: int  # in the middle of the prompt
    answer: MessageText | None
    failure: str | None  # of the model call
    token_spans: Markup
    omitted_tokens: int
    mean_advantage: float | None  # of its normalised advantages
    uncoloured_reason: str | None
    dependencies: list[tuple[Action, list[str]]]  # the actions that it depends on, with the kinds of the edges
    tools: list[tuple[str, list[MessageText]]]  # name; arguments, result and failure
    rewards: list[Reward]
    has_texts: bool  # whether `token_spans` are texts; else they are ids, and `answer` is what can be read

    @property
    def last_words(self) -> str | None:
        """The first words of the prompt's last message."""
        return first_words(self.messages[-1].text) if self.messages else None


@dataclass(frozen=True, slots=True)
class EpisodePage:
    """The values of the page of an episode. A page shows up to ACTIONS_PER_PAGE actions."""

    episode: Episode
    drawing: Markup | None  # None beyond MAX_DRAWN_ACTIONS
    rewards: list[Reward]  # of the team and of agents
    estimates: list[Advantages]  # without a critic
    actions: list[ActionCard]
    first: int  # index of the first action that is shown
    action_count: int  # of the episode
    scale: ColourScale | None
    uncoloured_reason: str | None  # why no token has a colour
    missing_texts_reason: str | None  # why token ids are shown instead of texts
    link: EpisodeLink  # what it goes on with
    followers: list[tuple[str, LinkKind]]  # the episodes that go on with it, and how
    ends: list[MessageText]  # what a live run was given, and what it gave back
    task: str | None  # the first words of what it was about

    @property
    def team_rewards(self) -> list[Reward]:
        """The rewards of the whole episode, the last of each name."""
        newest: dict[str, Reward] = {}
        for reward in sorted(self.rewards, key=lambda reward: reward.created_ns):
            if reward.scope == "episode":
                newest[reward.name] = reward
        return list(newest.values())


def store_to_episode_page(
    store: TraceStore, source: ViewSource, texts: TextsByNode, episode_id: str, first: int
) -> EpisodePage | None:
    """The episode with its actions from `first` on; None when there is no such episode."""
    trajectory = store.trajectory(episode_id)
    if trajectory is None:
        return None
    spans = store.spans(episode_id)
    estimates = trajectory_to_advantages(trajectory, episode_to_group(store, trajectory.episode), _GAMMA, lam=_LAMBDA)
    credit_by_action, scale, uncoloured_reason = _read_credits(source, trajectory.episode)
    tools = spans_to_tools(spans)
    names = {action_id: [_tool_name(tool) for tool in called_tools] for action_id, called_tools in tools.items()}
    builder = _CardBuilder(
        trajectory,
        spans,
        tools,
        credit_by_action=credit_by_action,
        scale=scale,
        uncoloured_reason=uncoloured_reason,
        texts=texts,
    )
    shown_actions = trajectory.actions[first : first + ACTIONS_PER_PAGE]
    drawing = None
    if len(trajectory.actions) <= MAX_DRAWN_ACTIONS:
        css_classes = {
            action_id: scale.css_class(action_to_mean(credit))
            for action_id, credit in credit_by_action.items()
            if scale and credit.normalised
        }
        drawing = trajectory_to_svg(trajectory, names, name="graph", link=_action_address, css_classes=css_classes)
    # Lazily, so that they are read after the cards are built: a tokenizer is loaded, or fails to, on its first use.
    reasons = (texts.for_node(action.node).unavailable_reason for action in trajectory.actions)
    return EpisodePage(
        episode=trajectory.episode,
        drawing=drawing,
        rewards=[reward for reward in trajectory.rewards if reward.scope != "step"],
        estimates=estimates,
        actions=[builder.build(action) for action in shown_actions],
        first=first,
        action_count=len(trajectory.actions),
        scale=scale,
        uncoloured_reason=uncoloured_reason,
        missing_texts_reason=next((reason for reason in reasons if reason is not None), None),
        link=episodes_to_links(store, [episode_id])[episode_id],
        followers=episode_to_next(store, episode_id),
        ends=_spans_to_ends(spans),
        task=first_words(trajectory.episode.task),
    )


def _spans_to_ends(spans: Sequence[SpanRow]) -> list[MessageText]:
    root = next((span for span in spans if span.parent_span_id is None), None)
    if root is None:
        return []
    ends = {"input": root.attributes.get(c.INPUT), "output": root.attributes.get(c.OUTPUT)}
    return [
        limit_text(name, text if isinstance(text, str) else value_to_json(text, None))
        for name, text in ends.items()
        if text is not None
    ]


def _action_address(action: Action) -> str:
    first_shown = action.index // ACTIONS_PER_PAGE * ACTIONS_PER_PAGE
    return f"/episode?id={action.episode_id}&at={first_shown}#a{action.index}"


def _read_credits(
    source: ViewSource, episode: Episode
) -> tuple[Mapping[str, StoredAdvantage], ColourScale | None, str | None]:
    """Action id -> its advantages in the episode's round, and the round's scale; or the reason why there are none."""
    if episode.run_id != TRAIN or episode.round is None:
        return {}, None, "advantages are kept of rounds of `marft-bridge train`, and this episode was played for none"
    if source.run is None:
        return {}, None, "advantages lie in the run folder, and this store was opened without one"
    advantages_folder, round_number = source.run.advantages, episode.round
    try:
        credit_by_action = file_to_advantages(advantages_folder, round_number, episode.episode_id)
        scale = file_to_scale(advantages_folder, round_number)
    except FileNotFoundError:
        reason = f"none are kept of round {round_number}: it was not learned from, or not with train.keep_advantages"
        return {}, None, reason
    except ValueError as error:
        return {}, None, f"the file of round {round_number} cannot be read: {error}"
    if not credit_by_action:
        return {}, None, f"round {round_number} did not learn from this episode, or kept no more than the first of them"
    return credit_by_action, ColourScale(scale or 1.0), None


class _CardBuilder:
    def __init__(
        self,
        trajectory: Trajectory,
        spans: Sequence[SpanRow],
        tools: Mapping[str, Sequence[SpanRow]],
        credit_by_action: Mapping[str, StoredAdvantage],
        scale: ColourScale | None,
        uncoloured_reason: str | None,
        texts: TextsByNode,
    ) -> None:
        self.trajectory, self.credit_by_action, self.scale = trajectory, credit_by_action, scale
        self.uncoloured_reason, self.token_texts = uncoloured_reason, texts
        self.spans = {span.span_id: span for span in spans}
        self.actions = {action.action_id: action for action in trajectory.actions}
        self.tools_by_action = tools

    def build(self, action: Action) -> ActionCard:
        """The card of one action."""
        span = self.spans.get(action.action_id)
        messages = [] if span is None else list(messages_to_texts(span.attributes.get(c.INPUT_MESSAGES)))
        half = MAX_MESSAGES // 2
        omitted_messages = max(0, len(messages) - MAX_MESSAGES)
        shown_messages = messages if not omitted_messages else [*messages[:half], *messages[-half:]]
        answer = None if span is None else next(iter(messages_to_texts(span.attributes.get(c.OUTPUT_MESSAGES))), None)
        answer_text = answer[1] if answer is not None and answer[1] else action.completion
        credit, uncoloured_reason = self.credit_by_action.get(action.action_id), self.uncoloured_reason
        if credit is None and uncoloured_reason is None:
            uncoloured_reason = "this action was not learned from"
        elif credit is not None and not fits(action, credit):
            credit, uncoloured_reason = None, "what is kept of it does not fit its tokens"
        ids = (action.sampled_ids or ())[:MAX_SHOWN_TOKENS]
        pieces = self.token_texts.for_node(action.node).ids_to_pieces(ids) if ids else None
        kinds_by_source: dict[str, list[str]] = {}
        for edge in self.trajectory.edges:
            if edge.dst == action.action_id:
                kinds_by_source.setdefault(edge.src, []).append(edge.kind + ("" if edge.exact else ", an upper bound"))
        return ActionCard(
            action=action,
            messages=[limit_text(role, text) for role, text in shown_messages],
            omitted_messages=omitted_messages,
            answer=None if answer_text is None else limit_text("answer", answer_text),
            failure=None if span is None or span.status == "ok" else span.status_message or "it failed",
            token_spans=action_to_spans(action, pieces, credit, scale=self.scale),
            omitted_tokens=len(action.sampled_ids or ()) - len(ids),
            mean_advantage=None if credit is None else action_to_mean(credit),
            uncoloured_reason=uncoloured_reason,
            dependencies=[(self.actions[src], kinds) for src, kinds in kinds_by_source.items()],
            tools=[_tool_to_texts(tool) for tool in self.tools_by_action.get(action.action_id, ())],
            rewards=[reward for reward in self.trajectory.rewards if reward.action_id == action.action_id],
            has_texts=pieces is not None,
        )


def _tool_name(tool: SpanRow) -> str:
    return str(tool.attributes.get(c.TOOL_NAME) or tool.name)


def _tool_to_texts(tool: SpanRow) -> tuple[str, list[MessageText]]:
    fields = {
        "arguments": tool.attributes.get(c.TOOL_ARGUMENTS),
        "result": tool.attributes.get(c.TOOL_RESULT),
        "failed": tool.status_message if tool.status == "error" else None,
    }
    texts = {name: value if isinstance(value, str) else value_to_json(value, None) for name, value in fields.items()}
    return _tool_name(tool), [limit_text(name, texts[name]) for name, value in fields.items() if value is not None]


def limit_text(role: str, text: str) -> MessageText:
    """A text as a message, cut."""
    return MessageText(role, text[:MAX_TEXT_LETTERS], max(0, len(text) - MAX_TEXT_LETTERS))
