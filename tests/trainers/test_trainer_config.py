"""Owns: the trainer's options: what does not apply together is refused by name; defaults that depend on others."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from support.trainer_options import trainer_options

from trainers.config import MOVED, TrainerOptions


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"estimator": "grpo", "gae_lambda": 0.9},
            "advantage.gae_lambda has no effect here: it applies to advantage.estimator 'gae'",
        ),
        ({"estimator": "grpo", "granularity": "token", "token_lambda": 1.0}, "token_lambda has no effect here"),
        ({"token_lambda": 1.0}, "token_lambda has no effect here: it applies to granularity 'token'"),
        ({"gamma_token": 0.9}, "gamma_token has no effect here: it applies to granularity 'token'"),
        ({"granularity": "token", "adaptive_alpha": 0.1}, "adaptive_alpha has no effect here"),
        ({"estimator": "rloo", "group_weight": "step"}, "group_weight has no effect here"),
        ({"estimator": "rloo", "group_std": False}, "group_std has no effect here"),
        ({"estimator": "hrpo", "group_weight": "step"}, "group_weight has no effect here"),
        ({"estimator": "hrpo", "skip_flat_groups": True}, "skip_flat_groups has no effect here"),
        ({"group_std": True}, "group_std has no effect here"),
        ({"rae_decay": 0.5}, "experimental.rae_decay has no effect here: it applies to advantage.estimator 'rae'"),
        ({"skip_flat_groups": True}, "skip_flat_groups has no effect here"),
        (
            {"estimator": "rae", "contribution": "rank_consistency"},
            "contribution has no effect here: it applies to advantage.estimator 'at_grpo' or 'c3' or 'dr_mas' or "
            "'gae' or 'hrpo' or 'tree_grpo' only",
        ),
        ({"contribution": "rank_consistency"}, "add one to shaping, of level 'agent'"),
        ({"estimator": "rae", "skip_flat_groups": True}, "skip_flat_groups has no effect here"),
        ({"estimator": "grpo", "offline": {"mode": "filtered"}, "critic": {"hidden": 2}}, "critic has no effect here"),
        (
            {"estimator": "grpo", "critic": {"shrink": False}},  # it is warmed up, and asked by the offline phase only
            "advantage.critic.shrink has no effect here: it applies to advantage.estimator 'gae' only",
        ),
        (
            {"estimator": "grpo", "critic": {"epochs": 2}},
            "advantage.critic.epochs has no effect here: it applies to advantage.estimator 'gae', or to offline.mode "
            "'vtrace', only",
        ),
        ({"estimator": "grpo", "critic_clip": 0.2}, "experimental.critic_clip has no effect here"),
        ({"estimator": "grpo", "offline": {"mode": "importance"}, "critic_clip": 0.2}, "critic_clip has no effect"),
        (
            {"granularity": "token", "update": "simultaneous", "logprob_norm": "sum"},
            "logprob_norm has no effect here",
        ),
        ({"nll_threshold": 0.5}, "nll_threshold has no effect here: it applies to nll_coef above 0"),
        ({"mismatch": "none", "mismatch_cap": 3.0}, "mismatch_cap has no effect here"),
        ({"update": "simultaneous", "agent_order": "random"}, "agent_order has no effect here"),
        ({"proximal": "engine"}, "set importance.mismatch to 'none'"),
        ({"proximal": "engine", "mismatch": "none", "veto": 0.1}, "proximal 'engine' leaves no mismatch"),
        (
            {"proximal": "engine", "mismatch": "none", "replay": {"share": 0.5}},
            "replay.share needs importance.proximal",
        ),
        ({"mismatch": "none", "replay": {"share": 0.5}}, "replay.share needs importance.mismatch"),
        ({"replay": {"max_staleness": 2}}, "replay.max_staleness has no effect here: it applies to replay.share"),
        ({"replay": {"successes": 0.2, "max_staleness": 2}}, "replay.max_staleness has no effect here"),
        ({"success_groups": True}, "experimental.success_groups has no effect here: it applies to replay.successes"),
        (
            {"replay": {"successes": 0.3}, "success_groups": True},  # gae
            "above 0 with advantage.estimator 'at_grpo' or 'dr_mas' or 'grpo' or 'hrpo' or 'rloo' or 'tree_grpo' only",
        ),
        (
            {"replay": {"successes": 0.3}, "success_groups": True, "estimator": "c3"},  # later calls have no siblings
            "experimental.success_groups has no effect here",
        ),
        (
            {"replay": {"successes": 0.3}, "success_groups": True, "estimator": "rae"},
            "experimental.success_groups has no effect here",
        ),
        ({"estimator": "rloo", "success_traces": True}, "it applies to replay.successes above 0 only"),
        ({"replay": {"min_ess": 0.5}}, "replay.min_ess has no effect here: it applies to replay.share above 0 or"),
        ({"shaping": [{"reward": "reward", "level": "step", "weight": 1.0}]}, "shaping names a reward twice"),
        ({"shaping": [{"reward": "x", "level": "step", "weight": 1.0}] * 2}, "shaping names a reward twice"),
        (
            {"estimator": "rloo", "shaping": [{"reward": "x", "level": "agent", "weight": 1.0}]},
            "shaping of level 'agent' does not go with advantage.estimator 'rloo'",
        ),
        ({"granularity": "token", "logprob_norm": "word"}, "logprob_norm 'word' applies to granularity 'action' only"),
        ({"reward": "baseline"}, "a reward called 'baseline'"),
        ({"offline": {"mode": "filtered", "beta": 1.0}}, "offline.beta applies to offline.mode 'awr' only"),
        ({"offline": {"mode": "awr", "threshold": 1.0}}, "offline.threshold applies to offline.mode 'filtered' only"),
        ({"offline": {"mode": "topr", "ratio_cap": 2.0}}, "offline.ratio_cap applies to offline.mode 'importance' or"),
        ({"offline": {"mode": "off", "epochs": 2}}, "offline.epochs applies to"),
        ({"offline": {"mode": "asymre", "shift": 0.1}}, "less than or equal to 0"),
        (
            {"critic_loss": "squared", "critic_huber_delta": 2.0},
            "critic_huber_delta has no effect here: it applies to critic_loss 'huber'",
        ),
        (
            {"estimator": "rloo", "offline": {"mode": "filtered"}, "critic_huber_delta": 2.0},
            "experimental.critic_huber_delta has no effect here: it applies to a critic in use",
        ),
        ({"schedule": {"kind": "linear"}}, "schedule.kind 'linear' needs schedule.rounds"),
        ({"schedule": {"kind": "cosine", "rounds": 3, "warmup_rounds": 3}}, "must be larger than"),
        ({"schedule": {"floor": 0.1}}, "schedule.floor applies to kind 'linear' or 'cosine'"),
        ({"agents": {"actor": {"frozen": True, "lr": 1.0}}}, "lr has no effect on a frozen agent"),
        *(
            ({"estimator": name, "gamma": 0.9}, f"gamma below 1 does not go with advantage.estimator '{name}'")
            for name in ("grpo", "rloo", "dr_mas", "rae", "hrpo")
        ),
        *(
            ({"estimator": name, "shaping": [{"reward": "tool", "level": "step", "weight": 1.0}]}, "of level 'step'")
            for name in ("grpo", "rloo")
        ),
        ({"lamda": 1.0}, "lamda"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_options_that_do_not_apply_together_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        trainer_options(**options)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("options", "normalization", "weighting"),
    [
        ({}, "agent", "episode"),
        ({"granularity": "token"}, "agent", "token"),
        ({"estimator": "rae"}, "agent", "episode"),
        ({"estimator": "grpo"}, "none", "episode"),
        ({"estimator": "dr_mas"}, "none", "episode"),
        ({"estimator": "grpo", "normalize": "batch", "weighting": "action"}, "batch", "action"),
    ],
)
def test_a_default_that_depends_on_another_option_says_what_holds(
    options: dict[str, Any], normalization: str, weighting: str
) -> None:
    found = trainer_options(**options)
    assert (found.advantage.normalization, found.loss_weighting) == (normalization, weighting)


@pytest.mark.parametrize(("name", "now"), sorted(MOVED.items()))
def test_an_option_that_once_stood_in_the_table_itself_is_refused_with_its_new_name(name: str, now: str) -> None:
    with pytest.raises(ValidationError, match=rf"{name} is {now} now"):
        TrainerOptions.model_validate({name: 1})


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"advantage": {"critic": {"clip": 0.2}}}, "advantage.critic.clip is experimental.critic_clip now"),
        ({"advantage": {"critic": {"loss": "huber"}}}, "advantage.critic.loss is experimental.critic_loss now"),
        ({"agents": {"a": {"schedule": {}}}}, "schedule of one agent is gone: experimental.schedule is that of all"),
        ({"agents": {"a": {"weight_decay": 0.1}}}, "weight_decay of one agent is gone: experimental.weight_decay"),
    ],
)
def test_an_option_of_a_table_inside_is_refused_with_its_new_name(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TrainerOptions.model_validate(options)
    assert line in str(caught.value)


def test_what_toml_cannot_leave_empty_is_switched_off_by_name() -> None:
    assert trainer_options(kl_stop="off").objective.kl_stop is None
