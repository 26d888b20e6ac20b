"""Owns: the offline phase weighs a call by what it earned in all, as rounds do: shaping of every level has its part.

- A reward of the whole run that shaping adds leaves the adapters that a run with the sum as its reward leaves.
- In a game of two sides a side learns from its own payoff, which reaches it by shaping only.
- What one agent earns alone is held against its own calls, so it says nothing of another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_policy import AGENTS, both_low, make_trajectory, play, sample, save_tiny_llama
from support.trainer_options import trainer_options
from torch import Tensor

from trace_store.records import Reward, Trajectory
from trainers.marft import MarftTrainer
from trainers.offline import phases

OFFLINE_MODES = ["awr", "importance", "topr", "asymre", "vtrace"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def shaping(level: str, weight: float = 1.0) -> list[dict[str, Any]]:
    return [{"reward": "own", "level": level, "weight": weight}]


def trainer_of(model_dir: Path, mode: str, **options: Any) -> MarftTrainer:
    fixed = {"device": "cpu", "lr": 0.01, "engine_tolerance": 9.0, "offline": {"mode": mode, "epochs": 1}}
    return MarftTrainer(trainer_options(**fixed, **options), model_dir, AGENTS, 0)


def stored(trainer: MarftTrainer, earned: Sequence[float]) -> list[Trajectory]:
    """As many runs of one task as rewards."""
    runs = play(trainer, len(earned), torch.Generator().manual_seed(3), both_low)
    return [
        replace(
            run,
            episode=replace(run.episode, task_id="t"),
            rewards=(Reward(run.episode.episode_id, "reward", value, "test", 1),),
        )
        for run, value in zip(runs, earned, strict=True)
    ]


def with_own(run: Trajectory, value: float, node: str | None = None) -> Trajectory:
    """The run with one more reward: of the whole run, or of an agent."""
    episode_id = run.episode.episode_id
    own = Reward(episode_id, "own", value, "test", 1, *(() if node is None else ("agent",)), node=node)
    return replace(run, rewards=(*run.rewards, own))


def adapters(trainer: MarftTrainer) -> Tensor:
    parts = (p.detach().flatten() for agent in AGENTS for p in trainer.policies.parameters(agent).values())
    return torch.cat(list(parts))


@pytest.mark.parametrize("mode", OFFLINE_MODES)
def test_a_run_that_shaping_pays_teaches_what_one_with_that_reward_teaches(model_dir: Path, mode: str) -> None:
    team, own, weight = [0.0, 1.0, 0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 3.0, 0.0, 2.0, 0.0], -0.5
    shaped = trainer_of(model_dir, mode, shaping=shaping("episode", weight))
    shaped.replay([with_own(run, value) for run, value in zip(stored(shaped, team), own, strict=True)])
    plain = trainer_of(model_dir, mode)
    plain.replay(stored(plain, [reward + weight * value for reward, value in zip(team, own, strict=True)]))
    untrained = trainer_of(model_dir, mode)
    assert not torch.equal(adapters(plain), adapters(untrained))
    torch.testing.assert_close(adapters(shaped), adapters(plain), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", ["awr", "importance"])
def test_a_side_learns_from_its_own_payoff(model_dir: Path, mode: str) -> None:
    sides = {"left": ("reasoner",), "right": ("actor",)}
    ends = []
    for winner in range(2):
        trainer = trainer_of(model_dir, mode, estimator="at_grpo", sides=sides, shaping=shaping("agent"))
        runs = [
            with_own(with_own(run, float(i % 2 == winner), node="reasoner"), float(i % 2 != winner), node="actor")
            for i, run in enumerate(stored(trainer, [0.0] * 6))
        ]
        learned = trainer.replay(runs)
        assert all(learned["agents"][agent]["steps"] for agent in AGENTS)
        ends.append(adapters(trainer))
    assert not torch.equal(*ends)


@pytest.mark.parametrize("mode", OFFLINE_MODES)
def test_with_a_discount_calls_of_the_better_runs_are_better_whatever_their_depth(model_dir: Path, mode: str) -> None:
    """One agent that acts three times in a run, twelve of which earned 1 and twelve 0.9."""
    valued = {"critic": {"shrink": True, "warmup_epochs": 0}}
    options = trainer_options(device="cpu", gamma=0.9, offline={"mode": mode}, **valued)
    trainer = MarftTrainer(options, model_dir, ["actor"], 0)
    earned = [1.0 if i // 5 % 2 else 0.9 for i in range(20)]
    runs = []
    for i, reward in enumerate(earned):
        calls = [sample(trainer, "actor", [3, 4 + k], 1, torch.Generator().manual_seed(3 * i + k)) for k in range(3)]
        run = make_trajectory(calls, reward, task_id=str(i))
        runs.append(replace(run, episode=replace(run.episode, episode_id=f"e{i}")))
    trainer.warm_up(runs)
    data = trainer._to_round(runs, "replay" if options.offline.needs_behaviour else "imitation")
    advantages, _ = phases._advantages(data, trainer.credit, options, ratio_A=np.ones(len(data.items)))
    if mode == "asymre":  # whose baseline lies lower, for all alike
        advantages += options.offline.shift
    assert [advantage > 0 for advantage in advantages] == [earned[e] == 1.0 for e in data.episode_A]


@pytest.mark.parametrize("mode", OFFLINE_MODES)
def test_what_rounding_leaves_of_equal_rewards_is_no_unit(model_dir: Path, mode: str) -> None:
    trainer = trainer_of(model_dir, mode)
    runs = stored(trainer, [0.3, 0.1 + 0.2] * 4)
    trainer.warm_up(runs)
    data = trainer._to_round(runs, "replay" if trainer.options.offline.needs_behaviour else "imitation")
    advantages, _ = phases._advantages(data, trainer.credit, trainer.options, ratio_A=np.ones(len(data.items)))
    expected = -trainer.options.offline.shift if mode == "asymre" else 0.0
    np.testing.assert_allclose(advantages, expected, atol=1e-6)


@pytest.mark.parametrize("mode", OFFLINE_MODES)
def test_rewards_in_another_unit_teach_the_same(model_dir: Path, mode: str) -> None:
    """In 64ths and in 64s, so that no rounding differs: the same weights of all calls, and the same adapters."""
    ends = []
    for unit in (1.0, 1 / 64, 64.0):
        trainer = trainer_of(model_dir, mode)
        runs = stored(trainer, [unit * reward for reward in (0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.5, 0.0)])
        trainer.warm_up(runs)
        figures = trainer.replay(runs)["agents"]["actor"]
        ends.append((figures["coefficient_mean"], figures["effective_sample_size"], adapters(trainer)))
    for mean, size, weights in ends[1:]:
        assert (mean, size) == (pytest.approx(ends[0][0]), pytest.approx(ends[0][1]))
        torch.testing.assert_close(weights, ends[0][2])


@pytest.mark.parametrize("mode", ["topr", "asymre"])
def test_what_an_agent_earns_alone_is_held_against_its_own_calls(
    model_dir: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Team rewards 0 and 1, and always -3 for the reasoner alone: every call is 1/2 above or below its agent's mean."""
    seen: dict[str, set[float]] = {agent: set() for agent in AGENTS}
    weigh = phases._advantages

    def note(*given: Any, **named: Any) -> Any:
        advantages, fit = weigh(*given, **named)
        for item, advantage in zip(given[0].items, advantages.tolist(), strict=True):
            seen[item.agent].add(round(advantage + (shift if mode == "asymre" else 0.0), 9))
        return advantages, fit

    monkeypatch.setattr(phases, "_advantages", note)
    trainer = trainer_of(model_dir, mode, estimator="dr_mas", shaping=shaping("agent"))
    shift = trainer.options.offline.shift
    trainer.replay([with_own(run, -3.0, node="reasoner") for run in stored(trainer, [0.0, 1.0] * 4)])
    assert seen == {"reasoner": {-0.5, 0.5}, "actor": {-0.5, 0.5}}
