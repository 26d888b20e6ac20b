"""`marft-bridge serve --split`: options and a served model -> a proxy that shares an app's traffic out to two teams.

Invariant: whatever is wrong with the versions or the key is said before the engine starts.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from marft_bridge.adapters import publish
from marft_bridge.comparison.manifest import promoted_versions
from marft_bridge.config import BridgeConfig
from marft_bridge.errors import ConfigError
from marft_bridge.exporter import JournalProcessor
from marft_bridge.live.calls import LiveRecorder
from marft_bridge.live.flags import LiveOptions
from marft_bridge.live.proxy import LivePlan
from marft_bridge.live.running import RunningProxy
from marft_bridge.live.split import BASE, CANDIDATE, live_file
from marft_bridge.live.teams import PROMOTED, Team, text_to_versions, versions_to_team
from marft_bridge.progress import Reporter
from marft_bridge.recording import check_options, options_to_processor
from marft_bridge.run_folder import RunFolder, bridge_version
from marft_bridge.run_store import take_in_what_ran
from marft_bridge.served_models import ServedModels
from marft_bridge.serving import Endpoint, ModelServer
from trace_store.journal import Journal
from trace_store.records import RunRow

URL_VARIABLE, KEY_VARIABLE = "MARFT_LIVE_URL", "MARFT_LIVE_KEY"
_ENGINE_TEMPERATURE = 1.0  # of a request that names none, on a server that takes no defaults from the model's folder
_KEY = re.compile(r"[A-Za-z0-9._~-]{16,}")


class LiveTraffic:
    """A split of the app's traffic, settled before the engine starts."""

    def __init__(self, config: BridgeConfig, folder: RunFolder, models: ServedModels, options: LiveOptions) -> None:
        """Raises a BridgeError for whatever cannot be served."""
        check_options(config.record)
        self._config, self._folder, self._models, self._options = config, folder, models, options
        self._key = _key_of(options.key_env)
        self.teams = _teams(config, folder, models, options)
        self._file = live_file(folder.live)

    @contextmanager
    def running(self, server: ModelServer, endpoint: Endpoint, reporter: Reporter) -> Iterator[RunningProxy]:
        """The proxy, until the block ends; then what it recorded is taken into the store."""
        for team in self.teams.values():
            for node, version in team.versions.items():
                publish(server, self._models.registry, node, version)
        keys = (self._file.api_key, *((self._key,) if self._key is not None else ()))
        plan = LivePlan(self.teams, self._options.split, self._file.salt, keys, reporter.say)
        journal = Journal(self._folder.journal)
        try:
            recorder = self._recorder(journal)
            engine = (endpoint.base_url, endpoint.api_key)
            with RunningProxy(plan, engine, recorder, self._options.port, mirrored=self._options.mirror) as proxy:
                self._file.at(proxy.base_url)
                try:
                    self._say(proxy, reporter)
                    yield proxy
                finally:
                    self._file.at(None)
        finally:
            journal.close()
            take_in_what_ran(self._folder, reporter)

    def command_environment(self, proxy: RunningProxy) -> Mapping[str, str]:
        """What a command beside the proxy is told. Not OPENAI_BASE_URL: that would move its other models here too."""
        return {URL_VARIABLE: proxy.base_url, KEY_VARIABLE: self._key or self._file.api_key}

    def _recorder(self, journal: Journal) -> LiveRecorder:
        processor: JournalProcessor = options_to_processor(journal, self._config.record)
        run_id = f"live-{uuid4().hex[:12]}"
        content: dict[str, Any] = {
            "split": str(self._options.split),
            "mirror": self._options.mirror,
            "teams": {name: team.to_json() for name, team in self.teams.items()},
        }
        for team in self.teams.values():
            for node, version in team.versions.items():
                journal.append(self._models.registry.get(node, version))
        journal.append(RunRow(run_id, "serve", time.time_ns(), content, bridge_version()))
        return LiveRecorder(
            processor,
            run_id,
            self._config.name,
            self._options.quiet_s,
            _ENGINE_TEMPERATURE if self._config.serve.attach is None else None,
            self._models.lineage,
            self._config.graph.frozen,
        )

    def _say(self, proxy: RunningProxy, reporter: Reporter) -> None:
        for name, share in ((BASE, self._options.split.base), (CANDIDATE, self._options.split.candidate)):
            reporter.say(f"{name} answers {share:g} % of keys: {self.teams[name]}")
        if self._options.mirror:
            reporter.say("what base answers is mirrored to candidate, in the shadow")
        where = f"in {self._file.path}" if self._key is None else f"in ${self._options.key_env}"
        reporter.say(f"live traffic at {proxy.base_url}, the key is {where}; `model` is the name of a node")


def _teams(config: BridgeConfig, folder: RunFolder, models: ServedModels, options: LiveOptions) -> dict[str, Team]:
    nodes, frozen = config.graph.nodes, config.graph.frozen
    models.register_null((*nodes, *frozen))
    promoted = functools.partial(promoted_versions, folder.path)
    base = options.base or ("0" if promoted() is None else PROMOTED)
    said = {BASE: ("--base", base), CANDIDATE: ("--candidate", options.candidate)}
    teams = {
        name: versions_to_team(name, text_to_versions(flag, text, nodes, models.registry, promoted), frozen)
        for name, (flag, text) in said.items()
    }
    if teams[BASE].versions == teams[CANDIDATE].versions:
        raise ConfigError(f"serve: base and candidate are the same team ({teams[BASE]}); name another --candidate")
    return teams


def _key_of(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not _KEY.fullmatch(key):
        raise ConfigError(f"serve: --key-env: {variable} holds no key of 16 or more of A-Z a-z 0-9 . _ ~ -")
    return key
