"""`marft-bridge ingest`: files or a receiver, a run folder's store or any other -> the one function that does it.

Invariant: flags that contradict each other are refused before anything is read or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marft_bridge.config import BridgeConfig
from marft_bridge.errors import ConfigError
from marft_bridge.ingest.from_files import ingest_files
from marft_bridge.ingest.listen import listen as listen_until_stopped
from marft_bridge.ingest.report import IngestReport
from marft_bridge.progress import Reporter
from marft_bridge.record_options import RecordOptions
from marft_bridge.run_folder import RunFolder

DEFAULT_PORT = 4318  # where OTLP exporters look for a receiver
DEFAULT_QUIET_S = 10.0  # twice the time for which the SDK's batch processor holds spans back


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """How to listen: see `listen.listen`."""

    port: int
    token_env: str | None
    quiet_s: float


def flags_to_receiver(
    listen: bool, port: int | None, token_env: str | None, quiet_s: float | None
) -> ReceiverOptions | None:
    """The receiver that was asked for; None for none. Raises ConfigError for flags that only a receiver has."""
    if listen:
        return ReceiverOptions(
            DEFAULT_PORT if port is None else port, token_env, DEFAULT_QUIET_S if quiet_s is None else quiet_s
        )
    given = {"--port": port, "--token-env": token_env, "--quiet-seconds": quiet_s}
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise ConfigError(f"ingest: {', '.join(wrong)} without --listen; leave it out, or receive")
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
        store = RunFolder(config.run_folder).store
    options = config.record if config is not None else RecordOptions()
    if receiver is None:
        return ingest_files(files, store, options, reporter)
    return listen_until_stopped(store, receiver.port, receiver.token_env, receiver.quiet_s, options, reporter)
