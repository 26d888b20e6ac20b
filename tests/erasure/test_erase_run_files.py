"""Owns: somebody's data, erased from everything that a run leaves behind.

- After an erasure no byte of what they said is in the run folder, in any of nine encodings, packed or not; or what is
  printed names the file that holds it, and how to make that one again. Reports are made again in all their forms.
- Everybody else's examples, records of the judge, advantages and journal lines are as they were.
- A live writer's segment is cleaned under it, and it goes on; nothing needs to have been taken in before.
- What others said as well is no reason to name a file.
- No command writes into the run meanwhile.
"""

from __future__ import annotations

import base64
import gzip
import html
import io
import json
import os
import shutil
import tempfile
import urllib.parse
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file
from support.growth_rig import files_under, secret_trace, trace_id
from support.sample_report import bare_report, task_change
from support.sample_spans import START, chain

from marft_bridge.cli import run
from marft_bridge.common.errors import ConfigError
from marft_bridge.comparison.page import write_report
from marft_bridge.comparison.records import ChangedTasks, Cohort, Report, Step, TaskChange
from marft_bridge.erasure import command
from marft_bridge.erasure.command import EraseRequest, Erasure, erase
from marft_bridge.erasure.text_search import TextSearch
from marft_bridge.ingest.otlp import WireSpan
from marft_bridge.ingest.trace_spool import TraceSpool, row_names_subject, row_to_span, span_to_row
from marft_bridge.runs.run_folder import RunFolder
from trace_store import schema
from trace_store.compaction import VacuumResult, vacuum
from trace_store.erasure import (
    SegmentTraces,
    count_in_segments,
    erase_from_segments,
    erased_texts,
    spool_to_traces,
)
from trace_store.errors import StoreError
from trace_store.journal import Journal, line_of, read_segment
from trace_store.records import Reward, SpanRow
from trace_store.store import TraceStore
from trace_store.unread import UnreadJournal

SECRET = 'Wilhelmina "Łucja" <Quist-Żółkiewska> owes 4711 crowns to the grocer'
BOBS = "Robert counts seven herons by the river"
ANN = EraseRequest("ann", None)
ANNS, BOB = trace_id("a1"), trace_id("b1")

ENCODINGS: dict[str, Callable[[str], bytes]] = {
    "UTF-8": str.encode,
    "UTF-16, little end first": lambda text: text.encode("utf-16-le"),
    "UTF-16, big end first": lambda text: text.encode("utf-16-be"),
    "UTF-32": lambda text: text.encode("utf-32-le"),
    "JSON": lambda text: json.dumps(text)[1:-1].encode(),
    "HTML": lambda text: html.escape(text).encode("ascii", "xmlcharrefreplace"),
    "URL": lambda text: urllib.parse.quote(text).encode(),
    "base64": lambda text: base64.b64encode(text.encode()),
    "hexadecimal": lambda text: text.encode().hex().encode(),
}


def erase_quietly(path: Path, request: EraseRequest = ANN, dry_run: bool = False) -> Erasure:
    return erase(path, request, dry_run, False, Console(file=io.StringIO()))


def signs() -> set[bytes]:
    """What would give her away: the halves of the secret, either side of its marks, in every encoding."""
    halves = (SECRET, "Wilhelmina", "Żółkiewska", " owes 4711 crowns to the grocer")
    shifted = [
        base64.b64encode(b"\0" * shift + half.encode())[4 if shift else 0 : -4] for half in halves for shift in range(3)
    ]
    return {encode(half) for half in halves for encode in ENCODINGS.values()} | set(shifted)


def contents_of(path: Path) -> list[bytes]:
    """The bytes of a file as they lie there, and unpacked as far as its format packs them."""
    contents = [path.read_bytes()]
    if contents[0][:2] == b"\x1f\x8b":
        contents.append(gzip.decompress(contents[0]))
    if contents[0][:1] == b"\x78":
        with suppress(zlib.error):  # a store begins with a checksum, which may look like this: one in 256 does
            contents.append(zlib.decompressobj().decompress(contents[0]))
    if path.suffix == ".parquet":
        contents.append(repr(duckdb.sql(f"FROM read_parquet('{path}')").fetchall()).encode())
    if path.suffix == ".duckdb":
        with TraceStore.open(path) as store:
            contents += [repr(store.sql(f'FROM "{table.name}"')).encode() for table in schema.TABLES]
    return contents


def files_with_signs(folder: Path) -> set[Path]:
    return {
        path
        for path in files_under(folder)
        if any(sign in content for content in contents_of(path) for sign in signs())
    }


def change_of(index: int, episode_id: str, text: str) -> TaskChange:
    """An example of a report in which a question and an answer hold a text."""
    change = task_change(index, 0.0, 1.0)
    trace = change.a.model_copy(update={"episode_id": episode_id, "steps": (Step(node="planner", text=f"so {text}"),)})
    return change.model_copy(
        update={"text": f"{text}?", "a": trace, "b": trace.model_copy(update={"variant": "trained"})}
    )


def report_of_both() -> Report:
    report = bare_report()
    base, trained = report.variants
    changed = ChangedTasks(
        candidate="trained", improved=(change_of(1, ANNS, SECRET), change_of(2, BOB, BOBS)), regressed=()
    )
    reasons = {f"GraphError: cannot parse {SECRET}": 2, "time limit": 1}
    return report.model_copy(
        update={
            "tasks": (changed,),
            "variants": (base.model_copy(update={"reasons": reasons, "unscored": 3}), trained),
            "cohorts": (
                Cohort(field="user", value="ann", contrasts=()),
                Cohort(
                    field="user",
                    value="bob",
                    contrasts=report.contrasts,
                    regressed={"trained": (change_of(3, ANNS, SECRET), change_of(4, BOB, BOBS))},
                ),
            ),
        }
    )


def write_advantages(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    rows = ", ".join(f"('{episode}', 'x', 0, 0.5::FLOAT, 1::FLOAT)" for episode in (ANNS, ANNS, BOB))
    columns = "episode_id, action_id, unit, advantage, normalised"
    duckdb.execute(f"COPY (FROM (VALUES {rows}) t({columns})) TO '{path}' (FORMAT parquet)")


@pytest.fixture(autouse=True)
def _among_no_temporary_files_of_other_tests(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that another process writes just then cannot be looked into, which is told."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run in which Ann and Bob were served: all that `collect`, `train`, `compare` and a judge leave of both."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    journal = Journal(folder / "store.duckdb.journal")
    journal.append_all(secret_trace("a1", SECRET, [1, 2, 3], SUBJECT_ID="ann"))
    journal.append_all(secret_trace("b1", BOBS, [4, 5], SUBJECT_ID="bob"))
    journal.close()
    with TraceStore.open(folder / "store.duckdb") as store:
        store.take_in()
    write_report(report_of_both(), folder)
    (folder / ".report.html.0a1b2c3d").write_text(SECRET)  # of a `compare` that was killed
    (folder / "lock").write_text("")
    (folder / "judge").mkdir(mode=0o700)
    for name, content in {
        "a": {"reason": SECRET, "episode_id": ANNS},
        "b": {"reason": BOBS, "episode_id": BOB},
        "c": {"reason": f"{SECRET} again"},  # of an earlier release
    }.items():
        (folder / "judge" / f"{name * 64}.json").write_text(json.dumps({"score": 1.0, "judge": "j", **content}))
    write_advantages(folder / "advantages" / "round-00001.parquet")
    return folder


def test_no_byte_is_left_in_the_run_folder(run_folder: Path) -> None:
    before = files_with_signs(run_folder)
    names = {path.relative_to(run_folder).parts[0] for path in before}
    assert names >= {"store.duckdb", "report.json", "report.html", "report.md", "judge", ".report.html.0a1b2c3d"}
    erased = erase_quietly(run_folder / "store.duckdb")
    assert (files_with_signs(run_folder), erased.files_left) == (set(), {})
    assert {Path(file).name: count for file, count in erased.files.items()} == {
        "report.json": 4,  # the two examples, the reason, the cohort
        "report.html": 4,
        "report.md": 4,
        f"{'a' * 64}.json": 1,
        f"{'c' * 64}.json": 1,
        "round-00001.parquet": 1,
    }


def test_everybody_elses_parts_are_as_they_were(run_folder: Path) -> None:
    before = report_of_both()
    erase_quietly(run_folder / "store.duckdb")
    report = Report.model_validate_json((run_folder / "report.json").read_bytes())
    assert report.tasks[0].improved == before.tasks[0].improved[1:]
    assert report.variants[0].reasons == {"[erased]": 2, "time limit": 1}
    (cohort,) = report.cohorts
    assert (cohort.value, cohort.regressed) == ("bob", {"trained": (change_of(4, BOB, BOBS),)})
    dropped = {"tasks", "variants", "cohorts"}
    assert report.model_dump(exclude=dropped) == before.model_dump(exclude=dropped)
    assert all(BOBS in (run_folder / name).read_text() for name in ("report.json", "report.html", "report.md"))
    (record,) = (run_folder / "judge").iterdir()
    assert json.loads(record.read_text())["reason"] == BOBS
    rows = duckdb.sql(f"FROM read_parquet('{run_folder}/advantages/*.parquet')").fetchall()
    assert rows == [(BOB, "x", 0, 0.5, 1.0)]


def test_a_dry_run_names_the_same_files_and_changes_none(run_folder: Path) -> None:
    contents = {path: path.read_bytes() for path in files_under(run_folder)}
    planned = erase_quietly(run_folder / "store.duckdb", dry_run=True)
    assert {path: path.read_bytes() for path in files_under(run_folder)} == contents
    assert planned.files == erase_quietly(run_folder / "store.duckdb").files


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ENCODINGS)
def test_a_file_that_cannot_be_cleaned_is_named_whatever_its_encoding(tmp_path: Path, name: str, packed: bool) -> None:
    content = b"\xff\x00 INFO request: " + ENCODINGS[name](SECRET) + b"\n"
    path = tmp_path / "notes"
    path.write_bytes(gzip.compress(content) if packed else content)
    search = TextSearch([f"I know that {SECRET}.", "42", BOBS])
    assert set(search.runs_in(path)) & set(search.runs_in_text(SECRET))
    assert not set(TextSearch([BOBS, "42"]).runs_in(path))


@pytest.mark.parametrize("offset", [(1 << 22) - 20, (1 << 22), 3 * (1 << 22) - 7])
def test_a_text_is_seen_where_two_chunks_of_a_file_meet(tmp_path: Path, offset: int) -> None:
    with (tmp_path / "large.log").open("wb") as file:
        file.truncate(13 << 20)
        file.seek(offset)
        file.write(SECRET.encode())
    assert set(TextSearch([SECRET]).runs_in(tmp_path / "large.log"))


def write_compressed(path: Path, text: str) -> None:
    """A Parquet file with a text in a list of structs and, as UTF-16, in a blob; none of its bytes are as they were.

    The other rows keep it out of the smallest and largest values, which the file has as they are.
    """
    file_name = str(path).replace("'", "''")
    with duckdb.connect() as con:
        con.execute(
            "CREATE TABLE t AS SELECT range AS n, [{'a': 7, 'b': if(n % 2 = 0, 'A', 'z') || ' of row ' || n}] AS deep, "
            "if(n % 2 = 0, 'A', 'z')::BLOB AS blob FROM range(3000)"
        )
        con.execute("INSERT INTO t VALUES (1500, [{'a': 1, 'b': ?}], ?)", [text, text.encode("utf-16-le")])
        con.execute(f"COPY t TO '{file_name}' (FORMAT parquet, COMPRESSION gzip)")


@pytest.mark.parametrize("name", ["kept.parquet", "it's [a] *b?.parquet", "renamed.bin"])
def test_compressed_columns_are_searched(tmp_path: Path, name: str) -> None:
    write_compressed(tmp_path / name, SECRET)
    (tmp_path / "it's [a] _b_.parquet").write_bytes(b"PAR1")  # what a pattern would take for the second
    assert not any(sign in (tmp_path / name).read_bytes() for sign in signs())
    assert set(TextSearch([SECRET]).runs_in(tmp_path / name))
    assert not set(TextSearch([BOBS]).runs_in(tmp_path / name))


def test_weights_metadata_and_other_peoples_tables_are_named(run_folder: Path) -> None:
    """Files whose names say that they hold numbers: what is in them decides."""
    texts = {"model": f"trained for {SECRET}"}
    adapter = run_folder / "adapters" / "planner" / "1" / "adapter_model.safetensors"
    adapter.parent.mkdir(parents=True, mode=0o700)
    save_file({"lora_A": np.zeros((2, 3), np.float32)}, adapter, metadata=texts)
    (run_folder / "checkpoint").mkdir(mode=0o700)
    sampled = np.frombuffer(SECRET.encode(), np.uint8)
    save_file({"example": sampled}, run_folder / "checkpoint" / "trainer.safetensors")
    save_file({"lora_A": np.ones((2, 3), np.float32)}, run_folder / "clean.safetensors", metadata={"model": BOBS})
    write_compressed(run_folder / "table.parquet", SECRET)
    write_compressed(run_folder / "bobs.parquet", BOBS)
    (run_folder / "damaged.parquet").write_bytes((run_folder / "bobs.parquet").read_bytes()[:-20])
    left = {Path(file).name: remedy for file, remedy in erase_quietly(run_folder / "store.duckdb").files_left.items()}
    of_others = "it is not a file of a run; delete it, or take the text out of it"
    assert left == {
        "adapter_model.safetensors": "delete that version, and train it again",
        "trainer.safetensors": "delete the folder, and make it again with `marft-bridge train`",
        "table.parquet": of_others,
        "damaged.parquet": f"it cannot be looked into; {of_others}",
    }


@pytest.mark.parametrize("writer", ["train", "compare", "score"])
def test_it_does_not_run_beside_a_command_that_writes_the_run(
    run_folder: Path, capsys: pytest.CaptureFixture[str], writer: str
) -> None:
    before = {path: path.read_bytes() for path in files_under(run_folder) if path.name != "lock"}
    arguments = ["traces", "erase", "--subject", "ann", "--run", str(run_folder)]
    with RunFolder(run_folder).lock_for(writer):
        assert run(arguments) == 2
        refusal = capsys.readouterr().err
        assert refusal.count("\n") == 1
        assert f"traces erase: {run_folder} is in use by `marft-bridge {writer}` (process {os.getpid()}); " in refusal
        assert {path: path.read_bytes() for path in files_under(run_folder) if path.name != "lock"} == before
        assert run([*arguments, "--dry-run"]) == 0
    assert run(arguments) == 0
    assert files_with_signs(run_folder) == set()


def test_a_command_that_would_write_the_run_waits_for_its_end(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the rows go and the file is rewritten, nobody can begin."""
    refusals = []

    def vacuum_and_try(path: Path, wait_s: float) -> VacuumResult:
        with pytest.raises(ConfigError, match="is in use by `marft-bridge traces erase`") as refused:
            RunFolder(run_folder).lock_for("train").__enter__()
        refusals.append(refused.value)
        return vacuum(path, wait_s=wait_s)

    monkeypatch.setattr(command, "vacuum", vacuum_and_try)
    erase_quietly(run_folder / "store.duckdb")
    assert len(refusals) == 1


def test_nothing_is_left_where_no_run_is(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        erase_quietly(tmp_path / "store.duckdb")
    assert list(tmp_path.iterdir()) == []


def test_the_report_says_which_file_holds_it_and_how_to_make_it_again(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_folder / "promoted").mkdir(mode=0o700)
    texts = {
        "vllm.log": f"ERROR bad request: {SECRET}",
        "promoted/1.safety.txt": f"asked about {SECRET!r}",
        "notes.txt": f"Bob said: {BOBS}; Ann: {html.escape(SECRET)}",
        "bobs.log": f"ERROR {BOBS}",
    }
    for name, text in texts.items():
        (run_folder / name).write_text(text)
    assert run(["traces", "erase", "--subject", "ann", "--run", str(run_folder)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left: ")]
    assert lines == [
        f"left: {run_folder}/notes.txt holds a text of it; it is not a file of a run; delete it, or take the text out "
        "of it",
        f"left: {run_folder}/vllm.log holds a text of it; delete it when no server runs; the next one begins it anew",
        f"left: {run_folder}/promoted/1.safety.txt holds a text of it; a signed chain: delete the folder, and sign off "
        "again with `marft-bridge promote`",
    ]
    assert files_with_signs(run_folder) == {
        run_folder / name for name in ("notes.txt", "vllm.log", "promoted/1.safety.txt")
    }


def test_what_others_said_too_is_no_reason_to_name_a_file(run_folder: Path) -> None:
    journal = Journal(run_folder / "store.duckdb.journal")
    journal.append_all(secret_trace("a2", BOBS, [9], SUBJECT_ID="ann"))
    journal.close()
    (run_folder / "vllm.log").write_text(BOBS)
    assert erase_quietly(run_folder / "store.duckdb").files_left == {}


def test_a_live_writers_segment_is_cleaned_under_it_and_it_goes_on(run_folder: Path) -> None:
    path = run_folder / "store.duckdb"
    journal = Journal(run_folder / "store.duckdb.journal")
    journal.append_all(secret_trace("a2", SECRET, [7], SUBJECT_ID="ann"))
    journal.append_all([*secret_trace("c1", BOBS, [8]), Reward(trace_id("a2"), "r", 1.0, SECRET, START)])
    journal.sync()
    (segment,) = (run_folder / "store.duckdb.journal").iterdir()
    size, inode = segment.stat().st_size, segment.stat().st_ino
    erased = erase_quietly(path)
    assert erased.segments == {str(segment): 4}
    assert erased.segments_left == {}
    assert files_with_signs(run_folder) == set()
    assert (segment.stat().st_size, segment.stat().st_ino) == (size, inode)
    assert read_segment(segment) == (secret_trace("c1", BOBS, [8]), 0)  # and no line counts as damaged
    journal.append_all(secret_trace("c2", BOBS, [9]))
    journal.close()
    with TraceStore.open(path) as store:
        store.take_in()
        assert {episode.episode_id for episode in store.episodes()} == {BOB, trace_id("c1"), trace_id("c2")}
        assert store.sql("SELECT sum(torn) FROM taken_in") == [(0,)]


@pytest.mark.parametrize("folder_name", ["store.duckdb.journal", "store.duckdb.spool"])
def test_it_works_before_anything_was_taken_in(tmp_path: Path, folder_name: str) -> None:
    path = tmp_path / "store.duckdb"
    journal = Journal(tmp_path / folder_name)
    recorded = [*secret_trace("a1", SECRET, [1], SUBJECT_ID="ann"), *secret_trace("b1", BOBS, [2])]
    journal.append_all(wire_rows() if folder_name.endswith("spool") else recorded)
    journal.sync()
    assert files_with_signs(tmp_path)
    assert not path.exists()
    erase_quietly(path)
    assert files_with_signs(tmp_path) == set()
    journal.close()


def wire_rows() -> list[SpanRow]:
    """Two traces as a receiver keeps them; only one span of the first names Ann."""
    rows = []
    for name, text in (("d1", SECRET), ("d2", BOBS)):
        for number, span in enumerate(chain(name).spans()):
            attributes = {"text": text, "said": "ann"} | ({"user.id": "ann"} if (name, number) == ("d1", 1) else {})
            wire = WireSpan(
                span.trace_id,
                span.span_id,
                span.parent_span_id,
                parent_is_remote=False,
                name=span.name,
                start_ns=span.start_ns,
                end_ns=span.end_ns,
                failed=False,
                status_message=None,
                exception_type=None,
                scope="",
                scope_version="",
                service=None,
                attributes=attributes,
            )
            rows.append(span_to_row(wire))
    return rows


def test_a_spool_without_a_receiver_is_cleaned_of_whole_traces(tmp_path: Path) -> None:
    spool = Journal(tmp_path / "store.duckdb.spool")
    spool.append_all(wire_rows())
    spool.close()
    (segment,) = (tmp_path / "store.duckdb.spool").iterdir()
    erased = erase_quietly(tmp_path / "store.duckdb")
    assert (erased.segments, erased.segments_left) == ({str(segment): 5}, {})
    assert files_with_signs(tmp_path) == set()
    assert {span.trace_id for span in read_segment(segment)[0] if isinstance(span, SpanRow)} == {trace_id("d2")}


@pytest.mark.parametrize("order", [(2, -1), (-1, 2)], ids=["hers first", "hers last"])
@pytest.mark.parametrize("in_one_go", [False, True])
def test_no_byte_of_the_subject_is_left_in_a_spool_that_is_cut_at_any_byte(
    tmp_path: Path, in_one_go: bool, order: tuple[int, int]
) -> None:
    journal, states = Journal(tmp_path / "s.duckdb.spool"), set[bytes]()
    rows = wire_rows()
    journal.append(rows[1])  # which names Ann
    (segment,) = (tmp_path / "s.duckdb.spool").iterdir()
    begin = segment.stat().st_size
    journal.append_all([rows[number] for number in order])  # of her trace and of Bob's
    journal.close()
    whole = segment.read_bytes()
    if in_one_go:  # killed before the first byte of the two came
        whole = whole[:begin] + b"\0" + whole[begin + 1 :]
    for cut in [*range(begin, len(whole), 11), *range(len(whole) - 3, len(whole) + 1), whole.index(b"\n", begin) + 1]:
        segment.write_bytes(whole[:cut])
        chosen = spool_to_traces(segment.parent, [], partial(row_names_subject, subject="ann"), before_ns=None)
        planned = count_in_segments(segment.parent, chosen)
        assert erase_from_segments(segment.parent, chosen) == planned
        left = segment.read_bytes()
        states.add(left.strip())
        assert b"Wilhelmina" not in left
        assert count_in_segments(segment.parent, chosen) == {}  # nothing is left to do
    assert len(states) == (1 if in_one_go else 2)  # nothing, or Bob's whole line


def test_what_is_recorded_while_a_segment_is_erased_is_not_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, folder = Journal(tmp_path / "s.duckdb.spool"), tmp_path / "s.duckdb.spool"
    rows = wire_rows()
    journal.append_all(rows)
    appended = iter([rows[-1]] * 20)

    def with_an_append(work: Any) -> Any:
        def appending(*args: Any) -> Any:
            if (row := next(appended, None)) is not None:
                journal.append(row)
            return work(*args)

        return appending

    for name in ("fstat", "ftruncate", "close"):
        monkeypatch.setattr(f"trace_store.erasure.os.{name}", with_an_append(getattr(os, name)))
    chosen = SegmentTraces(frozenset({rows[0].trace_id}))
    assert sum(erase_from_segments(folder, chosen).values()) > 0
    monkeypatch.undo()
    came = 20 - len(list(appended))
    assert came > 0
    journal.append(rows[-1])
    journal.close()
    (segment,) = folder.iterdir()
    records, torn = read_segment(segment)
    assert torn == 0
    assert records[-1 - came :] == [rows[-1]] * (1 + came)


def test_a_killed_append_of_several_lines_is_erased_once_and_leaves_no_hole(tmp_path: Path) -> None:
    rows = wire_rows()
    segment = tmp_path / "1-a-000001.segment"
    hers, his = rows[1], rows[-1]
    killed = b"".join(map(line_of, (his, hers, hers)))
    segment.write_bytes(line_of(his) + b"\0" + killed[1:])
    chosen = SegmentTraces(frozenset({hers.trace_id}))
    assert count_in_segments(tmp_path, chosen) == {segment: 3}
    assert erase_from_segments(tmp_path, chosen) == {segment: 3}
    assert segment.read_bytes() == line_of(his)
    assert count_in_segments(tmp_path, chosen) == {}


def test_what_a_writer_at_work_has_half_written_is_left_to_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "s.duckdb.spool")
    journal.append_all(wire_rows())
    (segment,) = (tmp_path / "s.duckdb.spool").iterdir()
    with segment.open("ab") as file:
        file.write(b"half a li")
    chosen = SegmentTraces(frozenset())
    assert erase_from_segments(segment.parent, chosen) == {}
    journal.close()
    assert erase_from_segments(segment.parent, chosen) == {segment: 1}
    assert read_segment(segment) == (wire_rows(), 0)


def test_what_a_receiver_at_work_holds_is_left_and_said(tmp_path: Path) -> None:
    spool = tmp_path / "store.duckdb.spool"
    spool.mkdir(mode=0o700)
    receiver = TraceSpool(spool, 0.0)
    receiver.add([row_to_span(row) for row in wire_rows()], 0.0)
    (segment,) = spool.glob("*.segment")
    erased = erase_quietly(tmp_path / "store.duckdb")
    assert erased.segments_left == {str(segment): 5}
    receiver.close()


def test_temporary_copies_of_this_user_are_named(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's spilled objects and logs, a worker's journal, and the database of somebody who looks at the journal."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "elsewhere"))
    logged = tmp_path / "elsewhere" / "ray" / "session_2027" / "logs" / "worker-1.out"
    spilled = tmp_path / "tmp" / "ray" / "session_2026" / "ray_spilled_objects_1" / "object"
    of_worker = tmp_path / "tmp" / "marft-worker-x" / "store.duckdb.journal" / "1.segment"
    for path in (logged, spilled, of_worker):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"\x80\x05" + SECRET.encode())
    abandoned = tmp_path / "tmp" / f"marft-unread-{2**22 + 1}-x"  # no process has such a number
    abandoned.mkdir()
    journal = Journal(run_folder / "store.duckdb.journal")
    journal.append_all(secret_trace("a2", SECRET, [7], SUBJECT_ID="ann"))
    journal.sync()
    with UnreadJournal(run_folder / "store.duckdb") as unread:
        TraceStore.open(run_folder / "store.duckdb", read_only=True, unread=unread).close()
        erased = erase_quietly(run_folder / "store.duckdb")
        (database,) = (tmp_path / "tmp").glob("marft-unread-*")
        assert erased.readers_left == {str(database): os.getpid()}
    assert set(erased.files_left) == {str(logged), str(spilled), str(of_worker)}
    assert erase_quietly(run_folder / "store.duckdb").readers_left == {}
    journal.close()


def test_the_machines_of_a_cluster_are_named(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def collected(engine: str, address: str | None) -> dict[str, Any]:
        return {"version": "0", "config": {"collect": {"engine": engine}, "ray": {"address": address}}}

    commands = {
        "collect": collected("ray", "10.0.0.7:6379"),
        "train": collected("local", "10.0.0.8:6379"),
        "compare": collected("ray", None),  # a cluster of this machine, which ended with the command
        "credit": collected("local", "10.0.0.9:6379"),
    }
    commands["credit"]["config"]["train"] = {"engine": "ray"}
    (run_folder / "bridge.json").write_text(json.dumps(commands))
    assert run(["traces", "erase", "--subject", "ann", "--run", str(run_folder)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left: ")]
    assert lines == [
        f"left: machines of the Ray cluster at {address} may hold it, in what it logged and spilled there; when it has "
        "ended, delete ray/session_* and marft-worker-* among their temporary files"
        for address in ("10.0.0.7:6379", "10.0.0.9:6379")
    ]
    assert erase_quietly(run_folder / "store.duckdb").clusters_left == []  # nothing of hers is known any more


def test_a_report_of_episodes_that_were_erased_before_is_cleaned_too(run_folder: Path) -> None:
    """Earlier releases left the examples; whoever erases again, of anybody, has them gone."""
    (run_folder / "kept").mkdir()
    for name in ("report.json", "report.html", "report.md"):
        shutil.copy(run_folder / name, run_folder / "kept" / name)
    erase_quietly(run_folder / "store.duckdb")
    for path in (run_folder / "kept").iterdir():
        path.rename(run_folder / path.name)
    erase_quietly(run_folder / "store.duckdb", EraseRequest("bob", None))
    report = Report.model_validate_json((run_folder / "report.json").read_bytes())
    assert report.tasks == ()


def test_texts_are_found_at_any_depth_and_ids_and_names_are_none(tmp_path: Path) -> None:
    path = tmp_path / "store.duckdb"
    with TraceStore.open(path) as store:
        spans: list[Any] = secret_trace("a1", SECRET, [1], SUBJECT_ID="ann")
        spans[0].attributes["x"] = json.dumps({"deep": [{"er": json.dumps(["inside"])}]})
        journal = Journal(store.journal_folder)
        journal.append_all(spans)
        journal.close()
        store.take_in()
        texts = set(erased_texts(store, [ANNS]))
    assert {f"I am {SECRET}", f"hello {SECRET}", f"{SECRET}?", "inside"} <= texts
    assert not {"ann", ANNS, "solver"} & texts
