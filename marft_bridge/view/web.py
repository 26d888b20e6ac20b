"""Requests of a browser on this machine -> pages, for whoever has the token.

    GET /...?token=...    sets the cookie and leads to the same address without the token
    GET /, /run, /episode, /comparison, /report.html, /style.css

Invariants: nothing is answered under another name than the server's own (a page elsewhere cannot have its name lead
here), without the cookie, or to another method than GET and HEAD; no answer may be framed, kept or read by another
origin; no page can load or send anything elsewhere. Nothing is changed by any request. What pages hold is not known
here.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Callable, Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import quote, urlencode

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from marft_bridge.errors import USER_ERRORS
from marft_bridge.view.pages import BadQuestionError, NotThereError, Pages

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
_LONGEST = 8192  # bytes of an address
_OPEN_IT = "Open the address that `marft-bridge view` printed: it holds the token."


def pages_to_app(pages: Pages, port: int, token: str, once: str | None = None) -> ASGIApp:
    """The ASGI app of a server that listens on `port` of this machine.

    Args:
        token: lets in whoever has it, as often as they come.
        once: lets in one browser, and nobody after it: for an address that others may see.
    """
    one_at_a_time = threading.Lock()  # a page that takes long does not take the machine

    def answered(make: Callable[[Mapping[str, str]], Response]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            with one_at_a_time:
                return _answer(pages, lambda: make(request.query_params))

        return answer

    routes = {
        "/": lambda _: _page(pages.runs()),
        "/run": lambda asked: _page(pages.run(asked)),
        "/episode": lambda asked: _page(pages.episode(asked)),
        "/comparison": lambda _: _page(pages.comparison()),
        "/report.html": lambda _: Response(
            pages.report(), media_type="text/html", headers={"Content-Security-Policy": REPORT_POLICY}
        ),
        "/style.css": lambda _: Response(pages.style(), media_type="text/css"),
    }

    def missing(_request: Request, _error: Exception) -> Response:
        return _page(pages.problem("Nothing here", "there is no such page"), 404)

    app = Starlette(
        routes=[Route(path, answered(make), methods=["GET"]) for path, make in routes.items()],
        exception_handlers={404: missing},
    )
    return _Guard(app, port, token, once)


def _page(html: str, status: int = 200) -> Response:
    # A text of the store may hold halves of letters, which no encoding has.
    return Response(html.encode("utf-8", "backslashreplace"), status, media_type="text/html")


def _answer(pages: Pages, make: Callable[[], Response]) -> Response:
    try:
        return make()
    except BadQuestionError as error:
        return _page(pages.problem("This address makes no sense", str(error)), 400)
    except NotThereError as error:
        return _page(pages.problem("Nothing here", str(error)), 404)
    except USER_ERRORS as error:
        return _page(pages.problem("The store cannot be read now", str(error)), 503)


class _Guard:
    """Lets a request in, or answers it itself."""

    def __init__(self, app: ASGIApp, port: int, token: str, once: str | None) -> None:
        self._app, self._token, self._once = app, token, once
        self._session = secrets.token_urlsafe(32)
        self._names = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}
        self._cookie = f"marft_view_{port}"  # browsers give a cookie to all ports of a name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no websockets, and nothing to start or end
            return
        answer = self._refusal(scope)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {key.lower(): value for key, value in _HEADERS.items()}
                given = {name.decode("latin-1").lower() for name, _ in message["headers"]}
                message["headers"] += [
                    (name.encode(), value.encode()) for name, value in own.items() if name not in given
                ]
            await send(message)

        await (self._app if answer is None else answer)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """None for a request that is let in."""
        request = Request(scope)
        headers = Headers(scope=scope)
        if headers.getlist("host") not in [[name] for name in self._names]:
            return PlainTextResponse("This server answers under its own name only.\n", 421)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("Nothing here can be changed.\n", 405, {"Allow": "GET, HEAD"})
        if len(scope["raw_path"]) + len(scope["query_string"]) > _LONGEST:
            return PlainTextResponse("The address is too long.\n", 414)
        if "token" in request.query_params:
            return self._enter(request)
        if not _same(_cookies(headers).get(self._cookie, ""), self._session):
            return PlainTextResponse(f"{_OPEN_IT}\n", 403)
        return None

    def _enter(self, request: Request) -> Response:
        given = request.query_params.getlist("token")
        if len(given) != 1 or not (_same(given[0], self._token) or self._used_up(given[0])):
            return PlainTextResponse(f"The token is wrong. {_OPEN_IT}\n", 403)
        rest = urlencode([(key, value) for key, value in request.query_params.multi_items() if key != "token"])
        path = quote("/" + request.url.path.lstrip("/\\"))  # never `//name`, which is another host
        answer = RedirectResponse(f"{path}?{rest}" if rest else path, 303)
        answer.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", path="/")
        return answer

    def _used_up(self, given: str) -> bool:
        if self._once is None or not _same(given, self._once):
            return False
        self._once = None
        return True


def _same(given: str, right: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), right.encode())


def _cookies(headers: Headers) -> dict[str, Any]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(headers.get("cookie", "")).items()}
    except CookieError:
        return {}
