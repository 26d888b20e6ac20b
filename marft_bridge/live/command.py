"""`marft-bridge serve --split`: options and a served model -> a proxy that splits an app's traffic between two teams.

Invariant: versions and keys are checked before the engine starts.
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

from marft_bridge.common.api_keys import variable_to_key
from marft_bridge.common.errors import ConfigError
from marft_bridge.common.loopback_server import LoopbackServer
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.config.fallback import FallbackOptions
from marft_bridge.live.calls import LiveRecorder
from marft_bridge.live.fallback import FallbackKeys
from marft_bridge.live.flags import LiveOptions
from marft_bridge.live.periodic_intake import periodic_intake
from marft_bridge.live.proxy import LivePlan
from marft_bridge.live.proxy_server import proxy_server, proxy_to_base_url
from marft_bridge.live.split import BASE, CANDIDATE, read_or_make_live_file
from marft_bridge.live.teams import PROMOTED, ReadPromoted, Team, text_to_versions, versions_to_team
from marft_bridge.model_calls.call_monitor import CallsUnderWay
from marft_bridge.promotion.manifest import newest_manifest
from marft_bridge.recording.journal_exporter import JournalProcessor
from marft_bridge.recording.span_processor import check_options, options_to_processor
from marft_bridge.runs.named_version import read_named_version
from marft_bridge.runs.run_folder import RunFolder, bridge_version
from marft_bridge.runs.run_store import take_in_journal
from marft_bridge.serving.adapter_registry import publish
from marft_bridge.serving.model_versions import ModelVersions
from marft_bridge.serving.vllm_server import ModelServer
from trace_store.journal import Journal
from trace_store.records import RunRow

URL_VARIABLE, KEY_VARIABLE = "MARFT_LIVE_URL", "MARFT_LIVE_KEY"
_ENGINE_TEMPERATURE = 1.0  # of a request that names none, on a server that takes no defaults from the model's folder
_KEY = re.compile(r"[A-Za-z0-9._~-]{16,}")


class LiveTraffic:
    """A split of the app's traffic, checked before the engine starts."""

    def __init__(self, config: BridgeConfig, folder: RunFolder, versions: ModelVersions, options: LiveOptions) -> None:
        """Raises a BridgeError for options that cannot be served."""
        check_options(config.record)
        self._config, self._folder, self._versions, self._options = config, folder, versions, options
        self._key = _read_key(options.key_env)
        self._fallback = _read_fallback(config.fallback)
        self.teams = _teams(config, folder, versions, options=options)
        self._live_file = read_or_make_live_file(folder.live)

    @contextmanager
    def running(self, server: ModelServer, reporter: Reporter, calls: CallsUnderWay) -> Iterator[LoopbackServer]:
        """The proxy, until the block ends; its journal is read into the store every minute, and then.

        Args:
            calls: is told of the calls under way to the server.
        """
        for team in self.teams.values():
            for node, version in team.versions.items():
                publish(server, self._versions.registry, node, version=version)
        keys = (self._live_file.api_key, *((self._key,) if self._key is not None else ()))
        plan = LivePlan(self.teams, self._options.split, self._live_file.salt, keys=keys, warn=reporter.say)
        journal = Journal(self._folder.journal)
        try:
            recorder = self._recorder(journal)
            engine = (server.endpoint.base_url, server.endpoint.api_key)
            with (
                periodic_intake(self._folder.store, warn=reporter.say),
                proxy_server(
                    plan,
                    engine,
                    recorder,
                    port=self._options.port,
                    mirrored=self._options.mirror,
                    fallback=self._fallback,
                    calls=calls,
                ) as proxy,
                self._live_file.announced(proxy_to_base_url(proxy)),
            ):
                self._announce(proxy, reporter)
                yield proxy
        finally:
            journal.close()
            take_in_journal(self._folder, reporter)

    def command_environment(self, proxy: LoopbackServer) -> Mapping[str, str]:
        """Environment variables for a command beside the proxy. Without OPENAI_BASE_URL, which would send its calls
        of other models here too."""
        return {URL_VARIABLE: proxy_to_base_url(proxy), KEY_VARIABLE: self._key or self._live_file.api_key}

    def _recorder(self, journal: Journal) -> LiveRecorder:
        processor: JournalProcessor = options_to_processor(journal, self._config.record)
        run_id = f"live-{uuid4().hex[:12]}"
        run_config: dict[str, Any] = {
            "split": str(self._options.split),
            "mirror": self._options.mirror,
            "teams": {name: team.to_json() for name, team in self.teams.items()},
            "fallback": self._fallback[0].models if self._fallback is not None else None,
            "fallback_judge": _judge_to_json(self._fallback[0]) if self._fallback is not None else None,
        }
        for team in self.teams.values():
            for node, version in team.versions.items():
                journal.append(self._versions.registry.get(node, version))
        journal.append(RunRow(run_id, "serve", time.time_ns(), config=run_config, version=bridge_version()))
        return LiveRecorder(
            processor,
            run_id,
            self._config.name,
            quiet_s=self._options.quiet_s,
            temperature=_ENGINE_TEMPERATURE if self._config.serve.attach is None else None,
            lineage=self._versions.lineage,
            frozen=self._config.graph.frozen,
        )

    def _announce(self, proxy: LoopbackServer, reporter: Reporter) -> None:
        for name, share in ((BASE, self._options.split.base), (CANDIDATE, self._options.split.candidate)):
            reporter.say(f"{name} answers {share:g} % of keys: {self.teams[name]}")
        configured_nodes = (*self._config.graph.nodes, *self._config.graph.frozen)
        if hosted_nodes := [node for node in configured_nodes if node not in self.teams[BASE].versions]:
            reporter.say(f"not served here, hosted by what was promoted: {', '.join(hosted_nodes)}")
        if self._options.mirror:
            reporter.say("what base answers is mirrored to candidate, in the shadow")
        if self._fallback is not None:
            hosted = self._fallback[0]
            models_text = ", ".join(f"{node} to {model}" for node, model in hosted.models.items())
            reporter.say(f"falling back, after {hosted.after_s:g} s, a failure or a broken format: {models_text}")
            if hosted.judge is not None:
                reporter.say(
                    f"falling back on a score below {hosted.judge.below:g} by the judge {hosted.judge.model} too: "
                    f"{', '.join(hosted.judge.rubrics)}; without a score the {hosted.judge.unjudged} answer goes out"
                )
        key_location = f"in {self._live_file.path}" if self._key is None else f"in ${self._options.key_env}"
        reporter.say(
            f"live traffic at {proxy_to_base_url(proxy)}, the key is {key_location}; `model` is the name of a node"
        )


def _teams(config: BridgeConfig, folder: RunFolder, versions: ModelVersions, options: LiveOptions) -> dict[str, Team]:
    nodes, frozen = config.graph.nodes, config.graph.frozen
    versions.register_zero((*nodes, *frozen))
    read_promoted = functools.partial(newest_manifest, folder.path, config.promote.key_env)
    base = options.base or ("0" if read_promoted() is None else PROMOTED)
    hosted = _hosted_nodes(read_promoted, base, options.candidate)
    nodes = tuple(node for node in nodes if node not in hosted)
    frozen = tuple(node for node in frozen if node not in hosted)
    named = read_named_version(folder)
    team_flags = {BASE: ("--base", base), CANDIDATE: ("--candidate", options.candidate)}
    teams = {
        name: versions_to_team(
            name,
            text_to_versions(
                flag,
                version_text,
                nodes,
                registry=versions.registry,
                read_promoted=read_promoted,
                named_version=None if named is None else named.version,
            ),
            frozen,
        )
        for name, (flag, version_text) in team_flags.items()
    }
    is_split = options.mirror or options.split.candidate > 0
    if is_split and teams[BASE].versions == teams[CANDIDATE].versions:
        raise ConfigError(f"serve: base and candidate are the same team ({teams[BASE]}); name another --candidate")
    return teams


def _read_fallback(options: FallbackOptions | None) -> tuple[FallbackOptions, FallbackKeys] | None:
    if options is None:
        return None
    judge_variable = options.judge.api_key_env if options.judge is not None else None
    return options, FallbackKeys(
        hosted=_read_variable("fallback", options.api_key_env),
        judge=_read_variable("fallback.judge", judge_variable),
    )


def _hosted_nodes(read_promoted: ReadPromoted, *version_texts: str) -> tuple[str, ...]:
    """The nodes that a promotion, where one of the teams is what was promoted, leaves with the app's own models."""
    versions = [part.rpartition("=")[2].strip() for text in version_texts for part in text.split(",")]
    manifest = read_promoted() if PROMOTED in versions else None
    return () if manifest is None else manifest.hosted


def _judge_to_json(options: FallbackOptions) -> dict[str, Any] | None:
    """The judge, for the record: all that decides who answers."""
    names = {"model", "rubrics", "lowest", "highest", "below", "unjudged"}
    return options.judge.model_dump(mode="json", include=names) if options.judge is not None else None


def _read_variable(table: str, variable: str | None) -> str | None:
    try:
        return variable_to_key(variable) if variable is not None else None
    except ValueError as error:
        raise ConfigError(f"{table}: {error}") from None


def _read_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not _KEY.fullmatch(key):
        raise ConfigError(f"serve: --key-env: {variable} holds no key of 16 or more of A-Z a-z 0-9 . _ ~ -")
    return key
