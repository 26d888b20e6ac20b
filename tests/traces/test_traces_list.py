"""Owns: `traces list` finds episodes by what they were, newest first, and says of the others why they are none.

- A table on a terminal, lines with tabs in a pipe, JSON when asked for: the same rows.
- A store that another process holds is named with its holder, in one line.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langgraph.graph import START as START_NODE
from langgraph.graph import StateGraph
from support.paths import ROOT
from support.sample_spans import START, SampleTrace, chain
from support.traces_rig import sound_store, store_of, terminal, traces, written

from marft_bridge.recording.wrap import wrap
from marft_bridge.traces import store_reader
from marft_bridge.traces.cli import app
from marft_bridge.traces.listing import Filters, first_words, list_episodes, text_to_reward_filter, what_was_added
from trace_store.records import Reward

SECOND = 10**9


def reward(trace: str, value: float, name: str = "reward", at: int = 1) -> Reward:
    return Reward(trace, name, value, "judge", at)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Four episodes a second apart; the ids of the first two agree in 8 digits."""
    return store_of(
        tmp_path / "s.duckdb",
        *chain("aaaaaaaa1" + "0" * 23, START).spans(TASK_ID="t1"),
        *chain("aaaaaaaa2" + "0" * 23, START + SECOND).spans(TASK_ID="t2", RUN_ID="other", SPLIT="heldout"),
        *chain("b" * 32, START + 2 * SECOND).spans(OUTCOME="truncated", OUTCOME_REASON="time limit", ROUND=2),
        *chain("c" * 32, START + 3 * SECOND).spans(OUTCOME="failed", OUTCOME_REASON="boom", SPLIT="live"),
        reward("aaaaaaaa1" + "0" * 23, 0.0, at=1),
        reward("aaaaaaaa1" + "0" * 23, 1.0, at=2),
        reward("aaaaaaaa2" + "0" * 23, 0.5),
        reward("aaaaaaaa2" + "0" * 23, 0.25, "style"),
        *chain("d" * 32, START).spans()[:-1],
        *chain("e" * 32, START).spans(OUTCOME="great"),
    )


def listed(capsys: pytest.CaptureFixture[str], path: Path, *flags: str) -> list[dict[str, Any]]:
    code, out, _ = traces(capsys, "list", "--json", *flags, "--store", path)
    assert code == 0
    found: list[dict[str, Any]] = json.loads(out)
    return found


def test_a_pipe_gets_lines_with_tabs_newest_first(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = traces(capsys, "list", "--store", path)
    assert (code, err) == (0, "")
    assert [line.split("\t") for line in out.splitlines()] == [
        ["id", "started", "run", "task", "outcome", "actions", "tokens", "seconds", "rewards"],
        ["c" * 12, "2023-11-14 22:13", "run", "task", "failed: boom", "2", "6+4", "0.00", ""],
        ["b" * 12, "2023-11-14 22:13", "run round 2", "task", "truncated: time limit", "2", "6+4", "0.00", ""],
        ["aaaaaaaa2000", "2023-11-14 22:13", "other", "t2", "terminated", "2", "6+4", "0.00", "reward 0.5, style 0.25"],
        ["aaaaaaaa1000", "2023-11-14 22:13", "run", "t1", "terminated", "2", "6+4", "0.00", "reward 1"],
    ]


def test_ids_are_as_short_as_they_can_be_and_still_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sound_store(tmp_path)
    rows = [line.split("\t")[0] for line in traces(capsys, "list", "--store", path)[1].splitlines()[1:]]
    assert {len(short) for short in rows} == {8}
    for short in rows:
        assert traces(capsys, "show", short, "--store", path)[0] == 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "cba2a1"),
        (["--limit", "2"], "cb"),
        (["--run-id", "other"], "a2"),
        (["--split", "train"], "ba1"),
        (["--split", "live"], "c"),
        (["--task", "t1"], "a1"),
        (["--outcome", "truncated"], "b"),
        (["--node", "b"], "cba2a1"),
        (["--node", "critic"], ""),
        (["--node", "a", "--version", "3"], ""),  # none of their calls names a version
        (["--variant", "before"], ""),
        (["--search", "1+1"], "cba2a1"),
        (["--search", "1+1 T2"], "a2"),  # every word, in letters of either case
        (["--reward", "reward>0.5"], "a1"),  # the later value counts, not the earlier 0
        (["--reward", "reward>=0.5"], "a2a1"),
        (["--reward", "reward < 1"], "a2"),
        (["--reward", "style=0.25"], "a2"),
        (["--reward", "reward!=1"], "a2"),
        (["--reward", "nothing>0"], ""),
        (["--split", "heldout", "--outcome", "terminated"], "a2"),
        (["--split", "heldout", "--outcome", "failed"], ""),
    ],
)
def test_filters_are_all_held(path: Path, flags: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"aaaaaaaa1": "a1", "aaaaaaaa2": "a2", "bbbbbbbbb": "b", "ccccccccc": "c"}
    assert "".join(names[row["episode_id"][:9]] for row in listed(capsys, path, *flags)) == expected


def test_json_keeps_what_is_absent_apart_from_zero(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = listed(capsys, path, "--task", "t1")
    assert first == {
        "episode_id": "aaaaaaaa1" + "0" * 23,
        "short_id": "aaaaaaaa1000",  # alone in its list, yet it must tell itself from all others
        "run_id": "run",
        "task_id": "t1",
        "split": "train",
        "sample": 0,
        "round": None,
        "variant": None,
        "outcome": "terminated",
        "reason": None,
        "started_ns": START,
        "seconds": 40e-9,
        "actions": 2,
        "trainable_actions": 2,
        "prompt_tokens": 6,
        "sampled_tokens": 4,
        "fork_of": None,
        "thread_id": None,
        "user_id": None,
        "tags": {},
        "rewards": {"reward": 1.0},
        "link": {"kind": None, "linked_episode": None, "turn": None},
        "nodes": {"a": None, "b": None},
        "input": "1+1",
        "output": None,
    }
    assert listed(capsys, path, "--limit", "1")[0]["rewards"] == {}


def test_a_call_without_ids_has_unknown_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    t = SampleTrace("f" * 32)
    nothing = {"PROMPT_IDS": None, "SAMPLED_IDS": None, "LOGPROBS": None, "USAGE_OUTPUT_TOKENS": None}
    t.call("x", t.node("a:1", 10, 20, step=1), 11, 19, **nothing)
    path = store_of(tmp_path / "s.duckdb", *t.spans())
    (row,) = listed(capsys, path)
    assert (row["prompt_tokens"], row["sampled_tokens"], row["trainable_actions"]) == (None, None, 0)
    assert traces(capsys, "list", "--store", path)[1].splitlines()[1].split("\t")[6] == ""


def test_waiting_and_refused_traces_say_why(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = traces(capsys, "list", "--waiting", "--store", path)
    assert out.splitlines()[1:] == [f"{'d' * 32}\t2023-11-14 22:13\t4\tthe root span has not arrived"]
    _, out, _ = traces(capsys, "list", "--refused", "--store", path)
    why = "outcome 'great' is not one of terminated, truncated, failed"
    assert out.splitlines()[1:] == [f"{'e' * 32}\t2023-11-14 22:13\t5\t{why}"]
    assert listed(capsys, path, "--refused")[0]["why"] == why


def test_lists_in_lists_without_end_are_shown_as_the_text_that_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = "[" * 3_000  # what a small model says that repeats itself
    t = SampleTrace("f" * 32)
    t.call("x", t.node("a:1", 10, 20, step=1), 11, 19, INPUT_MESSAGES=deep, OUTPUT_MESSAGES=deep)
    said = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": deep}]}])
    t.call("y", t.node("b:1", 30, 40, step=2), 31, 39, OUTPUT_MESSAGES=said)
    path = store_of(tmp_path / "s.duckdb", *t.spans(INPUT=deep, OUTPUT=deep))
    (row,) = listed(capsys, path)
    assert str(row["output"]).startswith("[[[")
    code, out, _ = traces(capsys, "show", "f" * 32, "--store", path)
    assert code == 0
    assert "[" * 50 in out


def test_a_terminal_gets_a_table_and_how_many_there_are(path: Path) -> None:
    console = terminal(no_color=True, width=80)
    list_episodes(path, Filters(), 2, False, console)
    lines = re.sub(r"\x1b\[[\d;]*m", "", written(console)).splitlines()
    assert "truncated!" in lines[2]
    assert "1+1" in lines[2]
    assert len(lines) == 4  # the heading, two episodes, the count
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "2 of 4 episodes; --limit shows more"


@pytest.mark.parametrize("text", ["reward", "reward>", ">1", "reward>high", "reward~1", ""])
def test_a_reward_filter_that_is_no_comparison_is_refused(
    path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = traces(capsys, "list", "--reward", text, "--store", path)
    assert code == 2
    assert err == f"marft-bridge: traces list: --reward {text!r} is not a comparison; write it like 'reward>0.5'\n"


def test_a_reward_filter_reads_names_signs_and_numbers() -> None:
    assert text_to_reward_filter("my reward >= -1e-3") == ("my reward", ">=", -0.001)


def test_filters_that_traces_without_an_episode_cannot_meet_are_refused(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = traces(capsys, "list", "--waiting", "--task", "t", "--reward", "r>1", "--store", path)
    assert code == 2
    assert "--task, --reward with --waiting" in err
    assert traces(capsys, "list", "--waiting", "--refused", "--store", path)[0] == 2


def test_a_store_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = traces(capsys, "list", "--run", tmp_path / "nothing")
    assert (code, err.count("\n")) == (2, 1)
    assert "does not exist" in err
    assert sorted(tmp_path.iterdir()) == []


def test_the_run_folder_of_a_configuration_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        "there is no bridge.toml here; name a run folder, or a configuration with --config" in traces(capsys, "list")[2]
    )
    example = ROOT / "examples/math_duo/bridge.toml"
    (tmp_path / "bridge.toml").write_text('run = "here"\n' + example.read_text())
    (tmp_path / "here").mkdir()
    store_of(tmp_path / "here/store.duckdb", *chain("c" * 32).spans())
    for flags in ([], ["--run", "here"], ["--config", "bridge.toml"]):
        code, out, err = traces(capsys, "list", *flags)
        assert (code, err) == (0, "")
        assert out.count("\n") == 2


@pytest.mark.slow
def test_an_export_is_looked_into_like_the_store_that_it_is_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = sound_store(tmp_path), tmp_path / "export"
    assert traces(capsys, "export", folder, "--store", path)[0] == 0
    episode = listed(capsys, path)[0]["episode_id"]
    for words in (
        ["list"],
        ["list", "--node", "actor", "--json"],
        ["show", episode, "--full"],
        ["show", episode, "--json"],
        ["sql", "FROM actions ORDER BY action_id", "--json"],
        ["sql", "tokens-per-run"],
        ["doctor"],
    ):
        of_store = traces(capsys, *words, "--store", path)
        assert traces(capsys, *words, "--store", folder) == of_store, words
        assert of_store[0] == 0, words
    code, out, err = traces(capsys, "sql", f"FROM read_text('{__file__}')", "--store", folder)
    assert (code, out) == (2, "")
    assert "disabled by configuration" in err


def test_a_store_that_is_held_is_named_with_its_holder(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    holds = f"import duckdb; con = duckdb.connect({str(path)!r}); print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        monkeypatch.setattr(store_reader, "WAIT_S", 0.0)
        code, out, err = traces(capsys, "list", "--store", path)
        holder.communicate(b"\n")
    assert (code, out) == (2, "")
    assert f"process {holder.pid}" in err.splitlines()[-1]


def test_every_command_ends_its_help_with_an_example_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    names = [command.name or str(command.callback.__name__) for command in app.registered_commands if command.callback]
    assert {"list", "show", "sql", "doctor"} <= set(names)
    for name in names:
        code, shown, _ = traces(capsys, name, "--help")
        assert code == 0
        example = shlex.split(" ".join(shown.split()).split("Example: ")[1])
        assert example[:3] == ["marft-bridge", "traces", name]
        assert traces(capsys, *example[2:], "--help")[0] == 0


def test_help_is_shown_without_loading_a_database() -> None:
    heavy = ("duckdb", "numpy", "torch", "trainers.advantages.estimate")
    code = f"import marft_bridge.cli, sys; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_a_store_is_named_by_its_run_folder_or_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_of(tmp_path / "store.duckdb", *chain("c" * 32).spans())
    for place in (tmp_path, tmp_path / "store.duckdb"):
        for command in (["list"], ["show", "c"], ["sql", "FROM episodes"], ["doctor"]):
            assert traces(capsys, *command, place)[0] == 0, command


def test_the_words_of_an_output_are_what_the_run_added_to_its_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class State(TypedDict, total=False):
        question: str
        plan: str
        answer: str

    def plan(state: State) -> State:
        return {"plan": "add them"}

    def answer(state: State) -> State:
        return {"answer": "ten"}

    graph = StateGraph(State)
    graph.add_sequence([plan, answer])
    graph.add_edge(START_NODE, "plan")
    app = wrap(graph.compile(), tmp_path / "s.duckdb")
    app.invoke({"question": "What is 3 + 7?"})
    (episode,) = listed(capsys, tmp_path / "s.duckdb")
    assert (episode["input"], episode["output"]) == ("What is 3 + 7?", "ten")


@pytest.mark.parametrize(
    ("gave", "given", "words"),
    [
        ('{"messages": ["hi", "hello"]}', '{"messages": ["hi"]}', "hello"),
        ('{"question": "q", "text": "q"}', '{"question": "q"}', "q"),  # a field of its own, with the same words
        ('{"question": "q"}', '{"question": "q"}', None),
        ("a text", '{"question": "q"}', "a text"),
        ('{"answer": 7}', "a text", "7"),
        (None, None, None),
    ],
)
def test_what_a_run_added_by_hand(gave: str | None, given: str | None, words: str | None) -> None:
    assert first_words(what_was_added(gave, given)) == words
