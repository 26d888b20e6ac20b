"""The trainer's options. Every option either works or is refused; `extra="forbid"` refuses what is unknown.

Importable without torch, so that the CLI can read and check a configuration quickly.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LoraOptions(_Options):
    """The adapter that each agent gets on the shared base model."""

    rank: int = Field(default=8, ge=1, le=512)
    """Rank r of the update B A."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / r."""
    target_modules: tuple[str, ...] = ("q_proj", "v_proj")
    """Linear layers that get an adapter, by the end of their name. Fewer modules are served faster."""


class CriticOptions(_Options):
    """V(rollout observation): an MLP on the frozen base model's last hidden state (paper, section 4.2.1)."""

    hidden: int = Field(default=64, ge=1)
    """Width of the hidden layer."""
    lr: float = Field(default=3e-3, gt=0)
    """Adam's learning rate."""
    huber_delta: float = Field(default=1.0, gt=0)
    """Where the Huber loss turns from quadratic to linear, in units of reward."""
    warmup_epochs: int = Field(default=40, ge=0)
    """At most this many passes over the stored episodes before training; stops earlier once explained
    variance on a held-out fifth of the episodes no longer rises."""
    epochs: int = Field(default=8, ge=0)
    """Passes over each on-policy round."""


class OfflineOptions(_Options):
    """What is learned from the stored episodes before the first fresh rollout."""

    mode: Literal["filtered", "awr", "off"] = "awr"
    """`filtered`: imitate the episodes whose reward reaches `threshold`. `awr`: imitate all, each action
    weighted by exp(advantage / beta), at most `max_weight`. `off`: only the critic learns from the traces."""
    threshold: float = 1.0
    """Reward from which `filtered` imitates an episode."""
    beta: float = Field(default=0.3, gt=0)
    """Temperature of the advantage weights, in units of reward."""
    max_weight: float = Field(default=10.0, gt=0)
    """Cap of one advantage weight."""
    epochs: int = Field(default=1, ge=0)
    """Passes over the chosen actions."""
    minibatches: int = Field(default=2, ge=1)
    """Optimiser steps per pass and agent."""


class TrainerOptions(_Options):
    """One MARFT-A update, in the order in which it is computed."""

    reward: str = "reward"
    """Name of the episode reward that is trained on."""
    lora: LoraOptions = LoraOptions()
    critic: CriticOptions = CriticOptions()
    offline: OfflineOptions = OfflineOptions()

    estimator: Literal["gae", "grpo", "rloo"] = "gae"
    """Where advantages come from: GAE along D with the critic, or a group baseline over the samples of a task."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per action (one link of D)."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    normalize: Literal["none", "batch", "agent"] = "agent"
    """Advantages to zero mean and unit deviation: over all actions, or over those of each agent (Dr. MAS)."""

    logprob_norm: Literal["sum", "token"] = "token"
    """log pi(a): the sum over the action's tokens (equation 6), or that divided by their number."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound c of the dual clip for negative advantages; None turns it off."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL estimate to the base model (adapter switched off), per token."""
    kl_stop: float | None = Field(default=0.1, gt=0)
    """An agent's update of this round ends before the backward pass of a minibatch whose approximate KL (k3,
    mean per token, against the policy at the start of the round) is above this; None never stops."""
    proximal: Literal["recomputed", "engine"] = "recomputed"
    """Where pi_old comes from: a pass of the trainer at the start of the round, or the log-probs that the engine
    recorded. `engine` saves that pass; it is checked on a sample and refused where the two differ (serve in
    float32), and needs mismatch 'none', since the weight between engine and trainer would be 1."""
    mismatch: Literal["truncate", "mask", "none"] = "truncate"
    """Importance weight between engine and trainer, per action (normalised like its log-probs): capped, dropped
    when out of range, or off."""
    mismatch_cap: float = Field(default=2.0, gt=1)
    """C: weights are min(rho, C), or masked to zero outside [1/C, C]."""

    update: Literal["simultaneous", "sequential"] = "sequential"
    """`sequential`: agents one after another, each weighted by the clipped ratio of those already updated
    (HAPPO, A2PO). `simultaneous`: every agent against the policies that sampled."""
    agent_order: Literal["topological", "reverse", "random"] = "topological"
    """Order of a sequential update."""
    epochs: int = Field(default=1, ge=1)
    minibatches: int = Field(default=2, ge=1)
    """Optimiser steps per epoch and agent."""
    lr: float = Field(default=1e-3, gt=0)
    """AdamW's learning rate of the adapters."""
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    tokens_per_microbatch: int = Field(default=2048, ge=64)
    """Padded tokens that one forward and backward pass takes; bounds memory, changes no result."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for torch; None leaves torch's choice."""

    @model_validator(mode="after")
    def _options_fit_together(self) -> TrainerOptions:
        if self.estimator != "gae" and "gae_lambda" in self.model_fields_set:
            raise ValueError(f"gae_lambda applies to estimator 'gae' only, not to {self.estimator!r}")
        if self.update == "simultaneous" and "agent_order" in self.model_fields_set:
            raise ValueError("agent_order applies to update 'sequential' only")
        if self.proximal == "engine" and self.mismatch != "none":
            raise ValueError("proximal 'engine' leaves no mismatch to weight: set mismatch to 'none'")
        if self.mismatch == "none" and "mismatch_cap" in self.model_fields_set:
            raise ValueError("mismatch_cap has no effect with mismatch 'none'")
        return self
