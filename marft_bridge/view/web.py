"""Requests of a browser on this machine -> pages, for holders of the access token.

    GET /...?token=...    sets the session cookie and redirects to the same address without the token
    GET /, /run, /episode, /comparison, /report.html, /style.css

Invariants: a request is refused when its Host header is not the server's own (which stops DNS rebinding), when it has
no session cookie, or when its method is not GET or HEAD; no response may be framed, cached, or read by another origin;
no page can load or send anything elsewhere. No request changes anything.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import quote, urlencode

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from marft_bridge.common.errors import USER_ERRORS, ConfigError
from marft_bridge.common.loopback_server import Limits, LoopbackServer
from marft_bridge.view.pages import BadQueryError, NotFoundError, Pages

POLICY = "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'; sandbox"
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LIMITS = Limits(connections=64, grace_s=2)
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
        yield pages_to_app(pages, bound_port, token, one_time_token=one_time_token)

    return LoopbackServer(
        lifespan, port, title="view: the server", command="view", error_class=ConfigError, limits=LIMITS
    )


def pages_to_app(pages: Pages, port: int, token: str, one_time_token: str | None = None) -> ASGIApp:
    """The ASGI app of a server that listens on `port` of this machine.

    Args:
        token: lets in any browser, any number of times.
        one_time_token: lets in one browser, and none after it: for an address that others may see.
    """
    page_lock = threading.Lock()  # one page at a time: `Pages` is not thread-safe, and slow pages must not add up

    def locked_endpoint(render: Callable[[Mapping[str, str]], Response]) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            with page_lock:
                return _render_or_explain(pages, lambda: render(request.query_params))

        return endpoint

    routes = {
        "/": lambda _: _page(pages.runs()),
        "/run": lambda query: _page(pages.run(query)),
        "/episode": lambda query: _page(pages.episode(query)),
        "/comparison": lambda _: _page(pages.comparison()),
        "/report.html": lambda _: Response(
            pages.report(), media_type="text/html", headers={"Content-Security-Policy": REPORT_POLICY}
        ),
        "/style.css": lambda _: Response(pages.style(), media_type="text/css"),
    }

    def not_found(_request: Request, _error: Exception) -> Response:
        return _page(pages.problem("Nothing here", "there is no such page"), 404)

    app = Starlette(
        routes=[Route(path, locked_endpoint(render), methods=["GET"]) for path, render in routes.items()],
        exception_handlers={404: not_found},
    )
    return _Guard(app, port, token, one_time_token=one_time_token)


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
