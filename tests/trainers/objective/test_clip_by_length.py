"""Owns: how far the ratio of a call may go before the clip binds, by the length of the call."""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from trainers.config import TrainerOptions
from trainers.objective.minibatch_loss import Scored, scored_to_loss


def scored_of(new_T: torch.Tensor, lengths: list[int], advantage: float, words: list[int] | None = None) -> Scored:
    row_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    one_A = torch.ones(len(lengths))
    return Scored(
        row_T=row_T,
        new_T=new_T,
        old_T=torch.zeros_like(new_T.detach()),
        behaviour_T=None,
        reference_T=None,
        entropy_T=None,
        advantage_U=advantage * one_A,
        sign_weight_U=one_A,
        share_A=one_A / len(lengths),
        token_share_A=one_A,
        factor_A=one_A,
        positive_A=one_A,
        words_A=None if words is None else torch.tensor(words, dtype=torch.float32),
    )


def pulls(mean_log_ratio: float, length: int, advantage: float = 1.0, words: int | None = None, **options: Any) -> bool:
    """Whether a call whose tokens each moved by this has a gradient left."""
    new_T = torch.full((length,), mean_log_ratio, requires_grad=True)
    scored = scored_of(new_T, [length], advantage, words=None if words is None else [words])
    experimental = {"clip_by_length": True, **options}
    fields = {"importance": {"mismatch": "none"}, "experimental": experimental}
    loss, figures = scored_to_loss(scored, TrainerOptions.model_validate(fields))
    (gradient_T,) = torch.autograd.grad(loss, new_T)
    assert bool((gradient_T != 0).any()) == (figures["clipped"] == 0)
    return bool((gradient_T != 0).any())


@pytest.mark.parametrize("length", [1, 4, 25, 100, 400])
def test_the_range_above_one_is_divided_by_the_root_of_the_tokens(length: int) -> None:
    bound = math.log(1 + 0.28 / math.sqrt(length))
    assert pulls(0.99 * bound, length)
    assert not pulls(1.01 * bound, length)


@pytest.mark.parametrize("length", [1, 4, 25, 100, 400])
def test_the_range_below_one_is_divided_by_the_root_of_the_tokens(length: int) -> None:
    bound = math.log(1 - 0.2 / math.sqrt(length))
    assert pulls(0.99 * bound, length, advantage=-1.0)
    assert not pulls(1.01 * bound, length, advantage=-1.0)


def test_each_call_of_a_micro_batch_has_the_range_of_its_own_length() -> None:
    moved = math.log(1.1)  # within 0.28 / sqrt(1), beyond 0.28 / sqrt(16)
    new_T = torch.full((17,), moved, requires_grad=True)
    fields = {"importance": {"mismatch": "none"}, "experimental": {"clip_by_length": True}}
    options = TrainerOptions.model_validate(fields)
    loss, figures = scored_to_loss(scored_of(new_T, [1, 16], 1.0), options)
    (gradient_T,) = torch.autograd.grad(loss, new_T)
    assert figures["clipped"] == 1.0
    assert gradient_T[0] != 0
    assert not gradient_T[1:].any()


def test_a_mean_over_words_has_the_range_of_its_words() -> None:
    # 8 tokens in 2 words: the mean over words is 4 times that over tokens, and 0.28 / sqrt(2) the range
    bound = math.log(1 + 0.28 / math.sqrt(2)) / 4
    assert pulls(0.99 * bound, 8, words=2, logprob_norm="word")
    assert not pulls(1.01 * bound, 8, words=2, logprob_norm="word")


def test_off_it_is_one_range_for_all_lengths() -> None:
    for length in (1, 100):
        assert pulls(math.log(1.27), length, clip_by_length=False)
        assert not pulls(math.log(1.29), length, clip_by_length=False)


@pytest.mark.parametrize("fields", [{"granularity": "token"}, {"experimental": {"logprob_norm": "sum"}}])
def test_asked_for_where_no_ratio_is_a_mean_it_is_refused(fields: dict[str, Any]) -> None:
    experimental = {"clip_by_length": True, **fields.get("experimental", {})}
    with pytest.raises(ValidationError, match=r"experimental\.clip_by_length has no effect here"):
        TrainerOptions.model_validate({**fields, "experimental": experimental})
