"""Trajectories to better adapters: the MARFT-A trainer (one action is one LLM call).

In the order of a run: `warm_up` (critic, on stored episodes), `replay` (adapters, on stored episodes), then one
`update` per on-policy round. One update, in order: leave out what cannot be trained on; recompute log-probs with the
trainer's own policy; values; advantages along D; normalise; agents one after another, each weighted by the clipped
ratio of those already updated (HAPPO, A2PO; paper, section 4.1.1); then the critic.

Invariant: all randomness comes from the trainer's own generators, so that on the CPU equal inputs give equal bits.
It knows nothing of spans, graphs, stores or servers.

Shapes: _A one entry per action of the round, episode after episode, each in topological order.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trace_store.records import Action, Trajectory
from trainers.advantages import Floats, normalize
from trainers.agent_update import AgentLearner, AgentRound
from trainers.batch import ActionItem, Round, trajectories_to_round
from trainers.config import TrainerOptions
from trainers.credit import Credit
from trainers.critic import Critic
from trainers.errors import TrainError
from trainers.losses import action_ratio
from trainers.model import PolicyModel, Tick

Progress = Callable[[str, int, int], None]

_SPOT_CHECKS = 8  # actions per agent and round that are scored again when the engine's log-probs are taken
_ENGINE_GAP = 0.01  # nats per token; a float32 engine differs by 1e-5, a bfloat16 one by 3e-2


class MarftTrainer:
    """One adapter per agent on one frozen base model, a critic, and their optimisers.

    Args:
        options: see `TrainerOptions`.
        model_dir: Hugging Face model directory of the base model.
        agents: nodes to train; each gets its own adapter.
        seed: of adapters, critic and the order of minibatches.
        progress: called with (phase, done, total) as actions are processed.
    """

    def __init__(
        self,
        options: TrainerOptions,
        model_dir: Path,
        agents: Sequence[str],
        seed: int,
        progress: Progress | None = None,
    ) -> None:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise TrainError("trainer.device is 'cuda' but torch sees no CUDA device: use 'cpu' or 'auto'")
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        use_cuda = options.device != "cpu" and torch.cuda.is_available()
        self.options = options
        self.agents = tuple(agents)
        self.progress = progress
        self.model = PolicyModel(model_dir, agents, options.lora, "cuda" if use_cuda else "cpu", seed)
        self.critic = Critic(self.model.width, len(self.agents), options.critic, seed)
        self.learners = {agent: AgentLearner(self.model, agent, options) for agent in self.agents}
        self.generator = torch.Generator().manual_seed(seed)
        self.rounds = 0  # on-policy updates so far
        self.credit = Credit(options, self.model, self.critic, self._tick)

    def warm_up(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """Stored episodes to a pre-trained critic, on their (discounted) team rewards.

        Truncated episodes are left out: the return that they would have had is not known.

        Returns:
            {"critic": {"epochs", "explained_variance", "value_loss"}, "drops", "episodes", "actions", "seconds"}.
        """
        started = time.perf_counter()
        data = self._read(trajectories, on_policy=False)
        data = data.only(lambda episode: not episode.truncated, "episode truncated, its return unknown")
        critic = self.credit.warm_up(data)
        return _result(started, data, {"critic": critic, "actions": len(data.items)})

    def replay(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """Stored episodes to adapters by weighted imitation, as `offline.mode` says.

        `filtered` imitates episodes with reward >= threshold, weight 1. `awr` imitates all, each action
        weighted by min(exp((return - V) / beta), max_weight) (advantage-weighted regression). AdamW starts afresh
        afterwards: moments of imitation gradients do not fit policy gradients.

        Returns:
            {"mode", "agents": {name: {"actions", "tokens", "loss", "grad_norm", "steps", "weight_mean",
            "effective_sample_size" (fraction of the actions), "adapter_norm", "adapter_moved"}}, "used", "drops",
            "episodes", "seconds"}.
        """
        started = time.perf_counter()
        mode = self.options.offline.mode
        data = self._read(trajectories if mode != "off" else [], on_policy=False)
        if mode == "filtered":
            threshold = self.options.offline.threshold
            data = data.only(lambda episode: episode.reward >= threshold, "episode below offline.threshold")
        weights_A: Floats = np.ones(len(data.items))
        if mode == "awr" and data.items:
            scaled_A = self.credit.replay_advantages(data) / self.options.offline.beta
            weights_A = np.exp(np.minimum(scaled_A, math.log(self.options.offline.max_weight)))
        agents = {}
        for agent in self.agents:
            rows = data.of(agent)
            before = self._snapshot(agent)
            tick = self._tick(f"replay {agent}", len(rows) * self.options.offline.epochs)
            weights = weights_A[rows].tolist()
            learner = self.learners[agent]
            learned = learner.imitate([data.items[i] for i in rows], weights, self.generator, tick)
            learner.optimizer = learner.fresh_optimizer()
            agents[agent] = {
                "actions": len(rows),
                "tokens": sum(len(data.items[i].sampled_ids) for i in rows),
                **learned,
                "weight_mean": float(np.mean(weights)) if weights else None,
                "effective_sample_size": _effective_sample_size(weights),
                **self._movement(agent, before),
            }
        self.credit.forget()
        return _result(started, data, {"mode": mode, "agents": agents, "used": len(data.items)})

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """One on-policy round: fresh trajectories to updated adapters and critic.

        Returns:
            {"agents": {name: {...}}, "critic": {"value_loss", "explained_variance"}, "order", "drops", "episodes",
            "seconds"}. Per agent: those of `AgentLearner.improve`, actions, tokens, advantage_mean and
            advantage_std (before normalisation), entropy (-mean log-prob of the sampled tokens), engine_ratio_mean,
            engine_ratio_max and engine_logprob_gap (trainer against engine, per token), factor_mean (compounded
            ratio), adapter_norm, adapter_moved. explained_variance is that of the values before the critic's
            fit, against returns. What was not measured is None.

        Raises:
            TrainError: not one action can be trained on.
        """
        started = time.perf_counter()
        data = self._read(trajectories, on_policy=True)
        if not data.items:
            reasons = "; ".join(f"{count} x {reason}" for reason, count in sorted(data.drops.items()))
            raise TrainError(f"no action of this round can be trained on: {reasons or 'there were no trajectories'}")
        rows_of = {agent: data.of(agent) for agent in self.agents}
        old_T, sampling = self._old_logprobs(data, rows_of)
        advantages_A, fit_critic = self.credit.advantages(data)
        normal_A = normalize(advantages_A, [item.agent for item in data.items], self.options.normalize)

        order = self._order(data)
        log_factor_E = torch.zeros(len(data.episodes), dtype=torch.float64)
        factor_A = torch.ones(len(data.items))
        agents: dict[str, dict[str, Any]] = {}
        for position, agent in enumerate(order):
            rows = rows_of[agent]
            before = self._snapshot(agent)
            reference = self._logprobs(agent, data, rows, "reference", True) if self.options.kl_coef > 0 else None
            learned = self.learners[agent].improve(
                AgentRound(
                    items=[data.items[i] for i in rows],
                    old_T=[old_T[i] for i in rows],
                    reference_T=reference,
                    advantage_A=torch.from_numpy(normal_A[rows]).float().to(self.model.device),
                    factor_A=factor_A[rows].to(self.model.device),
                ),
                self.generator,
                self._tick(f"update {agent}", len(rows) * self.options.epochs),
            )
            agents[agent] = {
                "actions": len(rows),
                **learned,
                **sampling[agent],
                "advantage_mean": float(advantages_A[rows].mean()) if rows else None,
                "advantage_std": float(advantages_A[rows].std()) if rows else None,
                "factor_mean": float(factor_A[rows].mean()) if rows else None,
                **self._movement(agent, before),
            }
            if self.options.update == "sequential" and position + 1 < len(order) and rows:
                new_T = self._logprobs(agent, data, rows, "new log-probs")
                ratios = _ratios(new_T, [old_T[i] for i in rows], self.options)
                episode_R = torch.tensor([data.episode_A[i] for i in rows])
                log_factor_E.index_add_(0, episode_R, ratios.double().log())
                factor_E = log_factor_E.exp().clamp(1 - self.options.clip_low, 1 + self.options.clip_high)
                factor_A = factor_E.float()[list(data.episode_A)]
        critic = fit_critic()
        self.credit.forget()
        self.rounds += 1
        by_agent = {agent: agents[agent] for agent in self.agents}
        return _result(started, data, {"agents": by_agent, "critic": critic, "order": list(order)})

    def logprobs_of(self, agent: str, actions: Sequence[Action]) -> list[list[float]]:
        """The agent's current log-probs of recorded actions' tokens, to check the engine against the trainer.

        At each action's own temperature; one at temperature 0 or unknown is scored at 1.

        Raises:
            TrainError: an agent that is not trained here, or an action without token ids.
        """
        if agent not in self.learners:
            raise TrainError(f"{agent!r} is not among the trained agents {list(self.agents)}")
        items = []
        for action in actions:
            if not action.prompt_ids or not action.sampled_ids:
                raise TrainError(f"action {action.action_id} has no token ids, so it has no log-probs to compare")
            items.append(ActionItem(agent, action.prompt_ids, action.sampled_ids, (), action.temperature or 1.0))
        return [logp_T.tolist() for logp_T in self.learners[agent].logprobs(items)]

    def adapter_norm(self, agent: str) -> float:
        """Frobenius norm of the agent's weight update; 0 for an adapter that was never trained."""
        return self.model.adapter_norm(agent)

    def _read(self, trajectories: Sequence[Trajectory], on_policy: bool) -> Round:
        return trajectories_to_round(trajectories, self.agents, self.options.reward, self.model.vocabulary, on_policy)

    def _old_logprobs(
        self, data: Round, rows_of: dict[str, list[int]]
    ) -> tuple[list[Tensor], dict[str, dict[str, Any]]]:
        """log pi_old of every action, each shape [T of the action], and how engine and trainer differ, by agent."""
        from_engine = self.options.proximal == "engine"
        old_T = [torch.tensor(item.behaviour, device=self.model.device) for item in data.items]
        sampling: dict[str, dict[str, Any]] = {}
        for agent, rows in rows_of.items():
            scored = rows[:: max(1, len(rows) // _SPOT_CHECKS)][:_SPOT_CHECKS] if from_engine else rows
            ours_T = self._logprobs(agent, data, scored, "old log-probs")
            sampling[agent] = _sampling_metrics([data.items[i] for i in rows], [data.items[i] for i in scored], ours_T)
            gap = sampling[agent]["engine_logprob_gap"]
            if not from_engine:
                for i, logp_T in zip(rows, ours_T, strict=True):
                    old_T[i] = logp_T
            elif gap is not None and gap > _ENGINE_GAP:
                raise TrainError(
                    f"the engine's log-probs of {agent!r} differ from the trainer's by {gap:.3f} nats a token: "
                    "serve in float32, or set trainer.proximal to 'recomputed'"
                )
        return old_T, sampling

    def _logprobs(
        self, agent: str, data: Round, rows: Sequence[int], phase: str, reference: bool = False
    ) -> list[Tensor]:
        tick = self._tick(f"{phase} {agent}", len(rows))
        return self.learners[agent].logprobs([data.items[i] for i in rows], reference, tick)

    def _order(self, data: Round) -> tuple[str, ...]:
        """The order of updates. Topological: by the mean position of an agent's actions in their episodes."""
        if self.options.update == "simultaneous":
            return self.agents
        if self.options.agent_order == "random":
            return tuple(self.agents[i] for i in torch.randperm(len(self.agents), generator=self.generator).tolist())
        positions: dict[str, list[int]] = {agent: [] for agent in self.agents}
        for episode in data.episodes:
            for i, item in enumerate(episode.actions):
                positions[item.agent].append(i)
        ordered = sorted(self.agents, key=lambda a: float(np.mean(positions[a])) if positions[a] else math.inf)
        return tuple(reversed(ordered)) if self.options.agent_order == "reverse" else tuple(ordered)

    def _snapshot(self, agent: str) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters(agent).values()]

    def _movement(self, agent: str, before: Sequence[Tensor]) -> dict[str, float]:
        squares = [
            float((p.detach() - old).square().sum())
            for p, old in zip(self.model.parameters(agent).values(), before, strict=True)
        ]
        return {"adapter_norm": self.adapter_norm(agent), "adapter_moved": math.sqrt(sum(squares))}

    def _tick(self, phase: str, total: int) -> Tick:
        done = 0

        def tick(count: int) -> None:
            nonlocal done
            done += count
            if self.progress is not None:
                self.progress(phase, done, total)

        return tick


def _result(started: float, data: Round, fields: dict[str, Any]) -> dict[str, Any]:
    seconds = time.perf_counter() - started
    return {**fields, "drops": data.drops, "episodes": len(data.episodes), "seconds": seconds}


def _effective_sample_size(weights: Sequence[float]) -> float | None:
    """(sum w)^2 / (N sum w^2): 1 when all weights are equal, 1 / N when one has everything."""
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights)) if weights else None


def _ratios(new_T: Sequence[Tensor], old_T: Sequence[Tensor], options: TrainerOptions) -> Tensor:
    """New against old policy per action, on the CPU."""
    lengths = torch.tensor([len(logp_T) for logp_T in old_T])
    action_T = torch.repeat_interleave(torch.arange(len(old_T)), lengths)
    return action_ratio(
        torch.cat(list(new_T)).cpu(), torch.cat(list(old_T)).cpu(), action_T, len(old_T), options.logprob_norm
    )


def _sampling_metrics(
    items: Sequence[ActionItem], scored: Sequence[ActionItem], ours: Sequence[Tensor]
) -> dict[str, Any]:
    """The tokens of an agent's actions, and how engine and trainer differ on those that the trainer scored."""
    if not items:
        names = ("entropy", "engine_ratio_mean", "engine_ratio_max", "engine_logprob_gap")
        return {"tokens": 0, **dict.fromkeys(names)}
    engine_T = [logp for item in items for logp in item.behaviour]
    ours_T = torch.cat(list(ours)).double().cpu()
    gap_T = ours_T - torch.tensor([logp for item in scored for logp in item.behaviour], dtype=torch.float64)
    ratio_T = gap_T.exp()
    return {
        "tokens": len(engine_T),
        "entropy": -sum(engine_T) / len(engine_T),
        "engine_ratio_mean": float(ratio_T.mean()),
        "engine_ratio_max": float(ratio_T.max()),
        "engine_logprob_gap": float(gap_T.abs().mean()),
    }
