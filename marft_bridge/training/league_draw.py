"""A round's requests -> the same requests, on some of whose tasks one side is an earlier version of itself, frozen.

Invariant: the draw follows from seed, round and task alone, so that a round which was stopped goes on with the same
opponents, and all samples of a task meet the same one: what is compared differs in nothing else. No call of an opponent
is learned from, and its side is named in a tag of the episode.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from marft_bridge.config.league import LeagueOptions
from marft_bridge.rollouts.episode_plan import EpisodeRequest

OPPONENT = "opponent"
"""Tag of an episode against an earlier version: "side@version"."""


def draw_opponents(
    requests: Sequence[EpisodeRequest],
    options: LeagueOptions,
    sides: Mapping[str, Sequence[str]],
    *,
    newest: int,
    seed: int,
) -> list[EpisodeRequest]:
    """The requests of a round with its opponents; all as they were where there is no earlier version.

    Args:
        sides: side -> its nodes.
        newest: the version that the requests are of; 0 is the base model.
    """
    earlier_versions = range(max(0, newest - options.versions), newest)
    drawn = []
    for request in requests:
        chance = random.Random(f"league/{seed}/{request.round}/{request.task['id']}")
        if earlier_versions and chance.random() < options.share:
            side, version = chance.choice(sorted(sides)), chance.choice(earlier_versions)
            nodes = sides[side]
            drawn.append(
                replace(
                    request,
                    adapters={**request.adapters, **dict.fromkeys(nodes, version)},
                    frozen=frozenset(nodes),
                    tags={**request.tags, OPPONENT: f"{side}@{version}"},
                )
            )
        else:
            drawn.append(request)
    return drawn
