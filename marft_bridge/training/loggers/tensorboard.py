"""The figures of a step -> TensorBoard scalars, with their nested names as tags: `agents/reasoner/approx_kl`.

The package `tensorboard` (extra of that name) writes the files: it owns the format, and needs neither TensorFlow nor
torch. Invariant: a step that is written again, after a resume, replaces its points and those of all later steps.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping
from pathlib import Path

from marft_bridge.config.loggers import TensorboardOptions
from marft_bridge.training.loggers.interface import LoggedRun, Logger
from trace_store.files import create_file, make_folder


class _TensorboardLogger:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        write_scalars(self._folder, figures, step)

    def close(self) -> None:
        """Nothing: every step is a file of its own."""


def open_tensorboard(options: TensorboardOptions, run: LoggedRun) -> Logger:  # noqa: ARG001 - it has no options
    """Adds to the run's files."""
    return _TensorboardLogger(run.folder)


def write_scalars(folder: Path, figures: Mapping[str, float], step: int) -> None:
    """Adds the figures of one step to a folder that `tensorboard --logdir` shows, in a file of their own (0600).

    The file begins with a session start at `step`, at which readers drop the points of earlier files from that step
    on; its name holds the time, since readers go by the order of names.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    wall_time = time.time()
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
    content = io.BytesIO()
    records = RecordWriter(content)
    for event in (
        Event(wall_time=wall_time, step=step, file_version="brain.Event:2"),
        Event(wall_time=wall_time, step=step, session_log=SessionLog(status=SessionLog.START)),
        Event(wall_time=wall_time, step=step, summary=Summary(value=values)),
    ):
        records.write(event.SerializeToString())
    make_folder(folder)
    path = folder / f"events.out.tfevents.{time.time_ns():020d}"
    with os.fdopen(create_file(path), "wb") as file:
        file.write(content.getvalue())
