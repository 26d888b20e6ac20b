"""Questions about models and adapters -> HTTP requests to a vLLM server; its answers -> values or one clear error.

Invariant: every failure becomes a ServingError with the address and the server's own message. Adapter paths are sent
as they are given; `adapter_checks` checks them before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx

from marft_bridge.common.certificates import trusted_authorities
from marft_bridge.common.errors import ServingError
from marft_bridge.serving.key_guard import SLEEP_PATH, WAKE_PATH
from trace_store.json_text import read_json

_Value = TypeVar("_Value")
_NO_ANSWER = (httpx.HTTPError, RuntimeError)  # httpx raises the latter where `close` was called meanwhile
_WRAPPED_REASON = re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL)


class EngineClient:
    """A vLLM server's HTTP interface, as far as serving adapters needs it. Safe to share between threads.

    Args:
        url: base address without `/v1`.
        api_key: bearer token; None for a server without one.

    Raises ServingError for an address that is none, ConfigError for certificates that cannot be read.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float = 120.0) -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # trust_env=False: a proxy from the environment must not see the key or the traffic to this machine.
        try:
            self._http = httpx.Client(
                base_url=url, headers=headers, timeout=timeout_s, trust_env=False, verify=trusted_authorities()
            )
        except httpx.InvalidURL as error:
            raise ServingError(f"model server {url}: no address ({error})") from error

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def is_healthy(self) -> bool:
        """Whether the server answers that it is up. Waits two seconds at most, raises nothing."""
        try:
            return self._http.get("/health", timeout=2.0).status_code == 200
        except _NO_ANSWER:
            return False

    def can_sample(self, model: str, timeout_s: float) -> bool:
        """Whether the server samples one token within the time. Raises nothing."""
        body = {"model": model, "prompt": "The", "max_tokens": 1, "temperature": 0.0}
        try:
            return self._http.post("/v1/completions", json=body, timeout=timeout_s).is_success
        except _NO_ANSWER:
            return False

    def models(self) -> dict[str, str | None]:
        """Served name -> path of the adapter, or None for the base model."""
        return self._request_value("GET", "/v1/models", read=_cards_to_models)

    def load_adapter(self, name: str, folder: Path) -> None:
        """Serves `folder` (already checked) as `name`, which must be new: vLLM keys its prefix cache by name."""
        self._request("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> None:
        """Takes `name` out of service; its memory is reused when the engine needs it."""
        self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def sleep(self) -> None:
        """Has the engine give its memory back, once no call is under way; see `key_guard`."""
        self._request("POST", SLEEP_PATH)

    def wake(self) -> None:
        """Has a sleeping engine take its memory again."""
        self._request("POST", WAKE_PATH)

    def can_load_adapters(self) -> bool:
        """Whether the route for loading adapters exists; the request has an empty name, which changes nothing."""
        response = self._send("POST", "/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""})
        return response.status_code != httpx.codes.NOT_FOUND

    def logprob_gap(self, model: str, temperature: float) -> float | None:
        """log p(first) - log p(second) of the two likeliest first tokens after a fixed prompt; None if not sent."""
        body = {"model": model, "prompt": "The", "max_tokens": 1, "seed": 0, "temperature": temperature, "logprobs": 2}
        return self._request_value("POST", "/v1/completions", body, read=_completion_to_gap)

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            return self._http.request(method, path, json=body)
        except _NO_ANSWER as error:
            raise ServingError(f"model server {self.url}{path}: {str(error) or type(error).__name__}") from error

    def _request_value(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, read: Callable[[Any], _Value]
    ) -> _Value:
        """What `read` makes of the JSON of a successful response; any server may answer 200, with anything.

        Raises:
            ServingError: as `_request`, or the answer is no JSON or has another shape than vLLM's.
        """
        response = self._request(method, path, body)
        try:
            return read(read_json(response.content))
        except (ValueError, LookupError, TypeError, AttributeError):
            excerpt = " ".join(response.text.split())[:80]
            raise ServingError(
                f"model server {self.url}{path} did not answer as vLLM does, but with {excerpt!r}; is it one?"
            ) from None

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        """A successful response. Raises ServingError for any other."""
        response = self._send(method, path, body)
        if response.is_success:
            return response
        address = f"{self.url}{path}"
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise ServingError(f"model server {address} refuses the API key")
        raise ServingError(f"model server {address} answered {response.status_code}: {_error_text(response)}")


def _cards_to_models(content: Any) -> dict[str, str | None]:
    return {str(card["id"]): card.get("root") if card.get("parent") else None for card in content["data"]}


def _completion_to_gap(content: Any) -> float | None:
    choice = content["choices"][0]
    top = sorted(((choice.get("logprobs") or {}).get("top_logprobs") or [{}])[0].values(), reverse=True)
    return float(top[0] - top[1]) if len(top) >= 2 else None


def _error_text(response: httpx.Response) -> str:
    """The server's own message on one line, cut to 600 characters."""
    try:
        content = read_json(response.content)
        text = str(content["error"]["message"] if "error" in content else content.get("detail", content))
    except (ValueError, KeyError, TypeError, AttributeError):
        text = response.text
    wrapped = _WRAPPED_REASON.search(text)  # vLLM hides the reason behind two sentences about its own processes
    return " ".join((wrapped[1] if wrapped else text).split())[:600] or "no message"
