"""Weights and log-probs before and after -> is the training real? Errors where it is not, warnings where it may not be.

Four ways in which a run can look healthy and train nothing, or the wrong thing: a base weight moved; an adapter did
not, though its optimiser stepped; engine and trainer give the same tokens different log-probs; the server still
answers with an older adapter. Pure functions: they look and compare; whoever calls them decides when.
It knows nothing of rounds, stores or servers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from trainers.errors import TrainError
from trainers.scoring.four_bit import scales
from trainers.scoring.sharded_base import own_part

_CHUNK = 2**16  # words hashed at a time: their products stay in the cache
_MIX = 0x9E3779B97F4A7C15  # odd, so that multiplying by it loses nothing
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Fingerprint = dict[str, tuple[torch.dtype, tuple[int, ...], int]]
"""Name of a tensor -> what it was: its type, shape and the hash of its bytes."""


def tensors_to_fingerprint(tensors: Mapping[str, Tensor]) -> Fingerprint:
    """Tensors to what `check_frozen` compares; for example the matrices of a frozen agent's adapter.

    The hash is sum of m_i * word_i modulo 2^64, over the weights read as integers, with random odd multipliers m_i. An
    odd number has an inverse there, so one changed weight always changes the sum; several do but for a chance of about
    2^-33. A model of 135 million float32 weights takes 0.1 s on one CPU core.
    """
    return {name: (t.dtype, tuple(t.shape), _tensor_to_hash(t)) for name, t in tensors.items()}


def base_fingerprint(model: torch.nn.Module) -> Fingerprint:
    """Every weight and buffer of a model but its LoRA matrices, to what `check_frozen` compares.

    Of weights that are dealt out over processes the part that is here.
    """
    named_tensors = [*model.named_parameters(), *model.named_buffers(), *scales(model).items()]
    return tensors_to_fingerprint({name: own_part(tensor) for name, tensor in named_tensors if "lora_" not in name})


def check_frozen(old_fingerprint: Fingerprint, new_fingerprint: Fingerprint) -> None:
    """Refuses a change of what is not trained.

    Raises:
        TrainError: naming a weight that changed, appeared or went away.
    """
    changed = sorted(
        name
        for name in old_fingerprint.keys() | new_fingerprint.keys()
        if old_fingerprint.get(name) != new_fingerprint.get(name)
    )
    if changed:
        others_text = f" and {len(changed) - 1} others" if len(changed) > 1 else ""
        raise TrainError(
            f"the frozen weight {changed[0]!r}{others_text} changed while adapters were trained, so these belong to no "
            "model on disk: go back to the last checkpoint, and look for code that writes to the model"
        )


def check_moved(agent_metrics: Mapping[str, Mapping[str, Any]], lr: Mapping[str, float]) -> list[str]:
    """Refuses an update that should have changed an adapter and did not; returns what is odd, but may be right.

    Args:
        agent_metrics: by adapter: `tokens` (int, trained on), `steps` (int, of the optimiser), `grad_norm` (float, None
            without a step), `adapter_norm` and `adapter_moved` (float), as an update returns them.
        lr: by adapter, the learning rate that was in force; 0 moves nothing.

    Returns:
        One line each for an adapter without a token to learn from, without a step, or without a gradient.

    Raises:
        TrainError: an adapter with a weight that is not finite, one that took steps along a gradient at a rate
            above 0 and is where it was, or one that moved without a step.
    """
    warnings = []
    for name, metrics in agent_metrics.items():
        if not math.isfinite(metrics["adapter_norm"]) or not math.isfinite(metrics["adapter_moved"]):
            raise TrainError(
                f"adapter {name!r} holds a weight that is not finite: go back to the last checkpoint, lower its rate "
                "(train.trainer.optimizer.lr, or train.trainer.agents.*.lr)"
            )
        steps, norm = metrics["steps"], metrics["grad_norm"]
        if not steps and metrics["adapter_moved"]:
            raise TrainError(
                f"adapter {name!r} moved without a step of its own optimiser: go back to the last checkpoint, and look "
                "for another adapter's optimiser that holds its weights"
            )
        if not metrics["tokens"]:
            warnings.append(f"adapter {name!r} had no action to learn from")
        elif norm == 0:
            warnings.append(
                f"adapter {name!r} took no step: it had no gradient, since its advantages were all 0 (its runs earned "
                "the same, or nearly so beside earlier rounds), or below 0 where "
                "train.trainer.objective.negative_weight is 0"
            )
        elif metrics.get("stopped_by") is not None and not metrics["epochs"]:
            warnings.append(
                f"adapter {name!r} kept nothing of its offline phase: no pass made the better calls of held-out tasks "
                "more likely"
            )
        elif metrics.get("kl_target") == 0:
            warnings.append(
                f"adapter {name!r} took no step: none of its calls was better than its others, or than the runs "
                "without it, so train.trainer.objective.kl_target has nothing to go by"
            )
        elif not steps:
            warnings.append(f"adapter {name!r} took no step: its update stopped before the first one")
        elif metrics.get("step_share") == 0:
            warnings.append(
                f"adapter {name!r} is where it was: no part of its step stays within twice what "
                "train.trainer.objective.kl_target asks for"
            )
        elif lr[name] > 0 and not metrics["adapter_moved"]:
            raise TrainError(
                f"adapter {name!r} took {steps} steps of lr {lr[name]:g} with a gradient of norm {norm:.3g} and did "
                "not move: raise its rate (train.trainer.optimizer.lr, or train.trainer.agents.*.lr); if that does not "
                "help, its optimiser holds other weights than the model"
            )
    return warnings


def logprob_gap(engine: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]], subject: str) -> float | None:
    """Mean of |engine - trainer| over all tokens, in nats; None when there is no token.

    Args:
        engine, trainer: log-probs of the same actions' tokens.
        subject: whose they are, for the message.

    Raises:
        TrainError: not the same number of actions or tokens, or a log-prob that is not finite.
    """
    lengths = [len(action) for action in engine], [len(action) for action in trainer]
    if lengths[0] != lengths[1]:
        raise TrainError(
            f"{subject}: the engine has log-probs of {sum(lengths[0])} tokens, the trainer of {sum(lengths[1])}, so "
            "they belong to different token ids: record with the engine's own ids"
        )
    gaps = [
        abs(e - t)
        for engine_action, trainer_action in zip(engine, trainer, strict=True)
        for e, t in zip(engine_action, trainer_action, strict=True)
    ]
    if not all(map(math.isfinite, gaps)):
        raise TrainError(f"{subject}: a log-prob is not finite: check the base model's weights and the server's dtype")
    return math.fsum(gaps) / len(gaps) if gaps else None


def served_is_trained(gap_to_new: float, gap_to_old: float) -> bool | None:
    """Whether the engine answered with the newest adapter rather than with the one before it.

    Both gaps are `logprob_gap`s of what the engine said, against the trainer with the new and with the old adapter.
    The smaller is the numerical noise between engine and trainer, if one of the two is served. By the triangle
    inequality the adapters differ by at least the difference of the gaps; only where that exceeds the noise do the
    log-probs tell which one spoke.

    Returns:
        None where they do not tell: the adapters hardly differ on these tokens, or neither of them is served, which
        the gap itself tells (`engine_tolerance`).
    """
    if abs(gap_to_new - gap_to_old) <= min(gap_to_new, gap_to_old):
        return None
    return gap_to_new < gap_to_old


def check_served(adapter: str, gap_to_new: float, gap_to_old: float) -> bool | None:
    """`served_is_trained`, but refuses the older adapter.

    Raises:
        TrainError: the server answers with the version before `adapter`.
    """
    answer = served_is_trained(gap_to_new, gap_to_old)
    if answer is False:
        raise TrainError(
            f"{adapter} was asked for, but the server answered with the version before it ({gap_to_old:.3g} nats a "
            f"token from that one, {gap_to_new:.3g} from {adapter}): restart the server, which loads adapters anew"
        )
    return answer


@lru_cache(maxsize=2)
def _multipliers(device: torch.device) -> Tensor:
    drawn = torch.randint(-(2**63), 2**63 - 1, (_CHUNK,), generator=torch.Generator().manual_seed(0))
    return (drawn | 1).to(device)


@torch.no_grad()
def _tensor_to_hash(tensor: Tensor) -> int:
    """64 bits of a tensor's bytes."""
    words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
    multipliers = _multipliers(words.device)
    sums = [(chunk * multipliers[: len(chunk)]).sum() for chunk in torch.split(words, _CHUNK)]
    result = 0
    for part in torch.stack(sums).tolist():  # one transfer from the device
        result = (result * _MIX + part) % 2**64
    return result
