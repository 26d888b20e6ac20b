"""`traces erase`: a subject or an age -> a run without its traces, and a report on the copies that are left.

The order makes it safe: all traces are found before any is deleted; exports, segments and the files of the run folder
are cleaned before the rows of the store that tell which traces to look for are deleted; the store's file is rewritten
last, and always, so that an erasure that was killed is finished by running it again. Invariant: every copy that could
not be erased is in the report, by path.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.terminal_text import print_line, text_to_line, value_to_json
from marft_bridge.erasure.run_files import ErasedTraces, clean_run_files, clusters_of, files_with_texts
from marft_bridge.erasure.text_search import TextSearch
from marft_bridge.ingest.trace_spool import LOCK_NAME, SPOOL_SUFFIX, row_names_subject, spool_of
from marft_bridge.runs.run_folder import DISTILLED_FROM, RunFolder, store_to_run_folder
from marft_bridge.traces.copies import Copies, read_copies
from marft_bridge.traces.exports import WAIT_S, open_existing_store, open_store
from marft_bridge.traces.store_reader import open_for_reading
from marft_bridge.traces.trained_adapters import TrainedAdapter, episodes_to_adapters
from trace_store.compaction import vacuum
from trace_store.erasure import (
    ChosenTraces,
    SegmentTraces,
    age_to_traces,
    count_in_segments,
    count_mentions,
    count_rows,
    delete_traces,
    erase_from_export,
    erase_from_segments,
    erased_texts,
    export_to_rows,
    has_text_elsewhere,
    spool_to_traces,
    subject_to_traces,
)
from trace_store.errors import StoreError
from trace_store.files import locked_file
from trace_store.journal import FOREIGN_SUFFIX, SUFFIX, is_recorded, journal_of
from trace_store.manifest import leftovers
from trace_store.readers import CATALOG_SUFFIX, folder_to_reader
from trace_store.store import TraceStore
from trace_store.unread import readers_of, remove_abandoned

_AGE = re.compile(r"(?P<number>\d+)(?P<unit>[hdw])")
_DISTILLED_FROM = """
SELECT episode_id FROM episodes WHERE json_extract_string(tags, ?) IN (SELECT unnest(?::VARCHAR[]))
"""
_HOURS = {"h": 1, "d": 24, "w": 7 * 24}


@dataclass(frozen=True, slots=True)
class EraseRequest:
    """What to erase: the traces of a subject, or those that ended before a Unix time; and from which exports."""

    subject: str | None
    before_ns: int | None
    exports: tuple[Path, ...] = ()


@dataclass(slots=True)
class Erasure:
    """The numbers of what was erased, or with `dry_run` would be; and the copies that the user has to deal with."""

    dry_run: bool
    traces: list[str] = field(default_factory=list)
    replays: list[str] = field(default_factory=list)  # those of them that continue a trace of the subject
    rows: dict[str, int] = field(default_factory=dict)
    bytes_before: int | None = None
    bytes_after: int | None = None
    exports: dict[str, dict[str, int]] = field(default_factory=dict)  # folder -> file -> rows
    exports_left: dict[str, dict[str, int]] = field(default_factory=dict)  # not named by --exports: as they are
    exports_unread: list[str] = field(default_factory=list)  # gone, damaged, unfinished, or a DuckLake catalog
    distilled_left: dict[str, int | None] = field(default_factory=dict)  # store -> episodes; None: it cannot be read
    segments: dict[str, int] = field(default_factory=dict)  # segment -> records that were overwritten in it
    segments_left: dict[str, int] = field(default_factory=dict)  # segment, or lines set aside -> records
    files: dict[str, int] = field(default_factory=dict)  # of the run folder -> parts that went
    files_left: dict[str, str] = field(default_factory=dict)  # file that holds a text -> how to make it without
    clusters_left: list[str] = field(default_factory=list)  # addresses of Ray clusters, whose machines are not searched
    readers_left: dict[str, int] = field(default_factory=dict)  # temporary database of `view` and the like -> process
    adapters: list[TrainedAdapter] = field(default_factory=list)


def flags_to_request(subject: str | None, older_than: str | None, exports: Sequence[Path], now_ns: int) -> EraseRequest:
    """A request by subject or by age. Raises ConfigError for neither, both, an empty subject or a malformed age."""
    if (subject is None) == (older_than is None):
        raise ConfigError("traces erase: say what, with --subject ID or with --older-than 90d; one of the two")
    if subject == "":
        raise ConfigError("traces erase: the subject is empty; give the id that was recorded")
    if older_than is None:
        return EraseRequest(subject, None, tuple(exports))
    age = _AGE.fullmatch(older_than)
    if age is None:
        raise ConfigError(f"traces erase: {older_than!r} is no age; give a number and h, d or w, such as 90d")
    return EraseRequest(None, now_ns - int(age["number"]) * _HOURS[age["unit"]] * 3600 * 10**9, tuple(exports))


def erase(path: Path, request: EraseRequest, dry_run: bool, as_json: bool, console: Console) -> Erasure:
    """Erases the traces, or with `dry_run` only counts them, and prints a report.

    The run's folder is locked meanwhile, but for a dry run: no command writes there what was just searched.

    Raises:
        ConfigError: another command works in the run's folder.
        StoreError: the store or an export cannot be read or written; running it again finishes the work.
    """
    with _lock_run(path, dry_run):
        return _erase_unlocked(path, request, dry_run, as_json=as_json, console=console)


def _lock_run(path: Path, dry_run: bool) -> AbstractContextManager[None]:
    folder = store_to_run_folder(path)
    if folder is None or dry_run or not (is_recorded(path) or _has_spool(path)):  # no lock is left where no run is
        return nullcontext()
    return folder.lock_for("traces erase")


def _erase_unlocked(path: Path, request: EraseRequest, dry_run: bool, as_json: bool, console: Console) -> Erasure:
    if (folder := store_to_run_folder(path)) is not None:
        folder.refuse_unsafe()  # also where `--store` names its store
    with _open_store(path) as store:
        store.take_in()
        chosen = _choose_traces(store, request)
        erasure = Erasure(dry_run, list(chosen.trace_ids), list(chosen.replays))
        erasure.adapters = episodes_to_adapters(store, chosen.trace_ids)
        _note_exports_left(path, request, chosen.trace_ids, erasure=erasure)
        _note_distilled_left(path, request, chosen.trace_ids, erasure=erasure)
        for export in request.exports:
            change = export_to_rows if dry_run else erase_from_export
            erasure.exports[str(export)] = change(export, chosen.trace_ids)
        _erase_from_segments(path, request, chosen.trace_ids, erasure=erasure)
        _clean_files(folder, store, request, traces=chosen.trace_ids, erasure=erasure)
        erasure.rows = count_rows(store, chosen.trace_ids) if dry_run else delete_traces(store, chosen.trace_ids)
    if not dry_run:
        rewritten = vacuum(path, wait_s=WAIT_S)
        erasure.bytes_before, erasure.bytes_after = rewritten.before, rewritten.after
        segment_traces = SegmentTraces(frozenset(chosen.trace_ids), request.subject)
        _note_segments_left(erasure, count_in_segments(journal_of(path), segment_traces))
        remove_abandoned()
    erasure.readers_left = {str(database): pid for database, pid in readers_of(path).items()}
    if as_json:
        print_line(console, value_to_json(_erasure_to_json(erasure)))
    else:
        for line in _erasure_to_lines(erasure):
            print_line(console, text_to_line(line))
    return erasure


def _open_store(path: Path) -> TraceStore:
    """The store. Made where nothing was taken in yet, and where there is only what a receiver left."""
    if _has_spool(path):
        return open_store(path)
    return open_existing_store(path)


def _has_spool(path: Path) -> bool:
    return any(spool_of(path).glob(f"*{SUFFIX}"))


def _choose_traces(store: TraceStore, request: EraseRequest) -> ChosenTraces:
    """The traces in the store and the requested exports: each may hold traces that the others no longer have."""
    choices = [_choose_in_export(folder, request) for folder in request.exports]
    direct_ids = {trace for chosen in choices for trace in chosen.trace_ids if trace not in chosen.replays}
    choices.append(_choose_in_store(store, request, sorted(direct_ids)))
    direct_ids |= set(choices[-1].trace_ids) - set(choices[-1].replays)
    all_ids = {trace for chosen in choices for trace in chosen.trace_ids}
    replays = () if request.subject is None else tuple(sorted(all_ids - direct_ids))
    return ChosenTraces(tuple(sorted(all_ids)), replays)


def _choose_in_store(store: TraceStore, request: EraseRequest, other_traces: Sequence[str] = ()) -> ChosenTraces:
    if request.subject is not None:
        return subject_to_traces(store, request.subject, other_traces)
    assert request.before_ns is not None  # a request has one of the two
    return age_to_traces(store, request.before_ns)


def _choose_in_export(folder: Path, request: EraseRequest) -> ChosenTraces:
    with folder_to_reader(folder) as reader:
        return _choose_in_store(reader, request)


def _note_exports_left(path: Path, request: EraseRequest, traces: Sequence[str], erasure: Erasure) -> None:
    requested_exports = {folder.resolve() for folder in request.exports}
    for export in read_copies(path, Copies.EXPORTS):
        if export in requested_exports:
            continue
        if export.suffix == CATALOG_SUFFIX:
            erasure.exports_unread.append(str(export))
            continue
        try:
            # A subject may be in an archive of what the store no longer has; what is old is in there on purpose.
            archived_traces = _choose_in_export(export, request).trace_ids if request.subject is not None else ()
            rows = export_to_rows(export, sorted({*traces, *archived_traces}))
            unfinished = leftovers(export)
        except StoreError:  # gone, moved or damaged: not a reason to leave the store as it is
            erasure.exports_unread.append(str(export))
            continue
        if rows:
            erasure.exports_left[str(export)] = rows
        erasure.exports_unread += map(str, unfinished)


def _note_distilled_left(path: Path, request: EraseRequest, traces: Sequence[str], erasure: Erasure) -> None:
    """Episodes that tell in one node's words what erased runs said, in the stores of the runs that learn from them."""
    sources = [path, *read_copies(path, Copies.EXPORTS), *request.exports]
    for place in dict.fromkeys(place for source in sources for place in read_copies(source, Copies.DISTILLED)):
        try:
            with open_for_reading(place) as store:
                ids = {episode for (episode,) in store.sql(_DISTILLED_FROM, (f"$.{DISTILLED_FROM}", list(traces)))}
                if request.subject is not None:
                    ids.update(subject_to_traces(store, request.subject).trace_ids)
        except StoreError:  # gone, moved or damaged: not a reason to leave the store as it is
            erasure.distilled_left[str(place)] = None
            continue
        if ids:
            erasure.distilled_left[str(place)] = len(ids)


def _erase_from_segments(path: Path, request: EraseRequest, traces: Sequence[str], erasure: Erasure) -> None:
    """Journal and spool. What a receiver at work holds in its memory comes again, and is counted as left."""
    change = count_in_segments if erasure.dry_run else erase_from_segments
    of_journal = SegmentTraces(frozenset(traces), request.subject)
    erasure.segments |= _name_paths(change(journal_of(path), of_journal))
    _note_segments_left(erasure, count_mentions(journal_of(path), of_journal))
    spool = spool_of(path)
    if not spool.is_dir():
        return
    names_subject = partial(row_names_subject, subject=request.subject)
    with locked_file(spool / LOCK_NAME) if (spool / LOCK_NAME).exists() else nullcontext(0) as lock:
        of_spool = spool_to_traces(spool, traces, names_subject, before_ns=request.before_ns)
        if lock is None:
            _note_segments_left(erasure, count_in_segments(spool, of_spool))
        else:
            erasure.segments |= _name_paths(change(spool, of_spool))
        _note_segments_left(erasure, count_mentions(spool, replace(of_spool, subject=request.subject)))


def _note_segments_left(erasure: Erasure, counts: Mapping[Path, int]) -> None:
    for segment, count in counts.items():
        erasure.segments_left[str(segment)] = erasure.segments_left.get(str(segment), 0) + count


def _clean_files(
    folder: RunFolder | None, store: TraceStore, request: EraseRequest, traces: Sequence[str], erasure: Erasure
) -> None:
    search = TextSearch(erased_texts(store, traces))
    if folder is not None:
        episode_ids = frozenset(episode_id for (episode_id,) in store.sql("SELECT episode_id FROM episodes"))
        erased = ErasedTraces(frozenset(traces), request.subject, search, stored_ids=episode_ids)
        erasure.files = clean_run_files(folder, erased, dry_run=erasure.dry_run)
        erasure.clusters_left = clusters_of(folder) if traces else []

    @cache
    def is_said_elsewhere(run: str) -> bool:
        return has_text_elsewhere(store, run, traces)

    cleaned = erasure.files if erasure.dry_run else ()
    erasure.files_left = files_with_texts(folder, search, is_said_elsewhere, cleaned=cleaned)


def _name_paths(counts: Mapping[Path, int]) -> dict[str, int]:
    return {str(path): count for path, count in counts.items()}


def _erasure_to_json(erasure: Erasure) -> dict[str, Any]:
    values = asdict(erasure)
    values["adapters"] = [asdict(adapter) for adapter in erasure.adapters]
    return values


def _erasure_to_lines(erasure: Erasure) -> list[str]:
    verb = "would erase" if erasure.dry_run else "erased"
    rows = ", ".join(f"{count} {table}" for table, count in erasure.rows.items()) or "nothing"
    lines = [f"{verb} {len(erasure.traces)} traces ({len(erasure.replays)} of them replays): {rows}"]
    if erasure.bytes_before is not None and erasure.bytes_after is not None:
        lines.append(f"store rewritten: {erasure.bytes_before} -> {erasure.bytes_after} bytes")
    for folder, files in erasure.exports.items():
        lines.append(f"{verb} {sum(files.values())} rows in {len(files)} files of {folder}")
    lines += [f"{verb} {count} records in {segment}" for segment, count in erasure.segments.items()]
    lines += [f"{verb} {count} parts of {file}" for file, count in erasure.files.items()]
    for folder, files in erasure.exports_left.items():
        rest = f"{sum(files.values())} such rows; erase them with --exports {shlex.quote(folder)}"
        lines.append(f"left: export {folder} has {rest}")
        lines += [f"  {file}: {count} rows" for file, count in files.items()]
    lines += [f"left: export {target} cannot be looked into; see to it yourself" for target in erasure.exports_unread]
    for store, episodes in erasure.distilled_left.items():
        if episodes is None:
            lines.append(f"left: {store}, distilled from this, cannot be looked into; see to it yourself")
        else:
            lines.append(
                f"left: {store} has {episodes} episodes distilled from it; erase there too, with --store "
                f"{shlex.quote(store)}"
            )
    for segment, count in erasure.segments_left.items():
        if Path(segment).suffix == FOREIGN_SUFFIX:
            reason = "which this version cannot take in; look at the file, and delete it"
        elif Path(segment).parent.suffix == SPOOL_SUFFIX:
            reason = "where a receiver holds them; end `marft-bridge ingest --listen`, and erase again"
        else:
            reason = "written meanwhile; erase again when the run has ended"
        lines.append(f"left: {count} records in {segment}, {reason}")
    lines += [f"left: {file} holds a text of it; {remedy}" for file, remedy in erasure.files_left.items()]
    for address in erasure.clusters_left:
        lines.append(
            f"left: machines of the Ray cluster at {address} may hold it, in what it logged and spilled there; when it "
            "has ended, delete ray/session_* and marft-worker-* among their temporary files"
        )
    for database, pid in erasure.readers_left.items():
        lines.append(f"left: {database} may hold it until process {pid} looks at the store again, or ends")
    for adapter in erasure.adapters:
        location = adapter.path or "not published"
        lines.append(f"left: adapter {adapter.node}@{adapter.version} learned from it ({adapter.basis}): {location}")
    return lines
