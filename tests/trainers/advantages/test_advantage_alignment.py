"""Owns: Advantage Alignment: its term worked by hand, and what it does where plain training learns to defect.

The dilemma: prisoner's dilemma with payoffs 5, 3, 1, 0, sixteen rounds, two players whose softmax tables see the last
moves; cooperation is computed exactly from the tables. A sweep chose the settings; seeds 1 and 2 had others in it:
0.026 and 0.024 after plain training, 0.929 and 0.933 with Advantage Alignment, from 0.776.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.tiny_policy import AGENTS, make_action, make_trajectory
from support.trainer_options import trainer_options

from trace_store.records import Reward
from trainers.advantages.advantage_alignment import AdvantageAlignment, alignment
from trainers.advantages.estimate import BASELINE
from trainers.advantages.estimator import EstimatorInput
from trainers.advantages.settings import EstimatorSettings
from trainers.batch import Round, trajectories_to_round
from trainers.rewards import ShapingTerm

SIDE_OF = {"reasoner": "left", "actor": "right"}


# -- by hand -----------------------------------------------------------------------------------------------------------


def table(agents: list[str], turns: list[int], episodes: list[int]) -> Any:
    items = [SimpleNamespace(agent=agent, turn=turn) for agent, turn in zip(agents, turns, strict=True)]
    return SimpleNamespace(items=items, episode_A=tuple(episodes))


def test_the_term_is_the_past_of_a_side_times_the_present_of_its_rival() -> None:
    data = table(["l", "r"] * 3, [0, 0, 1, 1, 2, 2], [0] * 6)
    aligned = alignment(np.array([1.0, 2.0, 3.0, -4.0, 5.0, 6.0]), data, {"l": "left", "r": "right"}, gamma=0.5)
    # left: 0.5 * (0.5 * 1) * -4 = -1; 0.5 * (0.25 * 1 + 0.5 * 3) * 6 = 5.25
    # right: 0.5 * (0.5 * 2) * 3 = 1.5; 0.5 * (0.25 * 2 + 0.5 * -4) * 5 = -3.75
    assert aligned.tolist() == [0, 0, -1, 1.5, 5.25, -3.75]


def test_a_side_of_two_counts_by_its_mean_rivals_by_their_sum_and_episodes_apart() -> None:
    agents = ["a", "b", "r", "s"] * 2 + ["a", "b"]
    data = table(agents, [0] * 4 + [1] * 4 + [0, 1], [0] * 8 + [1] * 2)
    sides = {"a": "left", "b": "left", "r": "right", "s": "third"}
    own = np.array([1.0, 3.0, 5.0, 0.0, 2.0, 4.0, 1.0, 7.0, 9.0, 9.0])
    aligned = alignment(own, data, sides, gamma=1.0)
    # left: 2 * (1 + 7); right: 5 * (3 + 7); third's past is 0, and in the second run no rival moves
    assert aligned.tolist() == [0, 0, 0, 0, 16, 16, 50, 0, 0, 0]


def dilemma_round() -> Round:
    """Two runs of one task, two turns of simultaneous moves, paid at each move."""
    games = []
    for number, paid in enumerate(([3.0, 0.0, 1.0, 5.0], [1.0, 2.0, 3.0, 3.0])):
        actions = [make_action(agent, [3 + turn], [1]) for turn in range(2) for agent in AGENTS]
        edges = [(first, second) for first in (0, 1) for second in (2, 3)]
        bare = make_trajectory(actions, 0.0, edges=edges)
        moves = [Reward("e", "pay", value, "test", 1, "step", action_id=str(i)) for i, value in enumerate(paid)]
        episode = replace(bare.episode, episode_id=f"e{number}")
        games.append(replace(bare, episode=episode, rewards=(*bare.rewards, *moves)))
    pay = (ShapingTerm(reward="pay", level="step", weight=1.0),)
    vocabulary = dict.fromkeys(AGENTS, 32)
    return trajectories_to_round(games, AGENTS, "reward", vocabulary, "on_policy", pay, side_of=SIDE_OF)


def estimated(beta: float, units: int = 1) -> Any:
    data = dilemma_round()
    settings = EstimatorSettings(gamma=0.5, alignment_beta=beta)
    shown = EstimatorInput(data, (units,) * 8, np.ones(8), side_of=SIDE_OF)
    return AdvantageAlignment(settings).estimate(shown).estimate


def test_a_round_of_two_runs_by_hand() -> None:
    # Returns with gamma 0.5: first run 3 + 0.5 = 3.5, 0 + 2.5 = 2.5, 1, 5; second 1 + 1.5 = 2.5, 2 + 1.5 = 3.5, 3, 3.
    # Less the other run's: 1, -1, -2, 2 and -1, 1, 2, -2.
    plain = [1, -1, -2, 2, -1, 1, 2, -2]
    # Second turns, 0.5 * 0.5 * past * rival: 0.25 * 1 * 2, 0.25 * -1 * -2, and 0.25 * -1 * -2, 0.25 * 1 * 2.
    term = [0, 0, 0.5, 0.5, 0, 0, 0.5, 0.5]
    estimate = estimated(beta=2.0)
    np.testing.assert_allclose(estimate.advantage_U, np.array(plain) + 2 * np.array(term), atol=1e-12)
    np.testing.assert_allclose(sum(estimate.by_source.values()), estimate.advantage_U, atol=1e-12)
    plain_parts = estimated(beta=0.0)
    np.testing.assert_allclose(plain_parts.advantage_U, plain, atol=1e-12)
    gained = estimate.by_source[BASELINE] - plain_parts.by_source[BASELINE]
    np.testing.assert_allclose(gained, 2 * np.array(term), atol=1e-12)


def test_tokens_of_a_move_share_its_term() -> None:
    np.testing.assert_array_equal(estimated(1.0, units=3).advantage_U, np.repeat(estimated(1.0).advantage_U, 3))


def test_it_is_refused_without_sides_and_its_weight_without_it() -> None:
    with pytest.raises(ValueError, match=r"reads what the other sides earn: name them in train\.trainer\.sides"):
        trainer_options(estimator="advantage_alignment")
    with pytest.raises(ValueError, match=r"applies to advantage\.estimator 'advantage_alignment' only"):
        trainer_options(alignment_beta=2.0)


# -- the dilemma -------------------------------------------------------------------------------------------------------

PAYOFF = np.array([[3.0, 0.0], [5.0, 1.0]])  # of whoever moves the first index; 0 cooperates
TURNS, SAMPLES, UPDATES, GAMMA, RATE = 16, 64, 300, 0.96, 1.0
PRIOR = 2.0  # logit of cooperating, as of a model that begins well-meant: 0.88


@dataclass(frozen=True)
class Played:
    """Moves, what each player saw, and discounted returns; all [player, turn, sample]."""

    move: Any
    view: Any
    returns: Any


def play(logits: Any, chance: np.random.Generator) -> Played:
    """A round of samples. A player's view: 0 at the start, else 1 + 2 * its own last move + the other's."""
    cooperates = 1 / (1 + np.exp(-logits))
    move, view = np.zeros((2, TURNS, SAMPLES), int), np.zeros((2, TURNS, SAMPLES), int)
    paid, seen = np.zeros((2, TURNS, SAMPLES)), np.zeros((2, SAMPLES), int)
    for turn in range(TURNS):
        view[:, turn] = seen
        for player in (0, 1):
            move[player, turn] = chance.random(SAMPLES) >= cooperates[player][seen[player]]
        first, second = move[:, turn]
        paid[0, turn], paid[1, turn] = PAYOFF[first, second], PAYOFF[second, first]
        seen = np.stack([1 + 2 * first + second, 1 + 2 * second + first])
    returns = np.zeros_like(paid)
    for turn in reversed(range(TURNS)):
        returns[:, turn] = paid[:, turn] + (GAMMA * returns[:, turn + 1] if turn + 1 < TURNS else 0)
    return Played(move, view, returns)


def learned(beta: float, seed: int) -> Any:
    """The tables after training, by the estimator itself and a plain policy gradient; [player, view]."""
    chance = np.random.default_rng(seed)
    logits = np.full((2, 5), PRIOR)
    estimator = AdvantageAlignment(EstimatorSettings(gamma=GAMMA, alignment_beta=beta))
    places = list(itertools.product((0, 1), range(TURNS), range(SAMPLES)))
    items = tuple(SimpleNamespace(agent=AGENTS[player], turn=turn) for player, turn, _ in places)
    samples = tuple(sample for *_, sample in places)
    episodes = [SimpleNamespace(task_id="dilemma")] * SAMPLES
    data = SimpleNamespace(items=items, episode_A=samples, tree_A=samples, episodes=episodes, forest=None)
    for _ in range(UPDATES):
        played = play(logits, chance)
        return_A = played.returns.ravel()
        shown = SimpleNamespace(
            data=data,
            side_of=SIDE_OF,
            returns_by_source=lambda *_, return_A=return_A: {"pay": return_A},
            over_units=lambda part_A, gamma_token: part_A,
        )
        advantage = estimator.estimate(cast("EstimatorInput", shown)).estimate.advantage_U
        advantage = advantage.reshape(2, TURNS, SAMPLES)
        for player in (0, 1):
            mine = advantage[player]
            scaled = (mine - mine.mean()) / (mine.std() + 1e-6)  # normalised per agent
            view, cooperated = played.view[player], played.move[player] == 0
            gradient = (cooperated - 1 / (1 + np.exp(-logits[player][view]))) * scaled
            logits[player] += RATE * np.bincount(view.ravel(), gradient.ravel(), minlength=5) / mine.size
    return logits


def mutual_cooperation(logits: Any) -> float:
    """The chance that both cooperate, on average over the turns, by the distribution over pairs of last moves."""
    p, q = 1 / (1 + np.exp(-logits))
    chance_of = {None: 1.0}
    total = 0.0
    for _ in range(TURNS):
        next_chances: dict[Any, float] = dict.fromkeys(itertools.product((0, 1), repeat=2), 0.0)
        for last, chance in chance_of.items():
            views = (0, 0) if last is None else (1 + 2 * last[0] + last[1], 1 + 2 * last[1] + last[0])
            both = (p[views[0]], q[views[1]])
            for pair in next_chances:
                parts = [c if moved == 0 else 1 - c for c, moved in zip(both, pair, strict=True)]
                next_chances[pair] += chance * parts[0] * parts[1]
        chance_of = cast("dict[Any, float]", next_chances)
        total += next_chances[0, 0]
    return total / TURNS


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_plain_training_learns_to_defect_where_alignment_keeps_mutual_cooperation(seed: int) -> None:
    plain, aligned = (mutual_cooperation(learned(beta, seed)) for beta in (0.0, 1.0))
    assert mutual_cooperation(np.full((2, 5), PRIOR)) == pytest.approx(0.776, abs=1e-3)
    assert plain < 0.1
    assert aligned > 0.8
