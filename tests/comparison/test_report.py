"""Owns: what a report says, as a page, as Markdown, as a table and as report.json.

- the headline claims what the numbers allow, and the numbers stand beside it
- what was not measured is absent; what is drawn is written too
- the page needs nothing from elsewhere, runs nothing, and shows model texts as text
- Markdown keeps every text inside its cell, its code or its fence
- report.json has stable keys, no NaN, and reads back as an equal report
- drawings put numbers where they belong
- files are their owner's and replaced whole
- colours can be read in both schemes
"""

from __future__ import annotations

import json
import re
import stat
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from pydantic import ValidationError
from rich.console import Console
from support.sample_report import HOSTILE, NODES, bare_report, full_report, hostile_report, mixed_teams, sample_report

from marft_bridge.comparison import views, wording
from marft_bridge.comparison.curve import learning_curve
from marft_bridge.comparison.drawing import Scale, axis_ticks, scale_over, strip
from marft_bridge.comparison.markdown import code, fenced, report_to_markdown
from marft_bridge.comparison.numbers import number, p_equals, percent, signed
from marft_bridge.comparison.page import report_page, write_report
from marft_bridge.comparison.records import NodeShare, NodeSide, Report, Stopping
from marft_bridge.comparison.table import report_table
from marft_bridge.runs.learning_curve import LearningPoint

# -- what is claimed ------------------------------------------------------------------------------------------


def with_numbers(*rows: tuple[float, tuple[float, float], float], power: bool = True) -> Report:
    """A report of one candidate per row of (difference, interval, p-value); a base of 0.5 each."""
    fields: dict[str, Any] = bare_report().model_dump(exclude_computed_fields=True)
    names = ["trained", "second", "third", "fourth"][: len(rows)]
    row, (base, candidate) = fields["contrasts"][0], fields["variants"]
    fields["variants"] = [base, *({**candidate, "name": name} for name in names)]
    fields["contrasts"] = [
        {
            **row,
            "variant": name,
            "mean_a": 0.5,
            "mean_b": 0.5 + diff,
            "diff": diff,
            "ci95": interval,
            "simultaneous": interval,
            "p_value": p,
            "p_adjusted": p,
        }
        for name, (diff, interval, p) in zip(names, rows, strict=True)
    ]
    if power:
        fields["power"] = [{"variant": name, "detectable": 0.125, "tasks_more": 70, "effect": 0.1} for name in names]
    return Report.model_validate(fields)


BETTER, WORSE = (0.25, (0.125, 0.375), 0.0002), (-0.25, (-0.375, -0.125), 0.0312)
OPEN = (0.25, (-0.125, 0.5), 0.3)


@pytest.mark.parametrize(
    ("row", "headline"),
    [
        (BETTER, "trained is better than before"),
        (WORSE, "trained is worse than before"),
        (OPEN, "No difference shown between before and trained"),
        ((0.25, (0.0, 0.5), 0.03), "No difference shown between before and trained"),
        ((-0.25, (-0.5, 0.0), 0.03), "No difference shown between before and trained"),
        ((0.25, (0.125, 0.375), 0.125), "No difference shown between before and trained"),
    ],
)
def test_headline_of_one_candidate_needs_interval_and_test(
    row: tuple[float, tuple[float, float], float], headline: str
) -> None:
    assert wording.headline(with_numbers(row)) == headline


def test_headline_of_several_groups_them_by_what_is_claimed() -> None:
    assert wording.headline(with_numbers(BETTER, WORSE, OPEN, BETTER)) == (
        "trained and fourth are better than before; second is worse; third is not shown to differ"
    )
    assert wording.headline(with_numbers(WORSE, WORSE)) == "trained and second are worse than before"
    assert wording.headline(with_numbers(WORSE, OPEN)) == "trained is worse than before; second is not shown to differ"
    assert wording.headline(with_numbers(OPEN, OPEN)) == "No variant is shown to differ from before"


def test_evidence_gives_the_numbers_and_says_when_test_and_interval_disagree() -> None:
    assert wording.evidence(with_numbers(BETTER)) == (
        "Mean reward 0.750 (trained) against 0.500 (before), difference +0.250, 95% interval +0.125 to +0.375, "
        "p < 0.001, 200 pairs of 50 tasks"
    )
    assert wording.evidence(with_numbers(BETTER, OPEN)) == (
        "Difference in mean reward from before: trained +0.250 (+0.125 to +0.375); second +0.250 (−0.125 to +0.500). "
        "The 95% intervals hold together for all 2 variants; 200 pairs of 50 tasks"
    )
    excluded = (0.25, (0.125, 0.375), 0.125)
    rejected = (0.25, (0.0, 0.5), 0.03)
    assert wording.evidence(with_numbers(excluded)).endswith(
        "; the interval excludes 0, but the test does not reject at 5%"
    )
    assert wording.evidence(with_numbers(rejected)).endswith("; the test rejects at 5%, but the interval holds 0")
    several = dict(wording.unsettled(with_numbers(excluded, rejected, BETTER, power=False)))
    assert several == {
        "trained": "The interval excludes 0, but the test does not reject at 5%.",
        "second": "The test rejects at 5%, but the interval holds 0.",
    }


def test_only_open_candidates_are_told_what_would_settle_them() -> None:
    found = wording.unsettled(with_numbers(BETTER, OPEN))
    assert found == [
        (
            "second",
            "A true difference of 0.125 would have been found four times in five. If the difference that was seen "
            "(+0.250) is the true one, about 70 more tasks would show it four times in five.",
        )
    ]
    fields = with_numbers(OPEN).model_dump(exclude_computed_fields=True)

    def told(**power: Any) -> list[tuple[str, str]]:
        row = {"variant": "trained", "detectable": None, "tasks_more": None, "effect": None}
        return wording.unsettled(Report.model_validate({**fields, "power": [{**row, **power}]}))

    assert told() == []
    roughly = {7: "7 more", 99: "99 more", 291: "300 more", 33_983: "34,000 more", 1_000: "1,000 more"}
    assert all(f"about {words} tasks" in told(tasks_more=n, effect=0.1)[0][1] for n, words in roughly.items())
    assert "as many tasks as these show it" in told(tasks_more=0, effect=0.25)[0][1]
    assert "too small for any affordable number" in told(effect=1e-6)[0][1]


def test_pairs_and_tasks_are_told_apart_and_ranges_given() -> None:
    rows = full_report().contrasts
    assert wording.sizes(rows) == "120 tasks"
    fewer = rows[0].model_copy(update={"n": 116, "clusters": 116})
    assert wording.sizes([fewer, *rows[1:]]) == "116 to 120 tasks"
    assert wording.sizes([fewer.model_copy(update={"n": 118})]) == "118 pairs of 116 tasks"


def test_the_end_says_whether_it_was_early() -> None:
    early = wording.describe_stopping(Stopping(planned=120, used=60, looks=(30, 60), spent=0.0124, early=True))
    assert early.startswith("Ended early, after 60 of 120 planned tasks: every candidate was settled.")
    assert "Looked at after 30 and 60 tasks" in early
    assert "1.2% was spent" in early
    whole = wording.describe_stopping(Stopping(planned=120, used=120, looks=(60, 120), spent=0.05, early=False))
    assert whole.startswith("Ran to 120 of 120 planned tasks.")


def test_a_node_is_better_or_worse_only_by_its_interval() -> None:
    def share(interval: tuple[float, float] | None, **others: Any) -> NodeShare:
        return NodeShare(node="n", alone=0.5, alone_ci95=(0.4, 0.6), shapley=0.1, shapley_ci95=interval, **others)

    assert wording.share_outcome(share((0.05, 0.15))) == "better"
    assert wording.share_outcome(share((-0.05, 0.15))) == "not shown"
    assert wording.share_outcome(share((-0.15, -0.05))) == "worse"
    assert wording.share_outcome(share(None)) == "not shown"
    assert wording.share_outcome(share(None).model_copy(update={"shapley": None})) == "better"  # by itself alone
    assert wording.moved_nodes(mixed_teams(0.4, 0.6, 100)) == "planner better, executor worse"


# -- files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sample_report, full_report, bare_report, hostile_report])
def test_report_json_reads_back_as_an_equal_report(make: Any, tmp_path: Path) -> None:
    report = make()
    path, _, _ = write_report(report, tmp_path)
    text = path.read_text("utf-8")
    assert Report.model_validate_json(text) == report
    content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in report.json"))
    assert content["schema_version"] == 2
    assert content["verdict"] == report.verdict
    assert list(content) == sorted(content)


def test_a_verdict_that_the_numbers_do_not_carry_is_refused(tmp_path: Path) -> None:
    path, _, _ = write_report(with_numbers(OPEN), tmp_path)
    changed = path.read_text("utf-8").replace("is not shown to differ from", "is better than")
    with pytest.raises(ValidationError, match="does not follow from the numbers"):
        Report.model_validate_json(changed)


def test_files_belong_to_their_owner_and_are_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "report"
    write_report(sample_report(), folder)
    paths = write_report(sample_report(name="second"), folder)
    assert [p.name for p in paths] == ["report.json", "report.html", "report.md"]
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 and "second" in p.read_text("utf-8") for p in paths)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(p.name for p in folder.iterdir()) == ["report.html", "report.json", "report.md"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_report(sample_report(), tmp_path)
    before = [path.read_bytes() for path in paths]

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("marft_bridge.common.files.os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_report(sample_report(name="second"), tmp_path)
    assert [path.read_bytes() for path in paths] == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]


def test_half_a_surrogate_pair_does_not_stop_the_report(tmp_path: Path) -> None:
    path, page, markdown = write_report(sample_report(name="broken \ud83d text"), tmp_path)
    assert json.loads(path.read_text("utf-8"))["variants"][1]["name"] == "broken \ufffd text"
    assert "broken \ufffd text" in page.read_text("utf-8")
    assert r"broken \ufffd text" in markdown.read_text("utf-8") or "broken \ufffd text" in markdown.read_text("utf-8")


# -- the page -------------------------------------------------------------------------------------------------


class _Tags(HTMLParser):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[str] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "h2":
            self.headings.append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.tags and self.tags[-1][0] == "h2" and not self.headings[-1]:
            self.headings[-1] = data

    def of(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


def test_model_texts_stay_text() -> None:
    page = _Tags(report_page(hostile_report()))
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "iframe", "object", "link", "base", "form", "a"}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert len(page.of("style")) == 1
    seen = HOSTILE.replace("\r", "\\r").replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert page.text.count(seen) >= 12
    assert "49" not in re.findall(r"\b49\b", page.text.replace("0.49", ""))


def test_no_text_turns_the_writing_direction_of_what_follows() -> None:
    page = report_page(hostile_report())
    assert "\u202e" not in page
    assert not re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page)
    assert "\tindented\n" in report_page(hostile_report("\tindented\n"))


def test_page_needs_nothing_from_elsewhere() -> None:
    for report in (sample_report(), full_report(), bare_report()):
        source = report_page(report)
        assert re.findall(r"https?://[^\"\s]*", source.replace('xmlns="http://www.w3.org/2000/svg"', "")) == []
        assert "@import" not in source
        assert "url(" not in source
        page = _Tags(source)
        assert not [a for _, attributes in page.tags for a in attributes if a in {"src", "href", "srcset", "data"}]
        assert any("default-src 'none'" in (attributes.get("content") or "") for attributes in page.of("meta"))


def test_page_opens_with_the_verdict_and_then_its_numbers() -> None:
    for report in (sample_report(), full_report()):
        source = report_page(report)
        assert source.lstrip().startswith("<!doctype html>")
        first, second = source[source.index("<main>") :].split("\n")[1:3]
        assert re.sub("<[^>]*>", "", first) == wording.headline(report)
        assert re.sub("<[^>]*>", "", second) == f"{wording.evidence(report)}."
        assert f"<title>{wording.headline(report)} (reward)</title>" in source


def test_tables_are_labelled_and_ids_are_unique() -> None:
    page = _Tags(report_page(full_report()))
    assert len(page.of("th")) > 30
    assert all(attributes.get("scope") in {"col", "row", "rowgroup"} for attributes in page.of("th"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) == 8  # the title and description of both drawings, for two widths
    for _, attributes in page.tags:
        assert set((attributes.get("aria-labelledby") or "").split()) <= set(ids)


def test_page_shows_what_there_is_and_nothing_else() -> None:
    assert _Tags(report_page(bare_report())).headings == ["All metrics", "How this was measured"]
    assert "n/a" not in report_page(bare_report())
    assert _Tags(report_page(full_report())).headings == [
        "What this comparison could find",
        "How it ended",
        "All metrics",
        "Several samples of a task",
        "Learning curve",
        "Quality against cost",
        "Which agent moved",
        "Cohorts",
        "What each node did",
        "Tasks that changed most",
        "Episodes without a score",
        "How this was measured",
    ]
    assert "What this comparison could find" not in report_page(with_numbers(BETTER))


def test_every_figure_of_the_report_is_on_the_page() -> None:
    report = full_report()
    text = _Tags(report_page(report)).text
    for row in (*report.contrasts, *report.secondary):
        for figure in (number(row.mean_b), signed(row.diff), signed(row.simultaneous[0]), signed(row.simultaneous[1])):
            assert figure in text
    assert report.mixed is not None
    for team in report.mixed.teams:
        assert number(team.score.mean) in text
    for share in report.mixed.shares:
        assert signed(share.shapley or 0.0) in text
        assert signed(share.without or 0.0) in text
    for cohort in report.cohorts:
        assert cohort.value in text
        for row in cohort.contrasts:
            assert signed(row.diff) in text
    assert "topic riddles (3 tasks)" in text
    assert "time limit (3); failed (1)" in text
    for step in report.tasks[0].improved[0].b.steps:
        assert step.text in text


def test_tools_that_differ_are_said() -> None:
    report = full_report()
    assert "differ between the variants" not in report_page(report)
    differing = report.model_copy(update={"setup": report.setup.model_copy(update={"tool_surface_differs": True})})
    assert "differ between the variants" in report_page(differing)
    said = "the tools that the variants were offered differ"
    assert [said in report_to_markdown(r) for r in (report, differing)] == [False, True]


def _luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, WCAG 2.2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_can_be_read_in_both_schemes() -> None:
    schemes = re.findall(r":root \{([^}]*--page:[^}]*)\}", report_page(sample_report()))
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", scheme))

        def contrast(ink: str, ground: str, colours: dict[str, str] = colours) -> float:
            light, dark = sorted((_luminance(colours[ink]), _luminance(colours[ground])), reverse=True)
            return (light + 0.05) / (dark + 0.05)

        for ground in ("page", "card", "code"):
            for ink in ("ink", "quiet", "better", "worse", "none"):
                assert contrast(ink, ground) >= 4.5, (ink, ground)
        assert contrast("card", "better") >= 4.5  # letters on a chip
        assert contrast("base", "card") >= 3  # a bar


# -- Markdown -------------------------------------------------------------------------------------------------


def _parsed(text: str) -> list[Any]:
    tokens: list[Any] = []
    for token in MarkdownIt("commonmark").enable(["table"]).parse(text):
        tokens += [token, *(token.children or [])]
    return tokens


def test_markdown_keeps_every_text_in_its_place() -> None:
    plain, hostile = (_parsed(report_to_markdown(report)) for report in (full_report(), hostile_report()))
    assert {token.type for token in hostile} <= {token.type for token in plain} | {"html_inline"}
    assert {token.content for token in hostile if token.type == "html_inline"} == {"<code>", "</code>"}
    assert not [t for t in hostile if t.type in {"html_block", "link_open", "image"}]
    own, plain_own = (
        {heading.content.split(":")[0] for opened, heading in pairwise(tokens) if opened.type == "heading_open"}
        for tokens in (hostile, plain)
    )
    sections = {heading for heading in plain_own if not heading.startswith(("`", "+", "−"))}
    assert {heading for heading in own if not heading.startswith(("`", "<", "+", "−"))} == sections


def test_markdown_tables_have_as_many_cells_in_every_row() -> None:
    for report in (sample_report(), full_report(), hostile_report(), bare_report()):
        text = report_to_markdown(report)
        tables: list[list[int]] = []
        for token in _parsed(text):
            if token.type == "table_open":
                tables.append([])
            elif token.type == "tr_open":
                tables[-1].append(0)
            elif token.type in {"th_open", "td_open"}:
                tables[-1][-1] += 1
        written = [block.split("\n") for block in text.split("\n\n") if block.startswith("| ")]
        assert [len(rows) for rows in tables] == [len(lines) - 1 for lines in written]  # all but the rule
        for lines in written:
            assert len({line.count("|") for line in lines}) == 1


_AS_THEY_ARE = (
    "plain",
    "a|b",
    "a`b",
    "``",
    "\\",
    "a\\|b",
    "|",
    "<b>",
    "&amp;",
    "*a* _b_ $c$ @d #1",
    "[a](b)",
    "https://c",
)
NAMES = {
    **{name: name for name in _AS_THEY_ARE},
    "": "(empty)",
    " x ": "x",
    "a\nb": r"a\nb",
    "\u202egnp": r"\u202egnp",
    "x" * 90: "x" * 79 + "…",
    HOSTILE: HOSTILE[:79] + "…",
}


@pytest.mark.parametrize("text", NAMES)
def test_a_name_in_a_cell_reads_as_it_is(text: str) -> None:
    """Rendered by another implementation: one cell, whose text is the name, with what is not printable escaped."""
    source = f"| a | b |\n| --- | --- |\n| {code(text)} | next |"
    html = MarkdownIt("commonmark").enable(["table"]).render(source)
    cells = re.findall(r"<td>(.*?)</td>", html, re.DOTALL)
    assert len(cells) == 2
    assert cells[1] == "next"
    cell = _Tags(cells[0])
    assert [tag for tag, _ in cell.tags] == ["code"]
    assert cell.text == NAMES[text]


@pytest.mark.parametrize("text", ["plain", "```", "a\n````\nb", "~~~\n# x", "", "\ttab", "a\rb", HOSTILE])
def test_a_fence_holds_its_text(text: str) -> None:
    tokens = _parsed(f"before\n\n{fenced(text)}\n\nafter")
    kinds = [token.type for token in tokens if token.type not in {"inline", "text"}]
    assert kinds == ["paragraph_open", "paragraph_close", "fence", "paragraph_open", "paragraph_close"]
    shown = text.replace("\t", "    ").replace("\r", "\\r").replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert tokens[kinds.index("fence") + 2].content == shown + "\n"


def test_a_long_text_is_cut_and_the_cut_is_said() -> None:
    assert fenced("x" * 5000) == f"```text\n{'x' * 1200}\n```\n\n(3,800 more characters in report.json)"


def test_a_table_of_cohorts_in_markdown_has_each_cell_under_its_heading() -> None:
    report = full_report()
    (table,) = re.findall(r"^## Cohorts\n\n[^|]*((?:\|.*\n)+)", report_to_markdown(report), re.MULTILINE)
    header, _, *rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    cells = [dict(zip(header, row, strict=True)) for row in rows]
    judged = [cohort for cohort in report.cohorts if cohort.contrasts]
    assert {row["field"] for row in cells} == {"topic"}
    assert {row["value"] for row in cells} == {cohort.value for cohort in judged}
    assert {row["variant"] for row in cells} == {candidate.name for candidate in report.candidates}


def test_markdown_says_what_the_page_says() -> None:
    report = full_report()
    text = report_to_markdown(report)
    assert text.startswith("# `trained` is better than `before`; `one agent` is worse; `larger model` and `hosted` are")
    headings = re.findall("^## ([^:\n]*)", text, re.MULTILINE)
    assert headings == [
        "All metrics",
        "What this comparison could find",
        "How it ended",
        "The variants",
        "Learning curve",
        "Quality against cost",
        "Which agent moved",
        "What each node did",
        "Cohorts",
        "Most improved",
        "Most regressed",
        "Most regressed",
        "Episodes without a score",
        "How this was measured",
    ]
    assert "`planner` better, `executor` worse" in text
    for row in (*report.contrasts, *report.secondary):
        assert f"{signed(row.diff)} | {signed(row.simultaneous[0])} to {signed(row.simultaneous[1])}" in text
    bare = report_to_markdown(bare_report())
    assert re.findall("^## (.*)", bare, re.MULTILINE) == ["All metrics", "The variants", "How this was measured"]


# -- the table ------------------------------------------------------------------------------------------------


def _printed(report: Report, width: int = 120) -> str:
    console = Console(width=width, record=True, file=Path("/dev/null").open("w", encoding="utf-8"))  # noqa: SIM115
    with console.file:
        console.print(report_table(report))
        return console.export_text()


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


def test_table_of_one_candidate_shows_every_metric_and_names_as_they_are() -> None:
    text = _printed(sample_report(name="[red]new[/red]"))
    assert "[red]new[/red] is better than before" in text
    rows = _rows(text)
    assert [row[0] for row in rows] == ["reward", "tokens", "steps", "seconds"]
    assert rows[0][1:] == ["0.300", "0.445", "▲ +0.145", "+0.040 to +0.235", "0.005"]


def test_table_of_several_candidates_names_each_once_and_says_what_is_open() -> None:
    text = _printed(full_report())
    rows = _rows(text)
    assert [row[0] for row in rows if row[0]] == ["trained", "one agent", "larger model", "hosted"]
    assert [row[1] for row in rows] == ["reward", "safety", "tokens", "seconds"] * 4
    notes = " ".join(text.split("└")[1].split())
    assert "larger model: A true difference of" in notes
    assert "which agent moved: planner better, executor worse" in notes


def test_table_holds_no_escape_sequence() -> None:
    text = _printed(hostile_report())
    assert not [c for c in text if c != "\n" and not c.isprintable()]
    assert r"\x1b" in _printed(sample_report(name="\x1b[2J"))


# -- numbers and drawings -------------------------------------------------------------------------------------


def test_numbers_read_as_people_write_them() -> None:
    figures = (0.4449, -12.345, 1234.5, 0.00042, 0.0, 0.0099999, None)
    assert [number(x) for x in figures] == ["0.445", "−12.3", "1,234", "0.00042", "0.000", "0.010", "n/a"]
    assert [signed(x) for x in (0.5, -0.5, 0.0)] == ["+0.500", "−0.500", "0.000"]
    assert [p_equals(p) for p in (0.0004, 0.0312)] == ["p < 0.001", "p = 0.031"]
    shares = (0.934, 0.0, 0.001, 0.999, 1.0, None)
    assert [percent(x) for x in shares] == ["93%", "0%", "< 1%", "> 99%", "100%", "n/a"]


def test_axis_ticks_are_round_and_inside() -> None:
    assert axis_ticks(-0.13, 0.31, 5) == pytest.approx([-0.1, 0.0, 0.1, 0.2, 0.3])
    assert axis_ticks(0.0, 1000.0, 6) == pytest.approx([0, 200, 400, 600, 800, 1000])
    for low, high in ((0.2401, 0.2409), (-3e5, 2e6), (5.0, 5.0)):
        ticks = axis_ticks(low, high, 6)
        assert len(ticks) <= 6
        assert all(low - 1e-9 <= t <= high + 1e-9 for t in ticks)


SVG = "{http://www.w3.org/2000/svg}"


def _elements(drawing: str) -> list[ET.Element]:
    return list(ET.fromstring(drawing).iter())  # noqa: S314  (drawn here, not received)


def _of_class(drawing: str, name: str) -> list[ET.Element]:
    return [e for e in _elements(drawing) if (e.get("class") or "").split()[:1] == [name]]


def _ends(element: ET.Element) -> tuple[float, float]:
    found = re.fullmatch(r"M([\d.]+) 14H([\d.]+)", element.get("d") or "")
    assert found is not None
    return float(found[1]), float(found[2])


def test_a_strip_puts_numbers_where_they_belong() -> None:
    scale = Scale(-1.0, 1.0)
    drawing = strip(scale, 0.5, reference=0.0, inner=(0.25, 0.75), outer=(0.0, 1.0))
    assert float(_of_class(drawing, "reference")[0].get("x1") or "") == 50
    assert _ends(_of_class(drawing, "interval")[0]) == (62.5, 87.5)
    assert _ends(_of_class(drawing, "whisker")[0]) == (50, 100)
    assert _ends(_of_class(drawing, "estimate")[0]) == (75, 75.01)
    assert scale.ticks(5) == [(0.0, "−1.0"), (25.0, "−0.5"), (50.0, "0.0"), (75.0, "0.5"), (100.0, "1.0")]
    bare = strip(scale, 0.5, reference=0.0)
    assert _of_class(bare, "interval") == _of_class(bare, "whisker") == []


def test_all_that_a_forest_shows_lies_inside_it() -> None:
    report = full_report()
    assert report.mixed is not None
    forests = [
        views.difference_forest(report),
        views.team_forest(report.mixed, "before"),
        views.share_forest(report.mixed),
    ]
    forests += [view.forest for view in views.cohort_views(report)]
    for forest in forests:
        for row in forest.rows:
            for element in _elements(row.strip):
                if element.get("d"):
                    assert 0 < _ends(element)[0] < _ends(element)[1] < 100
                elif element.get("x1"):
                    assert 0 < float(element.get("x1") or "") < 100
        assert all(0 <= at <= 100 for at, _ in forest.ticks)
    assert scale_over([0.0]).position(0.0) == 50  # one value alone still has a range


def test_a_tone_is_never_said_by_colour_alone() -> None:
    report = with_numbers(BETTER, WORSE, OPEN)
    rows = views.difference_forest(report).rows
    assert [(row.tone, row.mark) for row in rows] == [("better", "▲"), ("worse", "▼"), ("none", "○")]
    shares = views.share_forest(mixed_teams(0.4, 0.6, 100)).rows
    assert [(row.tone, row.mark, row.note) for row in shares] == [("better", "▲", "better"), ("worse", "▼", "worse")]


def test_candidates_that_ran_different_tasks_say_how_many() -> None:
    report = full_report()
    assert {row.note for row in views.difference_forest(report).rows} == {""}
    first, *others = report.contrasts
    settled = report.model_copy(update={"contrasts": (first.model_copy(update={"n": 60, "clusters": 60}), *others)})
    assert [row.note for row in views.difference_forest(settled).rows] == ["60 tasks"] + ["120 tasks"] * 3


def test_a_score_over_other_episodes_than_the_pairs_is_said_to_be_so() -> None:
    report = sample_report()
    note = "These means are over all"
    assert views.scores_rest_on_pairs(report)
    assert note not in report_page(report)
    (base, candidate), (row,) = report.variants, report.contrasts
    assert candidate.score is not None
    moved = candidate.model_copy(update={"score": candidate.score.model_copy(update={"mean": row.mean_b + 0.01})})
    assert note in report_page(report.model_copy(update={"variants": (base, moved)}))


def test_teams_are_drawn_against_the_base() -> None:
    mixed = mixed_teams(0.4, 0.6, 100)
    forest = views.team_forest(mixed, "before")
    assert [(row.chips, row.note) for row in forest.rows] == [
        ((("planner", False), ("executor", False)), "before"),
        ((("planner", True), ("executor", False)), ""),
        ((("planner", False), ("executor", True)), ""),
        ((("planner", True), ("executor", True)), "trained"),
    ]
    lines = {float(_of_class(row.strip, "reference")[0].get("x1") or "") for row in forest.rows}
    assert lines == {round(_ends(_of_class(forest.rows[0].strip, "estimate")[0])[0], 2)}


def test_nodes_swapped_one_at_a_time_have_no_shapley_share() -> None:
    whole = full_report()
    assert whole.mixed is not None
    shares = tuple(share.model_copy(update={"shapley": None, "shapley_ci95": None}) for share in whole.mixed.shares)
    unknown = NodeShare(node="silent", alone=None)
    mixed = whole.mixed.model_copy(update={"complete": False, "shares": (*shares, unknown)})
    report = whole.model_copy(update={"mixed": mixed})
    assert [row.label for row in views.share_forest(mixed).rows] == ["planner", "executor"]
    assert wording.moved_nodes(mixed) == "planner better, executor not shown to matter, silent not shown to matter"
    text = _Tags(report_page(report)).text
    assert "each node was swapped on its own" in text
    assert "Shapley" not in text
    assert "| `silent` |   |   |\n" in report_to_markdown(report)
    assert "Shapley" not in report_to_markdown(report)


def test_node_figures_are_drawn_to_scale_and_absent_ones_left_out() -> None:
    measures = {measure.name: measure for measure in views.node_measures(NODES["executor"])}
    tokens = measures["sampled tokens per call"].bars
    assert [(bar.variant, bar.text) for bar in tokens] == [("before", "25.9"), ("trained", "21.7")]
    assert [bar.length for bar in tokens] == pytest.approx([1.0, 21.7 / 25.9])
    assert [bar.length for bar in measures["ended by itself"].bars] == [0.88, 0.997]  # of all calls, not of the longest
    assert [bar.variant for bar in measures["mean log-prob of a token"].bars] == ["before"]
    assert [bar.text for bar in measures["KL to the base model, nats per token"].bars] == ["0.021 (32 calls)"]
    assert "output fits its format" not in measures
    assert [bar.text for bar in measures["calculator"].bars] == ["66% (61)", "97% (140)"]
    assert [measure.name for measure in measures.values() if measure.tool] == ["calculator", "search", "python"]


def test_a_node_with_many_tools_shows_the_most_called_and_sums_the_rest() -> None:
    tools = {f"tool {i:02d}": 100 - i for i in range(20)}
    side = NodeSide(calls_per_episode=None, tokens_mean=None, stop_share=None, logprob_mean=None, tools=tools)
    measures = views.node_measures({"before": side})
    assert [measure.name for measure in measures] == [f"tool {i:02d}" for i in range(7)] + ["calls to 13 other tools"]
    rest = sum(range(81, 94))
    assert measures[-1].bars[0].text == f"{rest / sum(tools.values()):.0%} ({rest:,})"
    assert sum(measure.bars[0].length or 0 for measure in measures) == pytest.approx(1)


def _point(i: int, mean: float | None, half: float | None = None, phase: str = "online") -> LearningPoint:
    low, high = (None, None) if mean is None or half is None else (mean - half, mean + half)
    return LearningPoint(round=i, phase=phase, episodes=8, reward_mean=mean, reward_low=low, reward_high=high)


def test_learning_curve_has_one_marker_per_known_round_and_gaps_elsewhere() -> None:
    rounds = [_point(0, 0.0, 0.1, "offline"), _point(1, 0.5, 0.1), _point(2, None), _point(3, 1.0), _point(4, 0.5, 0.2)]
    drawing = learning_curve(rounds, width=400, name="c")
    lines = [[p.split(",") for p in (e.get("points") or "").split()] for e in _of_class(drawing, "curve")]
    assert [len(line) for line in lines] == [2, 2]  # the round without a reward breaks the line
    assert len(_of_class(drawing, "band")) == 2  # round 3 has no interval
    markers = [e for e in _of_class(drawing, "marker") if (e.findtext(f"{SVG}title") or "").startswith("round")]
    assert [e.findtext(f"{SVG}title") for e in markers][:2] == [
        "round 0 (offline): 0, -0.1 to 0.1, 8 episodes",
        "round 1 (online): 0.5, 0.4 to 0.6, 8 episodes",
    ]
    heights = [float(e.get("cy", "")) for e in markers]
    assert heights[1] == pytest.approx((heights[0] + heights[2]) / 2, abs=0.15)  # 0.5 halfway between 0 and 1
    assert heights[1] == heights[3]
    assert [e.get("class") for e in markers] == ["marker hollow", "marker", "marker", "marker"]


@pytest.mark.parametrize("rounds", [[_point(3, 0.5)], [_point(0, None)], [_point(i, 0.25, 0.0) for i in range(300)]])
def test_learning_curve_draws_any_number_of_rounds_inside_its_frame(rounds: list[LearningPoint]) -> None:
    drawing = learning_curve(rounds, width=320, name="c")
    labels = [e for e in _of_class(drawing, "tick") if e.get("text-anchor") == "middle"]
    assert 1 <= len(labels) <= 14
    for element in _elements(drawing):
        assert 0 <= float(element.get("cx", "1")) <= 320
        assert 0 <= float(element.get("cy", "1")) <= 270
