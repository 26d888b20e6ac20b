"""The stored rows of one episode -> its faults: the laws that they break.

Pure, and nothing is assumed of the rows but their types. An error breaks a law that training relies on; a warning may
be intended. `checkup` reads the rows, and checks the laws that concern a whole store.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from typing import Any, Literal, get_args

from trace_store.assemble import LOGPROB_TOLERANCE, Incomplete, Malformed, spans_to_trajectory
from trace_store.conventions import follows_todays_rule
from trace_store.dependencies import DependencyCycleError, topological_order
from trace_store.records import Action, EdgeKind, Episode, Outcome, Reward, RewardScope, SpanRow, Trajectory

Level = Literal["error", "warning"]

_SUM_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Fault:
    """One broken law. `law` is one word; `episode_id` is None for a fault of the whole store."""

    law: str
    message: str
    episode_id: str | None = None
    level: Level = "error"


def trajectory_to_faults(trajectory: Trajectory) -> Iterator[Fault]:
    """Every law that an episode's own rows can be held to: order, agents, tokens, D, outcome, adapters, rewards."""
    episode = trajectory.episode
    actions = {action.action_id: action for action in trajectory.actions}
    yield from _order_faults(episode.episode_id, list(actions.values()))
    for action in actions.values():
        for law, message in (
            ("agent", _agent_fault(action)),
            ("tokens", _token_fault(action)),
            ("adapters", _adapter_fault(action) or _version_fault(episode, action)),
        ):
            if message is not None:
                yield Fault(law, f"action {action.action_id}: {message}", episode.episode_id)
    yield from _edge_faults(trajectory, actions)
    yield from _outcome_faults(episode)
    yield from _reward_faults(trajectory, actions)


def _order_faults(episode_id: str, actions: Sequence[Action]) -> Iterator[Fault]:
    if sorted(action.index for action in actions) != list(range(len(actions))):
        positions = ", ".join(str(action.index) for action in actions[:10])
        yield Fault("order", f"the actions are not numbered from 0 without a gap: {positions}", episode_id)


def _agent_fault(action: Action) -> str | None:
    if not action.node and action.trainable:
        return "is trainable, yet has no agent"
    if action.trainable and action.untrainable_reason is not None:
        return f"is trainable, yet says why not: {action.untrainable_reason}"
    if not action.trainable and action.untrainable_reason is None:
        return "is not trainable, yet does not say why"
    return None


def _token_fault(action: Action) -> str | None:
    """Why a trainable action cannot be trained on; other actions may lack whole lists."""
    if None in (*(action.prompt_ids or ()), *(action.sampled_ids or ()), *(action.logprobs or ())):
        return "has a NULL among its ids or log-probs"
    if not action.trainable:
        return None
    if not action.prompt_ids or not action.sampled_ids or action.logprobs is None:
        return "is trainable, yet lacks prompt ids, sampled ids or log-probs"
    if len(action.sampled_ids) != len(action.logprobs):
        return f"has {len(action.sampled_ids)} sampled ids and {len(action.logprobs)} log-probs"
    bad_logprobs = [value for value in action.logprobs if not -math.inf < value <= LOGPROB_TOLERANCE]
    if bad_logprobs:
        return f"has the log-prob {bad_logprobs[0]}, which is no finite logarithm of a probability"
    negative_ids = [token for token in (*action.prompt_ids, *action.sampled_ids) if token < 0]
    return f"has the token id {negative_ids[0]}" if negative_ids else None


def _adapter_fault(action: Action) -> str | None:
    if action.adapter is None:
        return None
    node, _, version = action.adapter.rpartition("@")
    if not node or version != str(action.adapter_version):
        return f"ran adapter {action.adapter!r}, yet its version is {action.adapter_version}"
    return None


def _version_fault(episode: Episode, action: Action) -> str | None:
    episode_version = episode.adapters.get(action.node)
    if episode_version is None or action.adapter_version is None or episode_version == action.adapter_version:
        return None
    return f"ran version {action.adapter_version} of {action.node}, the episode says {episode_version}"


def _edge_faults(trajectory: Trajectory, actions: Mapping[str, Action]) -> Iterator[Fault]:
    has_backward_edge = False
    for edge in trajectory.edges:
        name = f"{edge.kind} edge {edge.src} -> {edge.dst}"
        missing_ends = [end for end in (edge.src, edge.dst) if end not in actions]
        if missing_ends:
            yield Fault("edges", f"{name}: {missing_ends[0]} is no action of this episode", edge.episode_id)
        elif actions[edge.src].index >= actions[edge.dst].index:
            has_backward_edge = True
            yield Fault("edges", f"{name} does not point forward in the order of the actions", edge.episode_id)
        if edge.kind not in get_args(EdgeKind):
            yield Fault("edges", f"{name}: no such kind", edge.episode_id)
    if has_backward_edge:
        inner_edges = [edge for edge in trajectory.edges if edge.src in actions and edge.dst in actions]
        try:
            topological_order({key: (action.started_ns, key) for key, action in actions.items()}, inner_edges)
        except DependencyCycleError as error:
            yield Fault("edges", str(error), trajectory.episode.episode_id)


def _outcome_faults(episode: Episode) -> Iterator[Fault]:
    if episode.outcome not in get_args(Outcome):
        yield Fault("outcome", f"{episode.outcome!r} is no outcome", episode.episode_id)
    elif episode.outcome == "terminated" and episode.reason is not None:
        yield Fault("outcome", f"terminated, yet it says why it was cut short: {episode.reason}", episode.episode_id)
    elif episode.outcome != "terminated" and episode.reason is None:
        yield Fault("outcome", f"{episode.outcome} without a reason", episode.episode_id)
    if episode.ended_ns < episode.started_ns:
        yield Fault("outcome", "it ends before it starts", episode.episode_id, level="warning")


def _reward_faults(trajectory: Trajectory, actions: Mapping[str, Action]) -> Iterator[Fault]:
    episode_id = trajectory.episode.episode_id
    nodes = {action.node for action in actions.values()}
    for reward in trajectory.rewards:
        message = _reward_fault(reward, actions, nodes)
        if message is not None:
            yield Fault("rewards", f"reward {reward.name!r} {message}", episode_id)
    for name in sorted({reward.name for reward in trajectory.rewards}):
        team_value = trajectory.team_reward(name)
        for scope in ("step", "agent"):
            part_values = _latest_values(trajectory.rewards, name, scope)
            if team_value is None or not part_values:
                continue
            part_sum = sum(part_values)  # not fsum: it raises where infinities cancel
            if not _sums_agree(team_value, part_sum):
                message = (
                    f"reward {name!r}: those of each {scope} sum to {part_sum:.6g}, the team's is {team_value:.6g}"
                )
                yield Fault("rewards", message, episode_id)


def _reward_fault(reward: Reward, actions: Mapping[str, Action], nodes: set[str]) -> str | None:
    if not math.isfinite(reward.value):
        return f"is {reward.value}"
    if reward.scope not in get_args(RewardScope):
        return f"has the scope {reward.scope!r}, which there is not"
    if reward.scope == "step" and reward.action_id not in actions:
        return f"is for the action {reward.action_id}, which is not in this episode"
    if reward.scope == "agent" and reward.node not in nodes:
        return f"is for the agent {reward.node!r}, which did not act in this episode"
    if reward.scope == "episode" and (reward.action_id is not None or reward.node is not None):
        return "is the team's, yet names an action or an agent"
    return None


def _latest_values(rewards: Sequence[Reward], name: str, scope: str) -> list[float]:
    """The newest value for each action or agent."""
    newest_rewards: dict[tuple[str | None, str | None], Reward] = {}
    for reward in sorted(rewards, key=lambda reward: reward.created_ns):
        if reward.name == name and reward.scope == scope:
            newest_rewards[reward.action_id, reward.node] = reward
    return [reward.value for reward in newest_rewards.values()]


def _sums_agree(team: float, part_sum: float) -> bool:
    return not (math.isfinite(team) and math.isfinite(part_sum)) or math.isclose(
        team, part_sum, rel_tol=_SUM_TOLERANCE, abs_tol=_SUM_TOLERANCE
    )


def conversation_to_faults(trajectory: Trajectory, saw_answers: Mapping[str, Sequence[str]]) -> Iterator[Fault]:
    """Prompts that continue an agent's earlier call by message ids, but not by token ids: text was tokenised again.

    `saw_answers`: action -> the actions whose answers are messages of its prompt. Of those of the same agent, the last
    one is what the prompt should begin with: that call's prompt and answer. A warning, because an app may cut its
    history short.
    """
    actions = {action.action_id: action for action in trajectory.actions}
    for action in trajectory.actions:
        answered_actions = [actions[key] for key in saw_answers.get(action.action_id, ()) if key in actions]
        previous_action = max(
            (a for a in answered_actions if a.node == action.node), key=lambda a: a.index, default=None
        )
        if previous_action is None or not (
            action.prompt_ids and previous_action.prompt_ids and previous_action.sampled_ids
        ):
            continue
        expected = (*previous_action.prompt_ids, *previous_action.sampled_ids)
        common_length = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(expected, action.prompt_ids, strict=False))
        )
        if common_length < len(expected):
            part_name = "prompt" if common_length < len(previous_action.prompt_ids) else "answer"
            yield Fault(
                "conversation",
                f"action {action.action_id} continues {previous_action.action_id}, but their token ids part at"
                f" {common_length} of {len(expected)}, in its {part_name}",
                trajectory.episode.episode_id,
                level="warning",
            )


def assembled_to_faults(stored: Trajectory, spans: Sequence[SpanRow]) -> Iterator[Fault]:
    """Where the stored rows differ from what the stored spans give.

    A warning where only D differs and the spans are of an older convention: the rule that derives D was another one.
    """
    episode_id = stored.episode.episode_id
    try:
        assembled = spans_to_trajectory(spans)
    except (Incomplete, Malformed) as error:
        yield Fault("assembly", f"its spans make no episode: {error}", episode_id)
        return
    differences = [f"episode: {name}" for name in _differing_fields(stored.episode, assembled.episode)]
    stored_actions = {action.action_id: action for action in stored.actions}
    for action in assembled.actions:
        if action.action_id not in stored_actions:
            differences.append(f"action {action.action_id} is not stored")
        else:
            stored_action = stored_actions.pop(action.action_id)
            differences += [f"action {action.action_id}: {name}" for name in _differing_fields(stored_action, action)]
    differences += [f"action {key} has no span" for key in stored_actions]
    rule_changed = not differences and not all(follows_todays_rule(span.convention) for span in spans)
    edges = Counter(stored.edges)
    edges.subtract(Counter(assembled.edges))
    for edge, surplus in edges.items():
        if surplus:
            problem = "should not be stored" if surplus > 0 else "is not stored"
            bound_note = "" if edge.exact else " (a bound)"
            differences.append(f"{edge.kind} edge {edge.src} -> {edge.dst}{bound_note} {problem}")
    if differences:
        rest_note = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        rule_note = "D was derived by an older rule and " if rule_changed else ""
        message = f"{rule_note}differs from what its spans give: {'; '.join(differences[:3])}{rest_note}"
        yield Fault("assembly", message, episode_id, level="warning" if rule_changed else "error")


def _differing_fields(left: Episode | Action, right: Episode | Action) -> list[str]:
    """Names of the fields that differ; NaN equals itself here."""
    names = [field.name for field in fields(left)]
    return [name for name in names if not _values_equal(getattr(left, name), getattr(right, name))]


def _values_equal(left: Any, right: Any) -> bool:
    return bool(left == right) or repr(left) == repr(right)
