"""Calls that an adapter version sampled -> its KL divergence to the base model, in nats per sampled token.

KL(version || base) at the temperature that the calls were sampled with, estimated with k3: for each sampled token
r - 1 - log r, where r is base over version. Given what precedes a token its mean under the version is the KL exactly,
as is that of -log r (k1); k3 is chosen because it is never negative and, for the small changes that adapters make,
varies far less. Invariant: only calls of the version itself, from its whole distribution, count; how many is part of
the answer, and of no call there is no estimate. It knows nothing of pages or statistics.

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

from marft_bridge.adapters import AdapterRegistry
from marft_bridge.bases import Base, directory_of
from marft_bridge.config import BridgeConfig
from trace_store.records import Action, Trajectory, model_part

if TYPE_CHECKING:
    from trainers.model import PolicyModel

_LIMIT = 20.0  # of a log-ratio, as in the trainer's k3


def adapters_to_kl(
    config: BridgeConfig,
    bases: Sequence[Base],
    registry: AdapterRegistry,
    by_variant: Mapping[str, Iterable[Trajectory]],
    limit: int,
    seed: int,
) -> dict[tuple[str, str], tuple[float | None, int]]:
    """(node, variant) -> the KL of the version that acted there, and the calls that the estimate rests on.

    Version 0 changes nothing, so its KL is 0 without looking. Loads each base model once, one at a time, in float32 on
    a CPU, so ask after the model servers have stopped.

    Args:
        config: the trainer's LoRA options, device and memory budget.
        bases: the base models of the nodes; episodes that say they ran on another one do not count.
        by_variant: episodes, which may be streamed.
        limit: calls per node and variant at most, drawn with `seed`.

    Raises:
        ServingError, TrainError: a version or the model is not what it was when it acted.
    """
    groups = {
        (node, variant, version): calls
        for variant, episodes in by_variant.items()
        for (node, version), calls in _comparable(episodes, registry, variant, limit, seed).items()
    }
    model: PolicyModel | None = None
    directory: Path | None = None
    found: dict[tuple[str, str], tuple[float | None, int]] = {}
    for node, variant, version in sorted(
        groups, key=lambda key: (str(directory_of(bases, key[0])), key[0], key[2], key[1])
    ):
        calls = groups[node, variant, version]
        if version == 0:
            found[node, variant] = (0.0, len(calls))
            continue
        if model is None or directory != directory_of(bases, node):
            model, directory = None, directory_of(bases, node)  # the last one goes before the next one comes
            model = _load(config, directory)
        model.load_adapter(_SLOT, Path(registry.get(node, version).path))
        found[node, variant] = (kl_to_base(model, _SLOT, calls, config.train.trainer.tokens_per_microbatch), len(calls))
    return found


_SLOT = "version"


def kl_to_base(model: PolicyModel, adapter: str, calls: Sequence[Action], budget: int) -> float | None:
    """The KL of one of the model's adapters to its base, estimated on calls that the adapter sampled; None of none.

    `budget` is in padded tokens per pass.
    """
    import torch

    from trainers.batch import ActionItem
    from trainers.microbatch import items_to_microbatches

    items = [
        ActionItem(call.node, call.prompt_ids or (), call.sampled_ids or (), None, call.temperature or 1.0)
        for call in calls
    ]
    own: list[float] = []
    base: list[float] = []
    with torch.no_grad():
        for batch in items_to_microbatches(items, budget):
            own += model.logprobs(adapter, batch).double().tolist()
            base += model.logprobs(None, batch).double().tolist()
    return logprobs_to_kl(own, base)


def logprobs_to_kl(own: Sequence[float], base: Sequence[float]) -> float | None:
    """Log-probs of tokens that a policy sampled, its own and the base's, into the mean of k3; None of no token."""
    if not own:
        return None
    ratios = [min(max(b - a, -_LIMIT), _LIMIT) for a, b in zip(own, base, strict=True)]
    return sum(math.expm1(x) - x for x in ratios) / len(ratios)  # expm1: exp(x) - 1 loses the digits of a small x


def _load(config: BridgeConfig, model_dir: Path) -> PolicyModel:
    import torch

    from trainers.model import PolicyModel

    options = config.train.trainer
    device = "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
    return PolicyModel(model_dir, [_SLOT], options.lora, device, seed=0)


def _comparable(
    episodes: Iterable[Trajectory], registry: AdapterRegistry, variant: str, limit: int, seed: int
) -> dict[tuple[str, int], list[Action]]:
    """(node, version) -> some of its calls whose tokens are drawn from its whole distribution.

    Each such call is as likely to be among them as any other, and no more than `limit` are held at a time (Vitter 1985,
    algorithm R).
    """
    from trainers.batch import narrows_sampling

    base_of = cache(partial(_base_of, registry))
    found: dict[tuple[str, int], list[Action]] = {}
    seen: Counter[tuple[str, int]] = Counter()
    drawn = random.Random(f"{seed}/{variant}")
    for episode in episodes:
        for call in episode.actions:
            version, ran_on = call.adapter_version, model_part(episode.episode.lineage, "base", call.node)
            base = base_of(call.node, version) if version is not None else None
            if version is None or base is None or ran_on not in (None, base):
                continue
            kept = found.setdefault((call.node, version), [])
            known = call.prompt_ids and call.sampled_ids and call.logprobs
            if not (known and call.temperature and not narrows_sampling(call)):
                continue
            seen[call.node, version] += 1
            place = drawn.randrange(seen[call.node, version])
            if len(kept) < limit:
                kept.append(call)
            elif place < limit:
                kept[place] = call
    return found


def _base_of(registry: AdapterRegistry, node: str, version: int) -> str | None:
    """Hash of the base model that a registered version belongs to; None for a version of elsewhere."""
    return registry.get(node, version).base_sha256 if version in registry.versions(node) else None
