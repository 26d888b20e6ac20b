"""Agents to policies: every agent's adapter on its base model, each base in memory once, and who is trained.

Invariant: the weights of the base models never change; `check_frozen` says so from the weights themselves. It knows
nothing of rewards, rounds or advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path

import torch

from trace_store.records import Action
from trainers.adapters.adapter_map import options_to_adapters
from trainers.batch import ActionItem
from trainers.checks.memory_guard import MemoryGuard, options_to_device
from trainers.checks.reality import Fingerprint, base_fingerprint, check_frozen, tensors_to_fingerprint
from trainers.common.workers import Workers, losses_told
from trainers.config import TrainerOptions
from trainers.errors import TrainError
from trainers.policies.adapter_learner import AdapterLearner
from trainers.scoring.model import PolicyModel


class Policies:
    """All agents' policies.

    Args:
        options: LoRA, the map from agents to adapters, rates, device.
        model_dir: the base model of all agents, or of each.
        agents: node names.
        seed: of the adapters.
        workers: the processes that share the work.

    Raises:
        TrainError: see `options_to_adapters`, `MemoryGuard` and `PolicyModel`.
    """

    def __init__(
        self,
        options: TrainerOptions,
        model_dir: Path | Mapping[str, Path],
        agents: Sequence[str],
        seed: int,
        workers: Workers,
    ) -> None:
        self.adapters = options_to_adapters(options, agents, model_dir)
        self.agents = tuple(agents)
        self.workers = workers
        self._adapter_of = {agent: plan.name for plan in self.adapters.values() for agent in plan.agents}
        frozen = {agent for agent, agent_options in options.agents.items() if agent_options.frozen}
        self.trained = tuple(agent for agent in self.agents if agent not in frozen)
        self.models = self._load(options, seed, workers)
        self.learners = {
            name: AdapterLearner(self.models[plan.model_dir], name, plan.lr, options=options, workers=workers)
            for name, plan in self.adapters.items()
            if not plan.frozen
        }
        self.others_idle: Callable[[int, int], AbstractContextManager[None]] = lambda _base, _passes: nullcontext()
        """Has the other processes make so many idle passes of a base, by its position, while the context lasts."""
        self.note_frozen()

    def adapter_of(self, agent: str) -> str:
        """The adapter that an agent acts by.

        Raises:
            TrainError: an agent that this trainer does not know.
        """
        if agent not in self.agents:
            raise TrainError(f"{agent!r} is not among the agents {list(self.agents)}")
        return self._adapter_of[agent]

    def model_of(self, agent: str) -> PolicyModel:
        """The base model, with all adapters on it, that an agent runs on."""
        return self.models[self.adapters[self.adapter_of(agent)].model_dir]

    @cached_property
    def model(self) -> PolicyModel:
        """The base model of all agents.

        Raises:
            TrainError: there are several; `model_of` tells them apart.
        """
        if len(self.models) > 1:
            raise TrainError(f"the agents run on {len(self.models)} base models: ask for that of one agent")
        return next(iter(self.models.values()))

    def parameters(self, agent: str) -> dict[str, torch.nn.Parameter]:
        """LoRA matrices of the agent's adapter, by their names in a plain peft file."""
        return self.model_of(agent).parameters(self.adapter_of(agent))

    def adapter_norm(self, agent: str) -> float:
        """Frobenius norm of the weight update of the agent's adapter; 0 for one that was never trained."""
        return self.model_of(agent).adapter_norm(self.adapter_of(agent))

    def save_adapter(self, agent: str, folder: Path) -> None:
        """Writes the agent's adapter as a plain peft folder, whole or not at all."""
        self.model_of(agent).save_adapter(self.adapter_of(agent), folder)

    def load_adapter(self, agent: str, folder: Path) -> None:
        """Reads a plain peft folder into the agent's adapter, and so into that of all who share it."""
        self.model_of(agent).load_adapter(self.adapter_of(agent), folder)
        self.note_frozen()

    @contextmanager
    def lent(self, agent: str, folder: Path) -> Iterator[None]:
        """The agent's adapter is that of a peft folder while the context lasts, and what it was, bit for bit, after."""
        parameters = self.parameters(agent)
        original_weights = {name: p.detach().clone() for name, p in parameters.items()}
        self.model_of(agent).load_adapter(self.adapter_of(agent), folder)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(original_weights[name])

    def logprobs_of(self, agent: str, actions: Sequence[Action], reference: bool = False) -> list[list[float]]:
        """The agent's current log-probs of recorded actions' tokens, to check the engine against the trainer.

        At each action's own temperature; one at temperature 0 or unknown is scored at 1. `reference`: those of its base
        model without any adapter. Of several processes each that asks computes for itself.

        Raises:
            TrainError: an agent that is not trained here, or an action without token ids.
        """
        learner = self.learners.get(self.adapter_of(agent))
        if learner is None:
            raise TrainError(f"{agent!r} is frozen, so the trainer does not score it")
        items = []
        for action in actions:
            if not action.prompt_ids or not action.sampled_ids:
                raise TrainError(f"action {action.action_id} has no token ids, so it has no log-probs to compare")
            items.append(
                ActionItem(
                    agent, action.prompt_ids, action.sampled_ids, behaviour=None, temperature=action.temperature or 1.0
                )
            )
        base = list(self.models.values()).index(learner.model)
        with losses_told(), self.others_idle(base, len(learner.microbatches(items, shares=1))):
            return [logp_T.tolist() for logp_T in learner.logprobs(items, reference, is_shared=False)]

    def note_frozen(self) -> None:
        """Takes the frozen weights as they are now for what must not change; after they were loaded on purpose."""
        self._fingerprints = self._fingerprint()

    def check_frozen(self) -> None:
        """Holds every frozen weight against what it was when it was loaded.

        Raises:
            TrainError: one has moved.
        """
        for old_fingerprint, new_fingerprint in zip(self._fingerprints, self._fingerprint(), strict=True):
            check_frozen(old_fingerprint, new_fingerprint)

    def _fingerprint(self) -> list[Fingerprint]:
        """Of every base model, and of every frozen adapter."""
        frozen = [plan for plan in self.adapters.values() if plan.frozen]
        matrices = [
            {f"{plan.name}.{name}": p for name, p in self.models[plan.model_dir].parameters(plan.name).items()}
            for plan in frozen
        ]
        return [base_fingerprint(model.peft) for model in self.models.values()] + [
            tensors_to_fingerprint(named_matrices) for named_matrices in matrices
        ]

    def _load(self, options: TrainerOptions, seed: int, workers: Workers) -> dict[Path, PolicyModel]:
        device = options_to_device(options)
        if device.type == "cuda" and workers.count > 1:
            device = workers.device
        if options.system.shard_base and workers.count == 1:
            raise TrainError("train.trainer.system.shard_base: nothing to deal out over: one process trains")
        self.memory = MemoryGuard(
            options, self.adapters, device, sharers=workers.sharers, learners=workers.count, meet=workers.wait
        )
        self.memory.check()
        names: dict[Path, list[str]] = {}
        for plan in self.adapters.values():
            names.setdefault(plan.model_dir, []).append(plan.name)
        with losses_told():
            models = {
                path: PolicyModel(
                    path,
                    group,
                    options.lora,
                    device=str(device),
                    seed=seed,
                    checkpointing=options.system.activation_checkpointing,
                    load_in_4bit=options.system.load_in_4bit,
                    is_sharded=options.system.shard_base,
                )
                for path, group in names.items()
            }
        self.memory.loaded()
        return models
