"""Owns: what a run of each team costs, and which teams are efficient.

- A run's cost is that of its calls at the prices of the file, known only where every call has one.
- Efficient is what no other team beats in score and cost; page, Markdown, table and report.json name the same teams.
- Without prices nothing is said of money, and a price file that is wrong is refused before anything runs.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.compare_rig import PRICES, Lab, lab_in
from support.sample_report import full_report

from marft_bridge.common.errors import ConfigError
from marft_bridge.comparison.choices import is_efficient
from marft_bridge.comparison.markdown import report_to_markdown
from marft_bridge.comparison.page import report_page
from marft_bridge.comparison.records import Report
from marft_bridge.comparison.table import report_table

BEFORE: dict[str, Any] = {"name": "before"}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with lab_in(tmp_path) as opened:
        yield opened


@pytest.fixture
def prices(tmp_path: Path) -> str:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES)
    return str(path)


@pytest.mark.parametrize(
    ("points", "efficient"),
    [
        ([(1.0, 0.5), (2.0, 0.8), (3.0, 0.9)], [True, True, True]),
        ([(1.0, 0.5), (2.0, 0.4), (1.5, 0.5)], [True, False, False]),  # as good for more is not efficient
        ([(1.0, 0.5), (1.0, 0.6)], [False, True]),
        ([(1.0, 0.5), (1.0, 0.5)], [True, True]),  # neither beats the other
        ([(0.0, 0.0), (0.0, 0.0), (5.0, 0.0)], [True, True, False]),
    ],
)
def test_efficient_is_what_no_other_beats_in_score_and_cost(
    points: list[tuple[float, float]], efficient: list[bool]
) -> None:
    assert [is_efficient(point, points) for point in points] == efficient


def test_a_run_costs_what_its_calls_cost_and_hosted_and_local_are_weighed(lab: Lab, prices: str) -> None:
    hosted = {"name": "hosted", "app": f"{lab.apps}:hosted", "own_models": True}
    report = lab.compare(BEFORE, {"name": "trained", "adapters": 2}, hosted, tasks=6, prices=prices)
    assert report.currency == "EUR"
    by_team = {choice.team: choice for choice in report.choices}
    assert list(by_team) == ["before", "trained", "hosted"]
    for name, per_prompt, per_sampled in (("trained", 10, 100), ("hosted", 1000, 10000)):
        runs = [t for t in lab.stored() if t.episode.variant == name]
        tokens = [[(a.prompt_tokens, a.sampled_tokens) for a in run.actions] for run in runs]
        costs = [sum(per_prompt * p + per_sampled * s for p, s in calls) / 1e6 for calls in tokens]  # type: ignore[operator]
        assert by_team[name].cost.mean == pytest.approx(sum(costs) / len(costs))
        assert by_team[name].uncosted == 0
    assert [choice.efficient for choice in report.choices] == [True, True, False]  # a `no` is a token shorter
    row = report.contrast("hosted", "cost")
    assert row is not None
    assert row.diff == pytest.approx(by_team["hosted"].cost.mean - by_team["before"].cost.mean)


def test_a_team_with_a_call_without_a_price_is_no_choice(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text('{"currency": "EUR", "prices": [{"model": "local", "prompt": 1, "sampled": 1}]}')
    hosted = {"name": "hosted", "app": f"{lab.apps}:hosted", "own_models": True}
    report = lab.compare(BEFORE, {"name": "trained", "adapters": 2}, hosted, tasks=6, prices=str(path))
    assert [choice.team for choice in report.choices] == ["before", "trained"]
    assert report.contrast("hosted", "cost") is None
    assert report.contrast("trained", "cost") is not None


def test_without_prices_nothing_is_said_of_money(lab: Lab) -> None:
    report = lab.compare(BEFORE, {"name": "trained", "adapters": 2}, tasks=6)
    assert (report.choices, report.currency) == ((), None)
    assert report.contrast("trained", "cost") is None
    assert "Quality against cost" not in report_page(report)
    assert "Quality against cost" not in report_to_markdown(report)


def test_a_price_file_that_is_wrong_is_refused_before_anything_runs(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text("currency = 3")
    with pytest.raises(ConfigError, match=r"^compare\.prices: .*currency"):
        lab.compare(BEFORE, {"name": "trained", "adapters": 2}, prices=str(tmp_path / "prices.toml"))
    assert lab.asked == []


def test_page_markdown_table_and_json_name_the_same_teams() -> None:
    report = full_report()
    efficient = [choice.team for choice in report.choices if choice.efficient]
    assert efficient
    assert len(efficient) < len(report.choices)
    page, markdown = report_page(report), report_to_markdown(report)
    assert page.count("<td>yes</td>") == markdown.count("| yes |") == len(efficient)
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(report_table(report))
    text = " ".join(console.export_text().split())
    assert all(f"{team} " in text.split("efficient by their means:")[1] for team in efficient)
    assert Report.model_validate_json(report.model_dump_json()) == report
