"""Stored trajectories to those that may be replayed today.

Two questions, asked before anything is computed of an episode: is it of the same game, prompt for prompt (lineage),
and are its policies near enough to today's that a ratio to them means something (staleness)? A third one once the
ratios are known, how many of the actions they leave, is asked by `scoring.effective_sample_size`.
Invariant: an episode that is left out is counted once, under the first reason that holds, and the number of different
reasons does not grow with the data. It knows nothing of losses, of where episodes are stored or of who hashed what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trace_store.records import MODEL_PARTS, TOOLS_OF, Episode, Trajectory, model_part
from trainers.config import ReplayOptions

TOO_STALE = "replay: sampled by an adapter more than replay.max_staleness versions behind"


@dataclass(frozen=True, slots=True)
class Gated:
    """Stored trajectories that may be replayed, in their order, and the others, each with the reason."""

    kept: list[Trajectory]
    refused: list[tuple[Trajectory, str]]

    @property
    def drops(self) -> dict[str, int]:
        """Reason -> how many episodes were left out for it."""
        return dict(Counter(reason for _, reason in self.refused))


def gate_episodes(
    trajectories: Sequence[Trajectory],
    today: Mapping[str, str],
    options: ReplayOptions,
    newest_version: Mapping[str, int],
    needs_behaviour: bool,
) -> Gated:
    """Stored trajectories to those that may be replayed.

    Lineage is looked at first. A hash of today that the episode has too must be equal, unless `options.lineage` is
    `any`; one that it lacks is refused by `same` only. A name `tools/<node>` is about the prompts of that node: it is
    looked at where the node acted in the episode, and then what is absent means that no tools were offered, which for
    an episode with a lineage is known. `base`, `template` and `tokenizer` are those of each node that acted. What else
    only the episode has is not looked at: today may not know it yet.

    Staleness is how many versions the adapter that sampled an action lies behind the newest one of that agent, at
    most over the actions of the episode that can be trained on: an opponent of the league may be of any version.
    Actions without an adapter are those of version 0, the base model. An adapter that is ahead of the newest one (of
    another run) is not behind; its weights say what it is worth.

    Args:
        today: name -> SHA-256 of what an action of today is made with, as in `Episode.lineage`.
        newest_version: agent -> version that is trained; the actions of other agents have no staleness.
        needs_behaviour: whether the loss forms a ratio to the policy that sampled. Imitation forms none, and takes
            the behaviour of any policy: staleness is not looked at.
    """
    gated = Gated([], [])
    for trajectory in trajectories:
        reason = (
            None if options.lineage == "any" else _find_lineage_reason(trajectory, today, options.lineage == "same")
        )
        if reason is None and needs_behaviour and _staleness(trajectory, newest_version) > options.max_staleness:
            reason = TOO_STALE
        if reason is None:
            gated.kept.append(trajectory)
        else:
            gated.refused.append((trajectory, reason))
    return gated


def _find_lineage_reason(trajectory: Trajectory, today: Mapping[str, str], strict: bool) -> str | None:
    """The first part of today's lineage that is not that of the episode; `strict` refuses what is not recorded."""
    acted = {action.node for action in trajectory.actions}
    lineage = trajectory.episode.lineage
    digest_pairs = {name: (digest, lineage.get(name)) for name, digest in today.items() if _is_about(name, acted)}
    for part in MODEL_PARTS:
        for node in sorted(acted):
            name = f"{part}/{node}" if f"{part}/{node}" in {*today, *lineage} else part
            if (digest := model_part(today, part, node)) is not None:
                digest_pairs[name] = (digest, model_part(lineage, part, node))
    for name, (digest, episode_digest) in sorted(digest_pairs.items()):
        if episode_digest == digest:
            continue
        if episode_digest is not None or _offered_none(trajectory.episode, name):
            return f"replay: lineage: {name} differs from today's"
        if strict:
            return f"replay: lineage: {name} is not recorded (replay.lineage 'known' takes such episodes)"
    return None


def _is_about(name: str, acted: Collection[str]) -> bool:
    """Whether a name of today's lineage says something about an episode in which these nodes acted.

    Parts of base models are looked at by node, where any acted.
    """
    if name.startswith(TOOLS_OF):
        return name.removeprefix(TOOLS_OF) in acted
    part = name.partition("/")[0]
    return part not in MODEL_PARTS or (not acted and name == part)


def _offered_none(episode: Episode, name: str) -> bool:
    """Whether an absent hash of tools means that there were none: who records a lineage records tools."""
    return name.startswith(TOOLS_OF) and bool(episode.lineage)


def _staleness(trajectory: Trajectory, newest_version: Mapping[str, int]) -> int:
    version_gaps = (
        newest_version[action.node] - (action.adapter_version or 0)
        for action in trajectory.actions
        if action.node in newest_version and action.trainable
    )
    return max(version_gaps, default=0)
