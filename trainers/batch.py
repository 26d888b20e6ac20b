"""Trajectories to episodes that can be trained on: what the optimiser eats.

Invariant: what is left out is counted with its reason; what is kept has exactly the token ids and log-probs that
the engine recorded, untruncated. An action without log-probs can be kept for imitation only, before the rounds or as a
success beside one, and says so by `behaviour = None`, which no importance weight accepts. A call that a fork repeats is
kept once, in the episode that sampled it (`trainers.forest`). A token that the engine could not but sample is read by
those after it and takes part in nothing else (`forced_tokens`). It knows nothing of policies, critics or losses.
"""

# ruff: noqa: N802, N803, N806, N815 (shape suffixes)
from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from trace_store.records import BLIND_FORK, HELDOUT, NO_LOGPROBS, RETOKENISED, Action, Episode, Trajectory
from trainers.dependencies import Successors, edges_to_successors, transitive_reduction
from trainers.errors import TrainError
from trainers.forest import Forest, Fork, episodes_to_forest
from trainers.rewards import EpisodeRewards, ShapingTerm, trajectory_to_rewards

Use = Literal["on_policy", "replay", "imitation", "demonstration", "success"]
"""`on_policy`: fresh actions for a ratio. `replay`: old ones for a ratio. `imitation`: no ratio is formed.
`demonstration`: likewise, and actions that were re-tokenised are good enough. `success`: old ones to be made likelier,
by a ratio where one can be formed; else as for a demonstration."""
_OLDER = ("replay", "success")
_RATIO = ("on_policy", "replay")
_RETOKENISED = ("demonstration", "success")

GREEDY = "sampled greedily or at an unknown temperature"
NARROWED = "sampled with top-p or top-k, so its log-probs are not comparable"
_NOT_TRAINED = "node is not trained"
_ALL_FORCED = "every token was forced"
_REPEATED = "repeated by a fork, and counted where it was sampled"


@dataclass(frozen=True, slots=True)
class ActionItem:
    """One action as the optimiser needs it: what is learned from are its decided tokens.

    `behaviour` has the engine's log-probs of these, parallel to `decided`; None where they are unknown.
    """

    agent: str
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    behaviour: tuple[float, ...] | None
    temperature: float
    turn: int = 0  # which of the agent's actions in its episode this is, from 0
    version: int | None = None  # of the adapter that sampled it; None for the base model or where it is unknown
    retokenised: bool = False  # the ids were made from its text: no engine sampled them
    forced: tuple[int, ...] = ()  # positions in `sampled_ids` of the tokens that were no decision
    decided: tuple[int, ...] = field(init=False)  # those of all others, ascending

    def __post_init__(self) -> None:
        forced = set(self.forced)
        decided = tuple(k for k in range(len(self.sampled_ids)) if k not in forced)
        object.__setattr__(self, "decided", decided)

    @property
    def decided_ids(self) -> tuple[int, ...]:
        """The ids of the decided tokens."""
        return tuple(self.sampled_ids[k] for k in self.decided)

    @property
    def input_ids(self) -> tuple[int, ...]:
        """What a model reads to score the decided tokens: prompt and sampled ids up to the last of them, without it."""
        return self.prompt_ids + self.sampled_ids[: self.decided[-1]]

    @property
    def columns(self) -> tuple[int, ...]:
        """Where in `input_ids` each decided token is predicted: one to the left of where it stands."""
        before_first = len(self.prompt_ids) - 1
        return tuple(before_first + k for k in self.decided)

    @property
    def decided_stretches(self) -> list[tuple[int, ...]]:
        """The ids of the decided tokens, those together that stand side by side."""
        stretches: list[list[int]] = []
        for i, k in enumerate(self.decided):
            if i == 0 or self.decided[i - 1] != k - 1:
                stretches.append([])
            stretches[-1].append(self.sampled_ids[k])
        return [tuple(stretch) for stretch in stretches]


@dataclass(frozen=True, slots=True)
class EpisodeItem:
    """One episode: its trained actions in topological order, who directly depends on whom, and what was earned."""

    task_id: str
    reward: float  # the team reward as recorded, without shaping
    truncated: bool  # and its return is not known
    actions: tuple[ActionItem, ...]
    successors: Successors
    rewards: EpisodeRewards
    replayed: bool = False  # older than the round that it is part of
    episode_id: str = ""
    action_ids: tuple[str, ...] = ()  # parallel to `actions`
    fork: Fork | None = None  # where it left another run; then `actions` are its own, made anew
    task_content: str = ""  # its fields without its id, as JSON; its id where it has none


@dataclass(frozen=True, slots=True)
class Round:
    """Episodes, and their actions laid end to end; `episode_A` says which episode an action belongs to."""

    episodes: tuple[EpisodeItem, ...]
    drops: dict[str, int]  # what was left out, by reason
    items: tuple[ActionItem, ...]
    episode_A: tuple[int, ...]
    forest: Forest | None = None  # None where no episode is a fork
    dropped_calls: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Agent -> reason -> its calls that were left out, also those of episodes that were. Of a round that was read from
    trajectories: there these and `items` are all calls of the agent."""

    @property
    def tree_A(self) -> tuple[int, ...]:
        """Which tree an action belongs to: equal numbers share a beginning. Without forks that is the episode."""
        return self.episode_A if self.forest is None else tuple(self.forest.root_E[e] for e in self.episode_A)

    @property
    def tree_E(self) -> tuple[int, ...]:
        """Which tree an episode belongs to."""
        return tuple(range(len(self.episodes))) if self.forest is None else self.forest.root_E

    def agents_to_rows(self, agents: Sequence[str]) -> list[int]:
        """Positions of some agents' actions."""
        return [i for i, item in enumerate(self.items) if item.agent in agents]

    def is_replayed(self, row: int) -> bool:
        """Whether the action at a position is of an older episode."""
        return self.episodes[self.episode_A[row]].replayed

    @property
    def fresh(self) -> Round:
        """The round without its older episodes."""
        return episodes_to_round([episode for episode in self.episodes if not episode.replayed], self.drops)

    def with_items(self, items: Sequence[ActionItem]) -> Round:
        """The round with other items in the places of its own, episode by episode."""
        actions: list[list[ActionItem]] = [[] for _ in self.episodes]
        for item, e in zip(items, self.episode_A, strict=True):
            actions[e].append(item)
        episodes = (replace(episode, actions=tuple(own)) for episode, own in zip(self.episodes, actions, strict=True))
        return replace(self, episodes=tuple(episodes), items=tuple(items))

    @property
    def is_all_forced(self) -> bool:
        """Whether actions of trained nodes were left out for being forced, and for nothing else."""
        reasons = {reason for reason in self.drops if reason.startswith("action: ")}
        return reasons - {f"action: {_NOT_TRAINED}"} == {f"action: {_ALL_FORCED}"}

    def only(self, keep: Callable[[EpisodeItem], bool], reason: str) -> Round:
        """The round without the episodes that `keep` refuses, counted under `reason`."""
        kept_episodes = [episode for episode in self.episodes if keep(episode)]
        refused = len(self.episodes) - len(kept_episodes)
        drops = {**self.drops, reason: self.drops.get(reason, 0) + refused} if refused else self.drops
        data = episodes_to_round(kept_episodes, drops)
        refused_calls = Counter(item.agent for item in self.items) - Counter(item.agent for item in data.items)
        calls = {agent: {reason: count} for agent, count in refused_calls.items()}
        return replace(data, dropped_calls=_added(self.dropped_calls, calls) if self.dropped_calls else {})

    def joined(self, other: Round) -> Round:
        """The episodes of both, this one's first, and what both left out."""
        drops = dict(Counter(self.drops) + Counter(other.drops))
        data = episodes_to_round([*self.episodes, *other.episodes], drops)
        return replace(data, dropped_calls=_added(self.dropped_calls, other.dropped_calls))

    def also_dropped(self, refused: Sequence[tuple[Trajectory, str]]) -> Round:
        """The round with episodes that were left out, for these reasons, before it was read."""
        calls: dict[str, Counter[str]] = {agent: Counter() for agent in self.dropped_calls}
        for trajectory, reason in refused:
            for action in trajectory.actions:
                if action.node in calls:
                    calls[action.node][reason] += 1
        drops = {**self.drops, **Counter(reason for _, reason in refused)}
        return replace(self, drops=drops, dropped_calls=_added(self.dropped_calls, calls))


def trajectories_to_round(
    trajectories: Sequence[Trajectory],
    agents: Sequence[str],
    reward: str,
    vocabulary: Mapping[str, int],
    use: Use,
    shaping: Sequence[ShapingTerm] = (),
    final: bool = False,
    is_heldout: Callable[[Episode], bool] = lambda _: False,
    refused: Mapping[str, str] | None = None,
    side_of: Mapping[str, str] | None = None,
) -> Round:
    """Trajectories to what can be trained on, with the count of episodes and actions left out, by reason.

    Actions that are left out count as part of the environment: dependencies and step rewards pass through them.

    Args:
        agents: nodes whose adapters are trained.
        reward: name of the team reward; an episode without it is left out.
        vocabulary: number of token ids that the base model of each agent knows.
        use: `on_policy` and `replay` also refuse what makes a ratio meaningless (no log-probs; greedy, top-p or top-k
            sampling). For `imitation` such actions are kept, and a greedy one is scored at temperature 1. Those that
            were re-tokenised are for `demonstration` and `success` only. A `success` that no ratio can be formed for is
            without `behaviour`.
        shaping: further rewards; an episode that lacks one is kept, and counted.
        final: the team reward of an episode that was cut short is its score, so it counts as terminated, as it does
            where that reward is what a limit is worth (`Trajectory.is_unfinished`).
        is_heldout: which episodes are of tasks that are kept for comparison, besides those of the split `heldout`.
        refused: agent -> why none of its actions here is learned from.
        side_of: agent -> its side, see `trajectory_to_rewards`. None: all are one team.

    Raises:
        TrainError: a trajectory is held out. Whoever reads a store leaves such out, and says how many. Or a reward is
            not one side's own.
    """
    drops: Counter[str] = Counter()
    dropped: dict[str, Counter[str]] = {agent: Counter() for agent in agents}
    origins = _Origins(trajectories)
    episodes = []

    def drop_episode(trajectory: Trajectory, reason: str) -> None:
        drops[reason] += 1
        for action in trajectory.actions:
            if action.node in dropped:
                dropped[action.node][reason] += 1

    for trajectory in trajectories:
        if trajectory.episode.split == HELDOUT or is_heldout(trajectory.episode):
            raise TrainError(
                f"episode {trajectory.episode.episode_id} of task {trajectory.episode.task_id!r} is held out; a "
                "comparison would show what was learned by heart: leave it out of training"
            )
        value = trajectory.team_reward(reward)
        if trajectory.episode.outcome == "failed":
            drop_episode(trajectory, "episode failed")
        elif value is None or not math.isfinite(value):
            drop_episode(trajectory, f"episode without a finite reward {reward!r}")
        else:
            reasons = [
                find_drop_reason(action, agents, vocabulary, use=use) or (refused or {}).get(action.node)
                for action in map(origins.sampled, trajectory.actions)
            ]
            is_trained_A = [reason is None for reason in reasons]
            for i, action in enumerate(trajectory.actions):
                if action.replayed_from is not None and reasons[i] is None:
                    reasons[i] = _REPEATED
            drops.update(f"action: {reason}" for reason in reasons if reason is not None)
            try:
                episode = _to_episode(
                    trajectory,
                    [r is None for r in reasons],
                    (reward, value),
                    shaping=shaping,
                    use=use,
                    final=final,
                    drops=drops,
                    side_of=side_of,
                )
                if trajectory.episode.fork_action is not None:
                    fork = _to_fork(
                        trajectory,
                        is_trained_A,
                        (reward, value),
                        origins=origins,
                        shaping=shaping,
                        use=use,
                        final=final,
                        side_of=side_of,
                    )
                    episode = _with_turns(replace(episode, fork=fork), fork, origins.absent(trajectory))
            except (KeyError, ValueError):
                drop_episode(trajectory, "episode whose edges do not fit its actions")
                continue
            for action, reason in zip(trajectory.actions, reasons, strict=True):
                if reason is not None and action.node in dropped:
                    dropped[action.node][reason] += 1
            if episode.actions:
                episodes.append(episode)
            else:
                drops["episode without an action to train on"] += 1
    calls = {agent: dict(counts) for agent, counts in dropped.items()}
    return replace(episodes_to_round(episodes, dict(drops)), dropped_calls=calls)


def _added(calls: Mapping[str, Mapping[str, int]], more: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Agent -> reason -> count, added up."""
    return {
        agent: dict(Counter(calls.get(agent, {})) + Counter(more.get(agent, {}))) for agent in sorted({*calls, *more})
    }


def episodes_to_round(episodes: Sequence[EpisodeItem], drops: dict[str, int]) -> Round:
    """Episodes laid end to end."""
    items = tuple(item for episode in episodes for item in episode.actions)
    episode_A = tuple(i for i, episode in enumerate(episodes) for _ in episode.actions)
    data = Round(tuple(episodes), drops, items, episode_A=episode_A)
    return replace(data, forest=episodes_to_forest(data))


class _Origins:
    """The calls of some trajectories, by id; a repeated one leads to that which was sampled, as far as they hold it."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        is_forked = any(trajectory.episode.fork_action is not None for trajectory in trajectories)
        self._trajectories = {t.episode.episode_id: t for t in trajectories if is_forked}
        self._actions = {action.action_id: action for t in self._trajectories.values() for action in t.actions}

    def sampled(self, action: Action) -> Action:
        """The call that an action repeats; itself where it was sampled, or where that call is not here."""
        while action.replayed_from is not None and action.replayed_from in self._actions:
            action = self._actions[action.replayed_from]
        return action

    def sampled_id(self, action: Action) -> str:
        """The id of that call, also where only its id is known."""
        action = self.sampled(action)
        return action.replayed_from or action.action_id

    def absent(self, trajectory: Trajectory) -> Counter[str]:
        """How many calls a fork repeats, by node, whose originals are not here: those of a stored run."""
        repeated = (self.sampled(action) for action in trajectory.actions if action.replayed_from is not None)
        return Counter(action.node for action in repeated if action.replayed_from is not None)

    def point(self, episode: Episode) -> tuple[tuple[str, str], int]:
        """Where a fork left another run: the episode that sampled the call, the call, and its position there."""
        assert episode.fork_action is not None
        call = self._actions.get(episode.fork_action)
        if call is None:
            return (episode.parent_episode or "", episode.fork_action), 0
        call = self.sampled(call)
        return (call.episode_id, self.sampled_id(call)), call.index


def _to_fork(
    trajectory: Trajectory,
    is_trained_A: Sequence[bool],
    team: tuple[str, float],
    *,
    origins: _Origins,
    shaping: Sequence[ShapingTerm],
    use: Use,
    final: bool,
    side_of: Mapping[str, str] | None,
) -> Fork:
    """Where a run left another one, and the run with the calls that it repeats among its own."""
    ids = {action.action_id: origins.sampled_id(action) for action in trajectory.actions}
    actions = tuple(
        replace(origins.sampled(action), action_id=ids[action.action_id], index=action.index)
        for action in trajectory.actions
    )
    edges = tuple(replace(edge, src=ids[edge.src], dst=ids[edge.dst]) for edge in trajectory.edges)
    rewards = tuple(replace(r, action_id=ids.get(r.action_id or "", r.action_id)) for r in trajectory.rewards)
    unrolled = replace(trajectory, actions=actions, edges=edges, rewards=rewards)
    whole = _to_episode(
        unrolled,
        is_trained_A,
        team,
        shaping=shaping,
        use=use,
        final=final,
        drops=Counter(),
        side_of=side_of,
    )
    own = [i for i, action in enumerate(trajectory.actions) if action.replayed_from is None]
    point, depth = origins.point(trajectory.episode)
    return Fork(
        point,
        depth,
        blind=BLIND_FORK in trajectory.episode.tags,
        repeats=frozenset(ids[action.action_id] for action in trajectory.actions if action.replayed_from is not None),
        remakes=bool(own) and is_trained_A[own[0]],
        whole=whole,
    )


def _with_turns(episode: EpisodeItem, fork: Fork, absent: Mapping[str, int]) -> EpisodeItem:
    """The fork with the turns that its own calls have in the whole run, of which some calls may be `absent`."""
    assert fork.whole is not None
    turns = {
        a: item.turn + absent.get(item.agent, 0)
        for a, item in zip(fork.whole.action_ids, fork.whole.actions, strict=True)
    }
    items = [replace(item, turn=turns[a]) for a, item in zip(episode.action_ids, episode.actions, strict=True)]
    return replace(episode, actions=tuple(items))


def _to_episode(
    trajectory: Trajectory,
    is_kept_A: Sequence[bool],
    team: tuple[str, float],
    shaping: Sequence[ShapingTerm],
    use: Use,
    final: bool,
    drops: Counter[str],
    side_of: Mapping[str, str] | None,
) -> EpisodeItem:
    position = {action.action_id: i for i, action in enumerate(trajectory.actions)}
    edges = [(position[edge.src], position[edge.dst]) for edge in trajectory.edges]
    successors = edges_to_successors(len(is_kept_A), edges, is_kept_A)
    reduced = [
        (src, dst) for src, dependents in enumerate(transitive_reduction(len(is_kept_A), edges)) for dst in dependents
    ]
    rewards, absent = trajectory_to_rewards(
        trajectory, team, shaping, edges=reduced, is_kept_A=is_kept_A, side_of=side_of
    )
    actions = [a for a, keep in zip(trajectory.actions, is_kept_A, strict=True) if keep]
    drops.update(f"reward: no finite {term.reward!r} of level {term.level}; nothing is added for it" for term in absent)
    return EpisodeItem(
        task_id=trajectory.episode.task_id,
        reward=team[1],
        truncated=trajectory.is_unfinished(team[0]) and not final,
        actions=_to_items(actions, use),
        successors=successors,
        rewards=rewards,
        replayed=use in _OLDER,
        episode_id=trajectory.episode.episode_id,
        action_ids=tuple(action.action_id for action in actions),
        task_content=_to_task_content(trajectory.episode),
    )


def _to_task_content(episode: Episode) -> str:
    """Equal for tasks that differ in their ids only: traces of an app's task have ids of their own."""
    fields = {key: value for key, value in episode.task.items() if key != "id"}
    return json.dumps(fields, sort_keys=True, default=repr) if fields else episode.task_id


def narrows_sampling(action: Action) -> bool:
    """Whether top-p or top-k cut the distribution, so that the engine's log-probs are not those of the whole policy."""
    return action.top_p not in (None, 1.0) or action.top_k not in (None, 0, -1)


def forced_tokens(action: Action) -> tuple[int, ...]:
    """Positions of the sampled tokens that were no decision: their log-prob by the engine is exactly 0.

    Of probability one under what the engine sampled from, as where a grammar or the template of a tool call leaves a
    single token. To the policy such a token may be improbable, so a ratio would take the grammar for a change of
    policy. A token of an unconstrained call whose log-prob is rounded to 0 counts as forced too, and nothing is lost:
    its gradient, 1 - p, is 0 as well.

    Empty where the whole distribution was not sampled from (greedily, with top-p or top-k, at an unknown temperature):
    there a log-prob of 0 tells how the token was picked. Such actions are for imitation only.
    """
    if action.logprobs is None or not action.temperature or narrows_sampling(action):
        return ()
    return tuple(k for k, logprob in enumerate(action.logprobs) if logprob == 0)


def forced_share(items: Sequence[ActionItem]) -> float | None:
    """The part of the sampled tokens of some actions that was forced; None without actions."""
    sampled_count = sum(len(item.sampled_ids) for item in items)
    return sum(len(item.forced) for item in items) / sampled_count if sampled_count else None


def find_drop_reason(action: Action, agents: Sequence[str], vocabulary: Mapping[str, int], use: Use) -> str | None:
    """The reason why an action cannot be trained on, or None."""
    if action.node not in agents:
        return _NOT_TRAINED
    if not action.prompt_ids or not action.sampled_ids:
        return action.untrainable_reason or "no token ids"
    if max(map(max, (action.prompt_ids, action.sampled_ids))) >= vocabulary[action.node]:
        return "token ids outside the base model's vocabulary"
    if action.untrainable_reason == RETOKENISED:
        return None if use in _RETOKENISED else RETOKENISED
    if use not in _RATIO and action.logprobs is None:
        return None if action.trainable or action.untrainable_reason == NO_LOGPROBS else action.untrainable_reason
    if not action.trainable:
        return action.untrainable_reason or "untrainable"
    if action.logprobs is None:
        return "no log-probs"
    if len(action.logprobs) != len(action.sampled_ids) or not all(map(math.isfinite, action.logprobs)):
        return "log-probs that are not finite, one per token"
    if use in _RATIO and not action.temperature:
        return GREEDY
    if use in _RATIO and narrows_sampling(action):
        return NARROWED
    return _ALL_FORCED if len(forced_tokens(action)) == len(action.sampled_ids) else None


def _to_items(actions: Sequence[Action], use: Use) -> tuple[ActionItem, ...]:
    turns: Counter[str] = Counter()
    items = []
    for action in actions:
        assert action.prompt_ids is not None
        assert action.sampled_ids is not None
        forced = forced_tokens(action)
        is_comparable = use != "success" or (action.temperature and not narrows_sampling(action))
        items.append(
            ActionItem(
                agent=action.node,
                prompt_ids=action.prompt_ids,
                sampled_ids=action.sampled_ids,
                behaviour=_without(action.logprobs, forced) if is_comparable else None,
                temperature=action.temperature or 1.0,
                turn=turns[action.node],
                version=action.adapter_version,
                retokenised=action.untrainable_reason == RETOKENISED,
                forced=forced,
            )
        )
        turns[action.node] += 1
    return tuple(items)


def _without(logprobs: tuple[float, ...] | None, forced: Sequence[int]) -> tuple[float, ...] | None:
    """The log-probs of all other tokens."""
    if logprobs is None or not forced:
        return logprobs
    positions = set(forced)
    return tuple(logprob for k, logprob in enumerate(logprobs) if k not in positions)
