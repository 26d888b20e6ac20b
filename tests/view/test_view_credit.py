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

ROWS = """[...document.querySelectorAll('[aria-label=Credit] tbody tr')].map(row =>
  [...row.children].map(cell => cell.textContent.trim()))"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[CreditLab]:
    with running(FakeVllm()) as server:
        opened = CreditLab(tmp_path, server)
        opened.config()
        opened.train_all()
        yield opened


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
    expected = sorted(
        ["credit-1", "difference", agent["agent"], signed(agent["contribution"]), str(agent["episodes"])]
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
