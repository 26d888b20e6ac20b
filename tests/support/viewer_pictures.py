"""`marft-bridge view` on the run of `demo_run` -> docs/pictures/viewer-*.png, and viewer.json with the words on them.

`make pictures` writes both; tests/docs/test_viewer_pictures.py holds that a page still says these words. Numbers and
ids stand in viewer.json as `0` and `id`: they are of the day. Invariant: no picture shows a path of a machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from support.browser import Browser, browsing
from support.demo_run import make_demo_run
from support.paths import ROOT
from support.view_rig import TOKEN, Served, serving
from trace_store.records import Trajectory
from trace_store.store import TraceStore

FOLDER = ROOT / "docs/pictures"
WORDS = FOLDER / "viewer.json"
DESKTOP, PHONE = (1280, 800), (390, 800)
COLOURS = 128  # the pages have few: a third of the bytes
WORD_LINES = """[...document.querySelectorAll('h1, h2, h3, th, label, summary, nav a, p, .card > h2, dt')]
  .map(element => element.innerText.trim()).filter(Boolean)"""


@dataclass(frozen=True)
class Shot:
    """A page of the viewer, and where its picture begins."""

    name: str
    address: str
    begins: str = "body"
    """Selector of what stands at the top."""

    def files(self) -> dict[str, tuple[tuple[int, int], bool]]:
        """Name of a file -> the window, and whether it is dark."""
        stem = f"viewer-{self.name}"
        return {
            f"{stem}.png": (DESKTOP, False),
            f"{stem}-dark.png": (DESKTOP, True),
            f"{stem}-phone.png": (PHONE, False),
        }


def shots(run: Path) -> list[Shot]:
    """The pages that the documentation shows."""
    with TraceStore.open(run / "store.duckdb", read_only=True) as store:
        trained, compared = (list(store.trajectories(run_ids=[name])) for name in ("train", "compare-1"))
    right = next(t.episode for t in trained if t.episode.round == 3 and t.team_reward("correct") == 1.0)
    of_task: dict[str, dict[str, Trajectory]] = {}
    for trajectory in compared:
        of_task.setdefault(trajectory.episode.task_id or "", {})[trajectory.episode.variant or ""] = trajectory
    before, after = next(
        (sides["before"].episode.episode_id, sides["after"].episode.episode_id)
        for _, sides in sorted(of_task.items())
        if sides["before"].team_reward("correct") == 0.0 and sides["after"].team_reward("correct") == 1.0
    )
    return [
        Shot("list", "/run?id=train"),
        Shot("episode", f"/episode?run=train&id={right.episode_id}", "h1"),
        Shot("pair", f"/pair?a={before}&b={after}", "h1"),
        Shot("training", "/training", "h2:nth-of-type(2)"),
        Shot("comparison", "/comparison"),
    ]


def page_to_words(browser: Browser) -> list[str]:
    """What the page in the browser says, each line once, without what changes from day to day.

    Whether two runs took the same number of seconds, as the page rounds them, is of the day as well.
    """
    lines = [re.sub(r"\b[0-9a-f]{8,32}", "id ", line) for line in browser.run(WORD_LINES)]
    lines = [re.sub(r"^\s*≠\s+(?=seconds\s*$)", "", line) for line in lines]
    return list(dict.fromkeys(re.sub(r"[+−-]?\d+(?:[.,:]\d+)*", "0", " ".join(line.split())) for line in lines))


@contextlib.contextmanager
def viewed(folder: Path) -> Iterator[tuple[Served, list[Shot]]]:
    """The demo's run, made in an empty folder, in the viewer."""
    run = make_demo_run(folder)
    with contextlib.chdir(folder), serving(run.relative_to(folder)) as served:
        yield served, shots(run)


def photograph(browser: Browser, served: Served, shot: Shot, folder: Path) -> list[str]:
    """Writes the pictures of a page; the words on it where there is room for all."""
    words: list[str] = []
    for name, ((width, height), dark) in shot.files().items():
        browser.look(width, dark=dark, height=height)
        browser.open(f"{served.url}{shot.address}{'&' if '?' in shot.address else '?'}token={TOKEN}")
        browser.wait("document.getElementById('live').textContent === 'live'")  # the page's script runs
        browser.wait("!document.getElementById('charts') || document.querySelector('.uplot')")
        browser.run(f"document.querySelector({shot.begins!r}).scrollIntoView({{behavior: 'instant'}}); scrollBy(0, -6)")
        words = words or page_to_words(browser)
        browser.shoot(folder / name, whole=False)
        with Image.open(folder / name) as picture:
            picture.convert("RGB").quantize(COLOURS).save(folder / name, optimize=True)
    return words


def write() -> None:
    """Writes the pictures and the words anew."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        run_folder, profile = Path(scratch, "work"), Path(scratch, "profile")
        run_folder.mkdir()
        with viewed(run_folder) as (served, pages), browsing(profile) as browser:
            words = {shot.name: photograph(browser, served, shot, FOLDER) for shot in pages}
    WORDS.write_text(json.dumps(words, indent=1, ensure_ascii=False) + os.linesep, encoding="utf-8")


if __name__ == "__main__":
    write()
