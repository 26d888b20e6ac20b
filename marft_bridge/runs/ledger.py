"""The runs of a folder's store: begins a run, names it, and refuses a second one without --resume.

Invariant: a folder that holds a run of a command is not written into again unless the user says --resume.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from marft_bridge.common.errors import ConfigError
from marft_bridge.runs.run_folder import RunFolder, bridge_version
from trace_store.records import RunRow
from trace_store.store import TraceStore

if TYPE_CHECKING:
    from marft_bridge.config.bridge import BridgeConfig


def begin_run(
    store: TraceStore,
    run_id: str,
    command: str,
    config: BridgeConfig,
    folder: RunFolder,
    plan: Mapping[str, Any] | None = None,
) -> None:
    """Records in the folder and its store that a command begins, with its configuration.

    Args:
        plan: what a resumed command has to find unchanged, stored beside the configuration.
    """
    folder.record_config(command, config)
    content: dict[str, Any] = config.recorded() | ({"plan": dict(plan)} if plan is not None else {})
    store.put_run(RunRow(run_id, command, time.time_ns(), config=content, version=bridge_version()))


def numbered_run_id(store: TraceStore, command: str, resume: bool) -> str:
    """The id of a command's next run, as `compare-2`, in a folder that may hold many; with `resume`, of the latest.

    Raises:
        ConfigError: there is no run to resume.
    """
    earlier = sum(1 for run in store.runs() if run.command == command)
    if resume and not earlier:
        raise ConfigError(f"{command}: nothing to resume in {store.path.parent}; leave out --resume")
    return f"{command}-{earlier if resume else earlier + 1}"


def refuse_second_run(store: TraceStore, run_id: str, command: str, folder: RunFolder, resume: bool) -> None:
    """Refuses a second run of `command` in a folder without `resume`, and `resume` where there is no run.

    Raises:
        ConfigError: either is the case.
    """
    used = any(run.run_id == run_id for run in store.runs())
    if used and not resume:
        raise ConfigError(
            f"{command}: {folder.path} already holds a run of it; go on with --resume, or choose another --run folder"
        )
    if resume and not used:
        raise ConfigError(f"{command}: nothing to resume in {folder.path}; leave out --resume")
