"""OpenAI requests on loopback -> the team that each belongs to, and the answer back, chunk by chunk.

    POST /v1/chat/completions, /v1/completions      `model` is the name of a node
    GET  /v1/models                                 the nodes
    GET  /health                                    without a key
    GET  /marft/live                                counts

Invariants: no body is kept without the key, and none beyond a limit; a request is answered by one team, the one that
its key or its run has, and by the base team, counted, where it has neither; a client that goes away ends the engine's
work; what fails is an error in OpenAI's form. Teams, spans and numbers are kept elsewhere.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from marft_bridge.live.calls import Asked, Call, LiveRecorder
from marft_bridge.live.counts import LiveCounts, VariantCounts
from marft_bridge.live.mirror import Mirror
from marft_bridge.live.split import BASE, CANDIDATE, Split, key_to_variant
from marft_bridge.live.sticky import Sticky, request_to_sticky
from marft_bridge.live.teams import Team
from marft_bridge.live.upstream import EngineFailed, Upstream
from marft_bridge.live.wire import CHAT, COMPLETION, Answer, Events, body_to_engine

MOST_BODY = 16 << 20  # bytes
BODY_S = 30.0  # for a body to arrive
VARIANT_HEADER, EPISODE_HEADER = "x-marft-variant", "x-marft-episode"
_PASSED_ON = ("content-type", "retry-after")


class _Refused(Exception):  # noqa: N818 - an answer, not an error
    def __init__(self, status: int, code: str, why: str) -> None:
        super().__init__(why)
        self.status, self.code = status, code


class _Gone(Exception):  # noqa: N818 - a state, not an error
    """The client is not there any more."""


@dataclass(frozen=True, slots=True)
class LivePlan:
    """What traffic is shared out between, and by what rule."""

    teams: dict[str, Team]  # by variant, base and candidate
    split: Split
    salt: bytes
    keys: tuple[str, ...]  # any of them lets a request in
    warn: Callable[[str], None]


class Proxy:
    """The requests of one app. For one event loop."""

    def __init__(
        self, plan: LivePlan, upstream: Upstream, recorder: LiveRecorder, counts: LiveCounts, mirror: Mirror | None
    ) -> None:
        self._plan, self._upstream, self._recorder = plan, upstream, recorder
        self._counts, self._mirror = counts, mirror
        self._keys = [key.encode() for key in plan.keys]
        self._nodes = list(plan.teams[BASE].versions)

    def app(self) -> ASGIApp:
        """For an ASGI server."""
        return Starlette(
            routes=[
                Route(CHAT, self._generate, methods=["POST"]),
                Route(COMPLETION, self._generate, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/marft/live", self._live, methods=["GET"]),
            ],
            exception_handlers={_Refused: self._refusal, 404: _no_route, 405: _no_route},
        )

    # -- routes -----------------------------------------------------------------------------------------------

    async def _health(self, _request: Request) -> Response:
        return Response()

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        cards = [{"id": node, "object": "model", "created": 0, "owned_by": "marft-bridge"} for node in self._nodes]
        return JSONResponse({"object": "list", "data": cards})

    async def _live(self, request: Request) -> Response:
        self._check_key(request)
        told = {
            "split": {BASE: self._plan.split.base, CANDIDATE: self._plan.split.candidate},
            "teams": {name: team.to_json() for name, team in self._plan.teams.items()},
            **self._counts.to_json(),
            "mirror_waiting": self._mirror.waiting if self._mirror is not None else None,
            "not_recorded": {"calls": self._recorder.failures, "spans": self._recorder.lost},
        }
        return JSONResponse(told)

    async def _generate(self, request: Request) -> ASGIApp:
        self._check_key(request)
        body = await _body(request)
        node = body.get("model")
        if not isinstance(node, str) or node not in self._nodes:
            known = ", ".join(self._nodes)
            raise _Refused(404, "model_not_found", f"the model {node!r:.80} does not exist; nodes here: {known}")
        sticky = request_to_sticky(request.headers, body)
        return _Forward(self, Asked(request.url.path, node, self._team_of(sticky), body, sticky))

    # -- rules ------------------------------------------------------------------------------------------------

    def _check_key(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        sent = given.strip().encode("utf-8", "replace")
        right = [hmac.compare_digest(sent, key) for key in self._keys]  # all of them, whichever is right
        if scheme.lower() != "bearer" or not any(right):
            raise _Refused(401, "invalid_api_key", "the bearer key is missing or wrong")

    def _team_of(self, sticky: Sticky) -> Team:
        self._counts.keys[sticky.source] += 1
        # A run that goes on keeps its team, even where its nodes do not all name the same key.
        begun = self._recorder.team_of(sticky.run)
        if begun is not None:
            return begun
        if sticky.key is None:
            if self._counts.keys[""] == 1:
                self._plan.warn(
                    "a request names neither session, user nor trace, so base answers it: nodes of one run must not "
                    "be answered by two teams (docs/serving.md says how to send a key); said once, counted in status"
                )
            return self._plan.teams[BASE]
        return self._plan.teams[key_to_variant(self._plan.salt, sticky.key, self._plan.split)]

    def _refusal(self, _request: Request, refused: Exception) -> Response:
        assert isinstance(refused, _Refused)
        self._counts.refused[refused.code] += 1
        headers = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}}.get(refused.status)
        return JSONResponse(_error(refused.code, str(refused), refused.status), refused.status, headers)

    # -- one answer -------------------------------------------------------------------------------------------

    def counts_of(self, variant: str) -> VariantCounts:
        """Where the calls of a variant are counted."""
        return self._counts.variants[variant]

    async def relay(self, asked: Asked, send: Send) -> None:
        """Sends the request on, and what comes back to the client. Cancelled when the client goes away."""
        counts, began = self.counts_of(asked.team.name), time.monotonic()
        body, shown = body_to_engine(asked.path, asked.body, asked.team.served[asked.node])
        answer, relay = Answer(shown), _Relay(send, asked.team.name, counts, began)
        call = self._recorder.begin(asked)
        relay.episode = call.episode_id if call is not None else None
        counts.requests += 1
        counts.in_flight += 1
        error: str | None = "ClientGone: the client went away, or the proxy stopped"
        try:
            try:
                async with self._upstream.asked(asked.path, body) as response:
                    error = await relay.answered(response, answer)
            except EngineFailed as failed:
                error = f"EngineFailed: {failed}"
                await relay.failed(failed)
        except asyncio.CancelledError:
            if relay.streamed:  # all of it was there: a client may close as soon as it has read `[DONE]`
                error = answer.stream_error
            else:
                counts.left += 1
            raise
        finally:
            counts.in_flight -= 1
            if relay.ended:
                counts.errors += error is not None
                if error is None:
                    counts.latency_s.append(time.monotonic() - began)
            self._recorder.end(call, answer, error)
            self._offer(asked, call, error)

    def _offer(self, asked: Asked, call: Call | None, error: str | None) -> None:
        if self._mirror is not None and asked.team.name == BASE and error is None:
            self._mirror.offer(call)


class _Forward:
    """An ASGI response: one relayed request, given up when the client goes away."""

    def __init__(self, proxy: Proxy, asked: Asked) -> None:
        self._proxy, self._asked = proxy, asked

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(_Gone):
            await _unless_gone(receive, self._proxy.relay(self._asked, send))


class _Relay:
    """The engine's answer on its way to the client."""

    def __init__(self, send: Send, variant: str, counts: VariantCounts, began: float) -> None:
        self._send, self._variant, self._counts, self._began = send, variant, counts, began
        self._started = False
        self.ended = False  # nothing more is to come
        self.streamed = False  # the last event of a whole stream was sent
        self.episode: str | None = None

    async def answered(self, response: Any, answer: Answer) -> str | None:
        """Passes the answer on; gives back what went wrong, as `Type: text`."""
        headers = [(name, response.headers[name]) for name in _PASSED_ON if name in response.headers]
        if response.status_code == 200 and answer.shown.stream:
            return await self._stream(response, answer, headers)
        sent = b"".join([piece async for piece in response.aiter_raw()])
        error = None
        if response.status_code == 200:
            sent = answer.whole_to_client(sent)
            error = f"Unreadable: {answer.error}" if answer.error is not None else None
        else:
            error = f"HTTPStatus: {response.status_code}"
        await self._whole(response.status_code, sent, headers)
        return error

    async def failed(self, failed: EngineFailed) -> None:
        """Tells the client: as an answer, or, where one has begun, as the last event of its stream."""
        content = json.dumps(_error(failed.code, str(failed), failed.status)).encode()
        if not self._started:
            await self._whole(failed.status, content, [("content-type", "application/json")])
            return
        self.ended = True
        await self._piece(b"data: " + content + b"\n\n", last=True)

    async def _stream(self, response: Any, answer: Answer, headers: Sequence[tuple[str, str]]) -> str | None:
        events = Events()
        async for piece in response.aiter_raw():
            for event in events.feed(piece):
                shown = answer.event_to_client(event)
                if not self._started:
                    await self._start(200, headers)
                    self._counts.first_s.append(time.monotonic() - self._began)
                if shown:
                    await self._piece(shown)
                self.streamed = self.ended = answer.whole
        if not answer.whole:  # the connection ended where a stream does not
            raise EngineFailed(502, "engine_unreachable", "the model server ended the stream before its end")
        await self._piece(events.rest, last=True)
        return answer.stream_error

    async def _whole(self, status: int, content: bytes, headers: Sequence[tuple[str, str]]) -> None:
        await self._start(status, [*headers, ("content-length", str(len(content)))])
        self.ended = True
        await self._piece(content, last=True)

    async def _start(self, status: int, headers: Sequence[tuple[str, str]]) -> None:
        self._started = True
        told = [*headers, (VARIANT_HEADER, self._variant)]
        if self.episode is not None:
            told.append((EPISODE_HEADER, self.episode))
        coded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in told]
        await self._send({"type": "http.response.start", "status": status, "headers": coded})

    async def _piece(self, content: bytes, *, last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": not last})


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does the work; cancels it and raises _Gone when the client goes away first."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _Gone
        working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> dict[str, Any]:
    too_large = _Refused(413, "too_large", f"a body of more than {MOST_BODY} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MOST_BODY:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                content += piece
                if len(content) > MOST_BODY:
                    raise too_large
    except TimeoutError:
        raise _Refused(408, "timeout", f"the body did not arrive within {BODY_S:g} s") from None
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise _Refused(400, "invalid_json", "the body is no JSON object")
    return body


async def _no_route(request: Request, error: Exception) -> Response:
    status = int(getattr(error, "status_code", 404))
    known = f"POST {CHAT} or {COMPLETION}, GET /v1/models, /health or /marft/live"
    return JSONResponse(_error("unknown_url", f"{request.method} {request.url.path:.80}: {known}", status), status)


def _error(code: str, why: str, status: int) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": why, "type": kind, "param": None, "code": code}}
