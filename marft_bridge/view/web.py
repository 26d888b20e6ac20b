"""Requests of a browser on this machine -> pages, for holders of the access token.

    GET /...?token=...    sets the session cookie and redirects to the same address without the token
    GET /, /episodes, /run, /episode, /pair, /training, /comparison, /report.html    pages
    GET /training.json                                                               the curves of /training
    GET /events?stamp=...                                                            server-sent: something is new
    GET /style.css, /static/...                                                      what pages load

Invariants: a request is refused when its Host header is not the server's own (which stops DNS rebinding), when it has
no session cookie, or when its method is not GET or HEAD; no response may be framed, cached, or read by another origin;
no page can load or send anything elsewhere. No request changes anything.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import quote, urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from marft_bridge.common.errors import USER_ERRORS, ConfigError
from marft_bridge.common.loopback_server import Limits, LoopbackServer
from marft_bridge.view.pages import STATIC_FILES, NotFoundError, Pages
from marft_bridge.view.query import BadQueryError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none';"
    " frame-ancestors 'none'"
)
# With its own origin, so that its links to episodes take the cookie along; without a script there is no use for it.
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'; sandbox allow-same-origin"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LIMITS = Limits(connections=64, grace_s=2)
LOOK_EVERY_S = 1.0  # at the files, for a browser that waits for something new
STREAM_CHECK_S = 0.2  # whether the server is being stopped
_QUIET_S = 15.0  # after which a stream says that it is still there
_MAX_ADDRESS_BYTES = 8192  # path and query
_OPEN_HINT = "Open the address that `marft-bridge view` printed: it holds the token."


def pages_to_server(pages: Pages, port: int, token: str, one_time_token: str | None) -> LoopbackServer:
    """The pages as a server, which binds its port (0: a free one) now and answers inside its `with` block.

    Args:
        token, one_time_token: see `pages_to_app`.

    Raises:
        ConfigError: the port is taken.
    """

    @asynccontextmanager
    async def lifespan(bound_port: int) -> AsyncIterator[ASGIApp]:
        yield pages_to_app(
            pages, bound_port, token, one_time_token=one_time_token, is_stopping=lambda: server.is_stopping
        )

    server = LoopbackServer(
        lifespan, port, title="view: the server", command="view", error_class=ConfigError, limits=LIMITS
    )
    return server


def pages_to_app(
    pages: Pages,
    port: int,
    token: str,
    *,
    one_time_token: str | None = None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> ASGIApp:
    """The ASGI app of a server that listens on `port` of this machine.

    Args:
        token: lets in any browser, any number of times.
        one_time_token: lets in one browser, and none after it: for an address that others may see.
        is_stopping: whether streams should end.
    """
    page_lock = threading.Lock()  # one page at a time: `Pages` is not thread-safe, and slow pages must not add up

    def locked_endpoint(render: Callable[[QueryParams], Response]) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            with page_lock:
                return _render_or_explain(pages, lambda: render(request.query_params))

        return endpoint

    routes = {
        "/": lambda _: _page(pages.runs()),
        "/episodes": lambda query: _page(pages.episodes(query)),
        "/pair": lambda query: _page(pages.pair(query)),
        "/training": lambda query: _page(pages.training(query)),
        "/training.json": lambda query: JSONResponse(pages.training_data(query)),
        "/run": lambda query: _page(pages.run(query)),
        "/episode": lambda query: _page(pages.episode(query)),
        "/comparison": lambda _: _page(pages.comparison()),
        "/report.html": lambda _: Response(
            pages.report(), media_type="text/html", headers={"Content-Security-Policy": REPORT_POLICY}
        ),
        "/style.css": lambda _: Response(pages.style(), media_type="text/css"),
    }

    def static_file(name: str, media_type: str) -> Callable[[QueryParams], Response]:
        return lambda _: Response(pages.file(name), media_type=media_type)

    routes |= {f"/static/{name}": static_file(name, media_type) for name, media_type in STATIC_FILES.items()}

    def events(request: Request) -> Response:
        stream = _changes(pages, request.query_params.get("stamp", ""), is_stopping)
        return StreamingResponse(stream, media_type="text/event-stream")

    def not_found(_request: Request, _error: Exception) -> Response:
        return _page(pages.problem("Nothing here", "there is no such page"), 404)

    app = Starlette(
        routes=[
            *(Route(path, locked_endpoint(render), methods=["GET"]) for path, render in routes.items()),
            Route("/events", events, methods=["GET"]),
        ],
        exception_handlers={404: not_found},
    )
    return _Guard(app, port, token, one_time_token=one_time_token)


async def _changes(pages: Pages, stamp: str, is_stopping: Callable[[], bool]) -> AsyncIterator[str]:
    """A message whenever the pages would show something new, until the server or the browser ends it."""
    yield "retry: 2000\n\n"
    looked_at = spoken_at = -math.inf
    while not is_stopping():
        now = time.monotonic()
        if now - looked_at >= LOOK_EVERY_S:
            looked_at = now
            newest = await run_in_threadpool(pages.stamp)
            if newest != stamp:
                stamp, spoken_at = newest, now
                yield f"event: change\ndata: {stamp}\n\n"
            elif now - spoken_at >= _QUIET_S:
                spoken_at = now
                yield ": still here\n\n"  # so that a browser that has gone is noticed
        await asyncio.sleep(STREAM_CHECK_S)


def _page(html: str, status: int = 200) -> Response:
    # A text of the store may hold lone surrogates, which UTF-8 cannot encode.
    return Response(html.encode("utf-8", "backslashreplace"), status, media_type="text/html")


def _render_or_explain(pages: Pages, render: Callable[[], Response]) -> Response:
    """The page, or the one that gives the reason: 400 a bad query, 404 nothing there, 503 an unreadable store."""
    try:
        return render()
    except BadQueryError as error:
        return _page(pages.problem("This address makes no sense", str(error)), 400)
    except NotFoundError as error:
        return _page(pages.problem("Nothing here", str(error)), 404)
    except USER_ERRORS as error:
        return _page(pages.problem("The store cannot be read now", str(error)), 503)


class _Guard:
    """ASGI middleware: passes a permitted request on, refuses any other, and adds _HEADERS to every response."""

    def __init__(self, app: ASGIApp, port: int, token: str, one_time_token: str | None) -> None:
        self._app, self._token, self._one_time_token = app, token, one_time_token
        self._session = secrets.token_urlsafe(32)
        self._host_names = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}
        self._cookie = f"marft_view_{port}"  # cookies ignore the port: without it two servers would share one

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no websockets, and nothing to start or end
            return
        response = self._refusal(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                default_headers = {key.lower(): value for key, value in _HEADERS.items()}
                present_names = {name.decode("latin-1").lower() for name, _ in message["headers"]}
                message["headers"] += [
                    (name.encode(), value.encode())
                    for name, value in default_headers.items()
                    if name not in present_names
                ]
            await send(message)

        await (self._app if response is None else response)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """The response to a request that is not permitted, or that carries a token; None for one to pass on."""
        request = Request(scope)
        headers = Headers(scope=scope)
        if headers.getlist("host") not in [[name] for name in self._host_names]:
            return PlainTextResponse("This server answers under its own name only.\n", 421)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("Nothing here can be changed.\n", 405, {"Allow": "GET, HEAD"})
        if len(scope["raw_path"]) + len(scope["query_string"]) > _MAX_ADDRESS_BYTES:
            return PlainTextResponse("The address is too long.\n", 414)
        if "token" in request.query_params:
            return self._set_cookie(request)
        if not _equal_in_constant_time(_cookies(headers).get(self._cookie, ""), self._session):
            return PlainTextResponse(f"{_OPEN_HINT}\n", 403)
        return None

    def _set_cookie(self, request: Request) -> Response:
        """Exchanges a token for the session cookie, and redirects to the address without the token."""
        tokens = request.query_params.getlist("token")
        if len(tokens) != 1 or not (
            _equal_in_constant_time(tokens[0], self._token) or self._use_one_time_token(tokens[0])
        ):
            return PlainTextResponse(f"The token is wrong. {_OPEN_HINT}\n", 403)
        remaining_query = urlencode(
            [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
        )
        path = quote("/" + request.url.path.lstrip("/\\"))  # never `//name`, which is another host
        response = RedirectResponse(f"{path}?{remaining_query}" if remaining_query else path, 303)
        response.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", path="/")
        return response

    def _use_one_time_token(self, token: str) -> bool:
        """Whether `token` is the one-time token; if so it is spent."""
        if self._one_time_token is None or not _equal_in_constant_time(token, self._one_time_token):
            return False
        self._one_time_token = None
        return True


def _equal_in_constant_time(text: str, expected: str) -> bool:
    return hmac.compare_digest(text.encode("utf-8", "replace"), expected.encode())


def _cookies(headers: Headers) -> dict[str, Any]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(headers.get("cookie", "")).items()}
    except CookieError:
        return {}
