"""Owns: `marft-bridge view` as a person uses it, in a real Chromium under the policy that is really sent.

- a page shows what is recorded while it is open, without being loaded again, and keeps what its reader has unfolded
- keys lead from the list into an episode, to its neighbours, and back
- every metric is a curve, of runs laid over each other too
- no page scrolls sideways on a phone or a desktop, and the browser refuses nothing of it
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest
from support.browser import CHROMIUM, Browser, browsing
from support.growth_rig import fill
from support.sample_report import sample_report
from support.sample_spans import START, SampleTrace
from support.view_rig import SECOND_NS, TOKEN, Served, many_episodes, serving

from marft_bridge.comparison.page import write_report
from marft_bridge.runs.run_folder import RunFolder
from trace_store.records import Reward

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on PATH: the pages were not rendered"),
]
COUNT = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Twelve episodes, metrics of two rounds, a report; and another run beside it."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "one")
    folder.create()
    many_episodes(folder.store, COUNT)
    agents = {"a": {"entropy": 2.5, "tokens": 7}, "b": {"entropy": None, "tokens": 9}}
    lines = [{"phase": "online", "round": i, "agents": agents, "seconds": {"round": 1.5}} for i in (1, 2)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(sample_report(), folder.path)
    (folder.path.parent / "two").mkdir(mode=0o700)
    shutil.copy(folder.metrics, folder.path.parent / "two/metrics.jsonl")
    return folder


@pytest.fixture(scope="module")
def served(run: RunFolder) -> Iterator[Served]:
    with serving(run.path) as server:
        yield server


@pytest.fixture(scope="module")
def browser(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as tab:
        tab.look(1280)
        tab.open(f"{served.url}/?token={TOKEN}")
        yield tab


def episode(i: int) -> str:
    return f"{i:x}".rjust(32, "0")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_page_fits_and_the_browser_refuses_nothing_of_it(
    served: Served, browser: Browser, width: int, dark: bool
) -> None:
    browser.look(width, dark=dark)
    pages = ("/", "/episodes", "/run?id=train", f"/episode?id={episode(3)}", f"/pair?a={episode(3)}&b={episode(7)}")
    for page in (*pages, "/training?with=two", "/comparison"):
        browser.open(f"{served.url}{page}")
        browser.wait("document.getElementById('live').textContent === 'live'")
        if page.startswith("/training"):
            browser.wait("document.querySelectorAll('.uplot').length === 4")
        assert browser.run("innerWidth") == width
        assert browser.run("document.documentElement.scrollWidth") <= width, page
    assert browser.errors == []


def test_every_metric_is_a_curve_for_each_agent_and_run(served: Served, browser: Browser) -> None:
    browser.look(1280)
    browser.open(f"{served.url}/training?with=two")
    browser.wait("document.querySelectorAll('.uplot').length === 4")
    titles = browser.run("[...document.querySelectorAll('.chart h4')].map(title => title.textContent)")
    assert titles == ["reward", "entropy", "tokens", "seconds.round"]
    of_chart = (
        "[...document.querySelectorAll('.chart')].map(c => [...c.querySelectorAll('.u-label')].map(l => l.textContent))"
    )
    labels = [labels[1:] for labels in browser.run(of_chart)]
    both = [f"{name} {agent}" for name in ("one", "two") for agent in ("a", "b")]
    assert labels == [["reward"], ["one a", "two a"], both, ["one", "two"]]  # nothing is known of b's entropy


def test_keys_lead_into_an_episode_to_its_neighbours_and_back(served: Served, browser: Browser) -> None:
    browser.open(f"{served.url}/run?id=train&task=t1")
    browser.press("j")
    browser.press("j")
    browser.press("Enter")
    browser.wait(f"location.search.includes('{episode(5)}')")  # tasks t1: 9, 5, 1
    for key, number in (("j", 1), ("k", 5), ("k", 9)):
        browser.wait("document.readyState === 'complete' && document.querySelector('.neighbours')")
        browser.press(key)
        browser.wait(f"location.search.includes('{episode(number)}')")
    browser.wait("document.readyState === 'complete' && document.querySelector('a.up')")
    browser.press("u")
    browser.wait("location.pathname === '/run' && location.search.includes('task=t1')")
    browser.wait("document.readyState === 'complete'")
    browser.press("/")
    assert browser.run("document.activeElement.name") == "q"


def test_what_is_recorded_shows_without_loading_the_page_again(
    run: RunFolder, served: Served, browser: Browser
) -> None:
    browser.open(f"{served.url}/run?id=train")
    browser.wait("document.getElementById('live').textContent === 'live'")
    browser.run("window.sameDocument = true; document.querySelector('details.more').open = true")
    t = SampleTrace("abc", START + 10**6 * SECOND_NS)
    t.call("x", t.node("a:1", 10, 20, step=1), 11, 19)
    fill(run.store, [[*t.spans(RUN_ID="train", TASK_ID="<b>new</b>"), Reward(t.trace_id, "reward", 0.5, "x", START)]])
    browser.wait("document.getElementById('main').textContent.includes('<b>new</b>')")
    assert browser.run("window.sameDocument")
    assert browser.run("document.querySelector('details.more').open")
    assert browser.run("document.querySelectorAll('#main b').length") == browser.run(
        "document.querySelectorAll('.sparks-row b').length"
    )
    assert f"{COUNT + 1} episodes" in browser.run("document.querySelector('.lead').textContent")
