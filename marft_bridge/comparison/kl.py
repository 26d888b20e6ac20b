"""Calls that an adapter version sampled -> its KL divergence to the base model, in nats per sampled token.

KL(version || base) at the temperature that the calls were sampled with, estimated with k3: for each sampled token
r - 1 - log r, where r is base over version. Given the tokens before it, its mean under the version is the KL exactly,
as is that of -log r (k1); k3 is chosen because it is never negative and, for the small changes that adapters make,
varies far less. Invariant: only calls of the version itself, from its whole distribution, count, and of these no token
that was forced; every estimate comes with their number, and without calls it is None.

Source: Schulman (2020), "Approximating KL divergence", estimators k1 and k3.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.serving.base_models import BaseModelSpec, directory_of
from trace_store.records import Action, Trajectory, model_part

if TYPE_CHECKING:
    from trainers.scoring.model import PolicyModel

_LOG_RATIO_LIMIT = 20.0  # of a log-ratio, as in the trainer's k3


def adapters_to_kl(
    config: BridgeConfig,
    bases: Sequence[BaseModelSpec],
    registry: AdapterRegistry,
    by_variant: Mapping[str, Iterable[Trajectory]],
    limit: int,
    seed: int,
) -> dict[tuple[str, str], tuple[float | None, int]]:
    """(node, variant) -> the KL of the version that acted there, and the number of calls that the estimate rests on.

    Version 0 changes nothing, so its KL is 0 without a forward pass. Loads each base model once, one at a time, in
    float32 on a CPU, so call it after the model servers have stopped.

    Args:
        config: the trainer's LoRA options, device and memory budget.
        bases: the base models of the nodes; episodes that were recorded on another one do not count.
        by_variant: episodes, which may be streamed.
        limit: calls per node and variant at most, drawn with `seed`.

    Raises:
        ServingError, TrainError: a version or the model is not what it was when it acted.
    """
    groups = {
        (node, variant, version): calls
        for variant, episodes in by_variant.items()
        for (node, version), calls in _sample_comparable_calls(
            episodes, registry, variant, limit=limit, seed=seed
        ).items()
    }
    model: PolicyModel | None = None
    directory: Path | None = None
    estimates: dict[tuple[str, str], tuple[float | None, int]] = {}
    for node, variant, version in sorted(
        groups, key=lambda key: (str(directory_of(bases, key[0])), key[0], key[2], key[1])
    ):
        calls = groups[node, variant, version]
        if version == 0:
            estimates[node, variant] = (0.0, len(calls))
            continue
        if model is None or directory != directory_of(bases, node):
            model, directory = None, directory_of(bases, node)  # frees one model before the next one is loaded
            model = _load(config, directory)
        model.load_adapter(_ADAPTER_NAME, Path(registry.get(node, version).path))
        estimates[node, variant] = (
            kl_to_base(model, _ADAPTER_NAME, calls, budget=config.train.trainer.system.tokens_per_microbatch),
            len(calls),
        )
    return estimates


_ADAPTER_NAME = "version"


def kl_to_base(model: PolicyModel, adapter: str, calls: Sequence[Action], budget: int) -> float | None:
    """The KL of one of the model's adapters to its base, estimated on calls that the adapter sampled, or None.

    `budget` is in padded tokens per forward pass.
    """
    import torch

    from trainers.batch import ActionItem, forced_tokens
    from trainers.scoring.microbatch import items_to_microbatches

    items = [
        ActionItem(
            call.node,
            call.prompt_ids or (),
            call.sampled_ids or (),
            behaviour=None,
            temperature=call.temperature or 1.0,
            forced=forced_tokens(call),
        )
        for call in calls
    ]
    policy_logprobs: list[float] = []
    base_logprobs: list[float] = []
    with torch.no_grad():
        for batch in items_to_microbatches(items, budget):
            policy_logprobs += model.logprobs(adapter, batch).double().tolist()
            base_logprobs += model.logprobs(None, batch).double().tolist()
    return logprobs_to_kl(policy_logprobs, base_logprobs)


def logprobs_to_kl(policy_logprobs: Sequence[float], base_logprobs: Sequence[float]) -> float | None:
    """Log-probs [T] of sampled tokens under the policy and under its base into the mean of k3; None for no token."""
    if not policy_logprobs:
        return None
    log_ratios = [
        min(max(b - a, -_LOG_RATIO_LIMIT), _LOG_RATIO_LIMIT)
        for a, b in zip(policy_logprobs, base_logprobs, strict=True)
    ]
    return sum(math.expm1(x) - x for x in log_ratios) / len(
        log_ratios
    )  # expm1: exp(x) - 1 loses the digits of a small x


def _load(config: BridgeConfig, model_dir: Path) -> PolicyModel:
    from trainers.checks.memory_guard import options_to_device
    from trainers.scoring.model import PolicyModel

    options = config.train.trainer
    device = str(options_to_device(options))
    return PolicyModel(model_dir, [_ADAPTER_NAME], options.lora, device=device, seed=0)


def _sample_comparable_calls(
    episodes: Iterable[Trajectory], registry: AdapterRegistry, variant: str, limit: int, seed: int
) -> dict[tuple[str, int], list[Action]]:
    """(node, version) -> at most `limit` of its calls whose tokens are drawn from its whole distribution.

    Reservoir sampling (Vitter 1985, algorithm R): every such call is equally likely to be among them, and no more than
    `limit` are held at a time.
    """
    from trainers.batch import forced_tokens, narrows_sampling

    base_of = cache(partial(_base_of, registry))
    sampled_calls: dict[tuple[str, int], list[Action]] = {}
    seen_counts: Counter[tuple[str, int]] = Counter()
    rng = random.Random(f"{seed}/{variant}")
    for episode in episodes:
        for call in episode.actions:
            version, episode_base = call.adapter_version, model_part(episode.episode.lineage, "base", call.node)
            base = base_of(call.node, version) if version is not None else None
            if version is None or base is None or episode_base not in (None, base):
                continue
            reservoir = sampled_calls.setdefault((call.node, version), [])
            has_tokens = call.prompt_ids and call.sampled_ids and call.logprobs
            if not (has_tokens and call.temperature and not narrows_sampling(call)):
                continue
            if len(forced_tokens(call)) == len(call.sampled_ids or ()):
                continue
            seen_counts[call.node, version] += 1
            slot = rng.randrange(seen_counts[call.node, version])
            if len(reservoir) < limit:
                reservoir.append(call)
            elif slot < limit:
                reservoir[slot] = call
    return sampled_calls


def _base_of(registry: AdapterRegistry, node: str, version: int) -> str | None:
    """Hash of the base model that a registered version belongs to; None for a version that is not registered."""
    return registry.get(node, version).base_sha256 if version in registry.versions(node) else None
