"""`traces erase` and `traces vacuum`: a subject or an age -> a store without it, and a report on what else there is.

Order, which is the safety of it: everything is found before anything goes; exports are rewritten before the rows that
say which traces to look for are deleted; the store's file is rewritten last, and always, so that an erasure that was
killed is finished by running it again. Invariant: what could not be erased is in the report, by path.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from marft_bridge.errors import ConfigError
from marft_bridge.traces.exports import WAIT_S, existing_store, known_exports
from marft_bridge.traces.plain import print_line, text_to_line, value_to_json
from marft_bridge.traces.trained_on import TrainedAdapter, episodes_to_adapters
from trace_store.compaction import vacuum
from trace_store.erasure import (
    Chosen,
    age_to_traces,
    delete_traces,
    erase_from_export,
    export_to_rows,
    rows_of,
    segments_to_records,
    subject_to_traces,
)
from trace_store.errors import StoreError
from trace_store.manifest import leftovers
from trace_store.readers import CATALOG_SUFFIX, folder_to_reader
from trace_store.store import TraceStore

_AGE = re.compile(r"(?P<number>\d+)(?P<unit>[hdw])")
_HOURS = {"h": 1, "d": 24, "w": 7 * 24}


@dataclass(frozen=True, slots=True)
class Wish:
    """Whom or what to erase: a subject, or what ended before a Unix time; and exports to erase it from as well."""

    subject: str | None
    before_ns: int | None
    exports: tuple[Path, ...] = ()


@dataclass(slots=True)
class Erasure:
    """What was erased, or with `dry_run` would be; and what is left for the user to decide."""

    dry_run: bool
    traces: list[str] = field(default_factory=list)
    replays: list[str] = field(default_factory=list)  # those of them that only go on with a trace of the subject
    rows: dict[str, int] = field(default_factory=dict)
    bytes_before: int | None = None
    bytes_after: int | None = None
    exports: dict[str, dict[str, int]] = field(default_factory=dict)  # folder -> file -> rows
    exports_left: dict[str, dict[str, int]] = field(default_factory=dict)  # not named by --exports: as they are
    exports_unread: list[str] = field(default_factory=list)  # gone, damaged, unfinished, or a DuckLake catalog
    segments_left: dict[str, int] = field(default_factory=dict)  # journal segment of a live writer -> records
    adapters: list[TrainedAdapter] = field(default_factory=list)


def flags_to_wish(subject: str | None, older_than: str | None, exports: Sequence[Path], now_ns: int) -> Wish:
    """One of the two. Raises ConfigError for none, both, or an age that is none."""
    if (subject is None) == (older_than is None):
        raise ConfigError("traces erase: say what, with --subject ID or with --older-than 90d; one of the two")
    if subject == "":
        raise ConfigError("traces erase: the subject is empty; give the id that was recorded")
    if older_than is None:
        return Wish(subject, None, tuple(exports))
    age = _AGE.fullmatch(older_than)
    if age is None:
        raise ConfigError(f"traces erase: {older_than!r} is no age; give a number and h, d or w, such as 90d")
    return Wish(None, now_ns - int(age["number"]) * _HOURS[age["unit"]] * 3600 * 10**9, tuple(exports))


def erase(path: Path, wish: Wish, dry_run: bool, as_json: bool, console: Console) -> Erasure:
    """Erases, or says what would be, and prints a report.

    Raises StoreError when the store or an export cannot be read or written; running it again finishes the work.
    """
    with existing_store(path, console) as store:
        store.take_in()
        chosen = _choose_everywhere(store, wish)
        done = Erasure(dry_run, list(chosen.trace_ids), list(chosen.replays))
        done.adapters = episodes_to_adapters(store, chosen.trace_ids)
        _note_what_is_left(path, wish, chosen.trace_ids, done)
        for folder in wish.exports:
            change = export_to_rows if dry_run else erase_from_export
            done.exports[str(folder)] = change(folder, chosen.trace_ids)
        done.rows = rows_of(store, chosen.trace_ids) if dry_run else delete_traces(store, chosen.trace_ids)
    if not dry_run:
        rewritten = vacuum(path, wait_s=WAIT_S)
        done.bytes_before, done.bytes_after = rewritten.before, rewritten.after
    if as_json:
        print_line(console, value_to_json(_erasure_to_json(done)))
    else:
        for line in _erasure_to_lines(done):
            print_line(console, text_to_line(line))
    return done


def _choose_everywhere(store: TraceStore, wish: Wish) -> Chosen:
    """In the store and the named exports: each may know of traces that the other has no longer."""
    found = [_choose_in_export(folder, wish) for folder in wish.exports]
    own = {trace for chosen in found for trace in chosen.trace_ids if trace not in chosen.replays}
    found.append(_choose(store, wish, sorted(own)))
    own |= set(found[-1].trace_ids) - set(found[-1].replays)
    every = {trace for chosen in found for trace in chosen.trace_ids}
    replays = () if wish.subject is None else tuple(sorted(every - own))
    return Chosen(tuple(sorted(every)), replays)


def _choose(store: TraceStore, wish: Wish, also: Sequence[str] = ()) -> Chosen:
    if wish.subject is not None:
        return subject_to_traces(store, wish.subject, also)
    assert wish.before_ns is not None  # one of the two is given
    return age_to_traces(store, wish.before_ns)


def _choose_in_export(folder: Path, wish: Wish) -> Chosen:
    with folder_to_reader(folder) as reader:
        return _choose(reader, wish)


def _note_what_is_left(path: Path, wish: Wish, traces: Sequence[str], done: Erasure) -> None:
    named = {folder.resolve() for folder in wish.exports}
    for known in known_exports(path):
        if known in named:
            continue
        if known.suffix == CATALOG_SUFFIX:
            done.exports_unread.append(str(known))
            continue
        try:
            # A subject may be in an archive of what the store no longer has; what is old is in there on purpose.
            also = _choose_in_export(known, wish).trace_ids if wish.subject is not None else ()
            rows = export_to_rows(known, sorted({*traces, *also}))
            unfinished = leftovers(known)
        except StoreError:  # gone, moved or damaged: not a reason to leave the store as it is
            done.exports_unread.append(str(known))
            continue
        if rows:
            done.exports_left[str(known)] = rows
        done.exports_unread += map(str, unfinished)
    for folder in (path.with_name(path.name + ".journal"), path.with_name(path.name + ".spool")):
        found = segments_to_records(folder, set(traces), wish.subject)
        done.segments_left |= {str(segment): count for segment, count in found.items()}


def _erasure_to_json(done: Erasure) -> dict[str, Any]:
    values = asdict(done)
    values["adapters"] = [asdict(adapter) for adapter in done.adapters]
    return values


def _erasure_to_lines(done: Erasure) -> list[str]:
    verb = "would erase" if done.dry_run else "erased"
    rows = ", ".join(f"{count} {table}" for table, count in done.rows.items()) or "nothing"
    lines = [f"{verb} {len(done.traces)} traces ({len(done.replays)} of them replays): {rows}"]
    if done.bytes_before is not None and done.bytes_after is not None:
        lines.append(f"store rewritten: {done.bytes_before} -> {done.bytes_after} bytes")
    for folder, files in done.exports.items():
        lines.append(f"{verb} {sum(files.values())} rows in {len(files)} files of {folder}")
    for folder, files in done.exports_left.items():
        lines.append(f"left: export {folder} has {sum(files.values())} such rows; erase them with --exports {folder}")
        lines += [f"  {file}: {count} rows" for file, count in files.items()]
    lines += [f"left: export {target} cannot be looked into; see to it yourself" for target in done.exports_unread]
    for segment, count in done.segments_left.items():
        if Path(segment).parent.suffix == ".spool":
            why = (
                "which wait for the rest of their trace; let `marft-bridge ingest --listen` finish, or delete the file"
            )
        else:
            why = "which is still being written; erase again when its writer has ended"
        lines.append(f"left: {count} records in {segment}, {why}")
    for adapter in done.adapters:
        where = adapter.path or "not published"
        lines.append(f"left: adapter {adapter.node}@{adapter.version} learned from it ({adapter.basis}): {where}")
    return lines


def vacuum_store(path: Path, as_json: bool, console: Console) -> None:
    """Rewrites the store's file and prints its size before and after."""
    began = time.monotonic()
    done = vacuum(path, wait_s=WAIT_S, say=lambda line: console.print(line, markup=False, soft_wrap=True))
    seconds = time.monotonic() - began
    if as_json:
        print_line(console, value_to_json({**asdict(done), "seconds": seconds}))
    else:
        print_line(console, f"store {path}: {done.before} -> {done.after} bytes [{seconds:.1f} s]")
