"""Owns: that every offline mode improves on the policy that filled the store, where plain REINFORCE collapses.

One agent, one prompt, three arms among the tokens; all others pay nothing. The policy that played says the bad arm most
of the time and the best one rarely. What a policy earns is computed from its softmax, so nothing is left to chance but
the stored episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import make_action, make_trajectory, sample_batch
from support.toys import OPTIONS, VOCABULARY, said, save_toy_model
from support.trainer_options import trainer_options

from trace_store.records import Trajectory
from trainers.batch import trajectories_to_round
from trainers.config import OfflineOptions
from trainers.marft import MarftTrainer
from trainers.offline.imitate import Demonstrations, imitate

PAYS = {4: 0.3, 5: 0.55, 6: 1.0}
BAD, MIDDLE, BEST = PAYS
PROMPT = [1, 10]
MODES = ["filtered", "awr", "asymre", "topr", "importance", "vtrace"]


@pytest.fixture(scope="module", params=[0, 1, 2], ids=lambda seed: f"seed {seed}")
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("bandit"), request.param)


class Store:
    """A policy that mostly says the bad arm, as an adapter, and 400 episodes that it played."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.model_dir, self.adapter, self.seed = save_toy_model(folder / "model"), folder / "player@1", seed
        teacher = self._trainer(
            lr=0.03, mode="filtered", threshold=0.0, epochs=200, minibatch_actions=100, kl_budget=1e3
        )
        shown = [BAD] * 55 + [MIDDLE] * 39 + [BEST] * 6
        with pytest.MonkeyPatch.context() as patch:  # the teacher learns all that it is shown by heart
            patch.setattr("trainers.offline.imitate._HELD_SHARE", 1000)
            teacher.replay([make_trajectory([make_action("player", PROMPT, [arm])], 0.0) for arm in shown])
        teacher.policies.save_adapter("player", self.adapter)
        actions = sample_batch(teacher, "player", [PROMPT] * 400, 1, torch.Generator().manual_seed(seed))
        self.episodes = [make_trajectory([action], PAYS.get(said(action), 0.0)) for action in actions]

    def trainer(self, mode: str, **offline: Any) -> MarftTrainer:
        """A trainer whose policy is the one that played."""
        trainer = self._trainer(mode=mode, **offline)
        trainer.policies.load_adapter("player", self.adapter)
        return trainer

    def _trainer(self, lr: float = 0.01, **offline: Any) -> MarftTrainer:
        options = trainer_options(**(OPTIONS | {"lr": lr, "offline": offline}))
        return MarftTrainer(options, self.model_dir, ["player"], self.seed)


def _policy(trainer: MarftTrainer) -> dict[int, float]:
    """How likely each arm is."""
    actions = [make_action("player", PROMPT, [arm]) for arm in PAYS]
    logprobs = trainer.policies.logprobs_of("player", actions)
    return {arm: float(torch.tensor(logp[0]).exp()) for arm, logp in zip(PAYS, logprobs, strict=True)}


def _earns(policy: dict[int, float]) -> float:
    return sum(PAYS[arm] * p for arm, p in policy.items())


def _learned(store: Store, mode: str, episodes: Sequence[Trajectory]) -> dict[int, float]:
    offline: dict[str, Any] = {"epochs": 8, "minibatch_actions": 100, "kl_budget": 1e3}
    trainer = store.trainer(mode, **offline, **({"threshold": 0.9} if mode == "filtered" else {}))
    trainer.warm_up(episodes)
    trainer.replay(episodes)
    return _policy(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_an_offline_mode_finds_the_arm_that_was_rarely_played(store: Store, mode: str) -> None:
    played = _policy(store.trainer("off"))
    assert 0.03 < played[BEST] < 0.09
    learned = _learned(store, mode, store.episodes)
    assert learned[BEST] > 1.5 * played[BEST]
    assert _earns(learned) > _earns(played) + (0.02 if mode == "vtrace" else 0.07)


@pytest.mark.parametrize("mode", MODES)
def test_with_the_opposite_rewards_it_finds_the_opposite_arm(store: Store, mode: str) -> None:
    played = _policy(store.trainer("off"))
    learned = _learned(store, mode, [_opposite(t) for t in store.episodes])
    assert learned[BEST] < 0.5 * played[BEST]
    assert learned[BAD] > played[BAD] + 0.07


def _opposite(trajectory: Trajectory) -> Trajectory:
    """The arms' pays in the opposite order: the best pays what the bad one paid, and the other way round."""
    reward = trajectory.rewards[0]
    pays = PAYS[BAD] + PAYS[BEST] - reward.value if reward.value else 0.0
    return replace(trajectory, rewards=(replace(reward, value=pays),))


def test_plain_reinforce_with_a_baseline_above_the_mean_leaves_every_arm_that_it_was_shown(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same descent as asymre's, with its baseline 0.3 above the mean instead of 0.1 below, which the options
    # refuse: most episodes then only push away from what was played, towards tokens of which nothing is known.
    with pytest.raises(ValueError, match="less than or equal to 0"):
        OfflineOptions(mode="asymre", shift=0.3)
    monkeypatch.setattr("trainers.offline.imitate._HELD_SHARE", 1000)  # held-out episodes would end it before
    trainer = store.trainer("asymre", epochs=8, minibatch_actions=100, kl_budget=1e3)
    data = trajectories_to_round(store.episodes, ["player"], "reward", {"player": VOCABULARY}, "imitation")
    rewards = [episode.reward for episode in data.episodes]
    baseline = sum(rewards) / len(rewards) + 0.3
    advantages = [reward - baseline for reward in rewards]
    demonstrations = Demonstrations(
        data.items, data.episode_A, task_A=[data.episodes[e].task_id for e in data.episode_A], advantages=advantages
    )
    imitate(trainer.learners["player"], demonstrations, trainer.generator, lambda count: None)
    assert _policy(trainer)[BEST] < 0.02
    assert _earns(_policy(trainer)) < 0.1
