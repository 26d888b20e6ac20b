"""Owns: examples/marft_loop.py as the oracle of the trainer, and as a page that runs.

- On a fixed batch (chain, loop, branches with and without a join, roots apart; several temperatures, lengths and
  outcomes; behaviours that differ from the trainer's log-probs) the page and `MarftTrainer.update` have the same old
  log-probs, advantages, losses, gradients and weights, at every optimiser step of both adapters, and the same critic.
- The page shares no code with the trainer, is one page, and learns its game without a network.
"""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import AGENTS, make_action, make_trajectory, save_tiny_llama
from support.trainer_options import trainer_options
from transformers import LlamaForCausalLM

from examples import marft_loop as page
from trace_store.records import Trajectory
from trainers.marft import MarftTrainer
from trainers.objective import update_order

PAGE = Path(page.__file__)
LORA = {"rank": 4, "alpha": 8.0, "target_modules": ("q_proj", "v_proj", "o_proj")}
SEED = 3
NEVER = 1e9  # a bound that never binds
R, A = AGENTS

# Agents in order, edges as recorded, D by hand (direct dependencies only), reward, outcome.
SHAPES: list[tuple[tuple[str, ...], list[tuple[int, int]], list[tuple[int, ...]], float, str]] = [
    ((R, A), [(0, 1)], [(), (0,)], 1.0, "terminated"),  # a chain
    # a loop of two turns, in which each sees all that was said before
    ((R, A, R, A), [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)], [(), (0,), (1,), (2,)], 0.3, "truncated"),
    # two branches and a join, which also saw the start
    ((R, A, A, R), [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3)], [(), (0,), (0,), (1, 2)], -0.5, "terminated"),
    ((R, A, A, R), [(0, 1), (0, 2), (0, 3)], [(), (0,), (0,), (0,)], 0.8, "truncated"),  # three ends, all cut
    ((R, A, A, A), [(0, 1), (1, 2), (0, 3)], [(), (0,), (1,), (0,)], 0.1, "terminated"),  # branches of two lengths
    ((A,), [], [()], 2.0, "truncated"),  # the reasoner never acts
    ((R, A), [], [(), ()], -1.0, "terminated"),  # side by side
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def _batch(team: page.Team) -> tuple[list[page.Episode], list[Trajectory]]:
    """The fixed batch twice: as the page takes it, and as the store would give it to the trainer.

    Behaviours are multiples of 1/1024, which float32 (in which the trainer keeps them) holds exactly. They lie around
    the policy's own log-probs, some so far below that the cap of the importance weight binds.
    """
    generator = torch.Generator().manual_seed(0)
    episodes, trajectories = [], []
    for agents, edges, after, reward, outcome in SHAPES:
        actions = []
        for agent, parents in zip(agents, after, strict=True):
            prompt, sampled = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 9), (1, 5)))
            ids = torch.randint(0, 32, (prompt + sampled,), generator=generator).tolist()
            temperature = (1.0, 0.75, 1.25)[len(ids) % 3]
            action = page.Action(agent, ids[:prompt], ids[prompt:], [0.0] * sampled, temperature, parents)
            with torch.no_grad():
                (own,) = page.token_logprobs(team.model, agent, [action])
            noise = 0.45 * torch.randn(sampled, generator=generator)
            actions.append(action._replace(behaviour=(((own + noise) * 1024).round() / 1024).tolist()))
        episodes.append(page.Episode(actions, reward, truncated=outcome == "truncated"))
        records = [
            make_action(a.agent, a.prompt, a.sampled, logprobs=tuple(a.behaviour), temperature=a.temperature)
            for a in actions
        ]
        trajectories.append(make_trajectory(records, reward, edges, outcome=outcome))  # type: ignore[arg-type]
    return episodes, trajectories


def _twins(model_dir: Path, rate: float, **options: Any) -> tuple[MarftTrainer, page.Team]:
    """A trainer and a page's team with the same base model, the same random adapters and the same random critic."""
    fields: dict[str, Any] = {"device": "cpu", "lr": rate, "lora": LORA, "tokens_per_microbatch": 64} | options
    trainer = MarftTrainer(trainer_options(**fields), model_dir, AGENTS, SEED)
    trainer.policies.model.peft.double()
    trainer.policies._fingerprints = trainer.policies._fingerprint()
    team = page.Team(LlamaForCausalLM.from_pretrained(model_dir), list(AGENTS))
    team.model.double()
    team.critic.double()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for agent in AGENTS:
            team.optimizers[agent].param_groups[0]["lr"] = rate
            theirs = _adapter_of(team, agent)
            assert sorted(theirs) == sorted(trainer.policies.parameters(agent))
            for name, weight in trainer.policies.parameters(agent).items():
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.15)
                theirs[name].copy_(weight)
        _same_critic(trainer, team, generator)
    return trainer, team


def _same_critic(trainer: MarftTrainer, team: page.Team, generator: torch.Generator) -> None:
    """Random weights and statistics: V differs between observations by about as much as the rewards do."""
    critic = trainer.credit.critics["shared/0"]
    width = trainer.policies.model.width
    critic.statistics = {
        "mean": 0.3 * torch.randn(width, generator=generator),
        "scale": 0.5 + torch.rand(width, generator=generator),
    }
    for name, weight in critic.parameters.items():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
        _critic_of(team)[name].copy_(weight)
    nothing = torch.zeros(len(AGENTS))  # the trainer takes the one-hot as it is
    team.critic.mean = torch.cat([critic.statistics["mean"], nothing]).double()
    team.critic.scale = torch.cat([critic.statistics["scale"], nothing + 1]).double()


def _adapter_of(team: page.Team, agent: str) -> dict[str, torch.Tensor]:
    marker = f".{agent}."
    return {n.replace(marker, "."): p for n, p in team.model.named_parameters() if marker in n}


def _critic_of(team: page.Team) -> dict[str, torch.Tensor]:
    return {name.replace(".", "_"): weight for name, weight in team.critic.named_parameters()}


class _Book:
    """What reached each optimiser: the losses since the step before, summed, and the gradients; then it steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: dict[str, list[tuple[float, dict[str, torch.Tensor]]]] = {}
        self.loss = 0.0
        original = torch.Tensor.backward

        def backward(loss: torch.Tensor, *rest: Any, **named: Any) -> None:
            self.loss += float(loss.detach())
            original(loss, *rest, **named)

        monkeypatch.setattr(torch.Tensor, "backward", backward)

    def keep(self, who: str, optimizer: Any, parameters: dict[str, torch.Tensor]) -> None:
        original, self.steps[who] = optimizer.step, []

        def step() -> None:
            gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
            self.steps[who].append((self.loss, gradients))
            self.loss = 0.0
            original()

        optimizer.step = step


def _seen_by(improve: Any, kept: dict[str, Any], read: Any) -> Any:
    def spy(*arguments: Any, **named: Any) -> Any:
        agent, seen = read(*arguments)
        kept[agent] = seen
        return improve(*arguments, **named)

    return spy


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference, relative to the norm of theirs."""
    assert ours.shape == theirs.shape
    assert float(theirs.norm()) > 0
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().flatten().double() for t in tensors])


class _Round:
    """One round by trainer and page on the fixed batch, and what was seen on the way. `page_only`: other settings."""

    def __init__(
        self,
        model_dir: Path,
        monkeypatch: pytest.MonkeyPatch,
        page_only: dict[str, Any] | None = None,
        rate: float = 5e-4,
        **options: Any,
    ) -> None:
        self.trainer, self.team = _twins(model_dir, rate, **({"kl_stop": None} | options))
        settings = page.Settings(**({"kl_stop": NEVER} | options | (page_only or {})))
        episodes, trajectories = _batch(self.team)

        self.theirs, self.inputs = _Book(monkeypatch), {}
        for agent, learner in self.trainer.learners.items():
            self.theirs.keep(agent, learner.optimizer, self.trainer.policies.parameters(agent))
        seen = _seen_by(update_order.improve, self.inputs, lambda learner, data, *_: (learner.adapter, data))
        monkeypatch.setattr(update_order, "improve", seen)
        critic = self.trainer.credit.critics["shared/0"]
        monkeypatch.setattr(type(critic), "_find_unit", lambda *_: None)  # the page's learns in units of reward
        self.theirs.keep("critic", critic.optimizer, critic.parameters)
        self.result = self.trainer.update(trajectories)

        self.ours, self.samples = _Book(monkeypatch), {}
        for agent, optimizer in self.team.optimizers.items():
            self.ours.keep(agent, optimizer, _adapter_of(self.team, agent))
        self.ours.keep("critic", self.team.critic_optimizer, _critic_of(self.team))
        seen = _seen_by(page.improve, self.samples, lambda _, agent, samples, *__: (agent, samples))
        with monkeypatch.context() as patch:
            patch.setattr(page, "improve", seen)
            page.update(self.team, episodes, settings, torch.Generator().manual_seed(SEED))

    def errors(self, agent: str) -> list[float]:
        """Of each optimiser step: how far apart the two gradients are, relative to the trainer's."""
        pairs = zip(self.ours.steps[agent], self.theirs.steps[agent], strict=True)
        return [_error(_flat(ours.values()), _flat(theirs[n] for n in ours)) for (_, ours), (_, theirs) in pairs]


ACTION = {"granularity": "action", "gamma": 0.9, "gae_lambda": 0.8}
TOKEN = {"granularity": "token", "gamma": 0.9, "gae_lambda": 0.8, "gamma_token": 0.95, "token_lambda": 0.85}
KINDS = [ACTION | {"logprob_norm": "sum"}, ACTION | {"logprob_norm": "token"}, TOKEN]
KINDS_IDS = ["MARFT-A sum", "MARFT-A token", "MARFT-T"]


@pytest.mark.parametrize("kind", KINDS, ids=KINDS_IDS)
def test_the_first_step_of_each_adapter_has_the_pages_loss_and_gradient(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    both = _Round(
        model_dir, monkeypatch, rate=2e-3, minibatch_actions=10_000, max_grad_norm=NEVER, mismatch_cap=1.5, **kind
    )
    assert both.result["order"] == list(AGENTS)
    assert both.result["drops"] == {}
    for agent in AGENTS:
        theirs, samples = both.inputs[agent], both.samples[agent]
        assert _error(_flat(old for _, old, _, _ in samples), _flat(theirs.old_T)) < 1e-9
        assert _error(_flat(advantage for _, _, advantage, _ in samples), _flat(theirs.advantage_U)) < 1e-6
        ((our_loss, ours),), ((their_loss, their),) = both.ours.steps[agent], both.theirs.steps[agent]
        assert our_loss == pytest.approx(their_loss, rel=1e-6)
        assert all(_error(gradient, their[name]) < 1e-6 for name, gradient in ours.items())
        assert len(ours) == len(their) == 12  # A and B of three modules of two layers
    # the reasoner has really stepped: what weighs the actor's episodes is clipped on both sides, and in between
    factors = sorted(both.inputs[A].factor_A.tolist())
    assert factors[0] == pytest.approx(0.8)
    assert factors[-1] == pytest.approx(1.28)
    assert any(0.81 < factor < 0.99 or 1.01 < factor < 1.27 for factor in factors)


@pytest.mark.parametrize(("kind", "rate"), list(zip(KINDS, [5e-4, 1e-3, 1e-3], strict=True)), ids=KINDS_IDS)
def test_the_whole_round_is_the_pages_with_clips_minibatches_and_epochs(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any], rate: float
) -> None:
    both = _Round(model_dir, monkeypatch, rate=rate, minibatch_actions=3, epochs=2, max_grad_norm=0.3, **kind)
    for agent in AGENTS:
        metrics = both.result["agents"][agent]
        assert 0 < metrics["clipfrac"] < 1
        assert metrics["grad_norm"] > 0.3  # so the gradient was scaled down to it
        assert metrics["steps"] == len(both.errors(agent)) == {R: 6, A: 8}[agent]  # of 9 and 12 actions
        assert max(both.errors(agent)) < 2e-6
        trained = both.trainer.policies.parameters(agent)
        ours = _adapter_of(both.team, agent)
        assert _error(_flat(ours[name] for name in trained), _flat(trained.values())) < 1e-6
    # the critic is float32 in the trainer, and has seen few enough observations for one batch per epoch
    critic = both.trainer.credit.critics["shared/0"].parameters
    fitted = _critic_of(both.team)
    assert len(both.errors("critic")) == 8
    assert both.errors("critic")[0] < 2e-6
    assert _error(_flat(fitted[name] for name in critic), _flat(critic.values())) < 2e-6


def test_the_kl_stop_ends_both_at_the_same_step(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = _Round(model_dir, monkeypatch, rate=1e-3, kl_stop=2e-3, minibatch_actions=4, epochs=2, **ACTION)
    for agent in AGENTS:
        assert both.result["agents"][agent]["stopped_early"]
        assert 1 <= len(both.errors(agent)) < 6
        assert max(both.errors(agent)) < 2e-6


OTHERWISE = {
    "granularity": "action",
    "logprob_norm": "sum",
    "gamma": 0.95,
    "gae_lambda": 0.9,
    "gamma_token": 1.0,
    "token_lambda": 0.9,
    "clip_low": 0.1,
    "clip_high": 0.35,
    "mismatch_cap": 1.4,
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_page_with_another_setting_disagrees(model_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    both = _Round(model_dir, monkeypatch, {name: OTHERWISE[name]}, minibatch_actions=6, epochs=2, **TOKEN)
    assert max(both.errors(A)) > 1e-3


def test_the_page_is_one_page_and_shares_no_code_with_the_trainer() -> None:
    source = PAGE.read_text()
    assert len(source.splitlines()) < 250
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported == {"__future__", "argparse", "typing", "torch", "peft", "transformers"}


NO_NETWORK = """
import runpy, socket, sys
def refuse(*_): raise OSError("this page needs no network")
socket.socket.connect = socket.getaddrinfo = refuse
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["action", "token"])
def test_the_page_runs_without_a_network_and_learns(granularity: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", NO_NETWORK, str(PAGE), "--granularity", granularity],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rewards = [float(value) for value in re.findall(r"reward ([0-9.]+)", done.stdout)]
    assert len(rewards) == 20
    assert sum(rewards[:2]) / 2 < 0.65  # guessing earns 0.5
    assert sum(rewards[-3:]) / 3 > 0.9
    assert after.ru_utime - before.ru_utime < 20  # seconds of work; the clock would tell how busy the machine is
