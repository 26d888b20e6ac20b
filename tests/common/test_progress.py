"""Owns: long work shows how far it is: bars on a terminal, plain lines elsewhere, and no markup from a model's text."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from marft_bridge.common import progress
from marft_bridge.common.progress import Reporter


def reporter(terminal: bool) -> tuple[Reporter, io.StringIO]:
    shown = io.StringIO()
    return Reporter(Console(file=shown, force_terminal=terminal, width=120, highlight=False)), shown


def test_output_that_is_no_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    to, shown = reporter(terminal=False)
    with to.bars(), to.overall_task("train", 2) as overall, to.task("rollouts", 64) as task:
        overall.update(1, "KL 0.1")
        task.update(32, "90 tok/s")
        task.update(64, "95 tok/s")
    lines = shown.getvalue().splitlines()
    assert "rollouts 32/64  90 tok/s  [0 s]" in lines
    assert lines[-1] == "rollouts 64/64  95 tok/s  [0 s]"
    assert "\x1b" not in shown.getvalue()


def test_a_plain_line_says_how_long_the_rest_takes_at_the_pace_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    to, shown = reporter(terminal=False)
    with to.task("collect", 60) as task:
        now[0] += 20
        task.update(15, "90 tok/s")
        now[0] += 60
        task.update(60, "90 tok/s")
    lines = shown.getvalue().splitlines()
    assert lines[0] == "collect 15/60  90 tok/s  [20 s, about 60 s left]"  # 15 in 20 s, so 45 in 60 s
    assert lines[-1] == "collect 60/60  90 tok/s  [80 s]"


def test_a_terminal_gets_nested_bars_with_figures() -> None:
    to, shown = reporter(terminal=True)
    with to.bars(), to.overall_task("train", 6) as overall:
        overall.update(2, "reward 0.209  KL 0.019")
        with to.bars(), to.task("round 3/6 rollouts", 64) as task:
            task.update(16, "120 tok/s")
            assert to.live is not None
            to.live.refresh()
    for text in ("train", "2/6", "reward 0.209  KL 0.019", "round 3/6 rollouts", "16/64", "120 tok/s"):
        assert text in shown.getvalue()
    assert to.live is None


def test_text_of_a_model_is_never_markup() -> None:
    to, shown = reporter(terminal=False)
    to.say("[red]7[/red] [link=file:///etc/passwd]x[/link]")
    assert shown.getvalue() == "[red]7[/red] [link=file:///etc/passwd]x[/link]\n"
