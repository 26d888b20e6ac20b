"""A configuration and a run folder -> a graph that runs on the served model, recorded.

`Engine` is what `collect`, `train` and `compare` share: the model directory, the server (started here, or the one
that `marft-bridge serve` runs for this folder), the recorder with its journal, the wrapped graph and the routes of
its nodes. Invariant: every call of a trainable or frozen node goes through a registered adapter that the server
confirmed; version 0 is one that changes nothing. It knows nothing of rounds, updates or statistics.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from marft_bridge.adapters import AdapterRegistry, publish, retire
from marft_bridge.app import App, options_to_app
from marft_bridge.config import BridgeConfig
from marft_bridge.episode import CANCELLED
from marft_bridge.errors import ConfigError
from marft_bridge.files import write_atomically
from marft_bridge.lineage import model_to_lineage
from marft_bridge.null_adapter import write_null_adapter
from marft_bridge.policy import NodeChat
from marft_bridge.prepare_model import SMOLLM2_NAME, check_model_dir, prepare_smollm2
from marft_bridge.progress import Reporter
from marft_bridge.record import Recorder
from marft_bridge.recorded_graph import wrap
from marft_bridge.recording import check_options
from marft_bridge.redirect import redirected_models
from marft_bridge.rewards.contract import Place, Served
from marft_bridge.rollouts import Collector, EpisodeRequest, Tally
from marft_bridge.routing import Route
from marft_bridge.run_folder import RunFolder, bridge_version
from marft_bridge.scripted import ScriptedPolicy
from marft_bridge.serving import Endpoint, ModelServer, ServeOptions
from trace_store.journal import Journal
from trace_store.records import RunRow
from trace_store.store import TraceStore
from trainers.files import weights_to_sha256

PREPARED_MODEL = "smollm2-135m"
_KEY_VARIABLE = "MARFT_SERVER_KEY"

# Episodes that need not run again: cut short by a limit of theirs, or ended and rewarded.
_FINISHED = """
SELECT task_id, sample, variant, round FROM episodes e
WHERE run_id = ? AND (outcome = 'truncated' AND reason <> ? OR outcome = 'terminated'
  AND EXISTS (SELECT 1 FROM rewards r WHERE r.episode_id = e.episode_id AND r.scope = 'episode'))
"""


def model_directory(config: BridgeConfig, say: Callable[[str], None]) -> Path:
    """The base model's directory, prepared first where the configuration names the packaged model."""
    if config.model.path != PREPARED_MODEL:
        return check_model_dir(Path(config.model.path))
    cache = Path(os.environ.get("MARFT_CACHE") or config.model.cache)
    if not (cache / SMOLLM2_NAME).exists():
        say(f"preparing {SMOLLM2_NAME} in {cache} (once, about 20 s)")
    return prepare_smollm2(cache, say)


def load_app(config: BridgeConfig) -> App:
    """The user's app, with its nodes checked on a scripted model, and how it is recorded: before any server starts."""
    check_options(config.record)
    app = options_to_app(config.graph, config.rewards)
    with asyncio.Runner() as runner, app.opened(ScriptedPolicy(), runner):
        return app


def served_modules(config: BridgeConfig) -> ServeOptions:
    """The serving options, with the adapters' modules filled in: wrapping fewer layers serves faster."""
    options = config.serve
    if options.lora_target_modules is None:
        return options.model_copy(update={"lora_target_modules": config.train.trainer.lora.target_modules})
    return options


def write_server_file(folder: RunFolder, endpoint: Endpoint) -> None:
    """Tells other commands on this run folder where the server is; 0600, because the key is in it."""
    content = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "pid": os.getpid()}
    write_atomically(folder.server, json.dumps(content) + "\n")


def running_server(folder: RunFolder) -> tuple[str, str] | None:
    """Address and key of a server that `marft-bridge serve` runs for this folder now; None when there is none."""
    try:
        content = json.loads(folder.server.read_text(encoding="utf-8"))
        address, key = content["base_url"].removesuffix("/v1"), content["api_key"]
        answer = httpx.get(
            f"{address}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=5.0, trust_env=False
        )
    except (OSError, ValueError, KeyError, httpx.HTTPError):
        return None
    return (address, key) if answer.status_code == 200 else None


class Engine:
    """Runs episodes on the served model. Use it as a context manager."""

    def __init__(self, config: BridgeConfig, folder: RunFolder, app: App, model_dir: Path, reporter: Reporter) -> None:
        self.config, self.folder, self.app = config, folder, app
        self.model_dir, self.reporter = model_dir, reporter
        base_sha256 = weights_to_sha256(model_dir)
        self.registry = AdapterRegistry(folder.adapters, base_sha256)
        self.lineage = {"base": base_sha256, **model_to_lineage(model_dir)}  # of every episode that it runs
        self._stack = ExitStack()

    def __enter__(self) -> Engine:
        with ExitStack() as stack:
            self.server = stack.enter_context(self._server())
            with self.reporter.bars(), self.reporter.task("model server") as task:
                endpoint = self.server.start(lambda phase: task.update(figures=phase))
            self._register_null_adapters()
            journal = Journal(self.folder.journal)
            stack.callback(journal.close)
            self._served = Served(endpoint.base_url, endpoint.model, endpoint.api_key)
            self._chat = stack.enter_context(self._model(endpoint))
            stack.enter_context(redirected_models())
            self.publish(dict.fromkeys(self.app.frozen, 0))
            graph = stack.enter_context(self.app.opened(self._chat, self._loop))
            self._graph = wrap(graph, Recorder(journal, self.config.record))
            stack.callback(self._graph.unwrap)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def _server(self) -> ModelServer:
        options = served_modules(self.config)
        found = running_server(self.folder) if options.attach is None else None
        if found is not None:
            address, os.environ[_KEY_VARIABLE] = found
            modules = options.lora_target_modules
            options = ServeOptions(attach=address, api_key_env=_KEY_VARIABLE, lora_target_modules=modules)
            self.reporter.say(f"using the model server at {address}")
        return ModelServer(options, self.model_dir, self.folder.adapters, self.folder.server_log)

    @contextmanager
    def _model(self, endpoint: Endpoint) -> Iterator[NodeChat]:
        """The nodes' model. No proxy of the environment sees the key; as many connections as calls in flight."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.config.collect.in_flight)
        options: dict[str, Any] = {"trust_env": False, "limits": limits, "timeout": self.config.collect.timeout_s}
        with httpx.Client(**options) as client, asyncio.Runner() as self._loop:
            async_client = httpx.AsyncClient(**options)  # its connections belong to the one loop of this engine
            try:
                yield NodeChat(
                    model=endpoint.model,
                    base_url=endpoint.base_url,
                    api_key=endpoint.api_key,
                    http_client=client,
                    http_async_client=async_client,
                    # A server that is not ours may have a parser; if it has none, its own refusal says so.
                    auto_tools=self.config.serve.attach is not None or self.config.serve.tool_call_parser is not None,
                )
            finally:
                self._loop.run(async_client.aclose())

    def _register_null_adapters(self) -> None:
        for node in (*self.config.graph.nodes, *self.app.frozen):
            if 0 not in self.registry.versions(node):
                modules = self.config.train.trainer.lora.target_modules
                write_null_adapter(self.registry.new_folder(node, 0), self.model_dir, modules)
                self.registry.register(node, 0, None, {})

    # -- adapters ---------------------------------------------------------------------------------------------

    def publish(self, versions: dict[str, int]) -> None:
        """Has the server answer to these versions."""
        for node, version in versions.items():
            publish(self.server, self.registry, node, version)

    def retire_all_but(self, keep: Mapping[str, Sequence[int]]) -> None:
        """Takes every other version of these nodes out of service, so that the server's slots suffice."""
        served = set(self.server.loaded())
        for node, versions in keep.items():
            for version in self.registry.versions(node):
                if version not in versions and self.registry.served_name(node, version) in served:
                    retire(self.server, node, version)

    def route(self, node: str, version: int, temperature: float | None) -> Route:
        """Where the calls of `node` at `version` go."""
        name = self.registry.served_name(node, version)
        sampling = self.config.sampling
        return Route(
            model=name,
            adapter=name,
            version=version,
            temperature=temperature or sampling.temperature,
            max_tokens=sampling.max_tokens,
        )

    # -- episodes ---------------------------------------------------------------------------------------------

    def run(self, requests: Sequence[EpisodeRequest], title: str, reward: str) -> Tally:
        """Runs the requests and shows how far they are."""
        collector = Collector(
            self._graph,
            self.app,
            self.route,
            self.config.collect.in_flight,
            self.config.collect.timeout_s,
            self.server.check,
            self._chat,
            self.lineage,
            Place(self.folder.path, self._served),
        )
        with self.reporter.bars(), self.reporter.task(title, len(requests)) as task:
            tally = self._loop.run(
                collector.requests_to_episodes(
                    requests, lambda tally: task.update(tally.finished, tally.figures(reward))
                )
            )
        losses = self._graph.recorder.losses
        if said := str(losses):
            missing = "; episodes that lack spans are not used" if losses.callbacks or losses.spans else ""
            self.reporter.say(f"recording: {said}{missing}")
        for line in (*tally.without(), *tally.silent(self.config.graph.nodes)):
            self.reporter.say(line)
        return tally


def still_to_run(store: TraceStore, requests: Sequence[EpisodeRequest]) -> list[EpisodeRequest]:
    """The requests that no finished episode in the store answers."""
    done = {key for run_id in {r.run_id for r in requests} for key in store.sql(_FINISHED, (run_id, CANCELLED))}
    return [request for request in requests if request.key not in done]


def begin_run(store: TraceStore, run_id: str, command: str, config: BridgeConfig, folder: RunFolder) -> None:
    """Writes down that a command works in this folder now, and with which configuration."""
    folder.record_config(command, config)
    content: dict[str, Any] = config.model_dump(mode="json")
    store.put_run(RunRow(run_id, command, time.time_ns(), content, bridge_version()))


def refuse_used(store: TraceStore, run_id: str, command: str, folder: RunFolder, resume: bool) -> None:
    """Refuses to add a second run of `command` to a folder unless the user resumes it."""
    used = any(run.run_id == run_id for run in store.runs())
    if used and not resume:
        raise ConfigError(
            f"{command}: {folder.path} already holds a run of it; go on with --resume, or choose another --run folder"
        )
    if resume and not used:
        raise ConfigError(f"{command}: nothing to resume in {folder.path}; leave out --resume")


def check_versions(engine: Engine, versions: dict[str, int]) -> None:
    """Refuses versions that were never published."""
    for node, version in versions.items():
        engine.registry.get(node, version)
