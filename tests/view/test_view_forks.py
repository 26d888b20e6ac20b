"""Owns: what an episode's page shows of forks, and that hostile text in them stays text.

The parent is x by a, then y and z by b, with reward 0; four forks leave it at z with the rewards 1, 0, 1, 1.
"""

from __future__ import annotations

import html
import itertools
import re
from pathlib import Path

import pytest
from support.browser import CHROMIUM, browsing
from support.fork_store import PARENT, deeper_fork, fork_records, forked_store, named
from support.growth_rig import fill
from support.sample_spans import chain
from support.traces_rig import store_of
from support.view_rig import HOSTILE, SEEN, TOKEN, serving

from marft_bridge.traces import fork_tree
from marft_bridge.view import forks


def to_words(page: str) -> str:
    """The text of a page, with single blanks."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_a_forked_episode_shows_its_tree_the_answers_and_the_worth(tmp_path: Path) -> None:
    path = forked_store(tmp_path / "s.duckdb", answer="said otherwise")
    with serving(path) as served:
        page, fork_page = served.text(f"/episode?id={PARENT}"), served.text(f"/episode?id={named('bbbb0001')}")
        listed = to_words(served.text("/episodes"))
    words = to_words(page)
    assert "aaaa00010000 this episode reward 0.000 #2 b , call 2 fork-1 sample 0: bbbb00000000 reward 1.000" in words
    assert "recorded 0; 4 forks, mean 0.75, 95% interval -0.0456 to 1.55; recorded - mean -0.75" in words
    assert words.count("said otherwise") >= 5
    assert all(f'href="/episode?id={named(f"bbbb000{n}")}"' in page for n in range(4))
    assert f'href="/pair?a={PARENT}&amp;b={named("bbbb0002")}"' in page
    assert "aaaa00010000 , left at b , call 2, by this episode" in to_words(fork_page)
    assert f'href="/episode?id={PARENT}"' in fork_page
    assert listed.count(f"fork of {PARENT[:8]}") == 4


def test_an_episode_without_forks_has_no_such_part(tmp_path: Path) -> None:
    path = store_of(tmp_path / "s.duckdb", *chain("a").spans())
    with serving(path) as served:
        assert 'aria-label="Forks"' not in served.text(f"/episode?id={'a'.rjust(32, '0')}")


def test_hostile_texts_of_forks_are_text(tmp_path: Path) -> None:
    path = forked_store(tmp_path / "s.duckdb", HOSTILE, RUN_ID=HOSTILE, VARIANT=HOSTILE)
    fill(path, [fork_records(7, None, name="cccc0001", OUTCOME="failed", OUTCOME_REASON=HOSTILE)])
    with serving(path) as served:
        pages = [served.text(f"/episode?id={episode}") for episode in (PARENT, named("bbbb0001"))]
    for page in pages:
        assert "<img" not in page
        assert "window.owned=1;document.title='owned'</script>" not in page
        assert "\u202e" not in page
        assert "\x1b" not in page
    section = to_words(pages[0][pages[0].index('aria-label="Forks"') :].split("</section>")[0])
    assert section.count(SEEN) >= 5 + 4 + 1  # answers, the point's run and variant twice, the reason


def test_a_page_is_bounded_and_says_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "MAX_BRANCHES", 3)
    path = forked_store(tmp_path / "s.duckdb")
    with serving(path) as served:
        words = to_words(served.text(f"/episode?id={PARENT}"))
    assert "1 more fork" in words
    assert "sample 3" not in words
    assert "4 forks, mean 0.75" in words


def section_of(page: str) -> str:
    """The part on forks, without the answers."""
    return page[page.index('aria-label="Forks"') :].split('<div class="fork-answers">')[0]


def depths(section: str) -> dict[str, int]:
    """Id of an episode -> the lists around the item that names it; every list ends where its item does."""
    found: dict[str, int] = {}
    open_tags: list[str] = []
    for tag, episode in re.findall(r"<(/?(?:ul|li))\b[^>]*>|<code>([0-9a-f]{12})</code>", section):
        if episode:
            found.setdefault(episode, open_tags.count("ul"))
        elif tag.startswith("/"):
            assert open_tags.pop() == tag[1:]
        else:
            assert tag == "ul" or open_tags[-1] == "ul"  # an item is in a list and in nothing else
            open_tags.append(tag)
    assert not open_tags
    return found


def test_the_tree_goes_down_to_the_leaves_with_their_rewards_and_links(tmp_path: Path) -> None:
    path = forked_store(tmp_path / "s.duckdb")
    two_below = [deeper_fork("cccc0001", "bbbb0001", 0.25), deeper_fork("cccc0002", "cccc0001", 0.75)]
    fill(path, [*two_below, deeper_fork("cccc0003", "bbbb0002", None)])
    with serving(path) as served:
        page = served.text(f"/episode?id={PARENT}")
    words, by_episode = to_words(section_of(page)), depths(section_of(page))
    assert "#2 b , call 2 fork-2 , sample 0: cccc00010000 reward 0.250" in words
    assert "#0 b , call 1 fork-2 , sample 0: cccc00020000 reward 0.750" in words
    assert f'href="/episode?id={named("cccc0002")}"' in page
    levels = [by_episode[named(key)[:12]] for key in ("bbbb0001", "cccc0001", "cccc0002", "bbbb0002", "cccc0003")]
    assert [level - levels[0] for level in levels] == [0, 1, 2, 0, 1]


def test_a_forks_page_shows_its_parents_up_to_the_whole_run(tmp_path: Path) -> None:
    path = forked_store(tmp_path / "s.duckdb")
    fill(path, [deeper_fork("cccc0001", "bbbb0001", 0.25), deeper_fork("cccc0002", "cccc0001", 0.75)])
    with serving(path) as served:
        section = section_of(served.text(f"/episode?id={named('cccc0002')}") + '<div class="fork-answers">')
    by_episode = depths(section.split("</section>")[0])
    assert list(by_episode.items())[:4] == [
        *((named(key)[:12], n + 1) for n, key in enumerate(("aaaa0001", "bbbb0001", "cccc0001", "cccc0002")))
    ]
    assert f'href="/pair?a={named("cccc0001")}&amp;b={named("cccc0002")}"' in section


def test_a_deep_chain_and_parents_that_name_each_other_break_no_page(tmp_path: Path) -> None:
    path = forked_store(tmp_path / "s.duckdb")
    names = ["bbbb0001", *(f"cc{n:06d}" for n in range(300))]
    chain_of_forks = [deeper_fork(name, parent, 0.5) for parent, name in itertools.pairwise(names)]
    ring = [deeper_fork("dd000001", "dd000002"), deeper_fork("dd000002", "dd000001")]
    fill(path, [*chain_of_forks, *ring])
    with serving(path) as served:
        page, leaf = served.text(f"/episode?id={PARENT}"), served.text(f"/episode?id={named(names[-1])}")
        around = served.text(f"/episode?id={named('dd000001')}")
    by_episode = depths(section_of(page))
    assert sum(key.startswith("cc") for key in by_episode) == fork_tree.MAX_DEEPER_FORKS
    assert "100 more forks of these forks are left out" in to_words(page)
    assert max(by_episode.values()) - by_episode["bbbb00010000"] == fork_tree.MAX_NESTED_LEVELS - 1
    assert "level 201, of cc0001980000 :" in to_words(page)
    assert f"{301 - fork_tree.MAX_ANCESTORS} forks between are left out" in to_words(leaf)
    assert set(depths(section_of(around + '<div class="fork-answers">').split("</section>")[0])) == {
        "dd0000010000",
        "dd0000020000",
    }


def test_hostile_texts_of_deeper_forks_are_text(tmp_path: Path) -> None:
    path = forked_store(tmp_path / "s.duckdb")
    changed = {"RUN_ID": HOSTILE, "VARIANT": HOSTILE, "OUTCOME": "failed", "OUTCOME_REASON": HOSTILE}
    fill(path, [deeper_fork("cccc0001", "bbbb0001", **changed)])
    with serving(path) as served:
        page = served.text(f"/episode?id={PARENT}")
    assert "<img" not in page
    assert "window.owned=1;document.title='owned'</script>" not in page
    assert "\u202e" not in page
    assert to_words(section_of(page)).count(SEEN) == 3


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on PATH: the page was not rendered")
def test_a_deep_tree_is_no_wider_than_a_phone_or_a_laptop(tmp_path: Path) -> None:
    path = forked_store(tmp_path / "s.duckdb")
    names = ["bbbb0001", *(f"cc{n:06d}" for n in range(40))]
    fill(path, [deeper_fork(name, parent, 0.5) for parent, name in itertools.pairwise(names)])
    with serving(path) as served, browsing(tmp_path / "profile") as browser:
        browser.open(f"{served.url}/?token={TOKEN}")
        for width, episode in itertools.product((390, 1280), (PARENT, named(names[20]))):
            browser.look(width)
            browser.open(f"{served.url}/episode?id={episode}")
            assert browser.run("document.documentElement.scrollWidth") == width
            narrowest = "Math.min(...[...document.querySelectorAll('.fork-tree li')].map(e => e.clientWidth))"
            assert browser.run(narrowest) >= 120
        assert not browser.errors
