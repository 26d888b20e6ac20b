"""Owns: somebody's data, erased.

- After an erasure by subject no byte of what they said is left in any file of the folder, neither as text nor as the
  token ids that stand for it; everybody else's rows are as they were, to the bit.
- What goes on with a subject's episode goes too; so do traces of theirs that never became episodes.
- Exports are exchanged where they are named, listed where they are not; segments of live writers are listed, untouched.
- Adapters that learned from it are listed: by record, by round where nothing was recorded, and what came after them.
- Erasing by age takes exactly what ended before; a dry run changes nothing.
- Killed at any moment, it is finished by running it again.
"""

# ruff: noqa: S608 - statements are put together from constants and paths
from __future__ import annotations

import base64
import io
import json
import random
import re
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from rich.console import Console
from support.growth_rig import DAY_NS, dump, files_under, fill, fill_variously, kill_after, secret_trace, trace_id
from support.sample_spans import START, chain

from marft_bridge.cli import run
from marft_bridge.common.errors import ConfigError
from marft_bridge.erasure.command import EraseRequest, Erasure, erase, flags_to_request
from marft_bridge.traces.exports import export
from trace_store import conventions as c
from trace_store import schema
from trace_store.erasure import ERASED_TABLES, RETAINED_TABLE
from trace_store.journal import Journal, RewardGroup
from trace_store.parquet import EXPORTED_TABLES, trace_column
from trace_store.readers import folder_to_reader
from trace_store.records import AdapterRow, Reward
from trace_store.store import TraceStore

MARKER = "Wilhelmina-Quist"
IDS = [918_273_645, 192_837_465, 555_000_111, 777_000_222] * 4  # no other trace has them
ANN = EraseRequest("ann", None)


def erase_quietly(path: Path, erase_request: EraseRequest, dry_run: bool = False) -> Erasure:
    return erase(path, erase_request, dry_run, False, Console(file=io.StringIO()))


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    """Ann's episode between those of others, stored without compression so that her bytes can be seen."""
    path = tmp_path / "store.duckdb"
    with TraceStore.open(path) as store:
        store.sql("SET GLOBAL force_compression = 'uncompressed'")
        journal = Journal(store.journal_folder)
        for number in range(20):
            journal.append_all(secret_trace(f"b{number:x}", "Bob", list(range(number, 40)), SUBJECT_ID="bob"))
            if number == 7:
                journal.append_all(secret_trace("a1", MARKER, IDS, SUBJECT_ID="ann"))
        journal.append_all([span for span in chain("c").spans() if span.span_id != "x"])  # waits
        journal.close()
        store.take_in()
        store.put_rewards([Reward(trace_id(name), "r", 0.5, "s", START) for name in ("a1", "b1", "nowhere")])
    return path


def traces_of(path: Path) -> set[str]:
    """Every trace that any row of any table is about."""
    with TraceStore.open(path) as store:
        return {
            trace.lstrip("0")
            for table in schema.TABLES
            if table.name != RETAINED_TABLE and trace_column(table)
            for (trace,) in store.sql(f'SELECT DISTINCT "{trace_column(table)}" FROM {table.name}')
        }


def signs_of_ann() -> list[bytes]:
    """What would give her away: her name, and her token ids as they are stored in columns and in span attributes."""
    packed = array("i", IDS).tobytes()
    # A base64 text holds bytes at one of three offsets; the middle of each form is without the neighbours' bits.
    texts = [base64.b64encode(b"\0" * shift + packed)[8:-8] for shift in range(3)]
    return [MARKER.encode(), MARKER[:6].encode(), packed, *texts]


def assert_nothing_of_ann(folder: Path) -> None:
    for path in files_under(folder):
        content = path.read_bytes()
        assert not any(sign in content for sign in signs_of_ann()), path
    for path in folder.rglob("*.duckdb"):
        with TraceStore.open(path) as store:
            for table in schema.TABLES:
                rows = repr(store.sql(f'SELECT * FROM "{table.name}"'))
                assert MARKER not in rows, "compression hides the bytes of a file, not those of its rows"
                assert str(IDS[0]) not in rows
    for path in folder.rglob("*.parquet"):
        rows = repr(duckdb.sql(f"SELECT * FROM read_parquet('{path}')").fetchall())
        assert MARKER not in rows
        assert str(IDS[0]) not in rows


def test_every_table_that_is_about_a_trace_is_emptied_of_it_but_one() -> None:
    trace_tables = {table.name for table in schema.TABLES if trace_column(table)}
    assert trace_tables == {table.name for table in ERASED_TABLES} | {RETAINED_TABLE}
    assert trace_tables == {"spans", "episodes", "actions", "edges", "rewards", "refusals", "adapter_episodes"}


def test_no_byte_of_the_subject_is_left_in_any_file(store_path: Path) -> None:
    content = store_path.read_bytes()
    assert MARKER.encode() in content
    assert array("i", IDS).tobytes() in content, (
        "the bytes have to be seen before, or not seeing them after says nothing"
    )
    erased = erase_quietly(store_path, ANN)
    assert erased.traces == [trace_id("a1")]
    assert erased.rows == {"spans": 3, "episodes": 1, "actions": 1, "rewards": 1}
    assert_nothing_of_ann(store_path.parent)
    assert not list(store_path.parent.glob("*.wal"))


def test_deleting_alone_would_have_left_the_bytes(store_path: Path) -> None:
    with TraceStore.open(store_path) as store, store.transaction() as con:
        con.execute("DELETE FROM spans")
        con.execute("DELETE FROM episodes")
        con.execute("DELETE FROM actions")
    assert MARKER.encode() in store_path.read_bytes(), "then the file need not be rewritten"


def test_everybody_else_is_as_before_to_the_bit(store_path: Path) -> None:
    with TraceStore.open(store_path) as store:
        rows_before = dump(store, EXPORTED_TABLES)
    erase_quietly(store_path, ANN)
    with TraceStore.open(store_path) as store:
        rows_after = dump(store, EXPORTED_TABLES)
    ann = trace_id("a1")
    assert rows_after == {name: [row for row in rows if ann not in row] for name, rows in rows_before.items()}
    assert len(rows_after["episodes"]) == 20
    assert traces_of(store_path) == {*(f"b{n:x}" for n in range(20)), "c", "nowhere"}


def test_what_goes_on_with_a_subjects_episode_goes_too_to_any_depth(tmp_path: Path) -> None:
    path = tmp_path / "store.duckdb"
    fill(
        path,
        [
            chain("a1").spans(SUBJECT_ID="ann"),
            chain("a2").spans(PARENT_EPISODE=trace_id("a1")),
            chain("a3").spans(PARENT_EPISODE=trace_id("a2"), SUBJECT_ID="bob"),
            chain("b").spans(SUBJECT_ID="bob"),
            chain("f").spans(),
        ],
    )
    erased = erase_quietly(path, ANN)
    assert (erased.traces, erased.replays) == (
        [trace_id(n) for n in ("a1", "a2", "a3")],
        [trace_id("a2"), trace_id("a3")],
    )
    assert traces_of(path) == {"b", "f"}


def test_traces_that_never_became_episodes_go_too(tmp_path: Path) -> None:
    path = tmp_path / "store.duckdb"
    waiting = chain("a1").spans(SUBJECT_ID="ann")[:2]  # the root never came, but the recorder names her on each span
    for span in waiting:
        span.attributes[c.SUBJECT_ID] = "ann"
    refused = chain("a2").spans(SUBJECT_ID="ann", OUTCOME="nonsense")
    continuation = chain("a3").spans(PARENT_EPISODE=trace_id("a2"), OUTCOME="nonsense")
    fill(path, [waiting, refused, continuation, chain("b").spans()[:2], chain("d").spans(OUTCOME="nonsense")])
    assert erase_quietly(path, ANN).rows == {"spans": 2 + 5 + 5, "refusals": 2}
    assert traces_of(path) == {"b", "d"}


@pytest.mark.slow
def test_named_exports_are_exchanged_and_others_listed(store_path: Path, tmp_path: Path) -> None:
    for folder in ("kept", "named"):
        export(store_path, tmp_path / folder, False, Console(file=io.StringIO()))
    erased = erase_quietly(store_path, EraseRequest("ann", None, (tmp_path / "named",)))
    rows = {"spans": 3, "episodes": 1, "actions": 1, "rewards": 1}
    for listed in (erased.exports[str(tmp_path / "named")], erased.exports_left[str(tmp_path / "kept")]):
        assert {path.split("/")[0]: count for path, count in listed.items()} == rows
    assert_nothing_of_ann(tmp_path / "named")
    with folder_to_reader(tmp_path / "kept") as kept_export, folder_to_reader(tmp_path / "named") as named_export:
        ann = trace_id("a1")
        expected = {
            name: [row for row in rows if ann not in row] for name, rows in dump(kept_export, EXPORTED_TABLES).items()
        }
        assert dump(named_export, EXPORTED_TABLES) == expected
    # She is not in the store any more, and still found where she is.
    assert erase_quietly(store_path, ANN).exports_left.keys() == {str(tmp_path / "kept")}
    erase_quietly(store_path, EraseRequest("ann", None, (tmp_path / "kept",)))
    assert_nothing_of_ann(tmp_path)


def test_an_export_that_is_gone_or_cannot_be_looked_into_is_listed(store_path: Path, tmp_path: Path) -> None:
    export(store_path, tmp_path / "out", False, Console(file=io.StringIO()))
    unfinished = tmp_path / "out" / ".writing-0badcafe" / "spans.parquet"
    unfinished.parent.mkdir()
    unfinished.write_text("of an export that was killed")
    assert erase_quietly(store_path, ANN, dry_run=True).exports_unread == [str(unfinished)]
    (tmp_path / "out").rename(tmp_path / "moved")
    assert erase_quietly(store_path, ANN, dry_run=True).exports_unread == [str(tmp_path / "out")]
    (tmp_path / "out").mkdir()
    erased = erase_quietly(store_path, EraseRequest("ann", None, (tmp_path / "moved",)))
    assert (erased.exports_unread, erased.rows["episodes"]) == ([str(tmp_path / "out")], 1)
    assert not list((tmp_path / "moved").glob(".writing-*"))
    assert_nothing_of_ann(tmp_path)


def test_a_segment_that_is_still_written_is_cleaned_and_its_other_lines_are_as_they_were(store_path: Path) -> None:
    journal = Journal(store_path.with_name(store_path.name + ".journal"))
    journal.append_all(secret_trace("a2", MARKER, IDS, SUBJECT_ID="ann"))
    group = RewardGroup((Reward(trace_id("a2"), "r", 0.5, "s", START), Reward(trace_id("a2"), "t", 0.5, "s", START)))
    journal.append(group)
    journal.append_all(secret_trace("b0b", "Bob", [1]))
    journal.append(RewardGroup(tuple(replace(reward, episode_id=trace_id("b0b")) for reward in group.rewards)))
    journal.sync()
    (segment,) = store_path.with_name(store_path.name + ".journal").iterdir()
    lines = segment.read_bytes().splitlines(keepends=True)
    erased = erase_quietly(store_path, ANN)
    assert (erased.segments, erased.segments_left) == ({str(segment): 4}, {})
    blanks = [b" " * (len(line) - 1) + b"\n" for line in lines[:4]]
    assert segment.read_bytes() == b"".join([*blanks, *lines[4:]])
    assert_nothing_of_ann(store_path.parent)
    journal.close()
    assert erase_quietly(store_path, ANN).segments == {}
    assert not segment.exists()
    assert_nothing_of_ann(store_path.parent)


@pytest.mark.parametrize(("names", "erased"), [(["ann", "bob", "anna", "ann", "x"], 5), (["anna"] * 5, 0)])
def test_a_trace_that_waits_in_a_receivers_spool_goes_whole_where_a_span_names_the_subject(
    store_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], erased: int
) -> None:
    spool = Journal(store_path.with_name(store_path.name + ".spool"))
    spool.append_all(
        [
            replace(span, attributes={"attributes": {"user.id": name, "said": "ann"}})
            for span, name in zip(chain("w").spans(), names, strict=True)
        ]
    )
    spool.close()
    assert run(["traces", "erase", "--subject", "ann", "--store", str(store_path)]) == 0
    printed = re.findall(r"erased (\d+) records in \S+\.spool/\S+", capsys.readouterr().out)
    assert printed == ([str(erased)] if erased else [])


def test_adapters_that_learned_from_it_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "store.duckdb"
    fill(
        path,
        [
            chain("a1").spans(SUBJECT_ID="ann", RUN_ID="train", ROUND=2),  # version 3 is from round 2
            chain("b1").spans(SUBJECT_ID="bob", RUN_ID="collect"),
        ],
    )
    with TraceStore.open(path) as store:
        for node in ("recorded", "derived"):
            for version in range(1, 6):
                store.put_adapter(AdapterRow(node, version, version - 1, f"{node}/{version}", "h", "b", version))
        for version in range(1, 6):  # the record says version 4, whatever the rounds say
            store.put_adapter_episodes("recorded", version, [trace_id("a1" if version == 4 else "other")])
        store.put_adapter_episodes("unpublished", 9, [trace_id("a1")])
    adapters = {(a.node, a.version): (a.basis, a.path) for a in erase_quietly(path, ANN).adapters}
    assert adapters == {
        ("derived", 3): ("derived", "derived/3"),
        ("derived", 4): ("inherited", "derived/4"),
        ("derived", 5): ("inherited", "derived/5"),
        ("recorded", 4): ("recorded", "recorded/4"),
        ("recorded", 5): ("inherited", "recorded/5"),
        ("unpublished", 9): ("recorded", None),
    }


def test_a_run_that_learned_from_an_export_lists_its_adapters(store_path: Path, tmp_path: Path) -> None:
    export(store_path, tmp_path / "out", False, Console(file=io.StringIO()))
    with TraceStore.open(tmp_path / "learner.duckdb") as store:
        store.put_adapter(AdapterRow("a", 1, None, "p", "h", "b", 1))
        store.put_adapter_episodes("a", 1, [trace_id("a1"), trace_id("b1")])
    erased = erase_quietly(tmp_path / "learner.duckdb", EraseRequest("ann", None, (tmp_path / "out",)))
    assert [(a.node, a.version, a.basis) for a in erased.adapters] == [("a", 1, "recorded")]


def test_erasing_by_age_takes_exactly_what_ended_before(tmp_path: Path) -> None:
    path = tmp_path / "store.duckdb"
    fill(
        path,
        [
            *(chain(f"e{day}", START + day * DAY_NS).spans() for day in range(4)),
            *(chain(f"f{day}", START + day * DAY_NS).spans()[:2] for day in range(4)),
        ],
    )
    with TraceStore.open(path) as store:
        names = [f"e{day}" for day in range(4)] + ["d1", "d3"]
        ages = [START + 9 * DAY_NS] * 4 + [START + DAY_NS, START + 3 * DAY_NS]
        store.put_rewards(
            [Reward(trace_id(n), "r", 1.0, "s", created_ns) for n, created_ns in zip(names, ages, strict=True)]
        )
    # chain() ends 40 ns after its start, and the last of its first two spans that came 20 ns after it.
    erase_quietly(path, EraseRequest(None, START + 2 * DAY_NS + 20))
    assert traces_of(path) == {"e2", "e3", "f2", "f3", "d3"}
    erase_quietly(path, EraseRequest(None, START + 2 * DAY_NS + 40))
    assert traces_of(path) == {"e2", "e3", "f3", "d3"}
    erase_quietly(path, EraseRequest(None, START + 2 * DAY_NS + 41))
    assert traces_of(path) == {"e3", "f3", "d3"}


@pytest.mark.parametrize("erase_request", [ANN, EraseRequest(None, START + DAY_NS)])
def test_a_dry_run_counts_the_same_and_changes_nothing(
    store_path: Path, tmp_path: Path, erase_request: EraseRequest
) -> None:
    export(store_path, tmp_path / "out", False, Console(file=io.StringIO()))
    erase_request = EraseRequest(erase_request.subject, erase_request.before_ns, (tmp_path / "out",))
    contents = {path: path.read_bytes() for path in files_under(tmp_path)}
    planned = erase_quietly(store_path, erase_request, dry_run=True)
    assert {path: path.read_bytes() for path in files_under(tmp_path)} == contents
    erasure = erase_quietly(store_path, erase_request)
    assert (planned.traces, planned.rows, planned.exports) == (erasure.traces, erasure.rows, erasure.exports)
    assert planned.rows


ERASE = """
import sys; from pathlib import Path
from rich.console import Console
from marft_bridge.erasure.command import EraseRequest, erase
print("now", flush=True)
request = EraseRequest("ann", None, (Path(sys.argv[2]),))
erase(Path(sys.argv[1]), request, False, False, Console(quiet=True, file=sys.stderr))
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_is_finished_by_running_it_again(tmp_path: Path) -> None:
    rng, killed = random.Random(3), 0
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "store.duckdb"
        fill(path, [secret_trace("a1", MARKER, IDS, SUBJECT_ID="ann"), secret_trace("b1", "Bob", [1, 2])])
        export(path, folder / "out", False, Console(file=io.StringIO()))
        killed += kill_after([ERASE, str(path), str(folder / "out")], 0.15 * rng.random())
        with folder_to_reader(folder / "out") as reader:
            assert {episode.episode_id.lstrip("0") for episode in reader.episodes()} in ({"a1", "b1"}, {"b1"})
        erase_quietly(path, EraseRequest("ann", None, (folder / "out",)))
        assert traces_of(path) == {"b1"}
        assert_nothing_of_ann(folder)
    assert killed >= 2, "the kills came too late: this shows little"


def test_the_report_is_json_that_says_what_was_erased(store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["traces", "erase", "--subject", "ann", "--json", "--store", str(store_path)]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["traces"] == [trace_id("a1")]
    assert report["rows"] == {"spans": 3, "episodes": 1, "actions": 1, "rewards": 1}
    assert (report["dry_run"], report["bytes_after"]) == (False, store_path.stat().st_size)
    assert run(["traces", "erase", "--subject", "nobody", "--store", str(store_path)]) == 0
    assert "erased 0 traces" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("subject", "older_than", "message"),
    [
        (None, None, "one of the two"),
        ("ann", "90d", "one of the two"),
        ("", None, "the subject is empty"),
        (None, "soon", "no age"),
        (None, "-5d", "no age"),
    ],
)
def test_a_malformed_request_is_refused(subject: str | None, older_than: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flags_to_request(subject, older_than, (), 0)


def test_ages_are_hours_days_and_weeks() -> None:
    hour = 3600 * 10**9
    times = [flags_to_request(None, age, (), 10**18).before_ns for age in ("36h", "90d", "2w")]
    assert times == [10**18 - hours * hour for hours in (36, 2160, 336)]


def test_a_store_that_does_not_exist_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.duckdb"
    for command in (["erase", "--subject", "x"], ["vacuum"], ["export", str(tmp_path / "out")]):
        assert run(["traces", *command, "--store", str(path)]) == 2
        assert re.search("store .* does not exist", re.sub(r"\s+", " ", capsys.readouterr().err))
    assert list(tmp_path.iterdir()) == []


def test_everything_in_a_store_can_be_erased_by_age(tmp_path: Path) -> None:
    fill_variously(tmp_path / "s.duckdb")
    erase_quietly(tmp_path / "s.duckdb", EraseRequest(None, 2**62))
    assert traces_of(tmp_path / "s.duckdb") == set()
