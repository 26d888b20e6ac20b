"""Agents and options to adapters: who acts by which, on which base model, and who is trained at which rate.

Invariant: agents that share an adapter agree on everything that is the adapter's: base model and rate. It learns where
one of them does; a frozen one then acts by what the others learn, and its own calls are part of the environment.
It knows nothing of tensors; a mistake in the configuration is found before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainers.config import AgentOptions, TrainerOptions
from trainers.errors import TrainError


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """One adapter: its base model, the agents that act by it, and how it is trained."""

    name: str
    model_dir: Path
    agents: tuple[str, ...]
    frozen: bool  # all of its agents are
    lr: float


def options_to_adapters(
    options: TrainerOptions, agents: Sequence[str], model_dir: Path | Mapping[str, Path]
) -> dict[str, AdapterPlan]:
    """The adapters by name, in the order of their first agents.

    Args:
        agents: node names.
        model_dir: the base model of all agents, or of each.

    Raises:
        TrainError: names that fit nothing, or agents that share an adapter and differ in what is the adapter's.
    """
    names = tuple(agents)
    if not names or len(set(names)) != len(names):
        raise TrainError(f"agents must be one or more different names, not {list(names)}")
    for agent in options.agents:
        if agent not in names:
            raise TrainError(f"train.trainer.agents.{agent}: there is no such agent; they are {', '.join(names)}")
    _check_sides(options, names)
    if isinstance(model_dir, Mapping) and set(model_dir) != set(names):
        raise TrainError(f"base models are given for {sorted(model_dir)}, the agents are {sorted(names)}")
    plans: dict[str, AdapterPlan] = {}
    for agent in names:
        agent_options = options.agents.get(agent, AgentOptions())
        base = model_dir[agent] if isinstance(model_dir, Mapping) else model_dir
        plan = _plan(agent, agent_options, base, options=options)
        shared = plans.get(plan.name)
        if shared is not None:
            _check_agreement(shared, plan)
            learning = plan if shared.frozen else shared  # the rate is that of an agent that learns
            plan = replace(learning, agents=(*shared.agents, agent))
        plans[plan.name] = plan
    if all(plan.frozen for plan in plans.values()):
        raise TrainError(
            "every agent is frozen, so nothing is left to train: take train.trainer.agents.*.frozen from one"
        )
    return plans


def _check_sides(options: TrainerOptions, agents: Sequence[str]) -> None:
    """Refuses sides that are not made of these agents: one without a side would earn nothing, or everybody's."""
    if options.side_of is None:
        return
    for agent in options.side_of:
        if agent not in agents:
            raise TrainError(f"train.trainer.sides: there is no agent {agent!r}; they are {', '.join(agents)}")
    for agent in agents:
        if agent not in options.side_of:
            raise TrainError(f"train.trainer.sides: agent {agent!r} is of no side: name it in one")


def _plan(agent: str, agent_options: AgentOptions, base: Path, options: TrainerOptions) -> AdapterPlan:
    return AdapterPlan(
        name=agent_options.adapter or agent,
        model_dir=base,
        agents=(agent,),
        frozen=agent_options.frozen,
        lr=options.optimizer.lr if agent_options.lr is None else agent_options.lr,
    )


def _check_agreement(first_plan: AdapterPlan, second_plan: AdapterPlan) -> None:
    is_one_rate = not first_plan.frozen and not second_plan.frozen
    for field in ("model_dir", "lr") if is_one_rate else ("model_dir",):
        if getattr(first_plan, field) != getattr(second_plan, field):
            raise TrainError(
                f"agents {first_plan.agents[0]!r} and {second_plan.agents[0]!r} share the adapter "
                f"{first_plan.name!r} but differ in {field}: give both the same, or each an adapter of its own"
            )
