"""Local calls of each node -> how likely a base model finds the recorded answers, before and after a few steps on some.

All calls that can be rendered are scored by the bare base. Then one group of calls in three is held out, a fresh LoRA
adapter imitates the others for a few steps (`trainers/offline/imitate.py`), and the held-out calls are scored by both.
Nats a token are minus the mean log-prob of a sampled token, so less is better.

Invariants: no call of a held-out group is learned from; every interval has the group as its cluster; the adapter is
thrown away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from marft_bridge.move_plan.local_calls import LocalCalls
from marft_bridge.move_plan.probe_figures import NodeFit, Probe
from marft_bridge.statistics.means import MeanInterval, mean_interval
from trainers.common.workers import Workers
from trainers.config import OfflineOptions, TrainerOptions
from trainers.offline.imitate import Demonstrations, imitate
from trainers.policies.policies import Policies

HELD_SHARE = 3  # one group in so many
LEAST_GROUPS = 6  # with fewer, two or less would be held out, and nothing is probed
EPOCHS, MINIBATCH = 3, 8


def probe_nodes(
    calls: Mapping[str, LocalCalls],
    model_dirs: Mapping[str, Path],
    trainer: TrainerOptions,
    seed: int,
    on_node: Callable[[int], None] = lambda _: None,
) -> dict[str, NodeFit]:
    """Scores and probes every node.

    Args:
        calls: of each node.
        model_dirs: the base model of each node.
        trainer: its LoRA, learning rate, device; all else is the probe's own.
        on_node: told how many nodes are done.

    Raises:
        TrainError: see `Policies`.
    """
    nodes = [node for node, local in calls.items() if local.items]
    fits = {
        node: NodeFit(
            node,
            calls=0,
            tokens=0,
            base=None,
            spread=None,
            refused=dict(local.refused),
            no_probe="no call of it could be rendered",
        )
        for node, local in calls.items()
    }
    if not nodes:
        return fits
    options = TrainerOptions(
        lora=trainer.lora,
        optimizer=trainer.optimizer,
        system=trainer.system,
        offline=OfflineOptions(mode="filtered", epochs=EPOCHS, minibatch_actions=MINIBATCH),
    )
    policies = Policies(options, {node: model_dirs[node] for node in nodes}, nodes, seed=seed, workers=Workers.alone())
    for done, node in enumerate(nodes):
        on_node(done)
        fits[node] = _fit_node(node, calls[node], policies, seed=seed)
    return fits


def _fit_node(node: str, local: LocalCalls, policies: Policies, seed: int) -> NodeFit:
    learner = policies.learners[policies.adapter_of(node)]
    base = [scored_T.tolist() for scored_T in learner.logprobs(local.items, reference=True)]
    means = [-sum(logprobs) / len(logprobs) for logprobs in base]
    probe, no_probe = None, None
    held_groups = hold_out(local.groups, seed)
    if held_groups:
        held = [i for i, group in enumerate(local.groups) if group in held_groups]
        fitted = [i for i, group in enumerate(local.groups) if group not in held_groups]
        group_ids = {group: i for i, group in enumerate(dict.fromkeys(local.groups))}
        learned = imitate(
            learner,
            Demonstrations(
                items=[local.items[i] for i in fitted],
                episode_A=[group_ids[local.groups[i]] for i in fitted],
                task_A=[local.groups[i] for i in fitted],
                advantages=[0.0] * len(fitted),
            ),
            torch.Generator().manual_seed(seed),
            tick=lambda _: None,
        )
        held_items = [local.items[i] for i in held]
        after = [scored_T.tolist() for scored_T in learner.logprobs(held_items)]
        before, groups = [base[i] for i in held], [local.groups[i] for i in held]
        gains = [[b - a for b, a in zip(old, new, strict=True)] for old, new in zip(before, after, strict=True)]
        probe = Probe(
            fitted_calls=len(fitted),
            held_calls=len(held),
            steps=int(learned.figures["steps"]),
            before=_nats(before, groups),
            after=_nats(after, groups),
            gain=_nats(gains, groups),
        )
    else:
        count = len(set(local.groups))
        no_probe = f"its calls are of {count} tasks; {LEAST_GROUPS} are needed to hold some out"
    return NodeFit(
        node,
        calls=len(base),
        tokens=sum(map(len, base)),
        base=_nats(base, local.groups),
        spread=_deviation(means),
        refused=dict(local.refused),
        probe=probe,
        no_probe=no_probe,
    )


def hold_out(groups: Sequence[str], seed: int) -> set[str]:
    """The groups to hold out, one in `HELD_SHARE`, by a digest of seed and group; none of fewer than `LEAST_GROUPS`."""
    different = sorted(set(groups), key=lambda group: hashlib.sha256(f"{seed}:{group}".encode()).digest())
    return set(different[: len(different) // HELD_SHARE]) if len(different) >= LEAST_GROUPS else set()


def _nats(logprobs: Sequence[Sequence[float]], groups: Sequence[str]) -> MeanInterval:
    """Log-probs of the tokens of some calls -> minus their mean; a group of calls is one cluster."""
    values = [-value for call in logprobs for value in call]
    labels = [group for call, group in zip(logprobs, groups, strict=True) for _ in call]
    return mean_interval(values, clusters=labels)


def _deviation(means: Sequence[float]) -> float | None:
    if len(means) < 2:
        return None
    mean = sum(means) / len(means)
    deviation: float = (sum((value - mean) ** 2 for value in means) / (len(means) - 1)) ** 0.5
    return deviation
