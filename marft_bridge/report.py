"""The numbers of one comparison, into report.json, report.html and a table for the terminal.

Invariants: the verdict is a pure function of the numbers and never claims more than both the interval and the test do;
report.json holds no NaN and reads back as an equal `Report`; the page needs no network and runs no script, because
the texts in it come from models. It does not know where the numbers come from, nor how the episodes were run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import jinja2
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    computed_field,
    model_validator,
)
from rich.table import Table
from rich.text import Text as RichText

from marft_bridge.files import write_atomically
from marft_bridge.report_numbers import number, p_equals, p_value, percent, signed
from marft_bridge.report_svg import difference_bar, learning_curve
from marft_bridge.statistics import INTERVAL, PairedResult, holm

SIGNIFICANCE = 0.05
MOST_CHANGED = 5  # tasks shown per direction


def _storable(text: str) -> str:
    """Half a surrogate pair, which a model can emit and UTF-8 cannot hold, becomes the replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


Text = Annotated[str, AfterValidator(_storable)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Side(_Part):
    """One variant that was compared: its name and the adapter version of each node (a node without one is absent)."""

    name: Text
    adapters: dict[Text, int] = Field(default_factory=dict)


class Comparison(_Part):
    """One metric on both sides, as `PairedResult` has it."""

    metric: Text
    n: int = Field(ge=1)
    clusters: int = Field(ge=1)
    mean_a: float
    mean_b: float
    diff: float
    ci95: tuple[float, float]
    p_value: float = Field(ge=0, le=1)
    test: str

    @model_validator(mode="after")
    def _numbers_agree(self) -> Comparison:
        if self.ci95[0] > self.ci95[1]:
            raise ValueError(f"{self.metric}: interval {self.ci95} runs backwards")
        if abs(self.mean_b - self.mean_a - self.diff) > 1e-6 * max(1.0, abs(self.mean_a), abs(self.mean_b)):
            raise ValueError(f"{self.metric}: diff {self.diff} is not mean_b {self.mean_b} - mean_a {self.mean_a}")
        return self


class SecondaryMetric(Comparison):
    """A metric beside the one that decides; `p_holm` is corrected for there being several."""

    p_holm: float = Field(ge=0, le=1)


class NodeSide(_Part):
    """What one node did on one side; None where the engine did not say."""

    tokens_mean: float | None  # sampled tokens per call
    stop_share: float | None = Field(ge=0, le=1)  # share of calls that ended by themselves (finish_reason stop)
    calls_per_episode: float | None
    logprob_mean: float | None  # nats per sampled token under the behaviour policy


class NodePair(_Part):
    """One node on both sides; a side on which it never ran is None."""

    a: NodeSide | None
    b: NodeSide | None


class LearningPoint(_Part):
    """One round of training: the mean team reward of its episodes, and the update's metrics per node."""

    round: int
    phase: Text  # e.g. "offline", "online"
    episodes: int = Field(ge=0)
    reward_mean: float | None
    reward_low: float | None = None
    reward_high: float | None = None
    nodes: dict[Text, dict[Text, float | None]] = Field(default_factory=dict)


class NodeOutput(_Part):
    """What one node said once."""

    node: Text
    text: Text


class TaskChange(_Part):
    """One task with its mean reward and one run on both sides, outputs in the order in which the nodes spoke."""

    task_id: Text
    text: Text
    expected: Text | None
    reward_a: float
    reward_b: float
    outputs_a: tuple[NodeOutput, ...]
    outputs_b: tuple[NodeOutput, ...]


class ChangedTasks(_Part):
    """The tasks that changed most, best first and worst first."""

    improved: tuple[TaskChange, ...] = Field(default=(), max_length=MOST_CHANGED)
    regressed: tuple[TaskChange, ...] = Field(default=(), max_length=MOST_CHANGED)


class Setup(_Part):
    """How the comparison was made."""

    model: Text
    graph: Text
    versions: dict[Text, Text]
    date: datetime
    samples_per_task: int = Field(ge=1)
    temperature: float | None
    minutes: float | None  # wall-clock, both sides together


class Report(Comparison):
    """The content of report.json. More of `metric` is better; `ci95` is the 95% interval of b - a."""

    a: Side
    b: Side
    seed: int
    metrics: tuple[SecondaryMetric, ...] = ()
    nodes: dict[Text, NodePair] = Field(default_factory=dict)
    learning_curve: tuple[LearningPoint, ...] = ()
    tasks: ChangedTasks = ChangedTasks()
    setup: Setup
    minimum_detectable_effect: float | None
    created: datetime

    @property
    def outcome(self) -> Literal["b is better", "b is worse", "no difference shown"]:
        """A difference is claimed only if the interval excludes 0 and the test rejects at 5%."""
        low, high = self.ci95
        if self.p_value >= SIGNIFICANCE or low <= 0 <= high:
            return "no difference shown"
        return "b is better" if low > 0 else "b is worse"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> str:
        """One sentence: the outcome and its evidence."""
        return f"{self.outcome}: {self.evidence}"

    @property
    def evidence(self) -> str:
        """The numbers behind the outcome, as half a sentence."""
        low, high = self.ci95
        sides = f"{self.metric} {number(self.mean_b)} ({self.b.name}) against {number(self.mean_a)} ({self.a.name})"
        numbers = (
            f"{sides}, difference {signed(self.diff)}, 95% interval {signed(low)} to {signed(high)}, "
            f"{p_equals(self.p_value)}, {self.n} pairs of {self.clusters} tasks"
        )
        if self.outcome != "no difference shown":
            return numbers
        if self.p_value >= SIGNIFICANCE and not low <= 0 <= high:
            return f"{numbers}; the interval excludes 0, but the test does not reject at 5%: more tasks are needed"
        if self.minimum_detectable_effect is None:
            return numbers
        effect = number(self.minimum_detectable_effect)
        return f"{numbers}; a true difference of {effect} would have been found four times in five"

    @model_validator(mode="wrap")
    @classmethod
    def _stored_verdict_follows_from_numbers(cls, data: Any, build: ModelWrapValidatorHandler[Report]) -> Report:
        if not isinstance(data, dict) or "verdict" not in data:
            return build(data)
        report = build({key: value for key, value in data.items() if key != "verdict"})
        if data["verdict"] != report.verdict:
            raise ValueError(f"verdict {data['verdict']!r} does not follow from the numbers: {report.verdict!r}")
        return report


def comparison_fields(result: PairedResult) -> dict[str, Any]:
    """A `PairedResult` into the keyword arguments that `Report` and `Comparison` share."""
    return asdict(result)


def secondary_metrics(results: Sequence[PairedResult]) -> tuple[SecondaryMetric, ...]:
    """The family of secondary results into rows with Holm's correction over that family."""
    corrected = holm([r.p_value for r in results])
    return tuple(SecondaryMetric(**asdict(r), p_holm=p) for r, p in zip(results, corrected, strict=True))


def changed_tasks(changes: Iterable[TaskChange]) -> ChangedTasks:
    """Tasks into the at most five that gained most and the five that lost most; ties in the order of their ids."""
    by_gain = sorted(changes, key=lambda t: (t.reward_a - t.reward_b, t.task_id))
    by_loss = sorted(by_gain, key=lambda t: (t.reward_b - t.reward_a, t.task_id))
    return ChangedTasks(
        improved=tuple(t for t in by_gain if t.reward_b > t.reward_a)[:MOST_CHANGED],
        regressed=tuple(t for t in by_loss if t.reward_b < t.reward_a)[:MOST_CHANGED],
    )


def report_table(report: Report) -> Table:
    """A report into a table: the deciding metric first, the others with corrected p-values."""
    table = Table(title=RichText(report.verdict), title_justify="left", title_style="bold")
    names = (RichText(report.a.name), RichText(report.b.name))
    for header in (RichText("metric"), *names, "difference", "95% interval", "p"):
        table.add_column(header, justify="left" if not table.columns else "right")
    rows: list[tuple[Comparison, float]] = [(report, report.p_value), *((m, m.p_holm) for m in report.metrics)]
    for row, p in rows:
        interval = f"{signed(row.ci95[0])} to {signed(row.ci95[1])}"
        table.add_row(
            RichText(row.metric), number(row.mean_a), number(row.mean_b), signed(row.diff), interval, p_value(p)
        )
    if report.metrics:
        table.caption = RichText(f"p of all rows but the first is Holm-corrected over {len(report.metrics)} metrics")
    return table


def report_page(report: Report) -> str:
    """A report into one self-contained HTML page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, percent=percent, signed=signed, p_value=p_value)
    return environment.get_template("report.html.j2").render(
        report=report, interval_method=INTERVAL, difference_bar=difference_bar, learning_curve=learning_curve
    )


def write_report(report: Report, folder: Path) -> tuple[Path, Path]:
    """A report into folder/report.json and folder/report.html, readable by their owner only, each replaced whole."""
    content = json.dumps(report.model_dump(mode="json"), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    page = report_page(report)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    json_path, html_path = folder / "report.json", folder / "report.html"
    write_atomically(json_path, content + "\n")
    write_atomically(html_path, page)
    return json_path, html_path
