"""Owns: what the pages of `marft-bridge view` tell of a store.

- every episode of a run can be reached by turning pages, once, newest first; filters show what passes them, no more
- an episode shows its tokens with the numbers of its round's file, its tools, its rewards; what is not known says why
- lists are found by words and by calls; two episodes are compared word by word; each number of an update is a curve
- texts of the store are never markup, wherever they stand
- a page is never older than the store's file, changes nothing, and says who is in the way
"""

from __future__ import annotations

import html
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import huggingface_hub.constants
import pytest
from starlette.datastructures import QueryParams
from support.edge_rig import calls_tool, says
from support.growth_rig import fill
from support.hub_cache import NAME, put_in_cache
from support.sample_report import sample_report
from support.sample_spans import START, SampleTrace, chain
from support.store_holder import another_process
from support.traces_rig import sound_store, store_of
from support.view_rig import (
    EPISODE,
    HOSTILE,
    SEEN,
    Served,
    grown_store,
    hostile_run,
    many_episodes,
    save_tokenizer,
    serving,
)

from marft_bridge import cli
from marft_bridge.comparison import wording
from marft_bridge.comparison.page import write_report
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.traces import store_reader
from marft_bridge.training.advantage_log import StoredAdvantage, credits_to_file
from marft_bridge.view.colours import STEPS, ColourScale, action_to_spans, fits
from marft_bridge.view.curves import lines_to_charts
from marft_bridge.view.pages import Pages
from marft_bridge.view.source import ViewSource, path_to_source
from marft_bridge.view.store_queries import spans_to_tools
from marft_bridge.view.token_texts import TextsByNode, TokenTexts
from trace_store.assemble import spans_to_trajectory
from trace_store.journal import Journal
from trace_store.records import Reward
from trace_store.store import TraceStore

COUNT = 120
HOSTILE_PAGES = (
    *("/", "/episodes", "/run?id=train", f"/episode?id={EPISODE}", f"/pair?a={EPISODE}&b={EPISODE}", "/training"),
    "/comparison",
)


class Elements(HTMLParser):
    """Every element of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def links(self, path: str) -> list[str]:
        """Addresses of this path, in order."""
        found = [attrs.get("href") or "" for tag, attrs in self.tags if tag == "a"]
        return [link for link in found if urlsplit(link).path == path]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(many_episodes(tmp_path_factory.mktemp("many") / "store.duckdb", COUNT)) as served:
        yield served


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(hostile_run(tmp_path_factory.mktemp("hostile")).path) as served:
        yield served


def listed(served: Served, address: str) -> list[int]:
    """The numbers of the episodes that a run's page lists, over all of its pages."""
    found: list[int] = []
    while address:
        page = Elements(served.text(address))
        found += [int(parse_qs(urlsplit(link).query)["id"][0], 16) for link in page.links("/episode")]
        older = [link for link in page.links("/run") if "before=" in link]
        address = older[-1] if older else ""
    return found


def test_turning_pages_shows_every_episode_once_the_newest_first(many: Served) -> None:
    assert listed(many, "/run?id=train") == list(range(COUNT))[::-1]


@pytest.mark.parametrize(
    ("query", "passes"),
    [
        ("task=t3", lambda i: i % 4 == 3),
        ("round=2", lambda i: i % 2 == 1),
        ("outcome=failed", lambda i: i % 5 == 0),
        ("split=heldout", lambda i: False),
        ("reward=reward&low=0.2&high=0.4", lambda i: i % 10 in (2, 3, 4)),
        ("reward=reward&low=0.9", lambda i: i % 10 == 9),
        ("reward=other&low=0", lambda i: False),
        ("node=a", lambda i: True),
        ("node=b", lambda i: False),
        ("q=t2", lambda i: i % 4 == 2),
        ("q=T2+1%2B1", lambda i: i % 4 == 2),  # every word, in letters of either case
        ("q=t2+nowhere", lambda i: False),
        ("variant=after", lambda i: False),
        ("task=t1&round=2&reward=reward&high=0.1&outcome=terminated", lambda i: i % 20 == 1),
    ],
)
def test_a_filter_shows_what_passes_it_on_all_pages(many: Served, query: str, passes: object) -> None:
    expected = [i for i in range(COUNT) if passes(i)][::-1]  # type: ignore[operator]
    assert listed(many, f"/run?id=train&{query}") == expected


@pytest.mark.parametrize(
    ("path", "status", "why"),
    [
        ("/run", 400, "the address lacks id="),
        ("/run?id=train&round=x", 400, "not a whole number"),
        ("/run?id=train&reward=reward&low=nan", 400, "not a number"),
        ("/run?id=train&low=1", 400, "needs the reward&#39;s name"),
        ("/run?id=train&before=5", 400, "before is not the start and the id of an episode"),
        ("/run?id=other", 404, "no episode of a run"),
        ("/episode?id=00", 404, "no episode"),
        ("/episode?id=00&at=-1", 400, "not a whole number"),
        ("/nowhere", 404, "no such page"),
        ("/report.html", 404, "marft-bridge compare"),
    ],
)
def test_a_question_that_makes_no_sense_is_told_so(many: Served, path: str, status: int, why: str) -> None:
    assert why in many.text(path, status)


def test_the_training_shows_what_each_node_imitated_and_what_not(hostile: Served, many: Served) -> None:
    assert ": learned from 2 of 3 stored calls" in Elements(hostile.text("/training")).text
    assert "Imitation" not in many.text("/training")


def test_the_runs_are_summed_up_and_lead_to_their_episodes(many: Served) -> None:
    page = Elements(many.text("/"))
    assert page.links("/run") == ["/run?id=train"]
    words = " ".join(page.text.split())
    assert "120 96 terminated, 24 failed 4 reward 0.450" in words
    assert "<svg" in many.text("/run?id=train")  # rounds 1 and 2 are a line
    assert "Learning curve" in many.text("/training")


# -- one episode ------------------------------------------------------------------------------------------------------


def tokens_of(page: Elements) -> list[tuple[str, str]]:
    """Shade and title of each token."""
    spans = [attrs for tag, attrs in page.tags if tag == "span" and (attrs.get("title") or "").startswith("token ")]
    return [((attrs["class"] or "").removeprefix("t").strip(), attrs["title"] or "") for attrs in spans]


def test_tokens_are_shaded_by_what_the_rounds_file_says_and_their_titles_tell_it(hostile: Served) -> None:
    page = Elements(hostile.text(f"/episode?id={EPISODE}"))
    worse, better, *unshaded = tokens_of(page)
    assert (worse[0], better[0]) == ("a-n4", "a-p4")
    assert worse[1].startswith(
        f"token 0, id 4; log-prob −0.100; advantage −0.500; normalised −2.000; from {SEEN} −0.500"
    )
    assert better[1].startswith("token 1, id 5; log-prob −0.333; advantage +0.500; normalised +2.000")
    assert [shade for shade, _ in unshaded] == ["", ""]  # the other action's, which was not learned from
    assert "Not coloured: this action was not learned from." in page.text
    assert "fine" in page.text


def test_lists_in_lists_without_end_stop_no_page(tmp_path: Path) -> None:
    deep = "[" * 3_000
    t = SampleTrace("f" * 32)
    t.call(
        "x", t.node("a:1", 10, 20, step=1), 11, 19, INPUT_MESSAGES=deep, OUTPUT_MESSAGES=deep, SAW_TOOL_RESULTS=["x"]
    )
    path = store_of(tmp_path / "s.duckdb", *t.spans(INPUT=deep, OUTPUT=deep))
    with serving(path) as served:
        assert "f" * 8 in served.text("/episodes")
        assert "[[[" in served.text(f"/episode?id={'f' * 32}")


def test_texts_of_the_store_are_never_markup(hostile: Served) -> None:
    for path in HOSTILE_PAGES:
        text = hostile.text(path)
        page = Elements(text)
        assert not {tag for tag, _ in page.tags} & {"img", "iframe", "style", "object", "embed", "base"}
        assert {attrs.get("src", "")[:8] for tag, attrs in page.tags if tag == "script"} == {"/static/"}  # type: ignore[index]
        assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on") or name == "style"]
        assert "\u202e" not in text
        assert "\x1b" not in text
    assert Elements(hostile.text(f"/episode?id={EPISODE}")).text.count(SEEN) >= 12
    assert SEEN in Elements(hostile.text("/run?id=train")).text
    assert HOSTILE not in hostile.text(f"/episode?id={EPISODE}")


def test_long_texts_are_cut_and_say_by_how_much(hostile: Served) -> None:
    text = Elements(hostile.text(f"/episode?id={EPISODE}")).text
    left_out = len(HOSTILE + "\n" + "long " * 9000) - 20_000
    assert f"({left_out:,} more letters)" in text


@pytest.mark.slow
def test_what_is_not_coloured_says_why(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.create()
    many_episodes(run.store, 2)
    address = f"/episode?id={'1'.rjust(32, '0')}"  # of round 2

    def said() -> str:
        with serving(run.path) as served:
            return Elements(served.text(address)).text

    assert "none are kept of round 2: it was not learned from, or not with train.keep_advantages" in said()
    assert "as the spans hold them, and tokens by their ids: no command noted which base model this was" in said()
    credits_to_file([], run.advantages, 2)
    assert "round 2 did not learn from this episode" in said()
    (run.advantages / "round-00002.parquet").write_text("no parquet")
    assert "the file of round 2 cannot be read" in said()
    with serving(run.store.rename(tmp_path / "alone.duckdb")) as served:
        assert "this store was opened without one" in Elements(served.text(address)).text
    store = sound_store(tmp_path)
    with serving(store) as served, TraceStore.open(store, read_only=True) as opened:
        (first, *_) = opened.episodes()
        assert "was played for none" in Elements(served.text(f"/episode?id={first.episode_id}")).text


def test_the_tools_of_a_real_agent_stand_at_the_call_that_asked_for_them(tmp_path: Path) -> None:
    from langchain.agents import create_agent
    from langchain_core.messages import HumanMessage

    def add(x: int) -> str:
        """Adds one."""
        return str(x + 1)

    path = tmp_path / "store.duckdb"
    journal = Journal(path.with_name("store.duckdb.journal"))
    agent = wrap(create_agent(says(calls_tool("add", x=41), "done"), [add]), Recorder(journal))
    agent.invoke({"messages": [HumanMessage("what is next?")]})
    journal.close()
    with TraceStore.open(path) as store:
        store.take_in()
        (episode,) = store.episodes()
        spans, trajectory = store.spans(episode.episode_id), store.trajectory(episode.episode_id)
    assert trajectory is not None
    found = spans_to_tools(spans)
    assert list(found) == [trajectory.actions[0].action_id]
    with serving(path) as served:
        page = served.text(f"/episode?id={episode.episode_id}")
    words = Elements(page).text
    assert 'class="d-environment"' in page
    assert "tool add" in words
    assert "41" in words
    assert "42" in words


def test_a_long_episode_is_shown_a_page_of_actions_at_a_time(tmp_path: Path) -> None:
    t = SampleTrace("e")
    for i in range(95):
        after = (f"n:{i - 1}",) if i else ()
        t.call(f"c{i:02}", t.node(f"n:{i}", 10 * i + 10, 10 * i + 18, step=i, after=after), 10 * i + 11, 10 * i + 17)
    with serving(store_of(tmp_path / "s.duckdb", *t.spans())) as served:
        seen: list[int] = []
        for at in (0, 40, 80):
            page = Elements(served.text(f"/episode?id={t.trace_id}&at={at}"))
            seen += [int((attrs["id"] or "")[1:]) for tag, attrs in page.tags if tag == "section"]
            assert f"/episode?id={t.trace_id}&at=80#a94" in [a.get("href") for tag, a in page.tags if tag == "a"]
    assert seen == list(range(95))


def test_halves_of_letters_do_not_stop_a_page(tmp_path: Path) -> None:
    t = SampleTrace("a")
    said = '[{"role":"user","content":"half \\ud83d"}]'
    t.call("x", t.node("a:1", 10, 20, step=1), 11, 19, INPUT_MESSAGES=said, OUTPUT_MESSAGES=said)
    with serving(store_of(tmp_path / "s.duckdb", *t.spans())) as served:
        assert "half " in served.text(f"/episode?id={t.trace_id}")


# -- shades and token texts -------------------------------------------------------------------------------------------


def test_a_shade_is_the_nearest_of_nine_steps_and_no_stronger_than_the_strongest() -> None:
    scale = ColourScale(2.0)
    values = (-9.0, -2.0, -0.76, -0.74, -0.24, 0.0, 0.24, 0.26, 1.0, 5.0)
    assert [scale.css_class(value) for value in values] == [
        *("a-n4", "a-n4", "a-n2", "a-n1", "a-0", "a-0", "a-0", "a-p1", "a-p2", "a-p4")
    ]
    assert [shade for shade, _ in scale.legend()] == [
        *("a-n4", "a-n3", "a-n2", "a-n1", "a-0", "a-p1", "a-p2", "a-p3", "a-p4")
    ]


def test_one_number_for_an_action_is_that_of_all_its_tokens() -> None:
    (action, _) = spans_to_trajectory(chain().spans()).actions
    page = Elements(action_to_spans(action, ["so", "!"], StoredAdvantage((0.5,), (1.0,), {}, (0,)), ColourScale(1.0)))
    assert [shade for shade, _ in tokens_of(page)] == ["a-p4", "a-p4"]
    assert page.text == "so!"


def test_a_forced_token_has_no_shade_and_the_others_their_own() -> None:
    (action, _) = spans_to_trajectory(chain().spans()).actions
    whole = {"temperature": 1.0, "top_p": None, "top_k": None}  # sampled from all of the distribution
    action = replace(action, sampled_ids=(4, 5, 6, 7), logprobs=(0.0, -0.5, 0.0, -0.25), **whole)
    for credit, shades in (
        (StoredAdvantage((-1.0, 1.0), (-1.0, 1.0), {"reward": (-3.0, 3.0)}, tokens=(1, 3)), ["a-n4", "a-p4"]),
        (StoredAdvantage((1.0,), (1.0,), {"reward": (3.0,)}, tokens=(0,)), ["a-p4", "a-p4"]),  # of the whole action
    ):
        assert fits(action, credit)
        tokens = tokens_of(Elements(action_to_spans(action, ["{", "so", ":", "!"], credit, ColourScale(1.0))))
        assert [shade for shade, _ in tokens] == ["", shades[0], "", shades[1]]
        assert tokens[2][1] == "token 2, id 6; log-prob 0.000; forced"
        assert tokens[3][1].endswith("advantage +1.000; normalised +1.000; from reward +3.000")
    # a number for other tokens than were decided: a record of before, or of another call
    assert not fits(action, StoredAdvantage((0.5, 1.0), (0.5, 1.0), {}, tokens=(0, 1)))


def channels(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2.2."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_shade_is_readable_and_told_apart_without_red_and_green(many: Served) -> None:
    style = many.text("/style.css")
    inks = re.findall(r"--ink: (#[0-9a-f]{6})", style)[:2]
    schemes: list[dict[str, str]] = [{}, {}]
    for shade, colour in re.findall(r"\.a-([np]\d) \{ --shade: (#[0-9a-f]{6}); \}", style):
        schemes[shade in schemes[0]][shade] = colour
    for ink, scheme in zip(inks, schemes, strict=True):
        assert len(scheme) == 2 * STEPS
        for colour in scheme.values():
            dark, light = sorted((luminance(ink), luminance(colour)))
            assert (light + 0.05) / (dark + 0.05) >= 4.5
        for step in range(1, STEPS + 1):  # blue against the mean of red and green is what everybody sees
            red, green, blue = channels(scheme[f"p{step}"])
            assert blue > (red + green) / 2
            red, green, blue = channels(scheme[f"n{step}"])
            assert blue < (red + green) / 2


def test_every_id_has_a_text_of_its_own_and_without_a_tokenizer_there_is_a_reason(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path, {4: "four", 5: "é\n"})
    assert TokenTexts(path).ids_to_pieces([5, 4, 1, 99]) == ["é\n", "four", "w1 ", "<99>"]
    texts = TokenTexts(tmp_path / "none.json")
    assert texts.ids_to_pieces([1]) is None
    assert texts.unavailable_reason is not None
    assert "cannot be read" in texts.unavailable_reason


def test_each_nodes_ids_are_read_with_the_tokenizer_of_its_own_base_model(tmp_path: Path) -> None:
    config: dict[str, Any] = {"model": {"path": str(tmp_path / "one")}}
    config["models"] = {"big": {"path": str(tmp_path / "two"), "nodes": ["actor"]}}
    for name, word in (("one", "left"), ("two", "right")):
        save_tokenizer(tmp_path / name, {4: word})
    (tmp_path / "bridge.json").write_text(json.dumps({"train": {"config": config}}))
    tokenizers = ViewSource(tmp_path / "store.duckdb", RunFolder(tmp_path)).tokenizer_paths()
    texts = TextsByNode(tokenizers)
    assert [texts.for_node(node).ids_to_pieces([4]) for node in ("reasoner", "actor")] == [["left"], ["right"]]
    assert TextsByNode({}).for_node("actor").unavailable_reason == "no command noted which base model this was"


MODEL = {"path": "somewhere"}


@pytest.mark.parametrize(
    "config",
    [
        {"model": MODEL, "models": {"a": 5}},
        {"model": MODEL, "models": {"a": {"path": "x"}}},
        {"model": MODEL, "models": {"a": {"path": ["x"], "nodes": ["actor"]}}},
        {"model": MODEL, "models": {"a": {"path": "x", "nodes": 7}}},
        {"model": MODEL, "models": {"a": {"path": "x", "nodes": "actor"}}},
        {"model": MODEL, "models": {"a": {"path": "x", "nodes": [["actor"], None]}}},
        {"model": MODEL, "models": ["a"]},
        {"model": {"path": "smollm2-135m", "cache": 7}},
        {"model": {"path": "smollm2-135m", "cache": ["x"]}},
        {"model": {"path": "owner/" + "n" * 300}},
        {"model": {"path": "nul\0"}},
        {"model": {"path": 5}, "models": {"a": MODEL}},
        {"model": "x"},
        {"model": MODEL, "train": {"trainer": {"reward": ["x"]}}},
        [1],
        None,
    ],
)
@pytest.mark.parametrize("is_whole_file", [False, True])
def test_a_run_whose_notes_have_odd_shapes_is_shown_as_one_without(
    config: object, is_whole_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MARFT_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)  # the default cache lies below
    many_episodes(tmp_path / "store.duckdb", 1)
    notes = config if is_whole_file else {"train": {"config": config}}
    (tmp_path / "bridge.json").write_text(json.dumps(notes))
    (tmp_path / "metrics.jsonl").write_text("5\n")
    pages = Pages(path_to_source(tmp_path))
    assert pages.token_texts.for_node("actor").ids_to_pieces([4]) is None
    assert "train" in pages.runs()
    assert "train" in pages.training(QueryParams())
    pages.close()


def test_a_base_model_may_be_a_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    tokenizer = save_tokenizer(tmp_path / "model", {4: "four"})
    commit = "a" * 40
    put_in_cache(tmp_path / "hub", tokenizer.parent, commit, branch=None)
    config = {"model": {"path": f"{NAME}@{commit}"}, "models": {"gone": {"path": "acme/gone", "nodes": ["actor"]}}}
    (tmp_path / "bridge.json").write_text(json.dumps({"train": {"config": config}}))
    texts = TextsByNode(ViewSource(tmp_path / "store.duckdb", RunFolder(tmp_path)).tokenizer_paths())
    assert texts.for_node("reasoner").ids_to_pieces([4]) == ["four"]
    assert texts.for_node("actor").ids_to_pieces([4]) is None
    many_episodes(tmp_path / "store.duckdb", 1)
    assert cli.run(["view", str(tmp_path), "--model", "acme/gone", "--no-browser"]) == 2
    assert "hf download acme/gone" in capsys.readouterr().err


def test_without_the_package_of_tokenizers_the_page_names_the_extra_and_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = hostile_run(tmp_path)
    tokenizer = save_tokenizer(tmp_path / "model", {4: "four", 5: "five"})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    reason = "tokenizers is not installed: pip install 'marft-bridge[train]', or that package alone"
    with serving(run.path, tokenizer) as served:
        page = html.unescape(served.text(f"/episode?id={EPISODE}"))
    assert f"tokens by their ids: {reason}." in page
    assert cli.run(["view", str(run.path), "--model", str(tokenizer.parent), "--no-browser"]) == 2
    assert capsys.readouterr().err == f"marft-bridge: view: --model has no effect: {reason}\n"


# -- beside other commands --------------------------------------------------------------------------------------------


def test_a_page_is_never_older_than_the_store(tmp_path: Path) -> None:
    path = many_episodes(tmp_path / "store.duckdb", 3)
    with serving(path) as served:
        assert "3 episodes of 3 tasks" in served.text("/run?id=train")
        fill(path, [SampleTrace("abc").spans(RUN_ID="train", TASK_ID="new")])
        assert "4 episodes of 4 tasks" in served.text("/run?id=train")


def test_who_writes_is_named_and_the_page_is_there_again_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_reader, "WAIT_S", 0.2)
    path = sound_store(tmp_path)
    with serving(path) as served:
        with another_process(path, "writes") as writer:
            assert f"is in use by process {writer.pid}" in served.text("/", 503)
        assert "<h1>Runs</h1>" in served.text("/")
    with TraceStore.open(path) as store:  # no page keeps it
        assert store.counts()["episodes"] == 3


def test_a_comparison_is_told_as_its_report_tells_it(tmp_path: Path) -> None:
    sound_store(tmp_path)
    with serving(tmp_path) as served:
        assert "there is no" in served.text("/comparison")
        assert "/report.html" not in served.text("/")
        report = sample_report()
        _, page, _ = write_report(report, tmp_path)
        assert wording.headline(report) in Elements(served.text("/comparison")).text
        assert Elements(served.text("/")).links("/report.html") == ["/report.html"]
        assert served.text("/report.html") == page.read_text()
        (tmp_path / "report.json").write_text(json.dumps({"not": "a report"}))
        assert "cannot be read" in served.text("/comparison")


# -- words, pairs, curves ---------------------------------------------------------------------------------------------


def words_of(page: str) -> str:
    """The words that stand on a page, with a space wherever there is a tag."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def said(text: str) -> str:
    return json.dumps([{"role": "user", "content": text}])


def two_runs_of_a_task(path: Path) -> Path:
    """A task in two variants, whose answers differ in a word; one of them has a second call."""
    traces = []
    for i, (variant, answer) in enumerate((("before", "so it is 11"), ("after", "so it is 12"))):
        t = SampleTrace(f"{i + 1}", START + i * 10**9)
        words = {"INPUT_MESSAGES": said("Wie groß ist Ü?"), "OUTPUT_MESSAGES": said(answer), "ADAPTER": f"a@{i}"}
        t.call("x", t.node("a:1", 10, 20, step=1), 11, 19, ADAPTER_VERSION=i, **words)
        if variant == "after":
            t.call("y", t.node("b:1", 30, 40, step=2, after=("a:1",)), 31, 39, OUTPUT_MESSAGES=said("<i>more</i>"))
        spans = t.spans(
            RUN_ID="compare-1", VARIANT=variant, TASK_ID="task1", INPUT='{"question": "How much?"}', OUTPUT="11"
        )
        traces.append([*spans, Reward(t.trace_id, "correct", float(i), "test", START)])
    fill(path, traces)
    return path


@pytest.mark.parametrize(
    ("query", "hits"),
    [
        ("q=gro%C3%9F", 2),
        ("q=%C3%BC", 2),  # a letter that JSON escapes, in the other case
        ("q=12", 1),
        ("q=so+12", 1),
        ("q=more", 1),
        ("q=compare-1", 0),  # a name of the record, not a word of it
        ("adapter=a%401", 1),
        ("node=a&version=0", 1),
        ("node=b&version=0", 0),  # of one and the same call
        ("variant=after", 1),
    ],
)
def test_words_and_calls_find_their_episodes_in_all_runs(query: str, hits: int, tmp_path: Path) -> None:
    with serving(two_runs_of_a_task(tmp_path / "s.duckdb")) as served:
        assert len(Elements(served.text(f"/episodes?{query}")).links("/episode")) == hits


def test_a_list_tells_what_went_in_and_what_came_out(tmp_path: Path) -> None:
    with serving(two_runs_of_a_task(tmp_path / "s.duckdb")) as served:
        words = words_of(served.text("/episodes"))
    assert "How much? 11 task1" in words
    assert "a @1 b 2 actions" in words


def test_two_episodes_stand_side_by_side_and_what_differs_is_marked(tmp_path: Path) -> None:
    ids = [f"{i}".rjust(32, "0") for i in (1, 2)]
    with serving(two_runs_of_a_task(tmp_path / "s.duckdb")) as served:
        page = served.text(f"/pair?a={ids[0]}&b={ids[1]}")
        assert f"/pair?a={ids[0]}&amp;b={ids[1]}" in served.text(f"/episode?id={ids[0]}")
        assert "no episode" in served.text(f"/pair?a={ids[0]}&b=other", 404)
    assert "so it is <del>11</del>" in page
    assert "so it is <ins>12</ins>" in page
    assert "&lt;i&gt;more&lt;/i&gt;" in page
    text = words_of(page)
    assert "≠ correct 0.000 1.000 +1.000" in text
    assert "≠ variant before after" in text
    assert "no such call" in text


def test_an_episode_leads_to_its_neighbours_in_the_list_that_led_to_it(many: Served) -> None:
    page = Elements(many.text(f"/episode?id={5:032x}&run=train&task=t1"))
    by_rel = {attrs["rel"]: attrs["href"] or "" for tag, attrs in page.tags if tag == "a" and attrs.get("rel")}
    assert {rel: int(parse_qs(urlsplit(link).query)["id"][0], 16) for rel, link in by_rel.items()} == {
        "prev": 9,
        "next": 1,
    }
    assert all("task=t1" in link for link in by_rel.values())


def test_where_the_model_is_gone_answers_are_read_from_the_spans(tmp_path: Path) -> None:
    with serving(two_runs_of_a_task(tmp_path / "s.duckdb")) as served:
        page = served.text(f"/episode?id={1:032x}")
    assert re.search(r'<pre class="said"[^>]*>so it is 11</pre>', page)
    assert "Answers are shown as the spans hold them" in page


def test_a_comparison_leads_to_its_pairs_and_its_report_to_their_episodes(tmp_path: Path) -> None:
    two_runs_of_a_task(tmp_path / "store.duckdb")
    report = sample_report(name="after")
    _, page, _ = write_report(report, tmp_path)
    with serving(tmp_path) as served:
        links = Elements(served.text("/comparison")).links("/pair")
        assert set(links) == {f"/pair?a={1:032x}&b={2:032x}"}
        in_report = Elements(served.text("/report.html")).links("/episode")
        episode = served.text(f"/episode?id={1:032x}")
    assert Elements(episode).links("/comparison")
    ids = set(re.findall(r"<code>([0-9a-f]{32})</code>", page.read_text()))
    assert {parse_qs(urlsplit(link).query)["id"][0] for link in in_report} == ids


def test_every_number_of_an_update_is_a_point_and_what_is_none_is_no_point() -> None:
    lines = [
        {"round": 0, "replay": {"agents": {"a": {"loss": 2.0}}}},
        {"round": 1, "agents": {"a": {"loss": 1, "kl": None}, "b": {"loss": float("nan")}}, "best": {"stopped": True}},
        {"round": 2, "agents": {"a": {"kl": 0.5}}, "critic": {"critics": {"c/0": 3.0}, "value_loss": 4.0}},
    ]
    charts = {(chart.group, chart.name): chart for chart in lines_to_charts({"run": lines}, {"run": {1: 0.5}})}
    assert {key: (chart.rounds, [(c.node, c.values) for c in chart.curves]) for key, chart in charts.items()} == {
        ("", "reward"): ((1,), [("", (0.5,))]),
        ("agents", "loss"): ((0, 1), [("a", (2.0, 1.0))]),
        ("agents", "kl"): ((2,), [("a", (0.5,))]),
        ("critic", "critic"): ((2,), [("c/0", (3.0,))]),
        ("critic", "critic.value_loss"): ((2,), [("", (4.0,))]),
    }


@pytest.mark.slow
def test_the_first_page_of_many_episodes_is_there_at_once_and_the_oldest_word_is_found(tmp_path: Path) -> None:
    path = grown_store(tmp_path / "store.duckdb", 100_000)
    with serving(many_episodes(tmp_path / "few.duckdb", 2)) as warm:
        warm.text("/run?id=train")  # imports, templates
    with serving(path) as served:
        started = time.perf_counter()
        page = served.text("/run?id=train")
        seconds = time.perf_counter() - started
        found = Elements(served.text("/run?id=train&q=needle")).links("/episode")
    assert "100,000 episodes of 500 tasks" in page
    assert len(Elements(page).links("/episode")) == 50
    assert len(found) == 1
    assert seconds < 1.5  # 0.3 on an idle machine of two cores; twice the rows of a page would take several


def test_a_thread_is_listed_where_somebody_named_it_and_not_where_a_command_made_one_up(tmp_path: Path) -> None:
    records: list[list[object]] = []
    for split, thread in (("live", "support-17"), ("train", "7f3a9c0e")):
        t = SampleTrace(split, START)
        t.call("x", t.node("a:1", 10, 20, step=1), 11, 19)
        records.append([*t.spans(RUN_ID="mixed", SPLIT=split, THREAD_ID=thread)])
    fill(tmp_path / "store.duckdb", records)  # type: ignore[arg-type]
    with serving(tmp_path) as served:
        page = served.text("/run?id=mixed")
    assert "support-17" in page
    assert "7f3a9c0e" not in page
