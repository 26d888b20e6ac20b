"""Owns: what a report says and how it is written.

- the verdict follows from the numbers: a difference only where interval and test both show one
- report.json has the agreed fields, stable keys, no NaN, and reads back as an equal report
- the page needs nothing from elsewhere, runs nothing, and shows model texts as text
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
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console
from sample_report import sample_report, task_change

from marft_bridge.report import (
    Comparison,
    LearningPoint,
    NodeOutput,
    Report,
    Side,
    changed_tasks,
    report_page,
    report_table,
    secondary_metrics,
    write_report,
)
from marft_bridge.report_numbers import number, p_equals, percent, signed
from marft_bridge.report_svg import axis_ticks, difference_bar, learning_curve
from marft_bridge.statistics import PairedResult

HOSTILE = "</script></pre><script>alert(1)</script><img src=x onerror=alert(2)>\"'{{ 7*7 }} </svg>"


def with_numbers(diff: float, ci95: tuple[float, float], p_value: float, mde: float | None = 0.125) -> Report:
    fields = sample_report().model_dump(exclude={"verdict"})
    fields |= {"mean_a": 0.5, "mean_b": 0.5 + diff, "diff": diff, "ci95": ci95, "p_value": p_value}
    return Report.model_validate(fields | {"minimum_detectable_effect": mde})


@pytest.mark.parametrize(
    ("diff", "ci95", "p_value", "verdict"),
    [
        (0.25, (0.125, 0.375), 0.0002, "b is better: reward 0.750 (trained) against 0.500 (base), difference +0.250"),
        (-0.25, (-0.375, -0.125), 0.0312, "b is worse: reward 0.250 (trained) against 0.500 (base), difference −0.250"),
        (0.25, (-0.125, 0.5), 0.3, "no difference shown: "),
        (0.25, (0.0, 0.5), 0.03, "no difference shown: "),
        (-0.25, (-0.5, 0.0), 0.03, "no difference shown: "),
        (0.25, (0.125, 0.375), 0.125, "no difference shown: "),
    ],
)
def test_verdict_follows_from_interval_and_test(
    diff: float, ci95: tuple[float, float], p_value: float, verdict: str
) -> None:
    assert with_numbers(diff, ci95, p_value).verdict.startswith(verdict)


def test_verdict_without_a_difference_says_what_would_have_been_found() -> None:
    assert with_numbers(0.0, (-0.1, 0.1), 1.0).verdict.endswith(
        "a true difference of 0.125 would have been found four times in five"
    )
    assert with_numbers(0.0, (0.0, 0.0), 1.0, mde=None).verdict.endswith("200 pairs of 50 tasks")
    assert "the test does not reject" in with_numbers(0.25, (0.125, 0.375), 0.125).verdict


def test_report_json_has_the_agreed_fields(tmp_path: Path) -> None:
    path, _ = write_report(sample_report(), tmp_path)
    content = json.loads(path.read_text("utf-8"))
    assert set(content) == {
        *("metric", "n", "clusters", "mean_a", "mean_b", "diff", "ci95", "p_value", "test", "a", "b", "seed"),
        *("verdict", "metrics", "nodes", "learning_curve", "tasks", "setup", "minimum_detectable_effect", "created"),
    }
    assert content["a"] == {"name": "base", "adapters": {"reasoner": 0, "actor": 0}}
    assert len(content["ci95"]) == 2
    assert content["verdict"].startswith("b is better")
    assert set(content["nodes"]["reasoner"]["a"]) == {"tokens_mean", "stop_share", "calls_per_episode", "logprob_mean"}
    assert content["nodes"]["actor"]["b"]["logprob_mean"] is None
    assert list(content) == sorted(content)


def test_report_json_reads_back_as_an_equal_report(tmp_path: Path) -> None:
    report = sample_report()
    path, _ = write_report(report, tmp_path)
    assert Report.model_validate_json(path.read_text("utf-8")) == report


def test_stored_verdict_that_does_not_follow_from_the_numbers_is_refused() -> None:
    fields = sample_report().model_dump()
    with pytest.raises(ValidationError, match="does not follow from the numbers"):
        Report.model_validate(fields | {"verdict": "b is better: trust me"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"diff": float("nan")}, "finite"),
        ({"surprise": 1}, "Extra inputs"),
        ({"ci95": (0.2, 0.1)}, "runs backwards"),
        ({"diff": 0.9}, "is not mean_b"),
        ({"p_value": 1.5}, "less than or equal to 1"),
    ],
)
def test_numbers_that_contradict_themselves_are_refused(change: dict[str, object], message: str) -> None:
    fields = sample_report().model_dump(exclude={"verdict"})
    with pytest.raises(ValidationError, match=message):
        Report.model_validate(fields | change)


def test_secondary_p_values_are_corrected_as_one_family() -> None:
    results = [
        PairedResult(name, 4, 4, 0.0, 1.0, 1.0, (0.5, 1.5), p, "t") for name, p in (("tokens", 0.04), ("steps", 0.01))
    ]
    assert [(m.metric, m.p_value, m.p_holm) for m in secondary_metrics(results)] == [
        ("tokens", 0.04, 0.04),
        ("steps", 0.01, 0.02),
    ]


def test_changed_tasks_are_the_five_largest_of_each_direction() -> None:
    gains = [0.1, -0.2, 0.7, 0.0, 0.3, 0.6, 0.5, -0.9, 0.4]
    found = changed_tasks(task_change(i, 0.0, gain) for i, gain in enumerate(gains))
    assert [t.reward_b for t in found.improved] == [0.7, 0.6, 0.5, 0.4, 0.3]
    assert [t.reward_b for t in found.regressed] == [-0.9, -0.2]


def test_files_belong_to_their_owner_and_are_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "report"
    write_report(sample_report(), folder)
    paths = write_report(sample_report(name_b="second"), folder)
    assert [p.name for p in paths] == ["report.json", "report.html"]
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 and "second" in p.read_text("utf-8") for p in paths)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(p.name for p in folder.iterdir()) == ["report.html", "report.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = write_report(sample_report(), tmp_path)
    before = path.read_bytes()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("marft_bridge.files.os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_report(sample_report(name_b="second"), tmp_path)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.json"]


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile_report() -> Report:
    change = task_change(0, 0.0, 1.0)
    change = change.model_copy(
        update={
            "text": HOSTILE,
            "expected": HOSTILE,
            "task_id": HOSTILE,
            "outputs_b": (NodeOutput(node=HOSTILE, text=HOSTILE),),
        }
    )
    report = sample_report(name_b=HOSTILE)
    nodes = {HOSTILE: report.nodes["actor"]}
    curve = tuple(p.model_copy(update={"phase": HOSTILE}) for p in report.learning_curve[:1])
    return report.model_copy(
        update={
            "tasks": changed_tasks([change]),
            "nodes": nodes,
            "learning_curve": curve + report.learning_curve[1:],
            "a": Side(name="base", adapters={HOSTILE: 3}),
        }
    )


def test_model_texts_stay_text() -> None:
    page = _Tags()
    page.feed(report_page(hostile_report()))
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "iframe", "object", "link", "base", "form"}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.text.count(HOSTILE) >= 6
    assert "49" not in re.findall(r"\b49\b", page.text.replace("0.49", ""))


def test_page_needs_nothing_from_elsewhere() -> None:
    source = report_page(sample_report())
    assert re.findall(r"https?://[^\"\s]*", source.replace('xmlns="http://www.w3.org/2000/svg"', "")) == []
    assert "@import" not in source
    assert "url(" not in source
    page = _Tags()
    page.feed(source)
    assert not [a for _, attributes in page.tags for a in attributes if a in {"src", "href", "srcset", "data"}]
    assert any("default-src 'none'" in (attributes.get("content") or "") for _, attributes in page.tags)


def test_page_opens_with_the_verdict_and_labels_its_tables() -> None:
    report = sample_report()
    source = report_page(report)
    assert source.lstrip().startswith("<!doctype html>")
    body = source[source.index("<main>") :]
    assert body.split("\n")[1] == "<h1>trained is better than base</h1>"
    assert f"<title>{report.verdict}</title>" in source
    page = _Tags()
    page.feed(source)
    headers = [attributes for tag, attributes in page.tags if tag == "th"]
    assert headers
    assert all(attributes.get("scope") in {"col", "row"} for attributes in headers)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        assert set((attributes.get("aria-labelledby") or "").split()) <= set(ids)


def test_page_of_a_bare_comparison_leaves_out_what_it_lacks() -> None:
    fields = sample_report().model_dump(exclude={"verdict", "metrics", "nodes", "learning_curve", "tasks"})
    page = report_page(Report.model_validate(fields))
    assert "Learning curve" not in page
    assert "What each node did" not in page
    assert "No task improved." in page


def test_half_a_surrogate_pair_does_not_stop_the_report(tmp_path: Path) -> None:
    report = sample_report(name_b="broken \ud83d text")
    path, _ = write_report(report, tmp_path)
    assert json.loads(path.read_text("utf-8"))["b"]["name"] == "broken \ufffd text"


def test_table_shows_names_as_they_are_and_every_metric() -> None:
    console = Console(width=120, record=True, file=Path("/dev/null").open("w", encoding="utf-8"))  # noqa: SIM115
    with console.file:
        console.print(report_table(sample_report(name_b="[red]new[/red]")))
        text = console.export_text()
    assert "[red]new[/red]" in text
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert set(rows) == {"reward", "tokens", "steps", "seconds"}
    assert rows["reward"].split("│")[2:7] == [
        " 0.300 ",
        "          0.445 ",
        "     +0.145 ",
        " +0.040 to +0.235 ",
        " 0.005 ",
    ]


def test_numbers_read_as_people_write_them() -> None:
    figures = (0.4449, -12.345, 1234.5, 0.00042, 0.0, None)
    assert [number(x) for x in figures] == ["0.445", "−12.3", "1,234", "0.00042", "0.000", "n/a"]
    assert [signed(x) for x in (0.5, -0.5, 0.0)] == ["+0.500", "−0.500", "0.000"]
    assert [p_equals(p) for p in (0.0004, 0.0312)] == ["p < 0.001", "p = 0.031"]
    assert [percent(x) for x in (0.934, None)] == ["93%", "n/a"]


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


def test_difference_bar_puts_zero_outside_an_interval_that_excludes_it() -> None:
    for diff, low, high, side in ((0.2, 0.1, 0.3, 1), (-0.2, -0.3, -0.1, -1), (0.0, -0.1, 0.1, 0)):
        drawing = difference_bar(diff, low, high, width=300, name="d")
        zero = float(_of_class(drawing, "zero")[0].get("x1", ""))
        bar = _of_class(drawing, "interval")[0]
        start, length = float(bar.get("x", "")), float(bar.get("width", ""))
        point = float(_of_class(drawing, "estimate")[0].get("cx", ""))
        assert 0 < start < point < start + length < 300
        assert (zero < start) == (side > 0)
        assert (zero > start + length) == (side < 0)
        if side:  # 0, 0.1, 0.2 and 0.3 lie equally far apart
            assert abs(zero - point) == pytest.approx(length, abs=0.3)


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


def _luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, WCAG 2.2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_can_be_read_in_both_schemes() -> None:
    schemes = re.findall(r":root \{([^}]*)\}", report_page(sample_report()))
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", scheme))
        for ink in ("ink", "quiet", "better", "worse", "none"):
            for ground in ("page", "card", "code"):
                light, dark = sorted((_luminance(colours[ink]), _luminance(colours[ground])), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)


def test_comparison_accepts_what_statistics_gives() -> None:
    assert Comparison(**sample_report().model_dump(include=set(Comparison.model_fields))).metric == "reward"
