"""A run for Weights & Biases: a folder that `wandb sync` sends, or, where the configuration says `online`, its server.

Of the run it takes the figures and the options of training: no code, no console, no git, no host, no system figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marft_bridge.config.loggers import WandbOptions
from marft_bridge.training.loggers.interface import LoggedRun, Logger, environment


class _WandbLogger:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def open_wandb(options: WandbOptions, run: LoggedRun) -> Logger:
    """Begins the run, or goes on in it."""
    cache = str(run.folder / "cache")
    # its helper process, which starts here, keeps its logs in the cache and reports crashes unless told not to
    with environment(WANDB_CACHE_DIR=cache, WANDB_DATA_DIR=cache, WANDB_ERROR_REPORTING="false"):
        import wandb

        settings = wandb.Settings(
            mode=options.mode,
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            save_code=False,
            silent=True,
            symlink=False,  # the run's folder has no links
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        return _WandbLogger(
            wandb.init(
                project=options.project or run.name,
                entity=options.entity,
                id=run.run_id,
                name=run.title,
                resume="allow",
                reinit="create_new",  # the app's own run, if it has one, goes on
                dir=run.folder,
                config=dict(run.options),
                settings=settings,
            )
        )
