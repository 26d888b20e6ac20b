"""Log-probs of two policies for the same tokens to log-ratios, of a token or of a whole action, and to their KL.

Invariant: dtype follows the inputs, gradients flow through, and a log-ratio is limited so that exp() stays finite.

Shapes: _T one entry per sampled token (all actions of the batch laid end to end), _A one per action, _U one per unit:
actions (granularity "action", MARFT-A) or tokens (granularity "token", MARFT-T).
`row_T` says which action a token belongs to, 0..actions-1; every action has at least one token.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainers.config import Granularity

LogprobNorm = Literal["sum", "token", "word"]

LOG_RATIO_LIMIT = 20.0  # exp(20) is far outside any clip range, and still finite in float32


def tokens_to_action(
    values_T: Tensor, row_T: Tensor, actions: int, norm: LogprobNorm, words_A: Tensor | None = None
) -> Tensor:
    """Per-token values to one per action, shape [A].

    `sum`: their sum, as in log pi(a) = sum_t log pi(w_t) (MARFT, equation 6). `token` and `word`: that divided by the
    number of the action's tokens, or of its words but at least 1 (MARFT, "Action Normalization", after TWOSOME,
    arXiv 2401.14151), so that long actions are not unlikely merely for being long.

    Args:
        words_A: words of each action; for norm "word", and for no other.

    Raises:
        ValueError: norm "word" without words, or another norm with them.
    """
    if (norm == "word") != (words_A is not None):
        raise ValueError(f"norm {norm!r} {'needs' if norm == 'word' else 'does not read'} the words of each action")
    total_A = torch.zeros(actions, dtype=values_T.dtype, device=values_T.device).index_add(0, row_T, values_T)
    if words_A is not None:
        return total_A / words_A.to(total_A).clamp(min=1)
    if norm == "token":
        return total_A / torch.bincount(row_T, minlength=actions).to(total_A)
    return total_A


def log_ratio(
    new_T: Tensor,
    old_T: Tensor,
    row_T: Tensor,
    actions: int,
    granularity: Granularity,
    norm: LogprobNorm,
    words_A: Tensor | None = None,
) -> Tensor:
    """log pi_new - log pi_old of each unit, shape [U]; of an action with its length normalisation.

    Limited to +-20 (with no gradient beyond), where every clip has long since bound, so that exp() stays finite.
    With granularity "token" each token stands for itself: `row_T`, `actions`, `norm` and `words_A` are not read.

    Raises:
        ValueError: norm and words do not fit, see `tokens_to_action`.
    """
    difference_T = new_T - old_T
    if granularity == "action":
        difference_U = tokens_to_action(difference_T, row_T, actions, norm=norm, words_A=words_A)
    else:
        difference_U = difference_T
    return difference_U.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def lengths_to_clip_factor(row_T: Tensor, actions: int, words_A: Tensor | None = None) -> Tensor:
    """What a clip range is multiplied by for actions whose log-ratio is a mean: 1 / sqrt(tokens, or words), shape [A].

    The log-ratio of a whole call has a deviation that grows as the square root of its length, so its mean over the
    length has one that falls so: one range for all binds on calls of a token and never on calls of a hundred (FSPO,
    arXiv 2509.09177, which widens the range of the sum by the square root of the length).
    """
    if words_A is not None:
        return words_A.clamp(min=1).rsqrt()
    return torch.bincount(row_T, minlength=actions).to(torch.float32).rsqrt()


def k3(log_ratio_T: Tensor) -> Tensor:
    """exp(x) - x - 1 of each token: with x = log p - log q and samples from q, an unbiased estimate of KL(q || p).

    Never negative (Schulman, "Approximating KL divergence", estimator k3). `k3(new - old)` is the approximate KL
    that stops an update. x is limited to +-20.
    """
    x_T = log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(x_T) - x_T  # expm1: exp(x) - 1 loses all digits of a small x
