"""A base model -> a server that answers as any of its adapters, and the chat model that graphs call.

Invariants: every call of a node goes to a registered version that the server confirmed; version 0 is one that changes
nothing. It knows no graph, no episode and no training, nor that there may be several (`served_models`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx

from marft_bridge.adapters import AdapterRegistry, publish, retire
from marft_bridge.bases import Base
from marft_bridge.config import BridgeConfig
from marft_bridge.null_adapter import write_null_adapter
from marft_bridge.policy import NodeChat
from marft_bridge.progress import Reporter
from marft_bridge.rewards.contract import Served
from marft_bridge.routing import Route
from marft_bridge.server_command import vllm_runs_on_cpu
from marft_bridge.server_keeper import ServerKeeper
from marft_bridge.serving import Endpoint, ModelServer, ServeOptions
from marft_bridge.watched_calls import AsyncWatchedTransport, CallsUnderWay, WatchedTransport

_BASE = "(base)"  # no node of LangGraph has such a name


class ServedModel:
    """One base model and its adapters; within `served`, a server and a chat model too.

    Args:
        registry: of its adapter versions, and maybe of those of other base models.
    """

    server: ModelServer
    keeper: ServerKeeper
    chat: NodeChat

    def __init__(self, config: BridgeConfig, base: Base, registry: AdapterRegistry) -> None:
        self._config, self.base, self.registry = config, base, registry

    @contextmanager
    def served(self, options: ServeOptions, log: Path, loop: asyncio.Runner, reporter: Reporter) -> Iterator[Self]:
        """Starts the server, or attaches to it, until the block ends; its connections belong to `loop`.

        Raises:
            ServingError: see `ModelServer.start`.
        """
        with ModelServer(options, self.base.directory, self.registry.root, log) as self.server:
            with reporter.bars(), reporter.task(self.base.title) as task:
                self._endpoint = endpoint = self.server.start(lambda phase: task.update(figures=phase))
            # A server that is not ours may have a parser of tool calls; if it has none, its own refusal says so.
            auto_tools = self.base.serve.attach is not None or self.base.serve.tool_call_parser is not None
            calls = CallsUnderWay()
            # Half of an episode's time at most: one that waits on a server that hangs is to be repeated, not cut short.
            hang_s = min(options.hang_s, self._config.collect.timeout_s / 2)
            with (
                ServerKeeper(self.server, options.restarts, hang_s, calls, reporter.say) as self.keeper,
                self._clients(endpoint, auto_tools, loop, calls) as self.chat,
            ):
                yield self

    def as_itself(self) -> Served:
        """Where the base model answers as itself; `null_adapter` says why that is by the name of an adapter on a CPU.

        Of one base model in a registry only.
        """
        name = self._endpoint.model
        if not self.server.attached and vllm_runs_on_cpu():
            self.register_null([_BASE])
            self.publish({_BASE: 0})
            name = self.registry.served_name(_BASE, 0)
        return Served(self._endpoint.base_url, name, self._endpoint.api_key)

    @contextmanager
    def _clients(
        self, endpoint: Endpoint, auto_tools: bool, loop: asyncio.Runner, calls: CallsUnderWay
    ) -> Iterator[NodeChat]:
        """The nodes' model. No proxy of the environment sees the key; as many connections as calls in flight."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._config.collect.in_flight)
        options: dict[str, Any] = {"trust_env": False, "timeout": self._config.collect.timeout_s}
        with httpx.Client(transport=WatchedTransport(calls, limits), **options) as client:
            async_client = httpx.AsyncClient(transport=AsyncWatchedTransport(calls, limits), **options)
            try:
                yield NodeChat(
                    model=endpoint.model,
                    base_url=endpoint.base_url,
                    api_key=endpoint.api_key,
                    http_client=client,
                    http_async_client=async_client,
                    auto_tools=auto_tools,
                )
            finally:
                loop.run(async_client.aclose())

    def place_of(self, node: str, version: int) -> Served:
        """Where `node` at `version` answers anybody who has the key."""
        return Served(self._endpoint.base_url, self.registry.served_name(node, version), self._endpoint.api_key)

    def register_null(self, nodes: Iterable[str]) -> None:
        """Gives each of these nodes a version 0, which changes nothing in the base model, unless it has one."""
        for node in nodes:
            if 0 not in self.registry.versions(node):
                modules = self._config.train.trainer.lora.target_modules
                write_null_adapter(self.registry.new_folder(node, 0), self.base.directory, modules)
                self.registry.register(node, 0, None, {})

    def publish(self, versions: Mapping[str, int]) -> None:
        """Has the server answer to these versions."""
        for node, version in versions.items():
            self.keeper.through(partial(publish, self.server, self.registry, node, version))

    def retire_all_but(self, keep: Mapping[str, Sequence[int]]) -> None:
        """Takes every other version of these nodes out of service, so that the server's slots suffice."""
        self.keeper.through(partial(self._retire_all_but, keep))

    def serve_only(self, versions: Mapping[str, Sequence[int]]) -> None:
        """Has the server answer to these versions of these nodes, and to no others of theirs."""
        self.retire_all_but(versions)
        for node, wanted in versions.items():
            for version in wanted:
                self.publish({node: version})

    def _retire_all_but(self, keep: Mapping[str, Sequence[int]]) -> None:
        served = set(self.server.loaded())
        for node, versions in keep.items():
            for version in self.registry.versions(node):
                if version not in versions and self.registry.served_name(node, version) in served:
                    retire(self.server, node, version)

    def route(self, node: str, version: int, temperature: float | None) -> Route:
        """Where the calls of `node` at `version` go."""
        name = self.registry.served_name(node, version)
        sampling = self._config.sampling
        return Route(
            model=name,
            adapter=name,
            version=version,
            temperature=temperature or sampling.temperature,
            max_tokens=sampling.max_tokens,
            server=self._endpoint.base_url,
        )
