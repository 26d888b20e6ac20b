"""Owns: games of several sides: no reward of one side, and no measure of the game, reaches another side's loss.

- Whatever a rival earned, a side's advantages are the same bits, and so are its adapters after an update.
- A step reward goes back along D over its own side's actions only; the discount counts the rival's moves between.
- What would be shared is refused: by the options, by the agents' names, and by what an episode holds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.tiny_policy import AGENTS, make_action, make_trajectory, sample_batch, save_tiny_llama
from support.trainer_options import trainer_options

from trace_store.records import Reward, Trajectory
from trainers.advantages.arrays import Floats
from trainers.advantages.estimate import normalize_estimate
from trainers.advantages.estimator import EstimatorInput, estimators
from trainers.advantages.returns import centred_own_returns, returns_by_source
from trainers.advantages.settings import EstimatorSettings
from trainers.batch import Round, trajectories_to_round
from trainers.config import TrainerOptions
from trainers.errors import TrainError
from trainers.marft import MarftTrainer
from trainers.rewards import ShapingTerm

SIDES = {"left": ("reasoner",), "right": ("actor",)}
SIDE_OF = {"reasoner": "left", "actor": "right"}
SHAPING = (
    ShapingTerm(reward="payoff", level="agent", weight=1.0),
    ShapingTerm(reward="move", level="step", weight=0.5),
)
GAME: dict[str, Any] = {
    "sides": SIDES,
    "shaping": [term.model_dump() for term in SHAPING],
    "estimator": "dr_mas",
}
# Two turns of each, one after the other: every move reads all before it.
MOVES = ("reasoner", "actor", "reasoner", "actor")
INDEPENDENT = sorted(
    name
    for name, each in estimators().items()
    if each.per_agent and not each.needs_critic and not each.needs_sides and not each.needs_forks
)


def game(
    number: int,
    left: float,
    right: float,
    steps: Sequence[float] = (0.0, 0.0, 0.0, 0.0),
    measure: float = 0.0,
) -> Trajectory:
    """One run of a task: a payoff for each side, and a reward for each move."""
    actions = [make_action(node, [3 + turn], [1 + turn]) for turn, node in enumerate(MOVES)]
    bare = make_trajectory(actions, measure, task_id="deal")
    own = [
        Reward("e", "payoff", value, "test", 1, "agent", node=node)
        for node, value in zip(AGENTS, (left, right), strict=True)
    ]
    moves = [Reward("e", "move", value, "test", 1, "step", action_id=str(turn)) for turn, value in enumerate(steps)]
    episode = replace(bare.episode, episode_id=f"e{number}")
    return replace(bare, episode=episode, rewards=(*bare.rewards, *own, *moves))


def to_round(games: Sequence[Trajectory], shaping: Sequence[ShapingTerm] = SHAPING) -> Round:
    return trajectories_to_round(
        games, AGENTS, "reward", dict.fromkeys(AGENTS, 32), "on_policy", shaping, side_of=SIDE_OF
    )


def drawn_games(left_seed: int, right_seed: int) -> list[Trajectory]:
    """Six runs whose rewards are drawn for each side apart; the measure goes with those of the right side."""
    left, right = random.Random(left_seed), random.Random(right_seed)
    return [
        game(
            number,
            left.random(),
            right.random(),
            steps=(left.random(), right.random(), left.random(), right.random()),
            measure=right.random(),
        )
        for number in range(6)
    ]


def advantages(name: str, data: Round, mode: Any) -> Floats:
    settings = EstimatorSettings()
    count = len(data.items)
    shown = EstimatorInput(data, (1,) * count, np.ones(count), side_of=SIDE_OF)
    estimate = estimators()[name](settings).estimate(shown).estimate
    return normalize_estimate(estimate, [item.agent for item in data.items], mode).advantage_U


@pytest.mark.parametrize("mode", ["none", "agent"])
@pytest.mark.parametrize("name", INDEPENDENT)
def test_the_advantages_of_a_side_are_the_same_bits_whatever_its_rival_earned(name: str, mode: str) -> None:
    data, other = to_round(drawn_games(0, 1)), to_round(drawn_games(0, 2))
    own_rows, rival_rows = data.agents_to_rows(["reasoner"]), data.agents_to_rows(["actor"])
    before, after = advantages(name, data, mode), advantages(name, other, mode)
    assert before[own_rows].any()
    assert before[own_rows].tobytes() == after[own_rows].tobytes()
    assert before[rival_rows].tobytes() != after[rival_rows].tobytes()


def test_what_the_offline_phase_weighs_by_is_each_sides_own_too() -> None:
    data, other = to_round(drawn_games(0, 1)), to_round(drawn_games(0, 2))
    rows = data.agents_to_rows(["reasoner"])
    for name, parts in centred_own_returns(data, 0.9).items():
        assert parts[rows].any()
        assert parts[rows].tobytes() == centred_own_returns(other, 0.9)[name][rows].tobytes()


def test_a_step_reward_goes_back_over_its_own_sides_moves_and_the_measure_reaches_nobody() -> None:
    data = to_round([game(0, 2.0, -3.0, steps=(0.0, 0.0, 1.0, 8.0), measure=100.0)])
    earned = returns_by_source(data, 0.5)
    assert set(earned) == {"payoff", "move"}
    assert earned["payoff"].tolist() == [2.0, -3.0, 2.0, -3.0]
    # The left's second move is two links after its first: 0.5 * 1 * 0.5^2. The right's: 0.5 * 8 * 0.5^2.
    assert earned["move"].tolist() == [0.125, 1.0, 0.5, 4.0]
    (episode,) = data.episodes
    assert (episode.reward, episode.rewards.total) == (100.0, 0)


def test_without_sides_the_same_step_reward_reaches_the_rivals_move() -> None:
    games = [game(0, 0.0, 0.0, steps=(0.0, 0.0, 0.0, 8.0))]
    data = trajectories_to_round(games, AGENTS, "reward", dict.fromkeys(AGENTS, 32), "on_policy", SHAPING)
    assert returns_by_source(data, 0.5)["move"].tolist() == [0.5, 1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("reward", "term", "line"),
    [
        (
            Reward("e", "bonus", 1.0, "test", 1),
            ShapingTerm(reward="bonus", level="episode", weight=1.0),
            "the reward 'bonus' is of the whole episode, and would reach every side",
        ),
        (
            Reward("e", "bonus", 1.0, "test", 1, "agent", node="referee"),
            ShapingTerm(reward="bonus", level="agent", weight=1.0),
            "the reward 'bonus' is of 'referee', which is of no side",
        ),
    ],
)
def test_an_episode_with_a_reward_that_is_no_sides_own_is_refused(reward: Reward, term: ShapingTerm, line: str) -> None:
    plain = game(0, 1.0, 0.0)
    with pytest.raises(TrainError, match=line):
        to_round([replace(plain, rewards=(*plain.rewards, reward))], (*SHAPING, term))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"sides": {"left": ["reasoner", "actor"]}}, "sides must be two or more"),
        ({"sides": {}}, "sides must be two or more"),
        ({"sides": {"left": ["reasoner"], "right": []}}, "each with agents"),
        ({"sides": {"left": ["reasoner"], "right": ["reasoner"]}}, "no agent may be of two"),
        ({"shaping": []}, "of which there is none: add each side's reward"),
        (
            {"shaping": [*GAME["shaping"], {"reward": "bonus", "level": "episode", "weight": 1.0}]},
            "shaping of level 'episode' goes by a reward or a mean of all agents",
        ),
        ({"estimator": "gae"}, "advantage.estimator 'gae', whose critic goes by"),
        ({"estimator": "grpo"}, "whose baseline is that of all agents"),
        (
            {"estimator": "mars2", "shaping": [{"reward": "move", "level": "step", "weight": 1.0}]},
            "advantage.estimator 'mars2', whose baseline goes by",
        ),
        ({"normalize": "batch"}, "advantage.normalize 'batch' goes by"),
        ({"contribution": "rank_consistency"}, "advantage.contribution goes by"),
        *(
            ({"offline": {"mode": mode}}, f"offline.mode '{mode}' goes by")
            for mode in ("filtered", "asymre", "topr", "vtrace")
        ),
        ({"replay": {"successes": 0.25}}, "replay.successes goes by"),
        ({"nll_coef": 0.1}, "experimental.nll_coef goes by"),
        ({"truncated_reward": "final"}, "truncated_reward goes by"),
        ({"critic": {"hidden": 8}}, "advantage.critic has no effect here"),
    ],
)
def test_options_by_which_a_reward_would_reach_a_rival_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        trainer_options(**(GAME | options))
    assert line in str(caught.value)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def trainer(folder: Path, **options: Any) -> MarftTrainer:
    chosen: TrainerOptions = trainer_options(**(GAME | {"device": "cpu"} | options))
    return MarftTrainer(chosen, folder, AGENTS, seed=0)


@pytest.mark.parametrize(
    ("sides", "line"),
    [
        ({"left": ["reasoner"], "right": ["writer"]}, "train.trainer.sides: there is no agent 'writer'"),
        ({"left": ["reasoner"], "right": ["actor"], "third": ["judge"]}, "there is no agent 'judge'"),
    ],
)
def test_sides_are_made_of_the_agents_that_there_are(sides: dict[str, Any], line: str, tiny: Path) -> None:
    with pytest.raises(TrainError, match=line):
        trainer(tiny, sides=sides)


def test_an_agent_without_a_side_is_refused(tiny: Path) -> None:
    with pytest.raises(TrainError, match=r"agent 'judge' is of no side: name it in one"):
        MarftTrainer(trainer_options(**GAME), tiny, (*AGENTS, "judge"), seed=0)


def played_by(learner: MarftTrainer, right_seed: int) -> list[Trajectory]:
    """The drawn games, with moves that the trainer's own policies sampled; the same ones whatever was earned."""
    played = []
    for seed, recorded in enumerate(drawn_games(0, right_seed)):
        generator = torch.Generator().manual_seed(seed)
        sampled = [sample_batch(learner, node, [[3 + turn]], 1, generator)[0] for turn, node in enumerate(MOVES)]
        actions = [replace(a, action_id=str(i), index=i) for i, a in enumerate(sampled)]
        played.append(replace(recorded, actions=tuple(actions)))
    return played


@pytest.mark.parametrize("update", ["simultaneous", "sequential"])
@pytest.mark.parametrize("order", ["topological", "reverse"])
def test_an_update_leaves_a_side_with_the_same_bits_whatever_its_rival_earned(
    update: str, order: str, tiny: Path
) -> None:
    """Also of the side that is updated after its rival: the rival's ratio is no factor of its own."""
    options = {"update": update} if update == "simultaneous" else {"update": update, "agent_order": order}
    digests = []
    for right_seed in (1, 2):
        learner = trainer(tiny, **options)
        factors = learner.update(played_by(learner, right_seed))["agents"]
        assert [factors[agent]["factor_mean"] for agent in AGENTS] == [1.0, 1.0]
        digests.append([[p.detach().numpy().tobytes() for p in learner.learners[a].parameters] for a in AGENTS])
    assert digests[0][0] == digests[1][0]
    assert digests[0][1] != digests[1][1]


def test_agents_of_one_side_are_still_weighted_by_each_other(tiny: Path) -> None:
    """With a rival beside them that never acts here."""
    sides = {"left": AGENTS, "right": ("judge",)}
    side_of = dict.fromkeys(AGENTS, "left") | {"judge": "right"}
    options = trainer_options(**(GAME | {"sides": sides, "update": "sequential", "device": "cpu"}))
    learner = MarftTrainer(options, tiny, (*AGENTS, "judge"), seed=0)
    assert learner.options.side_of == side_of
    agents = learner.update(played_by(learner, 1))["agents"]
    assert agents["reasoner"]["factor_mean"] == 1.0
    assert agents["actor"]["factor_mean"] != 1.0


def test_sides_may_share_an_adapter_and_are_still_normalised_apart(tiny: Path) -> None:
    shared = {agent: {"adapter": "player"} for agent in AGENTS}
    learner = trainer(tiny, agents=shared)
    metrics = learner.update(played_by(learner, 1))["agents"]
    assert {metrics[agent]["adapter"] for agent in AGENTS} == {"player"}
    assert metrics["reasoner"]["adapter_moved"] > 0
    # each agent's advantages are less its own mean, so that neither side pays for the other
    assert [metrics[agent]["advantage_mean"] for agent in AGENTS] == pytest.approx([0, 0], abs=1e-6)
