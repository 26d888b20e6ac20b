"""A configuration and a run folder -> the app's graph on the served model, recorded; and what every command asks first.

`Engine` is what `collect` and `train` share: the models, one graph, one stage. A comparison puts several of them on
one stage by itself. It knows nothing of rounds, updates or statistics.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import httpx

from marft_bridge.app import App, options_to_app
from marft_bridge.bases import Base
from marft_bridge.config import BridgeConfig
from marft_bridge.episode import CANCELLED
from marft_bridge.errors import ConfigError
from marft_bridge.files import write_atomically
from marft_bridge.progress import Reporter
from marft_bridge.recording import check_options
from marft_bridge.rollouts import EpisodeRequest, Tally
from marft_bridge.run_folder import RunFolder, bridge_version
from marft_bridge.scripted import ScriptedPolicy
from marft_bridge.served_models import ServedModels
from marft_bridge.serving import Endpoint, ServeOptions
from marft_bridge.stage import Stage
from trace_store.records import RunRow
from trace_store.store import TraceStore

_KEY_VARIABLE = "MARFT_SERVER_KEY"

# Episodes that need not run again: cut short by a limit of theirs, or ended and rewarded.
_FINISHED = """
SELECT task_id, sample, variant, round FROM episodes e
WHERE run_id = ? AND (outcome = 'truncated' AND reason <> ? OR outcome = 'terminated'
  AND EXISTS (SELECT 1 FROM rewards r WHERE r.episode_id = e.episode_id AND r.scope = 'episode'))
"""


def load_app(config: BridgeConfig) -> App:
    """The user's app, with its nodes checked on a scripted model, and how it is recorded: before any server starts.

    Raises:
        GraphError: see `options_to_app`.
        ConfigError: the comparison that is to come asks for more held-out tasks than there are.
    """
    check_options(config.record)
    app = options_to_app(config.graph, config.rewards)
    left, all_tasks = len(app.heldout_tasks), len(app.train_tasks) + len(app.heldout_tasks)
    if (asked := config.compare.tasks or 0) > left:
        raise ConfigError(
            f"compare.tasks asks for {asked} held-out tasks, but graph.heldout = {config.graph.heldout} leaves "
            f"{left} of {all_tasks}: lower compare.tasks or add tasks"
        )
    return checked_app(app)


def checked_app(app: App, *, own_models: bool = False) -> App:
    """The same app, after it was opened once, on a scripted model or on its own ones, and its nodes were found."""
    with asyncio.Runner() as runner, app.opened(None if own_models else ScriptedPolicy(), runner):
        return app


def write_server_file(folder: RunFolder, endpoints: Mapping[str, Endpoint]) -> None:
    """Tells other commands on this run folder where the servers are, by `Base.name`; 0600, because keys are in it."""
    servers = {name: {"base_url": at.base_url, "api_key": at.api_key} for name, at in endpoints.items()}
    write_atomically(folder.server, json.dumps({"servers": servers, "pid": os.getpid()}) + "\n")


def running_servers(folder: RunFolder) -> dict[str, tuple[str, str]]:
    """Address and key of each server that `marft-bridge serve` runs for this folder now; empty where one does not."""
    try:
        content = json.loads(folder.server.read_text(encoding="utf-8"))
        found = {
            name: (server["base_url"].removesuffix("/v1"), server["api_key"])
            for name, server in content["servers"].items()
        }
        for address, key in found.values():
            headers = {"Authorization": f"Bearer {key}"}
            httpx.get(f"{address}/v1/models", headers=headers, timeout=5.0, trust_env=False).raise_for_status()
    except (AttributeError, OSError, TypeError, ValueError, KeyError, httpx.HTTPError):
        return {}
    return found


def server_options(bases: Sequence[Base], folder: RunFolder, reporter: Reporter) -> list[ServeOptions]:
    """How each base model is served: by the server of this folder where `marft-bridge serve` runs it."""
    found = running_servers(folder)
    options = []
    for number, base in enumerate(bases):
        if base.serve.attach is not None or base.name not in found:
            options.append(base.serve)
            continue
        variable = f"{_KEY_VARIABLE}_{number}" if number else _KEY_VARIABLE
        address, os.environ[variable] = found[base.name]
        reporter.say(f"using the {base.title} at {address}")
        options.append(
            ServeOptions(
                attach=address,
                api_key_env=variable,
                lora_target_modules=base.serve.lora_target_modules,
                hang_s=base.serve.hang_s,
            )
        )
    return options


class Engine:
    """Runs episodes of the app on the configuration's models. Use it as a context manager."""

    def __init__(
        self, config: BridgeConfig, folder: RunFolder, app: App, bases: Sequence[Base], reporter: Reporter
    ) -> None:
        self.config, self.folder, self.app, self.reporter = config, folder, app, reporter
        self.models = ServedModels(config, bases, folder.adapters)
        self.registry, self.lineage = self.models.registry, self.models.lineage
        self._stack = ExitStack()

    def __enter__(self) -> Engine:
        with ExitStack() as stack:
            self._stage = stack.enter_context(Stage(self.config, self.folder, self.reporter))
            options = server_options(self.models.bases, self.folder, self.reporter)
            log_of = self.folder.server_log_of
            stack.enter_context(self.models.served(options, log_of, self._stage.loop, self.reporter))
            self.models.register_null((*self.config.graph.nodes, *self.app.frozen))
            self.publish(dict.fromkeys(self.app.frozen, 0))
            self._collector = stack.enter_context(self._stage.opened(self.app, self.models, self.models.place))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def publish(self, versions: Mapping[str, int]) -> None:
        """Has the servers answer to these versions."""
        self.models.publish(versions)

    def retire_all_but(self, keep: Mapping[str, Sequence[int]]) -> None:
        """Takes every other version of these nodes out of service, so that the servers' slots suffice."""
        self.models.retire_all_but(keep)

    def serve_only(self, versions: Mapping[str, Sequence[int]]) -> None:
        """Has the servers answer to these versions of these nodes, and to no others of theirs."""
        self.models.serve_only(versions)

    def run(self, requests: Sequence[EpisodeRequest], title: str, reward: str) -> Tally:
        """Runs the requests and shows how far they are."""
        tally = Tally()
        self._stage.run([(self._collector, request, tally) for request in requests], title, reward)
        for line in (*tally.without(), *tally.silent(self.config.graph.nodes)):
            self.reporter.say(line)
        return tally

    def stop_running(self) -> None:
        """Ends a `run` of another thread; what it reported is kept."""
        self._stage.stop()


def still_to_run(store: TraceStore, requests: Sequence[EpisodeRequest]) -> list[EpisodeRequest]:
    """The requests that no finished episode in the store answers."""
    done = {key for run_id in {r.run_id for r in requests} for key in store.sql(_FINISHED, (run_id, CANCELLED))}
    return [request for request in requests if request.key not in done]


def begin_run(
    store: TraceStore,
    run_id: str,
    command: str,
    config: BridgeConfig,
    folder: RunFolder,
    plan: Mapping[str, Any] | None = None,
) -> None:
    """Writes down that a command works in this folder now, with which configuration, and what a resume must find."""
    folder.record_config(command, config)
    content: dict[str, Any] = config.model_dump(mode="json") | ({"plan": dict(plan)} if plan is not None else {})
    store.put_run(RunRow(run_id, command, time.time_ns(), content, bridge_version()))


def numbered_run_id(store: TraceStore, command: str, resume: bool) -> str:
    """The next of a command's runs in a folder that may hold many, `compare-2`; resumed, the latest one's."""
    earlier = sum(1 for run in store.runs() if run.command == command)
    if resume and not earlier:
        raise ConfigError(f"{command}: nothing to resume in {store.path.parent}; leave out --resume")
    return f"{command}-{earlier if resume else earlier + 1}"


def refuse_used(store: TraceStore, run_id: str, command: str, folder: RunFolder, resume: bool) -> None:
    """Refuses to add a second run of `command` to a folder unless the user resumes it."""
    used = any(run.run_id == run_id for run in store.runs())
    if used and not resume:
        raise ConfigError(
            f"{command}: {folder.path} already holds a run of it; go on with --resume, or choose another --run folder"
        )
    if resume and not used:
        raise ConfigError(f"{command}: nothing to resume in {folder.path}; leave out --resume")
