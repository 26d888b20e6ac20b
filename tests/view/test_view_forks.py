"""Owns: what an episode's page shows of forks, and that hostile text in them stays text.

The parent is x by a, then y and z by b, with reward 0; four forks leave it at z with the rewards 1, 0, 1, 1.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from support.fork_store import PARENT, fork_records, forked_store, named
from support.growth_rig import fill
from support.sample_spans import chain
from support.traces_rig import store_of
from support.view_rig import HOSTILE, SEEN, serving

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
