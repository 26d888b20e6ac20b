"""A report -> GitHub-flavoured Markdown, for a pull request, an issue or a job's summary.

Invariant: no text of a model, a task or a configuration breaks out of its cell or block. A name is code on one line,
which ends no cell and starts no markup, mention or link; a longer text is fenced by more backticks than it has in a
row. Texts are cut, numbers never; report.json has them whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from marft_bridge.common.terminal_text import text_to_line, text_to_lines
from marft_bridge.comparison import views, wording
from marft_bridge.comparison.numbers import counted, interval_text, number, p_value, signed, signed_interval
from marft_bridge.comparison.records import Contrast, Estimate, Report, Setup, TaskChange, Trace

_MAX_NAME_LENGTH = 80  # characters
_MAX_TEXT_LENGTH = 1_200  # characters of one output
_MAX_STEPS = 12  # of one run


def code(text: str) -> str:
    """A text into code on one line, fit for a sentence and for a table's cell.

    A bar ends a cell even inside backticks, and a backtick ends the code: with one of them, the code is an element,
    and all that is not a letter, a digit or a space is a character reference, which is never markup.
    """
    line = text_to_line(text, _MAX_NAME_LENGTH).strip() or "(empty)"
    if "|" not in line and "`" not in line:
        return f"`{line}`"
    return f"<code>{''.join(c if c.isalnum() or c == ' ' else f'&#{ord(c)};' for c in line)}</code>"


def fenced(text: str) -> str:
    """A text into a block of code whose fence is longer than any run of backticks in it."""
    cut = text if len(text) <= _MAX_TEXT_LENGTH else text[:_MAX_TEXT_LENGTH]
    lines = text_to_lines(cut.replace("\r\n", "\n").replace("\t", "    "))
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", cut)), default=0))
    block = "\n".join([f"{fence}text", *lines, fence])
    return block if cut == text else f"{block}\n\n({len(text) - len(cut):,} more characters in report.json)"


def report_to_markdown(report: Report) -> str:
    """A report into Markdown, in the order of its page."""
    blocks = [
        f"# {wording.headline(report, code)}",
        f"{wording.evidence(report, code)}.",
        *_margins(report),
        *_metrics(report),
        *_power(report),
        *_stopping(report),
        *_scores(report),
        *_curve(report),
        *_choices(report),
        *_tournament(report),
        *_mixed(report),
        *_nodes(report),
        *_cohorts(report),
        *_cohort_losses(report),
        *_tasks(report),
        *_unscored(report),
        *_setup(report, report.setup),
    ]
    return "\n\n".join(blocks) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    alignment = ["---" if i < text_columns else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(cell or " " for cell in row) + " |" for row in (header, alignment, *rows))


def _margins(report: Report) -> Iterator[str]:
    if margins := wording.margins(report):
        yield "## Beside the margin"
        yield "\n".join(f"- {code(variant)}: {sentence}" for variant, sentence in margins)


def _metrics(report: Report) -> Iterator[str]:
    yield "## All metrics"
    rows = []
    for candidate in report.candidates:
        contrasts = [row for row in (*report.contrasts, *report.secondary) if row.variant == candidate.name]
        rows += [_metric(row) for row in contrasts]
    header = ["variant", "metric", code(report.base), "variant's mean", "change", "95% interval", "p"]
    yield _table(header, rows, text_columns=2)
    yield (
        "Intervals and p-values hold together for all variants (the deciding metric) or for all other metrics of one "
        f"variant. {wording.MARKS['higher']} higher, {wording.MARKS['lower']} lower, "
        f"{wording.MARKS['not settled']} not settled."
    )


def _metric(row: Contrast) -> list[str]:
    return [
        code(row.variant),
        f"{code(row.metric)} {wording.ratio(row)}".strip(),
        number(row.mean_a),
        number(row.mean_b),
        f"{wording.MARKS[row.outcome]} {signed(row.diff)}",
        signed_interval(row.simultaneous),
        p_value(row.p_adjusted),
    ]


def _power(report: Report) -> Iterator[str]:
    if unsettled := wording.unsettled(report):
        yield "## What this comparison could find"
        yield "\n".join(f"- {code(variant)}: {sentence}" for variant, sentence in unsettled)


def _stopping(report: Report) -> Iterator[str]:
    if report.stopping is not None:
        yield "## How it ended"
        yield wording.describe_stopping(report.stopping)


def _scores(report: Report) -> Iterator[str]:
    pass_ks = sorted({k for variant in report.variants for k in variant.pass_at})
    avg_ks = sorted({k for variant in report.variants for k in variant.avg_at})
    rows = []
    for variant in report.variants:
        estimates = [variant.score, *map(variant.pass_at.get, pass_ks), *map(variant.avg_at.get, avg_ks)]
        cells = [_estimate(estimate) for estimate in estimates]
        rows.append([code(variant.name), code(views.describe_variant(variant)), f"{variant.episodes:,}", *cells])
    header = ["variant", "what it is", "episodes", f"mean {code(report.metric)}"]
    yield "## The variants"
    yield _table([*header, *(f"pass@{k}" for k in pass_ks), *(f"avg@{k}" for k in avg_ks)], rows, text_columns=2)


def _estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    bounds = interval_text(estimate.low, estimate.high)
    return f"{number(estimate.mean)} ({bounds})" if bounds else number(estimate.mean)


def _choices(report: Report) -> Iterator[str]:
    if report.choices:
        yield "## Quality against cost"
        rows = [
            [
                code(choice.team),
                *map(_estimate, (choice.score, choice.cost, choice.seconds)),
                "yes" if choice.efficient else "no",
            ]
            for choice in report.choices
        ]
        header = ["team", f"mean {code(report.metric)}", "cost of a run", "seconds of a run", "efficient"]
        yield _table(header, rows)
        uncosted = [f"{code(c.team)}: {c.uncosted:,} runs without a known cost." for c in report.choices if c.uncosted]
        rule = "Efficient by the means: no other team scores at least as high for less, or higher for as much."
        yield " ".join([f"Costs in {code(report.currency or '')}.", rule, *uncosted])


def _curve(report: Report) -> Iterator[str]:
    if report.learning_curve:
        yield "## Learning curve"
        rows = [
            [
                str(point.round),
                code(point.phase),
                f"{point.episodes:,}",
                number(point.reward_mean),
                interval_text(point.reward_low, point.reward_high),
            ]
            for point in report.learning_curve
        ]
        yield _table(["round", "phase", "episodes", "mean reward", "95% interval"], rows, text_columns=2)


def _tournament(report: Report) -> Iterator[str]:
    tournament = report.tournament
    if tournament is None:
        return
    yield "## Tournament"
    yield wording.describe_tournament(report, tournament, code)
    rows = [
        [code(rated.variant), wording.rating_text(rated), *map(str, (rated.won, rated.drawn, rated.lost))]
        for rated in wording.ranking(tournament)
    ]
    yield _table(["variant", "Elo (95% interval)", "won", "drawn", "lost"], rows)
    first, second = map(code, tournament.sides)
    yield _table(
        [first, second, f"won by {first}", "drawn", "lost", f"mean payoff of {first}", f"of {second}"],
        [
            [
                code(match.first),
                code(match.second),
                *map(str, (match.won, match.drawn, match.lost)),
                *map(number, (match.payoff_first, match.payoff_second)),
            ]
            for match in tournament.matches
        ],
        text_columns=2,
    )


def _mixed(report: Report) -> Iterator[str]:
    mixed = report.mixed
    if mixed is None:
        return
    yield "## Which agent moved"
    sides = f"{code(mixed.candidate)} against {code(report.base)}"
    yield f"{wording.moved_nodes(mixed, code)} ({sides}, each by its own interval)."
    header = ["node", "swapped in alone", "put back in the candidate"]
    shares = [
        [code(share.node), _effect(share.alone, share.alone_ci95), _effect(share.without, share.without_ci95)]
        for share in mixed.shares
    ]
    if mixed.complete:
        header.append("share of the difference (Shapley)")
        for row, share in zip(shares, mixed.shares, strict=True):
            row.append(_effect(share.shapley, share.shapley_ci95))
    yield _table(header, shares)
    rows = [[", ".join(map(code, team.on)) or "none", f"{team.n:,}", _estimate(team.score)] for team in mixed.teams]
    yield _table([f"nodes as in {code(mixed.candidate)}", "runs", f"mean {code(report.metric)}"], rows)


def _effect(effect: float | None, interval: tuple[float, float] | None) -> str:
    if effect is None:
        return ""
    return signed(effect) if interval is None else f"{signed(effect)} ({signed_interval(interval)})"


def _nodes(report: Report) -> Iterator[str]:
    if not report.nodes:
        return
    yield "## What each node did"
    for node, sides in report.nodes.items():
        measures = views.node_measures(sides)
        if measures:
            yield f"### {code(node)}"
            rows = []
            answerers = {variant: views.answerers(side) for variant, side in sides.items()}
            if any(answerers.values()):
                cells = [", ".join(f"{code(name)}: {calls}" for name, calls in answerers[v]) for v in sides]
                rows.append(["answered by", *cells])
            for measure in measures:
                texts = {bar.variant: bar.text for bar in measure.bars}
                name = f"calls to {code(measure.name)}" if measure.tool else measure.name
                rows.append([name, *(texts.get(variant, "") for variant in sides)])
            yield _table(["", *map(code, sides)], rows)


def _cohorts(report: Report) -> Iterator[str]:
    cohorts = views.cohort_views(report)
    if cohorts:
        yield "## Cohorts"
        yield "Intervals hold together for all cohorts."
        rows = [
            [
                code(view.field),
                code(row.label),
                code(view.candidate),
                row.note,
                f"{row.mark} {row.value}",
                row.interval,
            ]
            for view in cohorts
            for row in view.forest.rows
        ]
        yield _table(["field", "value", "variant", "tasks", "change", "95% interval"], rows, text_columns=3)
    if small := views.small_cohorts(report):
        yield f"Too few tasks to judge: {', '.join(map(code, small))}."


def _cohort_losses(report: Report) -> Iterator[str]:
    for cohort in report.cohorts:
        for candidate, tasks in cohort.regressed.items():
            yield f"## {wording.cohort_loss(cohort, candidate, code)}"
            for task in tasks:
                yield from _task(task)


def _tasks(report: Report) -> Iterator[str]:
    for changed in report.tasks:
        lists = (("Most improved", changed.improved), ("Most regressed", changed.regressed))
        for heading, tasks in lists:
            if tasks:
                yield f"## {heading}: {code(report.base)} to {code(changed.candidate)}"
            for task in tasks:
                yield from _task(task)


def _task(task: TaskChange) -> Iterator[str]:
    change = f"{signed(task.reward_b - task.reward_a)} ({number(task.reward_a)} to {number(task.reward_b)})"
    yield f"### {change}: {code(task.task_id)}"
    yield fenced(task.text)
    if task.expected is not None:
        yield f"Expected: {code(task.expected)}"
    for trace in (task.a, task.b):
        yield from _trace(trace)


def _trace(trace: Trace) -> Iterator[str]:
    yield f"**{code(trace.variant)}**, this run: {number(trace.reward)}"
    for step in trace.steps[:_MAX_STEPS]:
        parts = [f"tool {code(step.node)}" if step.kind == "tool" else code(step.node)]
        parts += [code(step.adapter)] if step.adapter is not None else []
        parts += [counted(step.tokens, "token")] if step.tokens is not None else []
        yield f"{', '.join(parts)}:"
        yield fenced(step.text)
    if (rest := len(trace.steps) - _MAX_STEPS) > 0:
        yield f"({counted(rest, 'more step')} in report.json)"


def _unscored(report: Report) -> Iterator[str]:
    rows = [
        [
            code(variant.name),
            f"{variant.unscored:,} of {variant.episodes:,}",
            ", ".join(f"{code(reason)} ({count:,})" for reason, count in variant.reasons.items()),
        ]
        for variant in report.variants
        if variant.unscored
    ]
    if rows:
        yield "## Episodes without a score"
        yield "Their pairs are left out."
        yield _table(["variant", "episodes", "why"], rows)


def _setup(report: Report, setup: Setup) -> Iterator[str]:
    yield "## How this was measured"
    lines = [
        f"{counted(setup.tasks, 'held-out task')}, {counted(setup.samples_per_task, 'sample')} each, "
        f"seed {setup.seed}: the same for every variant",
        f"test: {', '.join(dict.fromkeys(row.test for row in report.contrasts))}; a difference is claimed only if the "
        "interval excludes 0 and p is below 0.05",
        f"model {code(setup.model)}, graph {code(setup.graph)}",
    ]
    if setup.temperature is not None:
        lines.append(f"temperature {setup.temperature:g}")
    if setup.tool_surface_differs:
        lines.append("**the tools that the variants were offered differ**, as the configuration allows")
    duration = "" if setup.minutes is None else f", {setup.minutes:.1f} minutes"
    lines.append(f"run {setup.date:%Y-%m-%d %H:%M %Z}{duration}")
    lines.append(", ".join(f"{code(name)} {code(version)}" for name, version in setup.versions.items()))
    yield "\n".join(f"- {line}" for line in lines if line)
