"""Owns: the trainer's options: what does not apply together is refused by name; defaults that depend on others."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trainers.config import TrainerOptions


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"estimator": "grpo", "gae_lambda": 0.9}, "gae_lambda has no effect here: it applies to estimator 'gae'"),
        ({"estimator": "grpo", "granularity": "token", "token_lambda": 1.0}, "token_lambda has no effect here"),
        ({"token_lambda": 1.0}, "token_lambda has no effect here: it applies to granularity 'token'"),
        ({"gamma_token": 0.9}, "gamma_token has no effect here: it applies to granularity 'token'"),
        ({"granularity": "token", "adaptive_alpha": 0.1}, "adaptive_alpha has no effect here"),
        ({"estimator": "rloo", "group_weight": "step"}, "group_weight has no effect here"),
        ({"estimator": "rloo", "group_std": False}, "group_std has no effect here"),
        ({"group_std": True}, "group_std has no effect here"),
        ({"rae_decay": 0.5}, "rae_decay has no effect here: it applies to estimator 'rae'"),
        ({"skip_flat_groups": True}, "skip_flat_groups has no effect here"),
        (
            {"estimator": "rae", "contribution": "rank_consistency"},
            "contribution has no effect here: it applies to estimator 'gae', 'dr_mas' or 'at_grpo'",
        ),
        ({"contribution": "rank_consistency"}, "add one to shaping, of level 'agent'"),
        ({"estimator": "rae", "skip_flat_groups": True}, "skip_flat_groups has no effect here"),
        ({"estimator": "grpo", "offline": {"mode": "filtered"}, "critic": {"hidden": 2}}, "critic has no effect here"),
        (
            {"granularity": "token", "update": "simultaneous", "logprob_norm": "sum"},
            "logprob_norm has no effect here",
        ),
        ({"nll_threshold": 0.5}, "nll_threshold has no effect here: it applies to nll_coef above 0"),
        ({"mismatch": "none", "mismatch_cap": 3.0}, "mismatch_cap has no effect here"),
        ({"update": "simultaneous", "agent_order": "random"}, "agent_order has no effect here"),
        ({"proximal": "engine"}, "set mismatch to 'none'"),
        ({"proximal": "engine", "mismatch": "none", "veto": 0.1}, "proximal 'engine' leaves no mismatch"),
        ({"proximal": "engine", "mismatch": "none", "replay": {"share": 0.5}}, "replay.share needs proximal"),
        ({"mismatch": "none", "replay": {"share": 0.5}}, "replay.share needs mismatch"),
        ({"shaping": [{"reward": "reward", "level": "step", "weight": 1.0}]}, "shaping names a reward twice"),
        ({"shaping": [{"reward": "x", "level": "step", "weight": 1.0}] * 2}, "shaping names a reward twice"),
        (
            {"estimator": "rloo", "shaping": [{"reward": "x", "level": "agent", "weight": 1.0}]},
            "shaping of level 'agent' does not go with estimator 'rloo'",
        ),
        ({"granularity": "token", "logprob_norm": "word"}, "logprob_norm 'word' applies to granularity 'action' only"),
        ({"reward": "baseline"}, "a reward called 'baseline'"),
        ({"offline": {"mode": "filtered", "beta": 1.0}}, "offline.beta applies to offline.mode 'awr' only"),
        ({"offline": {"mode": "awr", "threshold": 1.0}}, "offline.threshold applies to offline.mode 'filtered' only"),
        ({"offline": {"mode": "topr", "ratio_cap": 2.0}}, "offline.ratio_cap applies to offline.mode 'importance' or"),
        ({"offline": {"mode": "off", "epochs": 2}}, "offline.epochs applies to"),
        ({"offline": {"mode": "asymre", "shift": 0.1}}, "less than or equal to 0"),
        ({"critic": {"loss": "squared", "huber_delta": 2.0}}, "critic.huber_delta applies to critic.loss 'huber' only"),
        ({"schedule": {"kind": "linear"}}, "schedule.kind 'linear' needs schedule.rounds"),
        ({"schedule": {"kind": "cosine", "rounds": 3, "warmup_rounds": 3}}, "must be larger than"),
        ({"schedule": {"floor": 0.1}}, "schedule.floor applies to kind 'linear' or 'cosine'"),
        ({"agents": {"actor": {"frozen": True, "lr": 1.0}}}, "lr has no effect on a frozen agent"),
        ({"lamda": 1.0}, "lamda"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_options_that_do_not_apply_together_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TrainerOptions.model_validate(options)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("options", "normalization", "weighting", "statistics"),
    [
        ({}, "agent", "episode", "trajectory"),
        ({"granularity": "token"}, "agent", "token", "trajectory"),
        ({"estimator": "rae"}, "agent", "episode", "trajectory"),
        ({"estimator": "grpo"}, "none", "episode", "trajectory"),
        ({"estimator": "dr_mas"}, "none", "episode", "step"),
        ({"estimator": "dr_mas", "group_weight": "trajectory"}, "none", "episode", "trajectory"),
        ({"estimator": "grpo", "normalize": "batch", "weighting": "action"}, "batch", "action", "trajectory"),
    ],
)
def test_a_default_that_depends_on_another_option_says_what_holds(
    options: dict[str, Any], normalization: str, weighting: str, statistics: str
) -> None:
    found = TrainerOptions.model_validate(options)
    assert (found.normalization, found.loss_weighting, found.statistics_weight) == (
        normalization,
        weighting,
        statistics,
    )


def test_what_toml_cannot_leave_empty_is_switched_off_by_name() -> None:
    assert TrainerOptions.model_validate({"kl_stop": "off"}).kl_stop is None
