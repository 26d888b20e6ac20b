"""An episode of a store -> what its page shows of forks: its place in the tree of them, and its own by call.

Invariant: the rows of a page are bounded, and what is left out is counted; a worth is of all forks, shown or not. Texts
are escaped by the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marft_bridge.traces.fork_tree import (
    DeeperFork,
    ForkAncestors,
    branches_to_deeper_forks,
    episode_to_ancestors,
)
from marft_bridge.traces.forks import ForkBranch, ForkedCall, episode_to_forks
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
class DeeperRow:
    """A fork of a fork as one item of the nested lists."""

    fork: DeeperFork
    opens: bool  # whether the next one is an item of a list in this one
    closes: int  # lists that end after it


@dataclass(frozen=True, slots=True)
class ForkSection:
    """The part of an episode's page on forks."""

    ancestors: ForkAncestors  # empty: the episode is no fork
    cards: list[ForkCard]
    omitted_calls: int
    deeper: dict[str, list[DeeperRow]]  # fork that is shown -> those below it
    omitted_deeper: int
    fork_ids: frozenset[str]  # of all its forks


def episode_to_fork_section(store: TraceStore, episode: Episode) -> ForkSection | None:
    """None for an episode that neither is a fork nor has any."""
    ancestors, points = episode_to_ancestors(store, episode), episode_to_forks(store, episode)
    if not ancestors.origins and not points:
        return None
    ids = frozenset(branch.episode_id for point in points for branch in point.branches)
    cards = [_point_to_card(point) for point in points[:MAX_FORKED_CALLS]]
    shown_ids = [branch.episode_id for card in cards for branch, _ in card.branches]
    below = branches_to_deeper_forks(store, shown_ids, episode.episode_id)
    return ForkSection(
        ancestors,
        cards,
        omitted_calls=max(0, len(points) - MAX_FORKED_CALLS),
        deeper={key: _to_rows(forks) for key, forks in below.by_branch.items()},
        omitted_deeper=below.omitted,
        fork_ids=ids,
    )


def _to_rows(forks: Sequence[DeeperFork]) -> list[DeeperRow]:
    """Forks, each before its own -> with the lists that begin and end between them."""
    next_depths = [*(fork.depth for fork in forks[1:]), forks[0].depth]
    return [
        DeeperRow(fork, opens=following > fork.depth, closes=max(0, fork.depth - following))
        for fork, following in zip(forks, next_depths, strict=True)
    ]


def _point_to_card(point: ForkedCall) -> ForkCard:
    shown = [(branch, _answer_to_message(branch.answer)) for branch in point.branches[:MAX_BRANCHES]]
    return ForkCard(
        point, _answer_to_message(point.answer), shown, omitted_branches=max(0, len(point.branches) - MAX_BRANCHES)
    )


def _answer_to_message(answer: str | None) -> MessageText | None:
    return None if answer is None else limit_text("answer", answer)
