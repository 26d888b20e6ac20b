"""The result of one comparison, as report.json holds it: the records that `figures` fills and the pages show.

Several variants ran the same held-out tasks with the same seeds. The first is the base; every other one is compared
with it, pair by pair. Invariants: no NaN; an absent number is None; every name of a variant is that of one in
`variants`; a verdict is a pure function of the numbers beside it and never claims more than both the interval and the
test do.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    computed_field,
    model_validator,
)

from marft_bridge.runs.learning_curve import LearningPoint
from marft_bridge.statistics import MeanInterval

SCHEMA_VERSION: Literal[2] = 2  # of report.json
SIGNIFICANCE = 0.05
ONE_SIDED_SIGNIFICANCE = SIGNIFICANCE / 2
MAX_CHANGED_TASKS = 5  # tasks shown per direction
MAX_COHORT_TASKS = 2  # shown of a cohort in which a candidate lost

ContrastOutcome = Literal["higher", "lower", "not settled"]
MarginOutcome = Literal["better", "non-inferior", "worse by more than the margin", "not told"]


def _storable(text: str) -> str:
    """Replaces half a surrogate pair, which a model can emit and UTF-8 cannot hold, by the replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


Text = Annotated[str, AfterValidator(_storable)]


class _ReportPart(BaseModel):
    """The base of all records. Computed fields are written too; read back, they must equal what is computed again."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _computed_fields_match_numbers(cls, data: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return build(data)
        stored_values = {name: data[name] for name in cls.model_computed_fields if name in data}
        part = build({key: value for key, value in data.items() if key not in stored_values})
        for name, value in stored_values.items():
            if value != getattr(part, name):
                raise ValueError(f"{name} {value!r} does not follow from the numbers: {getattr(part, name)!r}")
        return part


# -- variants -------------------------------------------------------------------------------------------------


class Estimate(_ReportPart):
    """A mean over tasks with its 95% interval; bounds are None where too few tasks are there for one."""

    mean: float
    low: float | None
    high: float | None


def interval_to_estimate(interval: MeanInterval) -> Estimate:
    """The interval of a mean as a report holds it."""
    return Estimate(mean=interval.mean, low=interval.low, high=interval.high)


class Variant(_ReportPart):
    """One variant that was compared.

    `adapters` maps nodes to versions; a node without one is absent. `choice` says why these, where training named them.
    `hosted`: the nodes that called the models that the app was written with, also those that are in no configuration.
    `prompts` maps nodes to what their calls began with in place of the app's system message.
    `max_tokens`: the limit of its calls; None means that of the configuration.
    `graph`, `model`: None means those of the
    configuration; a graph that calls the models that it was written with has the model "its own models". `score` is
    the deciding metric over all of its episodes that have it. `measured` maps each metric to how many of these have it
    too; None in reports of earlier versions.
    """

    name: Text
    adapters: dict[Text, int] = Field(default_factory=dict)
    choice: Text | None = None
    hosted: tuple[Text, ...] = ()
    prompts: dict[Text, Text] = Field(default_factory=dict)
    max_tokens: int | None = Field(None, ge=1)
    graph: Text | None = None
    model: Text | None = None
    episodes: int = Field(ge=0)
    unscored: int = Field(ge=0)  # episodes without the deciding metric: failed, truncated, or never scored
    reasons: dict[Text, int] = Field(default_factory=dict)  # why an episode has no score -> number of episodes
    measured: dict[Text, Annotated[int, Field(ge=0)]] | None = None
    score: Estimate | None
    pass_at: dict[int, Estimate] = Field(default_factory=dict)  # k -> pass@k; only for scores of 0 and 1
    avg_at: dict[int, Estimate] = Field(default_factory=dict)  # k -> avg@k


# -- comparisons ----------------------------------------------------------------------------------------------


class NonInferiority(_ReportPart):
    """The test of "worse than the base by the margin or more", beside the interval of its contrast."""

    margin: float = Field(gt=0)  # in the metric's units
    value_range: float = Field(gt=0)  # of the metric: the margin is below it
    p_value: float = Field(ge=0, le=1)  # one-sided, of this contrast alone
    p_adjusted: float = Field(ge=0, le=1)  # holds for all candidates together
    test: Text
    tasks_more: int | None = Field(ge=0)  # beyond those that ran, to show it with power 0.8 if nothing truly differs


class TaskDifferences(_ReportPart):
    """The tasks of a contrast by what each says of the difference, without their names: what a test over tasks needs.

    A row is (b - a summed over the pairs of a task, how many pairs these are, how many tasks are like that).
    """

    value_range: float = Field(ge=0)  # of the metric: no pair is taken to differ by more
    rows: tuple[tuple[float, Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]], ...]


class Contrast(_ReportPart):
    """One metric of one variant against the base: `a` is the base, `b` the variant, `diff` is b - a.

    `ci95` is the interval of this contrast alone. `simultaneous` and `p_adjusted` hold together for all contrasts of
    its family (the deciding metric over all variants, or the secondary metrics of one variant).
    """

    variant: Text
    metric: Text
    n: int = Field(ge=1)  # pairs
    clusters: int = Field(ge=1)  # tasks
    mean_a: float
    mean_b: float
    diff: float
    ci95: tuple[float, float]
    p_value: float = Field(ge=0, le=1)
    test: Text
    p_adjusted: float = Field(ge=0, le=1)
    simultaneous: tuple[float, float]
    ratio_ci95: tuple[float, float] | None = None  # of mean_b / mean_a; None where mean_a may be 0, and after looks
    non_inferiority: NonInferiority | None = None  # of the deciding metric, where a margin is given
    task_differences: TaskDifferences | None = None  # None in a cohort, and in reports of earlier versions

    @model_validator(mode="after")
    def _numbers_agree(self) -> Contrast:
        for interval in (self.ci95, self.simultaneous):
            if interval[0] > interval[1]:
                raise ValueError(f"{self.variant}, {self.metric}: interval {interval} runs backwards")
        if abs(self.mean_b - self.mean_a - self.diff) > 1e-6 * max(1.0, abs(self.mean_a), abs(self.mean_b)):
            raise ValueError(
                f"{self.variant}, {self.metric}: diff {self.diff} is not mean_b {self.mean_b} - mean_a {self.mean_a}"
            )
        if self.task_differences is not None:
            self._check_task_differences(self.task_differences)
        return self

    def _check_task_differences(self, differences: TaskDifferences) -> None:
        tasks = sum(count for _, _, count in differences.rows)
        pairs = sum(size * count for _, size, count in differences.rows)
        total = sum(sum_of_task * count for sum_of_task, _, count in differences.rows)
        tolerance = 1e-6 * max(1.0, abs(self.mean_a), abs(self.mean_b))
        if (tasks, pairs) != (self.clusters, self.n) or abs(total / self.n - self.diff) > tolerance:
            raise ValueError(
                f"{self.variant}, {self.metric}: task_differences are of {tasks} tasks and {pairs} pairs that sum to "
                f"{total}, and the contrast is of {self.clusters} and {self.n} with the mean {self.diff}"
            )
        largest = max(abs(sum_of_task) / size for sum_of_task, size, _ in differences.rows)
        if largest > differences.value_range * (1 + 1e-9):
            raise ValueError(
                f"{self.variant}, {self.metric}: a task differs by {largest:g}, more than the metric's range "
                f"{differences.value_range:g}"
            )

    @computed_field  # type: ignore[prop-decorator]
    @property
    def outcome(self) -> ContrastOutcome:
        """A difference is claimed only if the simultaneous interval excludes 0 and the adjusted test rejects at 5%."""
        low, high = self.simultaneous
        if self.p_adjusted >= SIGNIFICANCE or low <= 0 <= high:
            return "not settled"
        return "higher" if low > 0 else "lower"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def margin_outcome(self) -> MarginOutcome | None:
        """What is told about the margin, by the simultaneous interval and a test; None without a margin.

        Non-inferior needs the interval above -margin, and the one-sided test at 2.5%, which is the interval's level.
        """
        if self.non_inferiority is None:
            return None
        if self.outcome == "higher":
            return "better"
        low, high = self.simultaneous
        margin = self.non_inferiority.margin
        if low > -margin and self.non_inferiority.p_adjusted < ONE_SIDED_SIGNIFICANCE:
            return "non-inferior"
        return "worse by more than the margin" if self.outcome == "lower" and high < -margin else "not told"


class Power(_ReportPart):
    """The power of the comparison with one variant, at its share of the error; None where the variance is unknown."""

    variant: Text
    detectable: float | None  # minimum detectable effect: a true difference of this size is found with power 0.8
    tasks_more: int | None  # beyond those that ran, to find the observed difference with power 0.8
    effect: float | None  # the size of the observed difference


class Stopping(_ReportPart):
    """How a comparison with interim looks ended."""

    planned: int = Field(ge=1)  # tasks
    used: int = Field(ge=1)  # tasks that ran
    looks: tuple[int, ...]  # tasks that were complete at each look
    spent: float = Field(ge=0, le=1)  # type I error that the looks spent, over all candidates
    early: bool  # ended before all planned tasks because every candidate was settled


# -- which agent moved ----------------------------------------------------------------------------------------


class NodeSide(_ReportPart):
    """What one node did in one variant; None where the spans do not hold the figure."""

    calls_per_episode: float | None
    tokens_mean: float | None  # sampled tokens per call
    stop_share: float | None = Field(None, ge=0, le=1)  # calls that ended by themselves, not at a limit
    logprob_mean: float | None  # nats per sampled token under the behaviour policy
    kl_to_base: float | None = None  # nats per sampled token, KL(this version || base model), estimated on its calls
    kl_actions: int = Field(0, ge=0)  # calls that the estimate rests on
    format_valid: float | None = Field(None, ge=0, le=1)  # calls whose arguments or output fit the declared format
    tools: dict[Text, int] = Field(default_factory=dict)  # tool -> calls of it
    tool_error_share: float | None = Field(None, ge=0, le=1)
    answered_by: dict[Text, int] = Field(default_factory=dict)  # adapter or model -> its calls, the most first
    cost_mean: float | None = None  # of a run, in `Report.currency`; over the runs whose calls of the node have a price


class MixedTeam(_ReportPart):
    """The score with only the nodes `on` swapped to the candidate's versions, the others as in the base."""

    on: tuple[Text, ...]
    variant: Text
    n: int = Field(ge=1)  # tasks
    score: Estimate


class NodeShare(_ReportPart):
    """What one node contributes to the candidate's difference. `shapley` needs all combinations."""

    node: Text
    alone: float | None  # only this node swapped in, against the base
    alone_ci95: tuple[float, float] | None = None
    without: float | None = None  # the candidate with this node put back, against the candidate
    without_ci95: tuple[float, float] | None = None
    shapley: float | None = None
    shapley_ci95: tuple[float, float] | None = None


class Mixed(_ReportPart):
    """Mixed teams between the base and one candidate: which node made the difference."""

    candidate: Text
    complete: bool  # all combinations of nodes; else each node swapped on its own
    teams: tuple[MixedTeam, ...]
    shares: tuple[NodeShare, ...]


class Rated(_ReportPart):
    """One variant in the tournament: its games on both sides against all others. `elo` is 0 for the base."""

    variant: Text
    elo: float
    low: float | None  # 95% interval, over tasks; None where the tasks cannot give it
    high: float | None
    won: int = Field(ge=0)
    drawn: int = Field(ge=0)
    lost: int = Field(ge=0)


class Match(_ReportPart):
    """All games in which `first` played the first side and `second` the second. Payoffs are means of a game."""

    first: Text
    second: Text
    won: int = Field(ge=0)  # by `first`
    drawn: int = Field(ge=0)
    lost: int = Field(ge=0)
    payoff_first: float
    payoff_second: float


class Tournament(_ReportPart):
    """Every two variants against each other on both sides of the game: whoever earned more has won.

    `finite`: whether the games alone give ratings; else somebody won or lost everything, a game of each against a
    player of strength 1 holds them finite, and they have no interval.
    """

    sides: tuple[Text, Text]
    ratings: tuple[Rated, ...] = Field(min_length=2)
    finite: bool
    matches: tuple[Match, ...] = Field(min_length=2)
    left_out: int = Field(ge=0)  # games in which a side has no payoff, or that did not come to their end


class Choice(_ReportPart):
    """A team, a variant or a mixed one, by what it is worth and what a run of it costs.

    `efficient`: by the means, no other choice scores at least as high for less, or higher for as much.
    """

    team: Text
    score: Estimate  # of the deciding metric
    cost: Estimate  # of a run, in `Report.currency`
    seconds: Estimate  # of a run
    uncosted: int = Field(ge=0)  # scored runs whose cost is not known
    efficient: bool


# -- cohorts and tasks ----------------------------------------------------------------------------------------


class Step(_ReportPart):
    """One call or tool run of an episode, in order. `kind` "tool" names the tool in `node`."""

    kind: Literal["call", "tool"] = "call"
    node: Text
    adapter: Text | None = None
    text: Text
    tokens: int | None = None


class Trace(_ReportPart):
    """One episode of a task in one variant."""

    variant: Text
    episode_id: Text
    reward: float | None
    steps: tuple[Step, ...]


class TaskChange(_ReportPart):
    """One task: its mean reward in the base and in the candidate, and one episode of each side by side."""

    task_id: Text
    text: Text
    expected: Text | None
    reward_a: float
    reward_b: float
    a: Trace
    b: Trace


class Cohort(_ReportPart):
    """The tasks whose `field` has this value. The contrasts of all cohorts are one family; a small cohort has none.

    `regressed`: of each candidate whose mean is lower here than the base's, the tasks that lost most, worst first.
    """

    field: Text
    value: Text
    tasks: int | None = Field(None, ge=0)
    contrasts: tuple[Contrast, ...]
    regressed: dict[Text, Annotated[tuple[TaskChange, ...], Field(max_length=MAX_COHORT_TASKS)]] = Field(
        default_factory=dict
    )


class ChangedTasks(_ReportPart):
    """The tasks that changed most from the base to `candidate`, best first and worst first."""

    candidate: Text
    improved: tuple[TaskChange, ...] = Field(default=(), max_length=MAX_CHANGED_TASKS)
    regressed: tuple[TaskChange, ...] = Field(default=(), max_length=MAX_CHANGED_TASKS)


# -- the rest of the page -------------------------------------------------------------------------------------


class Setup(_ReportPart):
    """How the comparison was made."""

    model: Text
    graph: Text
    versions: dict[Text, Text]
    date: datetime
    seed: int
    tasks: int = Field(ge=1)
    samples_per_task: int = Field(ge=1)
    temperature: float | None
    minutes: float | None  # wall-clock, all variants together
    tool_surface: dict[Text, Text] = Field(default_factory=dict)  # node -> SHA-256 of its tools' schemas
    tool_surface_differs: bool = False  # the configuration allows it


class Report(_ReportPart):
    """The content of report.json. More of `metric` is better."""

    schema_version: Literal[2] = SCHEMA_VERSION
    metric: Text
    base: Text
    variants: tuple[Variant, ...] = Field(min_length=2)  # the base first
    contrasts: tuple[Contrast, ...] = Field(min_length=1)  # of the deciding metric, one for each other variant
    secondary: tuple[Contrast, ...] = ()
    power: tuple[Power, ...] = ()
    stopping: Stopping | None = None
    nodes: dict[Text, dict[Text, NodeSide]] = Field(default_factory=dict)  # node -> variant -> what it did
    mixed: Mixed | None = None
    tournament: Tournament | None = None
    choices: tuple[Choice, ...] = ()  # of all teams; none without prices
    currency: Text | None = None  # of the costs
    cohorts: tuple[Cohort, ...] = ()
    tasks: tuple[ChangedTasks, ...] = ()
    learning_curve: tuple[LearningPoint, ...] = ()
    setup: Setup
    created: datetime

    @property
    def candidates(self) -> tuple[Variant, ...]:
        """All variants but the base."""
        return self.variants[1:]

    def contrast(self, variant: str, metric: str | None = None) -> Contrast | None:
        """The contrast of one variant, on `metric` or on the deciding one; None where it was not measured."""
        metric = self.metric if metric is None else metric
        rows = self.contrasts if metric == self.metric else self.secondary
        return next((row for row in rows if row.variant == variant and row.metric == metric), None)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> str:
        """One sentence: what may be claimed of each candidate."""
        claims = [f"{row.variant} {_CLAIMS[row.outcome]} {self.base}{_margin_claim(row)}" for row in self.contrasts]
        return f"{'; '.join(claims)} ({self.metric})"

    @model_validator(mode="after")
    def _variant_names_exist(self) -> Report:
        names = [variant.name for variant in self.variants]
        if len(set(names)) < len(names):
            raise ValueError(f"variants: {names} are not all different")
        if self.base != names[0]:
            raise ValueError(f"base {self.base!r} is not the first of the variants {names}")
        if [row.variant for row in self.contrasts] != names[1:] or {r.metric for r in self.contrasts} != {self.metric}:
            raise ValueError("contrasts: not one of the deciding metric for each variant but the base, in order")
        if unknown_names := sorted(set(self._referenced_variants()) - set(names)):
            raise ValueError(f"{unknown_names[0]!r} is not one of the variants {names}")
        return self

    def _referenced_variants(self) -> Iterator[str]:
        yield from (row.variant for row in self.secondary)
        yield from (row.variant for row in self.power)
        yield from (row.variant for cohort in self.cohorts for row in cohort.contrasts)
        yield from (name for cohort in self.cohorts for name in cohort.regressed)
        yield from (name for sides in self.nodes.values() for name in sides)
        yield from (changed.candidate for changed in self.tasks)
        if self.mixed is not None:
            yield self.mixed.candidate
        if self.tournament is not None:
            yield from (row.variant for row in self.tournament.ratings)
            yield from (name for row in self.tournament.matches for name in (row.first, row.second))


def _margin_claim(row: Contrast) -> str:
    """What a contrast tells about its margin, to be read behind the claim; empty without one."""
    test = row.non_inferiority
    return "" if test is None else f", margin {test.margin:g}: {row.margin_outcome}"


_CLAIMS: dict[ContrastOutcome, str] = {
    "higher": "is better than",
    "lower": "is worse than",
    "not settled": "is not shown to differ from",
}
