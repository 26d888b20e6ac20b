"""The records that the store keeps, as frozen dataclasses: the vocabulary that the four packages share.

Three records are never mixed: a *span* says what happened, a *trajectory* says what the Markov game saw, and a
*batch* (in `trainers`) is what the optimiser eats. This module holds the first two and the rows around them.
Invariant: an absent value is None, never 0; token ids and log-probs come from the engine that sampled them.
It knows nothing of DuckDB, OpenTelemetry, LangGraph or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

EdgeKind = Literal["trigger", "data", "send", "tool"]
RewardScope = Literal["episode", "step", "agent"]
Outcome = Literal["terminated", "truncated", "failed"]

FROM_ENGINE = "from the engine"
"""End of the `untrainable_reason` of an action that lacks only what the engine did not report."""

NO_LOGPROBS = f"no log-probs {FROM_ENGINE}"
"""The `untrainable_reason` of an action whose tokens are known and can be imitated, but never importance-weighted."""

RETOKENISED = "re-tokenised text, not the tokens of any engine"
"""The `untrainable_reason` of an action whose ids were made from its texts, for imitation; it is never stored."""

REPLAYED = "answered again from the record of another episode"
"""The `untrainable_reason` of an action whose recorded answer was given again, so that nothing was sampled here: in a
fork, or of a hosted node in a round. Its `replayed_from` names the action that was sampled."""


BLIND_FORK = "blind_fork"
"""Tag of a fork that was chosen without a look at how the episode that it forks went on from there. Only such a one
says something of the calls before it: of those that failed, most go better the second time."""

HELDOUT = "heldout"
"""The split of episodes that ran to compare, and of tasks that are kept for it."""

RESCORED = "score:"
"""Prefix of the source of a reward that was computed of a stored run."""
OF_LIMIT = "graph.limit_reward"
"""The source of what a run earned by being cut short at one of its limits."""

TOOLS_OF = "tools/"
"""Prefix of a name in a lineage that is about all tools of one node; the node's name follows."""
ONE_TOOL_OF = "tool/"
"""Prefix of a name that is about one tool of a node; the node's name follows, a slash, and the tool's."""
MODEL_PARTS = ("base", "template", "tokenizer")
"""Names of a lineage that are about the base model of all nodes; a node with another has `base/<node>`, and so on."""


def model_part(lineage: Mapping[str, str], part: str, node: str) -> str | None:
    """One of MODEL_PARTS as a node had it; None where that is not recorded."""
    return lineage.get(f"{part}/{node}", lineage.get(part))


@dataclass(frozen=True, slots=True)
class RunRow:
    """One invocation of a command that produced records (a collect, a training round, a comparison)."""

    run_id: str
    command: str
    started_ns: int
    config: dict[str, Any] = field(default_factory=dict)  # resolved configuration, secrets removed
    version: str = ""  # of marft-bridge


@dataclass(frozen=True, slots=True)
class SpanRow:
    """One ended OpenTelemetry span. `trace_id` is also the episode id: one graph run is one trace."""

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits
    parent_span_id: str | None
    name: str
    operation: str  # gen_ai.operation.name: invoke_workflow | invoke_agent | chat | execute_tool
    start_ns: int  # unix time
    end_ns: int
    status: Literal["ok", "error"]
    status_message: str | None
    convention: str  # version of the attribute names, see conventions.CONVENTION_VERSION
    attributes: dict[str, Any]  # JSON values only


@dataclass(frozen=True, slots=True)
class Action:
    """One LLM call of one agent: a_i in the Flex-MG.

    `logprobs[k]` is the behaviour policy's log-probability of `sampled_ids[k]`; the two are parallel whenever
    `trainable` is true. `prompt_ids` is the rollout observation that the engine really saw (profile,
    observation and predecessors' actions, through the chat template).
    """

    action_id: str  # the span id of the chat span
    episode_id: str
    node: str  # the agent: LangGraph node name, subgraph path included
    index: int  # position in a topological order of D within the episode, from 0
    step: int | None  # LangGraph superstep
    prompt_ids: tuple[int, ...] | None
    sampled_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None
    model: str | None  # as the engine named it in its answer
    adapter: str | None  # "node@version"; None for a model without an adapter
    adapter_version: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    max_tokens: int | None
    seed: int | None
    finish_reason: str | None
    completion: str | None  # text, for people; training never reads it
    started_ns: int
    ended_ns: int
    trainable: bool
    untrainable_reason: str | None = None  # set exactly when trainable is false
    prompt_tokens: int | None = None  # as the engine counted them, which is also known where it told no ids
    sampled_tokens: int | None = None
    replayed_from: str | None = None  # the action whose recorded answer was given again; None: it was sampled here


@dataclass(frozen=True, slots=True)
class Edge:
    """D(src, dst) = 1: the action `dst` depended on `src`. `exact` is false for an upper bound."""

    episode_id: str
    src: str  # action_id
    dst: str  # action_id
    kind: EdgeKind
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Reward:
    """One named reward. Scope `episode` is the team's; `step` and `agent` point at an action or a node."""

    episode_id: str
    name: str
    value: float
    source: str  # what computed it, e.g. "graphs.math_duo:reward"
    created_ns: int
    scope: RewardScope = "episode"
    action_id: str | None = None
    node: str | None = None

    @property
    def is_of_limit(self) -> bool:
        """Whether the run earned it by being cut short at one of its limits."""
        return self.source.removeprefix(RESCORED) == OF_LIMIT


@dataclass(frozen=True, slots=True)
class Episode:
    """One graph run on one task by one set of adapter versions."""

    episode_id: str
    run_id: str
    task_id: str
    split: str  # "train" | "evaluation" | "heldout" | "live" (recorded outside any command)
    sample: int  # which sample of this task within the run, from 0
    round: int | None  # training round that asked for it; None for collect and compare
    variant: str | None  # which side of a comparison; None elsewhere
    seed: int | None
    adapters: dict[str, int]  # node -> adapter version; a node without an adapter is absent
    outcome: Outcome
    reason: str | None  # why it was truncated or failed
    started_ns: int
    ended_ns: int
    span_count: int
    task: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    subject_id: str | None = None
    parent_episode: str | None = None  # that it replays, forks or resumes; where that ran elsewhere see `episode_links`
    # Name -> SHA-256 in hex of what its prompts and samples depend on: base (the base model's weights), tokenizer,
    # template (of chats), tools/<node> (schemas of the tools that the node's calls offered to the model; a node that
    # offered none is absent), and tool/<node>/<tool> for each of them. A name that is absent was not recorded.
    lineage: dict[str, str] = field(default_factory=dict)
    thread_id: str | None = None
    user_id: str | None = None  # as the app names it in its metadata
    metadata: dict[str, Any] = field(default_factory=dict)  # that the app gave the run
    # On a thread with a checkpointer: with a new input, or going on with a run that was interrupted or failed.
    begins: Literal["turn", "resume"] | None = None
    forked: bool | None = None  # from a checkpoint that the thread had moved past, or that was named to be replayed
    from_checkpoint: str | None = None  # where it begins; the view `episode_links` knows whose checkpoint that is
    checkpoints: str | None = None  # ids of those that it wrote, in order, a space between
    # A fork of `parent_episode`: the action of that episode whose call was made again, and from which on nothing that
    # depended on it was given again. None: no fork. What came before is the parent's, and is counted there.
    fork_action: str | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A complete episode as the Markov game saw it: actions in a topological order of D, edges and rewards."""

    episode: Episode
    actions: tuple[Action, ...]
    edges: tuple[Edge, ...]
    rewards: tuple[Reward, ...]

    def team_reward(self, name: str) -> float | None:
        """The latest episode-level reward called `name`; None when there is none (which is not 0)."""
        reward = self._latest_team_reward(name)
        return None if reward is None else reward.value

    def is_unfinished(self, name: str) -> bool:
        """Whether the run was cut short, and no reward of this name says what it earned by that: more of it might have
        followed."""
        reward = self._latest_team_reward(name)
        return self.episode.outcome == "truncated" and (reward is None or not reward.is_of_limit)

    def _latest_team_reward(self, name: str) -> Reward | None:
        matching_rewards = [r for r in self.rewards if r.scope == "episode" and r.name == name]
        return max(matching_rewards, key=lambda r: r.created_ns, default=None)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan predicted of one node before anything was moved."""

    run_id: str  # of the plan
    node: str
    quantity: str
    value: float
    low: float | None  # 95% interval
    high: float | None
    created_ns: int


@dataclass(frozen=True, slots=True)
class AdapterRow:
    """One published adapter version of one node."""

    node: str
    version: int
    parent: int | None  # version it was trained from
    path: str
    sha256: str  # of adapter_model.safetensors
    base_sha256: str  # of the base model's weights
    created_ns: int
    metrics: dict[str, Any] = field(default_factory=dict)
