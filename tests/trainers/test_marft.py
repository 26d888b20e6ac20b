"""Owns: the trainer as a whole, on a tiny random Llama.

Log-probs equal plain transformers', the first step is REINFORCE, micro-batches change nothing, only the adapters that
should move do, adapters are plain peft folders, and two agents learn a game.
"""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.tiny_policy import AGENTS, both_low, make_action, make_trajectory, play, sample, save_tiny_llama
from support.trainer_options import trainer_options
from transformers import AutoModelForCausalLM

from trace_store.records import Action, Trajectory
from trainers.config import TrainerOptions
from trainers.errors import TrainError
from trainers.marft import MarftTrainer
from trainers.objective import update_order

LORA = {"rank": 4, "alpha": 8.0, "target_modules": ("q_proj", "v_proj", "o_proj")}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def _trainer(model_dir: Path, seed: int = 0, **options: Any) -> MarftTrainer:
    fields: dict[str, Any] = {"device": "cpu", "lr": 0.02, "lora": LORA, "engine_tolerance": 9.0} | options
    return MarftTrainer(trainer_options(**fields), model_dir, AGENTS, seed)


def _shake(trainer: MarftTrainer, agent: str, seed: int = 5) -> None:
    """Random B matrices, so that the adapter differs from the base."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trainer.policies.parameters(agent).items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def _to_double(trainer: MarftTrainer) -> None:
    trainer.policies.model.peft.double()
    trainer.policies.note_frozen()


def _weights(trainer: MarftTrainer, agent: str) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.policies.parameters(agent).items()}


def _ragged_actions(agent: str) -> list[Action]:
    """Prompts and completions of several lengths, at two temperatures."""
    shapes = [(3, 2, 1.0), (9, 5, 0.7), (1, 1, 1.0), (6, 7, 0.7), (9, 1, 1.0)]
    actions = []
    for k, (prompt, sampled, temperature) in enumerate(shapes):
        ids = [(7 * k + 3 * i) % 32 for i in range(prompt + sampled)]
        actions.append(make_action(agent, ids[:prompt], ids[prompt:], temperature=temperature))
    return actions


def _plain_logprobs(model: Any, action: Action) -> torch.Tensor:
    """Full logits, one sequence at a time, no padding: the independent implementation."""
    assert action.prompt_ids is not None
    assert action.sampled_ids is not None
    ids = torch.tensor([action.prompt_ids + action.sampled_ids])
    logp = (model(input_ids=ids).logits[0] / action.temperature).log_softmax(-1)
    start = len(action.prompt_ids)
    return logp[torch.arange(start - 1, ids.shape[1] - 1), ids[0, start:]]


def test_logprobs_equal_a_full_softmax_of_plain_transformers_through_a_saved_adapter(
    model_dir: Path, tmp_path: Path
) -> None:
    trainer = _trainer(model_dir, tokens_per_microbatch=64)
    _shake(trainer, "actor")
    trainer.policies.save_adapter("actor", tmp_path / "actor@1")
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), tmp_path / "actor@1").eval()
    actions = _ragged_actions("actor")
    ours = trainer.policies.logprobs_of("actor", actions)
    base = trainer.policies.logprobs_of("reasoner", actions)  # its B is still zero
    untrained = AutoModelForCausalLM.from_pretrained(model_dir)
    for action, our_logp, base_logp in zip(actions, ours, base, strict=True):
        torch.testing.assert_close(torch.tensor(our_logp), _plain_logprobs(plain, action), atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(base_logp), _plain_logprobs(untrained, action), atol=1e-5, rtol=0)
        assert max(abs(a - b) for a, b in zip(our_logp, base_logp, strict=True)) > 1e-3


def test_the_reference_is_the_base_model_whatever_the_adapters_hold(model_dir: Path) -> None:
    trainer = _trainer(model_dir)
    before = trainer.policies.logprobs_of("actor", _ragged_actions("actor"))
    _shake(trainer, "actor")
    items = [replace(item, agent="actor") for item in _items(trainer, "actor")]
    reference = trainer.learners["actor"].logprobs(items, reference=True)
    for expected, got in zip(before, reference, strict=True):
        torch.testing.assert_close(got, torch.tensor(expected))


def _items(trainer: MarftTrainer, agent: str) -> list[Any]:
    from trainers.batch import trajectories_to_round

    trajectories = [make_trajectory([action], 0.0) for action in _ragged_actions(agent)]
    return list(trajectories_to_round(trajectories, AGENTS, "reward", dict.fromkeys(AGENTS, 32), "on_policy").items)


class _GradientSpy:
    """Records the gradient that reaches an optimiser, and lets it step; `undo` puts the adapter back."""

    def __init__(self, trainer: MarftTrainer, agent: str) -> None:
        self.parameters = trainer.policies.parameters(agent)
        self.before = _weights(trainer, agent)
        self.seen: list[dict[str, torch.Tensor]] = []
        self.step = trainer.learners[agent].optimizer.step
        trainer.learners[agent].optimizer.step = self  # type: ignore[method-assign, assignment]

    def __call__(self) -> None:
        self.seen.append({name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None})
        self.step()

    def undo(self) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.before[name])


def _one_agent_round(trainer: MarftTrainer) -> tuple[list[Trajectory], list[float]]:
    """The actor's own actions, with its own log-probs as the engine's, and one reward per episode."""
    actions = _ragged_actions("actor")
    behaviour = trainer.policies.logprobs_of("actor", actions)
    rewards = [0.3, -1.0, 0.5, 2.0, 0.1]
    exact = [replace(a, logprobs=tuple(logp)) for a, logp in zip(actions, behaviour, strict=True)]
    return [make_trajectory([a], r) for a, r in zip(exact, rewards, strict=True)], rewards


@pytest.mark.parametrize("norm", ["sum", "token"])
def test_on_policy_the_first_step_is_reinforce_with_plain_transformers(model_dir: Path, norm: str) -> None:
    trainer = _trainer(model_dir, minibatch_actions=10_000, normalize="none", logprob_norm=norm, max_grad_norm=1e9)
    _shake(trainer, "actor")
    trajectories, rewards = _one_agent_round(trainer)
    spy = _GradientSpy(trainer, "actor")
    trainer.update(trajectories)  # the critic is new, V = 0, so A = R
    spy.undo()
    parameters = trainer.policies.parameters("actor")
    trainer.policies.model.use("actor")
    loss = torch.zeros(())
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        logp_T = _plain_logprobs(trainer.policies.model.peft, trajectory.actions[0])
        loss = loss - reward * (logp_T.sum() if norm == "sum" else logp_T.mean()) / len(rewards)
    expected = torch.autograd.grad(loss, list(parameters.values()))
    (gradient,) = spy.seen
    for name, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(gradient[name], value, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"kl_coef": 0.5}, {"logprob_norm": "sum", "mismatch": "mask"}])
def test_micro_batches_change_no_gradient(model_dir: Path, options: dict[str, Any]) -> None:
    gradients = []
    for budget in (64, 100_000):
        trainer = _trainer(
            model_dir, minibatch_actions=1000, tokens_per_microbatch=budget, max_grad_norm=1e9, **options
        )
        _to_double(trainer)  # so that the order of sums does not show
        _shake(trainer, "actor")
        trajectories, _ = _one_agent_round(trainer)
        spy = _GradientSpy(trainer, "actor")
        trainer.update(trajectories * 3)
        gradients.append(spy.seen[0])
    assert max(float(g.abs().max()) for g in gradients[0].values()) > 1e-3
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, atol=1e-6, rtol=0)


def test_only_the_agent_that_acted_moves_and_the_base_never_does(model_dir: Path) -> None:
    trainer = _trainer(model_dir)
    base = {n: p.detach().clone() for n, p in trainer.policies.model.peft.named_parameters() if "lora_" not in n}
    reasoner, actor = _weights(trainer, "reasoner"), _weights(trainer, "actor")
    trajectories, _ = _one_agent_round(trainer)
    metrics = trainer.update(trajectories)["agents"]
    assert all(torch.equal(p, reasoner[n]) for n, p in trainer.policies.parameters("reasoner").items())
    assert any(not torch.equal(p, actor[n]) for n, p in trainer.policies.parameters("actor").items())
    assert all(torch.equal(p, base[n]) for n, p in trainer.policies.model.peft.named_parameters() if "lora_" not in n)
    assert (metrics["reasoner"]["actions"], metrics["reasoner"]["adapter_moved"]) == (0, 0.0)
    assert metrics["reasoner"]["approx_kl"] is None
    assert metrics["actor"]["adapter_moved"] > 0


def test_the_adapter_norm_is_that_of_the_full_weight_update(model_dir: Path) -> None:
    trainer = _trainer(model_dir)
    assert trainer.policies.adapter_norm("actor") == 0.0
    _shake(trainer, "actor")
    parameters = trainer.policies.parameters("actor")
    squares = [
        float((2.0 * parameters[name.replace("lora_A", "lora_B")] @ a).detach().square().sum())  # alpha / rank = 2
        for name, a in parameters.items()
        if "lora_A" in name
    ]
    assert trainer.policies.adapter_norm("actor") == pytest.approx(sum(squares) ** 0.5, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_agents_learn_a_game(model_dir: Path, seed: int) -> None:
    trainer = _trainer(model_dir, seed)
    generator = torch.Generator().manual_seed(seed)
    rewards = []
    for _ in range(10):
        trajectories = play(trainer, 48, generator, both_low)
        rewards.append(sum(t.team_reward("reward") or 0.0 for t in trajectories) / len(trajectories))
        trainer.update(trajectories)
    assert rewards[0] < 0.45
    assert sum(rewards[-2:]) / 2 > 0.7


def test_equal_rewards_teach_nothing(model_dir: Path) -> None:
    trainer = _trainer(model_dir, estimator="grpo")
    before = {agent: _weights(trainer, agent) for agent in AGENTS}
    trajectories = play(trainer, 8, torch.Generator().manual_seed(0), lambda _a, _b: 1.0)
    result = trainer.update(trajectories)
    for agent in AGENTS:
        assert all(torch.equal(p, before[agent][n]) for n, p in trainer.policies.parameters(agent).items())
        assert (result["agents"][agent]["steps"], result["agents"][agent]["grad_norm"]) == (0, 0.0)
    assert (result["critic"]["value_loss"], result["critic"]["explained_variance"]) == (None, None)
    assert result["critic"]["flat_groups"] == 1.0
    assert result["warnings"] == [
        f"adapter {agent!r} took no step: it had no gradient, since its advantages were all 0 (its runs earned "
        "the same, or nearly so beside earlier rounds), or below 0 where train.trainer.objective.negative_weight is 0"
        for agent in AGENTS
    ]


@pytest.mark.parametrize("estimator", ["gae", "grpo", "rloo", "rae"])
@pytest.mark.parametrize("granularity", ["action", "token"])
def test_a_round_in_which_all_earn_the_same_moves_nothing_whatever_moved_before(
    model_dir: Path, estimator: str, granularity: str
) -> None:
    """Neither along AdamW's moments nor along what the critic got wrong."""
    trainer = _trainer(model_dir, estimator=estimator, granularity=granularity)
    signal = play(trainer, 8, torch.Generator().manual_seed(0), both_low)
    assert all(figures["adapter_moved"] > 0 for figures in trainer.update(signal)["agents"].values())
    solved = play(trainer, 8, torch.Generator().manual_seed(1), lambda _a, _b: 1.0)
    for agent, figures in trainer.update(solved)["agents"].items():
        assert figures["adapter_moved"] == 0, agent


def test_a_team_whose_runs_were_cut_short_learns_from_its_critic_though_all_earned_the_same(model_dir: Path) -> None:
    trainer = _trainer(model_dir, estimator="gae")
    trainer.update(play(trainer, 8, torch.Generator().manual_seed(0), both_low))
    cut = [
        replace(t, episode=replace(t.episode, outcome="truncated", reason="test"))
        for t in play(trainer, 8, torch.Generator().manual_seed(1), lambda _a, _b: 0.0)
    ]
    assert all(figures["adapter_moved"] > 0 for figures in trainer.update(cut)["agents"].values())


def test_the_later_agent_is_weighted_by_the_clipped_ratio_of_the_earlier_one(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(model_dir, kl_stop=None, lr=0.3, minibatch_actions=8)
    trajectories = play(trainer, 16, torch.Generator().manual_seed(0), both_low)
    firsts = [t.actions[0] for t in trajectories]
    old = torch.tensor(trainer.policies.logprobs_of("reasoner", firsts)).squeeze(1)
    seen: dict[str, torch.Tensor] = {}
    original = update_order.improve

    def spy(learner: Any, data: Any, *rest: Any, **named: Any) -> Any:
        seen[learner.adapter] = data.factor_A.clone()
        return original(learner, data, *rest, **named)

    monkeypatch.setattr(update_order, "improve", spy)
    result = trainer.update(trajectories)
    ratio = (torch.tensor(trainer.policies.logprobs_of("reasoner", firsts)).squeeze(1) - old).exp()
    assert result["order"] == ["reasoner", "actor"]
    torch.testing.assert_close(seen["reasoner"], torch.ones(16))
    torch.testing.assert_close(seen["actor"], ratio.clamp(0.8, 1.28), atol=1e-4, rtol=0)
    assert len(set(seen["actor"].tolist())) > 2


def test_the_order_of_a_sequential_update_follows_the_dependencies_or_their_reverse(model_dir: Path) -> None:
    for order, expected in (("topological", ["actor", "reasoner"]), ("reverse", ["reasoner", "actor"])):
        trainer = _trainer(model_dir, agent_order=order)
        flipped = make_trajectory([make_action("actor", [1], [2]), make_action("reasoner", [3], [4])], 1.0)
        assert trainer.update([flipped])["order"] == expected


@pytest.mark.parametrize("budget", [64, 4096])
def test_kl_stop_ends_the_agents_update_whatever_the_micro_batches(model_dir: Path, budget: int) -> None:
    trainer = _trainer(model_dir, lr=0.5, kl_stop=1e-4, epochs=3, minibatch_actions=10, tokens_per_microbatch=budget)
    trajectories, _ = _one_agent_round(trainer)
    metrics = trainer.update(trajectories * 4)["agents"]["actor"]
    assert metrics["stopped_early"]
    assert metrics["steps"] == 1  # the first minibatch is on-policy, the second far from it


def test_engine_mismatch_is_measured_per_token(model_dir: Path) -> None:
    trainer = _trainer(model_dir)
    trajectories, _ = _one_agent_round(trainer)
    off = [
        make_trajectory([replace(t.actions[0], logprobs=tuple(x - 0.5 for x in t.actions[0].logprobs or ()))], 1.0)
        for t in trajectories
    ]
    metrics = trainer.update(off)["agents"]["actor"]
    assert metrics["engine_logprob_gap"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["engine_ratio_mean"] == pytest.approx(1.64872, abs=1e-4)
    assert metrics["tokens"] == 16


def test_warm_up_teaches_the_critic_which_tasks_are_easy(model_dir: Path) -> None:
    trainer = _trainer(model_dir)
    generator = torch.Generator().manual_seed(1)
    stored = play(trainer, 60, generator, lambda first, _: float(first.prompt_ids[1] < 6))  # type: ignore[index]
    result = trainer.warm_up([*stored, make_trajectory([make_action("actor", [1], [2])], 0.0, outcome="truncated")])
    assert result["critic"]["explained_variance"] > 0.5
    assert result["drops"] == {"episode truncated, its return unknown": 1}
    assert (result["episodes"], result["actions"]) == (60, 120)
    # the next round's values, before the critic sees it, explain its rewards too
    fresh = play(trainer, 24, generator, lambda first, _: float(first.prompt_ids[1] < 6))  # type: ignore[index]
    assert trainer.update(fresh)["critic"]["explained_variance"] > 0.5


def _mean_logprob(trainer: MarftTrainer, actions: list[Action]) -> float:
    return sum(sum(logp) for logp in trainer.policies.logprobs_of("actor", actions)) / len(actions)


@pytest.mark.parametrize("mode", ["filtered", "awr"])
def test_replay_makes_good_actions_likelier_than_bad_ones(model_dir: Path, mode: str) -> None:
    trainer = _trainer(
        model_dir, offline={"mode": mode, "epochs": 10} | ({"threshold": 0.5} if mode == "filtered" else {})
    )
    good = [make_action("actor", [2, 4 + k], [8]) for k in range(4)]
    bad = [make_action("actor", [2, 4 + k], [9]) for k in range(4)]
    stored = [make_trajectory([a], 1.0) for a in good] + [make_trajectory([a], 0.0) for a in bad]
    before = _mean_logprob(trainer, good) - _mean_logprob(trainer, bad)
    result = trainer.replay(stored)
    assert _mean_logprob(trainer, good) - _mean_logprob(trainer, bad) > before + 0.5
    expected = {"filtered": (4, {"episode below offline.threshold": 4}), "awr": (8, {})}
    assert (result["used"], result["drops"]) == expected[mode]
    if mode == "awr":  # V = 0, so weights are exp(1 / 0.3), capped at 10, and exp(0)
        assert result["agents"]["actor"]["coefficient_mean"] == pytest.approx(5.5)
        assert result["agents"]["actor"]["effective_sample_size"] == pytest.approx(44**2 / (8 * 404))


def test_replay_switched_off_changes_nothing(model_dir: Path) -> None:
    trainer = _trainer(model_dir, offline={"mode": "off"})
    before = _weights(trainer, "actor")
    result = trainer.replay([make_trajectory([make_action("actor", [1], [2])], 1.0)])
    assert (result["used"], trainer.policies.adapter_norm("actor")) == (0, 0.0)
    assert all(torch.equal(p, before[n]) for n, p in trainer.policies.parameters("actor").items())


def test_a_round_without_anything_to_train_on_says_why(model_dir: Path) -> None:
    action = make_action("actor", [1], [2])
    with pytest.raises(TrainError, match="2 x episode failed"):
        _trainer(model_dir).update([make_trajectory([action], 1.0, outcome="failed")] * 2)


def test_equal_seeds_give_equal_adapters_and_the_global_generator_is_left_alone(model_dir: Path) -> None:
    state = torch.get_rng_state()
    results = []
    for seed in (3, 3, 4):
        trainer = _trainer(model_dir, seed)
        trainer.update(play(trainer, 8, torch.Generator().manual_seed(0), both_low))
        results.append(_weights(trainer, "reasoner"))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert any(not torch.equal(results[0][name], results[2][name]) for name in results[0])


def test_an_adapter_folder_is_plain_peft_and_comes_back_bit_for_bit(model_dir: Path, tmp_path: Path) -> None:
    trainer = _trainer(model_dir)
    _shake(trainer, "actor")
    folder = tmp_path / "adapters" / "actor@1"
    trainer.policies.save_adapter("actor", folder)
    trainer.policies.save_adapter("actor", folder)  # publishing again replaces it whole
    assert sorted(p.name for p in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert [p.name for p in folder.parent.iterdir()] == ["actor@1"]
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o600}
    config = json.loads((folder / "adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]) == model_dir.resolve()
    assert (config["task_type"], config["r"], config["lora_alpha"]) == ("CAUSAL_LM", 4, 8)
    other = _trainer(model_dir, seed=9)
    other.policies.load_adapter("reasoner", folder)
    for name, parameter in other.policies.parameters("reasoner").items():
        assert torch.equal(parameter, trainer.policies.parameters("actor")[name])


def test_an_adapter_for_something_else_is_refused_and_changes_nothing(model_dir: Path, tmp_path: Path) -> None:
    trainer = _trainer(model_dir)
    before = _weights(trainer, "actor")
    other_base = save_tiny_llama(tmp_path / "other", seed=1)
    makers = {
        "another base model": _trainer(other_base),
        "has r = 2": _trainer(model_dir, lora=LORA | {"rank": 2}),
        "lora_alpha": _trainer(model_dir, lora=LORA | {"alpha": 9.0}),
        "other modules": _trainer(model_dir, lora=LORA | {"target_modules": ("q_proj",)}),
    }
    for message, maker in makers.items():
        _shake(maker, "actor")
        maker.policies.save_adapter("actor", tmp_path / "adapter")
        with pytest.raises(TrainError, match=message):
            trainer.policies.load_adapter("actor", tmp_path / "adapter")
    with pytest.raises(TrainError, match="is not a LoRA adapter"):
        trainer.policies.load_adapter("actor", tmp_path / "nowhere")
    assert all(torch.equal(p, before[n]) for n, p in trainer.policies.parameters("actor").items())


def test_a_user_error_is_one_line(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    cases = [
        lambda: _trainer(tmp_path),
        lambda: _trainer(tmp_path / "broken"),
        lambda: _trainer(model_dir, lora={"target_modules": ("q_proj", "query_key_value")}),
        lambda: _trainer(model_dir, lora={"target_modules": ("lm_head",)}),
        lambda: MarftTrainer(trainer_options(device="cpu"), model_dir, ["a", "a"], 0),
        lambda: _trainer(model_dir).policies.logprobs_of("nobody", []),
        lambda: _trainer(model_dir).policies.logprobs_of("actor", [make_action("actor", [1], [2], sampled_ids=None)]),
    ]
    for case in cases:
        with pytest.raises(TrainError) as caught:
            case()
        assert "\n" not in str(caught.value)


def test_progress_counts_every_phase_to_its_end(model_dir: Path) -> None:
    trainer = _trainer(model_dir)
    last: dict[str, tuple[int, int]] = {}
    trainer.progress = lambda phase, done, total: last.update({phase: (done, total)})
    trainer.update(play(trainer, 6, torch.Generator().manual_seed(0), both_low))
    assert {"old log-probs actor", "features", "update reasoner", "new log-probs reasoner"} <= set(last)
    assert all(done == total for done, total in last.values())


def test_the_package_and_its_options_import_without_torch() -> None:
    code = "import sys, trainers, trainers.config; trainers.TrainerOptions(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_sampling_with_the_trainers_own_policy_gives_the_log_probs_that_it_recomputes(model_dir: Path) -> None:
    trainer = _trainer(model_dir)
    _shake(trainer, "actor")
    action = sample(trainer, "actor", [1, 2, 3], 6, torch.Generator().manual_seed(0))
    assert action.logprobs is not None
    assert trainer.policies.logprobs_of("actor", [action])[0] == pytest.approx(list(action.logprobs), abs=1e-5)


@pytest.mark.parametrize("wrong", AGENTS)
def test_the_engines_log_probs_are_checked_for_each_agent_of_an_adapter(model_dir: Path, wrong: str) -> None:
    """Of 128 calls that alternate between two agents, one agent's are told 1 nat a token too low."""
    together = {agent: {"adapter": "team"} for agent in AGENTS}
    trainer = _trainer(model_dir, agents=together, proximal="engine", mismatch="none", estimator="rae")
    games = play(trainer, 64, torch.Generator().manual_seed(1), both_low)
    told = [
        replace(
            game,
            actions=tuple(
                replace(a, logprobs=tuple(x - float(a.node == wrong) for x in a.logprobs or ())) for a in game.actions
            ),
        )
        for game in games
    ]
    with pytest.raises(TrainError, match=f"log-probs of '{wrong}' differ from the trainer's by 1.000 nats"):
        trainer.update(told)


def test_the_engines_log_probs_as_old_ones_give_the_same_update_and_are_checked(tmp_path: Path) -> None:
    model_dir = save_tiny_llama(tmp_path)
    sampler = MarftTrainer(TrainerOptions(), model_dir, AGENTS, seed=0)

    def episode(number: int, error: float) -> Trajectory:
        actions = [make_action(agent, [1, 2, number], [3, 4 + number]) for agent in AGENTS]
        exact = [tuple(sampler.policies.logprobs_of(a.node, [a])[0]) for a in actions]
        told = [replace(a, logprobs=tuple(x + error for x in row)) for a, row in zip(actions, exact, strict=True)]
        return make_trajectory(told, float(number % 2))

    def updated(proximal: str, error: float) -> dict[str, dict[str, torch.nn.Parameter]]:
        options = trainer_options(proximal=proximal, mismatch="none", minibatch_actions=4)
        trainer = MarftTrainer(options, model_dir, AGENTS, seed=0)
        trainer.update([episode(number, error) for number in range(8)])
        return {agent: trainer.policies.parameters(agent) for agent in AGENTS}

    ours, engines = updated("recomputed", 0.0), updated("engine", 0.0)
    for agent in AGENTS:
        for name, weight in ours[agent].items():
            torch.testing.assert_close(weight, engines[agent][name], atol=1e-6, rtol=1e-4)
    with pytest.raises(TrainError, match=r"differ from the trainer's by 0\.030 nats a token, more than 0\.01: serve"):
        updated("engine", -0.03)
    with pytest.raises(TrainError, match=r"by 0\.600 nats a token, more than 0\.5: check which model, adapter"):
        updated("recomputed", -0.6)
    with pytest.raises(ValueError, match=r"set importance\.mismatch to 'none'"):
        trainer_options(proximal="engine")
