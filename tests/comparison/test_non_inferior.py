"""Owns: what `compare --non-inferior` says beside the margin.

- a verdict needs the interval and the one-sided test, and says no more than both
- all candidates share one error
- the table, the page, the Markdown and report.json say the same
- a margin that cannot work is refused in one line
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console
from support.compare_rig import Lab, lab_in
from support.paths import ROOT
from support.sample_report import bare_report

from marft_bridge import cli
from marft_bridge.common.errors import ConfigError
from marft_bridge.comparison import wording
from marft_bridge.comparison.contrasts import pairs_to_deciding_contrasts
from marft_bridge.comparison.margins import add_margin
from marft_bridge.comparison.markdown import report_to_markdown
from marft_bridge.comparison.outcomes import Outcome, Pair
from marft_bridge.comparison.page import report_page
from marft_bridge.comparison.records import Contrast, Report
from marft_bridge.comparison.table import report_table
from marft_bridge.config.compare import CompareOptions
from trace_store.records import Episode, Reward, Trajectory


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with lab_in(tmp_path) as opened:
        yield opened


def outcome(task: str, value: float) -> Outcome:
    episode = Episode(f"e-{task}", "r", task, "heldout", 0, None, "v", 1, {}, "terminated", None, 0, 1, 1)
    reward = Reward(f"e-{task}", "correct", value, "test", 0)
    return Outcome(Trajectory(episode, (), (), (reward,)), {"correct": value})


def pairs(n: int, won: int, lost: int, scale: float = 1.0) -> list[Pair]:
    """Of n tasks, these many are won and lost; the rest is right on both sides."""
    scores = [(0.0, scale)] * won + [(scale, 0.0)] * lost + [(scale, scale)] * (n - won - lost)
    return [Pair(outcome(f"t{i}", a), outcome(f"t{i}", b)) for i, (a, b) in enumerate(scores)]


def contrasts(margin: float, *candidates: Sequence[Pair]) -> tuple[Contrast, ...]:
    by_name = {f"c{i}": candidate for i, candidate in enumerate(candidates)}
    return add_margin(pairs_to_deciding_contrasts(by_name, "correct", 0), by_name, "correct", margin)


@pytest.mark.parametrize(
    ("n", "won", "lost", "verdict"),
    [
        (200, 2, 2, "non-inferior"),
        (124, 0, 0, "not told"),  # the interval is (0, 0), which is not enough
        (125, 0, 0, "non-inferior"),
        (200, 20, 2, "better"),
        (200, 0, 40, "worse by more than the margin"),
        (200, 8, 10, "not told"),
    ],
)
def test_the_verdict_is_what_interval_and_test_tell(n: int, won: int, lost: int, verdict: str) -> None:
    (row,) = contrasts(0.03, pairs(n, won, lost))
    assert row.margin_outcome == verdict


def test_a_small_loss_that_is_sure_may_be_less_than_the_margin() -> None:
    (row,) = contrasts(0.03, pairs(2_000, 0, 12))  # 0.6 points worse, p = 2 x 0.5^12
    assert (row.outcome, row.margin_outcome) == ("lower", "non-inferior")


def test_candidates_share_the_error_of_the_margin() -> None:
    alone = contrasts(0.03, pairs(130, 0, 0))
    shared = contrasts(0.03, *(pairs(130, 0, 0) for _ in range(2)))
    assert [row.margin_outcome for row in (*alone, *shared)] == ["non-inferior", "not told", "not told"]
    first, second = (row.non_inferiority for row in shared)
    assert first is not None
    assert second is not None
    assert first.p_adjusted == second.p_adjusted == pytest.approx(2 * first.p_value)
    assert first.tasks_more == 163 - 130  # 2.2414^2 x 0.97 / 0.03 = 162.4


def test_the_range_is_0_to_1_or_what_was_seen() -> None:
    (unit,), (percent,) = contrasts(0.03, pairs(200, 6, 8)), contrasts(3.0, pairs(200, 6, 8, scale=100.0))
    assert unit.non_inferiority is not None
    assert percent.non_inferiority is not None
    assert (unit.non_inferiority.value_range, percent.non_inferiority.value_range) == (1.0, 100.0)
    assert unit.non_inferiority.p_value == pytest.approx(percent.non_inferiority.p_value)
    assert unit.non_inferiority.tasks_more == percent.non_inferiority.tasks_more


def with_margin(*candidates: Sequence[Pair]) -> Report:
    """A report on these candidates, c0, c1, ..., with a margin of 0.03."""
    fields: dict[str, Any] = bare_report().model_dump(exclude_computed_fields=True)
    rows = contrasts(0.03, *candidates)
    base, candidate = fields["variants"]
    variants = [base, *({**candidate, "name": row.variant} for row in rows)]
    changes = {"metric": "correct", "variants": variants, "secondary": (), "power": (), "tasks": (), "nodes": {}}
    contrast_fields = [row.model_dump(exclude_computed_fields=True) for row in rows]
    return Report.model_validate({**fields, **changes, "contrasts": contrast_fields})


def table_text(report: Report) -> str:
    console = Console(width=300, file=io.StringIO(), record=True)
    console.print(report_table(report))
    return console.export_text()


def test_every_place_says_the_verdict_and_its_numbers() -> None:
    report = with_margin(pairs(200, 8, 10))
    ((_, sentences),) = wording.margins(report)
    # Tango: (8 - 10 + 6) / sqrt(200 (2 x 0.06286 - 0.03 - 0.0009)) = 0.918; 0.06286 is the likeliest share of losses.
    assert sentences.startswith("Margin 0.03: not told. The 95% interval is ")
    assert "not all of it above \N{MINUS SIGN}0.030; one-sided p = 0.179 (below 0.025 is needed)." in sentences
    assert sentences.endswith("more tasks would show it four times in five.")
    for text in (table_text(report), report_to_markdown(report), report_page(report)):
        assert sentences in " ".join(text.split())
    assert report.verdict == "c0 is not shown to differ from before, margin 0.03: not told (correct)"
    assert Report.model_validate_json(report.model_dump_json()) == report


def test_the_headline_names_every_candidate_beside_the_margin() -> None:
    report = with_margin(pairs(400, 2, 2), pairs(200, 0, 40), pairs(200, 8, 10), pairs(200, 30, 2))
    assert wording.headline(report) == (
        "c3 is better than before; c1 is worse; c0 and c2 are not shown to differ; "
        "c0 is non-inferior, by a margin of 0.03; c1 is worse by more than 0.03; "
        "whether c2 is worse by 0.03 or more is not told"
    )


def test_a_verdict_that_the_numbers_do_not_hold_is_no_report() -> None:
    content = with_margin(pairs(124, 0, 0)).model_dump(mode="json")
    content["contrasts"][0]["margin_outcome"] = "non-inferior"
    with pytest.raises(ValidationError, match="margin_outcome 'non-inferior' does not follow from the numbers"):
        Report.model_validate(content)


def test_a_comparison_without_a_margin_says_nothing_of_one() -> None:
    report = bare_report()
    assert wording.margins(report) == []
    assert {row.margin_outcome for row in report.contrasts} == {None}
    assert "argin" not in report_to_markdown(report)


def test_a_margin_as_large_as_the_range_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        contrasts(1.0, pairs(20, 1, 1))
    assert str(caught.value) == (
        "compare.non_inferior: the scores of 'correct' span 1.000, so a margin of 1 says nothing; take a smaller one, "
        "and --resume to use the episodes that ran"
    )


@pytest.mark.parametrize("margin", [0.0, -0.03, float("nan"), float("inf")])
def test_a_margin_is_a_number_above_0(margin: float) -> None:
    with pytest.raises(ValidationError):
        CompareOptions(non_inferior=margin)


def test_the_flag_is_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ["--config", str(ROOT / "examples/math_duo/bridge.toml"), "--run", str(tmp_path / "run")]
    assert cli.run(["compare", *config, "--non-inferior", "0"]) == 2
    assert capsys.readouterr().err.strip().endswith("compare.non_inferior: Input should be greater than 0")


def test_looks_on_the_way_and_a_margin_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="non_inferior: its test does not allow for the looks of stop_early"):
        CompareOptions(non_inferior=0.03, stop_early=True)


def test_a_real_comparison_tests_the_metric_and_nothing_else(lab: Lab) -> None:
    lab.answer = lambda model, _: "ok" if model.startswith("reasoner") else "yes"
    report = lab.compare(tasks=6, non_inferior=0.4)
    (main,) = report.contrasts
    assert main.non_inferiority is not None
    # Nothing changed: z^2 = 6 x 0.4 / 0.6, one-sided p = 0.0228.
    assert main.non_inferiority.p_value == pytest.approx(0.02275, abs=1e-5)
    assert main.margin_outcome == "non-inferior"
    assert all(row.non_inferiority is None for row in report.secondary)
    assert Report.model_validate_json((lab.run / "report.json").read_text()) == report
    # The margin concerns the report only: no episode is run again.
    episodes = len(lab.stored())
    again = lab.compare(tasks=6, non_inferior=0.3, resume=True)
    assert again.contrasts[0].margin_outcome == "not told"
    assert len(lab.stored()) == episodes
