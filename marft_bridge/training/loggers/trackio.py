"""A run of trackio: a SQLite file of its own, or a Space of the Hugging Face Hub that the configuration names.

trackio keeps its files where TRACKIO_DIR says when it is first imported, so a process has one folder for them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import ConfigError
from marft_bridge.config.loggers import TrackioOptions
from marft_bridge.training.loggers.interface import LoggedRun, Logger, environment

# A user's variables that send what is logged somewhere, or name where; only the configuration does that here.
_SENDING = ("SPACE_ID", "SERVER_URL", "WRITE_TOKEN", "DATASET_ID", "BUCKET_ID", "WEBHOOK_URL")


class _TrackioLogger:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        from trackio import context_vars

        with redirect_stdout(io.StringIO()):
            self._run.finish()
        if context_vars.current_run.get() is self._run:  # else it is finished again, aloud, when the process ends
            context_vars.current_run.set(None)


def open_trackio(options: TrackioOptions, run: LoggedRun) -> Logger:
    """Begins the run, or goes on in it: it is found by its name.

    Raises:
        ConfigError: the process has imported trackio before, with another folder.
    """
    folder = str(run.folder.resolve())
    unset: dict[str, str | None] = {f"TRACKIO_{name}": None for name in _SENDING}
    with environment(TRACKIO_DIR=folder, GRADIO_ANALYTICS_ENABLED="False", **unset), redirect_stdout(io.StringIO()):
        import trackio

        if Path(trackio.utils.TRACKIO_DIR).resolve() != Path(folder):
            raise ConfigError(
                f"this process has trackio's files in {trackio.utils.TRACKIO_DIR}: set TRACKIO_DIR={folder}, or do not "
                "import trackio in the app"
            )
        return _TrackioLogger(
            trackio.init(
                project=options.project or run.name,
                name=run.title,
                space_id=options.space,
                config=dict(run.options),
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        )
