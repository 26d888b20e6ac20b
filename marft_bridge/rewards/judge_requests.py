"""A request to a judge -> what it replied, read by the caller's rule, and the tokens that it cost.

Every try has marks and a nonce of its own. Invariants: a reply in any other form than the rule's is sent for again, and
is no verdict after the last try; the key goes to the judge's address only.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from marft_bridge.common.certificates import trusted_authorities
from marft_bridge.common.errors import GraphError
from marft_bridge.rewards.contract import Absent, ModelAddress
from trace_store.json_text import read_json

if TYPE_CHECKING:
    import httpx  # imported late at run time: it takes longer to load than a configuration to read

_MAX_REPLY = 1 << 20  # bytes
_REFUSES_ALL = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)
_REFUSES_THIS = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)

NoVerdictKind = Literal["late", "failed", "unreadable"]
T = TypeVar("T")


class NoVerdict(Absent):
    """The judge gave none. `kind`: it did not reply in time; was not reached, or refused; replied in another form."""

    def __init__(self, kind: NoVerdictKind, reason: str) -> None:
        super().__init__(reason)
        self.kind: NoVerdictKind = kind


class _BadStatusError(ValueError):
    """An error of the judge's server that may pass."""


class RequestLimits(Protocol):
    """How a judge is asked."""

    @property
    def max_tokens(self) -> int:
        """Of the reply."""

    @property
    def retries(self) -> int:
        """How many times a request is sent again."""

    @property
    def call_s(self) -> float:
        """Seconds for one reply."""


@dataclass(frozen=True, slots=True)
class Verdict(Generic[T]):
    """What a reply said. Tokens are those of all tries; None where the judge did not count one of them."""

    content: T
    prompt_tokens: int | None
    sampled_tokens: int | None


async def request_verdict(
    options: RequestLimits,
    address: ModelAddress,
    to_messages: Callable[[str, str], list[dict[str, str]]],
    read: Callable[[str, str], T],
    http: httpx.AsyncClient | None = None,
    *,
    to_schema: Callable[[str], dict[str, Any]] | None = None,
) -> Verdict[T]:
    """Asks until a reply can be read.

    Args:
        to_messages: mark and nonce of a try -> its messages.
        read: reply and nonce -> what it says; raises ValueError for a reply in another form.
        http: what asks, of `judge_client`, for who asks often; None makes one.
        to_schema: nonce of a try -> the JSON schema that the judge's server holds the reply to; None asks for none.

    Raises:
        NoVerdict: all tries failed, or the judge refuses this request.
        GraphError: the judge refuses every request.
    """
    if http is None:
        async with judge_client(options.call_s) as own_http:
            return await request_verdict(options, address, to_messages, read=read, http=own_http, to_schema=to_schema)
    import httpx

    kind: NoVerdictKind = "failed"
    problem = ""
    counts: list[tuple[int | None, int | None]] = []
    for attempt in range(options.retries + 1):
        if attempt:
            await asyncio.sleep(min(0.25 * 2**attempt, 8.0))
        mark, nonce = secrets.token_hex(12), secrets.token_hex(12)
        body = {
            "model": address.model,
            "messages": to_messages(mark, nonce),
            "temperature": 0,
            "max_tokens": options.max_tokens,
        }
        if to_schema is not None:
            form = {"name": "verdict", "strict": True, "schema": to_schema(nonce)}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        counts.append((None, None))  # what a try costs that brings no reply, nobody knows
        try:
            reply, counts[-1] = await asyncio.wait_for(_fetch_reply(http, address, body), options.call_s)
            return Verdict(read(reply, nonce), _sum(counts, 0), _sum(counts, 1))
        except TimeoutError:
            kind, problem = "late", f"no reply in {options.call_s:g} s"
        except httpx.TimeoutException as error:
            kind, problem = "late", type(error).__name__
        except (httpx.HTTPError, _BadStatusError) as error:
            kind, problem = "failed", str(error) if isinstance(error, _BadStatusError) else type(error).__name__
        except httpx.InvalidURL as error:
            raise GraphError(f"the judge's address {address.base_url!r} is none: {error}") from error
        except ValueError as error:
            kind, problem = "unreadable", str(error)
    times = f"{options.retries + 1} times" if options.retries else "once"
    raise NoVerdict(kind, f"the judge gave no score: {problem} (asked {times})")


def judge_client(timeout_s: float) -> httpx.AsyncClient:
    """What asks a judge. A proxy of the environment sees neither key nor texts, and redirects are not followed."""
    import httpx

    # Idle connections are closed before vLLM closes them, after 5 s: a request that is sent while it does would fail.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=2.0)
    return httpx.AsyncClient(timeout=timeout_s, trust_env=False, verify=trusted_authorities(), limits=limits)


def json_objects(text: str) -> list[dict[str, Any]]:
    """The outermost JSON objects in a text, which may hold anything else besides."""
    decoder, objects, start = json.JSONDecoder(), [], text.find("{")
    tries = 0
    while start >= 0 and tries < 100:  # each try may read to the end of the text
        tries += 1
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            objects.append(value)
        start = text.find("{", end)
    return objects


def _sum(counts: list[tuple[int | None, int | None]], index: int) -> int | None:
    numbers = [count[index] for count in counts]
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


async def _fetch_reply(
    http: httpx.AsyncClient, address: ModelAddress, body: Mapping[str, Any]
) -> tuple[str, tuple[int | None, int | None]]:
    """The text of the judge's message, and its prompt and sampled tokens.

    Raises:
        ValueError: the reply has another form, or a passing error (_BadStatusError): it may be asked again.
        NoVerdict: the judge refuses this request.
        GraphError: the judge refuses every request.
    """
    headers = {"Authorization": f"Bearer {address.api_key}"} if address.api_key else {}
    url = f"{address.base_url.rstrip('/')}/chat/completions"
    async with http.stream("POST", url, json=body, headers=headers) as response:
        content = bytearray()
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > _MAX_REPLY:
                raise ValueError("a reply of more than a megabyte")
        status = response.status_code
    if status in _REFUSES_ALL:
        error_text = " ".join(bytes(content[:300]).decode("utf-8", errors="replace").split())
        raise GraphError(f"the judge at {address.base_url} refuses every request with {status}: {error_text}")
    if status in _REFUSES_THIS:  # such as a text that is longer than its context: asking again changes nothing
        raise NoVerdict("failed", f"the judge refuses the request with status {status}")
    if status != HTTPStatus.OK:
        raise _BadStatusError(f"status {status}")
    try:
        completion = read_json(content)
        text = completion["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        raise ValueError("a reply that is no chat completion") from None
    if not isinstance(text, str):
        raise ValueError("a reply without text")  # noqa: TRY004 - the server's, like every other reply
    usage = completion.get("usage")
    numbers = [usage.get(key) if isinstance(usage, dict) else None for key in ("prompt_tokens", "completion_tokens")]
    prompt, sampled = (number if type(number) is int and number >= 0 else None for number in numbers)
    return text, (prompt, sampled)
