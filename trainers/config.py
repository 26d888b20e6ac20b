"""The trainer's options, by group. Every option either works or is refused; `extra="forbid"` refuses what is unknown.

    advantage      where advantages come from: the estimator, its discounts, the critic
    objective      the surrogate, its clip, how far a round may move, who is updated when
    importance     what is done about engine and trainer, or old and new policies, differing
    optimizer      rates, steps, gradients
    offline        what is learned from stored episodes before the first round
    replay         stored episodes beside the fresh ones of a round
    system         memory and device; changes no result, but for a base model in 4 bits
    experimental   works and is tested, but no measurement of ours shows that it pays

An option whose default depends on another one is None until set; the property beside it says what then holds.
Importable without torch, so that the CLI can read and check a configuration quickly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from trainers.advantages.estimator import Estimator, estimators, name_to_estimator
from trainers.advantages.settings import EstimatorSettings, GroupWeight, Normalization
from trainers.rewards import ShapingTerm

Granularity = Literal["action", "token"]
Weighting = Literal["episode", "action", "token"]


def _off_to_none(value: Any) -> Any:
    """TOML has no None."""
    return None if value == "off" else value


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LoraOptions(_Options):
    """The adapter that each agent gets on the shared base model."""

    rank: int = Field(default=8, ge=1, le=512)
    """Rank r of the update B A."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / r."""
    target_modules: tuple[str, ...] = ("q_proj", "v_proj")
    """Linear layers that get an adapter, by the end of their name. Fewer modules are served faster."""


class AgentOptions(_Options):
    """What is different for one agent. What is left out is as for all agents."""

    adapter: str | None = Field(default=None, min_length=1)
    """Name of its adapter: agents that give the same name share one. None: an adapter of its own."""
    frozen: bool = False
    """Nothing is learned from its actions, which count as part of the environment. Its adapter stays as it is, or is
    what an agent that learns and shares it makes of it."""
    lr: float | None = Field(default=None, gt=0)
    """Learning rate of its adapter; absent: `optimizer.lr`."""

    @model_validator(mode="before")
    @classmethod
    def _gone_options_are_named(cls, data: Any) -> Any:
        for name in ("weight_decay", "schedule"):
            if isinstance(data, dict) and name in data:
                raise ValueError(f"{name} of one agent is gone: experimental.{name} is that of all")
        return data

    @model_validator(mode="after")
    def _options_fit_together(self) -> AgentOptions:
        if self.frozen and "lr" in self.model_fields_set:
            raise ValueError("lr has no effect on a frozen agent")
        return self


class CriticOptions(_Options):
    """V(rollout observation): an MLP on the frozen base model's last hidden state (paper, section 4.2.1)."""

    sharing: Literal["shared", "agent"] = "shared"
    """One value function for all agents of a base model, told apart by a one-hot; or one for each agent."""
    hidden: int = Field(default=64, ge=1)
    """Width of the hidden layer."""
    lr: float = Field(default=3e-3, gt=0)
    """Adam's learning rate."""
    warmup_epochs: int = Field(default=40, ge=0)
    """At most this many passes over the stored episodes before training; stops earlier once explained
    variance on a held-out fifth of the episodes no longer rises."""
    epochs: int = Field(default=8, ge=0)
    """Passes over each on-policy round."""
    shrink: bool = True
    """Whether a round's values are drawn towards the mean return by what they explain of the returns of other tasks, so
    that a critic that explains nothing is no worse than a constant. false: the paper's plain values."""


class AdvantageOptions(_Options):
    """Where advantages come from."""

    estimator: str = "gae"
    """GAE along D with the critic (MARFT), or a baseline without one. `grpo` and `rloo`: the samples of a task.
    `dr_mas`: the samples of a task, each agent for itself. `at_grpo`: siblings, calls that answer one prompt; without
    forks the samples of a task, agent and turn. `c3`: siblings only. `tree_grpo`: siblings and the task's other trees.
    `rae`: a running mean of each agent's returns. `advantage_alignment`: in games with sides, the samples of a task,
    agent and turn, and what a move is worth to the rivals. `mars2`: in a search for programs, all calls of the task's
    trees, each paid by the step reward that arrived with it. `hrpo`: the samples of a task, each agent for itself, and
    what each call earned by itself. Or a class of your own, as `package.module:Class` or `path/file.py:Class`."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per action (one link of D)."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Lambda of GAE per link of D."""
    normalize: Normalization | None = None
    """Advantages to zero mean and unit deviation: over all, or over those of each agent. None: `agent` for gae
    and rae, `none` for the others, most of which divide by a deviation of their own."""
    skip_flat_groups: bool = False
    """Leave out tasks whose samples all earned the same (DAPO's dynamic sampling; train.refill resamples)."""
    contribution: Literal["equal", "rank_consistency"] = "equal"
    """How much of the team's reward counts for each agent in rounds. `equal`: all of it. `rank_consistency`: more for
    an agent whose own rewards (shaping of level `agent`) rank the samples of a task as the team's do (CoMAM)."""
    critic: CriticOptions = CriticOptions()

    @property
    def estimator_class(self) -> type[Estimator]:
        """The class that `estimator` names, which says what it needs."""
        return name_to_estimator(self.estimator)

    @property
    def normalization(self) -> Normalization:
        """`normalize`, or what holds where it was left out."""
        return self.normalize if self.normalize is not None else self.estimator_class.normalization

    @model_validator(mode="after")
    def _the_estimator_is_one(self) -> AdvantageOptions:
        if "estimator" in self.model_fields_set:
            assert self.estimator_class  # raises where there is none
        return self


class ObjectiveOptions(_Options):
    """The loss of an update, and how far and in which order it moves the adapters."""

    weighting: Weighting | None = None
    """What counts the same in the loss: every episode, so that long runs do not dominate; every action; or every
    token (DAPO). None: `episode` for MARFT-A, `token` for MARFT-T. In the offline phase `action` divides an
    action's log-likelihood by its length."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far below 1 the ratio new / old may go before a negative advantage stops pushing."""
    clip_high: float = Field(default=0.28, gt=0)
    """How far above 1 it may go before a positive advantage stops pulling."""
    negative_weight: float = Field(default=0.0, ge=0, le=1)
    """What a unit of negative advantage counts beside one of positive advantage. Pushing down what was sampled says
    nothing of what should be sampled instead: at 1 it undoes what the traces and the first rounds taught. 1 is PPO's
    surrogate; 0 learns from what was better than expected only."""
    kl_stop: Annotated[float | None, BeforeValidator(_off_to_none)] = Field(default=None, gt=0)
    """An adapter's update of this round ends before the backward pass of a minibatch whose approximate KL (k3,
    mean per token, against the policy at the start of the round) is above this; "off" (None in Python) never
    stops."""
    kl_target: Annotated[float | None, BeforeValidator(_off_to_none)] = Field(default=None, gt=0)
    """How far a round should move the team, as a multiple of what the round says: the relative entropy between its
    better actions and all of them, with the runs in which it did not act. It is counted in nats a call (k2: half of a
    call's squared log-ratios, added up, between the policy at the round's start and after all of its steps), and each
    adapter that acts has an equal part. The adapter's rate is raised or lowered until its steps are near that, and a
    step beyond twice of it is shortened along its line (backtracking, as in HATRPO). "off" (None in Python): the rate
    is `optimizer.lr`, and a step as long as the optimiser made it."""
    update: Literal["simultaneous", "sequential", "alternating"] = "sequential"
    """`sequential`: agents one after another, each weighted by the clipped ratio of those already updated
    (HAPPO, A2PO). `simultaneous`: every agent against the policies that sampled. `alternating`: one adapter a
    round, so that the next one learns from rollouts sampled after it."""


class ImportanceOptions(_Options):
    """What is done about engine and trainer saying different things of the same tokens."""

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

    @model_validator(mode="after")
    def _options_fit_together(self) -> ImportanceOptions:
        if "mismatch_cap" in self.model_fields_set and self.mismatch == "none":
            raise ValueError("mismatch_cap has no effect here: it applies to mismatch 'truncate' or 'mask' only")
        return self


class OptimizerOptions(_Options):
    """Rates, steps and gradients of the adapters."""

    lr: float = Field(default=1e-3, gt=0)
    """AdamW's learning rate of the adapters, at most: a round most of whose actions did well has less of it, by how
    little better these were."""
    epochs: int = Field(default=2, ge=1)
    """Passes over a round."""
    minibatch_actions: int = Field(default=2, ge=1)
    """Actions of one optimiser step, of those that have a part in the loss. A round of an adapter is cut into equal
    parts of about so many; one with fewer takes one step an epoch."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """A step's gradient is scaled down to this norm."""


_OFFLINE_ONLY: dict[str, tuple[str, ...]] = {
    "threshold": ("filtered",),
    "reward": ("filtered",),
    "beta": ("awr",),
    "max_weight": ("awr",),
    "shift": ("asymre",),
    "ratio_cap": ("importance", "vtrace"),
    "epochs": ("filtered", "awr", "asymre", "topr", "importance", "vtrace"),
    "minibatch_actions": ("filtered", "awr", "asymre", "topr", "importance", "vtrace"),
    "kl_budget": ("filtered", "awr", "asymre", "topr", "importance", "vtrace"),
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
    reward: str | None = Field(default=None, min_length=1)
    """Name of the team reward that `filtered` chooses by, where that is not the one that rounds are paid by: a judge's
    (`marft-bridge rank`), an imported score, a person's marks (`marft-bridge traces mark`). An episode without it is
    not imitated."""
    beta: float = Field(default=0.3, gt=0)
    """Temperature of the advantage weights, as a share of the largest less the smallest return of the stored runs."""
    max_weight: float = Field(default=10.0, gt=0)
    """Cap of one advantage weight."""
    shift: float = Field(default=-0.1, le=0)
    """How far AsymRE's baseline lies below the mean return, as a share of the largest less the smallest return of the
    stored runs; above it learning collapses."""
    ratio_cap: float = Field(default=1.0, gt=0)
    """Cap of one importance weight (V-trace: rho-bar and c-bar)."""
    epochs: int = Field(default=8, ge=0)
    """Passes over the chosen actions, at most: once two in a row have not made the better actions of held-out tasks
    more likely, none follows. What comes after the pass that made them likeliest is taken back."""
    minibatch_actions: int = Field(default=16, ge=1)
    """Actions of one optimiser step."""
    kl_budget: float = Field(default=8.0, gt=0)
    """How far the phase may move an adapter before it ends: nats a call (k3, summed over its tokens), on calls that its
    untrained policy sampled."""
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
    """At most this share of a round's episodes is older than the round, whatever they earned, and weighed by how far
    the policy has moved since; 0 learns from fresh ones only."""
    successes: float = Field(default=0.0, ge=0, le=0.9)
    """At most this share of a round's episodes are older ones of this run, the collected ones among them, that earned
    more than their task usually does; the newer, and the rarer their success, the sooner one is drawn (RLEP, ExGRPO).
    Each is made likelier than it was when it was sampled, up to `clip_high`, and has no part in the baseline unless
    `experimental.success_groups` gives it one."""
    max_staleness: int = Field(default=4, ge=1)
    """Adapter versions that an action may be behind the one that is trained; successes may be of any."""
    min_ess: float = Field(default=0.3, ge=0, le=1)
    """Effective sample size of the importance weights, as a share of the actions, below which an agent's
    replayed actions are dropped."""
    lineage: Literal["same", "known", "any"] = "known"
    """`same`: base model, tokenizer, chat template and tool schemas must be recorded, and be those of today. `known`:
    what is recorded must agree; what is not (traces from elsewhere) passes. `any`: not looked at."""

    @property
    def round_share(self) -> float:
        """The share of a round's episodes that may be older than it."""
        return self.share or self.successes

    @model_validator(mode="after")
    def _options_fit_together(self) -> ReplayOptions:
        if self.share and self.successes:
            raise ValueError(
                "replay.share draws from all older episodes, replay.successes from the better ones: set one"
            )
        return self


class SystemOptions(_Options):
    """Memory and device; none of them changes a result but by roundings, those of `load_in_4bit` included."""

    tokens_per_microbatch: int = Field(default=2048, ge=64)
    """Tokens that one forward and backward pass takes (a longer call gets a pass of its own); bounds memory, changes no
    result. What calls begin with alike counts once; models that cannot share it count padding too."""
    activation_checkpointing: bool = False
    """Whether decoder layers keep their input only and compute the rest again for the backward pass: less memory for
    more time, the same result."""
    load_in_4bit: bool = False
    """Whether the trainer's base model holds its linear layers in 4 bits (QLoRA: NF4 with double quantisation), about
    0.52 bytes a number. Embeddings, norms, the output layer, adapters and their moments stay as they are, and so do the
    model server and a scoring teacher. Needs bitsandbytes: `pip install 'marft-bridge[qlora]'`."""
    shard_base: bool = False
    """Whether the decoder layers of the trainer's base model are dealt out over the learners, for a base that one card
    does not hold: each keeps an equal part of every layer, and has it whole while it computes it (FSDP2). The same
    result, for more messages. Needs train.learners of 2 or more; not with load_in_4bit."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda|cuda:\d{1,3})$")
    """`cpu`, `cuda`, or one card by number, as `cuda:1`; `auto` takes CUDA where there is some. In bridge.toml
    train.devices names the card."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for torch; None leaves torch's choice."""

    @model_validator(mode="after")
    def _weights_can_be_dealt_out(self) -> SystemOptions:
        if self.shard_base and self.load_in_4bit:
            raise ValueError("system.shard_base deals out whole weights, so it does not go with system.load_in_4bit")
        return self


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


class ExperimentalOptions(_Options):
    """What works and is tested, but of which no measurement of ours shows that it pays: none is needed to train."""

    schedule: ScheduleOptions = ScheduleOptions()
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's, of the adapters."""
    logprob_norm: Literal["sum", "token", "word"] = "token"
    """log pi(a) of MARFT-A: the sum over the action's tokens (equation 6), or that divided by the number of
    its tokens or of its words (the tokenizer's text, split at white space)."""
    agent_order: Literal["topological", "reverse", "random"] = "topological"
    """Order of a sequential update; of an alternating one `topological` is the order of the nodes, `reverse` the other
    way round, in every round."""
    clip_by_length: bool = False
    """Whether the clip's range is divided by the square root of a call's tokens where the ratio is a mean over them
    (MARFT-A with logprob_norm `token` or `word`), so that it binds on long calls as on short ones (FSPO)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound c of the dual clip for negative advantages; None turns it off."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the policy's entropy, per token, over the whole vocabulary."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the base model (adapter switched off), per token: k3 times the ratio to the
    policy at the start of the round. On fresh actions its gradient is that of KL(policy || base)."""
    nll_coef: float = Field(default=0.0, ge=0)
    """Weight of the negative log-likelihood of actions in episodes whose team reward reaches nll_threshold (VAPO)."""
    nll_threshold: float = 1.0
    """Team reward, as recorded, from which an episode is imitated."""
    geometric_mask: float | None = Field(default=None, gt=1)
    """Drop an action whose mean ratio per token between trainer and engine, exp(mean log rho), is outside
    [1/g, g]."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """Drop an action with a token that the trainer finds less than this times as likely as the engine did."""
    off_policy_mask: float | None = Field(default=None, gt=0)
    """Drop an action of negative advantage once mean(log mu - log pi) per token is above this (DeepSeek-V3.2)."""
    success_shaping: float | None = Field(default=None, gt=0)
    """Gamma of LUFFY's shaping: with `replay.successes`, a token of an older success pulls as p / (p + gamma), p its
    probability today, without a clip, in place of the clipped ratio to the policy that sampled it. None: the ratio."""
    success_groups: bool = False
    """Whether an older success (`replay.successes`) whose task the round plays is one more sample of that task: its
    reward is in the group's mean and deviation, so that fresh failures beside it are told from it (LUFFY). One of each
    task of the round joins before successes of other tasks, which are compared with nobody. For estimators that compare
    the samples of a task; not for `at_grpo` with `[train.trees]`, which compares siblings there."""
    success_traces: bool = False
    """Whether `replay.successes` draws from the stored episodes of others too, a stronger model's among them: those of
    `train.traces` and of `distil`. A call that nobody's log-probs are known of, such as one that `offline.retokenise`
    made ids for, is held against the policy at the start of the round."""
    gamma_token: float = Field(default=1.0, gt=0, le=1)
    """Discount per token within an action (MARFT-T). 1, because 0.99 leaves 0.6 % of a reward 512 tokens away."""
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
    alignment_beta: float = Field(default=1.0, gt=0)
    """How much `advantage_alignment` counts what a move is worth to the rivals."""
    critic_loss: Literal["huber", "squared"] = "huber"
    """Loss of a value against its target."""
    critic_huber_delta: float = Field(default=1.0, gt=0)
    """Where the Huber loss turns from quadratic to linear, as a share of the largest less the smallest of the first
    returns that differed."""
    critic_clip: float | None = Field(default=None, gt=0)
    """How far one round may move a value from where it was before the gradient is cut (PPO's clipped value loss), in
    the same unit; None does not clip."""

    @property
    def masks_actions(self) -> bool:
        """Whether some actions may be dropped for what engine and trainer say of them."""
        return any(mask is not None for mask in (self.geometric_mask, self.veto, self.off_policy_mask))

    @model_validator(mode="after")
    def _options_fit_together(self) -> ExperimentalOptions:
        for name, applies, condition in (
            ("adaptive_alpha", isinstance(self.token_lambda, str), "token_lambda 'adaptive'"),
            ("nll_threshold", self.nll_coef > 0, "nll_coef above 0"),
            ("critic_huber_delta", self.critic_loss == "huber", "critic_loss 'huber'"),
        ):
            if name in self.model_fields_set and not applies:
                raise ValueError(f"{name} has no effect here: it applies to {condition} only")
        return self


_WEIGHTED = "replay.share above 0 or offline.mode 'topr', 'importance' or 'vtrace'"
_MEAN_RATIOS = "granularity 'action' with logprob_norm 'token' or 'word'"
_HAS_SUCCESSES = "replay.successes above 0"


class TrainerOptions(_Options):
    """One MARFT update, in the order in which it is computed."""

    reward: str = "reward"
    """Name of the episode reward that is trained on: the team's."""
    truncated_reward: Literal["so_far", "final"] = "so_far"
    """What the team reward of a run that was cut short is. `so_far`: what it had earned until then, so the critic's
    value of where it stood is added. `final`: its score, as if it had ended; to be taken where being cut short is the
    rule, since with gamma 1 the values would then grow from round to round. A run whose reward is `graph.limit_reward`
    has ended in any case."""
    shaping: tuple[ShapingTerm, ...] = ()
    """Further rewards that reach the loss."""
    granularity: Granularity = "action"
    """MARFT-A: one LLM call is one decision. MARFT-T: one token is."""
    lora: LoraOptions = LoraOptions()
    agents: dict[str, AgentOptions] = Field(default_factory=dict)
    """By node name: adapters that are shared or frozen, and learning rates of their own."""
    sides: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Side -> its agents, where they have interests of their own (a game). Each side earns its own `shaping` of level
    `agent` or `step` and nothing else; `reward` is a measure of the game then, which nobody earns. Left out: one
    team."""
    advantage: AdvantageOptions = AdvantageOptions()
    objective: ObjectiveOptions = ObjectiveOptions()
    importance: ImportanceOptions = ImportanceOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    offline: OfflineOptions = OfflineOptions()
    replay: ReplayOptions = ReplayOptions()
    system: SystemOptions = SystemOptions()
    experimental: ExperimentalOptions = ExperimentalOptions()

    @property
    def side_of(self) -> dict[str, str] | None:
        """Agent -> its side; None where all are one team."""
        return {agent: side for side, agents in self.sides.items() for agent in agents} or None

    @property
    def learning_sides(self) -> dict[str, tuple[str, ...]]:
        """The sides that have an agent which is not frozen."""
        learning = {agent for agents in self.sides.values() for agent in agents} - {
            agent for agent, options in self.agents.items() if options.frozen
        }
        return {side: tuple(agents) for side, agents in self.sides.items() if learning & set(agents)}

    @property
    def offline_reward(self) -> str:
        """Name of the team reward that the offline phase goes by."""
        return self.reward if self.offline.reward is None else self.offline.reward

    @property
    def estimator_settings(self) -> EstimatorSettings:
        """The numbers that an estimator reads."""
        advantage, experimental = self.advantage, self.experimental
        return EstimatorSettings(
            gamma=advantage.gamma,
            gae_lambda=advantage.gae_lambda,
            gamma_token=experimental.gamma_token,
            token_lambda=experimental.token_lambda,
            adaptive_alpha=experimental.adaptive_alpha,
            group_weight=experimental.group_weight,
            group_std=experimental.group_std,
            rae_decay=experimental.rae_decay,
            alignment_beta=experimental.alignment_beta,
            penalties_teach=self.penalties_teach,
        )

    @property
    def loss_weighting(self) -> Weighting:
        """`objective.weighting`, or what holds where it was left out."""
        if self.objective.weighting is not None:
            return self.objective.weighting
        return "episode" if self.granularity == "action" else "token"

    @property
    def clips_by_length(self) -> bool:
        """Whether each call has a clip range by its length: where its ratio is a mean over what it consists of."""
        takes_means = self.granularity == "action" and self.experimental.logprob_norm != "sum"
        return self.experimental.clip_by_length and takes_means

    @property
    def uses_critic(self) -> bool:
        """Whether anything asks for values. They predict the team reward, so in a game with sides nothing does."""
        return self.advantage.estimator_class.needs_critic or (self.offline.mode in _VALUED and not self.sides)

    @property
    def fits_critic_in_use(self) -> bool:
        """Whether a critic goes on learning after its warm-up: from rounds, or from V-trace's targets."""
        return self.uses_critic and (self.advantage.estimator_class.needs_critic or self.offline.mode == "vtrace")

    @property
    def penalties_teach(self) -> bool:
        """Whether an advantage below 0, as the estimator gives it, has a part in the loss: it counts itself, or a
        round's mean is taken away."""
        return self.objective.negative_weight > 0 or self.advantage.normalization != "none"

    @property
    def idle_penalties(self) -> list[str]:
        """Names of the step rewards that push nothing down, though their weight is negative: they are advantages as
        they are, and one below 0 has no part in the loss. They only take from what a run was better by."""
        if self.penalties_teach or not self.advantage.estimator_class.adds_step_rewards:
            return []
        return [term.reward for term in self.shaping if term.level == "step" and term.weight < 0]

    @property
    def needs_behaviour(self) -> bool:
        """Whether an update weighs by what the engine said when it sampled."""
        return self.importance.mismatch != "none" or self.experimental.masks_actions

    @model_validator(mode="before")
    @classmethod
    def _moved_options_are_named(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in data:
                if name in MOVED:
                    raise ValueError(f"{name} is {MOVED[name]} now")
            _refuse_moved_in(data.get("advantage"), "advantage", {"critic": _CRITIC_MOVED})
            objective = data.get("objective")
            if isinstance(objective, dict) and "kl_limit" in objective:
                raise ValueError("objective.kl_limit is objective.kl_target now, a multiple of what a round says")
        return data

    @model_validator(mode="after")
    def _options_fit_together(self) -> TrainerOptions:
        if not self.model_fields_set:  # the defaults fit, and need no estimator's class to be loaded
            return self
        for name, condition in self._without_effect():
            raise ValueError(f"{name} has no effect here: it applies to {condition} only")
        importance, experimental = self.importance, self.experimental
        if experimental.logprob_norm == "word" and self.granularity == "token":
            raise ValueError(
                "experimental.logprob_norm 'word' applies to granularity 'action' only: take 'token' or 'sum'"
            )
        if importance.proximal == "engine" and self.needs_behaviour:
            raise ValueError(
                "importance.proximal 'engine' leaves no mismatch to weight: set importance.mismatch to 'none', and no "
                "experimental.geometric_mask, veto or off_policy_mask"
            )
        if importance.proximal == "engine" and self.replay.share > 0:
            raise ValueError(
                "replay.share needs importance.proximal 'recomputed': old episodes were sampled by other policies"
            )
        if self.replay.share > 0 and importance.mismatch == "none":
            raise ValueError(
                "replay.share needs importance.mismatch 'truncate' or 'mask': old episodes must be weighted"
            )
        self._rewards_fit_together()
        self._sides_fit_together()
        if self.advantage.gamma < 1 and self.advantage.estimator_class.compares_depths:
            names = [name for name, estimator in estimators().items() if not estimator.compares_depths]
            raise ValueError(
                f"advantage.gamma below 1 does not go with advantage.estimator {self.advantage.estimator!r}, which "
                "compares calls that lie at different depths of a run: leave it at 1, or take "
                f"{' or '.join(map(repr, names))}"
            )
        if self.advantage.estimator_class.pays_calls_alone and all(term.level != "step" for term in self.shaping):
            raise ValueError(
                f"advantage.estimator {self.advantage.estimator!r} compares the calls of one run by what arrived with "
                "each: add a reward of single calls to shaping, of level 'step'"
            )
        return self

    def _without_effect(self) -> Iterator[tuple[str, str]]:
        """Options that were set and do nothing, and where they would do something."""
        chosen, update, experimental = self.advantage.estimator_class, self.objective.update, self.experimental
        has_successes = self.replay.successes > 0
        grouped = has_successes and _compares_samples(chosen)
        tables: dict[str, _Options] = {
            "advantage": self.advantage,
            "experimental": self.experimental,
            "replay": self.replay,
        }
        for table, options in tables.items():
            for name in options.model_fields_set - {*chosen.reads}:
                if readers := [reader for reader, estimator in estimators().items() if name in estimator.reads]:
                    yield f"{table}.{name}", f"advantage.estimator {' or '.join(map(repr, readers))}"
        for table, name, applies, condition in (
            ("advantage", "contribution", _has_own_baselines(chosen), _own_baselines()),
            ("advantage", "critic", self.uses_critic, "a critic in use"),
            ("advantage.critic", "shrink", not self.uses_critic or chosen.needs_critic, _with_critic()),
            ("advantage.critic", "epochs", not self.uses_critic or self.fits_critic_in_use, _fitted()),
            ("replay", "max_staleness", self.replay.share > 0, "replay.share above 0"),
            ("replay", "min_ess", self.replay.share > 0 or self.offline.needs_behaviour, _WEIGHTED),
            ("experimental", "clip_by_length", not experimental.clip_by_length or self.clips_by_length, _MEAN_RATIOS),
            ("experimental", "success_shaping", has_successes, _HAS_SUCCESSES),
            ("experimental", "success_groups", not experimental.success_groups or grouped, _with_success_groups()),
            ("experimental", "success_traces", not experimental.success_traces or has_successes, _HAS_SUCCESSES),
            ("experimental", "critic_loss", self.uses_critic, "a critic in use"),
            ("experimental", "critic_huber_delta", self.uses_critic, "a critic in use"),
            ("experimental", "critic_clip", self.fits_critic_in_use, _fitted()),
            ("experimental", "gamma_token", self.granularity == "token", "granularity 'token'"),
            ("experimental", "token_lambda", self.granularity == "token", "granularity 'token'"),
            ("experimental", "schedule", self.objective.kl_target is None, "objective.kl_target 'off'"),
            ("experimental", "logprob_norm", _whole_actions(self.granularity, update), "granularity 'action'"),
            ("experimental", "agent_order", update != "simultaneous", "objective.update 'sequential' or 'alternating'"),
        ):
            if name in (tables | {"advantage.critic": self.advantage.critic})[table].model_fields_set and not applies:
                yield f"{table}.{name}", condition

    def _rewards_fit_together(self) -> None:
        advantage = self.advantage
        has_private_rewards = any(term.level == "agent" for term in self.shaping)
        shared = {"episode", "step"} if advantage.estimator_class.pays_calls_alone else {"episode"}
        own_levels = sorted({term.level for term in self.shaping} - shared)
        if own_levels and not advantage.estimator_class.per_agent:
            per_agent_names = [name for name, estimator in estimators().items() if estimator.per_agent]
            raise ValueError(
                f"shaping of level {own_levels[0]!r} does not go with advantage.estimator {advantage.estimator!r}, "
                f"whose baseline is that of all agents: take {', '.join(map(repr, per_agent_names))}"
            )
        if advantage.contribution != "equal" and not has_private_rewards:
            raise ValueError(
                f"advantage.contribution {advantage.contribution!r} compares each agent's own reward with the team's: "
                "add one to shaping, of level 'agent'"
            )
        shaped = [term.reward for term in self.shaping]
        if "baseline" in (self.reward, *shaped):
            raise ValueError("a reward called 'baseline' cannot be told from the critic's part in reports: rename it")
        if len({self.reward, *shaped}) != 1 + len(shaped):
            raise ValueError("shaping names a reward twice, or the team reward: give each one weight")

    def _sides_fit_together(self) -> None:
        estimator = self.advantage.estimator_class
        if not self.sides and "sides" not in self.model_fields_set:
            if estimator.needs_sides:
                raise ValueError(
                    f"advantage.estimator {self.advantage.estimator!r} reads what the other sides earn: name them in "
                    "train.trainer.sides"
                )
            return
        named = [agent for agents in self.sides.values() for agent in agents]
        if len(self.sides) < 2 or not all(self.sides.values()) or len(set(named)) != len(named):
            raise ValueError("sides must be two or more, each with agents, and no agent may be of two")
        if all(term.level == "episode" for term in self.shaping):
            raise ValueError(
                "sides earn by shaping of level 'agent' or 'step', of which there is none: add each side's reward"
            )
        for option, leaks in (
            ("shaping of level 'episode'", any(term.level == "episode" for term in self.shaping)),
            (f"advantage.estimator {self.advantage.estimator!r}, whose critic", estimator.needs_critic),
            (f"advantage.estimator {self.advantage.estimator!r}, whose baseline", not estimator.per_agent),
            ("advantage.normalize 'batch'", self.advantage.normalization == "batch"),
            ("advantage.contribution", self.advantage.contribution != "equal"),
            (f"offline.mode {self.offline.mode!r}", self.offline.mode not in ("awr", "importance", "off")),
            ("replay.successes", self.replay.successes > 0),
            ("experimental.nll_coef", self.experimental.nll_coef > 0),
            ("truncated_reward", "truncated_reward" in self.model_fields_set),
        ):
            if leaks:
                raise ValueError(
                    f"{option} goes by a reward or a mean of all agents, and rivals have none in common: it does not "
                    "go with sides"
                )


_GROUPS: dict[str, type[_Options]] = {
    "advantage": AdvantageOptions,
    "objective": ObjectiveOptions,
    "importance": ImportanceOptions,
    "optimizer": OptimizerOptions,
    "system": SystemOptions,
    "experimental": ExperimentalOptions,
}
MOVED = {name: f"{group}.{name}" for group, options in _GROUPS.items() for name in options.model_fields}
"""Options that once stood in [train.trainer] itself -> where they stand now."""
_CRITIC_MOVED = {name: f"experimental.critic_{name}" for name in ("loss", "huber_delta", "clip")}


def _refuse_moved_in(table: Any, table_name: str, moved: dict[str, dict[str, str]]) -> None:
    """Refuses an option of a table inside `table` that stands elsewhere now, by both names."""
    for inner, names in moved.items():
        held = table.get(inner) if isinstance(table, dict) else None
        for name in held if isinstance(held, dict) else ():
            if name in names:
                raise ValueError(f"{table_name}.{inner}.{name} is {names[name]} now")


def _whole_actions(granularity: Granularity, update: str) -> bool:
    """Whether a ratio of whole actions is formed: by the loss, or for the factor of the agents that come after."""
    return granularity == "action" or update == "sequential"


def _has_own_baselines(estimator: type[Estimator]) -> bool:
    """Whether a team's reward may be weighed by agent: each agent, and each round, is compared with itself."""
    return estimator.per_agent and not estimator.keeps_state and not estimator.needs_sides


def _compares_samples(estimator: type[Estimator]) -> bool:
    """Whether a success of before may be one more sample of a task: no side of a game has successes, and where only
    siblings are compared the later calls of one have none."""
    return estimator.needs_groups and not estimator.needs_sides and not estimator.needs_forks


def _with_success_groups() -> str:
    names = [name for name, estimator in estimators().items() if _compares_samples(estimator)]
    return f"{_HAS_SUCCESSES} with advantage.estimator {' or '.join(map(repr, names))}"


def _with_critic() -> str:
    names = [name for name, estimator in estimators().items() if estimator.needs_critic]
    return f"advantage.estimator {' or '.join(map(repr, names))}"


def _fitted() -> str:
    return f"{_with_critic()}, or to offline.mode 'vtrace',"


def _own_baselines() -> str:
    names = [name for name, estimator in estimators().items() if _has_own_baselines(estimator)]
    return f"advantage.estimator {' or '.join(map(repr, names))}"
