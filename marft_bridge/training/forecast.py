"""Collected episodes -> what the first rounds can learn from: figures, lines of text, and the reason to refuse a run.

A round teaches by runs that earned differently: samples of one task where the estimator compares groups; for any other,
which holds a run against what it expects, two runs of the round, so that its episodes count as pairs. What a run earned
is all that reaches the loss: the team reward and the shaping; of a game with sides, what each side earned, since what
one wins the other may lose. Some estimators learn from a single run, too: they hold its calls against each other, or
pay them as they are. A run that failed or has no reward, or no call that the trainer would learn from, is in no group:
groups are as small as the collected runs say. Invariant: pure; what was not measured is None; what a round would leave
out is the trainer's own word (`trajectories_to_round`).

The threshold. One group that differs says what was better on one task, by luck perhaps; two are the least that can
agree. A run is refused where it is less likely than not that its first FIRST_ROUNDS rounds hold ENOUGH_GROUPS of them:
to be refused wrongly costs a flag, to go on wrongly costs those rounds. With 64 episodes a round, one sample a task,
that is where 2 of 192 collected runs are better than the rest (chance 0.44; 3 of 192: 0.59; 0 of 128: 0.11); with
groups of 4 where 6 are (0.49). Runs that all earned the same are refused however few they are, since nothing stored
says what is better, and to collect more is cheap; so are those without a call that could be learned from. Nothing is
refused without rounds that learn from rewards; nor where all episodes are of others, so that the rounds cannot be
judged, or, as long as there are calls to learn from, where ENOUGH_EXAMPLES of others, a minibatch, show before what is
better.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from marft_bridge.common.run_limits import is_limit
from marft_bridge.config.bridge import TrainOptions
from marft_bridge.statistics.group_spread import outcomes_to_spread
from trace_store.records import RETOKENISED, Action, Outcome, Trajectory
from trainers.batch import GREEDY, NARROWED, Round, Use, find_drop_reason, trajectories_to_round
from trainers.config import TrainerOptions
from trainers.rewards import EpisodeRewards, StepReward, trajectory_to_rewards, without_rounding

FIRST_ROUNDS = 2
ENOUGH_GROUPS = 2
ENOUGH_EXAMPLES = 16
FLAG = "--without-signal"

Earned = tuple[Hashable, ...]
"""All that an episode earned, its `Worth` first; runs that earned equally teach nothing."""
Worth = tuple[float, ...]
"""What an episode earned in all: of each side, in their order; without sides a single number."""

_LIKELY = 0.5  # the chance below which a run is refused
_HANDFUL = 5  # examples of what is better; with fewer a stronger model's traces are the first thing to try
_FEW = 0.05  # share of the runs
_CUT_OF_NODE, _CUT_OF_ALL = 0.1, 0.25  # shares of calls that are worth a word
_UNTRAINABLE = 0.1
_LOST, _OFTEN_LOST = 0.1, 0.25  # shares of the episodes that are worth a word, and that are the first thing to mend
_MEND_LOST: Mapping[Outcome, str] = {
    "failed": "mend what they failed with",
    "truncated": (
        "raise the limit that cut them (collect.timeout_s, collect.max_tokens_per_episode, or graph.config's "
        "recursion_limit)"
    ),
    "terminated": "have the reward judge every run",
}
_PAY_LIMIT = (
    ", or say in graph.limit_reward what a run earns that comes to it, which `marft-bridge score` gives stored runs too"
)
_NEVER_ACTS = "it never acts"
_MEND_CALLS = {
    GREEDY: "have the app sample at a temperature above 0",
    NARROWED: "have the app leave out top_p and top_k",
    _NEVER_ACTS: "look whether graph.nodes has the nodes that act",
}


@dataclass(frozen=True, slots=True)
class NodeForecast:
    """What the calls of one trained node are like; shares are of its calls."""

    learns: bool  # it is not frozen
    calls: int
    usable: int  # of these, the ones that a round would learn from
    calls_per_episode: float  # of those in which it acts; 0 where it never does
    episode_share: float  # of the episodes, those in which it acts
    cut_share: float | None  # ended by the limit of tokens; None without a call
    untrainable_share: float | None
    untrainable_reason: str | None  # the commonest


@dataclass(frozen=True, slots=True)
class Forecast:
    """What stored episodes say of the rounds to come. All but examples and nodes is of the run's own."""

    stored: int
    episodes: int  # of these, the ones that did not fail and have a reward; all that follows is of them
    counted: int  # of these, the ones that a round would learn from
    lost: int  # of the stored: failed, cut short or without a reward
    lost_outcome: Outcome | None  # how these ended most often; terminated: without a reward
    lost_reason: str | None  # the commonest of that
    lowest: float | None  # team reward
    highest: float | None
    mean: float | None
    better: int  # episodes that earned more than the worst; with sides, in which one of them did
    usual: int  # episodes that earned what most earned
    above_usual: int  # episodes that earned more than that; with sides, in which one of them did
    by_side: bool  # what was earned is each side's own, and the three figures above are a measure of the game
    alone: int  # episodes that teach by themselves, whatever others earned, as the estimator learns
    alike: bool  # all of them earned the same
    tasks: int
    sampled_again: int  # tasks with two runs or more
    spread_tasks: int  # of these, the ones whose runs differ
    never_better: int  # of these, the ones whose runs all earned the worst
    examples: int  # stored episodes that are better than the worst, and that the offline phase takes
    examples_of_others: int  # of these, the ones that this app did not run
    groups: int  # of a round
    group_size: int
    by_task: bool  # whether a group is the samples of a task; else any two runs
    informative: float | None  # groups of a round that are expected to differ; None without own stored episodes
    chance: float | None  # that the first rounds hold enough of them
    rounds: int  # that learn from rewards
    nodes: dict[str, NodeForecast]


def trajectories_to_forecast(
    trajectories: Sequence[Trajectory], own_ids: Collection[str], nodes: Sequence[str], options: TrainOptions
) -> Forecast:
    """Stored episodes to what they say of the rounds that follow.

    Args:
        trajectories: none of them held out.
        own_ids: ids of those that this app ran by the models that will be trained; the others are only examples.
        nodes: the trained ones.
    """
    own = [t for t in trajectories if t.episode.episode_id in own_ids]
    scored = [(t, value) for t in own if (value := _reward(t, options.trainer.reward)) is not None]
    rewards = [value for _, value in scored]
    outcomes: dict[str, list[Earned]] = {}
    alone = 0
    for trajectory, value in scored:
        earned = _earned_by(trajectory, value, options.trainer)
        outcomes.setdefault(trajectory.episode.task_id, []).append(_outcome(trajectory, earned, options.trainer))
        alone += _teaches_alone(trajectory, earned, options.trainer)
    again = [runs for runs in outcomes.values() if len(runs) > 1]
    distinct = {outcome for runs in outcomes.values() for outcome in runs}
    worths = Counter(_worth(outcome) for runs in outcomes.values() for outcome in runs)
    worst = _worst(worths)
    ((usual_worth, usual),) = worths.most_common(1) or [((), 0)]
    learning = _learning_nodes(nodes, options.trainer)
    data = _to_round(own or trajectories, learning, options.trainer, use="on_policy")
    by_task = _compares_tasks(data, options.trainer)
    size = options.samples_per_task if by_task else 2
    if by_task and size == 1 and options.trees is not None:  # a run is compared with its forks alone
        size = 1 + options.trees.samples
    groups = options.chains_per_round // (options.samples_per_task if by_task else size)
    counted = len(data.episodes) if own else 0
    expected: float | None = 0.0 if own else None
    chance = expected
    if outcomes:
        spread = outcomes_to_spread(outcomes, size, same_task=by_task, kept_share=counted / len(own))
        expected, chance = spread.expected(groups), spread.chance_of(ENOUGH_GROUPS, FIRST_ROUNDS * groups)
    examples = _find_examples(trajectories, own_ids, nodes, options=options.trainer)
    lost = Counter(reason for t in own if (reason := _lost_reason(t, options.trainer)) is not None)
    commonest = [outcome for outcome, _ in lost.most_common(1)]
    return Forecast(
        stored=len(own),
        episodes=len(scored),
        counted=counted,
        lost=lost.total(),
        lost_outcome=commonest[0][0] if commonest else None,
        lost_reason=commonest[0][1] if commonest else None,
        lowest=min(rewards, default=None),
        highest=max(rewards, default=None),
        mean=math.fsum(rewards) / len(rewards) if rewards else None,
        better=sum(count for rewards, count in worths.items() if _exceeds(rewards, worst)),
        usual=usual,
        above_usual=sum(count for rewards, count in worths.items() if _exceeds(rewards, usual_worth)),
        by_side=options.trainer.side_of is not None,
        alone=alone,
        alike=len(distinct) == 1,
        tasks=len(outcomes),
        sampled_again=len(again),
        spread_tasks=sum(len(set(runs)) > 1 for runs in again),
        never_better=sum(not any(_exceeds(_worth(outcome), worst) for outcome in runs) for runs in again),
        examples=len(examples),
        examples_of_others=len(examples - set(own_ids)),
        groups=groups,
        group_size=size,
        by_task=by_task,
        informative=expected,
        chance=chance,
        rounds=options.rounds - options.teacher_rounds,
        nodes={node: _node_forecast(node, own or trajectories, options.trainer) for node in nodes},
    )


def earn_differently(trajectories: Sequence[Trajectory], options: TrainerOptions) -> bool:
    """Whether any two of these episodes earned different rewards, as far as rewards reach the loss."""
    scored = ((t, value) for t in trajectories if (value := _reward(t, options.reward)) is not None)
    return len({_outcome(t, _earned_by(t, value, options), options) for t, value in scored}) > 1


def forecast_to_lines(forecast: Forecast) -> list[str]:
    """A line in all, and one for each node that there is something to say of."""
    lines = [f"forecast: {_rewards_text(forecast)}; {_groups_text(forecast)}{_lost_text(forecast)}"]
    for node, figures in forecast.nodes.items():
        if parts := _node_parts(figures, forecast):
            lines.append(f"forecast, {node}: {'; '.join(parts)}")
    return lines


def penalties_to_lines(options: TrainerOptions) -> list[str]:
    """A line where penalties of single calls push nothing down; none where they do, or there are none."""
    if not options.idle_penalties:
        return []
    names = ", ".join(map(repr, options.idle_penalties))
    return [
        f"forecast: with train.trainer.objective.negative_weight 0 a penalty (shaping of level 'step': {names}) only "
        "takes from what its call's run was better by: set negative_weight above 0 to have it push the call down"
    ]


def forecast_to_refusal(forecast: Forecast) -> str | None:
    """Why rounds would teach nothing, and what to do; None where they should be tried."""
    if forecast.chance is None or forecast.rounds == 0:
        return None
    if not any(node.usable for node in forecast.nodes.values() if node.learns):
        return f"train: the rounds would teach nothing: {_unusable_text(forecast)}; or train all the same with {FLAG}"
    if forecast.examples_of_others >= ENOUGH_EXAMPLES:
        return None
    if not forecast.alike and forecast.chance >= _LIKELY:
        return None
    played = FIRST_ROUNDS * forecast.groups * forecast.group_size
    if forecast.alone * played >= ENOUGH_GROUPS * forecast.stored:  # as many as that in the first rounds
        return None
    return (
        f"train: the rounds would probably teach nothing: {_rewards_text(forecast)}; {_groups_text(forecast)}; "
        f"{forecast_to_advice(forecast)}; or train all the same with {FLAG}"
    )


def forecast_to_advice(forecast: Forecast) -> str:
    """What would give the episodes of this forecast more to learn from, the first thing to try first."""
    # nearly all runs earned the same: the best there is, or not
    is_settled = forecast.usual > (1 - _FEW) * forecast.episodes
    all_paid = is_settled and forecast.above_usual == 0 and forecast.highest is not None and forecast.highest > 0
    few_better = not all_paid and ((is_settled and not forecast.by_side) or forecast.better < _FEW * forecast.episodes)
    hard_tasks = few_better or 2 * forecast.never_better > forecast.sampled_again
    cut_share = _cut_of_all(forecast) or 0.0
    more = "samples of a task (train.samples_per_task)" if forecast.by_task else "episodes (train.episodes_per_round)"
    advice = [
        (forecast.lost > _OFTEN_LOST * forecast.stored, _mend_lost_text(forecast)),
        (all_paid, "look whether the reward can tell runs apart, or take harder tasks"),
        (few_better, "give partial credit (docs/rewards.md)"),
        (cut_share >= _CUT_OF_ALL, f"let calls be longer (sampling.max_tokens; {cut_share:.0%} of them reach it)"),
        (forecast.episodes > 0 and not forecast.alike and not all_paid, f"take more {more}"),
        (forecast.examples < _HANDFUL and not all_paid, "learn from traces of a stronger model (train.traces)"),
        (hard_tasks and not all_paid, "begin with easier tasks"),
    ]
    return "; ".join(text for applies, text in advice if applies)


def _learning_nodes(nodes: Sequence[str], options: TrainerOptions) -> list[str]:
    """Those that are not frozen."""
    frozen = {node for node, agent in options.agents.items() if agent.frozen}
    return [node for node in nodes if node not in frozen]


def _to_round(
    trajectories: Sequence[Trajectory], nodes: Sequence[str], options: TrainerOptions, *, use: Use, reward: str = ""
) -> Round:
    """What the trainer would read of these episodes, with whatever vocabulary."""
    return trajectories_to_round(
        trajectories,
        nodes,
        reward or options.reward,
        vocabulary=dict.fromkeys(nodes, sys.maxsize),
        use=use,
        shaping=options.shaping,
        side_of=options.side_of,
    )


def _compares_tasks(data: Round, options: TrainerOptions) -> bool:
    """Whether the estimator compares runs of one task; some do where there is but one, and then its calls alone."""
    estimator_class = options.advantage.estimator_class
    return estimator_class.needs_groups or estimator_class(options.estimator_settings).groups(data) is not None


def _reward(trajectory: Trajectory, name: str) -> float | None:
    """The team reward of an episode that counts in a round."""
    value = trajectory.team_reward(name)
    is_usable = trajectory.episode.outcome != "failed" and value is not None and math.isfinite(value)
    return value if is_usable else None


def _earned_by(trajectory: Trajectory, value: float, options: TrainerOptions) -> EpisodeRewards:
    """All that reaches the loss of an episode whose team earned this; a step reward is of the call it arrived with."""
    earned, _ = trajectory_to_rewards(
        trajectory,
        (options.reward, value),
        options.shaping,
        edges=(),
        is_kept_A=[True] * len(trajectory.actions),
        side_of=options.side_of,
    )
    return earned


def _outcome(trajectory: Trajectory, earned: EpisodeRewards, options: TrainerOptions) -> Earned:
    """What an episode earned: in all, and of each reward."""
    nodes = [action.node for action in trajectory.actions]
    return (_to_worth(earned, nodes, options.side_of), earned.figures)


def _teaches_alone(trajectory: Trajectory, earned: EpisodeRewards, options: TrainerOptions) -> bool:
    """Whether the estimator learns from this run though nothing that it is compared with earned otherwise."""
    by_call = [0.0] * len(trajectory.actions)
    for step in _steps_of(earned):
        for call in step.links:
            by_call[call] += step.value
    by_run = [earned.total, *(value for _, value in _private_of(earned))]
    return options.advantage.estimator_class.teaches_alone(
        by_call, by_run, options.advantage.normalization, penalties_teach=options.penalties_teach
    )


def _to_worth(earned: EpisodeRewards, nodes: Sequence[str], side_of: Mapping[str, str] | None) -> Worth:
    """What was earned in all; `nodes` are those of the calls that `earned` counts."""
    if side_of is None:
        values = [*(step.value for step in _steps_of(earned)), *(value for _, value in _private_of(earned))]
        return (without_rounding(earned.total + math.fsum(values)),)
    by_side: dict[str, list[float]] = {side: [] for side in sorted({*side_of.values()})}
    for step in _steps_of(earned):
        for side in {side_of[nodes[call]] for call in step.links if nodes[call] in side_of}:
            by_side[side].append(step.value)
    for node, value in _private_of(earned):
        by_side[side_of[node]].append(value)
    return tuple(without_rounding(math.fsum(values)) for values in by_side.values())


def _steps_of(earned: EpisodeRewards) -> Iterator[StepReward]:
    return (step for rewards in earned.step.values() for step in rewards)


def _private_of(earned: EpisodeRewards) -> Iterator[tuple[str, float]]:
    """Node and value."""
    return (pair for rewards in earned.private.values() for pair in rewards.items())


def _worth(outcome: Earned) -> Worth:
    assert isinstance(outcome[0], tuple)
    return outcome[0]


def _worst(worths: Iterable[Worth]) -> Worth:
    """The least of each side; of no episode, nothing."""
    return tuple(map(min, zip(*worths, strict=True)))


def _exceeds(worth: Worth, worst: Worth) -> bool:
    """Whether one of the sides earned more than its worst."""
    return any(value > low for value, low in zip(worth, worst, strict=True))


def _find_examples(
    trajectories: Sequence[Trajectory], own_ids: Collection[str], nodes: Sequence[str], options: TrainerOptions
) -> set[str]:
    """Ids of what the offline phase takes and what earned more than the worst: more than 0 where all are of others.

    Where the phase chooses by a reward of its own (`offline.reward`), all that it takes.
    """
    offline = options.offline
    if offline.mode == "off":
        return set()
    texts: Use = "demonstration" if offline.retokenise else "imitation"
    use: Use = "replay" if offline.needs_behaviour else texts
    data = _to_round(trajectories, nodes, options, use=use, reward=options.offline_reward)
    taken = [e for e in data.episodes if offline.mode != "filtered" or e.reward >= offline.threshold]
    if offline.reward is not None:
        return {episode.episode_id for episode in taken}
    worth_by_id = {
        episode.episode_id: _to_worth(episode.rewards, [item.agent for item in episode.actions], options.side_of)
        for episode in data.episodes
    }
    own_worth = [value for episode_id, value in worth_by_id.items() if episode_id in own_ids]
    least = tuple(0.0 for _ in next(iter(worth_by_id.values()), ()))
    worst = _worst(own_worth or [least, *worth_by_id.values()])
    return {episode.episode_id for episode in taken if _exceeds(worth_by_id[episode.episode_id], worst)}


def _lost_reason(trajectory: Trajectory, options: TrainerOptions) -> tuple[Outcome, str] | None:
    """How an episode ended that teaches less than a whole one, and why; else None."""
    outcome = trajectory.episode.outcome
    if outcome == "failed" or trajectory.is_unfinished(options.reward):
        return outcome, trajectory.episode.reason or outcome
    return (outcome, f"no reward {options.reward!r}") if _reward(trajectory, options.reward) is None else None


def _node_forecast(node: str, trajectories: Sequence[Trajectory], options: TrainerOptions) -> NodeForecast:
    by_episode = [[a for a in t.actions if a.node == node] for t in trajectories]
    calls: list[Action] = [action for actions in by_episode for action in actions]
    acting = sum(map(bool, by_episode))
    vocabulary = {node: sys.maxsize}
    dropped = Counter(
        reason for a in calls if (reason := find_drop_reason(a, [node], vocabulary, use="on_policy")) is not None
    )
    imitated = {RETOKENISED} if options.offline.mode == "filtered" and options.offline.retokenise else set()
    reasons = Counter({reason: count for reason, count in dropped.items() if reason not in imitated})
    learns = bool(_learning_nodes([node], options))
    return NodeForecast(
        learns=learns,
        calls=len(calls),
        usable=len(calls) - dropped.total() if learns else 0,
        calls_per_episode=len(calls) / acting if acting else 0.0,
        episode_share=acting / len(by_episode) if by_episode else 0.0,
        cut_share=sum(a.finish_reason == "length" for a in calls) / len(calls) if calls else None,
        untrainable_share=reasons.total() / len(calls) if calls else None,
        untrainable_reason=reasons.most_common(1)[0][0] if reasons else None,
    )


def _node_parts(node: NodeForecast, forecast: Forecast) -> list[str]:
    if node.cut_share is None or node.untrainable_share is None:
        return ["no call of it is stored, so nothing is known of what it can learn"]
    parts = []
    if node.cut_share >= _CUT_OF_NODE:
        parts.append(f"{node.cut_share:.0%} of its calls were cut at the limit of tokens (sampling.max_tokens)")
    if node.untrainable_share >= _UNTRAINABLE:
        parts.append(f"rounds learn nothing from {node.untrainable_share:.0%} of its calls: {node.untrainable_reason}")
    groups = forecast.informative or 0.0
    if FIRST_ROUNDS * groups * node.episode_share < ENOUGH_GROUPS <= FIRST_ROUNDS * groups:
        parts.append(
            f"it acts in {node.episode_share:.0%} of the episodes, so that about {groups * node.episode_share:.1f} "
            f"of these {_unit(forecast)} teach it"
        )
    return parts


def _cut_of_all(forecast: Forecast) -> float | None:
    calls = sum(node.calls for node in forecast.nodes.values())
    cut = math.fsum(node.cut_share * node.calls for node in forecast.nodes.values() if node.cut_share is not None)
    return cut / calls if calls else None


def _rewards_text(forecast: Forecast) -> str:
    if forecast.stored and not forecast.episodes:
        return f"none of the {forecast.stored} collected episodes came to a reward"
    if forecast.lowest is None or forecast.highest is None:
        return (
            f"none of the stored episodes is this app's own; {forecast.examples} can be learned from before the rounds"
        )
    never = ", never more than 0" if forecast.highest <= 0 else ""
    if forecast.alike:
        return f"all {forecast.episodes} collected episodes earned the same ({forecast.lowest:g}{never})"
    figures = f"{forecast.lowest:g} to {forecast.highest:g}, {forecast.mean:.3f} on average"
    if forecast.by_side:
        text = (
            f"in {forecast.better} of {forecast.episodes} collected episodes a side earned more than its worst (the "
            f"game was measured at {figures})"
        )
    else:
        text = (
            f"{forecast.better} of {forecast.episodes} collected episodes earned more than the worst ({figures}{never})"
        )
    if forecast.sampled_again:
        text += f", runs of {forecast.spread_tasks} of {forecast.sampled_again} tasks differ"
    return text


def _groups_text(forecast: Forecast) -> str:
    if forecast.informative is None:
        return "what the rounds can learn is not known"
    if forecast.rounds == 0:
        return "no round learns from rewards"
    alone = f", and {forecast.alone} of {forecast.episodes} episodes teach by themselves" if forecast.alone else ""
    if forecast.by_task and forecast.group_size == 1:
        return f"no run of a round is compared with another one of its task{alone}"
    return (
        f"about {forecast.informative:.1f} of the {forecast.groups} {_unit(forecast)} of a round will differ in "
        f"reward{alone}"
    )


def _unit(forecast: Forecast) -> str:
    return f"groups of {forecast.group_size}" if forecast.by_task else "pairs of runs"


def _lost_text(forecast: Forecast) -> str:
    if not forecast.lost or forecast.lost < _LOST * forecast.stored:
        return ""
    share = forecast.counted / forecast.stored
    return f"; {_lost_counts(forecast)}, so that a round learns from about {share:.0%} of its runs: {_mend(forecast)}"


def _mend_lost_text(forecast: Forecast) -> str:
    return f"{_mend(forecast)}, since {_lost_counts(forecast)}"


def _lost_counts(forecast: Forecast) -> str:
    return (
        f"{forecast.lost} of {forecast.stored} episodes failed, were cut short or have no reward, most often: "
        f"{forecast.lost_reason}"
    )


def _mend(forecast: Forecast) -> str:
    if forecast.lost_outcome is None:
        return ""
    pays = is_limit(forecast.lost_reason) and not forecast.by_side
    return f"{_MEND_LOST[forecast.lost_outcome]}{_PAY_LIMIT if pays else ''}"


def _unusable_text(forecast: Forecast) -> str:
    """Why no call could be learned from, node by node, and what to do."""
    reasons = {
        name: node.untrainable_reason or RETOKENISED if node.calls else _NEVER_ACTS
        for name, node in forecast.nodes.items()
        if node.learns
    }
    nodes = [f"{name}: {reason}" for name, reason in reasons.items()]
    mend = [text for reason, text in _MEND_CALLS.items() if reason in reasons.values()]
    return (
        f"no call of the {forecast.stored} collected episodes can be learned from ({'; '.join(nodes)}); "
        f"{'; '.join(mend) or 'docs/troubleshooting.md says what keeps calls from it'}"
    )
