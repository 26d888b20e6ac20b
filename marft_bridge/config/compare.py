"""`[compare]` of bridge.toml -> what is to be compared, checked as far as it can be without an app or a store.

Invariant: an option that would have no effect is refused by name. Whether versions and nodes exist is checked later.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from marft_bridge.common.distinct_names import DistinctNames
from marft_bridge.common.errors import ConfigError
from marft_bridge.config.graph_runs import RunConfig, RunContext
from marft_bridge.config.serve import ServeOptions

NEWEST: Final = "newest"
BEST: Final = "best"  # the version that training names, or else the newest
Version = Annotated[int, Field(ge=0)] | Literal["newest", "best"]


_OF_ANOTHER_APP = {"nodes", "frozen", "task_to_input", "context", "config"}
_OF_SERVED_NODES = {"adapters", "model", "serve", "nodes", "frozen", "max_tokens"}


def text_to_opponents(flag: str, text: str) -> tuple[Version, ...]:
    """Versions as they are typed, with commas between; `base` is 0. Raises ConfigError; `flag` begins its message."""
    return tuple(0 if word == "base" else text_to_version(flag, word) for word in map(str.strip, text.split(",")))


def text_to_version(flag: str, text: str) -> Version:
    """A version as it is typed: a number, `best` or `newest`. Raises ConfigError; `flag` begins its message."""
    if text == BEST:
        return BEST
    if text == NEWEST:
        return NEWEST
    if not text.isascii() or not text.isdecimal():
        raise ConfigError(f"{flag}: {text!r} is no version; give a number from 0, {BEST} or {NEWEST}")
    return int(text)


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _is_version(value: Any) -> bool:
    return value in (NEWEST, BEST) or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def _check_adapters(value: Any) -> Any:
    """Refuses what is no version with one line; pydantic would name each form that the value might have had."""
    invalid_versions = [v for v in value.values() if not _is_version(v)] if isinstance(value, dict) else [value]
    if invalid_versions and not _is_version(invalid_versions[0]):
        raise ValueError(
            f"{invalid_versions[0]!r} is no version; give a number from 0, {BEST!r}, {NEWEST!r}, or a table "
            "node = one of these"
        )
    return value


class VariantOptions(_Options):
    """One `[[compare.variants]]` table. The first is the base, with which each other one is compared."""

    name: str = Field(min_length=1)
    """What reports call it."""
    adapters: Annotated[Version | dict[str, Version], BeforeValidator(_check_adapters)] = 0
    """A version of every node, `best` (which training names), `newest`, or a table node = version; a node that is
    absent there runs at version 0, which changes nothing in the base model."""
    app: str | None = None
    """Another graph, as graph.app names one. It is given the same tasks, and judged by the same rewards."""
    nodes: DistinctNames = ()
    """The LLM nodes of that other graph on the served model, by LangGraph name."""
    frozen: DistinctNames = ()
    """LLM nodes of that other graph that are never at another version than 0."""
    task_to_input: str | None = None
    """A function task -> input of that other graph; without one it is that of [graph]."""
    context: RunContext = None
    """The context of that other graph's runs, as graph.context; without one it is that of [graph]."""
    config: RunConfig = None
    """LangGraph's config of that other graph's runs, as graph.config; without one it is that of [graph]."""
    model: str | None = None
    """Another base model, as model.path names one, on a server of its own; adapters belong to a base model, so all
    nodes run at version 0."""
    serve: ServeOptions | None = None
    """How that other model is served; without it as [serve] says, on a free port."""
    prompts: dict[str, str] = {}
    """Node = text: what its calls begin with, in place of the system message that the app gives them. Whichever model
    answers; a call without a system message is an error."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens of one call of its nodes at most; None: as sampling.max_tokens says."""
    own_models: bool = False
    """Whether the graph calls the models that it was written with: nothing is redirected, no adapters."""

    @model_validator(mode="after")
    def _options_fit_together(self) -> VariantOptions:
        given_options = self.model_fields_set
        if self.app is None and (unused_options := sorted(given_options & _OF_ANOTHER_APP)):
            raise ValueError(f"{self.name!r}: {unused_options[0]} has no effect without app; [graph] has its own")
        if self.app is not None and not self.own_models and not self.nodes:
            raise ValueError(f"{self.name!r}: nodes must name the LLM nodes of {self.app!r} on the served model")
        if duplicates := sorted(set(self.nodes) & set(self.frozen)):
            raise ValueError(f"{self.name!r}: {duplicates[0]!r} is in nodes and in frozen")
        if self.serve is not None and self.model is None:
            raise ValueError(f"{self.name!r}: serve has no effect without model; [serve] is for the base model")
        if self.own_models and (unused_options := sorted(given_options & _OF_SERVED_NODES)):
            raise ValueError(
                f"{self.name!r}: {unused_options[0]} has no effect with own_models: nothing of it is served here"
            )
        if empty_nodes := sorted(node for node, text in self.prompts.items() if not text.strip()):
            raise ValueError(f"{self.name!r}: prompts.{empty_nodes[0]} is empty")
        versions = self.adapters.values() if isinstance(self.adapters, dict) else [self.adapters]
        if self.model is not None and any(version != 0 for version in versions):
            raise ValueError(
                f"{self.name!r}: adapters belong to the base model that they were trained on, not to {self.model!r}; "
                "leave adapters out"
            )
        return self


class CompareOptions(_Options):
    """Several variants of the app on the same held-out tasks and seeds."""

    tasks: int | None = Field(None, ge=2)
    """How many held-out tasks, in a seeded order; None takes all. Where there are fewer, collect and train
    refuse to begin, too."""
    samples_per_task: int = Field(1, ge=1)
    """Episodes of each variant on the same task."""
    temperature: float | None = Field(None, gt=0)
    """Sampling temperature; None takes that of [sampling]."""
    metric: str = "correct"
    """The episode reward that decides; more is better. Where none of the app's rewards is called `correct`, the one
    that is trained on decides unless this is said."""
    non_inferior: float | None = Field(None, gt=0, allow_inf_nan=False)
    """A margin, in the metric's units: is each variant at least not worse than the base by as much? Below the metric's
    range. To be chosen before one sees numbers."""
    variants: tuple[VariantOptions, ...] = ()
    """What is compared; none: every node's version 0 with the best, or as --before and --after say."""
    mixed_teams: Literal["auto", "off"] = "auto"
    """Whether teams run of which some nodes are as in the base and the others as in a candidate, which shows what each
    node contributes. `auto`: all combinations of up to 4 nodes that differ, one at a time in and out beyond."""
    mixed_candidate: str | None = None
    """The variant that is mixed with the base; None takes the first one that can be: on the same graph and model, with
    two or more nodes at other versions."""
    stop_early: bool = False
    """Whether a variant ends as soon as a look on the way settles it, at error rates that hold all the same."""
    looks: int = Field(4, ge=2)
    """How often it is looked at, equally spaced in tasks, the end included."""
    prices: str | None = None
    """A dated file of what models cost, TOML or JSON (docs/hosted-to-local.md): the store keeps its prices, and what a
    run costs is a metric, `cost`, beside the others."""
    ranks: tuple[str, ...] = ("seconds", "tokens", "cost")
    """Metrics with rare huge values: their test is Wilcoxon's, of the signed ranks of the tasks' differences, where it
    would be sign flips of their means. The interval stays that of the mean. To be chosen before one sees numbers."""
    cohorts: tuple[str, ...] = ()
    """Fields of the task by whose values the differences are shown too; a list puts a task into several."""
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """k of pass@k (for rewards of 0 and 1) and avg@k."""
    kl_actions: int = Field(32, ge=0)
    """Calls of each node and variant on which its distance to the base model is estimated; 0: it is not."""
    allow_tool_change: bool = False
    """Whether variants may offer different tools to the model of the same node."""

    @model_validator(mode="after")
    def _options_fit_together(self) -> CompareOptions:
        names = [variant.name for variant in self.variants]
        if len(names) == 1:
            raise ValueError(f"variants: {names[0]!r} alone has nothing to be compared with; add another table")
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"variants: two tables are called {duplicates[0]!r}")
        if self.mixed_candidate is not None:
            if self.mixed_teams == "off":
                raise ValueError("mixed_candidate has no effect with mixed_teams = 'off'")
            if self.mixed_candidate not in (names[1:] or ("after",)):
                raise ValueError(
                    f"mixed_candidate: {self.mixed_candidate!r} is not one of: {', '.join(names[1:] or ['after'])}"
                )
        if "looks" in self.model_fields_set and not self.stop_early:
            raise ValueError("looks has no effect without stop_early = true")
        if self.stop_early and self.metric in self.ranks:
            raise ValueError(f"ranks: {self.metric!r} decides at every look, by its mean; take it out, or stop_early")
        if self.stop_early and self.non_inferior is not None:
            raise ValueError(
                "non_inferior: its test does not allow for the looks of stop_early, which stop at differences only; "
                "leave one of the two out"
            )
        if self.pass_at and max(self.pass_at) > self.samples_per_task:
            raise ValueError(
                f"pass_at: pass@{max(self.pass_at)} needs as many samples; set samples_per_task to "
                f"{max(self.pass_at)} or more"
            )
        return self
