"""Owns: how a whole update is put together: who shares, who is frozen, whose turn it is, what is replayed or masked.

Through `MarftTrainer.update` and `replay` on a tiny Llama; the formulas have tests of their own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny_policy import AGENTS, both_low, make_action, make_trajectory, play, save_tiny_llama
from support.trainer_options import trainer_options
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trace_store.records import NO_LOGPROBS, Action, Reward, Trajectory
from trainers.credit.action_credits import ActionCredit
from trainers.errors import TrainError
from trainers.marft import MarftTrainer
from trainers.objective import improve
from trainers.objective.update_order import update_order
from trainers.offline.replay_gate import TOO_STALE
from trainers.policies.adapter_learner import AdapterLearner


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def _trainer(model_dir: Path | dict[str, Path], seed: int = 0, **options: Any) -> MarftTrainer:
    fields: dict[str, Any] = {"device": "cpu", "lr": 0.02, "engine_tolerance": 9.0} | options
    return MarftTrainer(trainer_options(**fields), model_dir, AGENTS, seed)


def _weights(trainer: MarftTrainer, agent: str) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.policies.parameters(agent).items()}


def _moved(trainer: MarftTrainer, before: dict[str, dict[str, torch.Tensor]]) -> set[str]:
    return {
        agent
        for agent, weights in before.items()
        if any(not torch.equal(p, weights[n]) for n, p in trainer.policies.parameters(agent).items())
    }


def _games(trainer: MarftTrainer, episodes: int = 8, seed: int = 0) -> list[Trajectory]:
    return play(trainer, episodes, torch.Generator().manual_seed(seed), both_low)


# -- who acts by which adapter ---------------------------------------------------------------------------------


def test_agents_that_share_an_adapter_learn_one_and_the_same(model_dir: Path) -> None:
    trainer = _trainer(model_dir, agents={"reasoner": {"adapter": "team"}, "actor": {"adapter": "team"}})
    assert list(trainer.learners) == ["team"]
    metrics = trainer.update(_games(trainer))
    assert metrics["order"] == ["team"]
    assert all(
        torch.equal(p, trainer.policies.parameters("actor")[n])
        for n, p in trainer.policies.parameters("reasoner").items()
    )
    agents = metrics["agents"]
    assert agents["reasoner"]["adapter_moved"] == agents["actor"]["adapter_moved"] > 0
    assert (agents["reasoner"]["actions"], agents["actor"]["tokens"]) == (8, 8)  # what is an agent's stays its own


def test_a_shared_adapter_moves_along_the_mean_of_its_agents_gradients(model_dir: Path) -> None:
    """Each action counts the same: eight of each agent make sixteen of one adapter."""
    gradients = {}
    for agents in ({}, {"reasoner": {"adapter": "team"}, "actor": {"adapter": "team"}}):
        trainer = _trainer(
            model_dir,
            agents=agents,
            minibatch_actions=10_000,
            update="simultaneous",
            normalize="none",
            max_grad_norm=1e9,
        )
        for learner in trainer.learners.values():  # the same start, whatever the adapter is called
            for parameter, value in zip(learner.parameters, _start(trainer), strict=True):
                parameter.data.copy_(value)
        trainer.update(_games(trainer))
        gradients[len(trainer.learners)] = [
            torch.cat([p.grad.flatten() for p in learner.parameters if p.grad is not None])
            for learner in trainer.learners.values()
        ]
    (shared,), (one, other) = gradients[1], gradients[2]
    torch.testing.assert_close(shared, (one + other) / 2, atol=1e-6, rtol=1e-4)


def _start(trainer: MarftTrainer) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(p.shape, generator=generator) * 0.1 for p in trainer.policies.parameters("actor").values()]


def test_a_frozen_agent_does_not_move_and_is_part_of_the_environment(model_dir: Path) -> None:
    trainer = _trainer(model_dir, agents={"reasoner": {"frozen": True}})
    before = {agent: _weights(trainer, agent) for agent in AGENTS}
    chain = [make_action("actor", [1], [2]), make_action("reasoner", [3], [4]), make_action("actor", [5], [6])]
    games = [make_trajectory(chain, 1.0), make_trajectory(chain, 0.0)]
    metrics = trainer.update(games)
    assert _moved(trainer, before) == {"actor"}
    assert list(metrics["agents"]) == ["actor"]
    assert metrics["drops"] == {"action: node is not trained": 2}
    with pytest.raises(TrainError, match="'reasoner' is frozen"):
        trainer.policies.logprobs_of("reasoner", [])


def test_a_frozen_agent_that_shares_an_adapter_acts_by_it_and_teaches_it_nothing(model_dir: Path) -> None:
    updated = {}
    for frozen_reward in (0.0, 1.0):  # of what the frozen agent did
        trainer = _trainer(
            model_dir,
            agents={"reasoner": {"adapter": "x", "frozen": True}, "actor": {"adapter": "x", "lr": 0.01}},
            shaping=[{"reward": "own", "level": "agent", "weight": 1.0}],
            minibatch_actions=1,  # else like actions cancel out
        )
        assert trainer.policies.trained == ("actor",)
        assert trainer.policies.adapters["x"].lr == 0.01
        before = {agent: _weights(trainer, agent) for agent in AGENTS}
        chain = [make_action("reasoner", [3], [4]), make_action("actor", [1], [2])]
        games = [make_trajectory(chain, float(k)) for k in range(2)]
        own = [
            Reward(game.episode.episode_id, "own", frozen_reward * k, "test", 1, scope="agent", node="reasoner")
            for k, game in enumerate(games)
        ]
        metrics = trainer.update(
            [replace(game, rewards=(*game.rewards, reward)) for game, reward in zip(games, own, strict=True)]
        )
        assert list(metrics["agents"]) == ["actor"]
        assert metrics["drops"] == {"action: node is not trained": 2}
        assert _moved(trainer, before) == set(AGENTS)  # one set of weights
        updated[frozen_reward] = _weights(trainer, "reasoner")
    assert all(torch.equal(p, updated[1.0][name]) for name, p in updated[0.0].items())


def test_a_frozen_adapter_that_changes_stops_the_training(model_dir: Path) -> None:
    trainer = _trainer(model_dir, agents={"reasoner": {"frozen": True}})
    games = [make_trajectory([make_action("actor", [1], [2])], float(k)) for k in range(2)]
    with torch.no_grad():
        next(iter(trainer.policies.parameters("reasoner").values())).add_(1.0)
    with pytest.raises(TrainError, match="the frozen weight 'reasoner"):
        trainer.update(games)


def test_a_base_weight_that_changes_stops_the_training(model_dir: Path) -> None:
    trainer = _trainer(model_dir)
    games = _games(trainer)
    with torch.no_grad():
        trainer.policies.model.peft.get_input_embeddings().weight[3, 5] += 1e-3
    with pytest.raises(TrainError, match="the frozen weight"):
        trainer.update(games)


def test_agents_may_run_on_base_models_of_different_width(model_dir: Path, tmp_path: Path) -> None:
    other = save_tiny_llama(tmp_path / "other", seed=3, vocabulary=48)
    trainer = _trainer({"reasoner": model_dir, "actor": other}, minibatch_actions=1)  # else like actions cancel out
    before = {agent: _weights(trainer, agent) for agent in AGENTS}
    actions = [make_action("reasoner", [1], [2]), make_action("actor", [40], [47])]
    metrics = trainer.update([make_trajectory(actions, float(k)) for k in range(2)])
    assert _moved(trainer, before) == set(AGENTS)
    assert metrics["drops"] == {}
    swapped = [make_action("reasoner", [40], [47]), make_action("actor", [1], [2])]
    drops = trainer.update([make_trajectory(swapped, float(k)) for k in range(2)])["drops"]
    assert drops == {"action: token ids outside the base model's vocabulary": 2}
    with pytest.raises(TrainError, match="2 base models"):
        _ = trainer.policies.model


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        ({"nobody": {}}, r"train.trainer.agents.nobody: there is no such agent; they are reasoner, actor"),
        ({"reasoner": {"frozen": True}, "actor": {"frozen": True}}, "every agent is frozen"),
        (
            {"reasoner": {"adapter": "x", "lr": 0.1}, "actor": {"adapter": "x"}},
            "share the adapter 'x' but differ in lr",
        ),
    ],
)
def test_a_map_of_agents_that_does_not_fit_is_refused(model_dir: Path, agents: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainError, match=message):
        _trainer(model_dir, agents=agents)


def test_each_agent_has_its_own_rate_and_all_have_one_schedule(model_dir: Path) -> None:
    trainer = _trainer(model_dir, agents={"actor": {"lr": 0.01}}, schedule={"kind": "linear", "rounds": 2})
    rates = [
        {agent: metrics["lr"] for agent, metrics in trainer.update(_games(trainer))["agents"].items()} for _ in range(3)
    ]
    assert rates[0] == {"reasoner": pytest.approx(0.02), "actor": pytest.approx(0.01)}
    assert rates[1] == {"reasoner": pytest.approx(0.01), "actor": pytest.approx(0.005)}
    assert rates[2] == {"reasoner": 0.0, "actor": 0.0}


# -- whose turn it is ------------------------------------------------------------------------------------------


def test_alternating_moves_one_adapter_a_round_in_the_order_of_the_dependencies(model_dir: Path) -> None:
    trainer = _trainer(model_dir, update="alternating")
    moved = []
    for _ in range(3):
        before = {agent: _weights(trainer, agent) for agent in AGENTS}
        metrics = trainer.update(_games(trainer))
        moved.append((_moved(trainer, before), metrics["order"]))
        (waiting,) = set(AGENTS) - set(metrics["order"])
        assert metrics["agents"][waiting] == {"adapter": waiting, "actions": 8, "tokens": 8, "forced_share": 0.0}
    assert moved == [({"reasoner"}, ["reasoner"]), ({"actor"}, ["actor"]), ({"reasoner"}, ["reasoner"])]


def test_each_has_its_turn_whoever_of_two_that_move_at_once_came_first(model_dir: Path) -> None:
    """Positions of parallel calls are those of their starts, which differ from round to round."""
    policies = _trainer(model_dir, update="alternating").policies
    options = trainer_options(update="alternating")
    turns = []
    for number in range(4):
        names = AGENTS if number % 2 else AGENTS[::-1]
        episode: Any = SimpleNamespace(actions=[SimpleNamespace(agent=name) for name in names])
        data: Any = SimpleNamespace(forest=None, episodes=[episode])
        turns += update_order(data, policies, options, number, torch.Generator())
    assert turns == [*AGENTS, *AGENTS]


def test_simultaneous_agents_do_not_weigh_each_other(model_dir: Path) -> None:
    metrics = (trainer := _trainer(model_dir, update="simultaneous", lr=0.3, kl_stop=None)).update(_games(trainer))
    assert {agent["factor_mean"] for agent in metrics["agents"].values()} == {1.0}


# -- replay ----------------------------------------------------------------------------------------------------


def _versioned(trajectories: Sequence[Trajectory], version: int) -> list[Trajectory]:
    return [replace(t, actions=tuple(replace(a, adapter_version=version) for a in t.actions)) for t in trajectories]


def test_the_share_of_older_episodes_is_bounded_and_the_draw_is_the_checkpoints(model_dir: Path) -> None:
    trainer = _trainer(model_dir, replay={"share": 0.25})
    drawn = trainer.draw_replay(range(100), fresh=30)
    assert len(drawn) == 10  # 10 of 40 are a quarter
    assert len(set(drawn)) == len(drawn)
    assert trainer.draw_replay(range(100), 30) != drawn
    assert _trainer(model_dir, replay={"share": 0.25}).draw_replay(range(100), 30) == drawn
    assert sorted(trainer.draw_replay(range(3), 30)) == [0, 1, 2]
    assert _trainer(model_dir).draw_replay(range(100), 30) == []
    assert len(_trainer(model_dir, replay={"share": 0.6}).draw_replay(range(100), 2)) == 3  # 3 of 5
    games = _games(trainer, 10)
    metrics = _trainer(model_dir, replay={"share": 0.25, "min_ess": 0.0}).update(games[:6], games)
    assert (metrics["replayed"], metrics["drops"]) == (2, {"replay: episode beyond replay.share": 8})


def test_of_older_episodes_whole_groups_join_where_groups_are_compared_and_none_that_is_alone(model_dir: Path) -> None:
    trainer = _trainer(model_dir, advantage={"estimator": "grpo"}, replay={"share": 0.25})
    samples_of = [("alone", 1), *[(f"t{n // 4}", 1) for n in range(40)], *[("t0", 2)] * 3]
    drawn = trainer.draw_replay(samples_of, fresh=30)
    assert len(set(drawn)) == len(drawn)
    assert len(drawn) in (7, 8)  # of at most 10: twice four, or four and three
    counts = Counter(samples_of[i] for i in drawn)
    assert all(count == samples_of.count(key) > 1 for key, count in counts.items())
    assert trainer.draw_replay(samples_of, fresh=6) == []  # two of eight: no group is so small
    many = {i for _ in range(40) for i in trainer.draw_replay(samples_of, 30)}
    assert many == set(range(1, 44))


def test_how_old_an_episode_is_counts_from_the_version_that_is_trained(model_dir: Path) -> None:
    """Fresh calls of version 3 while 5 is trained: those of version 2 are three behind, not one."""
    trainer = _trainer(model_dir, replay={"share": 0.5, "max_staleness": 2, "min_ess": 0.0})
    fresh, near, far = (_versioned(_games(trainer, 4, seed), v) for seed, v in ((0, 3), (1, 3), (2, 2)))
    metrics = trainer.update(fresh, [*far, *near], newest=5)
    assert (metrics["replayed"], metrics["drops"]) == (4, {TOO_STALE: 4})


def test_older_episodes_join_a_round_and_what_is_too_old_is_dropped_with_its_reason(model_dir: Path) -> None:
    trainer = _trainer(model_dir, replay={"share": 0.5, "max_staleness": 2, "min_ess": 0.0})
    fresh, near, far = (_versioned(_games(trainer, 4, seed), v) for seed, v in ((0, 5), (1, 3), (2, 2)))
    metrics = trainer.update(fresh, [*near, *far])
    assert (metrics["episodes"], metrics["replayed"]) == (8, 4)
    assert [count for reason, count in metrics["drops"].items() if "max_staleness" in reason] == [4]
    assert metrics["agents"]["actor"]["actions"] == 8


def test_replayed_actions_whose_weights_are_worth_too_few_samples_are_dropped(model_dir: Path) -> None:
    trainer = _trainer(model_dir, replay={"share": 0.5, "min_ess": 0.5}, logprob_norm="sum", mismatch_cap=1000.0)
    fresh = _games(trainer, 4)
    older = _games(trainer, 4, seed=1)
    skewed = [
        replace(
            t,
            actions=tuple(replace(a, logprobs=tuple(x - 6.0 * (k == 0) for x in a.logprobs or ())) for a in t.actions),
        )
        for k, t in enumerate(older)
    ]
    assert trainer.update(fresh, older)["agents"]["actor"]["actions"] == 8
    metrics = trainer.update(_games(trainer, 4), skewed)
    assert metrics["agents"]["actor"]["actions"] == 4
    assert metrics["drops"]["replay: action: effective sample size below replay.min_ess"] == 8


def _by_strangers(trajectories: Sequence[Trajectory], agents: Sequence[str]) -> list[Trajectory]:
    """As if policies that hardly ever say such things had said what these agents said: pi / mu is beyond every cap."""
    return [
        replace(
            t,
            actions=tuple(
                replace(a, logprobs=tuple(x - 9.0 for x in a.logprobs or ())) if a.node in agents else a
                for a in t.actions
            ),
        )
        for t in trajectories
    ]


MASKED = {"replay": {"share": 0.5, "min_ess": 0.1}, "mismatch": "mask", "mismatch_cap": 2.0}


@pytest.mark.parametrize(
    "options",
    [{}, {"granularity": "token"}, {"estimator": "rloo"}, {"estimator": "rloo", "skip_flat_groups": True}],
    ids=["gae", "token", "rloo", "no flat groups"],
)
def test_replay_that_was_refused_leaves_no_trace(model_dir: Path, options: dict[str, Any]) -> None:
    """Neither in baselines, normalisation, critic and figures, nor in what is said to have been replayed."""
    alone, beside = (_trainer(model_dir, **MASKED, **options) for _ in range(2))
    fresh, older = _games(alone, 8), _by_strangers(_games(alone, 8, seed=3), AGENTS)
    without, refused = alone.update(fresh), beside.update(fresh, older)
    assert refused.pop("drops") == {
        "replay: action: not one of its importance weights is above 0": 16,
        **without.pop("drops"),
    }
    assert (refused["episodes"], refused["replayed"]) == (without["episodes"], 0)
    for name in ("value_loss", "explained_variance", "flat_groups"):
        assert refused["critic"][name] == pytest.approx(without["critic"][name], abs=1e-5)
    for agent in AGENTS:  # but for the rounding of micro-batches that were cut elsewhere
        figures, expected = refused["agents"][agent], without["agents"][agent]
        assert {name: value for name, value in figures.items() if name != "gradient_share"} == pytest.approx(
            {name: value for name, value in expected.items() if name != "gradient_share"}, abs=1e-5
        )
        theirs = alone.policies.parameters(agent)
        assert all(torch.allclose(p, theirs[name], atol=1e-5) for name, p in beside.policies.parameters(agent).items())


def test_replayed_actions_of_a_refused_adapter_are_environment_to_the_others(model_dir: Path) -> None:
    """What the actor did then teaches nothing, and what the reasoner did teaches as if nobody had trained the actor."""
    half, whole = (_trainer(model_dir, **MASKED) for _ in range(2))
    fresh, older = _games(half, 8), _games(half, 8, seed=3)
    foreign = [replace(t, actions=tuple(replace(a, trainable=a.node != "actor") for a in t.actions)) for t in older]
    by_nature, by_weight = half.update(fresh, foreign), whole.update(fresh, _by_strangers(older, ["actor"]))
    assert by_weight["replayed"] == by_nature["replayed"] == 8
    assert {agent: figures["actions"] for agent, figures in by_weight["agents"].items()} == {"reasoner": 16, "actor": 8}
    for agent in AGENTS:  # but for the rounding of micro-batches that were cut elsewhere
        figures, expected = by_weight["agents"][agent], by_nature["agents"][agent]
        assert figures["advantage_mean"] == pytest.approx(expected["advantage_mean"], abs=1e-6)
        assert figures["adapter_moved"] == pytest.approx(expected["adapter_moved"], abs=1e-4)
    assert by_weight["critic"]["value_loss"] == pytest.approx(by_nature["critic"]["value_loss"], abs=1e-6)


@pytest.mark.parametrize("mode", ["topr", "importance", "vtrace"])
def test_stored_actions_that_the_offline_phase_refuses_leave_no_trace_in_the_others(model_dir: Path, mode: str) -> None:
    options = {"offline": {"mode": mode}, "replay": {"min_ess": 0.1}}
    half, whole = (_trainer(model_dir, **options) for _ in range(2))
    games = _games(half, 12)
    rare = [
        replace(
            t,
            actions=tuple(
                replace(a, logprobs=tuple(x + 9.0 * (k > 0) for x in a.logprobs or ())) if a.node == "actor" else a
                for a in t.actions
            ),
        )
        for k, t in enumerate(games)
    ]
    foreign = [replace(t, actions=tuple(replace(a, trainable=a.node != "actor") for a in t.actions)) for t in rare]
    by_nature, by_weight = half.replay(foreign), whole.replay(rare)
    assert by_weight["drops"] == {"action: effective sample size below replay.min_ess": 12}
    drops = [figures["agents"]["actor"].pop("drops") for figures in (by_nature, by_weight)]
    assert drops == [{"untrainable": 12}, {"effective sample size below replay.min_ess": 12}]
    assert by_weight["agents"] == by_nature["agents"]
    assert by_weight["agents"]["reasoner"]["actions"] == 12
    for agent in AGENTS:
        ours, theirs = half.policies.parameters(agent), whole.policies.parameters(agent)
        assert all(torch.equal(p, theirs[name]) for name, p in ours.items())


@pytest.mark.parametrize("granularity", ["action", "token"])
def test_the_gate_of_replay_weighs_as_the_loss_does(model_dir: Path, granularity: str) -> None:
    """All ratios are e^1.6 = 5, beyond the cap of 2: equal weights when capped, none left when masked."""
    for mismatch, replayed in (("truncate", 8), ("mask", 0)):
        trainer = _trainer(model_dir, **MASKED | {"mismatch": mismatch}, granularity=granularity)
        older = [
            replace(t, actions=tuple(replace(a, logprobs=tuple(x - 1.6 for x in a.logprobs or ())) for a in t.actions))
            for t in _games(trainer, 8, seed=3)
        ]
        assert trainer.update(_games(trainer, 8), older)["replayed"] == replayed


def test_older_episodes_without_a_share_are_refused(model_dir: Path) -> None:
    trainer = _trainer(model_dir)
    games = _games(trainer)
    with pytest.raises(TrainError, match=r"replay\.share is 0"):
        trainer.update(games, games)


# -- successes of before -----------------------------------------------------------------------------------------


def _won(trajectories: Sequence[Trajectory], reward: float = 2.0) -> list[Trajectory]:
    """As if they had earned more than any fresh one does."""
    return [
        replace(
            t,
            episode=replace(t.episode, episode_id=f"won {t.episode.episode_id}"),
            rewards=tuple(replace(r, value=reward) for r in t.rewards),
        )
        for t in trajectories
    ]


@pytest.mark.parametrize("options", [{}, {"granularity": "token"}, {"estimator": "rloo"}], ids=["gae", "token", "rloo"])
def test_successes_of_before_have_no_part_in_what_fresh_episodes_are_worth(
    model_dir: Path, options: dict[str, Any]
) -> None:
    alone, beside = (_trainer(model_dir, replay={"successes": 0.5}, **options) for _ in range(2))
    fresh, older = _games(alone, 8), _won(_games(alone, 8, seed=3))
    told_by_run: list[dict[str, list[float]]] = []
    figures = []
    for trainer, replayed in ((alone, []), (beside, older)):

        def keep(told: Sequence[ActionCredit]) -> None:
            told_by_run.append({c.episode_id + c.action_id: c.normalised_U.tolist() for c in told})

        figures.append(trainer.update(fresh, replayed, keep))
    assert (figures[0]["replayed"], figures[1]["replayed"]) == (0, 8)
    assert {key: told_by_run[1][key] for key in told_by_run[0]} == told_by_run[0]
    assert min(value for key, values in told_by_run[1].items() if key.startswith("won") for value in values) > 0
    for name in ("value_loss", "explained_variance", "flat_groups"):
        assert figures[1]["critic"][name] == figures[0]["critic"][name]


def test_a_success_of_before_is_made_likelier_until_the_clip_of_when_it_was_sampled(model_dir: Path) -> None:
    """The fresh episodes earn the same and teach nothing. One that is 28 % likelier by now has nothing to teach."""
    for gap, moves in ((0.0, True), (-0.5, False)):
        trainer = _trainer(model_dir, replay={"successes": 0.5}, epochs=1, minibatch_actions=1000)
        fresh = [replace(t, rewards=tuple(replace(r, value=0.0) for r in t.rewards)) for t in _games(trainer, 8)]
        older = [
            replace(t, actions=tuple(replace(a, logprobs=tuple(x + gap for x in a.logprobs or ())) for a in t.actions))
            for t in _won(_games(trainer, 8, seed=3))
        ]
        before = {agent: _weights(trainer, agent) for agent in AGENTS}
        metrics = trainer.update(fresh, older)
        assert metrics["replayed"] == 8
        assert _moved(trainer, before) == (set(AGENTS) if moves else set())


@pytest.mark.parametrize("granularity", ["action", "token"])
def test_a_shaped_success_is_made_likelier_whatever_it_was_when_it_was_sampled(
    model_dir: Path, granularity: str
) -> None:
    """The fresh episodes teach nothing; no ratio is taken, so what the engine said of a success changes no weight."""
    moved = []
    for gap in (0.0, -0.5):
        trainer = _trainer(
            model_dir,
            replay={"successes": 0.5},
            experimental={"success_shaping": 0.1},
            granularity=granularity,
            epochs=1,
            minibatch_actions=1000,
            update="simultaneous",
        )
        fresh = [replace(t, rewards=tuple(replace(r, value=0.0) for r in t.rewards)) for t in _games(trainer, 8)]
        successes = _won(_games(trainer, 8, seed=3))
        older = [
            replace(t, actions=tuple(replace(a, logprobs=tuple(x + gap for x in a.logprobs or ())) for a in t.actions))
            for t in successes
        ]
        before = {agent: _weights(trainer, agent) for agent in AGENTS}
        metrics = trainer.update(fresh, older)
        assert metrics["replayed"] == 8
        assert _moved(trainer, before) == set(AGENTS)
        assert [figures["clipfrac"] for figures in metrics["agents"].values()] == [None, None]
        moved.append({agent: _weights(trainer, agent) for agent in AGENTS})
    for agent in AGENTS:
        assert all(torch.equal(weight, moved[1][agent][name]) for name, weight in moved[0][agent].items())


def test_how_far_a_round_moved_is_measured_on_its_fresh_calls_alone(model_dir: Path) -> None:
    """Successes are held against the policy that sampled them, which may be far from today's."""
    kls = []
    for gap in (0.0, -3.0):
        trainer = _trainer(model_dir, replay={"successes": 0.5}, kl_target=1e9, lr=1e-9)
        older = [
            replace(t, actions=tuple(replace(a, logprobs=tuple(x + gap for x in a.logprobs or ())) for a in t.actions))
            for t in _won(_games(trainer, 8, seed=3))
        ]
        agents = trainer.update(_games(trainer, 8), older)["agents"]
        kls += [figures["kl_of_call"] for figures in agents.values()]
        assert [figures["factor_mean"] for figures in agents.values()] == pytest.approx([1.0, 1.0], abs=1e-4)
    assert max(kls) < 1e-4


@pytest.mark.parametrize("granularity", ["action", "token"])
def test_what_is_told_of_a_round_is_told_of_its_fresh_calls_alone(model_dir: Path, granularity: str) -> None:
    """With a success joined, sampled by a policy far away, the figures and the target are those of a round without."""
    told = []
    for joined in (False, True):
        trainer = _trainer(
            model_dir, replay={"successes": 0.5}, granularity=granularity, kl_target=1.0, lr=1e-9, minibatch_actions=99
        )
        older = [
            replace(t, actions=tuple(replace(a, logprobs=tuple(x - 3.0 for x in a.logprobs or ())) for a in t.actions))
            for t in _won(_games(trainer, 8, seed=3))
        ]
        agents = trainer.update(_games(trainer, 8), older if joined else [])["agents"]
        names = ("entropy", "advantage_mean", "advantage_std", "kl_target", "ratio_mean", "ratio_max", "clipfrac")
        told.append([agents[agent][name] for agent in AGENTS for name in (*names, "factor_mean")])
    assert None not in told[0]
    assert told[1] == pytest.approx(told[0], abs=1e-5)


def test_where_no_fresh_call_was_better_the_successes_are_what_a_round_says(model_dir: Path) -> None:
    trainer = _trainer(model_dir, estimator="rloo", replay={"successes": 0.5}, kl_target=1.0)
    fresh = [replace(t, rewards=tuple(replace(r, value=0.0) for r in t.rewards)) for t in _games(trainer, 8)]
    agents = trainer.update(fresh, _won(_games(trainer, 8, seed=3)))["agents"]
    # 8 of 16 calls are better, all alike: log 2 nats a call, times 8 / (8 + 8), halved between two agents
    assert [agents[agent]["kl_target"] for agent in AGENTS] == pytest.approx([math.log(2) / 4] * 2, rel=1e-5)


def test_the_better_episodes_are_drawn_by_their_weights_and_no_more_than_their_share(model_dir: Path) -> None:
    trainer = _trainer(model_dir, replay={"successes": 0.25})
    weights = [0.0, 1.0] * 50
    drawn = trainer.draw_successes(weights, fresh=30)
    assert len(drawn) == 10
    assert len(set(drawn)) == len(drawn)
    assert all(i % 2 for i in drawn)
    assert trainer.draw_successes(weights, 30) != drawn
    assert sorted(trainer.draw_successes([0.0, 2.0, 0.0, 1.0], 30)) == [1, 3]
    assert trainer.draw_successes([0.0], 30) == trainer.draw_successes([], 30) == []
    firsts = [trainer.draw_successes([9.0] + [1.0] * 9, 30)[0] for _ in range(200)]
    assert firsts.count(0) / 200 == pytest.approx(0.5, abs=0.12)  # also where all are drawn, one of them is the first
    often = sum(0 in trainer.draw_successes([9.0] + [1.0] * 9, 3) for _ in range(200))
    assert often / 200 == pytest.approx(0.5, abs=0.12)  # one of ten is drawn; the first weighs as much as all others


def test_one_success_of_each_task_of_the_round_is_drawn_before_those_of_other_tasks(model_dir: Path) -> None:
    trainer = _trainer(model_dir, estimator="rloo", replay={"successes": 0.25}, success_groups=True)
    tasks = ["a", "a", "a", "b", "c", "c", "d"]
    weights = [1.0, 3.0, 0.0, 0.01, 9.0, 9.0, 9.0]
    drawn = [trainer.draw_successes(weights, 30, tasks=tasks, round_tasks={"a", "b", "z"}) for _ in range(200)]
    assert {frozenset(chosen[2:]) for chosen in drawn} == {frozenset({4, 5, 6})}
    assert {frozenset(chosen[:2]) for chosen in drawn} == {frozenset({0, 3}), frozenset({1, 3})}
    assert sum(1 in chosen[:2] for chosen in drawn) / 200 == pytest.approx(3 / 4, abs=0.1)  # by their weights
    few = [trainer.draw_successes(weights, 6, tasks=tasks, round_tasks={"a", "b"}) for _ in range(20)]
    assert all(len(chosen) == 2 and 3 in chosen for chosen in few)  # a quarter of eight
    ungrouped = _trainer(model_dir, estimator="rloo", replay={"successes": 0.25})
    drawn = [ungrouped.draw_successes(weights, 3, tasks=tasks, round_tasks={"a", "b"}) for _ in range(200)]
    assert sum(chosen[0] in (4, 5, 6) for chosen in drawn) / 200 == pytest.approx(27 / 31, abs=0.1)


def test_all_older_episodes_and_the_better_ones_are_not_drawn_together(model_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"set one"):
        _trainer(model_dir, replay={"share": 0.25, "successes": 0.25})


@pytest.mark.parametrize("mode", ["topr", "importance", "vtrace"])
def test_actions_without_log_probs_never_reach_an_importance_weighted_loss(model_dir: Path, mode: str) -> None:
    flagged = {"logprobs": None, "trainable": False, "untrainable_reason": NO_LOGPROBS}
    stored = [make_trajectory([make_action("actor", [1], [2], **flagged)], float(k)) for k in range(4)]
    trainer = _trainer(model_dir, offline={"mode": mode}, replay={"share": 0.5})
    before = {agent: _weights(trainer, agent) for agent in AGENTS}
    result = trainer.replay(stored)
    assert (result["used"], _moved(trainer, before)) == (0, set())
    assert result["drops"][f"action: {NO_LOGPROBS}"] == 4
    metrics = trainer.update(_games(trainer, 4), stored)
    assert metrics["replayed"] == 0
    assert metrics["drops"][f"replay: action: {NO_LOGPROBS}"] == 4
    imitating = _trainer(model_dir, offline={"mode": "filtered", "threshold": 0.5})
    assert imitating.replay(stored)["used"] == 3  # rewards 1, 2 and 3


def test_stored_episodes_of_another_lineage_are_left_out_and_counted(model_dir: Path) -> None:
    options = trainer_options(device="cpu", offline={"mode": "filtered", "threshold": 0.5})
    trainer = MarftTrainer(options, model_dir, AGENTS, 0, lineage={"base": "a", "tokenizer": "b"})
    stored = [make_trajectory([make_action("actor", [1], [2])], 1.0) for _ in range(3)]
    lineages: list[dict[str, str]] = [{"base": "a", "tokenizer": "b"}, {"base": "a", "tokenizer": "x"}, {}]
    told = [
        replace(t, episode=replace(t.episode, lineage=lineage)) for t, lineage in zip(stored, lineages, strict=True)
    ]
    result = trainer.replay(told)
    assert result["episodes"] == 2  # what is not recorded passes with `known`
    assert [count for reason, count in result["drops"].items() if "tokenizer" in reason] == [1]


# -- what else counts in the loss ------------------------------------------------------------------------------


def _entropy(trainer: MarftTrainer, action: Action) -> float:
    ids = torch.tensor([(action.prompt_ids or ()) + (action.sampled_ids or ())[:-1]])
    trainer.policies.model.use("actor")
    with torch.no_grad():
        logp = trainer.policies.model.peft(input_ids=ids).logits[0, -1].log_softmax(-1)
    return float(-(logp.exp() * logp).sum())


def test_the_entropy_bonus_spreads_the_policy(model_dir: Path) -> None:
    action = make_action("actor", [1, 2], [3])
    after = {}
    for weight in (0.0, 1.0):
        trainer = _trainer(model_dir, entropy_coef=weight, kl_stop=None, epochs=3, mismatch="none")
        before = _entropy(trainer, action)
        trainer.update([make_trajectory([action], r) for r in (0.5, 0.5)])  # equal rewards: no advantage
        after[weight] = _entropy(trainer, action) - before
    assert abs(after[0.0]) < 1e-6
    assert after[1.0] > 0.01


def test_positive_examples_are_imitated_beside_the_surrogate(model_dir: Path) -> None:
    def gain(**options: Any) -> float:
        trainer = _trainer(model_dir, kl_stop=None, epochs=3, mismatch="none", **options)
        actions = [make_action("actor", [1, 2], [3])]
        before = trainer.policies.logprobs_of("actor", actions)[0][0]
        trainer.update([make_trajectory(actions, 1.0)] * 2)
        return trainer.policies.logprobs_of("actor", actions)[0][0] - before

    assert gain() == 0.0
    assert gain(nll_coef=0.5) > 0.01
    assert gain(nll_coef=0.5, nll_threshold=1.5) == 0.0


def test_word_normalisation_divides_by_the_words_of_the_tokenizers_text(tmp_path: Path) -> None:
    model_dir = save_tiny_llama(tmp_path)
    with pytest.raises(TrainError, match="logprob_norm 'word' needs a tokenizer"):
        _trainer(model_dir, logprob_norm="word").update([make_trajectory([make_action("actor", [1], [2])], 1.0)])
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model_dir)
    norms = {}
    for norm in ("sum", "token", "word"):
        trainer = _trainer(model_dir, logprob_norm=norm, minibatch_actions=10_000, normalize="none", max_grad_norm=1e9)
        assert trainer.policies.model.word_counts([(4, 5, 6), (7,)]) == [3, 1]
        action = make_action("actor", [1], [4, 5, 6])
        exact = replace(action, logprobs=tuple(trainer.policies.logprobs_of("actor", [action])[0]))
        norms[norm] = trainer.update([make_trajectory([exact], 1.0)])["agents"]["actor"]["grad_norm"]
    assert norms["sum"] == pytest.approx(3 * norms["word"], rel=1e-4)
    assert norms["token"] == pytest.approx(norms["word"], rel=1e-4)  # every token is a word here


def test_a_mask_drops_an_action_and_says_which_share(model_dir: Path) -> None:
    trainer = _trainer(model_dir, veto=1e-3)
    games = _games(trainer, 8)
    odd = [
        replace(t, actions=tuple(replace(a, logprobs=(a.logprobs[0] + 8.0,)) for a in t.actions))  # type: ignore[index]
        for t in games[:2]
    ]
    agents = trainer.update([*odd, *games[2:]])["agents"]
    assert [agents[agent]["masked"] for agent in AGENTS] == [0.25, 0.25]
    assert trainer.update(_games(trainer, 8))["agents"]["actor"]["masked"] == 0.0


def test_masked_actions_teach_nothing(model_dir: Path) -> None:
    """The same round with two actions masked, and with the masked ones' rewards turned around, ends the same."""
    results = []
    for turned in (0.0, 5.0):
        trainer = _trainer(model_dir, veto=1e-3, normalize="none", critic={"epochs": 0})
        games = [
            make_trajectory([make_action("actor", [1, k], [3 + k], logprobs=(-3.4,))], float(k % 2)) for k in range(6)
        ]
        masked = [make_trajectory([make_action("actor", [1, 9], [3], logprobs=(6.0,))], turned)]
        trainer.update([*games, *masked])
        results.append(_weights(trainer, "actor"))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_without_a_critic_in_use_none_is_trained(model_dir: Path) -> None:
    trainer = _trainer(model_dir, estimator="rloo", offline={"mode": "filtered"})
    result = trainer.warm_up(_games(trainer))
    assert (result["episodes"], result["critic"]["explained_variance"]) == (0, None)


def test_groups_without_signal_are_skipped_and_counted(model_dir: Path) -> None:
    trainer = _trainer(model_dir, estimator="grpo", skip_flat_groups=True)
    action = make_action("actor", [1], [2])
    games = [make_trajectory([action], r, task_id=t) for t, r in (("a", 1.0), ("a", 0.0), ("b", 1.0), ("b", 1.0))]
    metrics = trainer.update(games)
    assert (metrics["episodes"], metrics["drops"]) == (2, {"group without signal": 2})
    before = {agent: _weights(trainer, agent) for agent in AGENTS}
    empty = trainer.update(games[2:])
    assert (empty["episodes"], empty["agents"], trainer.rounds) == (0, {}, 2)
    assert empty["warnings"] == ["no group of this round can say what was better, so nothing was learned"]
    assert _moved(trainer, before) == set()


@pytest.mark.parametrize(("meaning", "grows"), [("so_far", True), ("final", False)])
def test_values_of_runs_that_are_always_cut_short_grow_unless_the_reward_is_final(
    model_dir: Path, meaning: str, grows: bool
) -> None:
    trainer = _trainer(model_dir, truncated_reward=meaning, lr=1e-6)
    games = [make_trajectory([make_action("actor", [1, k], [2])], 1.0, outcome="truncated") for k in range(8)]
    for _ in range(12):
        metrics = trainer.update(games)
    values = trainer.credit._team.observe(trainer._read(games, "on_policy"), False).values
    assert (max(float(value[0]) for value in values) > 2.0) is grows
    assert any("most episodes were cut short" in warning for warning in metrics["warnings"]) is grows


# -- rewards that reach the loss -------------------------------------------------------------------------------


def _with_rewards(trajectory: Trajectory, *rewards: Reward) -> Trajectory:
    return replace(trajectory, rewards=(*trajectory.rewards, *rewards))


def test_a_private_reward_moves_its_agent_only_and_the_report_says_where_gradients_came_from(model_dir: Path) -> None:
    shaping = [{"reward": "format", "level": "agent", "weight": 0.5}]
    trainer = _trainer(model_dir, estimator="dr_mas", shaping=shaping)
    games = [
        _with_rewards(t, Reward("e", "format", float(k % 2), "test", 1, scope="agent", node="actor"))
        for k, t in enumerate(play(trainer, 8, torch.Generator().manual_seed(0), lambda _a, _b: 1.0))
    ]
    same_task = [replace(t, episode=replace(t.episode, task_id="t")) for t in games]
    before = {agent: _weights(trainer, agent) for agent in AGENTS}
    agents = trainer.update(same_task)["agents"]
    assert _moved(trainer, before) == {"actor"}
    assert agents["actor"]["gradient_share"] == {"reward": 0.0, "format": 1.0}
    assert agents["reasoner"]["gradient_share"] is None


@pytest.mark.parametrize("granularity", ["action", "token"])
def test_the_parts_of_a_gradient_add_up_to_it(
    model_dir: Path, granularity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shaping = [
        {"reward": "format", "level": "agent", "weight": 0.5},
        {"reward": "tool", "level": "step", "weight": 2.0},
        {"reward": "short", "level": "episode", "weight": -1.0},
    ]
    trainer = _trainer(
        model_dir, granularity=granularity, shaping=shaping, minibatch_actions=10_000, max_grad_norm=1e9, kl_stop=None
    )
    games = []
    for k, game in enumerate(_games(trainer, 6)):
        rewards = [Reward("e", "format", float(k % 3), "test", 1, scope="agent", node="actor")]
        rewards.append(Reward("e", "tool", float(k % 2), "test", 1, scope="step", action_id="1"))
        rewards.append(Reward("e", "short", k / 6, "test", 1))
        games.append(_with_rewards(game, *rewards))
    learner = trainer.learners["actor"]
    seen: dict[str, torch.Tensor] = {}
    original = improve.gradient_share_of

    def with_baseline(learner: AdapterLearner, prepared: Any, chosen: Sequence[int]) -> Any:
        flats: dict[str, torch.Tensor] = {}
        learner.workers.add_tensor = lambda flat: flats.setdefault(str(len(flats)), flat)  # type: ignore[method-assign]
        share = original(learner, prepared, chosen)
        seen.update(flats)
        return share

    monkeypatch.setattr(improve, "gradient_share_of", with_baseline)
    step = learner.optimizer.step

    def spy() -> None:
        seen["whole"] = torch.cat([p.grad.flatten() for p in learner.parameters if p.grad is not None])
        step()

    learner.optimizer.step = spy  # type: ignore[method-assign, assignment]
    share = trainer.update(games)["agents"]["actor"]["gradient_share"]
    assert set(share) == {"reward", "format", "tool", "short"}
    assert sum(share.values()) == pytest.approx(1.0)
    # a new critic says 0 and advantages are centred, so the four parts are all there is
    torch.testing.assert_close(sum(seen[str(k)] for k in range(4)), seen["whole"], atol=1e-5, rtol=1e-4)
