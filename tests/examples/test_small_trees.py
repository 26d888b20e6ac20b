"""Owns: that the small study's trees are forks of its runs, at as many tokens as its chains, on any model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from examples.study.small import games
from examples.study.small.games import GAMES, MAX_TOKENS
from examples.study.small.model import OPERATIONS, words_to_ids
from examples.study.small.run import EPISODES
from examples.study.small.trees import FORKS, Forks, named, to_table
from marft_bridge.training.planned_forks import sampled_count
from trace_store.records import Action, Trajectory
from trainers.batch import trajectories_to_round


class Chance:
    """Players that say something by chance, of one token to four."""

    def __init__(self, seed: int) -> None:
        self.chance, self.calls = random.Random(seed), 0

    def ask(self, agent: str, prompts: Sequence[Sequence[str]], max_tokens: int = MAX_TOKENS) -> list[Action]:
        self.calls += len(prompts)
        words = [*OPERATIONS, "again", "done", "4", "7"]
        rows = []
        for prompt in prompts:
            said = [self.chance.choice(words), *self.chance.choices(["hmm", "so"], k=self.chance.randrange(3))]
            rows.append((words_to_ids(prompt), words_to_ids([*said, "<end>"])))
        return [games._to_action(agent, p, s, [-1.0] * len(s), 1, max_tokens) for p, s in rows]


def round_of(game: str, seed: int) -> tuple[list[Trajectory], list[Trajectory], Chance]:
    players: Any = Chance(seed)
    chosen = GAMES[game]
    stored = chosen.play(players, chosen.tasks[:20])
    tasks = [task for task in chosen.tasks[:8] for _ in range(4)]
    chains = [named(each, f"c{i}", i % 4) for i, each in enumerate(chosen.play(players, tasks))]
    players.calls = 0
    return chains, Forks(chosen, players, stored, seed).play(chains, 1), players


@pytest.mark.parametrize("game", list(GAMES))
def test_forks_say_again_what_their_run_said_and_sample_the_rest(game: str) -> None:
    chains, forks, players = round_of(game, 0)
    calls = {action.action_id: action for run in chains for action in run.actions}
    depths = []
    for fork in forks:
        repeated = [action for action in fork.actions if action.replayed_from is not None]
        for action in repeated:
            recorded = calls[action.replayed_from or ""]
            assert (action.node, action.prompt_ids, action.sampled_ids) == (
                *(recorded.node, recorded.prompt_ids, recorded.sampled_ids),
            )
        depths.append(len(repeated))
        left = calls[fork.episode.fork_action or ""]
        made = fork.actions[len(repeated)]
        assert (made.node, made.prompt_ids, left.index) == (left.node, left.prompt_ids, len(repeated))
        assert (
            fork.episode.task_id
            == next(r for r in chains if r.actions[0].episode_id == left.episode_id).episode.task_id
        )
    assert players.calls == sum(len(fork.actions) for fork in forks) - sum(depths)
    assert len(set(depths)) > 1
    assert len(forks) > 2 * FORKS


@pytest.mark.parametrize("game", list(GAMES))
def test_trees_have_as_many_tokens_as_chains_to_within_a_run(game: str) -> None:
    chains, forks, _ = round_of(game, 1)
    tokens = sum(sampled_count(each.actions) for each in chains)
    mean = tokens / len(chains)
    assert abs(tokens + sum(sampled_count(each.actions) for each in forks) - EPISODES * mean) <= mean


def test_every_fork_hangs_on_its_run_and_every_sampled_call_is_learned_from_once() -> None:
    chains, forks, _ = round_of("chain", 2)
    agents = GAMES["chain"].agents
    data = trajectories_to_round([*chains, *forks], agents, "reward", dict.fromkeys(agents, 1000), "on_policy")
    assert data.forest is not None
    assert sum(data.forest.weight_E) == pytest.approx(len(chains))
    sampled = [a for each in (*chains, *forks) for a in each.actions if a.replayed_from is None]
    assert len(data.items) == len(sampled)


def test_the_table_has_the_difference_over_the_seeds_that_both_have() -> None:
    rows = [
        {"game": "duo", "condition": name, "seed": seed, "area": area, "scores": [0.0, area], "tokens": [10]}
        for name, seed, area in (
            *(("chains", 1, 0.2), ("chains", 2, 0.4), ("chains", 3, 0.9)),
            *(("trees", 1, 0.3), ("trees", 2, 0.6)),
        )
    ]
    # 0.1 and 0.2: t of one degree of freedom is 12.706, the standard error 0.05
    assert "| duo | trees | 2 | 0.450 | +0.150 (95 % -0.485 to +0.785) | 0.450 | 10 |" in to_table(rows)
