"""`marft-bridge ingest`: command-line flags -> one call, of `ingest_files` or of `listen`, on the chosen store.

Invariant: flags that contradict each other are refused before anything is read or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.record import RecordOptions
from marft_bridge.ingest.from_files import ingest_files
from marft_bridge.ingest.listen import listen as listen_until_stopped
from marft_bridge.ingest.report import IngestReport
from marft_bridge.runs.run_choice import STORE_SUFFIX, RunChoice
from marft_bridge.runs.run_folder import RunFolder

DEFAULT_PORT = 4318  # where OTLP exporters look for a receiver
DEFAULT_QUIET_S = 10.0  # twice the time for which the SDK's batch processor holds spans back


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """Options of the receiver; see `listen.listen`."""

    port: int
    token_env: str | None
    quiet_s: float


def flags_to_receiver(
    listen: bool, port: int | None, token_env: str | None, quiet_s: float | None
) -> ReceiverOptions | None:
    """The receiver's options, None without --listen. Raises ConfigError for a receiver's flag without it."""
    if listen:
        return ReceiverOptions(
            DEFAULT_PORT if port is None else port, token_env, DEFAULT_QUIET_S if quiet_s is None else quiet_s
        )
    receiver_flags = {"--port": port, "--token-env": token_env, "--quiet-seconds": quiet_s}
    stray_flags = [name for name, value in receiver_flags.items() if value is not None]
    if stray_flags:
        raise ConfigError(f"ingest: {', '.join(stray_flags)} without --listen; leave it out, or receive")
    return None


@dataclass(frozen=True, slots=True)
class IngestTarget:
    """Where spans go: a run folder, or a store on its own; and how they are redacted on the way."""

    store: Path
    run_folder: RunFolder | None
    options: RecordOptions


def split_run(words: Sequence[Path]) -> tuple[list[Path], Path | None]:
    """The words behind the command -> files, and RUN where the last one is a folder or a store."""
    if words and (words[-1].is_dir() or words[-1].suffix == STORE_SUFFIX):
        return [*words[:-1]], words[-1]
    return [*words], None


def choice_to_target(choice: RunChoice) -> IngestTarget:
    """Where the named run keeps its spans. RUN alone may be a folder that no command has worked in.

    Spans are redacted as `[record]` of the configuration says, or by its defaults where there is none.

    Raises:
        ConfigError: two places are named, or none; or the configuration is not valid.
    """
    if choice.store is None and choice.argument is not None and choice.argument.suffix == STORE_SUFFIX:
        choice = replace(choice, argument=None, store=choice.argument)
    if choice.store is not None:
        replace(choice, config=None).to_store()  # a configuration beside it only says how to redact
        config = None if choice.config is None else replace(choice, store=None).to_config()
        return IngestTarget(choice.store, None, RecordOptions() if config is None else config.record)
    config = choice.to_config() if choice.has_options() else None
    folder = RunFolder(choice.to_folder() if config is None else config.run_folder)
    return IngestTarget(folder.store, folder, RecordOptions() if config is None else config.record)


def ingest(
    files: Sequence[Path], target: IngestTarget, receiver: ReceiverOptions | None, reporter: Reporter
) -> IngestReport:
    """Takes in `files`, or what `receiver` receives, and prints a report.

    Raises:
        ConfigError: there is nothing to take in, or both files and a receiver.
        IngestError, StoreError: see the functions that it calls.
    """
    if bool(files) == (receiver is not None):
        raise ConfigError("ingest: name OTLP files, or --listen to receive; one of the two")
    if target.run_folder is not None:
        target.run_folder.create()
    if receiver is None:
        report = ingest_files(files, target.store, target.options, reporter=reporter)
    else:
        report = listen_until_stopped(
            target.store,
            receiver.port,
            receiver.token_env,
            quiet_s=receiver.quiet_s,
            options=target.options,
            reporter=reporter,
        )
    reporter.give(report.to_json())
    return report
