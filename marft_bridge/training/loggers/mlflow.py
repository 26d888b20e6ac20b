"""A run in an MLflow store: a SQLite file of its own, or a tracking server that the configuration names.

It goes through MLflow's client, which has no run of the process: what the app itself logs with MLflow stays apart.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from marft_bridge.config.loggers import MlflowOptions
from marft_bridge.training.loggers.interface import LoggedRun, Logger, environment, flatten

_ID_TAG = "marft_bridge.run"
_MAX_METRICS = 1_000  # of one request, and parameters:
_MAX_PARAMETERS = 100
_MAX_LENGTH = 500  # characters of a parameter
_FORBIDDEN = re.compile(r"[^\w\-./: ]")  # in names


def _patience() -> AbstractContextManager[None]:
    """A server that is away is given up after seconds, in which training stands, not minutes; or as the user says."""
    limits = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
    return environment(**{name: os.environ.get(name, limit) for name, limit in limits.items()})


class _MlflowLogger:
    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 1_000_000
        metrics = [Metric(_FORBIDDEN.sub("_", name), value, now_ms, step) for name, value in figures.items()]
        with _patience():
            for start in range(0, len(metrics), _MAX_METRICS):
                self._client.log_batch(self._run_id, metrics=metrics[start : start + _MAX_METRICS])

    def close(self) -> None:
        with _patience():
            self._client.set_terminated(self._run_id)


def open_mlflow(options: MlflowOptions, run: LoggedRun) -> Logger:
    """Begins the run, or goes on in it: it is found by a tag."""
    with environment(MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true"), _patience():
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri = options.tracking_uri or f"sqlite:///{run.folder.resolve() / 'mlflow.db'}"
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        title = options.experiment or run.name
        experiment = client.get_experiment_by_name(title)
        place = None if options.tracking_uri else (run.folder.resolve() / "artifacts").as_uri()
        experiment_id = client.create_experiment(title, place) if experiment is None else experiment.experiment_id
        earlier = client.search_runs([experiment_id], f"tags.`{_ID_TAG}` = '{run.run_id}'")
        if earlier:
            run_id = earlier[0].info.run_id
            client.update_run(run_id, status="RUNNING")
        else:
            run_id = client.create_run(experiment_id, run_name=run.title, tags={_ID_TAG: run.run_id}).info.run_id
            parameters = [
                Param(_FORBIDDEN.sub("_", name), str(value)[:_MAX_LENGTH]) for name, value in flatten(run.options)
            ]
            for start in range(0, len(parameters), _MAX_PARAMETERS):
                client.log_batch(run_id, params=parameters[start : start + _MAX_PARAMETERS])
        return _MlflowLogger(client, run_id)
