"""`marft-bridge ingest`: command-line flags -> one call, of `ingest_files` or of `listen`, on the chosen store.

Invariant: flags that contradict each other are refused before anything is read or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.record import RecordOptions
from marft_bridge.ingest.from_files import ingest_files
from marft_bridge.ingest.listen import listen as listen_until_stopped
from marft_bridge.ingest.report import IngestReport
from marft_bridge.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from marft_bridge.config.bridge import BridgeConfig

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


def ingest(
    files: Sequence[Path],
    config: BridgeConfig | None,
    store: Path | None,
    receiver: ReceiverOptions | None,
    reporter: Reporter,
) -> IngestReport:
    """Takes in `files`, or what `receiver` receives, into `store` or else the store of the configured run folder.

    Spans are redacted as `[record]` of the configuration says, or by its defaults where there is none.

    Raises:
        ConfigError: there is nothing to take in, or both files and a receiver.
        IngestError, StoreError: see the functions that it calls.
    """
    if bool(files) == (receiver is not None):
        raise ConfigError("ingest: name OTLP files, or --listen to receive; one of the two")
    if store is None:
        assert config is not None  # read whenever no store is named
        folder = RunFolder(config.run_folder)
        folder.create()
        store = folder.store
    options = config.record if config is not None else RecordOptions()
    if receiver is None:
        return ingest_files(files, store, options, reporter=reporter)
    return listen_until_stopped(
        store, receiver.port, receiver.token_env, quiet_s=receiver.quiet_s, options=options, reporter=reporter
    )
