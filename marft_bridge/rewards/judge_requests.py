"""A request to a judge -> what it replied, read by the caller's rule, and the tokens that it cost.

Every try has marks and a nonce of its own. Invariants: a reply in any other form than the rule's is sent for again, and
is Absent after the last try; the key goes to the judge's address only.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from marft_bridge.common.errors import GraphError
from marft_bridge.rewards.contract import Absent, ModelAddress

if TYPE_CHECKING:
    import httpx  # imported late at run time: it takes longer to load than a configuration to read

_MAX_REPLY = 1 << 20  # bytes
_REFUSES_ALL = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)
_REFUSES_THIS = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)

T = TypeVar("T")


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
) -> Verdict[T]:
    """Asks until a reply can be read.

    Args:
        to_messages: mark and nonce of a try -> its messages.
        read: reply and nonce -> what it says; raises ValueError for a reply in another form.

    Raises:
        Absent: all tries failed, or the judge refuses this request.
        GraphError: the judge refuses every request.
    """
    import httpx

    problem = ""
    counts: list[tuple[int | None, int | None]] = []
    headers = {"Authorization": f"Bearer {address.api_key}"} if address.api_key else {}
    # trust_env=False: a proxy from the environment must not see the key or the texts. Redirects are not followed.
    async with httpx.AsyncClient(headers=headers, timeout=options.call_s, trust_env=False) as http:
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
            counts.append((None, None))  # what a try costs that brings no reply, nobody knows
            try:
                reply, counts[-1] = await asyncio.wait_for(_fetch_reply(http, address.base_url, body), options.call_s)
                return Verdict(read(reply, nonce), _sum(counts, 0), _sum(counts, 1))
            except TimeoutError:
                problem = f"no reply in {options.call_s:g} s"
            except httpx.HTTPError as error:
                problem = type(error).__name__
            except ValueError as error:
                problem = str(error)
    times = f"{options.retries + 1} times" if options.retries else "once"
    raise Absent(f"the judge gave no score: {problem} (asked {times})")


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
    http: httpx.AsyncClient, base_url: str, body: Mapping[str, Any]
) -> tuple[str, tuple[int | None, int | None]]:
    """The text of the judge's message, and its prompt and sampled tokens.

    Raises:
        ValueError: the reply has another form, or an error that may pass; the request may be sent again.
        Absent: the judge refuses this request.
        GraphError: the judge refuses every request.
    """
    async with http.stream("POST", f"{base_url.rstrip('/')}/chat/completions", json=body) as response:
        content = bytearray()
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > _MAX_REPLY:
                raise ValueError("a reply of more than a megabyte")
        status = response.status_code
    if status in _REFUSES_ALL:
        error_text = " ".join(bytes(content[:300]).decode("utf-8", errors="replace").split())
        raise GraphError(f"the judge at {base_url} refuses every request with {status}: {error_text}")
    if status in _REFUSES_THIS:  # such as a text that is longer than its context: asking again changes nothing
        raise Absent(f"the judge refuses the request with status {status}")
    if status != HTTPStatus.OK:
        raise ValueError(f"status {status}")
    try:
        completion = json.loads(content)
        text = completion["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError("a reply that is no chat completion") from None
    if not isinstance(text, str):
        raise ValueError("a reply without text")  # noqa: TRY004 - the server's, like every other reply
    usage = completion.get("usage")
    numbers = [usage.get(key) if isinstance(usage, dict) else None for key in ("prompt_tokens", "completion_tokens")]
    prompt, sampled = (number if type(number) is int and number >= 0 else None for number in numbers)
    return text, (prompt, sampled)
