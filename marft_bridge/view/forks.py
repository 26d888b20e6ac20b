"""An episode of a store -> what its page shows of forks: where it left another one, and its own forks by call.

Invariant: the rows of a page are bounded, and what is left out is counted; a worth is of all forks, shown or not. Texts
are escaped by the template.
"""

from __future__ import annotations

from dataclasses import dataclass

from marft_bridge.traces.forks import ForkBranch, ForkedCall, ForkOrigin, episode_to_forks, episode_to_origin
from marft_bridge.view.episode import MessageText, limit_text
from trace_store.records import Episode
from trace_store.store import TraceStore

MAX_FORKED_CALLS = 20
MAX_BRANCHES = 24  # of one call


@dataclass(frozen=True, slots=True)
class ForkCard:
    """One call that was forked. None: no answer is known."""

    point: ForkedCall
    recorded: MessageText | None
    branches: list[tuple[ForkBranch, MessageText | None]]  # with the answer of the call that was made again
    omitted_branches: int


@dataclass(frozen=True, slots=True)
class ForkSection:
    """The part of an episode's page on forks."""

    origin: ForkOrigin | None  # None: the episode is no fork
    cards: list[ForkCard]
    omitted_calls: int
    fork_ids: frozenset[str]  # of all its forks


def episode_to_fork_section(store: TraceStore, episode: Episode) -> ForkSection | None:
    """None for an episode that neither is a fork nor has any."""
    origin, points = episode_to_origin(store, episode), episode_to_forks(store, episode)
    if origin is None and not points:
        return None
    ids = frozenset(branch.episode_id for point in points for branch in point.branches)
    cards = [_point_to_card(point) for point in points[:MAX_FORKED_CALLS]]
    return ForkSection(origin, cards, max(0, len(points) - MAX_FORKED_CALLS), fork_ids=ids)


def _point_to_card(point: ForkedCall) -> ForkCard:
    shown = [(branch, _answer_to_message(branch.answer)) for branch in point.branches[:MAX_BRANCHES]]
    return ForkCard(
        point, _answer_to_message(point.answer), shown, omitted_branches=max(0, len(point.branches) - MAX_BRANCHES)
    )


def _answer_to_message(answer: str | None) -> MessageText | None:
    return None if answer is None else limit_text("answer", answer)
