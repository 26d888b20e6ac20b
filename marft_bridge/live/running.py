"""A plan for live traffic -> a proxy that listens on loopback in a thread of its own, until it is stopped.

Invariants: it listens on 127.0.0.1 only; when `stop` has returned, no connection and no task of it is left, and all
that was answered is in the journal. Why a thread: the command's own thread watches the engine and takes Ctrl-C.
"""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

import uvicorn

from marft_bridge.errors import ServingError
from marft_bridge.live.calls import LiveRecorder
from marft_bridge.live.counts import LiveCounts, VariantCounts
from marft_bridge.live.mirror import Mirror
from marft_bridge.live.proxy import LivePlan, Proxy
from marft_bridge.live.split import BASE, CANDIDATE, MIRRORED
from marft_bridge.live.upstream import Upstream
from marft_bridge.loopback import ADDRESS, SayingServer, port_to_socket

SETTLE_EVERY_S = 0.5
GRACE_S = 5  # for answers that are under way when it is stopped
KEEP_ALIVE_S = 75  # longer than clients keep a connection, so that they do not reuse one that is just being closed
MOST_HEADERS = 64 << 10  # bytes of a request's headers
MOST_AT_ONCE = 1024  # connections; beyond them 503


class RunningProxy:
    """A proxy from `start` (or the start of the block) to `stop`. `engine` is address, ending with /v1, and key."""

    def __init__(
        self, plan: LivePlan, engine: tuple[str, str], recorder: LiveRecorder, port: int, *, mirrored: bool
    ) -> None:
        """Takes the port, 0 for a free one. Raises ServingError when it is taken."""
        self._plan, self._engine, self._recorder, self._mirrored = plan, engine, recorder, mirrored
        self._socket = port_to_socket(port, "serve", ServingError)
        self.port = int(self._socket.getsockname()[1])
        variants = (BASE, CANDIDATE, *((MIRRORED,) if mirrored else ()))
        self._counts = LiveCounts({name: VariantCounts() for name in variants})
        self._server: uvicorn.Server | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="live-proxy", daemon=True)

    @property
    def base_url(self) -> str:
        """What an OpenAI client is given."""
        return f"http://{ADDRESS}:{self.port}/v1"

    def __enter__(self) -> RunningProxy:
        self._thread.start()
        self._ready.wait()
        self.check()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join()

    def check(self) -> None:
        """Raises ServingError when it does not answer any more."""
        if self._failure is not None:
            raise ServingError(f"the live proxy failed: {type(self._failure).__name__}: {self._failure}")
        if not self._thread.is_alive():
            raise ServingError("the live proxy ended")

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - told to the thread that watches
            self._failure = error
        finally:
            self._ready.set()
            self._socket.close()

    async def _serve(self) -> None:
        upstream = Upstream(*self._engine)
        mirror = None
        if self._mirrored:
            mirror = Mirror(self._plan.teams[CANDIDATE], upstream, self._recorder, self._counts)
        proxy = Proxy(self._plan, upstream, self._recorder, self._counts, mirror)
        config = uvicorn.Config(
            proxy.app(),
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MOST_HEADERS,
            limit_concurrency=MOST_AT_ONCE,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = server = SayingServer(config, self._ready.set)
        beside = [asyncio.create_task(self._settle())]
        if mirror is not None:
            beside.append(asyncio.create_task(mirror.work()))
        try:
            await server.serve(sockets=[self._socket])
        finally:
            for task in beside:
                task.cancel()
            # Answers that were cut off note their end, before what records them is closed.
            await asyncio.gather(*beside, *server.server_state.tasks, return_exceptions=True)
            await upstream.aclose()
            self._recorder.close()

    async def _settle(self) -> None:
        while True:
            await asyncio.sleep(SETTLE_EVERY_S)
            self._recorder.settle()
