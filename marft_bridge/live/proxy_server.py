"""A plan for live traffic -> the proxy as a server on loopback.

Invariant: when the server has stopped, every answered call is in the journal and no connection to the engine is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp

from marft_bridge.common.errors import ServingError
from marft_bridge.common.loopback_server import Limits, LoopbackServer
from marft_bridge.config.fallback import FallbackOptions
from marft_bridge.live.calls import LiveRecorder
from marft_bridge.live.counts import LiveCounts, VariantCounts
from marft_bridge.live.fallback import Fallback, FallbackKeys
from marft_bridge.live.mirror import Mirror
from marft_bridge.live.proxy import LivePlan, Proxy
from marft_bridge.live.split import BASE, CANDIDATE, MIRRORED
from marft_bridge.live.upstream import Upstream
from marft_bridge.model_calls.call_monitor import CallsUnderWay

CLOSE_QUIET_EVERY_S = 0.5
LIMITS = Limits(connections=1024, grace_s=5)


def proxy_server(
    plan: LivePlan,
    engine: tuple[str, str],
    recorder: LiveRecorder,
    port: int,
    *,
    mirrored: bool,
    fallback: tuple[FallbackOptions, FallbackKeys] | None = None,
    calls: CallsUnderWay | None = None,
) -> LoopbackServer:
    """The server. It binds its port now and answers inside its `with` block.

    Args:
        engine: base URL, ending with /v1, and API key.
        fallback: who answers where the engine does not, and the keys to them.
        calls: is told of the calls under way to the engine, so that somebody notices when it hangs.

    Raises:
        ServingError: the port is taken.
    """
    variants = (BASE, CANDIDATE, *((MIRRORED,) if mirrored else ()))
    counts = LiveCounts({name: VariantCounts() for name in variants})

    @asynccontextmanager
    async def lifespan(_port: int) -> AsyncIterator[ASGIApp]:
        upstream, hosted = Upstream(*engine, calls), Fallback(*fallback) if fallback is not None else None
        mirror = Mirror(plan.teams[CANDIDATE], upstream, recorder, counts=counts) if mirrored else None
        background_tasks = [asyncio.create_task(_close_quiet_runs(recorder))]
        if mirror is not None:
            background_tasks.append(asyncio.create_task(mirror.work()))
        try:
            yield Proxy(plan, upstream, recorder, counts=counts, mirror=mirror, fallback=hosted).app()
        finally:
            for task in background_tasks:
                task.cancel()
            await asyncio.gather(*background_tasks, return_exceptions=True)
            await upstream.aclose()
            if hosted is not None:
                await hosted.aclose()
            recorder.close()

    return LoopbackServer(
        lifespan, port, title="the live proxy", command="serve", error_class=ServingError, limits=LIMITS
    )


def proxy_to_base_url(server: LoopbackServer) -> str:
    """The base URL for an OpenAI client."""
    return f"{server.url}/v1"


async def _close_quiet_runs(recorder: LiveRecorder) -> None:
    while True:
        await asyncio.sleep(CLOSE_QUIET_EVERY_S)
        recorder.close_quiet_runs()
