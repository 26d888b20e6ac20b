"""A base model -> a server that answers as any of its adapters, and the chat model that graphs call.

Invariants: adapters belong to one base model, so each base model has a registry of its own; every call of a node goes
to a registered version that the server confirmed; version 0 is one that changes nothing. It knows no graph, no
episode and no training.
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
from marft_bridge.config import BridgeConfig
from marft_bridge.lineage import model_to_lineage
from marft_bridge.null_adapter import write_null_adapter
from marft_bridge.policy import NodeChat
from marft_bridge.progress import Reporter
from marft_bridge.rewards.contract import Served
from marft_bridge.routing import Route
from marft_bridge.server_command import vllm_runs_on_cpu
from marft_bridge.server_keeper import ServerKeeper
from marft_bridge.serving import Endpoint, ModelServer, ServeOptions
from marft_bridge.watched_calls import AsyncWatchedTransport, CallsUnderWay, WatchedTransport
from trainers.files import weights_to_sha256

_BASE = "(base)"  # no node of LangGraph has such a name


class ServedModel:
    """One base model and its adapters; within `served`, a server and a chat model too.

    Args:
        model_dir: the base model.
        adapters: the folder of its adapter versions.
    """

    server: ModelServer
    keeper: ServerKeeper
    chat: NodeChat
    place: Served
    """Where a reward finds the base model, to ask it; by the name of an adapter that changes nothing where it must."""

    def __init__(self, config: BridgeConfig, model_dir: Path, adapters: Path) -> None:
        self._config, self.model_dir = config, model_dir
        base_sha256 = weights_to_sha256(model_dir)
        self.registry = AdapterRegistry(adapters, base_sha256)
        self.lineage = {"base": base_sha256, **model_to_lineage(model_dir)}  # of every episode that it answers

    @contextmanager
    def served(self, options: ServeOptions, log: Path, loop: asyncio.Runner, reporter: Reporter) -> Iterator[Self]:
        """Starts the server, or attaches to it, until the block ends; its connections belong to `loop`.

        Raises:
            ServingError: see `ModelServer.start`.
        """
        with ModelServer(options, self.model_dir, self.registry.root, log) as self.server:
            with reporter.bars(), reporter.task("model server") as task:
                endpoint = self.server.start(lambda phase: task.update(figures=phase))
            # A server that is not ours may have a parser of tool calls; if it has none, its own refusal says so.
            auto_tools = self._config.serve.attach is not None or options.tool_call_parser is not None
            calls = CallsUnderWay()
            # Half of an episode's time at most: one that waits on a server that hangs is to be repeated, not cut short.
            hang_s = min(options.hang_s, self._config.collect.timeout_s / 2)
            with (
                ServerKeeper(self.server, options.restarts, hang_s, calls, reporter.say) as self.keeper,
                self._clients(endpoint, auto_tools, loop, calls) as self.chat,
            ):
                self.place = Served(endpoint.base_url, self._base_name(endpoint), endpoint.api_key)
                yield self

    def _base_name(self, endpoint: Endpoint) -> str:
        """The name under which the base model answers as itself: see `null_adapter` for why that is an adapter's."""
        if self.server.attached or not vllm_runs_on_cpu():
            return endpoint.model
        self.register_null([_BASE])
        self.publish({_BASE: 0})
        return self.registry.served_name(_BASE, 0)

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

    def register_null(self, nodes: Iterable[str]) -> None:
        """Gives each of these nodes a version 0, which changes nothing in the base model, unless it has one."""
        for node in nodes:
            if 0 not in self.registry.versions(node):
                modules = self._config.train.trainer.lora.target_modules
                write_null_adapter(self.registry.new_folder(node, 0), self.model_dir, modules)
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
        )
