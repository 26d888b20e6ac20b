"""OpenAI requests on loopback -> the team that each belongs to, and the answer back, chunk by chunk.

    POST /v1/chat/completions, /v1/completions      `model` is the name of a node
    GET  /v1/models                                 the nodes
    GET  /health                                    without a key
    GET  /marft/live                                counts

Invariants: no body is read without the key, and none beyond a limit; a request is answered by the team of its run or
of its key, and by the base team, counted, where it has neither, or by a hosted model where that team's answer is not
good enough (`fallback`); a client that disconnects cancels the engine's work; a failure is an error in OpenAI's form.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from marft_bridge.common.json_memory import is_json_within
from marft_bridge.live.calls import Call, LiveRecorder, LiveRequest
from marft_bridge.live.counts import LiveCounts, VariantCounts
from marft_bridge.live.fallback import Fallback, HeldAnswer, Rejection
from marft_bridge.live.identity import RequestIdentity, request_to_identity
from marft_bridge.live.mirror import Mirror
from marft_bridge.live.split import BASE, CANDIDATE, Split, key_to_variant
from marft_bridge.live.teams import Team
from marft_bridge.live.upstream import EngineFailed, Upstream, read_answer
from marft_bridge.live.wire import (
    CHAT,
    COMPLETION,
    Answer,
    AnswerOptions,
    EventSplitter,
    body_to_engine,
    body_to_hosted,
)
from trace_store.json_text import read_json

MAX_BODY_BYTES = 16 << 20  # bytes
MAX_PARSED_BYTES = 256 << 20  # memory that a body may take to be parsed
BODY_TIMEOUT_S = 30.0  # for a body to arrive
VARIANT_HEADER, EPISODE_HEADER, FALLBACK_HEADER = "x-marft-variant", "x-marft-episode", "x-marft-fallback"
_CLIENT_GONE = "ClientGone: the client went away, or the proxy stopped"
_RELAYED_HEADERS = ("content-type", "retry-after")


class _Refused(Exception):  # noqa: N818 - an answer, not an error
    def __init__(self, status: int, code: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.code = status, code


class _ClientGone(Exception):  # noqa: N818 - a state, not an error
    """The client has disconnected."""


@dataclass(frozen=True, slots=True)
class LivePlan:
    """The teams that traffic is split between, and the rule."""

    teams: dict[str, Team]  # by variant, base and candidate
    split: Split
    salt: bytes
    keys: tuple[str, ...]  # a request needs one of them
    warn: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Rejected:
    """An answer of the local model that the client does not get."""

    answer: Answer
    rejection: Rejection


class Proxy:
    """The requests of one app. For one event loop."""

    def __init__(
        self,
        plan: LivePlan,
        upstream: Upstream,
        recorder: LiveRecorder,
        counts: LiveCounts,
        mirror: Mirror | None,
        fallback: Fallback | None,
    ) -> None:
        self._plan, self._upstream, self._recorder, self._fallback = plan, upstream, recorder, fallback
        self._counts, self._mirror = counts, mirror
        self._keys = [key.encode() for key in plan.keys]
        self._nodes = list(plan.teams[BASE].versions)

    def app(self) -> ASGIApp:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route(CHAT, self._generate, methods=["POST"]),
                Route(COMPLETION, self._generate, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/marft/live", self._live, methods=["GET"]),
            ],
            exception_handlers={_Refused: self._answer_refusal, 404: _no_route, 405: _no_route},
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
        report = {
            "split": {BASE: self._plan.split.base, CANDIDATE: self._plan.split.candidate},
            "teams": {name: team.to_json() for name, team in self._plan.teams.items()},
            **self._counts.to_json(),
            "mirror_waiting": self._mirror.waiting if self._mirror is not None else None,
            "not_recorded": {"calls": self._recorder.failures, "spans": self._recorder.lost_spans},
        }
        return JSONResponse(report)

    async def _generate(self, request: Request) -> ASGIApp:
        self._check_key(request)
        body = await _read_body(request)
        node = body.get("model")
        if not isinstance(node, str) or node not in self._nodes:
            node_names = ", ".join(self._nodes)
            raise _Refused(404, "model_not_found", f"the model {node!r:.80} does not exist; nodes here: {node_names}")
        identity = request_to_identity(request.headers, body)
        return _Forward(
            self, LiveRequest(request.url.path, node, self._choose_team(identity), body=body, identity=identity)
        )

    # -- rules ------------------------------------------------------------------------------------------------

    def _check_key(self, request: Request) -> None:
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        sent_key = credentials.strip().encode("utf-8", "replace")
        matches = [
            hmac.compare_digest(sent_key, key) for key in self._keys
        ]  # every key: the time must not tell which matched
        if scheme.lower() != "bearer" or not any(matches):
            raise _Refused(401, "invalid_api_key", "the bearer key is missing or wrong")

    def _choose_team(self, identity: RequestIdentity) -> Team:
        self._counts.keys[identity.key_source] += 1
        # An open run keeps its team, even where its nodes do not all send the same key.
        run_team = self._recorder.find_team(identity.run_key)
        if run_team is not None:
            return run_team
        if identity.key is None:
            if self._counts.keys[""] == 1:
                self._plan.warn(
                    "a request names neither session, user nor trace, so base answers it: nodes of one run must not "
                    "be answered by two teams (docs/serving.md says how to send a key); said once, counted in status"
                )
            return self._plan.teams[BASE]
        return self._plan.teams[key_to_variant(self._plan.salt, identity.key, self._plan.split)]

    def _answer_refusal(self, _request: Request, refused: Exception) -> Response:
        assert isinstance(refused, _Refused)
        self._counts.refused[refused.code] += 1
        headers = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}}.get(refused.status)
        return JSONResponse(_error_to_json(refused.code, str(refused), refused.status), refused.status, headers)

    # -- one answer -------------------------------------------------------------------------------------------

    def counts_of(self, variant: str) -> VariantCounts:
        """The counts of a variant."""
        return self._counts.variants[variant]

    async def relay(self, request: LiveRequest, send: Send) -> None:
        """Sends the request to the engine and its answer to the client. Cancelled when the client disconnects."""
        counts, began = self.counts_of(request.team.name), time.monotonic()
        counts.requests += 1
        counts.in_flight += 1
        fallback, call = self._fallback, self._recorder.begin(request)
        hosted_model = fallback.models.get(request.node) if fallback is not None else None
        try:
            if fallback is None or hosted_model is None:
                await self._answer(request, call, send, began=began)
                return
            held = fallback.hold(request, send)
            rejected = await self._answer(request, call, send, began=began, held=held)
            self._count_unjudged(held, counts)
            if rejected is not None:
                rejection = rejected.rejection
                counts.fallbacks[rejection.reason] += 1
                hosted_request = replace(request, hosted_model=hosted_model, replaced_call=call)
                hosted_call = self._recorder.begin(hosted_request)
                error = f"FellBack: {rejection.reason}: {rejection.sentence}"
                self._recorder.end(call, rejected.answer, error, is_replaced=hosted_call is not None)
                await self._answer(hosted_request, hosted_call, send, began=began)
        finally:
            counts.in_flight -= 1

    async def _answer(
        self, request: LiveRequest, call: Call | None, send: Send, *, began: float, held: HeldAnswer | None = None
    ) -> _Rejected | None:
        """One exchange with a model. With `held` the answer goes out once it is known to be good.

        Returns:
            What is to be replaced, whose call is not ended; None where the client has its answer.
        """
        upstream, body, answer_options = self._to_exchange(request)
        answer = Answer(answer_options)
        relay = _Relay(send if held is None else held.send, request, self.counts_of(request.team.name), began=began)
        relay.episode = call.episode_id if call is not None else None
        relay.is_held_whole = held is not None and held.is_held_whole
        error: str | None = _CLIENT_GONE
        rejected: _Rejected | None = None
        try:
            async with nullcontext() if held is None else held.deadline():
                error = await self._exchange(upstream, request.path, body, relay=relay, answer=answer)
            if held is not None and (rejection := await held.check(answer, error)) is not None:
                rejected = _Rejected(answer, rejection)
            elif held is not None:
                await held.release()
        except asyncio.CancelledError:
            is_sent = held is None or held.is_released
            if relay.is_streamed and is_sent:  # a client may close as soon as it has read `[DONE]`
                error = answer.stream_error
            else:
                if not is_sent:
                    error, relay.is_complete = _CLIENT_GONE, False
                self.counts_of(request.team.name).clients_left += 1
            raise
        finally:
            if rejected is None:
                self._end_answer(request, call, answer, error=error, relay=relay)
        return rejected

    def _count_unjudged(self, held: HeldAnswer, counts: VariantCounts) -> None:
        if held.unjudged is None:
            return
        reason = held.unjudged.reason
        if not any(variant.unjudged[reason] for variant in self._counts.variants.values()):
            self._plan.warn(
                f"an answer has no score of the judge: {held.unjudged.sentence}; fallback.judge.unjudged says whose "
                f"answer goes out then; said once, counted as {reason} in status"
            )
        counts.unjudged[reason] += 1

    def _to_exchange(self, request: LiveRequest) -> tuple[Upstream, dict[str, Any], AnswerOptions]:
        """Who is asked, what is sent, and what the client gets of the answer."""
        if self._fallback is not None and request.hosted_model is not None:
            return self._fallback.upstream, *body_to_hosted(request.body, request.hosted_model)
        served_name = request.team.served_names[request.node]
        return self._upstream, *body_to_engine(request.path, request.body, served_name)

    async def _exchange(
        self, upstream: Upstream, path: str, body: Mapping[str, Any], *, relay: _Relay, answer: Answer
    ) -> str | None:
        """Relays one answer; returns the error as `Type: text`, None for an answer without one."""
        try:
            async with upstream.post(path, body) as response:
                return await relay.relay_answer(response, answer)
        except EngineFailed as failure:
            await relay.relay_failure(failure)
            return f"EngineFailed: {failure}"

    def _end_answer(
        self, request: LiveRequest, call: Call | None, answer: Answer, *, error: str | None, relay: _Relay
    ) -> None:
        counts = self.counts_of(request.team.name)
        if relay.is_complete:
            counts.errors += error is not None
            if error is None:
                counts.latency_s.append(time.monotonic() - relay.began)
        self._recorder.end(call, answer, error)
        self._offer_to_mirror(request, call, error)

    def _offer_to_mirror(self, request: LiveRequest, call: Call | None, error: str | None) -> None:
        if self._mirror is not None and request.team.name == BASE and error is None:
            self._mirror.offer(call)


class _Forward:
    """An ASGI response: one relayed request, cancelled when the client disconnects."""

    def __init__(self, proxy: Proxy, request: LiveRequest) -> None:
        self._proxy, self._request = proxy, request

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(_ClientGone):
            await _run_unless_disconnected(receive, self._proxy.relay(self._request, send))


class _Relay:
    """The engine's answer on its way to the client."""

    def __init__(self, send: Send, request: LiveRequest, counts: VariantCounts, began: float) -> None:
        self._send, self._request, self._counts, self.began = send, request, counts, began
        self._has_started = False
        self.is_held_whole = False  # no piece goes out before the last
        self.is_complete = False  # the answer is known to its end, sent or about to be
        self.is_streamed = False  # the last event of a whole stream was sent
        self.episode: str | None = None

    async def relay_answer(self, response: Any, answer: Answer) -> str | None:
        """Passes the answer on; returns the error as `Type: text`, None for an answer without one."""
        headers = [(name, response.headers[name]) for name in _RELAYED_HEADERS if name in response.headers]
        if response.status_code == 200 and answer.options.stream:
            return await self._stream(response, answer, headers)
        content = await read_answer(response)
        error = None
        if response.status_code == 200:
            content = answer.body_to_client(content)
            error = f"Unreadable: {answer.error}" if answer.error is not None else None
        else:
            error = f"HTTPStatus: {response.status_code}"
        await self._send_whole(response.status_code, content, headers)
        return error

    async def relay_failure(self, failure: EngineFailed) -> None:
        """Sends an error to the client: as the answer, or, where one has begun, as the last event of its stream."""
        content = json.dumps(_error_to_json(failure.code, str(failure), failure.status)).encode()
        if not self._has_started:
            await self._send_whole(failure.status, content, [("content-type", "application/json")])
            return
        self.is_complete = True
        await self._send_piece(b"data: " + content + b"\n\n", last=True)

    async def _stream(self, response: Any, answer: Answer, headers: Sequence[tuple[str, str]]) -> str | None:
        splitter = EventSplitter()
        async for piece in response.aiter_raw():
            for event in splitter.feed(piece):
                client_event = answer.event_to_client(event)
                await self._begin_stream(headers)
                if client_event:
                    await self._send_piece(client_event)
                self.is_streamed = self.is_complete = answer.is_complete
        last_piece = splitter.rest
        if not answer.is_complete and last_piece:  # a server may end without a blank line
            last_piece = answer.event_to_client(last_piece)
        if not answer.is_complete:  # the connection ended where a stream does not
            raise EngineFailed(502, "engine_unreachable", "the model server ended the stream before its end")
        await self._begin_stream(headers)
        self.is_streamed = self.is_complete = True
        await self._send_piece(last_piece, last=True)
        return answer.stream_error

    async def _begin_stream(self, headers: Sequence[tuple[str, str]]) -> None:
        if not self._has_started:
            await self._send_start(200, headers)
            if not self.is_held_whole:
                self._counts.first_piece_s.append(time.monotonic() - self.began)

    async def _send_whole(self, status: int, content: bytes, headers: Sequence[tuple[str, str]]) -> None:
        await self._send_start(status, [*headers, ("content-length", str(len(content)))])
        self.is_complete = True
        await self._send_piece(content, last=True)

    async def _send_start(self, status: int, headers: Sequence[tuple[str, str]]) -> None:
        self._has_started = True
        all_headers = [*headers, (VARIANT_HEADER, self._request.team.name)]
        if self._request.hosted_model is not None:
            all_headers.append((FALLBACK_HEADER, self._request.hosted_model))
        if self.episode is not None:
            all_headers.append((EPISODE_HEADER, self.episode))
        encoded_headers = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in all_headers]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded_headers})

    async def _send_piece(self, content: bytes, *, last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": not last})


async def _run_unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work`; cancels it and raises _ClientGone when the client disconnects first."""
    work_task, disconnect_task = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((work_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise _ClientGone
        work_task.result()
    finally:
        for task in (work_task, disconnect_task):
            task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request) -> dict[str, Any]:
    too_large = _Refused(413, "too_large", f"a body of more than {MAX_BODY_BYTES} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                content += piece
                if len(content) > MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError:
        raise _Refused(408, "timeout", f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    if not is_json_within(bytes(content), MAX_PARSED_BYTES):
        raise _Refused(413, "too_large", f"a body that would take more than {MAX_PARSED_BYTES >> 20} MiB of memory")
    try:
        body = read_json(content)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise _Refused(400, "invalid_json", "the body is no JSON object")
    return body


async def _no_route(request: Request, error: Exception) -> Response:
    status = int(getattr(error, "status_code", 404))
    routes = f"POST {CHAT} or {COMPLETION}, GET /v1/models, /health or /marft/live"
    return JSONResponse(
        _error_to_json("unknown_url", f"{request.method} {request.url.path:.80}: {routes}", status), status
    )


def _error_to_json(code: str, reason: str, status: int) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": reason, "type": kind, "param": None, "code": code}}
