"""The trainer's options. Every option either works or is refused; `extra="forbid"` refuses what is unknown.

An option whose default depends on another one is None until set; the property beside it says what then holds.
Importable without torch, so that the CLI can read and check a configuration quickly.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Estimator = Literal["gae", "grpo", "rloo", "dr_mas", "at_grpo", "rae"]
Normalization = Literal["none", "batch", "agent"]
Granularity = Literal["action", "token"]
Weighting = Literal["episode", "action", "token"]
GroupWeight = Literal["trajectory", "step"]

_STANDARDISED = ("grpo", "dr_mas", "at_grpo")  # estimators that divide by a deviation of their own
_EACH_FOR_ITSELF = ("gae", "dr_mas", "at_grpo")  # whose baselines hold for one agent and this round alone


def _off_to_none(value: Any) -> Any:
    """TOML has no None."""
    return None if value == "off" else value


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


class ScheduleOptions(_Options):
    """The learning rate over on-policy rounds, as a factor; it changes between rounds, never inside one."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: keep the rate, or bring it down to `floor`, which it reaches after `rounds` rounds."""
    warmup_rounds: int = Field(default=0, ge=0)
    """Rounds over which the rate rises from 1 / (warmup_rounds + 1) to 1."""
    rounds: int | None = Field(default=None, ge=1)
    """After how many rounds the rate is at `floor`, where it stays; needed by linear and cosine."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Lowest factor."""

    @model_validator(mode="after")
    def _options_fit_together(self) -> ScheduleOptions:
        if self.kind == "constant":
            for name in ("rounds", "floor"):
                if name in self.model_fields_set:
                    raise ValueError(f"schedule.{name} applies to kind 'linear' or 'cosine', not to 'constant'")
        elif self.rounds is None:
            raise ValueError(f"schedule.kind {self.kind!r} needs schedule.rounds, where the rate reaches its floor")
        elif self.rounds <= self.warmup_rounds:
            raise ValueError("schedule.rounds must be larger than schedule.warmup_rounds")
        return self


class AgentOptions(_Options):
    """What is different for one agent. What is left out is as for all agents."""

    adapter: str | None = Field(default=None, min_length=1)
    """Name of its adapter: agents that give the same name share one. None: an adapter of its own."""
    frozen: bool = False
    """Its adapter stays as it is; its actions count as part of the environment."""
    lr: float | None = Field(default=None, gt=0)
    """Learning rate of its adapter; absent: `lr`."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of its adapter; absent: `weight_decay`."""
    schedule: ScheduleOptions | None = None
    """Schedule of its adapter; absent: `schedule`."""

    @model_validator(mode="after")
    def _options_fit_together(self) -> AgentOptions:
        if self.frozen:
            for name in ("lr", "weight_decay", "schedule"):
                if name in self.model_fields_set:
                    raise ValueError(f"{name} has no effect on a frozen agent")
        return self


class ShapingTerm(_Options):
    """A recorded reward that is added to the team reward of the game."""

    reward: str = Field(min_length=1)
    """Its name in the store."""
    level: Literal["episode", "step", "agent"]
    """`episode`: added to the team reward. `step`: arrives with the action that it points at, and everything
    before it in D shares it. `agent`: the private reward of one node, which reaches that node's actions only."""
    weight: float
    """Factor; negative for a penalty."""


class CriticOptions(_Options):
    """V(rollout observation): an MLP on the frozen base model's last hidden state (paper, section 4.2.1)."""

    sharing: Literal["shared", "agent"] = "shared"
    """One value function for all agents of a base model, told apart by a one-hot; or one for each agent."""
    hidden: int = Field(default=64, ge=1)
    """Width of the hidden layer."""
    lr: float = Field(default=3e-3, gt=0)
    """Adam's learning rate."""
    loss: Literal["huber", "squared"] = "huber"
    """Loss of a value against its target."""
    huber_delta: float = Field(default=1.0, gt=0)
    """Where the Huber loss turns from quadratic to linear, in units of reward."""
    clip: float | None = Field(default=None, gt=0)
    """How far one round may move a value from where it was before the gradient is cut (PPO's clipped value loss);
    None does not clip."""
    warmup_epochs: int = Field(default=40, ge=0)
    """At most this many passes over the stored episodes before training; stops earlier once explained
    variance on a held-out fifth of the episodes no longer rises."""
    epochs: int = Field(default=8, ge=0)
    """Passes over each on-policy round."""

    @model_validator(mode="after")
    def _options_fit_together(self) -> CriticOptions:
        if self.loss == "squared" and "huber_delta" in self.model_fields_set:
            raise ValueError("critic.huber_delta applies to critic.loss 'huber' only")
        return self


_OFFLINE_ONLY: dict[str, tuple[str, ...]] = {
    "threshold": ("filtered",),
    "beta": ("awr",),
    "max_weight": ("awr",),
    "shift": ("asymre",),
    "ratio_cap": ("importance", "vtrace"),
    "epochs": ("filtered", "awr", "asymre", "topr", "importance", "vtrace"),
    "minibatches": ("filtered", "awr", "asymre", "topr", "importance", "vtrace"),
    "retokenise": ("filtered",),
}


_VALUED = ("awr", "importance", "vtrace")  # offline modes that ask a critic


class OfflineOptions(_Options):
    """What is learned from the stored episodes before the first fresh rollout."""

    mode: Literal["filtered", "awr", "asymre", "topr", "importance", "vtrace", "off"] = "awr"
    """`filtered`: imitate the episodes whose reward reaches `threshold`. `awr`: imitate all, each action
    weighted by exp(advantage / beta), at most `max_weight`. `asymre`: (return - (mean return + shift)) log pi.
    `topr`: better than average at full weight, worse than average at min(pi / mu, 1). `importance`: policy
    gradient weighted by min(pi / mu, ratio_cap). `vtrace`: the same along V-trace's targets. `off`: only the
    critic learns from the traces. The last three but `off` need behaviour log-probs."""
    threshold: float = 1.0
    """Reward from which `filtered` imitates an episode."""
    beta: float = Field(default=0.3, gt=0)
    """Temperature of the advantage weights, in units of reward."""
    max_weight: float = Field(default=10.0, gt=0)
    """Cap of one advantage weight."""
    shift: float = Field(default=-0.1, le=0)
    """How far AsymRE's baseline lies below the mean return, in units of reward; above it learning collapses."""
    ratio_cap: float = Field(default=1.0, gt=0)
    """Cap of one importance weight (V-trace: rho-bar and c-bar)."""
    epochs: int = Field(default=1, ge=0)
    """Passes over the chosen actions."""
    minibatches: int = Field(default=2, ge=1)
    """Optimiser steps per pass and agent."""
    retokenise: bool = False
    """Whether `filtered` also imitates calls whose token ids no engine told (a hosted model, somebody else's traces):
    their messages go through the base model's chat template and tokenizer. No other mode takes such calls."""

    @model_validator(mode="after")
    def _options_fit_together(self) -> OfflineOptions:
        for name, modes in _OFFLINE_ONLY.items():
            if name in self.model_fields_set and self.mode not in modes:
                raise ValueError(f"offline.{name} applies to offline.mode {' or '.join(map(repr, modes))} only")
        return self

    @property
    def needs_behaviour(self) -> bool:
        """Whether the loss divides by what the engine said when it sampled."""
        return self.mode in ("topr", "importance", "vtrace")


class ReplayOptions(_Options):
    """Stored episodes beside the fresh ones of an on-policy round (decoupled PPO), and what may be replayed at all."""

    share: float = Field(default=0.0, ge=0, le=0.9)
    """At most this share of a round's episodes is older than the round; 0 learns from fresh ones only."""
    max_staleness: int = Field(default=4, ge=1)
    """Adapter versions that an action may be behind the one that is trained."""
    min_ess: float = Field(default=0.3, ge=0, le=1)
    """Effective sample size of the importance weights, as a share of the actions, below which an agent's
    replayed actions are dropped."""
    lineage: Literal["same", "known", "any"] = "known"
    """`same`: base model, tokenizer, chat template and tool schemas must be recorded, and be those of today. `known`:
    what is recorded must agree; what is not (traces from elsewhere) passes. `any`: not looked at."""


class TrainerOptions(_Options):
    """One MARFT update, in the order in which it is computed."""

    reward: str = "reward"
    """Name of the episode reward that is trained on: the team's."""
    truncated_reward: Literal["so_far", "final"] = "so_far"
    """What the team reward of a run that was cut short is. `so_far`: what it had earned until then, so the critic's
    value of where it stood is added. `final`: its score, as if it had ended; to be taken where being cut short is the
    rule, since with gamma 1 the values would then grow from round to round."""
    shaping: tuple[ShapingTerm, ...] = ()
    """Further rewards that reach the loss."""
    lora: LoraOptions = LoraOptions()
    critic: CriticOptions = CriticOptions()
    offline: OfflineOptions = OfflineOptions()
    replay: ReplayOptions = ReplayOptions()
    agents: dict[str, AgentOptions] = Field(default_factory=dict)
    """By node name: adapters that are shared or frozen, and learning rates of their own."""

    granularity: Granularity = "action"
    """MARFT-A: one LLM call is one decision. MARFT-T: one token is."""
    estimator: Estimator = "gae"
    """Where advantages come from: GAE along D with the critic (MARFT), or a baseline without one. `grpo` and `rloo`:
    the samples of a task. `dr_mas`: the samples of a task, each agent for itself. `at_grpo`: the samples of a
    task, agent and turn. `rae`: a running mean of each agent's returns."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per action (one link of D)."""
    gamma_token: float = Field(default=1.0, gt=0, le=1)
    """Discount per token within an action (MARFT-T). 1, because 0.99 leaves 0.6 % of a reward 512 tokens away."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Lambda of GAE per link of D."""
    token_lambda: float | Literal["adaptive"] = 1.0
    """Lambda per token within an action (MARFT-T). 1, because (0.95)^100 is 0.6 %: what follows the action would not
    reach its first tokens. `adaptive`: 1 - 1 / (adaptive_alpha * tokens), VAPO's length-adaptive lambda."""
    adaptive_alpha: float = Field(default=0.05, gt=0)
    """alpha of the adaptive token lambda."""
    group_weight: GroupWeight | None = None
    """How the mean and deviation of `grpo` and `dr_mas` count: each trajectory once, or each action once. None:
    `trajectory` for grpo, `step` for dr_mas."""
    group_std: bool = True
    """Whether group estimators divide by the deviation; without it groups of little spread weigh less."""
    rae_decay: float = Field(default=0.95, ge=0, lt=1)
    """Decay of RAE's running baseline."""
    skip_flat_groups: bool = False
    """Leave out tasks whose samples all earned the same (DAPO's dynamic sampling, without resampling)."""
    contribution: Literal["equal", "rank_consistency"] = "equal"
    """How much of the team's reward counts for each agent in rounds. `equal`: all of it. `rank_consistency`: more for
    an agent whose own rewards (shaping of level `agent`) rank the samples of a task as the team's do (CoMAM)."""
    normalize: Normalization | None = None
    """Advantages to zero mean and unit deviation: over all, or over those of each agent. None: `agent` for gae
    and rae, `none` for estimators that divide by a deviation of their own, and for rloo."""

    logprob_norm: Literal["sum", "token", "word"] = "token"
    """log pi(a) of MARFT-A: the sum over the action's tokens (equation 6), or that divided by the number of
    its tokens or of its words (the tokenizer's text, split at white space)."""
    weighting: Weighting | None = None
    """What counts the same in the loss: every episode, so that long runs do not dominate; every action; or every
    token (DAPO). None: `episode` for MARFT-A, `token` for MARFT-T. In the offline phase `action` divides an
    action's log-likelihood by its length."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far below 1 the ratio new / old may go before a negative advantage stops pushing."""
    clip_high: float = Field(default=0.28, gt=0)
    """How far above 1 it may go before a positive advantage stops pulling."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound c of the dual clip for negative advantages; None turns it off."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the policy's entropy, per token, over the whole vocabulary."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the base model (adapter switched off), per token: k3 times the ratio to the
    policy at the start of the round. On fresh actions its gradient is that of KL(policy || base)."""
    kl_stop: Annotated[float | None, BeforeValidator(_off_to_none)] = Field(default=0.1, gt=0)
    """An adapter's update of this round ends before the backward pass of a minibatch whose approximate KL (k3,
    mean per token, against the policy at the start of the round) is above this; "off" (None in Python) never
    stops."""
    kl_limit: float | None = Field(default=None, gt=0)
    """How far a round may move the team: the KL (k3, mean per token of the round's actions) between the policy at its
    start and after all of its steps, summed over the adapters that it updates, of which each has an equal part. A step
    that went further is shortened along its line (backtracking, as in HATRPO). None: the last step of a round is as
    long as the optimiser made it, and nothing looks at it."""
    nll_coef: float = Field(default=0.0, ge=0)
    """Weight of the negative log-likelihood of actions in episodes whose team reward reaches nll_threshold (VAPO)."""
    nll_threshold: float = 1.0
    """Team reward, as recorded, from which an episode is imitated."""
    proximal: Literal["recomputed", "engine"] = "recomputed"
    """Where pi_old comes from: a pass of the trainer at the start of the round, or the log-probs that the engine
    recorded. `engine` saves that pass; it is checked on a sample and refused where the two differ (serve in
    float32), and needs mismatch 'none', since the weight between engine and trainer would be 1."""
    mismatch: Literal["truncate", "mask", "none"] = "truncate"
    """Importance weight between engine and trainer, per action (normalised like its log-probs) or per token,
    as the granularity says: capped, dropped when out of range, or off."""
    mismatch_cap: float = Field(default=2.0, gt=1)
    """C: weights are min(rho, C), or masked to zero outside [1/C, C]."""
    engine_tolerance: float = Field(default=0.5, gt=0)
    """How far engine and trainer may differ on fresh actions, in nats per token, before the update is refused: beyond
    it they score other tokens, another adapter or another model. A bfloat16 engine differs by 0.03. With proximal
    'engine' 0.01 holds if that is less."""
    geometric_mask: float | None = Field(default=None, gt=1)
    """Drop an action whose mean ratio per token between trainer and engine, exp(mean log rho), is outside
    [1/g, g]."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """Drop an action with a token that the trainer finds less than this times as likely as the engine did."""
    off_policy_mask: float | None = Field(default=None, gt=0)
    """Drop an action of negative advantage once mean(log mu - log pi) per token is above this (DeepSeek-V3.2)."""

    update: Literal["simultaneous", "sequential", "alternating"] = "sequential"
    """`sequential`: agents one after another, each weighted by the clipped ratio of those already updated
    (HAPPO, A2PO). `simultaneous`: every agent against the policies that sampled. `alternating`: one adapter a
    round, so that the next one learns from rollouts sampled after it."""
    agent_order: Literal["topological", "reverse", "random"] = "topological"
    """Order of a sequential or alternating update."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a round."""
    minibatches: int = Field(default=2, ge=1)
    """Optimiser steps per epoch and agent."""
    lr: float = Field(default=1e-3, gt=0)
    """AdamW's learning rate of the adapters."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's, of the adapters."""
    schedule: ScheduleOptions = ScheduleOptions()
    max_grad_norm: float = Field(default=1.0, gt=0)
    """A step's gradient is scaled down to this norm."""
    tokens_per_microbatch: int = Field(default=2048, ge=64)
    """Tokens that one forward and backward pass takes (a longer call gets a pass of its own); bounds memory, changes no
    result. What calls begin with alike counts once; models that cannot share it count padding too."""
    activation_checkpointing: bool = False
    """Whether decoder layers keep their input only and compute the rest again for the backward pass: less memory for
    more time, the same result."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is some."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for torch; None leaves torch's choice."""

    @property
    def normalization(self) -> Normalization:
        """`normalize`, or what holds where it was left out."""
        if self.normalize is not None:
            return self.normalize
        return "agent" if self.estimator in ("gae", "rae") else "none"

    @property
    def loss_weighting(self) -> Weighting:
        """`weighting`, or what holds where it was left out."""
        if self.weighting is not None:
            return self.weighting
        return "episode" if self.granularity == "action" else "token"

    @property
    def statistics_weight(self) -> GroupWeight:
        """`group_weight`, or what holds where it was left out."""
        if self.group_weight is not None:
            return self.group_weight
        return "step" if self.estimator == "dr_mas" else "trajectory"

    @property
    def uses_critic(self) -> bool:
        """Whether anything asks for values."""
        return self.estimator == "gae" or self.offline.mode in _VALUED

    @property
    def masks_actions(self) -> bool:
        """Whether some actions may be dropped for what engine and trainer say of them."""
        return any(mask is not None for mask in (self.geometric_mask, self.veto, self.off_policy_mask))

    @model_validator(mode="after")
    def _options_fit_together(self) -> TrainerOptions:
        for names, applies, where in (
            (("gae_lambda", "gamma_token", "token_lambda"), self.estimator == "gae", "estimator 'gae'"),
            (("gamma_token", "token_lambda"), self.granularity == "token", "granularity 'token'"),
            (("adaptive_alpha",), isinstance(self.token_lambda, str), "token_lambda 'adaptive'"),
            (("group_weight",), self.estimator in ("grpo", "dr_mas"), "estimator 'grpo' or 'dr_mas'"),
            (("group_std",), self.estimator in _STANDARDISED, "estimator 'grpo', 'dr_mas' or 'at_grpo'"),
            (("rae_decay",), self.estimator == "rae", "estimator 'rae'"),
            (("skip_flat_groups",), self.estimator not in ("gae", "rae"), "estimators over groups of samples"),
            (("contribution",), self.estimator in _EACH_FOR_ITSELF, "estimator 'gae', 'dr_mas' or 'at_grpo'"),
            (("critic",), self.uses_critic, "a critic in use"),
            (("logprob_norm",), self.granularity == "action" or self.update == "sequential", "granularity 'action'"),
            (("nll_threshold",), self.nll_coef > 0, "nll_coef above 0"),
            (("mismatch_cap",), self.mismatch != "none", "mismatch 'truncate' or 'mask'"),
            (("agent_order",), self.update != "simultaneous", "update 'sequential' or 'alternating'"),
        ):
            for name in names:
                if name in self.model_fields_set and not applies:
                    raise ValueError(f"{name} has no effect here: it applies to {where} only")
        if self.logprob_norm == "word" and self.granularity == "token":
            raise ValueError("logprob_norm 'word' applies to granularity 'action' only: take 'token' or 'sum'")
        if self.proximal == "engine" and (self.mismatch != "none" or self.masks_actions):
            raise ValueError(
                "proximal 'engine' leaves no mismatch to weight: set mismatch to 'none', and no geometric_mask, veto "
                "or off_policy_mask"
            )
        if self.proximal == "engine" and self.replay.share > 0:
            raise ValueError("replay.share needs proximal 'recomputed': old episodes were sampled by other policies")
        if self.replay.share > 0 and self.mismatch == "none":
            raise ValueError("replay.share needs mismatch 'truncate' or 'mask': old episodes must be weighted")
        if self.estimator in ("grpo", "rloo") and any(term.level == "agent" for term in self.shaping):
            raise ValueError(
                f"shaping of level 'agent' does not go with estimator {self.estimator!r}, whose baseline is that of "
                "all agents: take 'gae', 'dr_mas', 'at_grpo' or 'rae'"
            )
        if self.contribution != "equal" and not any(term.level == "agent" for term in self.shaping):
            raise ValueError(
                f"contribution {self.contribution!r} compares each agent's own reward with the team's: add one to "
                "shaping, of level 'agent'"
            )
        shaped = [term.reward for term in self.shaping]
        if "baseline" in (self.reward, *shaped):
            raise ValueError("a reward called 'baseline' cannot be told from the critic's part in reports: rename it")
        if len({self.reward, *shaped}) != 1 + len(shaped):
            raise ValueError("shaping names a reward twice, or the team reward: give each one weight")
        return self
