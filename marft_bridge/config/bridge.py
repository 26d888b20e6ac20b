"""`bridge.toml` and command-line flags -> one frozen, checked `BridgeConfig`.

Invariant: every key is known and has an effect; an unknown one is refused by name with the nearest known one.
Relative paths are relative to the working directory. This module imports neither torch nor vllm.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from marft_bridge.common.distinct_names import DistinctNames
from marft_bridge.common.errors import ConfigError
from marft_bridge.common.hub_names import model_to_pinned
from marft_bridge.common.plain_values import value_fault
from marft_bridge.common.retries import Limits
from marft_bridge.config.compare import CompareOptions
from marft_bridge.config.fallback import FallbackOptions
from marft_bridge.config.graph_runs import RunConfig, RunContext
from marft_bridge.config.league import LeagueOptions
from marft_bridge.config.learner_cards import cards_to_fault
from marft_bridge.config.loggers import LOGGERS, AnyLogger
from marft_bridge.config.models import ModelName, ModelOptions, OtherModelOptions, refuse_unservable
from marft_bridge.config.progress import PROGRESS, ProgressOptions
from marft_bridge.config.promote import PromoteOptions
from marft_bridge.config.ray import RayOptions
from marft_bridge.config.record import RecordOptions
from marft_bridge.config.serve import ServeOptions
from marft_bridge.config.trees import TreeOptions
from marft_bridge.rewards.agent_credit import CREDIT_REWARDS
from marft_bridge.rewards.limit_reward import LimitReward
from marft_bridge.rewards.registry import AnyReward, refuse_unknown_rewards, rewards_to_layers
from marft_bridge.tasks.options import SOURCES, AnyTasks
from trainers.config import AgentOptions, TrainerOptions

MAX_NAME_BYTES = 200  # of a name that is part of a path


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class GraphOptions(_Options):
    """The user's app. A name is `package.module:attribute` or `path/file.py:attribute`."""

    app: str
    """A LangGraph graph, or a function that gives one back; also a graph of a langgraph.json, by its name there."""
    nodes: DistinctNames = Field(min_length=1)
    """The agents to train: by the name that each declares, as create_agent(name=...) does, else its node's path."""
    frozen: DistinctNames = ()
    """LLM nodes that run on the served model too, but are not trained. Any other node keeps its own model."""
    tasks: AnyTasks
    """A JSONL or Parquet file, or the name of an iterable (or of a function that gives one) of JSON objects; or a table
    for files laid out as MATH, GSM8K or HumanEval, or for a generator of reasoning-gym: docs/tasks.md."""
    reward: str | None = None
    """A function (task, final state) or (task, final state, run) -> number or mapping of names to numbers; may be
    async. It or `[[rewards]]` is needed; both may be there."""
    reward_timeout_s: float = Field(60.0, gt=0)
    """Seconds after which an episode goes without the rewards of that function."""
    limit_reward: float | None = None
    """What a run earns that one of its limits cuts short: the recursion limit, `collect.timeout_s` or
    `collect.max_tokens_per_episode`. A number below what a bad answer earns teaches an agent that to stop is better
    than to go round in circles. It is a reward of the name in `train.trainer.reward`, in every command that runs
    episodes, and nothing is expected to follow it. None: such a run has no reward and teaches nothing. Neither Ctrl-C
    nor a question to a person, nor time in which the model server was out, is a limit."""
    task_to_input: str | None = None
    """A function task -> graph input; without one the task itself is the input."""
    context: RunContext = None
    """The context that every run of the graph is given, as a table, or a function task -> context."""
    config: RunConfig = None
    """LangGraph's config of every run, as a table of configurable, recursion_limit, tags and metadata, or a function
    task -> such a table."""
    task_fields: tuple[str, ...] = ()
    """Fields that every task must have, besides `id`."""
    subject_field: str | None = None
    """Field of a task that names the person whose data it holds, for `traces erase --subject`; null for nobody's."""
    heldout: float = Field(0.25, gt=0, lt=1)
    """Share of the tasks kept for comparison, chosen by hash of the task id."""


class SamplingOptions(_Options):
    """How trainable nodes sample. top_p = 1 and no top_k always: the trainer's ratios need the whole distribution."""

    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; recorded log-probs are of the distribution after it."""
    max_tokens: int = Field(256, ge=1)
    """Tokens of one call at most."""


class CollectOptions(_Options):
    """Recording runs of the graph as it is now."""

    episodes: int = Field(128, ge=1)
    """How many; training tasks are taken in a seeded order, and again from the start when they run out."""
    samples_per_task: int = Field(1, ge=1)
    """Episodes in a row on the same task."""
    in_flight: int = Field(32, ge=1)
    """Episodes that run at the same time."""
    timeout_s: float = Field(300.0, gt=0)
    """Seconds after which an episode is recorded as truncated; `graph.limit_reward` says what that earns."""
    max_tokens_per_episode: int | None = Field(None, ge=1)
    """Tokens that the nodes on the served model may sample in one episode; with the last it is recorded as truncated.
    The call that would pass the limit gets what is left; calls side by side may pass it together."""
    retries: int = Field(0, ge=0, le=20)
    """Further attempts at an episode that failed because a connection broke or a server was busy or failed, after a
    pause that doubles up to 30 s; with the same seed. Every attempt is a row, and the last one counts."""
    retry_graph_errors: bool = False
    """Whether an episode is tried again whatever it failed with."""
    engine: Literal["local", "ray"] = "local"
    """Where `collect` runs episodes: in its own process, or by the collectors that [ray] describes."""

    @property
    def limits(self) -> Limits:
        """What one request may cost."""
        return Limits(self.max_tokens_per_episode, self.retries, self.retry_graph_errors)

    @model_validator(mode="after")
    def _options_fit_together(self) -> CollectOptions:
        if self.retry_graph_errors and not self.retries:
            raise ValueError("retry_graph_errors has no effect without retries")
        return self


class TrainOptions(_Options):
    """The outer loop: replay, then rounds of rollouts and updates."""

    rounds: int = Field(6, ge=0)
    """How often episodes are sampled and learned from, after what is stored was learned from; 0: only that."""
    episodes_per_round: int = Field(64, ge=2)
    """Fresh episodes of one round; a multiple of samples_per_task."""
    samples_per_task: int = Field(1, ge=1)
    """Episodes of a round on the same task; estimators that compare samples of one task need 2 or more."""
    stop_early: bool = True
    """Whether rounds end before `rounds` where an earlier version is better than the newest with 90 %, and at least
    three versions back."""
    evaluation_episodes: int = Field(0, ge=0)
    """Episodes that the last version plays on training tasks after the last round, since no round has shown what it is
    worth; nothing is learned from them. None where rounds stopped early."""
    refill: float | None = Field(None, ge=0)
    """Groups of samples that may be added to a round where others all earned the same, as a share of those planned,
    rounded up; for estimators that compare samples of one task. 0: none. None: 0.5 with such an estimator."""
    trees: TreeOptions | None = None
    """A table [train.trees] makes rounds trees: fewer whole runs, and forks of them. None: whole runs only."""
    league: LeagueOptions | None = None
    """A table [train.league] has some tasks of a round played against earlier versions of a side. None: all sides are
    the newest (self-play)."""
    progress: ProgressOptions | None = None
    """A table [train.progress] pays an agent by what each round changed in the team's measured performance. None:
    nothing is measured between rounds."""
    traces: tuple[str, ...] = ()
    """Folders that `traces export` wrote, or DuckLake catalogs: their episodes are learned from too, read in place."""
    start_from: str | None = Field(None, min_length=1)
    """Another run's folder: every node that it trained begins from the version that its training names. None: every
    node begins from its base model."""
    teacher_rounds: int = Field(0, ge=0)
    """In so many first rounds a teacher teaches on the prompts that the trained graph comes to; rewards do from the
    next round on."""
    teacher: str | None = Field(None, min_length=1)
    """Who that is. None: each trained node's own model. It is asked beside the served one, and its answers are imitated
    together with the stored ones (DAgger), which needs trainer.offline.mode 'filtered'. Or a larger model with the same
    tokenizer, a directory or name as model.path: it scores what the trained nodes say themselves, token by token
    (on-policy distillation), beside the trainer and without a server."""
    hosted_answers: Literal["provider", "recorded_first", "recorded_only"] = "provider"
    """Who answers, in rounds, the nodes that are neither in graph.nodes nor in graph.frozen. `provider`: their own
    models. `recorded_first`: where a stored call has the same messages, tools and parameters its recorded answer, else
    their own models. `recorded_only`: where there is none, the run fails."""
    keep_versions: int = Field(1, ge=1)
    """Trained versions of each node that stay loaded in the server, the newest included."""
    max_staleness: int = Field(0, ge=0)
    """How many versions an episode may lie behind when it is learned from. 0 samples and updates in turn. With 1 or
    more the next rounds are sampled while the trainer updates: faster where the two do not share processors, and
    weighted as what it is, so it needs importance.proximal 'recomputed' and an importance.mismatch."""
    loggers: tuple[AnyLogger, ...] = ()
    """Where the figures of every update go besides: names or tables of `tensorboard`, `wandb`, `mlflow`, `trackio`. As
    they are, all write into the run's folder and send nothing: docs/metrics.md."""
    keep_advantages: bool = True
    """Whether what every action of a round was credited with is kept in the run's folder advantages/, for
    `marft-bridge view`; 0.1 s and 0.7 MB for 50,000 sampled tokens, and never more than 32 MB before compression."""
    allow_tool_change: bool = False
    """Whether episodes with other tools than those that were learned from so far are learned from too."""
    learners: int = Field(1, ge=1)
    """Processes that share the passes of every update, each with the base model and all adapters: one on each card, or
    with a part of the processors each where there is no card: docs/gpus.md."""
    engine: Literal["local", "ray"] = "local"
    """Where the learners after the first are: processes of this machine, or actors on the Ray cluster of [ray]:
    docs/cluster.md."""
    rollouts: Literal["local", "ray"] = "local"
    """Where the rounds are played: on this machine's model server, or by the workers of [ray], which get every new
    version on servers of their own: docs/cluster.md."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(None, min_length=1)
    """The cards of the learners, by number; one for each. None: those that no server of this command has, or, where
    these do not hold it, those of servers. On a cluster that runs already, the card of this command's own learner."""
    trainer: TrainerOptions = TrainerOptions()

    @model_validator(mode="before")
    @classmethod
    def _moved_option_is_named(cls, data: Any) -> Any:
        if isinstance(data, dict) and "tensorboard" in data:
            raise ValueError('tensorboard is one of the loggers now: loggers = ["tensorboard"]')
        return data

    @model_validator(mode="after")
    def _loggers_differ(self) -> TrainOptions:
        names = [logger.name for logger in self.loggers]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"loggers: {duplicates[0]!r} is there twice; leave one out")
        return self

    @model_validator(mode="after")
    def _a_cluster_has_learners(self) -> TrainOptions:
        if self.engine == "ray" and self.learners == 1:
            raise ValueError(
                "engine is 'ray', but learners is 1, which is the command itself: set learners to 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _cards_differ(self) -> TrainOptions:
        if self.devices is not None and len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices names a card twice: {', '.join(map(str, self.devices))}")
        return self

    @model_validator(mode="after")
    def _hosted_answers_fit(self) -> TrainOptions:
        if self.teacher_rounds > self.rounds:
            raise ValueError(f"teacher_rounds is {self.teacher_rounds}, but there are only {self.rounds} rounds")
        if self.teacher is not None and not self.teacher_rounds:
            raise ValueError("teacher has no effect without teacher_rounds: set it to how many rounds it shall teach")
        if self.asking_rounds and self.trainer.offline.mode != "filtered":
            raise ValueError(
                "teacher_rounds imitate: set train.trainer.offline.mode to 'filtered', or name a model that scores "
                "in teacher"
            )
        if self.teacher_rounds and self.trees is not None:
            raise ValueError("teacher_rounds play whole runs: leave train.trees out")
        if self.hosted_answers != "provider" and self.trees is not None:
            raise ValueError("hosted_answers of a record cannot be given in forks yet: leave train.trees out")
        return self

    @model_validator(mode="after")
    def _the_league_fits(self) -> TrainOptions:
        if self.league is not None:
            if not self.trainer.sides:
                raise ValueError("league draws opponents of a side: name the sides in train.trainer.sides")
            if len(self.trainer.learning_sides) < 2:
                raise ValueError(
                    "league has a side that learns play earlier versions of another one: two or more of "
                    "train.trainer.sides need an agent that is not frozen"
                )
            if self.trees is not None:
                raise ValueError("league opponents cannot be met in forks yet: leave train.trees out")
            if self.max_staleness:
                raise ValueError("league opponents are retired with every update: leave train.max_staleness at 0")
        return self

    @model_validator(mode="after")
    def _the_progress_fits(self) -> TrainOptions:
        pays = any(term.reward == PROGRESS and term.level == "agent" for term in self.trainer.shaping)
        if self.progress is None:
            if pays:
                raise ValueError(f"train.trainer.shaping: {PROGRESS!r} is paid where there is a table [train.progress]")
            return self
        if not pays:
            raise ValueError(f"progress pays a reward {PROGRESS!r} of level 'agent': add it to train.trainer.shaping")
        adapter = self.trainer.agents.get(self.progress.agent, AgentOptions())
        if adapter.frozen or adapter.adapter is not None:
            raise ValueError(
                f"progress.agent {self.progress.agent!r} learns a round later than the others, so it needs an adapter "
                "of its own that is trained: take its train.trainer.agents table out"
            )
        importance = self.trainer.importance
        for option, is_set in (
            ("train.trees", self.trees is not None),
            ("train.league", self.league is not None),
            ("train.max_staleness", self.max_staleness > 0),
            ("train.teacher_rounds", self.teacher_rounds > 0),
            ("train.trainer.replay.share or successes", self.trainer.replay.round_share > 0),
            ("train.trainer.objective.update 'alternating'", self.trainer.objective.update == "alternating"),
        ):
            if is_set:
                raise ValueError(f"progress needs whole rounds in which all agents learn: leave out {option}")
        if importance.proximal == "engine" or importance.mismatch == "none":
            raise ValueError(
                "progress has calls learned from one version after they were sampled: set train.trainer.importance."
                "proximal to 'recomputed', and its mismatch to 'truncate' or 'mask'"
            )
        return self

    @property
    def league_versions(self) -> int:
        """Earlier versions of a node that may be served beside the newest as opponents."""
        return 0 if self.league is None else self.league.versions

    @property
    def asking_rounds(self) -> int:
        """First rounds in which the own models of trained nodes are asked beside the served one."""
        return 0 if self.teacher is not None else self.teacher_rounds

    @property
    def refill_share(self) -> float:
        """`refill`, or what holds where it was left out; trees spend a round's whole budget themselves."""
        if self.refill is not None:
            return self.refill
        return 0.5 if self.trees is None and self.trainer.advantage.estimator_class.needs_groups else 0.0

    @property
    def refill_groups(self) -> int:
        """The most groups that may be added to a round: one at least where anything may."""
        planned = math.ceil(self.chains_per_round / self.samples_per_task)
        return math.ceil(round(self.refill_share * planned, 6))  # 0.1 * 30 is a little more than 3 in binary

    @property
    def chains_per_round(self) -> int:
        """Whole runs that a round is planned with: groups of samples, at least one."""
        if self.trees is None:
            return self.episodes_per_round
        groups = math.floor(round((1 - self.trees.share) * self.episodes_per_round / self.samples_per_task, 6))
        return max(1, groups) * self.samples_per_task


class BridgeConfig(_Options):
    """Everything that the commands read."""

    name: str = "app"
    """What the run folder under runs/ is called; one folder name."""
    seed: int = Field(0, ge=0)
    """What the order of tasks, the sampling of every call and the trainer are seeded with; MARFT_SEED overrides it."""
    run: str | None = None
    """The run folder; None means runs/<name>."""
    graph: GraphOptions
    rewards: tuple[AnyReward, ...] = ()
    """Rewards that are declared: docs/rewards.md has the kinds."""
    model: ModelOptions = ModelOptions()
    serve: ServeOptions = ServeOptions()
    models: dict[ModelName, OtherModelOptions] = {}
    """Other base models side by side, by names of your own: docs/base-models.md."""
    sampling: SamplingOptions = SamplingOptions()
    record: RecordOptions = RecordOptions()
    collect: CollectOptions = CollectOptions()
    ray: RayOptions = RayOptions()
    train: TrainOptions = TrainOptions()
    compare: CompareOptions = CompareOptions()
    promote: PromoteOptions = PromoteOptions()
    fallback: FallbackOptions | None = None
    """Who answers a call of live traffic that the local model fails to answer: docs/serving.md."""

    @field_validator("name")
    @classmethod
    def _name_stays_in_runs(cls, name: str) -> str:
        is_folder_name = name.isprintable() and name not in ("", ".", "..") and "/" not in name
        if not is_folder_name or len(name.encode()) > MAX_NAME_BYTES:
            raise ValueError(f"{name[:60]!r} is no folder name under runs/; another place is named with `run`")
        return name

    def _worse_calls_count(self) -> None:
        """Refuses options of calls that did worse than expected where these have no part in any loss."""
        trainer = self.train.trainer
        objective, experimental = trainer.objective, trainer.experimental
        if objective.negative_weight > 0 or self.train.teacher is not None:  # a teacher's scores count in full
            return
        for option, is_idle, condition in (
            ("experimental.dual_clip", experimental.dual_clip is not None, ""),
            (
                "experimental.off_policy_mask",
                experimental.off_policy_mask is not None and trainer.granularity == "action",
                " or granularity 'token'",
            ),
            (
                "objective.clip_low",
                "clip_low" in objective.model_fields_set and objective.update != "sequential",
                " or update 'sequential'",
            ),
        ):
            if is_idle:
                raise ValueError(
                    f"train.trainer.{option} has no effect here: it is about calls that did worse than expected, which "
                    f"count with objective.negative_weight above 0{condition}, or in rounds of train.teacher"
                )

    def _older_groups_fit(self) -> None:
        """Refuses a share of older episodes that no group of samples fits into."""
        share = self.train.trainer.replay.share
        if not share or not self.train.trainer.advantage.estimator_class.needs_groups:
            return
        fresh = self.train.chains_per_round + self.train.refill_groups * self.train.samples_per_task
        older = math.floor(fresh * share / (1 - share) + 1e-9)
        sizes = [size for size in (self.train.samples_per_task, self.collect.samples_per_task) if size > 1]
        if sizes and older < min(sizes):
            raise ValueError(
                f"train.trainer.replay.share {share:g} lets {older} older episodes join a round, and the samples of a "
                f"task, {min(sizes)} or more, join together or not at all: raise it, or leave it out"
            )

    @model_validator(mode="after")
    def _options_fit_together(self) -> BridgeConfig:
        trainer = self.train.trainer
        advantage, importance = trainer.advantage, trainer.importance
        trees, needs_forks = self.train.trees, advantage.estimator_class.needs_forks
        if advantage.estimator_class.needs_groups and self.train.samples_per_task < 2 and not needs_forks:
            raise ValueError(
                f"train.trainer.advantage.estimator {advantage.estimator!r} compares samples of one task: "
                "set train.samples_per_task to 2 or more"
            )
        if needs_forks and trees is None:
            raise ValueError(
                f"train.trainer.advantage.estimator {advantage.estimator!r} learns from forked calls: add a table "
                "[train.trees], so that rounds have some; 'tree_grpo' and 'rloo' learn from whole runs too"
            )
        if trees is not None and trainer.experimental.success_groups and advantage.estimator_class.compares_siblings:
            raise ValueError(
                "train.trainer.experimental.success_groups does not go with train.trainer.advantage.estimator "
                f"{advantage.estimator!r} and [train.trees], where only siblings are compared and the later calls of a "
                "success have none: leave one of them out, or take 'tree_grpo' or 'rloo'"
            )
        if trees is not None and self.train.refill:
            raise ValueError("train.refill has no effect with [train.trees], whose forks take what is left of a round")
        if advantage.contribution == "rank_consistency" and self.train.samples_per_task < 2:
            raise ValueError(
                "train.trainer.advantage.contribution 'rank_consistency' ranks samples of one task: "
                "set train.samples_per_task to 2 or more"
            )
        if self.train.episodes_per_round % self.train.samples_per_task:
            raise ValueError("train.episodes_per_round must be a multiple of train.samples_per_task")
        if self.train.refill and not advantage.estimator_class.needs_groups:
            raise ValueError(
                f"train.refill has no effect with train.trainer.advantage.estimator {advantage.estimator!r}, which "
                "compares no samples of one task: leave it out"
            )
        side_of = trainer.side_of or dict.fromkeys(self.graph.nodes, "")
        if strangers := sorted(set(side_of) - set(self.graph.nodes)):
            raise ValueError(f"train.trainer.sides: {strangers[0]!r} is not in graph.nodes")
        if sideless := sorted(set(self.graph.nodes) - set(side_of)):
            raise ValueError(f"train.trainer.sides: node {sideless[0]!r} is of no side: name it in one")
        if unknown_agents := sorted(set(trainer.agents) - set(self.graph.nodes)):
            raise ValueError(
                f"train.trainer.agents.{unknown_agents[0]}: not in graph.nodes; only trained nodes have options"
            )
        if self.train.progress is not None and self.train.progress.agent not in self.graph.nodes:
            raise ValueError(f"train.progress.agent: {self.train.progress.agent!r} is not in graph.nodes")
        self._learners_have_a_card_each()
        self._rewards_fit_together()
        self._worse_calls_count()
        self._older_groups_fit()
        fallback_nodes = set(self.fallback.models if self.fallback is not None else ())
        if unknown_nodes := sorted(fallback_nodes - {*self.graph.nodes, *self.graph.frozen}):
            raise ValueError(f"fallback.models.{unknown_nodes[0]}: not in graph.nodes or graph.frozen")
        device = trainer.system.device
        if ":" in device:
            raise ValueError(
                f"train.trainer.system.device {device!r} names a card: set train.devices = [{device.partition(':')[2]}]"
            )
        if device == "cpu" and self.train.devices is not None:
            raise ValueError(
                "train.devices has no effect with train.trainer.system.device 'cpu': leave one of them out"
            )
        if duplicates := sorted(set(self.graph.nodes) & set(self.graph.frozen)):
            raise ValueError(
                f"graph.frozen: {duplicates[0]!r} is in graph.nodes too; a node is either trained or frozen"
            )
        if self.train.max_staleness and (importance.proximal == "engine" or importance.mismatch == "none"):
            raise ValueError(
                "train.max_staleness lets episodes be older than the adapters that learn from them: set "
                "train.trainer.importance.proximal to 'recomputed', and its mismatch to 'truncate' or 'mask'"
            )
        live_versions = self.train.keep_versions + self.train.max_staleness + self.train.league_versions
        refuse_unservable(
            self.graph.nodes,
            self.graph.frozen,
            self.serve,
            other_models=self.models,
            rank=trainer.lora.rank,
            live_versions=live_versions,
        )
        return self

    @property
    def learners_here(self) -> int:
        """Learners that compute on the machine of the command."""
        is_on_cluster = self.train.engine == "ray" and self.ray.address is not None
        return 1 if is_on_cluster else self.train.learners

    def _learners_have_a_card_each(self) -> None:
        devices, learners = self.train.devices, self.learners_here
        if devices is None or (fault := cards_to_fault(len(devices), learners)) is None:
            return
        if learners < self.train.learners:
            raise ValueError(
                f"train.devices names {len(devices)} cards, but one learner is on this machine, and Ray places the "
                "others: name one"
            )
        raise ValueError(fault)

    def _rewards_fit_together(self) -> None:
        has_function = self.graph.reward is not None
        if not has_function and not self.rewards:
            raise ValueError("nothing says what is good: name a function in graph.reward, or declare [[rewards]]")
        if not has_function and "reward_timeout_s" in self.graph.model_fields_set:
            raise ValueError("graph.reward_timeout_s has no effect without graph.reward")
        if self.graph.limit_reward is not None and self.train.trainer.sides:
            raise ValueError(
                "graph.limit_reward is a reward of the team, and with train.trainer.sides nobody earns one: leave it "
                "out"
            )
        try:
            rewards_to_layers(self.rewards, has_function=has_function)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        agents = {*self.graph.nodes, *self.graph.frozen}
        if foreign_rewards := [r for r in self.rewards if r.agent is not None and r.agent not in agents]:
            raise ValueError(
                f"rewards.{foreign_rewards[0].name}.agent: {foreign_rewards[0].agent!r} is not in graph.nodes or "
                "graph.frozen"
            )
        if not has_function:  # the names of a function's rewards are known only when it is called
            trainer = self.train.trainer
            is_metric_set = "metric" in self.compare.model_fields_set
            if not is_metric_set and all(reward.name != self.compare.metric for reward in self.rewards):
                self.__dict__["compare"] = self.compare.model_copy(update={"metric": trainer.reward})
            refuse_unknown_rewards(
                self.rewards,
                {
                    ("train.trainer.reward", trainer.reward, "episode"),
                    ("compare.metric", self.compare.metric, "episode"),
                    *(
                        ("train.trainer.shaping", term.reward, term.level)
                        for term in trainer.shaping
                        # which `credit` writes, and `train` itself
                        if term.level != "agent" or term.reward not in (*CREDIT_REWARDS, PROGRESS)
                    ),
                },
            )

    @property
    def limit_reward(self) -> LimitReward | None:
        """What a run earns that one of its limits cuts short; None: nothing is known of it."""
        value = self.graph.limit_reward
        return None if value is None else LimitReward(self.train.trainer.reward, value)

    @property
    def run_folder(self) -> Path:
        """Where this run's files live."""
        return _to_run_folder(self.name, self.run)

    def recorded(self) -> dict[str, Any]:
        """What a run writes down of itself: every option as JSON values, names of the Hub with their commits."""
        content = self.model_dump(mode="json")
        for table in (content["model"], *content["models"].values()):
            table["path"] = model_to_pinned(table["path"])
        if (teacher := content["train"]["teacher"]) is not None:
            content["train"]["teacher"] = model_to_pinned(teacher)
        for variant in content["compare"]["variants"]:
            variant["model"] = None if variant["model"] is None else model_to_pinned(variant["model"])
        return content


def _to_run_folder(name: str, run: str | None) -> Path:
    return Path(run or f"runs/{name}")


def toml_to_config(path: Path, overrides: Mapping[str, Any] | None = None) -> BridgeConfig:
    """Reads `path` and applies `overrides` (dotted keys; None: not given) to it.

    Raises:
        ConfigError: the file is missing, unreadable or not TOML, or a key or value is not allowed.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"no configuration at {path}; name one with --config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is not valid TOML: lists or tables too deep in each other") from None
    except ValueError as error:  # also of an integer of thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    if (fault := value_fault(raw)) is not None:
        raise ConfigError(f"{path} holds {fault}; no option takes that")
    for key, value in (overrides or {}).items():
        if value is not None:
            set_dotted(raw, key, value)
    try:
        return BridgeConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{path}: {problem_to_line(error)}") from None


def toml_to_run_folder(path: Path) -> Path | None:
    """The run folder that a bridge.toml names, whatever else is in it; None where it cannot be told."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        return _to_run_folder(raw.get("name", "app"), raw.get("run"))
    except (OSError, ValueError, RecursionError, TypeError):
        return None


def notes_to_config(folder: Path, command: str, overrides: Mapping[str, Any] | None = None) -> BridgeConfig:
    """What `command` was given in a run folder, else what the newest command was, as bridge.json notes it.

    Raises:
        ConfigError: nothing is noted, or nothing that holds today.
    """
    path = folder / "bridge.json"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        raw = dict((entries.get(command) or list(entries.values())[-1])["given"])
    except FileNotFoundError:
        reason = f"there is no {path}" if folder.is_dir() else f"there is no run folder {folder}"
        raise ConfigError(f"{command}: {reason}, in which a run notes its options; name them with --config") from None
    except KeyError:
        raise ConfigError(
            f"{command}: {path} is of an earlier version, which noted no options to go on with; name them with --config"
        ) from None
    except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise ConfigError(f"{command}: cannot read {path}: {error}; name the options with --config") from None
    for key, value in {**(overrides or {}), "run": str(folder)}.items():
        if value is not None:
            set_dotted(raw, key, value)
    try:
        return BridgeConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{command}: {path}: {problem_to_line(error)}; name the options with --config") from None


def set_dotted(raw: dict[str, Any], key: str, value: Any) -> None:
    """Sets `table.key` in the parsed content of a configuration file, adding the tables on the way."""
    *tables, option = key.split(".")
    parent: Any = raw
    for table in tables:
        parent = parent.setdefault(table, {})
        if not isinstance(parent, dict):
            return  # the file gives this table another type, which validation refuses by name
    parent[option] = value


def problem_to_line(error: ValidationError) -> str:
    """The first problem of a configuration, on one line."""
    problems = error.errors(include_url=False)
    # A misspelt key is reported as unknown and as missing; the unknown one shows what was written.
    problem = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    key_path = ".".join(str(part) for part in problem["loc"])
    suffix = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key_path!r}{_suggest_key(problem['loc'])}{suffix}"
    if problem["type"] == "missing":
        return f"the key {key_path!r} is missing{suffix}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{key_path}: {message}{suffix}" if key_path else f"{message}{suffix}"


def _suggest_key(location: Iterable[int | str]) -> str:
    *tables, unknown_key = [str(part) for part in location]
    model: Any = BridgeConfig
    for table in tables:
        if isinstance(model, type) and issubclass(model, BaseModel):
            model = next(f.annotation for name, f in model.model_fields.items() if table in (name, f.alias))
        elif model == tuple[AnyReward, ...]:
            model = AnyReward  # `table` is an index of the list, and the next part the kind
        elif model == tuple[AnyLogger, ...]:
            model = AnyLogger
        elif model == AnyLogger:
            model = LOGGERS[table]
        elif table in SOURCES:
            model = SOURCES[table]
        elif model is AnyReward:
            model = next(kind for kind in get_args(get_args(model)[0]) if kind.model_fields["kind"].default == table)
        else:  # `table` is a key of a mapping or an index of a list; the options are those of its members
            model = next(part for part in get_args(model) if isinstance(part, type) and issubclass(part, BaseModel))
    if not isinstance(model, type):  # a table that may be left out
        model = next(part for part in get_args(model) if isinstance(part, type) and issubclass(part, BaseModel))
    known_keys = [field.alias or name for name, field in model.model_fields.items()]
    matches = difflib.get_close_matches(unknown_key, known_keys, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else f"; known here: {', '.join(sorted(known_keys))}"
