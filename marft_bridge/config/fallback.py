"""`[fallback]` of bridge.toml: who answers a live call that the local model fails to answer as its request asks.

Invariant: nothing is sent to another machine unless `allow_remote` says so, and a key only over TLS.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from marft_bridge.common.addresses import refuse_address


class FallbackJudgeOptions(BaseModel):
    """A judge that reads local answers before they go out, by the rubric of their node."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    base_url: str
    """Up to and with /v1: an OpenAI-compatible server."""
    model: str = Field(min_length=1)
    """Name of the judge at `base_url`."""
    rubrics: dict[str, str] = Field(min_length=1)
    """What the answers of each node are graded by: a text. Answers of a node that is not named are not judged."""
    below: float = Field(allow_inf_nan=False)
    """An answer with a lower score falls back to the hosted model."""
    lowest: float = Field(0.0, allow_inf_nan=False)
    """The worst score of the scale that the judge is told."""
    highest: float = Field(10.0, allow_inf_nan=False)
    """The best one."""
    unjudged: Literal["hosted", "local"] = "hosted"
    """Whose answer goes out where the judge gives no score: late, not reached, in another form."""
    after_s: float = Field(10.0, gt=0, allow_inf_nan=False)
    """Seconds that the judge may take, besides those of the local model. It is asked once."""
    max_tokens: int = Field(512, ge=1)
    """Of the judge's reply."""
    api_key_env: str | None = Field(None, min_length=1)
    """Environment variable with the key of `base_url`."""
    allow_remote: bool = False
    """Whether `base_url` may be another machine, which then sees the prompts and answers of these nodes."""

    @model_validator(mode="after")
    def _check_address_and_scale(self) -> FallbackJudgeOptions:
        has_key = self.api_key_env is not None
        refuse_address(self.base_url, remote=self.allow_remote, key=has_key, seen="the prompts and answers")
        if not self.base_url.rstrip("/").endswith("/v1"):
            raise ValueError("base_url: it ends with /v1")
        if not self.lowest < self.below <= self.highest:
            raise ValueError("below: a score above lowest, and at most highest; any other replaces nothing, or all")
        if empty_nodes := sorted(node for node, rubric in self.rubrics.items() if not rubric.strip()):
            raise ValueError(f"rubrics.{empty_nodes[0]}: the rubric is empty")
        return self

    @property
    def call_s(self) -> float:
        """Seconds for its reply."""
        return self.after_s

    @property
    def retries(self) -> int:
        """None: a client waits."""
        return 0


class FallbackOptions(BaseModel):
    """A hosted model behind the local one, for the traffic of `serve --split` and `serve --mirror`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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
    judge: FallbackJudgeOptions | None = None
    """A judge of the local answers; without it only time and format decide."""

    @model_validator(mode="after")
    def _check_address(self) -> FallbackOptions:
        has_key = self.api_key_env is not None
        refuse_address(self.base_url, remote=self.allow_remote, key=has_key, seen="the prompts")
        if not self.base_url.rstrip("/").endswith("/v1"):
            raise ValueError("base_url: it ends with /v1")
        if self.judge is not None and (unknown_nodes := sorted(set(self.judge.rubrics) - set(self.models))):
            raise ValueError(f"judge.rubrics.{unknown_nodes[0]}: not in models, so it has nothing to fall back to")
        return self
