"""One line of `metrics.jsonl` -> TensorBoard scalars, with its nested names as tags: `agents/reasoner/approx_kl`.

The package `tensorboard` (extra of that name) writes the files: it owns the format, and needs neither TensorFlow nor
torch. Invariants: a value that was not measured (None) has no point, rather than one at 0; a step that is written
again, after a resume, replaces its points and those of all later steps. `metrics.jsonl` stays the record, and
docs/metrics.md explains the figures.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import ConfigError
from trace_store.files import create_file, make_folder


def require_tensorboard() -> None:
    """Raises ConfigError when the package is not installed. Cheap: imports nothing."""
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "train.tensorboard needs a package: pip install 'marft-bridge[tensorboard]', or set it to false"
        )


def write_scalars(folder: Path, line: Mapping[str, Any], step: int) -> None:
    """Adds the figures of one step to a folder that `tensorboard --logdir` shows, in a file of their own (0600).

    The file begins with a session start at `step`, at which readers drop the points of earlier files from that step
    on; its name holds the time, since readers go by the order of names.

    Raises:
        ConfigError: the package is not installed.
    """
    require_tensorboard()
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    wall_time = time.time()
    figures = [Summary.Value(tag=tag, simple_value=value) for tag, value in line_to_scalars(line).items()]
    content = io.BytesIO()
    records = RecordWriter(content)
    for event in (
        Event(wall_time=wall_time, step=step, file_version="brain.Event:2"),
        Event(wall_time=wall_time, step=step, session_log=SessionLog(status=SessionLog.START)),
        Event(wall_time=wall_time, step=step, summary=Summary(value=figures)),
    ):
        records.write(event.SerializeToString())
    make_folder(folder)
    path = folder / f"events.out.tfevents.{time.time_ns():020d}"
    with os.fdopen(create_file(path), "wb") as file:
        file.write(content.getvalue())


def line_to_scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Nested figures -> tag -> number. None, texts and lists are left out; True and False are 1 and 0."""
    return dict(_scalars(line, ""))


def _scalars(line: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{name}", float(value)
