"""`[fallback]` of bridge.toml: who answers a live call that the local model fails to answer as its request asks.

Invariant: nothing is sent to another machine unless `allow_remote` says so, and a key only over TLS.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from marft_bridge.common.addresses import refuse_address


class FallbackOptions(BaseModel):
    """A hosted model behind the local one, for the traffic of `serve --split` and `serve --mirror`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    """Up to and with /v1: an OpenAI-compatible server."""
    models: dict[str, str] = Field(min_length=1)
    """The model at `base_url` that answers in place of each node. A node that is not named has no fall-back."""
    api_key_env: str | None = Field(None, min_length=1)
    """Environment variable with the key of `base_url`."""
    allow_remote: bool = False
    """Whether `base_url` may be another machine, which then sees the prompts of the calls that fall back."""
    after_s: float = Field(30.0, gt=0, allow_inf_nan=False)
    """Seconds that the local model may take: to the first piece of a stream that declares no format, else to the end of
    the answer."""

    @model_validator(mode="after")
    def _check_address(self) -> FallbackOptions:
        has_key = self.api_key_env is not None
        refuse_address(self.base_url, remote=self.allow_remote, key=has_key, seen="the prompts")
        if not self.base_url.rstrip("/").endswith("/v1"):
            raise ValueError("base_url: it ends with /v1")
        return self
