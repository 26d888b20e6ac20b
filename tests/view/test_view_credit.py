"""Owns: what `marft-bridge credit` found is what the viewer shows.

- Every agent of a run of the real command is a row, with the same contribution and as many episodes.
- The table is there for a run that was never trained here, at the width of a phone and of a desk, light and dark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import Browser, browsing
from support.credit_rig import NODES, CreditLab
from support.fake_vllm import FakeVllm, running
from support.view_rig import TOKEN, serving

from marft_bridge import cli
from marft_bridge.comparison.numbers import signed
from marft_bridge.view.store_queries import store_to_credits

ROWS = """[...document.querySelectorAll('[aria-label=Credit] tbody tr')].map(row =>
  [...row.children].map(cell => cell.textContent.trim()))"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[CreditLab]:
    with running(FakeVllm()) as server:
        opened = CreditLab(tmp_path, server)
        opened.config()
        opened.train_all()
        yield opened


@pytest.mark.slow
def test_two_runs_of_the_command_on_the_same_episodes_are_told_apart(lab: CreditLab) -> None:
    config = ["--config", str(lab.folder / "bridge.toml")]
    assert cli.run(["collect", *config]) == 0
    for substitute in ("silent", "text:hm"):
        assert cli.run(["credit", *config, "--run-of", "collect", "--substitute", substitute, "--tasks", "6"]) == 0
    with lab.store() as store:
        rows = store_to_credits(store)
    assert {(row.run_id, row.source.split(":")[1]) for row in rows} == {
        ("collect", "credit-1"),
        ("collect", "credit-2"),
    }
    assert len(rows) == 2 * len(NODES)


def read_rows(browser: Browser, address: str) -> Any:
    browser.open(address)
    return browser.run(ROWS)


@pytest.mark.slow
@pytest.mark.browser
def test_the_table_has_what_the_command_found(
    lab: CreditLab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(lab.folder / "bridge.toml")
    assert cli.run(["credit", "--config", config, "--tasks", "12", "--version", "newest", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {agent["agent"] for agent in findings["agents"]} == set(NODES)
    source = f"credit:credit-1: reward, {findings['substitute']} instead"
    expected = sorted(
        [
            *("credit-1", "difference", agent["agent"], signed(agent["contribution"])),
            *(f"{agent['improved_episodes']} / {agent['worsened_episodes']}", str(agent["episodes"]), source),
        ]
        for agent in findings["agents"]
    )
    with serving(lab.run_folder.path) as server, browsing(tmp_path / "profile") as browser:
        for width in (390, 1280):
            for dark in (False, True):
                browser.look(width, dark=dark)
                assert sorted(read_rows(browser, f"{server.url}/training?token={TOKEN}")) == expected
                assert browser.run("document.documentElement.scrollWidth") == width
                browser.shoot(tmp_path / f"credit-{width}-{'dark' if dark else 'light'}.png")
        browser.open(f"{server.url}/")
        assert "/training" in browser.run("[...document.querySelectorAll('nav a')].map(a => a.pathname).join(' ')")
        assert browser.errors == []
