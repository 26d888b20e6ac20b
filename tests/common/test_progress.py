"""Owns: long work shows how far it is: bars on a terminal, plain lines elsewhere.

- Of a model's text, or an exception's, no markup, escape sequence or change of direction reaches a terminal.
"""

from __future__ import annotations

import io
from collections import Counter

import pytest
from rich.console import Console
from rich.table import Table

from marft_bridge.common import progress
from marft_bridge.common.progress import Reporter
from marft_bridge.common.terminal_text import print_line, print_uncut, text_to_cell
from marft_bridge.fork_credit.estimates import ForkCredit
from marft_bridge.fork_credit.report import CreditReport
from marft_bridge.rollouts.run_counts import Tally

HOSTILE = "a\x1b]52;c;cHduZWQ=\x07b\u202ec\x9b2J[red]d[/red]"  # writes the clipboard; turns the line round; clears
SHOWN = r"a\x1b]52;c;cHduZWQ=\x07b\u202ec\x9b2J[red]d[/red]"


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


@pytest.mark.parametrize("terminal", [True, False])
def test_why_an_episode_failed_is_printed_without_what_a_terminal_would_obey(terminal: bool) -> None:
    to, shown = reporter(terminal)
    tally = Tally(finished=1, outcomes=Counter(failed=1), failures=Counter({HOSTILE: 1}))
    for line in tally.lines(()):
        to.say(f"{line}\n  and another line")
    assert shown.getvalue() == f"1 of 1 episodes failed: {SHOWN}\n  and another line\n"


def test_names_and_figures_of_a_bar_hold_nothing_that_a_terminal_would_obey() -> None:
    to, shown = reporter(terminal=True)
    to.console.width = 300
    with to.bars(), to.task(f"name {HOSTILE}", 2) as task:
        task.update(1, f"figures {HOSTILE}")
        assert to.live is not None
        to.live.refresh()
    for text in (f"name {SHOWN}", f"figures {SHOWN}"):
        assert shown.getvalue().count(text) >= 2  # in the bar, and in the line that stays
    for obeyed in ("\x1b]", "\x07", "\u202e", "\x9b"):
        assert obeyed not in shown.getvalue()


def test_a_printed_line_and_a_table_of_names_hold_nothing_that_a_terminal_would_obey() -> None:
    to, shown = reporter(terminal=True)
    print_line(to.console, f"{HOSTILE}\tand\n{HOSTILE}")
    assert shown.getvalue() == f"{SHOWN}\tand\n{SHOWN}\n"
    table = Table(title=text_to_cell(HOSTILE, "table.title"))
    table.add_column(text_to_cell(HOSTILE))
    table.add_row(text_to_cell(HOSTILE))
    to, shown = reporter(terminal=False)
    print_uncut(to.console, table)
    assert shown.getvalue().count(SHOWN) == 3
    assert all(line.isprintable() for line in shown.getvalue().splitlines())


def test_a_table_of_credits_holds_nothing_that_a_terminal_would_obey() -> None:
    to, shown = reporter(terminal=False)
    credit = ForkCredit(HOSTILE, None, 1.0, None, share=None, difference=None, finding="not settled")
    CreditReport(
        "r",
        "of",
        HOSTILE,
        None,
        runs=1,
        tasks=1,
        forks=1,
        failures=Counter({HOSTILE: 1}),
        refused=Counter(),
        nodes=[credit],
        calls=[],
        leave_one_out=None,
        min_contribution=0.1,
    ).print(to)
    assert shown.getvalue().count(SHOWN) >= 4
    assert all(line.isprintable() for line in shown.getvalue().splitlines())
