"""Trajectories to episodes that can be trained on, and actions to padded micro-batches.

Invariant: what is left out is counted with its reason; what is kept has exactly the token ids and log-probs that
the engine recorded, untruncated. It knows nothing of policies, critics or losses.

Shapes of a `MicroBatch` (B actions, L columns, T sampled tokens of all its actions laid end to end):

    input_ids_BL   prompt + sampled ids without the last one, padded on the right with 0
    row_T          which action of the batch a sampled token belongs to, 0..B-1
    column_T       the column whose logits predict that token (one to the left of it)
    sampled_T      the token id
    temperature_T  the sampling temperature of its action

Padding on the right needs no attention mask: under a causal mask no real token sees what stands to its right.
"""

# ruff: noqa: N806, N815 (shape suffixes)
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_store.records import Action, Trajectory
from trainers.advantages import Successors, edges_to_successors


@dataclass(frozen=True, slots=True)
class ActionItem:
    """One action as the optimiser needs it. `behaviour` is parallel to `sampled_ids`."""

    agent: str
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    behaviour: tuple[float, ...]
    temperature: float


@dataclass(frozen=True, slots=True)
class EpisodeItem:
    """One episode: its trained actions in topological order, and who directly depends on whom among them."""

    task_id: str
    reward: float
    truncated: bool
    actions: tuple[ActionItem, ...]
    successors: Successors


@dataclass(frozen=True, slots=True)
class Round:
    """Episodes, and their actions laid end to end; `episode_A` says which episode an action belongs to."""

    episodes: tuple[EpisodeItem, ...]
    drops: dict[str, int]  # what was left out, by reason
    items: tuple[ActionItem, ...]
    episode_A: tuple[int, ...]

    def of(self, agent: str) -> list[int]:
        """Positions of an agent's actions."""
        return [i for i, item in enumerate(self.items) if item.agent == agent]

    def only(self, keep: Callable[[EpisodeItem], bool], reason: str) -> Round:
        """The round without the episodes that `keep` refuses, counted under `reason`."""
        kept = [episode for episode in self.episodes if keep(episode)]
        refused = len(self.episodes) - len(kept)
        return episodes_to_round(kept, {**self.drops, reason: refused} if refused else self.drops)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Actions of one agent, padded to one rectangle; shapes in the module's docstring."""

    items: tuple[int, ...]  # positions in the caller's list, one per row
    input_ids_BL: Tensor
    row_T: Tensor
    column_T: Tensor
    sampled_T: Tensor
    temperature_T: Tensor
    lengths: tuple[int, ...]  # sampled tokens per row; they sum to T


def trajectories_to_round(
    trajectories: Sequence[Trajectory], agents: Sequence[str], reward: str, vocabulary: int, on_policy: bool
) -> Round:
    """Trajectories to what can be trained on, with the count of episodes and actions left out, by reason.

    Actions that are left out count as part of the environment: dependencies pass through them.

    Args:
        agents: nodes whose adapters are trained.
        reward: name of the episode reward.
        vocabulary: number of token ids that the base model knows.
        on_policy: also refuse what makes a ratio meaningless (greedy, top-p or top-k sampling). Without it such
            actions are kept for imitation, and a greedy one is scored at temperature 1.
    """
    drops: Counter[str] = Counter()
    episodes = []
    for trajectory in trajectories:
        value = trajectory.team_reward(reward)
        if trajectory.episode.outcome == "failed":
            drops["episode failed"] += 1
        elif value is None or not math.isfinite(value):
            drops[f"episode without a finite reward {reward!r}"] += 1
        else:
            reasons = [_why_not(action, agents, vocabulary, on_policy) for action in trajectory.actions]
            drops.update(f"action: {reason}" for reason in reasons if reason is not None)
            kept = [reason is None for reason in reasons]
            position = {action.action_id: i for i, action in enumerate(trajectory.actions)}
            try:
                edges = [(position[edge.src], position[edge.dst]) for edge in trajectory.edges]
                successors = edges_to_successors(len(kept), edges, kept)
            except (KeyError, ValueError):
                drops["episode whose edges do not fit its actions"] += 1
                continue
            items = tuple(_to_item(a) for a, keep in zip(trajectory.actions, kept, strict=True) if keep)
            if items:
                truncated = trajectory.episode.outcome == "truncated"
                episodes.append(EpisodeItem(trajectory.episode.task_id, value, truncated, items, successors))
            else:
                drops["episode without an action to train on"] += 1
    return episodes_to_round(episodes, dict(drops))


def episodes_to_round(episodes: Sequence[EpisodeItem], drops: dict[str, int]) -> Round:
    """Episodes laid end to end."""
    items = tuple(item for episode in episodes for item in episode.actions)
    episode_A = tuple(i for i, episode in enumerate(episodes) for _ in episode.actions)
    return Round(tuple(episodes), drops, items, episode_A)


def _why_not(action: Action, agents: Sequence[str], vocabulary: int, on_policy: bool) -> str | None:
    """The reason why an action cannot be trained on, or None."""
    if action.node not in agents:
        return "node is not trained"
    if not action.trainable:
        return action.untrainable_reason or "untrainable"
    if not action.prompt_ids or not action.sampled_ids or action.logprobs is None:
        return "no token ids or log-probs"
    if len(action.logprobs) != len(action.sampled_ids) or not all(map(math.isfinite, action.logprobs)):
        return "log-probs that are not finite, one per token"
    if max(map(max, (action.prompt_ids, action.sampled_ids))) >= vocabulary:
        return "token ids outside the base model's vocabulary"
    if on_policy and not action.temperature:
        return "sampled greedily or at an unknown temperature"
    if on_policy and (action.top_p not in (None, 1.0) or action.top_k not in (None, 0, -1)):
        return "sampled with top-p or top-k, so its log-probs are not comparable"
    return None


def _to_item(action: Action) -> ActionItem:
    assert action.prompt_ids is not None
    assert action.sampled_ids is not None
    assert action.logprobs is not None
    return ActionItem(action.node, action.prompt_ids, action.sampled_ids, action.logprobs, action.temperature or 1.0)


def lengths_to_groups(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Lengths to groups of positions, longest first, with rows x longest row of each group within `budget`.

    Sorting keeps the padding small. A row longer than the budget gets a group of its own.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > budget:
            groups.append([])
        groups[-1].append(i)
    return groups


def rows_to_rectangle(rows: Sequence[Sequence[int]]) -> Tensor:
    """Token ids of several lengths to one tensor [B, L], padded on the right with 0."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)


def items_to_microbatches(
    items: Sequence[ActionItem], budget: int, chosen: Sequence[int] | None = None
) -> list[MicroBatch]:
    """Actions of one agent to micro-batches of at most `budget` padded tokens each (one action at least).

    `chosen` picks positions of `items`; None takes all.
    """
    positions = range(len(items)) if chosen is None else chosen
    lengths = [len(items[i].prompt_ids) + len(items[i].sampled_ids) - 1 for i in positions]
    return [_pad(items, [positions[k] for k in group]) for group in lengths_to_groups(lengths, budget)]


def _pad(items: Sequence[ActionItem], positions: Sequence[int]) -> MicroBatch:
    batch = [items[i] for i in positions]
    counts = tuple(len(item.sampled_ids) for item in batch)
    columns = [
        torch.arange(len(item.prompt_ids) - 1, len(item.prompt_ids) - 1 + n)
        for item, n in zip(batch, counts, strict=True)
    ]
    row_T = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor(counts))
    return MicroBatch(
        items=tuple(positions),
        input_ids_BL=rows_to_rectangle([item.prompt_ids + item.sampled_ids[:-1] for item in batch]),
        row_T=row_T,
        column_T=torch.cat(columns),
        sampled_T=torch.tensor([token for item in batch for token in item.sampled_ids]),
        temperature_T=torch.tensor([item.temperature for item in batch])[row_T],
        lengths=counts,
    )
