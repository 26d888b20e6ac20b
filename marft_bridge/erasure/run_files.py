"""A run folder -> the same folder in which no report, judge's record or advantage tells of the erased traces.

Reports are made again, in all their forms, from the parts that are of other traces; records of the judge and rows of
advantages are removed. Invariants: killed at any moment, doing it again finishes it; a file that nobody can clean (a
log, a signed manifest) is named with what makes it again.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

from pydantic import ValidationError

from marft_bridge.common.errors import ConfigError
from marft_bridge.comparison.page import write_report
from marft_bridge.comparison.records import Report, TaskChange
from marft_bridge.erasure.text_search import TextSearch
from marft_bridge.rewards.judge import EPISODE_KEY, JUDGE_FOLDER
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.training.advantage_log import count_episodes, remove_episodes
from trace_store.compaction import COPY_SUFFIX
from trace_store.errors import StoreError
from trace_store.files import open_to_read

_TEMPORARY = re.compile(r"\.(report\.(json|html|md)|[0-9a-f]{64}\.json)\.[a-z0-9_]{8}")  # of `write_atomically`
_ERASED = "[erased]"
_REMEDIES = (
    ("report.*", "delete it, and make it again with `marft-bridge compare`"),
    ("*.log", "delete it when no server runs; the next one begins it anew"),
    ("promoted/*", "a signed chain: delete the folder, and sign off again with `marft-bridge promote`"),
    ("checkpoint/*", "delete the folder, and make it again with `marft-bridge train`"),
    ("adapters/*", "delete that version, and train it again"),
    ("models/*", "delete the folder; the next `marft-bridge compare` writes it anew"),
    ("advantages/*", "delete it; training that round again writes it anew"),
    ("trees/*", "delete it; training that round again writes it anew"),
    ("tensorboard/*", "delete the folder; training again writes it anew"),
    ("loggers/*", "delete the folder; training again writes it anew"),
    ("metrics.jsonl", "delete it; training again writes it anew"),
    ("best.json", "delete it; the end of the next training writes it anew"),
    ("bridge.json", "delete it; every command writes what it was told"),
)
_OTHERS_REMEDY = "it is not a file of a run; delete it, or take the text out of it"
_STORE_SUFFIXES = ("", ".wal", ".tmp", ".journal", ".spool", ".exports")
_RAY_FOLDERS = ("ray/session_*/ray_spilled_objects*", "ray/session_*/logs")
_TEMPORARY_FOLDERS = ("marft-worker-*", "marft-probe-*", "marft-replay-*", "marft-box-*", *_RAY_FOLDERS)


@dataclass(frozen=True, slots=True)
class ErasedTraces:
    """What goes: the traces, a search for what was said in them, and which episodes the store still has."""

    trace_ids: frozenset[str]
    subject: str | None
    search: TextSearch
    stored_ids: frozenset[str]  # of all episodes, those that go included


def clean_run_files(folder: RunFolder, erased: ErasedTraces, *, dry_run: bool) -> dict[str, int]:
    """Cleans reports, records of the judge and advantages; with `dry_run` only counts.

    The caller holds the folder's lock, unless it is a dry run: else a temporary file that goes may be another
    command's, which is about to give it its name. Returns, by the path of each file that was written anew or removed,
    how many parts, records or episodes went.
    """
    counts: dict[str, int] = {}
    for clean in (_clean_report, _clean_judge, _clean_advantages):
        counts |= clean(folder, erased, dry_run=dry_run)
    if not dry_run:
        for path in (*folder.path.glob(".report.*"), *(folder.path / JUDGE_FOLDER).glob(".*")):
            if _TEMPORARY.fullmatch(path.name):
                path.unlink(missing_ok=True)
    return counts


# -- reports --------------------------------------------------------------------------------------------------


def _clean_report(folder: RunFolder, erased: ErasedTraces, *, dry_run: bool) -> dict[str, int]:
    path = folder.path / "report.json"
    if not path.exists():
        return {}
    try:
        with open_to_read(path) as file:
            report = Report.model_validate_json(file.read())
    except ValidationError:
        return {}  # of another version: the search names it where it holds a text
    cleaned, count = report_without(report, erased)
    if count and not dry_run:
        write_report(cleaned, folder.path)
    paths = (path.with_suffix(suffix) for suffix in (".json", ".html", ".md"))
    return dict.fromkeys(map(str, paths), count) if count else {}


def report_without(report: Report, erased: ErasedTraces) -> tuple[Report, int]:
    """The report without what tells of the erased traces, and how many parts of it went.

    An example goes where one of its episodes is erased or no longer stored; a cohort of the subject itself, too.
    Figures over all episodes stay: they are of nobody.
    """
    count = 0
    kept_ids = erased.stored_ids - erased.trace_ids

    def is_kept(change: TaskChange) -> bool:
        nonlocal count
        is_told = {change.a.episode_id, change.b.episode_id} <= kept_ids
        count += not is_told
        return is_told

    def without_texts(text: str) -> str:
        nonlocal count
        if next(erased.search.runs_in_text(text), None) is None:
            return text
        count += 1
        return _ERASED

    def reasons_of(reasons: dict[str, int]) -> dict[str, int]:
        totals: dict[str, int] = {}
        for reason, number in reasons.items():
            text = without_texts(reason)
            totals[text] = totals.get(text, 0) + number
        return totals

    tasks = tuple(
        changed.model_copy(
            update={
                "improved": tuple(filter(is_kept, changed.improved)),
                "regressed": tuple(filter(is_kept, changed.regressed)),
            }
        )
        for changed in report.tasks
    )
    variants = tuple(variant.model_copy(update={"reasons": reasons_of(variant.reasons)}) for variant in report.variants)
    cohorts = tuple(
        cohort.model_copy(
            update={
                "value": without_texts(cohort.value),
                "regressed": {
                    name: kept
                    for name, changes in cohort.regressed.items()
                    if (kept := tuple(filter(is_kept, changes)))
                },
            }
        )
        for cohort in report.cohorts
        if cohort.value != erased.subject
    )
    count += len(report.cohorts) - len(cohorts)
    shown_tasks = tuple(changed for changed in tasks if changed.improved or changed.regressed)
    return report.model_copy(update={"tasks": shown_tasks, "variants": variants, "cohorts": cohorts}), count


# -- records of the judge, and advantages ---------------------------------------------------------------------


def _clean_judge(folder: RunFolder, erased: ErasedTraces, *, dry_run: bool) -> dict[str, int]:
    """Removes the records that are not about an episode that stays, as far as they say; the judge is asked again."""
    counts = {}
    kept_ids = erased.stored_ids - erased.trace_ids
    for path in sorted((folder.path / JUDGE_FOLDER).glob("*.json")):
        episode_id = None
        with suppress(FileNotFoundError, ValueError, AttributeError), open_to_read(path) as file:
            episode_id = json.loads(file.read()).get(EPISODE_KEY)
        if episode_id not in kept_ids:
            counts[str(path)] = 1
            if not dry_run:
                path.unlink(missing_ok=True)
    return counts


def _clean_advantages(folder: RunFolder, erased: ErasedTraces, *, dry_run: bool) -> dict[str, int]:
    change = count_episodes if dry_run else remove_episodes
    counts = {}
    for path in sorted(folder.advantages.glob("round-*.parquet")) if erased.trace_ids else ():
        try:
            count = change(path, sorted(erased.trace_ids))
        except ValueError as error:
            raise ConfigError(f"traces erase: {path} cannot be read ({error}); delete it, and erase again") from None
        if count:
            counts[str(path)] = count
    return counts


# -- what is left ---------------------------------------------------------------------------------------------


def files_with_texts(
    folder: RunFolder | None, search: TextSearch, is_said_elsewhere: Callable[[str], bool], cleaned: Iterable[str]
) -> dict[str, str]:
    """Path of each file that holds an erased text, or that cannot be looked into -> how to make it again without.

    Looked into are the run folder and the temporary files of this user's commands, here and of a Ray that runs here.

    Args:
        is_said_elsewhere: whether a trace that stays says this run of a text as well.
        cleaned: paths that need not be looked into: a dry run would clean them.
    """
    remedies: dict[str, str] = {}
    skipped = set(cleaned)
    roots = [folder.path] if folder is not None else []
    for root in (*roots, *_temporary_folders()):
        for path in _files_under(root):
            if str(path) in skipped or (folder is not None and _is_of_store(path, folder)):
                continue
            remedy = _remedy(path.relative_to(root).as_posix()) if root in roots else "a temporary file; delete it"
            if ".duckdb" in path.suffixes:
                remedies[str(path)] = f"it cannot be looked into; {remedy}"
                continue
            try:
                if any(not is_said_elsewhere(run) for run in set(search.runs_in(path))):
                    remedies[str(path)] = remedy
            except StoreError:
                remedies[str(path)] = f"it cannot be looked into; {remedy}"
    return remedies


def clusters_of(folder: RunFolder) -> list[str]:
    """The addresses of Ray clusters of others on which commands of the run, each the last time, worked."""
    try:
        commands = json.loads((folder.path / "bridge.json").read_bytes())
        configs = [command["config"] for command in commands.values()]
        tables = ("collect", "train")
        ray_configs = [
            config["ray"] for config in configs if any(config.get(name, {}).get("engine") == "ray" for name in tables)
        ]
        return sorted({str(config["address"]) for config in ray_configs if config["address"] is not None})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []  # of a run that wrote none, or of another version


def _remedy(name: str) -> str:
    return next((text for pattern, text in _REMEDIES if fnmatchcase(name, pattern)), _OTHERS_REMEDY)


def _is_of_store(path: Path, folder: RunFolder) -> bool:
    """Whether the erasure of the store itself deals with a path: the store, its log, its journal and its spool."""
    first = path.relative_to(folder.path).parts[0] if path.is_relative_to(folder.path) else ""
    name, is_store_name = folder.store.name, first.startswith(folder.store.name)
    return is_store_name and (first.removeprefix(name) in _STORE_SUFFIXES or first.endswith(COPY_SUFFIX))


def _temporary_folders() -> Iterator[Path]:
    parents = {Path(tempfile.gettempdir()), Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())}
    for parent, pattern in product(sorted(parents), _TEMPORARY_FOLDERS):
        for path in sorted(parent.glob(pattern)):
            with suppress(OSError):
                status = path.lstat()
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                    yield path


def _files_under(folder: Path) -> Iterator[Path]:
    """The plain files under a folder, hidden ones as well; no link is followed."""
    for root, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(root) / name
            with suppress(OSError):
                if stat.S_ISREG(path.lstat().st_mode):
                    yield path
