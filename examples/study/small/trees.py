"""Chains against trees at equal sampled tokens, on the games of the small study.

    python -m examples.study.small.trees build/trees.jsonl --seeds 40 41 42 43 44

Conditions differ in how a round spends its tokens, and in nothing before it: on 64 whole runs, or on 32 and forks of
them, or of them and of stored runs, which are chosen as `marft-bridge train` chooses them. After each of eight rounds
the held-out tasks are played; the area under the curve is the mean of these scores, as rounds have equal tokens. No
condition counts what they cost.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from examples.study.small.games import GAMES, MAX_TOKENS, Game, Players, Task, mean
from examples.study.small.run import COLLECTED, COMMON, EPISODES, ROUNDS, SAMPLES, merged, run_missing
from marft_bridge.statistics.means import mean_interval
from marft_bridge.training.fork_draw import (
    ForkChoice,
    SiblingRewards,
    draw_forks,
    draw_spots,
    fill_wave,
    spots_to_weights,
)
from marft_bridge.training.planned_forks import actions_to_spots, known_runs_to_reach, prompt_count, sampled_count
from marft_bridge.training.success_draw import draw_order, rewards_to_draw_weights
from marft_bridge.training.task_draw import TaskReward, runs_to_weights
from trace_store.records import BLIND_FORK, REPLAYED, Action, Trajectory
from trainers import MarftTrainer, TrainerOptions

SHARE, FORKS = 0.5, 3
STORED_SHARE = 0.5
"""Of the forks' tokens, in the condition that goes on from stored runs."""


@dataclass(frozen=True, slots=True)
class Condition:
    """An estimator, whether half of a round's tokens go to forks, and how much of these to forks of stored runs."""

    estimator: str
    trees: bool
    stored_share: float = 0.0


CONDITIONS = {
    "chains": Condition("tree_grpo", trees=False),
    "trees": Condition("tree_grpo", trees=True),
    "trees, c3": Condition("c3", trees=True),
    "trees, stored": Condition("tree_grpo", trees=True, stored_share=STORED_SHARE),
}
BASE = "chains"


class RepeatingPlayers:
    """Players of some forks at once, which say again what was said before the fork; all leave after as many calls."""

    def __init__(self, players: Players, given: Sequence[Sequence[Action]]) -> None:
        self._players, self._given, self._asked = players, given, 0

    def ask(self, agent: str, prompts: Sequence[Sequence[str]], max_tokens: int = MAX_TOKENS) -> list[Action]:
        """As `Players.ask`, but for the calls that are given again."""
        number, self._asked = self._asked, self._asked + 1
        if number >= len(self._given[0]):
            return self._players.ask(agent, prompts, max_tokens)
        actions = [row[number] for row in self._given]
        if len(actions) != len(prompts) or any(action.node != agent for action in actions):
            raise AssertionError(f"{agent}: another call than the run made")
        return actions


def named(trajectory: Trajectory, name: str, sample: int) -> Trajectory:
    """The same run under an id of its own, with ids of its own for its calls."""
    return replace(
        trajectory,
        episode=replace(trajectory.episode, episode_id=name, sample=sample),
        actions=tuple(replace(a, episode_id=name, action_id=f"{name}.{a.index}") for a in trajectory.actions),
        edges=tuple(
            replace(e, episode_id=name, src=f"{name}.{e.src}", dst=f"{name}.{e.dst}") for e in trajectory.edges
        ),
        rewards=tuple(replace(r, episode_id=name) for r in trajectory.rewards),
    )


def as_fork(trajectory: Trajectory, parent: Trajectory, depth: int, *, blind: bool) -> Trajectory:
    """A run that said again the first calls of another one, as a fork of it."""
    actions = tuple(
        replace(a, replayed_from=parent.actions[k].action_id, trainable=False, untrainable_reason=REPLAYED)
        if k < depth
        else a
        for k, a in enumerate(trajectory.actions)
    )
    episode = replace(
        trajectory.episode,
        parent_episode=parent.episode.episode_id,
        fork_action=parent.actions[depth].action_id,
        tags={BLIND_FORK: "yes"} if blind else {},
    )
    return replace(trajectory, episode=episode, actions=actions)


class Forks:
    """Plays the forks of rounds, and remembers what earlier rounds showed."""

    def __init__(
        self, game: Game, players: Players, stored: Sequence[Trajectory], seed: int, stored_share: float = 0.0
    ) -> None:
        self._game, self._players, self._seed, self._stored_share = game, players, seed, stored_share
        self._older = [(each, _task_reward(each, 0)) for each in stored]
        self._rewards = [_task_reward(each, 0) for each in stored]
        self._runs = list(stored)
        self._siblings: list[SiblingRewards] = []

    def play(self, chains: Sequence[Trajectory], number: int) -> list[Trajectory]:
        """Forks of a round's runs, until it has as many tokens as EPISODES runs would have."""
        chain_tokens = sum(sampled_count(each.actions) for each in chains)
        left = EPISODES * chain_tokens / len(chains) - chain_tokens
        tasks = sorted({each.episode.task_id for each in chains})
        order = draw_forks(
            [(each.episode.task_id, each.episode.sample) for each in chains],
            runs_to_weights(self._rewards, tasks, number, last_known=number - 1),
            spots_to_weights(known_runs_to_reach(self._runs, (), self._game.agents), self._siblings),
            key=f"{self._seed}/forks/{number}",
        )
        runs = {(each.episode.task_id, each.episode.sample): each for each in chains}
        points = self._points(order, runs)
        forks: list[Trajectory] = []
        for waiting, budget, blind, least in (
            (list(self._stored_points(number)), self._stored_share * left, False, 2),
            (list(points), left, True, 1),
        ):
            spent = sum(sampled_count(each.actions) for each in forks)
            while wave := fill_wave(budget - spent, ((point, _cost(*point)) for point in waiting), FORKS, least=least):
                waiting = waiting[len(wave) :]
                forks += self._fork(wave, number, begun=len(forks), blind=blind)
                spent = sum(sampled_count(each.actions) for each in forks)
        self._remember(chains, forks, number)
        return forks

    def _stored_points(self, number: int) -> Iterator[tuple[Trajectory, int]]:
        """A call of each older run that did better than its task does, one with calls before it."""
        if not self._stored_share:
            return
        weights = rewards_to_draw_weights([earned for _, earned in self._older], number)
        key = f"{self._seed}/stored/{number}"
        for name in draw_order({str(n): weight for n, weight in enumerate(weights)}, key):
            run = self._older[int(name)][0]
            spots = {
                spot: action
                for spot, action in actions_to_spots(run.actions, self._game.agents).items()
                if action.index > 0
            }
            weighed = spots_to_weights(dict.fromkeys(spots, 1.0), self._siblings)
            for spot in draw_spots(weighed, f"{key}/{name}")[:1]:
                yield run, spots[spot].index

    def _points(
        self, order: Sequence[ForkChoice], runs: Mapping[tuple[str, int], Trajectory]
    ) -> Iterator[tuple[Trajectory, int]]:
        for choice in order:
            run = runs[choice.task_id, choice.sample]
            action = actions_to_spots(run.actions, self._game.agents).get(choice.spot)
            if action is not None:
                yield run, action.index

    def _fork(
        self, wave: Sequence[tuple[tuple[Trajectory, int], int]], number: int, *, begun: int, blind: bool
    ) -> list[Trajectory]:
        """Those that repeat calls of the same agents are played together."""
        rows: dict[tuple[str, ...], list[tuple[Trajectory, int]]] = defaultdict(list)
        for (run, depth), count in wave:
            rows[tuple(action.node for action in run.actions[:depth])] += [(run, depth)] * count
        forks = []
        for alike in rows.values():
            players: Any = RepeatingPlayers(self._players, [run.actions[:depth] for run, depth in alike])
            played = self._game.play(players, [_task_of(run, self._game) for run, _ in alike])
            for each, (run, depth) in zip(played, alike, strict=True):
                name = f"r{number}f{begun + len(forks)}"
                forks.append(as_fork(named(each, name, len(forks)), run, depth, blind=blind))
        return forks

    def _remember(self, chains: Sequence[Trajectory], forks: Sequence[Trajectory], number: int) -> None:
        self._runs = list(chains)
        self._rewards += [_task_reward(each, number) for each in chains]
        earlier = [run for run, _ in self._older]
        self._older += [(each, _task_reward(each, number)) for each in chains]
        earned: dict[str, list[float]] = defaultdict(list)
        for fork in forks:
            earned[fork.episode.fork_action or ""].append(fork.team_reward("reward") or 0.0)
        for run, own in [*((run, False) for run in earlier), *((run, True) for run in chains)]:
            for spot, action in actions_to_spots(run.actions, self._game.agents).items():
                if action.action_id in earned:
                    values = (run.team_reward("reward") or 0.0,) if own else ()
                    self._siblings.append(SiblingRewards(spot, (*values, *earned[action.action_id])))


def _task_reward(run: Trajectory, number: int) -> TaskReward:
    return TaskReward(run.episode.task_id, number, run.team_reward("reward") or 0.0)


def _task_of(run: Trajectory, game: Game) -> Task:
    return next(task for task in game.tasks if " ".join(map(str, task)) == run.episode.task_id)


def _cost(run: Trajectory, depth: int) -> int:
    return max(1, sampled_count(run.actions[depth:]))


def run(game: Game, name: str, seed: int, model: Path) -> dict[str, Any]:
    """One training run to its figures."""
    started = time.perf_counter()
    condition = CONDITIONS[name]
    options = TrainerOptions.model_validate(merged(COMMON, {"advantage": {"estimator": condition.estimator}}))
    trainer = MarftTrainer(options, model, agents=list(game.agents), seed=seed)
    players, draw = Players(trainer, 1000 + seed), random.Random(seed)
    judges = Players(trainer, 2000 + seed)
    stored = game.play(players, [game.tasks[i % len(game.tasks)] for i in range(COLLECTED)])
    players.learn_offline(stored)
    stored = [named(each, f"c{i}", i) for i, each in enumerate(stored)]
    forks_of = Forks(game, players, stored, seed, stored_share=condition.stored_share)
    scores = [mean(game.play(judges, game.heldout), "correct")]
    counts: dict[str, list[int]] = defaultdict(list)
    for number in range(1, ROUNDS + 1):
        episodes = round((1 - SHARE) * EPISODES) if condition.trees else EPISODES
        tasks = [t for t in draw.sample(game.tasks, episodes // SAMPLES) for _ in range(SAMPLES)]
        chains = [named(each, f"r{number}c{i}", i % SAMPLES) for i, each in enumerate(game.play(players, tasks))]
        forks = forks_of.play(chains, number) if condition.trees else []
        repeated = [a for fork in forks for a in fork.actions if a.replayed_from is not None]
        counts["tokens"].append(sum(sampled_count(each.actions) for each in (*chains, *forks)))
        counts["forks"].append(len(forks))
        counts["prompt_tokens"].append(sum(prompt_count(a) for fork in forks for a in fork.actions))
        counts["prompt_tokens_spared"].append(sum(map(prompt_count, repeated)))
        trainer.update([*chains, *forks])
        scores.append(mean(game.play(judges, game.heldout), "correct"))
    return {
        "game": game.name,
        "condition": name,
        "seed": seed,
        "scores": scores,
        "area": statistics.fmean(scores[1:]),
        **counts,
        "seconds": time.perf_counter() - started,
    }


def to_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean area by game and condition, and the difference to chains over the seeds that both have, as Markdown."""
    areas = {(row["game"], row["condition"], row["seed"]): row["area"] for row in rows}
    lines = ["| game | condition | seeds | area | - chains | at the end | tokens |", "| --- | --- |" + " ---: |" * 5]
    for game in GAMES:
        for name in CONDITIONS:
            mine = [row for row in rows if (row["game"], row["condition"]) == (game, name)]
            if not mine:
                continue
            seeds = [row["seed"] for row in mine if (game, BASE, row["seed"]) in areas]
            gaps = [areas[game, name, seed] - areas[game, BASE, seed] for seed in seeds]
            end = statistics.fmean(row["scores"][-1] for row in mine)
            tokens = statistics.fmean(sum(row["tokens"]) for row in mine)
            area = statistics.fmean(row["area"] for row in mine)
            gap = "" if name == BASE else _interval(gaps)
            lines.append(f"| {game} | {name} | {len(mine)} | {area:.3f} | {gap} | {end:.3f} | {tokens:.0f} |")
    return "\n".join(lines)


def _interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return " ".join(f"{value:+.3f}" for value in values) or "-"
    interval = mean_interval(values)
    if interval.low is None:
        return f"{interval.mean:+.3f} (no interval: all the same)"
    return f"{interval.mean:+.3f} (95 % {interval.low:+.3f} to {interval.high:+.3f})"


if __name__ == "__main__":
    run_missing(__doc__, list(CONDITIONS), [40, 41, 42, 43, 44], run_one=run, table_of=to_table)
