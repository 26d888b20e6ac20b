"""Adapter folders and questions -> HTTP requests to a vLLM server, and its answers -> values or one clear error.

Invariant: the server is only ever sent the real path of a folder inside the adapter root that holds safetensors
weights. vLLM itself accepts any absolute path, would download a relative one, and falls back to pickle weights.
It does not know who started the server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from safetensors import SafetensorError, safe_open

from marft_bridge.errors import ServingError

_NAME = re.compile(r"[A-Za-z0-9._@-]+")
_PICKLES = {".bin", ".pt", ".pth", ".pkl"}


def checked_adapter_name(name: str) -> str:
    """`name` as it is; ServingError when the server would read more than a name in it."""
    if not _NAME.fullmatch(name):
        raise ServingError(f"adapter name {name!r} may hold only letters, digits and . _ @ -")
    return name


def checked_adapter_folder(folder: Path, root: Path, served_modules: tuple[str, ...] | None) -> Path:
    """The real path of an adapter folder that is safe to send.

    Args:
        root: the folder that adapters must lie in, symbolic links followed.
        served_modules: the linear layers that the server wraps, None for all. vLLM drops the weights of other
            layers without a word, so such an adapter is refused here.

    Raises:
        ServingError: what is wrong with the folder.
    """
    real_root, real = root.resolve(), folder.resolve()
    if real == real_root or not real.is_relative_to(real_root):
        raise ServingError(f"adapter path {str(real)!r} is not inside the adapter root {str(real_root)!r}")
    if not real.is_dir():
        raise ServingError(f"adapter path {str(real)!r} does not exist")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        file = (real / name).resolve()
        if not file.is_file():
            raise ServingError(f"adapter {str(real)!r} has no {name}")
        if not file.is_relative_to(real_root):
            raise ServingError(f"{name} of adapter {str(real)!r} points outside the adapter root")
    pickles = sorted(file.name for file in real.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise ServingError(f"adapter {str(real)!r} holds {pickles[0]}: pickle files are not served; remove it")
    beyond = sorted(adapter_modules(real / "adapter_model.safetensors") - set(served_modules)) if served_modules else []
    if served_modules and beyond:
        raise ServingError(
            f"adapter {str(real)!r} changes {', '.join(beyond)}, but the server was started for "
            f"{', '.join(served_modules)} only; add them to lora_target_modules"
        )
    return real


def adapter_modules(weights: Path) -> set[str]:
    """Names of the linear layers that have a LoRA pair in this file, without their place in the model."""
    try:
        with safe_open(weights, framework="numpy") as file:
            names = list(file.keys())
    except SafetensorError as error:
        raise ServingError(f"{str(weights)!r} is not a safetensors file ({error})") from error
    return {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in names if ".lora_" in name}


class EngineClient:
    """A vLLM server's HTTP interface, as far as serving adapters needs it. Safe to share between threads.

    Args:
        url: base address without `/v1`.
        api_key: bearer token; None for a server without one.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float = 120.0) -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # trust_env=False: a proxy from the environment must not see the key or the traffic to this machine.
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def healthy(self) -> bool:
        """Whether the server answers that it is up. Waits two seconds at most, raises nothing."""
        try:
            return self._http.get("/health", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def models(self) -> dict[str, str | None]:
        """Served name -> path of the adapter, or None for the base model."""
        cards = self._asked("GET", "/v1/models").json().get("data", [])
        return {card["id"]: card.get("root") if card.get("parent") else None for card in cards}

    def load_adapter(self, name: str, folder: Path) -> None:
        """Serve `folder` (already checked) as `name`, which must be new: vLLM keys its prefix cache by name."""
        self._asked("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> None:
        """Take `name` out of service; its memory is reused when the engine needs it."""
        self._asked("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def can_load_adapters(self) -> bool:
        """Whether the route for loading adapters exists; asked with an empty name, which changes nothing."""
        answer = self._sent("POST", "/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""})
        return answer.status_code != httpx.codes.NOT_FOUND

    def logprob_gap(self, model: str, temperature: float) -> float | None:
        """log p(first) - log p(second) of the two likeliest first tokens after a fixed prompt; None if not told."""
        body = {"model": model, "prompt": "The", "max_tokens": 1, "seed": 0, "temperature": temperature, "logprobs": 2}
        choices = self._asked("POST", "/v1/completions", body).json()["choices"]
        top = sorted(((choices[0].get("logprobs") or {}).get("top_logprobs") or [{}])[0].values(), reverse=True)
        return top[0] - top[1] if len(top) >= 2 else None

    def _sent(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            return self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ServingError(f"model server {self.url}{path}: {str(error) or type(error).__name__}") from error

    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        answer = self._sent(method, path, body)
        if answer.is_success:
            return answer
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise ServingError(f"model server {self.url}{path} refuses the API key")
        raise ServingError(f"model server {self.url}{path} answered {answer.status_code}: {_message(answer)}")


def _message(answer: httpx.Response) -> str:
    """The server's own words on one line."""
    try:
        said = answer.json()
        text = str(said["error"]["message"] if "error" in said else said.get("detail", said))
    except (ValueError, KeyError, TypeError, AttributeError):
        text = answer.text
    return " ".join(text.split())[:600] or "no message"
