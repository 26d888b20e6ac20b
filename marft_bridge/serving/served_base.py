"""A base model -> a server that answers as any of its adapters, and the chat model that graphs call.

Invariant: no HTTP proxy that the environment names sees the server's key. `served_bases` combines several.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import CollectOptions
from marft_bridge.config.serve import ServeOptions
from marft_bridge.model_calls.call_monitor import AsyncWatchedTransport, CallsUnderWay, WatchedTransport
from marft_bridge.model_calls.node_chat_model import NodeChat
from marft_bridge.serving.base_models import BaseModelSpec
from marft_bridge.serving.supervisor import Supervisor
from marft_bridge.serving.vllm_server import Endpoint, ModelServer


@dataclass(frozen=True, slots=True)
class ServedBase:
    """One base model with its running server, until the block of `serve_base` ends."""

    base: BaseModelSpec
    server: ModelServer
    supervisor: Supervisor
    chat: NodeChat


@contextmanager
def serve_base(
    base: BaseModelSpec,
    options: ServeOptions,
    *,
    adapters: Path,
    log: Path,
    collect: CollectOptions,
    loop: asyncio.Runner,
    reporter: Reporter,
) -> Iterator[ServedBase]:
    """Starts the server, or attaches to it, until the block ends.

    Args:
        options: of the server: `base.serve`, or options that attach to a server that runs already.
        adapters: only adapters inside this folder are served.
        collect: how many calls are in flight, and for how long an episode may wait for one.
        loop: the event loop that the connections belong to.

    Raises:
        ServingError: see `ModelServer.start`.
    """
    with start_server(base, options, adapters=adapters, log=log, reporter=reporter) as server:
        # A server that we attach to may have a parser of tool calls; if it has none, it refuses such calls itself.
        auto_tools = base.serve.attach is not None or base.serve.tool_call_parser is not None
        calls = CallsUnderWay()
        # At most half of an episode's time: an episode that waits on a hanging server is repeated, not cut short.
        hang_s = min(options.hang_s, collect.timeout_s / 2)
        with (
            Supervisor(server, options.restarts, hang_s, calls=calls, report=reporter.say) as supervisor,
            _chat_model(server.endpoint, auto_tools, collect, loop=loop, calls=calls) as chat,
        ):
            yield ServedBase(base, server, supervisor, chat=chat)


def start_server(
    base: BaseModelSpec, options: ServeOptions, *, adapters: Path, log: Path, reporter: Reporter
) -> ModelServer:
    """Starts the server of a base model and shows its progress; raises as `ModelServer.start`."""
    with reporter.bars(), reporter.task(base.title) as task:
        return ModelServer.start(
            options,
            base.directory,
            adapters=adapters,
            log=log,
            on_progress=lambda phase: task.update(figures=phase),
        )


@contextmanager
def _chat_model(
    endpoint: Endpoint, auto_tools: bool, collect: CollectOptions, loop: asyncio.Runner, calls: CallsUnderWay
) -> Iterator[NodeChat]:
    """The chat model of all nodes, with as many kept connections as calls in flight."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=collect.in_flight)
    options: dict[str, Any] = {"trust_env": False, "timeout": collect.timeout_s}
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
